"""Inference of few tokens by the share of neurons that fire: dense PyTorch and "auto", in CUDA graphs, in turn.

    python -m profiling.decode --json profiling/results/decode.json

Layers have the sizes of models; x and weights are normal numbers, and each gate fires by chance. Copies of the weights,
used in turn, are larger than L2. A floor is the time to read the first projection, and of the others the rows that any
token fires, at the rate of a copy.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from profiling.bench import protocol
from profiling.bench.cli import L2_TBS
from twell import _files
from twell.commands.timing import measure, spread

# K, N, whether there is a gate
LAYERS = ((4096, 16384, False), (2048, 8192, False), (4096, 14336, True), (2048, 5632, True))
# Calls of a graph, whose launch takes the GPU microseconds.
CALLS = 16
SHARES, TOKENS = (0.01, 0.05, 0.1, 0.14, 0.5, 1.0), (1, 4, 8, 16, 32)


def weights(k: int, n: int, gated: bool, share: float) -> tuple[Tensor, ...]:
    """The first projection, whose column 0 makes that share of gates positive, up if there is a gate, and down."""

    def drawn(scale: float) -> Tensor:
        return torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * scale

    first = drawn(k**-0.5)
    first[:, 0] = 9.0 if share == 1 else NormalDist().inv_cdf(share)
    return first, *([drawn(k**-0.5)] if gated else []), drawn(n**-0.5)


def dense(x: Tensor, first: Tensor, *rest: Tensor) -> Tensor:
    gate = torch.relu(F.linear(x, first))
    *up, down = rest
    return F.linear(gate * F.linear(x, up[0]) if up else gate * gate, down.t())


def sparse(x: Tensor, first: Tensor, *rest: Tensor) -> Tensor:
    *up, down = rest
    if up:
        y = twell.sparse_gated_ffn(x, first, up[0], down.t(), strategy="auto")
    else:
        y = twell.sparse_ffn(x, first, down.t(), activation="relu2", strategy="auto")
    assert isinstance(y, Tensor)
    return y


def called(way: Callable[..., Tensor], x: Tensor, layers: list[tuple[Tensor, ...]], i: int) -> tuple[Tensor]:
    return (way(x, *layers[i % len(layers)]),)


def rows(gpu: protocol.Gpu, layer: tuple[int, int, bool], bytes_s: float, seconds: float) -> Iterator[dict[str, Any]]:
    """Rows of one layer."""
    k, n, gated = layer
    for share in SHARES:
        copies = gpu.copies_for(2 * k * n)
        layers = [weights(*layer, share) for _ in range(copies)]
        for m in TOKENS:
            x = torch.randn(m, k, device="cuda")
            x[:, 0] = 1
            x = x.bfloat16()
            fired = float((F.linear(x, layers[0][0]) > 0).any(0).float().mean())
            ways = {"dense": dense, "auto": sparse}
            calls = copies * math.ceil(CALLS / copies)
            recordings = {name: gpu.record(partial(called, way, x, layers), calls) for name, way in ways.items()}
            us = {name: spread(each).median * 1e3 for name, each in measure(recordings, seconds).items()}
            right = dense(x.double(), *(t.double() for t in layers[0]))
            errors = {name: float((way(x, *layers[0]) - right).norm() / right.norm()) for name, way in ways.items()}
            floor = 2 * k * n * (1 + fired * (2 if gated else 1)) / bytes_s * 1e6
            of = {"k": k, "n": n, "gated": gated, "share": share, "m": m, "fired": fired}
            yield of | {"us": us, "errors": errors, "floor_us": floor}


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.03, help="of replays of each cell (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    gpu, found = protocol.Gpu(torch.device("cuda", 0)), []
    ceilings, machine = gpu.ceilings(torch.bfloat16, L2_TBS)
    for layer in LAYERS:
        for row in rows(gpu, layer, ceilings.memory, arguments.seconds):
            found.append(row)
            us = "  ".join(f"{name} {value:.1f}" for name, value in row["us"].items())
            print(f"{row['k']:5} {row['n']:5} {row['share']:5.0%} {row['m']:3} {us}  floor {row['floor_us']:.1f}")
    if arguments.json:
        _files.write_text(arguments.json, json.dumps({"machine": machine, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
