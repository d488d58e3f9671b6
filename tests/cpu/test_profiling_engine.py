"""profiling/engine without an engine: what it draws, asks and compares."""

import contextlib
import itertools
import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from profiling.engine import __main__ as engine
from profiling.engine import models


def test_a_drawn_model_of_experts_fires() -> None:
    kinds = [models.MAMBA, models.EXPERTS, models.ATTENTION, models.EXPERTS]
    sizes = dict(zip(models.NEMOTRON, (kinds, 256, 192, 384, 8, 3, 4, 2, 64, 4, 1, 512), strict=True))
    model, prompts = models.draw_mixed(sizes, "cpu")
    assert {length: len(ids) for length, ids in prompts.items()} == models.PROMPTS
    experts = models.layers(model)
    firing: list[tuple[int, float]] = []

    def count(up: Any, given: Any, gates: torch.Tensor) -> None:
        firing.append((gates.shape[-1], (gates > 0).float().mean().item()))

    def count_routed(mixer: Any, given: Any) -> None:
        for weight in mixer.experts.up_proj:
            count(None, None, given[0] @ weight.t())

    for mixer in experts:
        mixer.shared_experts.up_proj.register_forward_hook(count)
        mixer.register_forward_pre_hook(count_routed)
    with torch.no_grad():
        hidden = model(prompts[128][:4], use_cache=False, output_hidden_states=True).hidden_states
    # no layer writes the column that stands for a bias
    assert all(each[..., 0].eq(4).all() for each in hidden[:-1])
    assert sorted(neurons for neurons, _ in firing) == [192] * 16 + [384] * 2
    assert all(0.08 < share < 0.11 for _, share in firing), firing


# Answers each request, and notes when it began and ended; the second one ends an engine that "dies".
def serve(connection: Any, name: str, log: Path) -> None:
    connection.send({"workloads": []})
    with contextlib.suppress(EOFError):
        for number in itertools.count():
            place, what = connection.recv()
            if name == "dies" and number == 1:
                return
            began = time.monotonic()
            time.sleep(0.05 if name == "fast" else 0.1)
            with log.open("a") as file:
                file.write(f"{began} {time.monotonic()} {name} {place} {what}\n")
            connection.send({"workloads": [place]})


def test_engines_run_one_at_a_time(tmp_path: Path) -> None:
    def start(name: str) -> engine.Engine:
        ours, theirs = multiprocessing.Pipe()
        process = threading.Thread(target=serve, args=(theirs, name, tmp_path / "log"), daemon=True)
        process.start()
        return engine.Engine(name, process, ours)

    engines = [start(name) for name in ("fast", "slow", "dies")]
    whole = engine.measure(engines, [2, 0], time.monotonic() + 5)
    assert whole == {name: {"workloads": [1]} for name in ("fast", "slow")}
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert all(float(this[1]) <= float(after[0]) for this, after in itertools.pairwise(lines))
    ran = [line[2:5] for line in lines if line[2] == "slow"]
    assert ran == [["slow", place, what] for place, what in zip("000011", ("run", "run", "run", "end", "run", "end"))]


def test_an_engine_that_cannot_start_ends(tmp_path: Path) -> None:
    """Here for want of vLLM or of a model; what it said is in its log."""
    made = engine.start("stock", {"name": "stock", "folder": str(tmp_path), "workloads": [], "options": {}})
    assert made.heard(time.monotonic() + 300) is None
    made.process.join(60)
    made.end()
    assert "Error" in (tmp_path / "stock.log").read_text()


def test_tokens_of_engines_are_compared() -> None:
    figures: dict[str, Any] = {"prompt": 8, "sequences": 3, "new": 3, "seconds": [1.0], "per_s": 9.0, "step_ms": None}
    tokens = {"stock": [[1, 2, 3], [4, 5, 6], [7, 8, 9]], "auto": [[1, 2, 3], [4, 1, 1], [0, 8, 9]]}
    tokens |= {"row": tokens["stock"]}
    found = {name: {"workloads": [figures | {"tokens": made}]} for name, made in tokens.items()}
    rows = {row["engine"]: row["differ"] for row in engine.rows_of(found)}
    assert rows == {"stock": 0, "auto": 2, "row": 0}
    (alone,) = engine.rows_of({"auto": {"workloads": [figures | {"tokens": tokens["auto"]}]}})
    assert alone["differ"] is None
