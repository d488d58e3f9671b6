"""The harness: results of ranks come back; a rank that fails, dies or hangs fails the test at once."""

from __future__ import annotations

import os
import time

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import Run


def add_up(device: torch.device, value: int) -> tuple[int, int]:
    total = torch.tensor(value + dist.get_rank(), device=device)
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def fail(device: torch.device, how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raise":
            raise KeyError("of rank 1")
        if how == "die":
            os._exit(7)
        time.sleep(1000)
    dist.barrier()


def test_results_of_ranks(two: Run) -> None:
    assert two(add_up, 20) == [(0, 41), (1, 41)]


@pytest.mark.parametrize(
    ("how", "said"), [("raise", "(?s)rank 1 of 2 failed.*of rank 1"), ("die", "rank 1 of 2 failed: died: exit code 7")]
)
def test_a_rank_that_fails_ends_the_others(cpu_ranks: Run, how: str, said: str) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=said):
        cpu_ranks(2, fail, how)
    assert time.monotonic() - began < 30


def test_a_rank_that_hangs_tells_where(cpu_ranks: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "PATIENCE_S", 2.0)
    with pytest.raises(AssertionError, match=r"(?s)still run after 2 s.*in fail"):
        cpu_ranks(2, fail, "hang")
