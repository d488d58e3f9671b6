"""Projections that transformers has loaded in e4m3: their records, and the layers that take their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from twell._float8_mlp import Float8MLP, Float8Projection
from twell._plain import only_moves
from twell._record import watch
from twell._sparsify.modules import DeferredUp, PairDown
from twell.float8 import E4M3, Float8
from twell.integrations import float8_layouts


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
        return made


def stored(where: str, linear: Any) -> Stored | None:
    """What a linear module holds that transformers has loaded in e4m3; None of any other module.

    It knows transformers' ``FP8Linear`` and ``CompressedTensorsFP8Linear`` and the modules of compressed-tensors.
    Raises NotImplementedError for those with other weights, ValueError or TypeError if they are not what they say.
    """
    code, kind = _code(linear), type(linear).__name__
    tensors = {key: t for key, t in (*linear._parameters.items(), *linear._buffers.items()) if t is not None}
    settings: dict[str, Any] = {}
    if kind == "FP8Linear" and code == "transformers.integrations.finegrained_fp8":
        settings = {"quant_method": "fp8", "weight_block_size": linear.block_size}
        settings["activation_scheme"] = linear.activation_scheme
    elif kind == "CompressedTensorsFP8Linear" and code == "transformers.integrations.compressed_tensors":
        # inputs are quantised by token whatever the checkpoint says, and scales lie in a row
        scheme: Any = float8_layouts.Scheme("row")
        tensors["weight_scale"] = tensors["weight_scale"].t()
    elif hasattr(linear, "quantization_scheme") and code.startswith("compressed_tensors."):
        group = linear.quantization_scheme.model_dump(mode="json") | {"targets": ["Linear"]}
        settings = {"quant_method": "compressed-tensors", "config_groups": {"": group}}
    elif type(linear) is nn.Linear and linear.weight.dtype == E4M3:
        raise NotImplementedError(
            f"{where} must have a scale beside its weight in e4m3, got none: transformers reads scales "
            "of compressed-tensors, and weight_scale_inv of quant_method fp8"
        )
    else:
        return None
    if settings:
        scheme = float8_layouts.how(settings, where)
    dtype = tensors["weight"].dtype if "weight" in tensors else None
    if scheme is None or dtype != E4M3:
        raise ValueError(
            f"{where} must hold its weight in {E4M3}, got {dtype}: sparsify the model before it runs first, which "
            "dequantises it, or load it with dequantize=True"
        )
    try:
        weight, inputs = float8_layouts.weight_of(scheme, tensors)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None
    return Stored(weight, linear.bias, inputs)


def _code(linear: Any) -> str:
    """The name of the module with the code that a call of ``linear`` runs."""
    own = vars(linear).get("_old_forward" if only_moves(linear) else "forward", type(linear).forward)
    name: str = getattr(getattr(own, "__func__", own), "__globals__", {}).get("__name__", "")
    return name


class Float8Up(DeferredUp, Float8Projection):  # type: ignore[misc]
    """``fc1`` of a pair in e4m3."""

    def __init__(self, record: Float8, bias: Tensor | None) -> None:
        super().__init__()
        self._hold(record, bias)
        self.out_features, self.in_features = record.shape

    def drops(self) -> bool:
        if super().drops():
            got = f"training mode with {self.dropped_by()}"
            raise NotImplementedError(f"layers in e4m3 are for inference and drop no values, got {got}: call eval()")
        return False


class Float8Down(PairDown, Float8MLP, Float8Projection):
    """``fc2`` of a pair in e4m3: a ``Float8MLP`` that is the down projection itself, as ``SparseDown`` is."""

    def _add(self, name: str, record: Float8, bias: Tensor | None, is_down: bool) -> None:
        if is_down:
            self._hold(record, bias, by_columns=True)
        else:
            # no child, as in ``SparseDown``
            object.__setattr__(self, "up_proj", Float8Up(record, bias))

    def forward(self, x: Tensor | Float8) -> Tensor:
        """x [..., hidden], the very tensor that ``fc1`` got, -> y [..., hidden], bfloat16."""
        self._require_pair(x)  # type: ignore[arg-type]
        self._require_called()
        return super().forward(x)

    @property
    def down_proj(self) -> Float8Down:
        """This layer itself."""
        return self


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


def _refuse(*_: Any, **__: Any) -> NoReturn:
    """``save_pretrained`` of models that version 0.3 pickled."""
    raise NotImplementedError("save_pretrained: the model must not be a pickle of version 0.3, got one: load its files")


_refuse_own = _refuse
