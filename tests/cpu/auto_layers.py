"""Layers and call sites for the tests of ``strategy="auto"``, and a stand-in for the transfers from a GPU."""

from typing import Any

import torch
from torch import Tensor

import twell
from twell.choose import rates
from twell.choose.rates import Figures, Problem
from twell.nn.layers import SparseGatedMLP
from twell.nn.models import set_down_layout

BF16 = torch.bfloat16
K, N = 32, 264
SPARSE, DENSE = Figures(10, 0.05), Figures(3000, 1.0)
DECIDES = {"union": SPARSE, "dense": DENSE}


def seconds(problem: Problem, figures: Figures, card: Any = None) -> dict[str, float]:
    """A stand-in for ``rates.seconds``: times of no machine, of small layers as of large ones."""
    union, density, _ = rates.shares(problem, figures)
    found = {"dense": 1.0, "union": 0.2 + 0.6 * union + density}
    if not problem.training:
        found |= {"union": 0.4 + 0.5 * union + density, "row": 0.3 + 4 * density}
    return {route: time + problem.down_copied * (route != "dense") for route, time in found.items()}


def screened_seconds(problem: Problem, figures: Figures, card: Any = None) -> dict[str, float]:
    """``seconds`` where the screen is the fastest if candidates are the union, and the slowest if all neurons are."""
    found, (union, density, _) = seconds(problem, figures), rates.shares(problem, figures)
    if figures.candidates is None:
        return found
    base = -0.05 if problem.training else 0.15
    return found | {rates.SCREENED: base + 0.2 * union + density + 0.45 * max(union, figures.candidates)}


class Arrivals:
    """A stand-in for ``measurement.Transfer``: values arrive when ``open`` is true; it counts the queries."""

    open = True
    asked = 0
    sent: list[list[int]]

    def __init__(self) -> None:
        self.sent = []

    def __call__(self, values: Tensor) -> Any:
        arrivals, numbers = self, values.tolist()
        self.sent.append(numbers)

        class Sent:
            def arrived(self) -> bool:
                arrivals.asked += 1
                return arrivals.open

            def read(self) -> list[int]:
                assert arrivals.open, "read before arrival"
                return numbers

        return Sent()


def layer(cls: Any = SparseGatedMLP, firing: int = 8) -> Any:
    """A module whose biases make the first ``firing`` neurons fire for every token."""
    mlp = cls(K, N, bias=True, dtype=BF16)
    # as measured times are
    set_down_layout(mlp, "rows")
    set_firing(mlp, firing)
    return mlp


def set_firing(mlp: Any, firing: int) -> None:
    gate = mlp.gate_proj if isinstance(mlp, SparseGatedMLP) else mlp.up_proj
    with torch.no_grad():
        gate.weight.zero_()
        gate.bias.copy_(torch.where(torch.arange(N) < firing, 1.0, -1.0))


def strategies_of(mlp: Any) -> list[tuple[str, str]]:
    return [(row.kind, row.strategy) for row in twell.explain(mlp)]
