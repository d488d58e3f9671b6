"""The table of seeded faults fits the tree, and its runner tells what is found from what is not."""

import ast
import subprocess
from pathlib import Path

from tests.faults import __main__ as runner
from tests.faults.faults import FAULTS, ROOT, apply


def test_every_fault_fits_the_tree(tmp_path: Path, c_compiler: list[str]) -> None:
    assert len(FAULTS) == len({fault.name for fault in FAULTS}) >= 44
    for fault in FAULTS:
        copy = tmp_path / fault.file
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / fault.file).read_bytes())
        apply(fault, tmp_path)
        if copy.suffix == ".py":
            ast.parse(copy.read_text())
        else:
            subprocess.run([*c_compiler, "-fsyntax-only", "-Werror", str(copy)], check=True)
        assert not fault.file.startswith("tests/")


def names_of_tests(place: Path) -> list[str]:
    paths = sorted(place.rglob("test_*.py")) if place.is_dir() else [place]
    nodes = (node for path in paths if path.is_file() for node in ast.walk(ast.parse(path.read_text())))
    return [node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def test_every_selection_has_tests() -> None:
    known: dict[str, list[str]] = {}
    for fault in FAULTS:
        places, _, words = fault.tests.partition(" -k ")
        for place in places.split():
            known[place] = known.get(place) or names_of_tests(ROOT / place)
            assert known[place], f"{fault.name}: {place} has no tests"
        for word in filter(None, words.strip('"').split(" or ")):
            # behind "and" stands a cell of a test
            word = word.partition(" and ")[0]
            assert any(word in name for place in places.split() for name in known[place]), f"{fault.name}: {word}"


def test_what_two_runs_say() -> None:
    for clean, broken, said in (
        ("passed", "failed", "found"),
        ("passed", "passed", "NOT FOUND"),
        ("failed", "failed", "cannot tell: without the fault, failed test_a"),
        ("passed", "pytest ended with 2", "cannot tell: pytest ended with 2"),
    ):
        assert runner.verdict(*(runner.Run(each, "test_a", 0.0, "") for each in (clean, broken))) == said
