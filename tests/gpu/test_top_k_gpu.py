"""The k largest gates of each token on the GPU: levels, every strategy and gradients, bit by bit."""

from __future__ import annotations

import pytest
import torch
from activations import BIASES, DTYPES
from jumps import named
from torch import Tensor

import twell
from tests import programs
from twell import ops, reference, testing

CUDA = torch.device("cuda")


@DTYPES
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 3), (70, 520, 9), (9, 16384, 64), (5, 16392, 500), (3, 65536, 512)])
def test_levels_are_those_of_a_stable_sort(dtype: torch.dtype, m: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(n)
    # few values, so that many are equal
    gate = torch.randint(-20, 21, (m, n), generator=generator).to(dtype)
    gate[0, :2], gate[-1, -1] = torch.nan, torch.inf
    (levels,) = testing.poisoned(lambda: (programs.levels(gate.to(CUDA), k),))
    testing.assert_same(levels.cpu(), reference.top_k(gate, k))
    words, spill, _ = programs.packed(gate.to(CUDA), levels=levels)
    testing.assert_same(ops.unpack(words, spill, n, 8).cpu(), reference.largest(gate.relu(), k))


@DTYPES
@pytest.mark.parametrize("m", [1, 60, 300, 2100])
def test_every_strategy_has_the_bits_of_the_cpu(dtype: torch.dtype, m: int) -> None:
    p = testing.integer_problem(m, 72, 776, density=0.2, biases=BIASES, dtype=dtype)

    def layer(p: testing.FFN, strategy: str) -> Tensor:
        how = {"activation": "topk", "k": 9, **named(strategy)}
        return twell.sparse_ffn(p.x, p.w_gate, p.w_down.t(), b_up=p.b_gate, b_down=p.b_down, **how)  # type: ignore[no-any-return, arg-type]

    right = layer(p, "row")
    for strategy in ("row", "union", "row+invariant"):
        (y,) = testing.poisoned(lambda s=strategy: (layer(p.map(lambda t: t.to(CUDA)), s),))
        testing.assert_same(y.cpu(), right, strategy)
    found, dy = [], testing.integer_upstream(p)
    for device in ("cpu", "cuda"):
        leaves = p.map(lambda t, device=device: t.to(device).requires_grad_())
        present = [t for name, t in leaves._asdict().items() if name not in ("w_up", "b_up")]
        found.append(torch.autograd.grad(layer(leaves, "union"), present, dy.to(device)))
    for theirs, ours in zip(*found, strict=True):
        testing.assert_same(ours.cpu(), theirs)
