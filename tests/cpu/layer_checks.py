"""What layers of twell are compared with: their children, nn.Linear, ReLU and a product, in dense PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from ffns import BF16, K
from torch import Tensor, nn

from twell.nn.layers import SparseGatedMLP, SparseMLP

MODULES = pytest.mark.parametrize("cls", [SparseGatedMLP, SparseMLP])
Module = type[SparseGatedMLP] | type[SparseMLP]
CHILDREN = ("gate_proj", "up_proj", "down_proj")


def tokens() -> Tensor:
    return torch.randn(5, K, generator=torch.Generator().manual_seed(1)).to(BF16)


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
