"""profiling/parallel.py: steps of a model over two processes, dense and sparse, in each mode."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from profiling import parallel

pytest.importorskip("transformers")

TINY = "--config 2x32x64x4x128 --nnz 8 --micro-batch 2 --sequence 16 --rounds 2 --no-compile".split()


def measure(device: torch.device, modes: list[str], out: Path) -> tuple[str, list[dict[str, Any]]]:
    arguments = parallel.parser().parse_args([*TINY, "--modes", *modes, "--out", str(out)])
    here = parallel.parallel.World(dist.get_rank(), dist.get_world_size(), "", device)
    return device.type, [dataclasses.asdict(row) for row in parallel.run(arguments, here, "a machine")]


@pytest.mark.parametrize("mode", ["fsdp", "tp"])
def test_steps_are_timed_and_compared(mode: str, two: Callable[..., list[Any]], tmp_path: Path) -> None:
    out = tmp_path / "parallel.json"
    (device, first), (_, second) = two(measure, ["alone", mode], out)
    assert first == second
    assert [(row["mode"], row["variant"]) for row in first] == [
        (each, variant) for each in ("alone", mode) for variant in ("dense eager", "sparse eager")
    ]
    for row in first:
        assert row["red"] == ""
        assert (row["ranks"], row["tokens"]) == (2, 64)
        assert row["ms"] > 0
        assert row["tokens_per_ms"] == pytest.approx(64 / row["ms"])
        # four sequences of all ranks, whichever rank reads them
        assert row["loss"] == pytest.approx(first[0]["loss"], rel=0.01)
    alone, _, dense, sparse = first
    assert sparse["speedup"] == pytest.approx(dense["ms"] / sparse["ms"])
    assert dense["norm"] < alone["norm"]
    assert dense["strategies"] == {"dense": 2}
    # "auto" chooses on a GPU
    assert sum(sparse["strategies"].values()) == 2
    assert device == "cuda" or sparse["strategies"] == {"union": 2}
    found = json.loads(out.read_text())
    assert found["rows"] == first
    assert found["complete"] is True
    assert found["machine"] == "a machine"


def test_other_results_are_red() -> None:
    rows = [parallel.Row("ddp", name, 2, 64, ms=1.0, loss=2.0, norm=4.0) for name in parallel.VARIANTS]
    rows[1].loss = 2.03
    rows[2].norm = float("nan")
    rows[3].ms, rows[3].loss, rows[3].norm = 0.5, 2.01, 4.1
    parallel.compare(rows)
    assert [bool(row.red) for row in rows] == [False, True, True, False]
    assert rows[1].red == "loss 2.03, of dense eager 2.0: more than 1 % apart"
    assert rows[1].ms is None
    assert rows[3].speedup == 2.0


def test_one_process_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert parallel.main([]) == 2
    assert "expected several processes (python -m torch.distributed.run" in capsys.readouterr().err
