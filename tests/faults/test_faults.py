"""The table of seeded faults fits the tree, and its runner tells what is found from what is not."""

import ast
import subprocess
from pathlib import Path

import pytest

from tests.faults import __main__ as runner
from tests.faults.faults import FAULTS, ROOT, Fault, apply

OF_TREE = Fault("small: half", "small.py", "x / [-2-]{+3+}", "test_small.py -k half")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "small.py").write_text("def half(x):\n    return x / 2\n\n\ndef same(x):\n    return x\n")
    (tmp_path / "test_small.py").write_text(
        "from small import half\n\ndef test_half(): assert half(4) == 2\ndef test_other(): assert half(0) == 0\n"
        "def test_bad(): assert half(4) == 9\n"
    )
    (tmp_path / "conftest.py").write_text("import sys, pathlib\nsys.path.insert(0, str(pathlib.Path(__file__).parent))")
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    return tmp_path


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


def test_what_the_runner_says(tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # these tests need none
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    cases = [
        (OF_TREE, "found"),
        (OF_TREE._replace(name="elsewhere", tests="test_small.py -k other"), "NOT FOUND"),
        (OF_TREE._replace(name="before", tests="test_small.py -k bad"), "cannot tell: without the fault, failed"),
        (
            OF_TREE._replace(name="none", tests="test_small.py -k third"),
            "cannot tell: without the fault, pytest ended with 5",
        ),
        (OF_TREE._replace(name="broken", change="x / [-2-]"), "cannot tell: pytest ended with 2"),
    ]
    assert runner.run([fault for fault, _ in cases], tree, 60) == 1
    printed = capsys.readouterr().out
    for number, (fault, said) in enumerate(cases, 1):
        assert f"{number} of 5: {fault.name}: {said}" in printed
    assert "found test_small.py::test_half (" in printed
    assert "1 of 5 faults found" in printed
    assert (tree / "small.py").read_text().count("x / 2") == 1
    assert runner.run_tests(tree, "", 0.1).outcome == "no end in 0 s"
