"""What `make lint` runs, beside the other tests."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("command", ["ruff check", "ruff format --check", "mypy"])
def test_lint(command: str, root: Path) -> None:
    pytest.importorskip(command.split()[0], reason="the extra dev is not installed")
    done = subprocess.run([sys.executable, "-m", *command.split()], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
