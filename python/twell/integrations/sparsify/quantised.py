"""Projections that are no plain ``nn.Linear``: in e4m3, with layers that take their place, or kept as they are."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twell.call.plain import only_moves
from twell.nn import projections as _projections
from twell.nn.float8 import Float8MLP, Float8Projection
from twell.nn.pairs import DeferredUp, PairDown
from twell.nn.record import watch
from twell.ops.float8 import BLOCK, E4M3, Float8, float8

# The names of scales beside a weight, which multiply: its own, and of inputs.
SCALES, INPUTS = ("weight_scale", "weight_scale_inv"), ("input_scale", "activation_scale")


class Stored(NamedTuple):
    """A projection in e4m3. weight: [out, in]. inputs: the static scale of its inputs, float32 []; None without."""

    weight: Float8
    bias: Tensor | None
    inputs: Tensor | None

    def plain(self) -> nn.Linear:
        """The projection with its weight dequantised to bfloat16."""
        rows, columns = self.weight.shape
        made = nn.Linear(columns, rows, False, device="meta")
        made.weight = nn.Parameter(self.weight.dequantize(torch.bfloat16), requires_grad=False)
        if self.bias is not None:
            made.bias = nn.Parameter(self.bias.detach(), requires_grad=False)
        # files of the model have another
        vars(made)["_dequantised"] = True
        return made


def stored(where: str, linear: Any) -> Stored | None:
    """What a linear module holds that transformers has loaded in e4m3; None of any other module.

    It knows transformers' ``FP8Linear`` and ``CompressedTensorsFP8Linear`` and the modules of compressed-tensors.
    Raises NotImplementedError for those with other weights, ValueError or TypeError if they are not what they say.
    """
    code, kind = _code(linear), type(linear).__name__
    tensors = {key: t for key, t in (*linear._parameters.items(), *linear._buffers.items()) if t is not None}
    if kind == "CompressedTensorsFP8Linear" and code == "transformers.integrations.compressed_tensors":
        # inputs are quantised by token whatever the checkpoint says, and scales lie in a row
        tensors = {"weight": tensors["weight"], "weight_scale": tensors["weight_scale"].t()}
    elif hasattr(linear, "quantization_scheme") and code.startswith("compressed_tensors."):
        require_e4m3(where, linear.quantization_scheme.model_dump(mode="json"))
    elif type(linear) is nn.Linear and linear.weight.dtype == E4M3:
        raise NotImplementedError(
            f"{where} must have a scale beside its weight in e4m3, got none: transformers reads scales "
            "of compressed-tensors, and weight_scale_inv of quant_method fp8"
        )
    elif kind != "FP8Linear" or code != "transformers.integrations.finegrained_fp8":
        return None
    weight, scale, inputs = (
        next((tensors[n] for n in names if n in tensors), None) for names in (("weight",), SCALES, INPUTS)
    )
    if weight is None or weight.dtype != E4M3:
        raise ValueError(
            f"{where} must hold its weight in {E4M3}, got {None if weight is None else weight.dtype}: sparsify the "
            "model before it runs first, which dequantises it, or load it with dequantize=True"
        )
    if scale is None:
        got = ", ".join(sorted(tensors))
        raise ValueError(f"{where}: a weight in e4m3 must be weight and {' or '.join(SCALES)}, got {got}")
    try:
        # exponents, from writers without the dtype
        record = float8(weight, scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale)
        static = None if inputs is None else float8(weight, inputs, "tensor").scale
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None
    return Stored(record, linear.bias, static)


def require_e4m3(where: str, group: Mapping[str, Any]) -> None:
    """Raise NotImplementedError unless compressed-tensors' weights and inputs of a group are those of a ``Float8MLP``.

    Scales are by row, tensor or block; inputs are quantised by token, group or tensor as they come, or have one scale.
    """
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    by, dynamic = weights.get("strategy"), inputs.get("dynamic", False)
    is_e4m3 = all(
        (each.get("num_bits"), each.get("type"), each.get("symmetric", True)) == (8, "float", True)
        for each in (weights, inputs)
    )
    scaled = by in ("channel", "tensor", "block") and not weights.get("dynamic")
    static = not dynamic and inputs.get("strategy") == "tensor" and by != "block"
    if not (is_e4m3 and scaled and (dynamic is True or static)):
        kind = "dynamic" if dynamic else "static"
        raise NotImplementedError(
            f"{where} must be in bfloat16, or weights and inputs in e4m3 with a scale by row, tensor or block of "
            f"{BLOCK} x {BLOCK}, got weights of {_said(weights)} and {kind} inputs of {_said(inputs)}: take a "
            "checkpoint in bfloat16 or in such a format, as FP8_DYNAMIC of compressed-tensors"
        )


def _said(numbers: Mapping[str, Any]) -> str:
    offset = "" if numbers.get("symmetric", True) else " with offsets"
    return f"{numbers.get('num_bits', 16)}-bit {numbers.get('type', 'float')}{offset} by {numbers.get('strategy')}"


def _code(linear: Any) -> str:
    """The name of the module with the code that a call of ``linear`` runs."""
    own = vars(linear).get("_old_forward" if only_moves(linear) else "forward", type(linear).forward)
    name: str = getattr(getattr(own, "__func__", own), "__globals__", {}).get("__name__", "")
    return name


_ALONE = (
    "a pair in e4m3 must run as a whole, for inference, got code that uses what its fc1 or its activation returns: "
    "call eval() if it is a dropout, and remove hooks, adapters and other layers"
)


class Float8Up(DeferredUp, Float8Projection):  # type: ignore[misc]
    """``fc1`` of a pair in e4m3."""

    def __init__(self, record: Float8, bias: Tensor | None) -> None:
        super().__init__()
        self._hold(record, bias)
        self.out_features, self.in_features = record.shape

    def product(self, *_: Any) -> Tensor:
        raise NotImplementedError(_ALONE)


class Float8Down(PairDown, Float8MLP, Float8Projection):
    """``fc2`` of a pair in e4m3: a ``Float8MLP`` that is the down projection itself, as ``SparseDown`` is."""

    def _add(self, name: str, record: Float8, bias: Tensor | None, is_down: bool) -> None:
        if is_down:
            self._hold(record, bias, by_columns=True)
        else:
            # no child, as in ``SparseDown``
            object.__setattr__(self, "up_proj", Float8Up(record, bias))

    def forward(self, x: Tensor | Float8, hidden: bool = False) -> Tensor:
        """x [..., hidden], the input of ``fc1``, -> y [..., hidden], bfloat16."""
        if hidden:
            raise NotImplementedError(_ALONE)
        return super().forward(x)


def layer(projections: Mapping[str, Stored], pair: bool, options: dict[str, Any]) -> Any:
    """The layer of projections in e4m3 in the order of a form, none with blocks; of a pair its second half.

    Static scales of inputs are those of gate and up, the larger one where they differ, as in engines.
    """
    *inputs, down = projections.values()
    scales = [each.inputs for each in inputs if each.inputs is not None]
    gate = [None] * (2 - len(inputs))
    records: list[Any] = [*gate, *(each.weight for each in inputs), down.weight]
    biases = [*gate, *(each.bias for each in inputs), down.bias]
    scale = torch.stack(scales).amax() if len(scales) == len(inputs) else None
    if pair:
        return Float8Down(*records, biases=biases, input_scale=scale, **options)
    return Float8MLP(*records, biases=biases, input_scale=scale, names=tuple(projections), **options)


def settle(model: Any) -> None:
    """Let the rest of a model run beside layers that were in e4m3; ``save_pretrained`` refuses it.

    compressed-tensors dequantises a model when it is first called, and wraps all of its modules in code of its own,
    layers of twell among them: so what is left is dequantised here.
    """
    if hasattr(model, "ct_decompress_hook") and not any(p.is_meta for p in model.parameters()):
        from compressed_tensors.compressors import decompress_module

        for module in model.modules():
            decompress_module(module)
        model.ct_decompress_hook.remove()
        del model.ct_decompress_hook
    watch()


def kept_dtype(where: str, projection: Any) -> torch.dtype | None:
    """The dtype of the product of a projection that a layer keeps as it is; None for one that it does not keep.

    Those are wrappers of peft, whatever they do, around a plain ``nn.Linear`` or a weight that can be dequantised, and
    such a weight itself. Raises TypeError for a quantised one that no layer could read.
    """
    linear = projection
    while type(linear).__module__.startswith("peft."):
        inner = linear._modules.get("base_layer") or linear._modules.get("original_module")
        if inner is None:
            return None
        linear = inner
    quantised = type(linear).__module__.startswith("bitsandbytes.") or (
        type(linear) is nn.Linear and type(linear.weight).__module__.startswith("torchao.")
    )
    if not quantised:
        plain = type(linear) is nn.Linear and type(linear.weight) is nn.Parameter
        return linear.weight.dtype if plain and linear is not projection else None
    reading = _projections.read(linear)
    if isinstance(reading, str):
        raise TypeError(
            f"{where} must have a weight that each call can dequantise, in 4 bits of bitsandbytes or weight-only of "
            f"torchao, got one that {reading}; to leave it as it is, have filter_fn return False for it"
        )
    return reading.own_dtype


def with_plain(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> nn.Module:
    """A shallow copy of ``module`` in which projections are plain ones without values, with weights of these dtypes."""
    made: nn.Module = _shallow(module)
    for name, dtype in dtypes.items():
        part, _, key = name.rpartition(".")
        holder = made
        if part:
            if made._modules[part] is module._modules[part]:
                made._modules[part] = _shallow(module._modules[part])
            holder = made.get_submodule(part)
        linear: Any = holder._modules[key]
        plain = nn.Linear(linear.in_features, linear.out_features, False, device="meta", dtype=dtype)
        if linear.bias is not None:
            # quantised projections cast their biases
            plain.bias = nn.Parameter(linear.bias.detach().to("meta", dtype))
        holder._modules[key] = plain
    return made


def _shallow(module: Any) -> Any:
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made
