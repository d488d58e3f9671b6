"""The tables of measured costs: interpolation, measuring and fitting, a user's table, points that are held out."""

import argparse
import concurrent.futures
import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from profiling import held_out
from profiling import tune as shipped
from profiling.draw.common import loads
from profiling.figures import RESULTS
from twell import testing
from twell._runtime import device, fingerprint, specs
from twell.choose import rates
from twell.choose import rates as rules
from twell.choose import site as sites
from twell.choose.rates import Figures, Problem
from twell.commands import info, timing, tune
from twell.commands.request import RequestError

GPU = "NVIDIA H100 80GB HBM3"
MACHINE = f"{GPU} (132 SMs, 79 GiB); driver 580; torch 2.11.0"


def table_of(costs: Any, machine: str = MACHINE) -> tables.Table:
    return tables.Table(costs, machine, "2026-11-22T10:00:00+00:00")


def found(costs: Any, m: int, k: int, n: int, gated: bool = True, training: bool = False) -> dict[str, Any]:
    return rules.coefficients(Problem(m, k, n, gated, training), table_of(costs))


# Between measured layers and numbers of tokens


def test_coefficients_come_from_layers_of_the_same_kind() -> None:
    costs = {
        (False, True, 1024, 2048): {
            8: {"row": (0.1, 0.0, 0.0, 0.0)},
            32: {"row": (0.5, 0.0, 4.0, 0.0), "union": (1.0,) * 4},
        },
        (False, False, 1024, 2048): {8: {"row": (0.3, 0.0, 0.0, 0.0)}},
        (True, True, 1024, 2048): {8: {"union": (0.4, 0.0, 0.0, 0.0)}},
    }
    assert found(costs, 8, 1024, 2048)["row"][0] == pytest.approx(0.1)
    assert found(costs, 8, 4096, 16384)["row"][0] == pytest.approx(0.1)
    assert found(costs, 8, 1024, 2048, gated=False)["row"][0] == pytest.approx(0.3)
    assert found(costs, 8, 4096, 16384, training=True)["union"][0] == pytest.approx(0.4)
    assert found(costs, 8, 4096, 16384, gated=False, training=True)["union"][0] == pytest.approx(0.4)
    # interpolates in log m where both neighbours have a value; the first one below, but in training; the last above
    assert found(costs, 16, 1024, 2048) == {"row": pytest.approx((0.3, 0.0, 2.0, 0.0))}
    assert found(costs, 7, 1024, 2048) == found(costs, 0, 1024, 2048) == found(costs, 8, 1024, 2048)
    assert found(costs, 7, 1024, 2048, training=True) == {}
    assert found(costs, 1 << 20, 1024, 2048) == {
        name: pytest.approx(terms) for name, terms in costs[False, True, 1024, 2048][32].items()
    }
    # nearer layers weigh more
    costs = {(False, True, k, 4 * k): {8: {"row": (base, 0.0, 0.0, 0.0)}} for k, base in ((1024, 0.2), (4096, 0.6))}
    assert found(costs, 8, 1024, 4096)["row"][0] == pytest.approx(0.2, abs=1e-3)
    assert found(costs, 8, 2048, 8192)["row"][0] == pytest.approx(0.4)
    bases = {k: found(costs, 8, k, 4 * k)["row"][0] for k in range(512, 8192, 256)}
    inside = [base for k, base in bases.items() if 1024 <= k < 4096]
    assert inside == sorted(inside)
    assert all(0.2 <= base <= 0.6 for base in bases.values())
    assert rules.nearest(Problem(8, 2000, 8000, True, False), table_of(costs))[2] == 1024


def test_interpolation_keeps_steps_between_neighbours() -> None:
    layer: dict[int, Any] = {
        m: {"union": (base, 0.0, 0.0, 0.0)} for m, base in ((4, 1.0), (32, 1.2), (33, 2.0), (4096, 0.5))
    }

    def at(m: int) -> float:
        return float(found({(False, True, 2048, 5632): layer}, m, 2048, 5632)["union"][0])

    for low, high in ((4, 32), (33, 4096)):
        ends = sorted((layer[low]["union"][0], layer[high]["union"][0]))
        assert all(ends[0] - 1e-9 <= at(m) <= ends[1] + 1e-9 for m in (low, low + 1, (low + high) // 2, high - 1, high))
    assert at(33) - at(32) == pytest.approx(0.8)
    # a third of the way in log m
    assert at(8) == pytest.approx(1.2 / 3 + 1.0 * 2 / 3)


# A user's table


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a GPU of another model than the shipped table's."""
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(device, "name", lambda index: GPU)
    monkeypatch.setattr(device, "capability", lambda index: device.SM_90)
    forget()
    yield tmp_path / "cache" / "tuning"
    forget()


def forget() -> None:
    tables._on.cache_clear()
    tables._of_gpu.cache_clear()


OWN: Any = {(False, True, 1536, 4096): {64: {"row": (0.25, 0.0, 5.0, 0.0)}}}
CUDA = torch.device("cuda", 0)


def test_a_users_table_serves_its_gpu(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert rates.in_use(CUDA) is rates.in_use(torch.device("cpu")) is rates.SHIPPED
    assert not folder.exists()
    assert not caplog.records
    path = rates.write(table_of(OWN))
    forget()
    assert path == folder / "NVIDIA_H100_80GB_HBM3.json"
    table = rates.in_use(CUDA)
    assert (table.file, table.gpu, table.date) == (path, GPU, "2026-11-22T10:00:00+00:00")
    assert {key for key in table.costs if key[:2] == (False, True)} == set(OWN)
    assert table.costs[False, True, 1536, 4096] == OWN[False, True, 1536, 4096]
    # kinds that were not measured are the shipped ones
    assert {key for key in table.costs if key[0]} == {key for key in rates.SHIPPED.costs if key[0]}
    problem = Problem(64, 1536, 4096, True, False)
    decision = rules.decide(problem, Figures(10, None), None, table)
    assert decision.costs["row"] == pytest.approx(0.25 + 5 * 10 / 4096)
    assert rules.decide(problem, Figures(10, None), None).costs != decision.costs
    # another model has another file
    assert rates.read("NVIDIA GH200") is rates.SHIPPED
    # on the GPU of the shipped table own layers join its layers
    rates.write(table_of(OWN, rates.SHIPPED.machine))
    assert rates.read(rates.SHIPPED.gpu).costs == rates.SHIPPED.costs | OWN


def test_a_later_run_keeps_the_layers_of_an_earlier_one(folder: Path) -> None:
    later: Any = {(True, True, 1536, 4096): {1024: {"union": (0.5, 0.0, 0.0, 0.0)}}}
    rates.write(table_of(OWN))
    path = rates.write(table_of(later))
    assert tables.parse(path.read_text()).costs == OWN | later
    # but not those of other kernels, nor of a damaged file
    path.write_text(path.read_text().replace(fingerprint.source_hash(), "0" * 64))
    assert tables.parse(rates.write(table_of(later)).read_text()).costs == later
    path.write_text("{")
    assert tables.parse(rates.write(table_of(OWN)).read_text()).costs == OWN
    assert [each.name for each in path.parent.glob("*.json")] == [path.name]
    # fewer numbers of tokens do not replace those that are known
    some: Any = {key: dict(list(by_tokens.items())[:1]) for key, by_tokens in OWN.items()}
    assert tables.parse(rates.write(table_of(some)).read_text()).costs == OWN


def test_processes_that_write_at_once_lose_nothing(folder: Path) -> None:
    layers: list[Any] = [{(True, True, 8 * i, 4096): {64: {"union": (0.5, 0.0, 0.0, 0.0)}}} for i in range(1, 9)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda costs: rates.write(table_of(costs)), layers))
    assert len(tables.parse(paths[0].read_text()).costs) == len(layers)


def changed(**entries: Any) -> str:
    return json.dumps(json.loads(tables.text_of(table_of(OWN), "0123")) | entries)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no table"),
        ("[]", "no table"),
        ("\xff", "no table"),
        (changed(layers=[{}]), "'k'"),
        (changed(layers=3), "no table"),
        (changed(machine="NVIDIA GH200 (132 SMs)"), f"it must be of {GPU}, got NVIDIA GH200"),
        (changed(layers=[]), "it must have layers, got none"),
        ("[" * 200_000, "no table"),
        (json.dumps({key: value for key, value in json.loads(changed()).items() if key != "kernels"}), "'kernels'"),
        (tables.text_of(table_of(OWN)).replace("0.25", "-1"), "costs must be from 0 to 1e9"),
        (tables.text_of(table_of(OWN)).replace("0.25", "NaN"), "costs must be from 0 to 1e9"),
        (tables.text_of(table_of(OWN)).replace("0.25", "1e308"), "costs must be from 0 to 1e9"),
        (tables.text_of(table_of(OWN)).replace("0.25", "1" + "0" * 400), "no table"),
        (tables.text_of(table_of(OWN)).replace("1536", "1" + "0" * 400), "sizes must be integers"),
        (re.sub('("gated": )(true|false)', '\\1"\\2"', changed()), "training and gated must be true or false"),
        (changed(layers=[json.loads(changed())["layers"][0] | {"tokens": {}}]), "a layer must have numbers of tokens"),
        (tables.text_of(table_of(OWN)).replace('"row"', '"auto"'), "strategies must be among row, union"),
        (tables.text_of(table_of(OWN)).replace("1536", "-8"), "sizes must be integers from 1"),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(
    text: str, said: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = rates.write(table_of(OWN))
    path.write_text(text, encoding="latin-1")
    for index in (0, 1, 0):
        table = rates.in_use(torch.device("cuda", index))
        assert table.costs is rates.SHIPPED.costs
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert said in record.message
    assert str(path) in record.message


def test_a_table_of_other_kernels_is_used_with_one_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = rates.write(table_of(OWN))
    path.write_text(changed(kernels="0" * 64))
    for index in (0, 1, 0):
        table = rates.in_use(torch.device("cuda", index))
        assert table.file == path
        assert table.costs[False, True, 1536, 4096] == OWN[False, True, 1536, 4096]
    (record,) = caplog.records
    assert record.message == f"{path} has times of other kernels: run `twell tune` again"


def test_no_driver_no_home_no_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does a pipe in its place, which nobody may wait for."""
    path = rates.write(table_of(OWN))
    path.unlink()
    os.mkfifo(path)
    assert rates.in_use(CUDA).costs is rates.SHIPPED.costs
    assert "it must be a file" in caplog.text

    def fails(*_: Any) -> Any:
        raise RuntimeError("nothing there")

    monkeypatch.setenv("TWELL_CACHE_DIR", "~no-such-user/twell")
    forget()
    assert rates.read(GPU) is rates.SHIPPED
    monkeypatch.setattr(device, "name", fails)
    assert rates.in_use(CUDA) is rates.SHIPPED


def test_a_site_decides_by_the_table_of_its_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow: Any = {(False, True, 32, 264): {1: {"row": (2e6, 0.0, 0.0, 0.0), "union": (3e6, 0.0, 0.0, 0.0)}}}
    monkeypatch.setattr(tables, "in_use", lambda on: table_of(slow))
    site = sites.AutoStrategy()
    assert site.begin(torch.zeros(40, 32), 264, True, False, False).strategy == "dense"
    assert sites.without_site(torch.zeros(40, 32), 264, True, False, False).strategy == "dense"


def test_info_names_the_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(name: str = GPU) -> str:
        devices = (device.Device(0, name, (9, 0), 132, 80 << 30), device.Device(1, "Small", (8, 9), 76, 16 << 30))
        monkeypatch.setattr(device, "describe", lambda: device.Driver((13, 0), devices))
        return "\n".join(info.lines(info.collect(), verbose=False)).partition('Table of "auto"')[2]

    ours = rates.SHIPPED.gpu
    assert f"  {ours}: shipped, measured on {ours}, {rates.SHIPPED.date[:10]}" in told(ours)
    assert '  Small: none, and "auto" is dense there until `twell tune` has measured it' in told(ours)
    assert "note:" not in told(ours)
    assert f"note: these are times of another GPU; `twell tune` measures {GPU}" in told()
    path = rates.write(table_of(OWN))
    assert f"  {GPU}: {path}, measured on {GPU}, 2026-11-22\n" in told()
    assert f"  kinds of calls: gated; the shipped times of {ours}: training, non-gated, non-gated training\n" in told()
    path.write_text(changed(kernels="0" * 64))
    assert f"note: {path} has times of other kernels: run `twell tune` again" in told()
    path.write_text("{")
    assert f'note: "auto" ignores {path}, no table' in told()


# Measuring and fitting


def waiting_rows(m: int, strategy: str = "row") -> list[dict[str, Any]]:
    """Times that depend on the heaviest tokens."""
    rows = []
    for nonzeros, heaviest in ((29, 29), (29, 60), (29, 290), (100, 120), (4, 90), (300, 300)):
        problem, figures = Problem(m, 2048, 5632, True, False), Figures(nonzeros, None, heaviest)
        row = {**problem._asdict(), **figures._asdict(), "pattern": f"{nonzeros} {heaviest}", "strategy": strategy}
        rows.append(row | {"red": "", "relative": 0.4 + 10 * nonzeros / 5632 + 6 * heaviest / 5632})
    return rows


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"m": 0}, "m, k and n must be positive integers, got [0, 2048, 5632]"),
        ({"strategy": "dense"}, "strategy must be one of row, union, union+screen, got 'dense'"),
        ({"training": True}, "strategy must be one of union, union+screen, got 'row'"),
        ({"strategy": "union+screen"}, "candidates of union+screen must be a share of the neurons, got none"),
        ({"relative": math.inf}, "relative must be a positive time over dense's, got inf"),
        ({"relative": math.nan}, "relative must be a positive time over dense's, got nan"),
        ({"relative": "1"}, "relative must be a positive time over dense's, got '1'"),
    ],
)
def test_the_fit_refuses_rows_that_nothing_measured(entries: dict[str, Any], said: str) -> None:
    rows = waiting_rows(128)
    with pytest.raises(ValueError, match=re.escape(said)):
        tune.fit([*rows, rows[0] | entries])


def test_a_layer_that_was_not_measured_to_the_end_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    steps = tune.plan([(2048, 5632)], ["gated"])
    assert tune.whole(tune.fit(waiting_rows(128)), steps) == {}
    most = max(step.m for step in steps)
    assert capsys.readouterr().out == f"left out 2048 x 5632: measured up to 128 of {most} tokens\n"
    assert list(tune.whole(tune.fit(waiting_rows(most)), steps)) == [(False, True, 2048, 5632)]


def test_shares_are_shares() -> None:
    for m, nonzeros in itertools.product((0, 1, 8, 9, 128, 1 << 20), (0, 3, 29, 5632)):
        problem = Problem(m, 2048, 5632, True, False)
        union, density, heaviest = rules.shares(problem, Figures(nonzeros, None))
        assert 0 <= density <= heaviest <= 1
        assert 0 <= union <= 1
        assert (heaviest == density) == (m <= 8 or nonzeros in (0, 5632))
        assert rules.shares(problem, Figures(nonzeros, None, 704))[2] == 704 / 5632
    for figures in (Figures(math.nan, None), Figures(-1, None), Figures(3, math.inf), Figures(3, 0, -1)):
        with pytest.raises(ValueError, match="figures must be finite and not negative, got Figures"):
            rules.decide(Problem(128, 2048, 5632, True, False), figures, None)


def test_rows_that_failed_or_were_measured_again() -> None:
    rows = waiting_rows(128)
    wrong = [{**row, "relative": 9.0, "ms": 18.0} for row in rows]
    red = [{**row, "red": "differs", "ms": None, "relative": None} for row in rows]
    assert tune.fit([*wrong, *rows, *red]) == tune.fit(rows)
    assert tune.fit(red) == tune.fit(rows[:1]) == {}
    assert tune.report({}, red) == "nothing to fit"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("{", "expected what --out wrote"),
        ("[]", "got other JSON"),
        ('{"machine": "a GPU", "date": "2026-11-21", "rows": [{"m": 1}]}', "got a row without gated, k, n"),
    ],
)
def test_files_that_tune_did_not_write(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tune.json"
    if text is not None:
        path.write_text(text)
    assert shipped.main(["--from", str(path), "--write", "--table", str(tmp_path / "table.json")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert str(path) in error
    assert not (tmp_path / "table.json").exists()


def test_the_shipped_table_is_fitted_to_the_results() -> None:
    text, found = tables.PATH.read_text(), loads((RESULTS / "tuning.json").read_text())
    assert tables.text_of(rates.SHIPPED) == text
    # by the name that version 0.2 gave it, too
    assert tables.parse(text.replace(rates.SCREENED, "screened")).costs == tune.fit(found["rows"])
    assert rates.SHIPPED.costs == tune.fit(found["rows"])
    assert (rates.SHIPPED.machine, rates.SHIPPED.date) == (found["machine"], found["date"][:10])
    assert "choices lose 0.2% on average" in tune.report(rates.SHIPPED.costs, found["rows"])


def test_figures_of_a_measured_layer() -> None:
    for m in (1, 5, 100, 300):
        problem = testing.integer_problem(m, 16, 264)
        active = testing.float64_gate(problem) != 0
        whole = m // 128 * 128
        union = active[:whole].view(-1, 128, 264).any(1).float().mean().item() if whole else None
        heaviest = max(group.sum().item() for group in active.split(8)) / min(m, 8)
        found = tune.figures_of(problem)
        assert found._replace(union=None) == Figures(active.sum().item() / m, None, heaviest)
        assert found.union == (pytest.approx(union) if whole else None)


def test_the_plan() -> None:
    steps = tune.plan()
    assert {(step.k, step.n) for step in steps} == set(tune.SHAPES)
    assert {step.kind for step in steps} == set(tune.KINDS)
    # each layer once, so that its problems are drawn once
    layers = [(step.k, step.n) for step in steps]
    assert len({layer for i, layer in enumerate(layers) if i == 0 or layer != layers[i - 1]}) == len(set(layers))
    gated = [step.m for step in steps if step.kind == "gated" and (step.k, step.n) == tune.SHAPES[-1]]
    # from the first number that is more than one pass, where that is
    assert min(gated) == specs.DECODE_TOKENS[-1] + 1
    assert len(tune.plan(table=tables.portable(rates.SHIPPED))) > len(steps)
    for step in steps:
        assert ("dense" in step.patterns) == (step.m <= tune.MOST_TOKENS_OF_DENSE and not step.problem.training)
    (one,) = tune.plan([(64, 264)], ["training"], [300], ["skew", "dense"])
    assert one == tune.Step(64, 264, "training", 300, ("skew",))
    assert one.problem == Problem(300, 64, 264, True, True)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "SHAPES", ((32, 264),))
    monkeypatch.setattr(tune, "KINDS", {"gated": (((32, 264),), (1, 33, 130)), "training": (((32, 264),), (130,))})
    some = {name: tune.PATTERNS[name] for name in ("topic", "uniform", "dense")}
    monkeypatch.setattr(tune, "PATTERNS", some)


def test_measures_and_writes(small: None, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The whole command, on a CPU whose name is that of a GPU: without time, with time for a layer, with enough."""
    monkeypatch.setattr(testing, "machine_line", lambda *_: MACHINE)
    arguments = argparse.Namespace(shape=None, kinds=["gated", "training"], budget_s=0.0)
    assert tune.tune(arguments, timing.Device()) == 1
    printed = capsys.readouterr().out
    assert "out of time before" in printed
    assert printed.endswith("\nincomplete: 0 of 2 layers; run again with --budget-s 3600\n")
    assert not list(folder.glob("*.json"))

    arguments.budget_s = 2000.0
    of_step, rows = tune.measure, []

    def first_layer(steps: Any, *arguments: Any, **others: Any) -> Any:
        rows.extend(of_step(steps, *arguments, **others))
        yield from rows[:2]

    monkeypatch.setattr(tune, "measure", first_layer)
    assert tune.tune(arguments, timing.Device()) == 1
    printed = capsys.readouterr().out
    assert '; "auto" uses it in processes that start now\nincomplete: 1 of 2 layers; ' in printed
    assert printed.endswith("run again with --budget-s 4000\n")
    assert rates.in_use(CUDA).measured == {(False, True)}

    monkeypatch.setattr(tune, "measure", lambda *_, **others: iter(rows))
    assert tune.tune(arguments, timing.Device()) == 0
    forget()
    table = rates.in_use(CUDA)
    assert {key: set(nodes) for key, nodes in table.costs.items() if key[1]} == {
        (False, True, 32, 264): {33, 130},
        (True, True, 32, 264): {130},
    }
    assert {name for nodes in table.costs[False, True, 32, 264].values() for name in nodes} == {"row", "union"}
    printed = capsys.readouterr().out
    assert "times are predicted within" in printed
    assert f'wrote {table.file}; "auto" uses it in processes that start now' in printed
    assert "incomplete" not in printed


# Tables that people send


def test_tables_that_were_sent_are_whole() -> None:
    for path in (Path(shipped.__file__).parent / "tables").glob("*.json"):
        table = tables.parse(path.read_text())
        assert path.name == rates.path_of(table.gpu).name
        for step in tune.plan():
            known = table.costs.get((step.problem.training, step.problem.gated, step.k, step.n), {})
            assert step.m in known, f"{path.name}: a layer is not measured to the end: {step}"


def test_the_generator_measures_the_same_way(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And writes a table from the rows of several files, of one GPU."""
    machine = "NVIDIA H200 (132 SMs, 140 GiB); SM 1980 MHz now, 1980 most, memory 3201 MHz, 700 W; torch 2.11.0"
    monkeypatch.setattr(tune, "gpu", lambda name: timing.Device())
    out, table, more, other = (tmp_path / name for name in ("rows.json", "table.json", "more.json", "other.json"))
    arguments = ["--out", str(out), "--kinds", "gated", "--patterns", "topic", "uniform", "--seconds", "0"]
    assert shipped.main(arguments) == 0
    data = json.loads(out.read_text())
    assert data["complete"]
    assert len(data["rows"]) == 2 * 2 * 2
    assert all(row["heaviest"] >= row["nonzeros"] for row in data["rows"])
    assert [(row["red"], row["relative"] > 0) for row in data["rows"]] == [("", True)] * 8
    date = "2026-11-21T10:00:00+00:00"
    shipped.write_json({**data, "machine": machine, "date": date}, out)
    shipped.write_json({"machine": machine, "date": date, "rows": waiting_rows(128)}, more)
    assert shipped.main(["--from", str(out), str(more), "--write", "--table", str(table)]) == 0
    assert machine in capsys.readouterr().out
    written = tables.parse(table.read_text())
    costs = tune.fit([*data["rows"], *waiting_rows(128)])
    assert (written.machine, written.date, written.costs) == (machine, "2026-11-21", costs)
    shipped.write_json({"machine": "NVIDIA H100 (132 SMs); torch 2.11.0", "date": date, "rows": []}, other)
    assert shipped.main(["--from", str(out), str(other)]) == 2
    assert "a table is for one GPU, got measurements of NVIDIA H100, NVIDIA H200" in capsys.readouterr().err


def test_needs_a_gpu_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        RequestError, match=r"--device: expected a GPU of compute capability 8\.x, 9\.x, 10\.x or 12\.x, got cpu"
    ):
        tune.gpu("cpu")
    monkeypatch.setattr(tune, "pick_device", torch.device)
    monkeypatch.setattr(device, "capability", lambda index: (7, 5))
    with pytest.raises(
        RequestError, match=r"expected a GPU of compute capability 8\.x, 9\.x, 10\.x or 12\.x, got cuda:1"
    ):
        tune.gpu("cuda:1")


# Points that are held out


def test_held_out_points_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert held_out.points() == held_out.points() != held_out.points(seed=1)
    layers = {key[2:] for key in rates.SHIPPED.costs} | set(tune.SHAPES)
    assert not layers & {(point.problem.k, point.problem.n) for point in held_out.points()}
    calls = (Problem(130, 32, 264, True, False), Problem(130, 32, 264, False, True))
    few = [held_out.Point(call, testing.Workload(9.0, neuron_sigma=1.0)) for call in calls]
    monkeypatch.setattr(tune, "gpu", lambda name: timing.Device())
    monkeypatch.setattr(held_out, "points", lambda: few)
    monkeypatch.setattr(tune, "LEAST_SCREENED", 130)
    out = tmp_path / "out.json"
    assert held_out.main(["--out", str(out), "--seconds", "0"]) == 0
    data = json.loads(out.read_text())
    assert data["complete"]
    gated, training = data["rows"]
    assert {"row_ms", "union_ms", "union+screen_ms", "dense_ms"} <= gated.keys()
    assert "row_ms" not in training
    for row in data["rows"]:
        assert 0 < row["union"] <= row["candidates"] <= 1
        times = [value for name, value in row.items() if name.endswith("_ms")]
        assert row["loss"] == row[f"{row['auto']}_ms"] / min(times) - 1
        assert row["nonzeros"] == pytest.approx(9, rel=0.3)
