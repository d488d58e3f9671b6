"""Several processes: two over gloo, and the same tests over NCCL where two GPUs are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch


@pytest.fixture(params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., list[Any]]:
    """``two(function, *arguments)`` returns the results of ``function(device, *arguments)`` on two ranks."""
    backend: str = request.param
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return lambda function, *arguments: ranks.run(2, function, *arguments, folder=tmp_path, backend=backend)


@pytest.fixture
def cpu_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """``cpu_ranks(world, function, *arguments)``: the same on any number of ranks of the CPU."""
    return lambda world, function, *arguments: ranks.run(world, function, *arguments, folder=tmp_path)
