"""``Float8MLP``: a layer of e4m3 weights, for inference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twell.base.activation import ActivationName, activation_of
from twell.base.arguments import require
from twell.call import functional
from twell.call.functional import Strategy
from twell.choose import cards
from twell.choose.explanation import Choice
from twell.choose.plan import Facts, unpackable
from twell.choose.site import AutoStrategy
from twell.nn.layers import GATED
from twell.nn.record import watch
from twell.nn.settings import Configured, setting
from twell.ops.calls import How
from twell.ops.float8 import E4M3, Float8, checked
from twell.runtime import modes
from twell.runtime.log import warn_once


class Float8Projection(nn.Module):
    """A weight [R, C] in e4m3 with a scale for each row, ``weight_scale`` float32 [R, 1], and a bias, if any.

    The state dict has the names and shapes of compressed-tensors' format FP8_DYNAMIC.
    """

    weight: nn.Parameter
    weight_scale: Tensor
    bias: nn.Parameter | None

    def __init__(self, record: Float8, bias: Tensor | None = None, by_columns: bool = False) -> None:
        super().__init__()
        self._hold(record, bias, by_columns)

    def _hold(self, record: Float8, bias: Tensor | None, by_columns: bool = False) -> None:
        require("weight", record, Float8, "a Float8")
        record = checked("weight", record)
        if record.values.dim() != 2:
            raise ValueError(f"weight must have two dimensions, got {list(record.shape)}")
        values = record.values.t().contiguous().t() if by_columns else record.values.contiguous()
        self.weight = nn.Parameter(values, requires_grad=False)
        self.register_buffer("weight_scale", record.by_rows()[:, None].clone())
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        watch()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        watch()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(moving(fn, [self.weight, self.weight_scale]), recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *how: Any) -> None:
        """As torch, but what is no e4m3 with scales is refused instead of cast."""
        *_, errors = how
        weight, scale = (state_dict.get(f"{prefix}{name}") for name in ("weight", "weight_scale"))
        if weight is not None and weight.dtype != E4M3:
            errors.append(f"{prefix}weight must be {E4M3}, got {weight.dtype}")
        elif scale is not None and not scale.is_meta and not bool(((scale > 0) & scale.isfinite()).all()):
            errors.append(f"{prefix}weight_scale must be finite and above 0, got others")
        else:
            super()._load_from_state_dict(state_dict, prefix, metadata, *how)

    def record(self) -> Float8:
        """The weight as functions take it. Raises TypeError if it was given another dtype."""
        weight, scale = self.weight, self.weight_scale
        if weight.dtype != E4M3 or scale.dtype != torch.float32:
            got = f"{weight.dtype} and {scale.dtype}"
            raise TypeError(
                f"weight and weight_scale must be {E4M3} and torch.float32, got {got}: a quantised layer has no others"
            )
        return Float8(weight.detach(), scale.view(-1))

    def extra_repr(self) -> str:
        return f"{list(self.weight.shape)}, e4m3, bias={self.bias is not None}"


def moving(fn: Callable[[Tensor], Tensor], own: Sequence[Tensor | None]) -> Callable[[Tensor], Tensor]:
    """What ``nn.Module.to`` does to tensors, but those of ``own`` keep their dtypes, as a cast would be for good."""

    def moved(tensor: Tensor) -> Tensor:
        made = fn(tensor)
        kept = made.dtype != tensor.dtype and any(tensor is each for each in own)
        return tensor.to(made.device) if kept else made

    return moved


def _static(scale: Tensor) -> Tensor:
    """A static scale of inputs, float32 [1], of its own memory."""
    require("input_scale", scale, Tensor, "a tensor")
    if scale.numel() != 1:
        raise ValueError(f"input_scale must be one number, got {list(scale.shape)}")
    made = scale.detach().float().reshape(1).clone()
    if not made.is_meta and not 0 < float(made) < math.inf:
        raise ValueError(f"input_scale must be finite and above 0, got {float(made)}")
    return made


# as a trace begins
@modes.constant
def _tell_of_hooks() -> None:
    warn_once("hooks on projections in e4m3 do not run: the layer reads their weights; hook the layer")


class Float8MLP(Configured):
    """``twell.sparse_gated_ffn`` of e4m3 weights on bfloat16 x [..., hidden], or ``twell.sparse_ffn`` without a gate.

    ``gate`` (None without one) and ``up`` are [intermediate, hidden], ``down`` is [hidden, intermediate], each a
    ``twell.Float8`` with scales by rows or of the tensor; ``biases`` are theirs, bfloat16 or None. ``down`` is stored
    by rows of neurons, as kernels read it. ``input_scale``, float32 [1]: one scale for all of x; else each token has
    one. ``activation``, ``threshold``, ``strategy``, ``invariant``, ``compression`` and ``fast_accum`` are those of the
    functions. With "auto" the module has its own ``AutoStrategy``. For inference alone: its parameters require no grad.
    """

    # the dropouts of the hidden state that the layer had, "" without one
    dropped = ""
    _fast_accum: bool
    fast_accum = setting("fast_accum")
    # these stay
    activation = property(lambda self: self._activation)
    threshold = property(lambda self: self._threshold)

    def __init__(
        self,
        gate: Float8 | None,
        up: Float8,
        down: Float8,
        *,
        biases: Sequence[Tensor | None] = (None, None, None),
        activation: ActivationName = "relu",
        threshold: float = 0,
        strategy: Strategy | AutoStrategy = "auto",
        invariant: bool = False,
        compression: int = 8,
        fast_accum: bool = True,
        input_scale: Tensor | None = None,
        names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        # half of a pair is a projection as well, with arguments of its own
        nn.Module.__init__(self)
        self.hidden, self.intermediate = down.shape
        for name, record in zip(names, (gate, up)):
            if record is not None and tuple(record.shape) != (self.intermediate, self.hidden):
                raise ValueError(f"{name} must be {[self.intermediate, self.hidden]}, got {list(record.shape)}")
        self._gated = gate is not None
        form = activation_of(activation, threshold, self._gated)
        self._set(_activation=form.name, _threshold=form.threshold)
        self.compression, self.strategy, self.invariant, self.fast_accum = compression, strategy, invariant, fast_accum
        if refusal := unpackable(Facts("Float8MLP", n=self.intermediate, k=self.hidden, float8=True), instead=""):
            raise refusal.kind(refusal.message)
        self._auto = AutoStrategy(screen="off")
        self._how = self._asked()
        self._names = tuple(names) if gate is not None else tuple(names[-2:])
        records = [record for record in (gate, up, down) if record is not None]
        given = tuple(biases) if gate is not None else tuple(biases[-2:])
        # a subclass may define projections' own names
        taken = [name for name in self._names if name not in GATED and hasattr(type(self), name)]
        if len(set(self._names)) != len(records) or taken:
            raise ValueError(f"names must be {len(records)} names of their own for projections, got {list(names)}")
        if len(given) != len(records) or (gate is None and len(biases) > 2 and biases[0] is not None):
            raise ValueError(f"biases must be one or None for each of {', '.join(self._names)}, got {len(biases)}")
        for name, record, bias in zip(self._names, records, given):
            if bias is not None and (bias.dtype, bias.shape) != (torch.bfloat16, record.shape[:1]):
                got = f"{bias.dtype} {list(bias.shape)}"
                raise ValueError(f"the bias of {name} must be torch.bfloat16 {list(record.shape[:1])}, got {got}")
            self._add(name, record, bias, record is down)
        self.register_buffer("input_scale", None if input_scale is None else _static(input_scale))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("activation", "threshold"):
            raise AttributeError(f"{name} must stay {getattr(self, name)!r}, got {value!r}: make another Float8MLP")
        super().__setattr__(name, _static(value) if name == "input_scale" and value is not None else value)

    def _add(self, name: str, record: Float8, bias: Tensor | None, is_down: bool) -> None:
        setattr(self, name, Float8Projection(record, bias, by_columns=is_down))

    def _asked(self) -> How:
        return super()._asked()._replace(fast=self._fast_accum)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(moving(fn, [self._buffers["input_scale"]]), recurse)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor | Float8) -> Tensor:
        """x [..., hidden] -> y [..., hidden], bfloat16."""
        if self.training and self.dropped:
            got = f"training mode with {self.dropped}"
            raise NotImplementedError(f"layers in e4m3 are for inference and drop no values, got {got}: call eval()")
        children = [getattr(self, name) for name in self._names]
        if any(child._forward_hooks or child._forward_pre_hooks for child in children):
            _tell_of_hooks()
        records: list[Any] = [child.record() for child in children]
        biases: list[Any] = [child.bias for child in children]
        function: Any = functional.sparse_gated_ffn
        if len(children) == 2:
            function = functional.sparse_ffn
            records.insert(1, None)
            biases.insert(1, None)
        how = self._asked() if modes.compiling() else self._how
        return functional.run_scaled(function, x, records, biases, how, self.input_scale)  # type: ignore[arg-type]

    def explain(self, name: str = "") -> list[Choice]:
        """The rows of ``twell.explain`` for this layer."""
        on, site = getattr(self, self._names[-1]).weight.device, self._site()
        measured = list[Choice]()
        if site is None:
            how = ("row", "invariant=True") if self.invariant else (str(self.strategy), "it was named")
        elif imposed := cards.imposed(on.type, on.index):
            how = "dense", imposed
        else:
            how, measured = ("auto", "not called yet"), site.explain(name)
        return [row._replace(layout="rows") for row in measured or [Choice(name, "inference", "any", "", *how)]]

    def extra_repr(self) -> str:
        return f"{self.hidden}, {self.intermediate}, activation={self.activation!r}, strategy={self.strategy!r}"
