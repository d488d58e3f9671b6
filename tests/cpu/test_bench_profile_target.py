"""profiling/nsight/profile_target.py and the scripts around it: what a user gets who asks for what cannot be."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from profiling.nsight import profile_target

TINY = ["--device", "cpu", "--m", "8", "--n", "64", "--workload", "nnz=4", "--calls", "1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ffn", "--k", "60"], "K must be a positive multiple of 8 for the sparse kernels, got 60"),
        (["ffn", "--k", "64", "--figures", "/proc/x.json"], "'/proc/x.json'"),
        (["ffn", "--k", "64", "--trace", "/proc/deep/x.json"], "'/proc/deep'"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile_target.main([*arguments, *TINY]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("profile_target: ")]
    assert line.startswith("profile_target: error: ")
    assert message in line


def test_folders_of_files_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, trace = tmp_path / "a" / "figures.json", tmp_path / "b" / "trace.json"
    assert profile_target.main(["ffn", "--k", "64", *TINY, "--figures", str(figures)]) == 0
    assert profile_target.main(["ffn", "--k", "64", *TINY, "--trace", str(trace)]) == 0
    assert figures.exists()
    assert trace.exists()
    assert "1 call of ffn" in capsys.readouterr().out


def test_a_dry_run_says_where_the_csv_goes(root: Path, tmp_path: Path) -> None:
    command = [str(root / "profiling" / "nsight" / "ncu.sh"), "ffn", "--dry-run", "--no-floor", "-o", "out/a b"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env=os.environ)
    _, export, table = done.stdout.splitlines()
    assert export.endswith("--csv --page raw >out/a\\ b.csv")
    assert "out/a\\ b.csv" in table
    assert not list(tmp_path.iterdir())
