"""profiling/engine without an engine: what it draws and compares, and ``generate`` on tiny models."""

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from profiling.engine import __main__ as engine
from profiling.engine import generate, mixture, models

TINY = ["--model", "2x64x256x2x256", "--nnz", "8", "--device", "cpu"]


def test_a_drawn_model_of_experts_fires() -> None:
    sizes = mixture.Drawn(256, 192, 384, 8, 3, 4, 2, 4, head=64, pattern="ME*E", vocab=512)
    model, prompts = mixture.draw(sizes, "cpu")
    assert {length: len(ids) for length, ids in prompts.items()} == models.PROMPTS
    experts = mixture.layers(model)
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


def test_generate_is_timed_beside_stock(tmp_path: Path) -> None:
    small = ["--prompts", "1", "--prompt", "128", "--new", "3", "--runs", "1", "--sequences", "2", "--caches", "eager"]
    assert generate.main([*TINY, *small, "--out", str(tmp_path / "made.json")]) == 0
    rows = json.loads((tmp_path / "made.json").read_text())["rows"]
    assert [(row["what"], row["model"], row["sequences"]) for row in rows] == [
        *(("prompt", "stock", 1), ("prompt", "sparse", 1)),
        *(("eager", "stock", 2), ("eager", "sparse", 2)),
    ]
    assert all(row["tokens_per_s"] > 0 for row in rows)
    # on a CPU both run PyTorch's operators, and choose the same tokens
    assert rows[-1]["differing"] == 0
    assert rows[-1]["strategies"] == {"any: dense": 2}


def test_generate_sees_a_wrong_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sparsify = generate.sparsify

    def damaged(model: Any) -> Any:
        sparse = sparsify(model)
        sparse.get_decoder().layers[1].mlp.down_proj.weight.data.neg_()
        return sparse

    monkeypatch.setattr(generate, "sparsify", damaged)
    small = ["--prompts", "1", "--prompt", "128", "--new", "8", "--runs", "1", "--sequences", "8", "--caches", "eager"]
    assert generate.main([*TINY, *small, "--out", str(tmp_path / "made.json")]) == 0
    found = json.loads((tmp_path / "made.json").read_text())["rows"][-1]
    assert found["differing"] > found["ties"]
    assert found["worst"] > 4


# Answers each line, and notes when it began and ended; the second line ends an engine that "dies".
ENGINE = """
import pathlib, sys, time
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
(folder / f"{name}.ready").touch()
for number, line in enumerate(sys.stdin):
    if name == "dies" and number == 1:
        break
    began = time.monotonic()
    time.sleep(0.05 if name == "fast" else 0.1)
    with open(folder / "log", "a") as log:
        log.write(f"{began} {time.monotonic()} {name} {line}")
    (folder / f"{name}.part").write_text(line)
    (folder / f"{name}.part").rename(folder / f"{name}.answer")
"""


def test_engines_run_one_at_a_time(tmp_path: Path) -> None:
    def start(name: str) -> engine.Engine:
        command = [sys.executable, "-c", ENGINE, str(tmp_path), name]
        return engine.Engine(name, subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True), tmp_path)

    engines = [start(name) for name in ("fast", "slow", "dies")]
    whole = engine.measure(engines, 2, 2, time.monotonic() + 60)
    assert [each.name for each in whole] == ["fast", "slow"]
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert all(float(this[1]) <= float(after[0]) for this, after in itertools.pairwise(lines))
    ran = [line[2:5] for line in lines if line[2] == "slow"]
    asked = itertools.product("01", ("run", "run", "run", "end"))
    assert ran == [["slow", *line] for line in asked]


def test_tokens_of_engines_are_compared() -> None:
    stock = {"tokens": [[1, 2, 3], [4, 5, 6], [7, 8, 9]], "gaps": [[1.0] * 3, [0.5, 0.25, 3.0], [0.0, 9.0, 9.0]]}
    figures: dict[str, Any] = {"prompt": 8, "sequences": 3, "new": 3, "seconds": [1.0], "per_s": 9.0, "step_ms": None}
    row = engine.Row("auto", **figures)
    engine.compare(row, [[1, 2, 3], [4, 1, 1], [0, 8, 9]], stock)
    assert (row.differ, row.gap) == (2, 0.25)
    same = engine.Row("auto", **figures)
    engine.compare(same, stock["tokens"], stock)
    assert (same.differ, same.gap) == (0, 0.0)
