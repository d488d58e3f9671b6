"""The cases of pinned.txt: edges, and what was wrong once."""

from __future__ import annotations

from pathlib import Path

from twell.testing.case import Case

_LINES = (Path(__file__).parent / "pinned.txt").read_text().splitlines()
PINNED = [Case.of(line) for line in _LINES if line.partition("#")[0].strip()]
