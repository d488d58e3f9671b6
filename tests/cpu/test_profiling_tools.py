"""Profiling without a GPU: the profiled program, its scripts, checks of results."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from profiling import parallel
from profiling.nsight import profile_target

ROOT = Path(__file__).resolve().parents[2]

DENSE_AND_SPARSE = (("dense", 3.0), ("sparse", 2.0))

TINY = ["--device", "cpu", "--m", "130", "--k", "64", "--n", "264", "--workload", "nnz=10,skew=1"]


class TestTarget:
    def test_every_operator_runs(self, capsys: pytest.CaptureFixture[str]) -> None:
        every = ",".join((*profile_target.OPS, *profile_target.KERNELS))
        assert profile_target.main([every, *TINY, "--calls", "1", "--warm-up", "1"]) == 0
        assert capsys.readouterr().out == (
            f"profile_target: 1 call of {every.replace(',', ', ')}: nnz=10,skew=1, 130 tokens\n"
        )


# Scripts

TOOL = """#!/usr/bin/env bash
# stands for a profiler: notes its arguments, runs the program, leaves a report
echo "{name} $*" >>{log}
output='' program=()
while [ $# -gt 0 ]; do
  case $1 in
    --import | stats) exit ;;
    --export | --output) output=$2; shift ;;
    */python* | true) program=("$@"); break ;;
  esac
  shift
done
"${{program[@]}}"
{leave}
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for PATH, with the shell's own tools and no profiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "dirname", "sed", "mkdir", "rm", "cat", "env", "true", "false"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def stand_in(tools: Path, name: str, *, report: str) -> Path:
    """Put a profiler into PATH; return the file in which it logs its calls."""
    log = tools / f"{name}.log"
    leave = f'echo report >"$output{report}"' if report else ""
    tool = tools / name
    tool.write_text(TOOL.format(name=name, log=log, leave=leave))
    tool.chmod(0o755)
    return log


def script(
    name: str, *arguments: str, tools: Path, cwd: Path, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": str(tools), "PYTHON": python, "OMP_NUM_THREADS": "1"}
    environment.pop("TWELL_NVTX", None)
    command = [str(ROOT / "profiling" / "nsight" / name), *arguments]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=600)


class TestScripts:
    def test_ncu(self, tools: Path, tmp_path: Path) -> None:
        log = stand_in(tools, "ncu", report=".ncu-rep")
        arguments = ["up_down", *TINY, "--launch-skip", "1", "--launch-count", "2", "--kernel", "up_down"]
        done = script("ncu.sh", *arguments, "-o", "out/a", "--", "--verbose", tools=tools, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        first, second = log.read_text().splitlines()
        for option in (
            *(
                "--profile-from-start off",
                "--clock-control none",
                "--cache-control all",
                "--import-source yes",
                "--nvtx",
            ),
            *("--section SpeedOfLight", "--section MemoryWorkloadAnalysis", "--section SchedulerStats"),
            *("--section WarpStateStats", "--section LaunchStats", "--section Occupancy"),
            *("--launch-skip 1", "--launch-count 2", "--force-overwrite --export out/a --verbose"),
        ):
            assert option in first
        assert first.endswith(f"{ROOT}/profiling/nsight/profile_target.py up_down {' '.join(TINY)}")
        assert second == "ncu --import out/a.ncu-rep --page details --print-summary per-kernel"
        assert [p.name for p in (tmp_path / "out").iterdir()] == ["a.ncu-rep"]
        assert done.stdout.startswith("profile_target: 3 calls of up_down")


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
