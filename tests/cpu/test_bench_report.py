"""Tables and files of benchmarks."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from profiling.bench import report


@dataclass
class Result:
    name: str
    ms: float | None = None
    red: str = ""


def test_a_file_that_cannot_be_written_costs_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError("no space left")

    run = report.Run("bench", tmp_path / "x.json", lambda: {"machine": "m", "arguments": {}})
    with monkeypatch.context() as patched:
        patched.setattr("twell._files.write_text", full)
        run.add([Result("a", 1.0)])
        run.measure(lambda: run.add([Result("b", 2.0)]))
    # said once
    assert capsys.readouterr().err.count("x.json cannot be written: no space left") == 1
    assert run.status() == 2
    run.add([Result("c", math.inf, red="wrong")])
    text = (tmp_path / "x.json").read_text()
    rows = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["rows"]
    assert (run.status(), len(rows), rows[-1]) == (1, 3, {"name": "c", "ms": None, "red": "wrong"})
