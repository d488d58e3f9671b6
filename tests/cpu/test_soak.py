"""tests/soak.py on the CPU: it repeats, goes on by numbers, and finds wrong results, other bits and growing memory."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import soak
from tests.cases.drawn import Limits, draw

SHORT = ("--device", "cpu", "--threads", "2", "--calls", "2", "--settle", "1")
# minutes of a few rounds
FEW = "0.02"


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any], str]]:
    def call(*words: str) -> tuple[int, dict[str, Any], str]:
        path = tmp_path / "soak.json"
        status = soak.main([*SHORT, "--minutes", FEW, *words, "--json", str(path)])
        printed = capsys.readouterr()
        return status, json.loads(path.read_text()), printed.out + printed.err

    return call


def test_cases_are_called_checked_and_counted(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = soak.repeat
    monkeypatch.setattr(soak, "repeat", lambda case, *more: (seen.append(case), plain(case, *more)))
    status, found, said = run("--first", "40")
    assert status == 0
    assert found["wrong"] == []
    assert found["cases"] == 2 * found["rounds"] == len(seen)
    assert found["calls"] == 3 * found["cases"]
    limits = Limits.of("cpu")
    assert set(seen) == {draw(1, number, limits) for number in range(40, found["next"])}
    assert f"goes on with --seed 1 --first {found['next']}" in said
    assert found["host_mb"]["settled"] > 50
    assert "torch" in found["machine"]
    # another call goes on behind these
    first = list(seen)
    seen.clear()
    run("--first", str(found["next"]))
    assert not {*seen} & {*first}


def test_a_result_that_changes_is_found(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = soak.caller

    def drifting(*given: Any) -> Callable[[], dict[str, torch.Tensor]]:
        call, calls = plain(*given), itertools.count(1)
        return lambda: {name: t + 1 if next(calls) == 3 else t for name, t in call().items()}

    monkeypatch.setattr(soak, "caller", drifting)
    status, found, said = run("--minutes", "1")
    assert status == 1
    assert "WRONG " in said
    assert all("Mismatch: call " in wrong for wrong in found["wrong"])


def test_memory_that_grows_is_found(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, where in (("gpu_bytes", "GPU"), ("host_bytes", "host")):
        rounds = itertools.count(1)
        with monkeypatch.context() as patch:
            patch.setattr(soak, name, lambda *_, rounds=rounds: 10**9 * next(rounds))
            status, found, said = run("--minutes", "1", "--grow-mb", "1500", "--grow-host-mb", "1500")
        # one settling round at 1 GB; 2 GB are allowed, 3 are not
        assert (status, found["rounds"]) == (1, 3)
        assert f"memory of the {where} grew from 1000 to 3000 MB" in said
