"""The command line: help, version, exact errors, exit codes."""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import twell
from twell.commands import cli, demo


def exit_of(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    return stopped.value.code


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of("--version") == 0
    assert capsys.readouterr().out == f"twell {twell.__version__}\n"


def test_another_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of("dance") == 2
    assert "invalid choice: 'dance'" in capsys.readouterr().err


def test_alone_it_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    printed = capsys.readouterr().err
    assert all(f"\n    {name} " in printed for name in ("demo", "analyze", "tune", "info"))


def test_arguments_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(demo, "run", lambda given: seen.append(given) or 7)
    assert cli.main("demo --text t --seconds 2 --steps 3 --seed 4 --device cpu".split()) == 7
    (given,) = seen
    assert (str(given.text), given.device, given.seconds, given.steps, given.seed) == ("t", "cpu", 2.0, 3, 4)


def test_what_reading_may_raise_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """It was a traceback of PermissionError."""

    def refuse(path: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied", str(path))

    (folder := tmp_path / "folder").mkdir()
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert cli.main(["demo", "--text", str(folder), "--steps", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("twell demo: error: ")
    assert str(folder) in line


def test_a_home_of_no_user_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TWELL_CACHE_DIR", "~no-such-user/twell")
    assert cli.main(["info"]) == 0
    assert "TWELL_CACHE_DIR can name a folder instead of '~no-such-user/twell'" in capsys.readouterr().out


def as_module(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "twell", *arguments]
    return subprocess.run(command, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


def test_runs_as_a_module() -> None:
    done = as_module("--version")
    assert (done.returncode, done.stdout) == (0, f"twell {twell.__version__}\n")
