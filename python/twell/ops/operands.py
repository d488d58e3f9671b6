"""A layer's tensors, under the names that every function and kernel gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.base.activation import Activation
from twell.runtime.program import Executable, Program, View, kept

# Names of a ``Layer`` among the arguments of ``sparse_ffn``.
_WITHOUT_GATE = ("x", "w_up", "", "w_down", "b_up", "", "b_down")


class Layer(NamedTuple):
    """The operands of a layer: x [M, K], w_gate and w_up [N, K], w_down, b_gate and b_up [N], b_down [K].

    w_down is [K, N], as in nn.Linear, down to ``twell.call.autograd``, and [N, K] in the operators and kernels. A layer
    without a gate has no w_up: its up projection stands at w_gate, with its bias at b_gate. In the operators b_gate may
    be [2 N]: the biases, then a threshold for each neuron. In a program they are views, w_down [K, N], and matrices may
    be ``Scaled``, without scales beside.

    A given ``gate`` [M, N] stands before its activation, and there is neither w_gate nor b_gate; without w_up there is
    no x either. Weights in e4m3 have float32 scales of their rows, gate_scale and up_scale [N], and w_down of its
    columns, down_scale [K]. Then x is e4m3 with x_scale [M], or bfloat16: x_scale [1] is a static scale for all of it.
    """

    x: Any
    w_gate: Any
    w_up: Any
    w_down: Any
    b_gate: Any = None
    b_up: Any = None
    b_down: Any = None
    gate: Any = None
    x_scale: Any = None
    gate_scale: Any = None
    up_scale: Any = None
    down_scale: Any = None

    @classmethod
    def of(cls, given: Mapping[str, Tensor]) -> Layer:
        """From the arguments of ``sparse_gated_ffn``, or of ``sparse_ffn``, by name."""
        return cls(*map(given.get, cls._fields[:7] if "w_gate" in given else _WITHOUT_GATE))

    def named(self, gated: bool) -> dict[str, Tensor | None]:
        """Under the argument names of ``sparse_gated_ffn``, or of ``sparse_ffn``."""
        return {name: operand for name, operand in zip(self._fields[:7] if gated else _WITHOUT_GATE, self) if name}

    @property
    def unscaled(self) -> tuple[Any, ...]:
        """All but the scales."""
        return self[:8]

    @property
    def tokens(self) -> Any:
        """What has a row for each token: the gate, if it is given, or x."""
        return self.x if self.gate is None else self.gate

    @property
    def scaled(self) -> bool:
        return self.down_scale is not None

    @property
    def plain(self) -> bool:
        """Whether it is of 16 bits, with a gate that it computes."""
        return self.gate is None and self.down_scale is None

    def neurons(self, first: int, last: int, by_columns: bool = False) -> Layer:
        """The layer of a slice of its neurons, without b_down; ``by_columns``: w_down is [K, N]."""
        x, w_gate, w_up, w_down, b_gate, b_up = self[:6]
        n = len(w_gate)
        if b_gate is not None and has_thresholds(b_gate, n):
            b_gate = torch.cat([b_gate[first:last], b_gate[n + first : n + last]])
        elif b_gate is not None:
            b_gate = b_gate[first:last]
        of_down = w_down[:, first:last] if by_columns else w_down[first:last]
        w_up, b_up = (None if t is None else t[first:last] for t in (w_up, b_up))
        return Layer(x, w_gate[first:last], w_up, of_down, b_gate, b_up)

    def requires_grad(self) -> bool:
        """Whether any of them does."""
        for operand in self:
            if operand is not None and operand.requires_grad:
                return True
        return False


class Gradients(NamedTuple):
    """The gradient of each operand of a ``Layer``, None where none is wanted; as a view that of w_down is [N, K]."""

    x: Any = None
    w_gate: Any = None
    w_up: Any = None
    w_down: Any = None
    b_gate: Any = None
    b_up: Any = None
    b_down: Any = None
    gate: Any = None


class Mains(NamedTuple):
    """For each weight the float32 tensor of its shape to which its gradient is added; None where there is none."""

    w_gate: Tensor | None = None
    w_up: Tensor | None = None
    w_down: Tensor | None = None


class Scaled(NamedTuple):
    """A matrix of e4m3 values, as bytes, with fp32 scales: of its rows, or of the columns of a down weight by rows.

    fast: of x, whether the tensor cores hold whole sums of its products.
    """

    values: View
    scale: View
    fast: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self.values.strides

    def part(self, first: int, last: int) -> Scaled:
        """Rows from ``first`` up to ``last``, or to the end if there are fewer."""
        return self._replace(values=self.values.part(first, last), scale=self.scale.part(first, last))

    def t(self) -> Scaled:
        """The transposed matrix; the scales stay."""
        return self._replace(values=self.values.t())


def launched(matrix: View | Scaled | None, scaled: bool = False) -> tuple[View | None, ...]:
    """A matrix as arguments of kernels: itself, or values and scales; ``scaled``: whether an absent one has any."""
    if isinstance(matrix, Scaled):
        return matrix.values, matrix.scale
    return (None, None) if scaled else (matrix,)


def opened(layer: Layer, activation: Activation) -> tuple[Layer, Activation]:
    """A layer with its biases alone, and the activation with the thresholds that lay behind those of the gate."""
    b_gate = layer.b_gate
    if b_gate is None or not has_thresholds(b_gate, n := len(layer.w_gate)):
        return layer, activation
    if activation.k:
        raise ValueError('b_gate must have no thresholds behind the biases with activation "topk", got some')
    return layer._replace(b_gate=b_gate[:n]), activation._replace(threshold=b_gate[n:])


def has_thresholds(b_gate: Tensor | View | None, n: int) -> bool:
    """Whether thresholds of ``n`` neurons lie behind the biases."""
    return b_gate is not None and b_gate.shape[0] != n


def bias_alone(b_gate: View | None, n: int) -> View | None:
    """The biases of ``n`` neurons, without thresholds behind them."""
    return b_gate if b_gate is None or b_gate.shape[0] == n else b_gate.part(0, n)


# The shape, strides and dtype of a tensor, as ``allocate`` takes them.
Place = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class Form(NamedTuple):
    """How the tensors of a call lie on a device, None where there is none: all a program depends on beside numbers."""

    device: int
    places: tuple[Place | None, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None]) -> Form:
        """The form of a call with these tensors, one of which is a tensor."""
        index = next(tensor.device.index for tensor in tensors if tensor is not None)
        return cls(index or 0, tuple([None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors]))

    def program(self) -> tuple[Program, list[Any]]:
        """A program of such calls, with a view of each tensor, None where there is none."""
        p = Program(self.device)
        return p, [None if t is None else p.operand(t[2], *t[0], strides=t[1]) for t in self.places]


def present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Those that are not None, as programs take them."""
    return [tensor for tensor in tensors if tensor is not None]


def run(builder: Callable[..., Any], tensors: Sequence[Tensor | None], *numbers: Any) -> None:
    """Run the launches that ``builder(p, *views, *numbers)`` describes for such tensors."""
    made(builder, Form.of(tensors), *numbers)(*present(tensors))


@kept
def made(builder: Callable[..., Any], form: Form, *numbers: Any) -> Executable:
    """What runs the launches of ``builder`` for tensors of this form."""
    p, views = form.program()
    builder(p, *views, *numbers)
    return p.compiled()
