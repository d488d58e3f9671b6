"""What layers of twell are compared with: their children, nn.Linear, ReLU and a product, in dense PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ffns import BF16, K
from torch import Tensor, nn

from twell.nn import SparseGatedMLP, SparseMLP

STRATEGIES = ("auto", "row", "union", "dense")
MODULES = pytest.mark.parametrize("cls", [SparseGatedMLP, SparseMLP])
Module = type[SparseGatedMLP] | type[SparseMLP]
CHILDREN = ("gate_proj", "up_proj", "down_proj")


def tokens(dtype: torch.dtype = BF16, count: int = 5, seed: int = 1) -> Tensor:
    return torch.randn(count, K, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_children(mlp: nn.Module, x: Tensor) -> Tensor:
    """Compute the children of ``mlp`` in dense PyTorch, whatever they are."""
    children = dict(mlp.named_children())
    hidden = F.relu(children.get("gate_proj", children["up_proj"])(x))
    if "gate_proj" in children:
        hidden = hidden * children["up_proj"](x)
    return children["down_proj"](hidden)


def close(y: Tensor, expected: Tensor) -> None:
    """Check equality up to 16-bit rounding, far below the effect of any change of weights."""
    assert y.shape == expected.shape
    assert y.dtype == expected.dtype
    assert (y.double() - expected.double()).norm() <= 2e-2 * expected.double().norm()


def agrees(mlp: nn.Module, x: Tensor | None = None) -> None:
    """Call ``mlp`` as servers do; it must agree with its children."""
    x = tokens() if x is None else x
    with torch.no_grad():
        close(mlp(x), by_children(mlp, x))
