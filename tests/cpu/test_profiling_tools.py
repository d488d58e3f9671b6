"""Profiling without a GPU: the profiled program, checks of results."""

from __future__ import annotations

import math

import pytest

from profiling import parallel
from profiling.nsight import profile_target

DENSE_AND_SPARSE = (("dense", 3.0), ("sparse", 2.0))

TINY = ["--device", "cpu", "--m", "130", "--k", "64", "--n", "264", "--workload", "nnz=10,skew=1"]


def test_every_operator_runs(capsys: pytest.CaptureFixture[str]) -> None:
    every = ",".join((*profile_target.OPS, *profile_target.KERNELS))
    assert profile_target.main([every, *TINY, "--calls", "1", "--warm-up", "1"]) == 0
    said = f"profile_target: 1 call of {every.replace(',', ', ')}: nnz=10,skew=1, 130 tokens\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("loss", "norm", "red"), [(2.01, 1.04, ""), (2.03, 1.0, "loss"), (2.0, 1.06, "norm"), (2.0, math.nan, "norm")]
)
def test_a_step_of_several_gpus_with_another_loss_or_norm_is_red(loss: float, norm: float, red: str) -> None:
    dense, sparse = rows = [parallel.Row("ddp", f"{kind} eager", 2, 64, ms=ms) for kind, ms in DENSE_AND_SPARSE]
    dense.loss, dense.norm, sparse.loss, sparse.norm = 2.0, 1.0, loss, norm
    parallel.compare(rows)
    assert sparse.red.startswith(red)
    assert bool(sparse.red) == bool(red)
    assert (dense.speedup, sparse.speedup) == (1.0, None if red else 1.5)
