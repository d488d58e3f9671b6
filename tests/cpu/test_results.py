"""Figures for people come from data: the README's tables are what profiling/readme.py makes of profiling/results."""

import json
import subprocess
import sys
from pathlib import Path


def test_readme_has_the_figures_of_the_results(root: Path) -> None:
    checked = subprocess.run(
        [sys.executable, "profiling/readme.py", "--check"], cwd=root, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


def test_every_result_has_its_machine_line(root: Path) -> None:
    files = sorted((root / "profiling" / "results").glob("*.json"))
    assert files
    for path in files:
        assert "kernels" in json.loads(path.read_text())["machine"], path
