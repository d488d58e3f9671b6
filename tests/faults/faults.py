"""The seeded faults of ``faults.txt``, and how one is put into a tree."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_CHANGED = re.compile(r"\[-(.*?)-\](?:\{\+(.*?)\+\})?|\{\+(.*?)\+\}", re.DOTALL)


class Fault(NamedTuple):
    """A defect of one file.

    name: begins with the room. change: a text that must be there exactly once, with what goes as [-old-] and what comes
    as {+new+}, as ``git diff --word-diff`` has it. tests: arguments of pytest for the tests that must find it.
    """

    name: str
    file: str
    change: str
    tests: str

    @property
    def room(self) -> str:
        return self.name.partition(":")[0]

    @property
    def old(self) -> str:
        return _CHANGED.sub(lambda found: found[1] or "", self.change)

    @property
    def new(self) -> str:
        return _CHANGED.sub(lambda found: found[2] or found[3] or "", self.change)


def apply(fault: Fault, root: Path) -> str:
    """Put the fault into the tree at ``root``; return the text of the file before. ValueError unless it fits."""
    path = root / fault.file
    if not path.is_file():
        raise ValueError(f"{fault.name}: expected a file {fault.file}, got none")
    before = path.read_text(encoding="utf-8")
    if (count := before.count(fault.old)) != 1:
        raise ValueError(f"{fault.name}: expected its old text once in {fault.file}, got {count} times")
    if fault.old == fault.new:
        raise ValueError(f"{fault.name}: expected a new text that differs from the old one")
    path.write_text(before.replace(fault.old, fault.new), encoding="utf-8")
    return before


def _read(text: str) -> Fault:
    name, file, tests, change = text.split("\n", 3)
    return Fault(name, file, change, tests)


# between empty lines: name, file, tests and change of each
FAULTS = tuple(map(_read, Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").strip("\n").split("\n\n")))
