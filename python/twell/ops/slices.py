"""Layers of more neurons than a packed index names: slices of them run one after the other, each as a layer.

Outputs of slices are rounded, added in fp32 in the order of the slices, to the bias of the down projection, and rounded
once more. So is the gradient of x.
"""

from typing import Any

import torch
from torch import Tensor

from twell.base.activation import Activation
from twell.runtime import geometry


def is_sliced(n: Any) -> bool:
    """Whether a layer of ``n`` neurons runs as slices."""
    return bool(n > geometry.MAX_NEURONS)


def require_sliceable(n: int, activation: Activation) -> None:
    """NotImplementedError if the activation chooses gates of all ``n`` neurons together, and slices have fewer."""
    if activation.k and is_sliced(n):
        raise NotImplementedError(f"topk takes at most {geometry.MAX_NEURONS} neurons, got {n}")


class Added:
    """The sum of what slices give for ``out``, and of a ``bias``; in fp32."""

    def __init__(self, out: Tensor, bias: Tensor | None = None) -> None:
        self._out, self._sum = out, torch.zeros_like(out, dtype=torch.float32)
        if bias is not None:
            self._sum += bias

    def add(self, part: Tensor) -> None:
        self._sum += part

    def store(self) -> None:
        """Round the sum into ``out``."""
        self._out.copy_(self._sum)
