"""The harness: a rank that fails or dies fails the test at once."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import Run


def fail(device: torch.device, how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raise":
            raise KeyError("of rank 1")
        os._exit(7)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "said"), [("raise", "(?s)rank 1 of 2 failed.*of rank 1"), ("die", "rank 1 of 2 failed: died: exit code 7")]
)
def test_a_rank_that_fails_ends_the_others(cpu_ranks: Run, how: str, said: str) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=said):
        cpu_ranks(2, fail, how)
    assert time.monotonic() - began < 30
