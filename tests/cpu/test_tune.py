"""``twell tune``: cards of the user's own, the set, the fit and the command."""

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from profiling import tune as shipped
from twell import testing
from twell.choose import cards, rates
from twell.choose.cards import Rates
from twell.choose.rates import Figures, Problem
from twell.commands import fitting, timing, tune
from twell.commands.request import RequestError
from twell.runtime import device, fingerprint, specs

GPU = "NVIDIA H20-3e"
MACHINE = f"{GPU} (132 SMs, 79 GiB); driver 580; torch 2.11.0; kernels 0123abcd"
OWN = dataclasses.replace(cards.SHIPPED, machine=MACHINE, rates=Rates(*range(1, 1 + len(Rates._fields))))
CUDA = torch.device("cuda", 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """That of cards in an empty cache, on a GPU of another model than those that ship."""
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(device, "name", lambda index: GPU)
    monkeypatch.setattr(device, "capability", lambda index: device.SM_90)
    monkeypatch.setattr(device, "sm_count", lambda index: 132)
    cards._on.cache_clear()
    yield tmp_path / "cache" / "tuning"
    cards._on.cache_clear()


# Cards of the user's own


def test_a_users_card_serves_its_gpu(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert cards.in_use(CUDA).rates == cards.SHIPPED.rates
    assert not folder.exists()
    assert not caplog.records
    # what was not measured is what ships
    card = dataclasses.replace(OWN, kernels=fingerprint.source_hash(), float8=None)
    path = cards.write(card)
    cards._on.cache_clear()
    read = cards.in_use(CUDA)
    assert cards.as_json(read) == cards.as_json(dataclasses.replace(card, float8=cards.SHIPPED.float8))
    assert (read.file, read.note) == (folder / "NVIDIA_H20_3e.json", "")
    assert cards.read("NVIDIA GH200").rates == cards.SHIPPED.rates
    path.write_text(path.read_text().replace(card.kernels, "0" * 64))
    cards._on.cache_clear()
    assert [cards.in_use(torch.device("cuda", i)).rates for i in (0, 0)] == [card.rates] * 2
    (record,) = caplog.records
    assert record.message == f"{path} has times of other kernels: run `twell tune` again"


def changed(**entries: Any) -> str:
    return json.dumps(cards.as_json(OWN) | entries)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no rates of `twell tune`"),
        ("[]", "no rates of `twell tune`"),
        ("\xff", "no rates of `twell tune`"),
        (json.dumps({"machine": MACHINE, "layers": []}), "no rates of `twell tune`: 'date'"),
        (changed(machine="NVIDIA GH200 (132 SMs)"), f"it must be of {GPU}, sm90, got NVIDIA GH200, sm90"),
        (changed(family=specs.PORTABLE), f"it must be of {GPU}, sm90, got {GPU}, {specs.PORTABLE}"),
        (changed(family="sm70"), "family and sms must be of a GPU"),
        (changed(sms=True), "family and sms must be of a GPU"),
        (changed(rates=None), "it must have rates"),
        (changed(rates={}), "missing 30 required"),
        (changed().replace('"launch": 1.0', '"launch": NaN'), "rates must be from 1e-9 to 1e9"),
        (changed().replace('"launch": 1.0', '"launch": 0'), "rates must be from 1e-9 to 1e9"),
        (changed().replace('"launch": 1.0', '"other": 1'), "unexpected keyword"),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(
    text: str, said: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = cards.write(OWN)
    path.write_text(text, encoding="latin-1")
    assert [cards.in_use(torch.device("cuda", i)).rates for i in (0, 0)] == [cards.SHIPPED.rates] * 2
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert said in record.message
    assert str(path) in record.message


def test_no_driver_and_no_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWELL_CACHE_DIR", "~no-such-user/twell")
    assert "cannot look for rates" in cards.read(GPU).note

    def fails(*_: Any) -> Any:
        raise RuntimeError("nothing there")

    monkeypatch.setattr(device, "name", fails)
    assert cards.in_use(torch.device("cuda", 1)) is cards.SHIPPED


# The set and the fit


def test_the_plan() -> None:
    steps = tune.plan(cards.SHIPPED)
    assert len(set(steps)) == len(steps) < 150
    for kind, (shapes, counts) in tune.KINDS.items():
        own = [step.problem for step in steps if step.kind == kind]
        assert {problem[1:3] for problem in own} == set(shapes)
        assert {problem.m for problem in own} == {*counts, *(() if "training" in kind else tune.FEW)}
    for step in steps:
        assert (step.problem.m in tune.FEW) == (len(step.patterns) == 2) == rates.in_one_pass(step.problem)
        assert "dense" not in step.patterns or not step.problem.training
    few, many = Problem(8, 2048, 5632, True, False), Problem(4096, 2048, 5632, True, False)
    assert tune.sparse_routes(few, cards.SHIPPED) == ("row",)
    assert tune.sparse_routes(many, cards.SHIPPED) == ("row", "union", "union+screen")
    # a portable GPU has neither e4m3 nor one pass
    portable = dataclasses.replace(cards.SHIPPED, family=specs.PORTABLE)
    assert {step.kind for step in tune.plan(portable)} == set(tune.KINDS) - {"e4m3"}
    assert tune.sparse_routes(few, portable) == tune.sparse_routes(many, portable) == ("row", "union")


def test_the_fit_finds_the_rates_that_made_the_times() -> None:
    """Of each part from its rows alone, and whatever one of them says."""
    scaled, other = (
        Rates(*(rate * scales[i % 2] for i, rate in enumerate(cards.SHIPPED.rates)))
        for scales in ((0.8, 1.3), (1.3, 0.8))
    )
    truth = dataclasses.replace(cards.SHIPPED, rates=scaled, float8=other)
    rows = []
    for problem in (step.problem for step in tune.plan(truth)):
        for share, union, heavy in ((1 / 190, 0.08, 3.0), (1 / 60, 0.5, 1.5), (1 / 19, 0.3, 1.2)):
            figures = Figures(share * problem.n, union, heavy * share * problem.n, 1.3 * union)
            us = {route: 1e6 * time for route, time in rates.seconds(problem, figures, truth).items()}
            rows.append(fitting.Measured(problem, figures, us))

    def worst(card: cards.Card, part: str = "inference") -> float:
        own = (row for row in rows if fitting.part_of(row.problem) == part)
        return max(abs(us / row.us[route] - 1) for row in own for route, us in fitting.predicted(row, card).items())

    card = fitting.fitted(rows, cards.SHIPPED)
    assert worst(cards.SHIPPED) > 0.2
    assert worst(card) < 0.03
    assert worst(card, "training") < 0.03
    # fewer rows, which pull less
    assert worst(card, "e4m3") < 0.15
    assert all(0.85 < rate / true < 1.15 for rate, true in zip(card.rates, truth.rates))
    counts = ", ".join(
        f"{sum(fitting.part_of(row.problem) == part for row in rows)} of {part}" for part in fitting.PARTS
    )
    assert re.match(
        rf"{len(rows)} problems, {counts}: (.|\n)* choices lose 0\.\d% on average", fitting.report(rows, card)
    )
    inference = [row for row in rows if fitting.part_of(row.problem) == "inference"]
    wrong = [row._replace(us={route: 3 * us for route, us in row.us.items()}) for row in inference[::10]]
    alone = fitting.fitted([*inference, *wrong], cards.SHIPPED)
    assert worst(alone) < 0.05
    assert (alone.float8, alone.rates.step_flop) == (cards.SHIPPED.float8, cards.SHIPPED.rates.step_flop)


ROW = {**dict(zip(fitting.SIZES, (64, 2048, 5632, True, False))), "pattern": "topic", "nonzeros": 29.0, "red": {}}


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"m": 0}, "m, k and n must be positive integers, got [0, 2048, 5632]"),
        ({"row_ms": math.inf}, "times must be positive, got {"),
        ({"dense_ms": -1.0}, "times must be positive, got {"),
        ({"union": -0.1}, "figures must be finite and not negative"),
    ],
)
def test_the_fit_refuses_rows_that_nothing_measured(entries: dict[str, Any], said: str) -> None:
    row = ROW | {"dense_ms": 2.0, "row_ms": 1.0}
    red = ROW | {"dense_ms": 2.0, "m": 65, "red": {"row": "differs"}}
    # the last row of a problem counts, and none without a second time
    assert [each.us for each in fitting.usable([row, row | {"row_ms": 3.0}, red])] == [{"dense": 2000, "row": 3000}]
    with pytest.raises(ValueError, match=re.escape(said)):
        fitting.usable([row | entries])


# The command


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of 6 steps, on a CPU whose name is that of a GPU."""
    counts = {"gated": (33, 130), "e4m3": (33,), "training": (130,)}
    monkeypatch.setattr(tune, "KINDS", {kind: ((), of) for kind, of in counts.items()})
    monkeypatch.setattr(tune, "FEW", (1,))
    monkeypatch.setattr(tune, "LEAST_SCREENED", 130)
    monkeypatch.setattr(tune, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(timing, "WARM_ROUNDS", 1)
    monkeypatch.setattr(tune, "PATTERNS", {name: tune.PATTERNS[name] for name in ("uniform", "wide", "tenth", "dense")})
    monkeypatch.setattr(tune, "gpu", lambda name: timing.Device())
    monkeypatch.setattr(testing, "machine_line", lambda *_: MACHINE)


def test_measures_and_writes(small: None, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The whole command: with too little time, with enough, with routes that are wrong."""
    arguments = argparse.Namespace(shape=[(32, 272)], budget_s=0.0, device=None)
    assert tune.run(arguments) == 1
    printed = capsys.readouterr().out
    assert "out of time before" in printed
    said = "incomplete: 0 of 6 steps; run again with --budget-s 3600; no rates are written\n"
    assert printed.endswith(f"\n{said}")
    assert not list(folder.glob("*.json"))

    arguments.budget_s = 2000.0
    measure = tune.measure
    monkeypatch.setattr(tune, "measure", lambda *args, **named: measure(*args, **named, seconds=0))
    assert tune.run(arguments) == 0
    printed = capsys.readouterr().out
    assert re.search(r"130  union \S+ to \S+, union.screen \S+ to \S+\n", printed)
    card = cards.in_use(CUDA)
    assert f'wrote {card.file}; "auto" uses it in processes that start now\n' in printed
    assert "incomplete" not in printed
    assert card.file == folder / "NVIDIA_H20_3e.json"
    assert card.rates.launch != cards.SHIPPED.rates.launch
    assert (card.float8 != cards.SHIPPED.float8, card.kernels) == (True, fingerprint.source_hash())
    card.file.unlink()
    monkeypatch.setitem(tune.MOST_ERROR, True, -1.0)
    assert tune.run(arguments) == 1
    printed = capsys.readouterr().out
    assert re.search(r"130  RED uniform union differs from dense by \d+\.\d%\n", printed)
    assert printed.endswith("\nno rates are written: no route has right times of training\n")
    assert not list(folder.glob("*.json"))


def test_the_cards_that_ship_are_made_of_rows(small: None, folder: Path, tmp_path: Path, capsys: Any) -> None:
    out, other, written_to = (tmp_path / name for name in ("rows.json", "other.json", "cards.json"))
    assert shipped.main(["--shape", "32x272", "--out", str(out)]) == 0
    assert not list(folder.glob("*.json"))
    data = json.loads(out.read_text())
    assert data["complete"]
    # the last pattern of a training step may be more than its format holds
    assert [sum(row.get("float8", False) for row in data["rows"]), len(data["rows"])] in ([5, 16], [5, 17])
    capsys.readouterr()
    written_to.write_text(cards.PATH.read_text())
    for _ in range(2):
        card = shipped.card_of([shipped.read(out)])
        assert shipped.ship(card, written_to) == written_to
        written = [cards.card_of(each) for each in json.loads(written_to.read_text())]
        assert [each.gpu for each in written] == [*(each.gpu for each in cards.CARDS), GPU]
        assert (written[-1].kernels, written[-1].date) == ("0123abcd", data["date"])
    assert "times are predicted within" in capsys.readouterr().out
    assert shipped.main(["--from", str(out)]) == 0
    shipped.write_json(other, data["rows"], machine=cards.SHIPPED.machine, date="")
    assert shipped.main(["--from", str(out), str(other)]) == 2
    assert f"rates are of one GPU, got rows of NVIDIA H200 and {GPU}" in capsys.readouterr().err
    for text in ("{", "[]", '{"machine": "a GPU", "date": "2026-11-21", "rows": [{"m": 1}]}'):
        other.write_text(text)
        assert shipped.main(["--from", str(other)]) == 2
        assert f"tune: error: expected what --out wrote in {other}, got " in capsys.readouterr().err


def test_needs_a_gpu_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "capability", lambda index: (7, 5))
    for name in ("cpu", "cuda:1"):
        monkeypatch.setattr(tune, "pick_device", torch.device)
        with pytest.raises(RequestError, match=rf"expected a GPU of compute .* 10\.x or 12\.x, got {name}"):
            tune.gpu(name)
