"""A gate that is given, [M, N], and the operands behind it."""

from typing import Any, NamedTuple

from torch import Tensor

from twell.ops.ffn import check_given as check_layer_behind
from twell.ops.operands import Layer

GIVEN = "Tensor gate, Tensor? x, Tensor? w_up, Tensor w_down, Tensor? b_up, Tensor? b_down"


class Given(NamedTuple):
    """A given gate [M, N] and the operands behind it: w_down [N, K]; without w_up neither x nor b_up."""

    gate: Any
    x: Any
    w_up: Any
    w_down: Any
    b_up: Any
    b_down: Any

    def tokens(self, k: int) -> Tensor:
        """x, or what has its shape [..., k]."""
        gate, x, *_ = self
        if x is None:
            x = gate[..., :1].expand(*gate.shape[:-1], k)
        return x  # type: ignore[no-any-return]


def check_given(given: Given, wide: bool = False) -> None:
    """Raise unless the operands fit each other."""
    gate, x, w_up, w_down, b_up, b_down = given
    check_layer_behind(Layer(x, None, w_up, w_down, None, b_up, b_down, gate), wide)
