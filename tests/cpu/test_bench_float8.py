"""``profiling.bench float8`` and what its results say, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from profiling import bench, figures, float8
from twell.strategy import costs, tables
from twell.testing import workloads

pytestmark = pytest.mark.usefixtures("one_thread")


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    sizes = ["--m", "3", "130", "--k", "64", "--n", "160", "--seconds", "0.01"]
    assert bench.main(["float8", *sizes, "--device", "cpu", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    rows = {(row["m"], row["variant"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 20
    assert found["complete"]
    assert found["copy_tbs"] > 0
    for (m, variant), row in rows.items():
        wide, dense = variant.startswith("bfloat16"), "dense" in variant
        assert row["us"] > 0
        assert not row["red"]
        assert (row["error"] is None) == wide
        # of the sparse formula, and of the layer before it was quantised
        assert wide or (0.015 < row["error"] < 0.03 if dense or row["strategy"] == "dense" else row["error"] < 0.004)
        assert row["original"] < 0.005 if wide else 0.04 < row["original"] < 0.08
        assert (row["strategy"] != "") == variant.endswith('"auto"')
        assert (row["union"] is None) == (m < 128)
        assert 20 < row["nonzeros"] < row["heaviest"] + 1
    dense = [row for (m, variant), row in rows.items() if m == 130 and variant.startswith("dense fp8")]
    assert max(row["over_dense"] for row in dense) == 1
    assert "of original weights" in capsys.readouterr().out


def test_dense_products_copy_no_weight() -> None:
    """A copy at each call would make the baseline slow."""
    from profiling.bench.float8 import Weights

    layer = Weights(workloads.load("topic29", m=8, k=64, n=160, device=torch.device("cpu")))
    assert all(record.values.is_contiguous() for record in (layer.gate, layer.up, layer.stored))
    assert layer.both[0].is_contiguous()
    # as kernels read it
    assert layer.down.values.t().is_contiguous()


def test_a_wrong_result_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from profiling.bench.float8 import Weights

    right = Weights.sparse
    monkeypatch.setattr(Weights, "sparse", lambda self, x, strategy: right(self, x, strategy) * 1.2)
    monkeypatch.setattr(Weights, "wide", lambda self, x, strategy: 1 / 0)
    out = tmp_path / "a.json"
    sizes = ["--m", "16", "--k", "64", "--n", "160", "--seconds", "0.01"]
    assert bench.main(["float8", *sizes, "--device", "cpu", "--json", str(out)]) == 1
    rows = {row["variant"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows['"row"']["us"] is None
    assert rows['"row"']["red"].startswith("error 2")
    assert rows['bfloat16 "row"']["red"].startswith("ZeroDivisionError")
    assert rows["bfloat16 dense"]["us"] > 0


# What results say


SHAPES = ((2048, 5632), (4096, 14336))


def timed(table: tables.Table) -> list[dict[str, Any]]:
    """Rows of layers that take just as long as the table says, of which dense fp8 takes 900 us."""
    rows = []
    for k, n in SHAPES:
        for m in (1, 64, 256, 1024, 8192):
            for union in (0.1, 0.3):
                sparsity = {"nonzeros": 30.0, "union": union, "heaviest": 70.0}
                problem = costs.Problem(m, k, n, True, False, float8=True)
                known = {"workload": f"w{union}", "m": m, "k": k, "n": n, "red": "", **sparsity}
                known |= {"strategy": "row", "error": 0.003, "original": 0.05}
                known["union"] = union if m >= 128 else None
                shares = costs.costs(problem, costs.Figures(*sparsity.values()), table)
                times = {f'"{name}"': 9e-4 * share for name, share in shares.items()}
                times |= {"dense fp8, one product": 1e-3, "dense fp8, two products": 9e-4, '"auto"': 3e-4}
                times |= {"bfloat16 dense": 2e-3, 'bfloat16 "row"': 6e-4, 'bfloat16 "union"': 7e-4}
                rows += [{**known, "variant": name, "us": time * 1e6} for name, time in times.items()]
    return rows


def test_the_table_of_auto_follows_from_rows(tmp_path: Path) -> None:
    slow = {"row": (9.0, 0.0, 0.0, 0.0), "union": (0.5, 0.5, 0.0, 0.0), "dense": (1.2, 0.0, 0.0, 0.0)}
    table = tables.Table({(False, True, k, n): {1: slow} for k, n in SHAPES}, "GPU", "2026-01-01", float8=True)
    rows = timed(table)
    found = float8.points([*rows, {**rows[0], "us": None, "workload": "red"}])
    assert len(found) == 20
    path, written = tmp_path / "a.json", tmp_path / "table.json"
    path.write_text(json.dumps({"rows": rows, "machine": "GPU", "date": "2026-01-01T00"}))
    assert float8.main([str(path), "--table", str(written)]) == 0
    best = tables.parse(written.read_text(), float8=True)
    for point in found:
        assert costs.costs(point.problem, point.figures, best) == pytest.approx(point.relative, rel=0.05)
        # in times of two products; the copy of "dense" takes as long
        plain = costs.costs(point.problem._replace(gated=False), point.figures, table)
        assert plain["dense"] == pytest.approx(1.3)
        assert 0.75 * point.relative["union"] < plain["union"] < 1.5 * point.relative["union"]
    assert best.costs[(False, True, *SHAPES[0])][64]["dense"] == (1.2, 0, 0, 0)


def test_the_table_that_ships_is_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[Path, str]] = []
    monkeypatch.setattr(float8._files, "write_text", lambda *file: written.append(file))
    assert float8.main([str(path) for path in sorted(figures.RESULTS.glob("float8*.json"))]) == 0
    assert written == [(tables.FLOAT8_PATH, tables.FLOAT8_PATH.read_text())]


def test_the_page_has_a_section_once_there_are_results() -> None:
    assert list(float8.section({})) == []
    rows = [row for row in timed(tables.FLOAT8) if (row["m"], row["k"]) == (8192, 2048)]
    large = {"rows": timed(tables.FLOAT8), "machine": "GPU", "copy_tbs": 4.0}
    many = {"rows": rows, "machine": "GPU"}
    said = "\n\n".join(float8.section({"": many, "_large": large}))
    assert "| `w0.1` | 8,192 | 30 | 900 | 600 | **300** row | **3.00** | **2.00** |" in said
    assert "| `w0.3` | 64 | 30 | 900 | 600 |" in said
    assert "| `w0.3` | 1,024 |" not in said
    assert '| e4m3 "row" | 0.0500 to 0.0500 | 0.0030 to 0.0030 |' in said
