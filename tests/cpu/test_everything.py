"""profiling/everything.py: which results are old, and how their commands run within a budget, stop and go on."""

import json
import shlex
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import twell
from profiling import everything
from profiling.everything import Measurement

# Writes its second argument into its first, after a count of its calls.
SCRIPT = """
import pathlib, sys, time
out, text, status = sys.argv[1:4]
calls = pathlib.Path(out).with_suffix(".calls")
calls.write_text(str(int(calls.read_text()) + 1 if calls.exists() else 1))
if "sleep" in sys.argv:
    time.sleep(60)
if text:
    pathlib.Path(out).write_text(text)
sys.exit(int(status))
"""


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``add(name, (text, status, ...), ...)`` adds a measurement with a command for each text; there are no others."""
    (tmp_path / "write.py").write_text(SCRIPT)
    known: list[Measurement] = []
    monkeypatch.setattr(everything, "ALL", known)
    monkeypatch.setattr(everything, "RESULTS", tmp_path / "results")

    def make(name: str, *commands: tuple[Any, ...], more: str = "", seconds: int = 5, **options: Any) -> None:
        words = tuple(
            f"python {tmp_path / 'write.py'} $OUT {shlex.join([str(word) for word in given])}{more}"
            for given in commands
        )
        known.append(Measurement(name, "", "", words, (seconds,) * len(words), **options))

    return make


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, dict[str, Any]]]:
    """A function that runs the program: its exit status, what it said, and the results so far."""

    def call(*words: str) -> tuple[int, str, dict[str, Any]]:
        out = tmp_path / "out"
        status = everything.main([*words, "--out", str(out)])
        printed = capsys.readouterr()
        found = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json")) if path.stem != "done"}
        return status, printed.out + printed.err, found

    return call


def calls(tmp_path: Path, name: str) -> int:
    path = tmp_path / "out" / f"{name}.calls"
    return int(path.read_text()) if path.exists() else 0


def test_every_published_file_is_listed_once() -> None:
    names = [each.name for each in everything.LISTED]
    assert len(names) == len(set(names))
    published = {path.stem for path in everything.RESULTS.glob("*.json")}
    assert {each.name for each in everything.LISTED if each.kind == "frozen"} <= published <= set(names)
    for each in everything.ALL:
        assert 0 < len(each.commands) == len(each.seconds), each.name
        known = {"OUT", "FOLDER", "BUDGET", "REAL"}
        used = {match["named"] for match in string.Template.pattern.finditer(" ".join(each.commands))}
        assert used <= known, each.name
        assert used & {"OUT", "FOLDER"}, each.name


def test_results_are_made_in_order_and_once(add: Callable[..., None], run: Callable[..., Any], tmp_path: Path) -> None:
    add("a", ('{"n": 1}', 0))
    add("b", ("", 0), ('{"n": 2}', 0))
    status, said, found = run()
    assert (status, found) == (0, {"a": {"n": 1}, "b": {"n": 2}})
    assert said.index("everything: a: command 1 of 1") < said.index("everything: b: command 1 of 2")
    assert run()[0] == 0
    assert (calls(tmp_path, "a"), calls(tmp_path, "b")) == (1, 2)


def test_what_does_not_fit_is_left_for_the_next_call(
    add: Callable[..., None], run: Callable[..., Any], tmp_path: Path
) -> None:
    add("long", ("{}", 0), seconds=1000)
    add("short", ("{}", 0))
    status, said, found = run("--budget-s", "100")
    assert (status, list(found)) == (3, ["short"])
    assert "left for the next call: long" in said
    assert run("--budget-s", "2000")[0] == 0
    assert (calls(tmp_path, "long"), calls(tmp_path, "short")) == (1, 1)


def test_red_results_are_kept_and_faults_repeated(
    add: Callable[..., None], run: Callable[..., Any], tmp_path: Path
) -> None:
    add("red", ("{}", 1))
    add("fault", ("", 1))
    add("request", ("", 2))
    add("good", ("{}", 0))
    for _ in range(2):
        status, said, found = run()
        assert status == 1
        assert "failed or red: red, fault, request" in said
        assert sorted(found) == ["good", "red"]
    assert {name: calls(tmp_path, name) for name in ("red", "fault", "request", "good")} == {
        "red": 1,
        "fault": 2,
        "request": 2,
        "good": 1,
    }


def test_inputs_that_are_missing(add: Callable[..., None], run: Callable[..., Any], tmp_path: Path) -> None:
    add("real", ("{}", 0), more=" $REAL")
    status, said, found = run()
    assert (status, found) == (0, {})
    assert "left out, as they need --real: real" in said
    add("plain", ("{}", 0))
    said = "profiling.everything: error: real needs --real\n"
    # before anything runs
    assert run("plain", "real") == (2, said, {})
    assert list(run("--real", str(tmp_path))[2]) == ["plain", "real"]
    assert "NAME must be one of real, plain, got nothing" in run("nothing")[1]


def test_the_list_has_what_is_older(
    add: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(everything, "present", lambda: "0123456789ab")
    for name in ("old", "new", "missing", "host", "host now", "dated"):
        kind = name.partition(" ")[0]
        add(name, ("{}", 0), kind=kind if kind in ("host", "dated") else "")
    (tmp_path / "results").mkdir()
    now, version = "0123456789ab", twell.__version__
    for name, kernels, of in (
        *(("old", "ba9876543210", version), ("new", now, "0.1.0")),
        *(("host", now, "0.1.0"), ("host now", now, version)),
        ("dated", "ba9876543210", "0.1.0"),
    ):
        text = json.dumps({"machine": f"NVIDIA H200; twell {of}; kernels {kernels}; commit 1"})
        (tmp_path / "results" / f"{name}.json").write_text(text)
    assert everything.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == ["old", "missing", "host", "in"]
    assert lines[0].endswith("of kernels ba9876543210")
    assert lines[1].endswith("not measured yet")
    # what the host costs depends on more than kernels
    assert lines[2].endswith("of kernels 0123456789ab, version 0.1.0")
    assert "15 s in all; kernels 0123456789ab" in lines[3]
