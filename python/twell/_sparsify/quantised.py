"""Projections that transformers has loaded in e4m3: their records, and the layers that take their place."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from twell._float8_mlp import Float8MLP, Float8Projection
from twell._plain import only_moves
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
            raise NotImplementedError(f"pairs in e4m3 are for inference and drop no values, got {got}: call eval()")
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
    """Let the rest of a model run beside layers that were in e4m3, and let ``save_pretrained`` refuse.

    compressed-tensors dequantises a model when it is first called, and wraps all of its modules in code of its own,
    layers of twell among them: so what is left is dequantised here.
    """
    if hasattr(model, "ct_decompress_hook") and not any(p.is_meta for p in model.parameters()):
        from compressed_tensors.compressors import decompress_module

        for module in model.modules():
            decompress_module(module)
        model.ct_decompress_hook.remove()
        del model.ct_decompress_hook
    refuse_saving(model)


def refuse_saving(model: Any) -> None:
    """Let ``save_pretrained`` of a model of transformers refuse, as its configuration tells of other weights."""
    if hasattr(model, "save_pretrained"):
        vars(model)["save_pretrained"] = _refuse


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "save_pretrained: weights must be stored as the configuration says, got layers of twell with others in place "
        "of quantised ones: the files that the model was loaded from hold the same values"
    )


def _refuse_own(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "save_pretrained: files of a class of twell hold weights of 16 or 32 bits, got layers in e4m3: `twell convert` "
        "the files to the stock class, load and quantise that"
    )


def name_in(model: nn.Module) -> None:
    """Name the layers in e4m3 in the configuration of a model of transformers, for ``save_pretrained``.

    In the words of compressed-tensors, as FP8_DYNAMIC. If it tells of other quantised weights, saving is refused. The
    model may stand in others, as in one of ``torch.compile``: the outermost of transformers or twell counts.
    """
    for within in model.modules():
        # a wrapper has attributes of what it wraps
        if hasattr(type(within), "save_pretrained") and hasattr(type(within), "_no_split_modules"):
            _name_in(within)
            return


def _name_in(model: Any) -> None:
    config = model.config
    if type(config).__module__.startswith("twell."):
        vars(model)["save_pretrained"] = _refuse_own
    elif getattr(config, "quantization_config", None) is not None:
        refuse_saving(model)
    else:
        # also within a model around this one
        names = [name for name, module in model.named_modules() if isinstance(module, Float8Projection)]
        of_all = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {
            "targets": [rf"re:(.*\.)?{re.escape(name)}$" for name in names],
            "weights": {**of_all, "strategy": "channel", "dynamic": False},
            "input_activations": {**of_all, "strategy": "token", "dynamic": True},
        }
        # other models may share it
        model.config = copy.deepcopy(config)
        model.config.quantization_config = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": [],
        }
