"""What a projection computes that is more than an ``nn.Linear``: LoRA adapters of peft, weights that are quantised.

Classes of others are known by their names, so that nothing of them is imported. A projection that is not known, or does
something else than its class, has a reason in place of a reading, and only a call of it says what it computes.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twell.call import plain as _plain
from twell.call.admission import sharded
from twell.nn.columns import Part, part

_LORA_OF_4_BITS = "peft.tuners.lora.bnb.Linear4bit"
# their calls differ in nothing but casts
_LORA = ("peft.tuners.lora.layer.Linear", "peft.tuners.lora.torchao.TorchaoLoraLinear", _LORA_OF_4_BITS)
_OF_4_BITS = tuple(f"bitsandbytes.nn.modules.{name}" for name in ("Linear4bit", "LinearNF4", "LinearFP4"))
# tensors of torchao, and the attributes that are None if a product leaves its inputs as they are
_OF_TORCHAO = {
    "Int8Tensor": ("act_quant_kwargs", "act_pre_scale"),
    "Float8Tensor": ("act_quant_kwargs",),
    "IntxUnpackedToInt8Tensor": ("activation_quantization",),
}


class LowRank(NamedTuple):
    """An adapter: ``scaling * b(a(dropout(x)))``. a: [r, in]. b: [out, r], perhaps with a bias."""

    a: nn.Linear
    b: nn.Linear
    dropout: nn.Module
    scaling: Any

    @property
    def drops(self) -> bool:
        """Whether the dropout changes its input now."""
        return isinstance(self.dropout, nn.Dropout) and self.dropout.training and self.dropout.p > 0


class Projection(NamedTuple):
    """``x @ weight^T + bias`` and what ``adapters`` add.

    linear: holds the weight and the bias. dequantise: of a weight in 4 bits of bitsandbytes, or of torchao. part: 0 or
    1 for the first or the second half of the outputs, None for all. layer: that of peft, which holds the adapters.
    """

    linear: Any
    dequantise: Callable[[Any], Tensor] | None = None
    adapters: tuple[LowRank, ...] = ()
    layer: Any = None
    part: int | None = None

    @property
    def rank(self) -> int:
        return sum(each.a.weight.shape[0] for each in self.adapters)

    @property
    def own_dtype(self) -> torch.dtype:
        """The dtype of the product with an x of the dtype that the weight had before it was quantised."""
        weight = self.linear.weight
        return getattr(self.linear, "compute_dtype", None) or getattr(weight, "quant_state", weight).dtype  # type: ignore[no-any-return]

    def dtype(self, x: Tensor, plain: torch.dtype) -> torch.dtype:
        """The dtype of the product with x; ``plain`` is that of one with a plain weight."""
        return plain if self.dequantise is None else getattr(self.linear, "compute_dtype", None) or x.dtype

    def weight(self, sources: list[Tensor], k: int) -> Part:
        """The weight of its part; ``k`` is the hidden size."""
        weight, half, dequantise = self.linear.weight, self._half, self.dequantise
        if dequantise is None:
            return part(sources, half(weight), k)

        def dequantised(source: Any) -> Tensor:
            with torch.no_grad():
                return half(dequantise(source))

        return part(sources, weight, k, dequantised)

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bias of its part with those of the adapters, in ``dtype``."""
        bias = self.linear.bias
        for each in self.adapters:
            if each.b.bias is not None:
                added = each.b.bias * each.scaling
                bias = added if bias is None else bias + added
        return None if bias is None else self._half(bias.to(dtype))

    def lowered(self, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """``a(dropout(x))`` of each adapter, as peft computes it, in ``dtype``."""
        found = []
        for each in self.adapters:
            if not (torch.is_autocast_enabled() and _name(self.layer) == _LORA_OF_4_BITS):
                x = self.layer._cast_input_dtype(x, each.a.weight.dtype)
            found.append(each.a(each.dropout(x)).to(dtype))
        return found

    def lowering(self, sources: list[Tensor]) -> list[Part]:
        """a of each adapter, [r, in]."""
        return [part(sources, each.a.weight, len(each.a.weight)) for each in self.adapters]

    def raising(self, sources: list[Tensor]) -> list[Part]:
        """``scaling * b`` of each adapter without its bias, [out, r]."""
        found = []
        for each in self.adapters:
            b, scale = each.b.weight, each.scaling
            if not isinstance(scale, (int, float)):
                b, scale = b * scale, 1
            found.append(part(sources, self._half(b), b.shape[1], None, scale))
        return found

    def _half(self, of_outputs: Tensor) -> Tensor:
        return of_outputs if self.part is None else of_outputs.chunk(2)[self.part]


def read(child: Any) -> Projection | str:
    """What calling ``child`` computes, or why only a call tells."""
    if child is None:
        return "is missing"
    if not _plain.runs_its_class(child):
        return "has hooks or a replaced forward (peft sets some)"
    kind = _name(child)
    if kind not in _LORA:
        return _base(child)
    base = read(child.base_layer)
    if isinstance(base, str):
        return f"adapts a layer that {base}"
    if base.adapters:
        return "adapts a layer that is adapted"
    if child.disable_adapters and child.merged:
        return "has merged adapters that are disabled, which peft takes out in its next call"
    if child.disable_adapters or child.merged:
        return base
    variants = getattr(child, "lora_variant", None)
    if variants is None or getattr(child, "fan_in_fan_out", True):
        return "is of a version of peft that is not known, or stores its weight transposed"
    adapters = []
    for name in child.active_adapters:
        if name not in child.lora_A:
            continue
        if name in variants:
            return f"has an adapter that is a variant of LoRA ({type(variants[name]).__name__})"
        each = LowRank(child.lora_A[name], child.lora_B[name], child.lora_dropout[name], child.scaling[name])
        if not _is_low_rank(each):
            return "has an adapter with hooks, or of other modules than peft makes"
        adapters.append(each)
    return base._replace(adapters=tuple(adapters), layer=child)


def _is_low_rank(adapter: LowRank) -> bool:
    """Whether an adapter computes what its weights say."""
    for linear in (adapter.a, adapter.b):
        if type(linear) is not nn.Linear or not _plain.is_plain(linear) or sharded({"weight": linear.weight}):
            return False
    dropout = adapter.dropout
    return adapter.a.bias is None and type(dropout) in (nn.Identity, nn.Dropout) and _plain.runs_its_class(dropout)


def _base(linear: Any) -> Projection | str:
    """The reading of a projection without adapters."""
    if _plain.is_plain(linear):
        return "is sharded" if sharded({"weight": linear.weight}) else Projection(linear)
    kind, weight = _name(linear), getattr(linear, "weight", None)
    if kind in _OF_4_BITS:
        state = getattr(weight, "quant_state", None)
        if state is None or getattr(state, "packing_format_for_cpu", False):
            return "has no weight in 4 bits yet, or one that is packed for a CPU"
        shape = linear.out_features, linear.in_features
        if tuple(state.shape) != shape:
            return "has a weight in 4 bits of other sizes"
        return Projection(linear, partial(sys.modules["bitsandbytes.functional"].dequantize_4bit, quant_state=state))
    if kind == "bitsandbytes.nn.modules.Linear8bitLt":
        return "quantises its inputs, as weights in 8 bits of bitsandbytes do"
    tensor = type(weight)
    if type(linear) is nn.Linear and tensor.__module__.startswith("torchao."):
        settings = _OF_TORCHAO.get(tensor.__name__)
        if settings is None:
            return f"has a weight that is not known, a {tensor.__name__} of torchao"
        if any(getattr(weight, name) is not None for name in settings):
            return f"quantises or scales its inputs, by a {tensor.__name__} of torchao"
        return Projection(linear, lambda weight: weight.dequantize())
    return f"is a {kind}" if weight is None or kind != "torch.nn.modules.linear.Linear" else f"has a {tensor.__name__}"


def sizes_of(inputs: dict[str, nn.Linear], down: nn.Linear) -> tuple[int, int]:
    """Return (hidden, intermediate) of linear layers that form one FFN; raise TypeError or ValueError otherwise."""
    linears = {**inputs, "down": down}
    for name, linear in linears.items():
        if not (isinstance(linear, nn.Linear) and _plain.is_plain(linear)):
            got = type(linear).__name__
            raise TypeError(f"{name} must be a plain nn.Linear, without a forward or hooks of its own, got {got}")
    first, of_first = next(iter(inputs.items()))
    intermediate, hidden = of_first.weight.shape
    for name, linear in linears.items():
        expected = [hidden, intermediate] if name == "down" else [intermediate, hidden]
        if list(linear.weight.shape) != expected:
            raise ValueError(f"{name}.weight must be {expected}, got {list(linear.weight.shape)}")
        for key, value in linear.named_parameters():
            if value.dtype != of_first.weight.dtype:
                expected_dtype = of_first.weight.dtype
                raise TypeError(f"{name}.{key} must be {expected_dtype} as {first}.weight is, got {value.dtype}")
    return hidden, intermediate


def _name(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
