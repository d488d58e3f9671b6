"""Small runs of examples/train.py: their options, and what they leave behind."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ranks
import torch
from training import checkpoint

SMALL = (
    "--layers 2 --hidden 32 --intermediate 64 --heads 2 --vocab 300 --sequence 32 --micro-batch 2 "
    "--tokens-per-step 256 --held-out 0.1 --eval-sequences 4 --log-every 2 --device cpu --dtype float32"
).split()
# two thirds of the neurons are dead within a few steps, and some come back
SPARSE = "--l1 0.003 --l1-warmup 0 --lr 0.02 --warmup 0 --reinitialize 0.1 --observe-every 4".split()


def write_text(root: Path, parts: int = 0) -> Path:
    """Sixty files of text that can be learnt, perhaps in folders."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijkl", k=5)) for _ in range(40)]
    lines = [" ".join(draw.choices(words, k=6)) for _ in range(20)]
    for i in range(60):
        folder = root / f"part{i % parts}" if parts else root
        folder.mkdir(exist_ok=True)
        (folder / f"{i}.txt").write_text("\n".join(draw.choices(lines, k=25)))
    return root


def command(text: Path, cache: Path, out: Path, *more: object) -> list[str]:
    return [*SMALL, "--text", str(text), "--cache", str(cache), "--out", str(out), *map(str, more)]


def weights(out: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    loaded: dict[str, torch.Tensor] = load_file(out / "final" / "model.safetensors")
    return loaded


def same(a: Path, b: Path) -> bool:
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def records(out: Path) -> list[dict[str, Any]]:
    """Return the records of steps, without figures that differ between runs."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key not in ("tokens_per_s", "peak_bytes")}
        for line in lines
        if "options" not in line
    ]


def steps(out: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoint.complete(out / "checkpoints")]


def others(target: Callable[..., None], *arguments: tuple[Any, ...]) -> list[int | None]:
    """Run ``target`` in one process per tuple of arguments, all at once; return their exit codes."""
    context = ranks.forks()
    processes = [context.Process(target=target, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    return [process.exitcode for process in processes]
