"""The inputs that layers have kept, and what is computed of them after the forward pass."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twell.call import autograd
from twell.nn import compaction
from twell.recipe._aux import layers, require_gradients, whole, with_tokens


class Input(NamedTuple):
    """An input of a layer as the layer saw it, and its rows [M, K]."""

    layer: Any
    x: Tensor
    rows: Tensor


def read_inputs(model: nn.Module) -> list[Input]:
    """The inputs that each layer of ``model`` has kept; clears the record.

    A layer that was not called has one without tokens. So all ranks of a mesh gather the same weights, whatever they
    call.
    """
    read, recorders = list[Input](), dict[str, Any]()
    for name, layer in layers(model).items():
        recorders[name] = recorder = getattr(layer, "_recorder", None)
        if recorder is None or not recorder.keeping:
            raise RuntimeError(f"{name or 'the layer'} keeps no inputs: call record_aux(model, inputs=True) first")
    if not any(recorder.kept or recorder.skippable for recorder in recorders.values()):
        raise RuntimeError(
            f"{next(iter(recorders)) or 'the layer'} kept no input since the last read, and no other layer did: the "
            "model was not called in training mode"
        )
    for name, layer in layers(model).items():
        where, kept = name or "the layer", list(recorders[name].kept)
        recorders[name].kept.clear()
        if torch.is_grad_enabled() and not all(each.grad for each in kept):
            require_gradients(f"{where} kept an input without its gradient", layer)
        found = [Input(layer, x, _rows(x)) for x, _ in kept]
        if not found:
            weight = layer.down_proj.weight
            x = torch.zeros(0, layer.hidden, dtype=weight.dtype, device=weight.device)
            found = [Input(layer, x, x)]
        read += with_tokens(found, [not len(each.rows) for each in found])
    return read


def _rows(x: Tensor) -> Tensor:
    x = whole(x)
    return x.reshape(-1, x.shape[-1])


def gates(given: Input, most: int) -> Tensor:
    """The gates after ReLU [T, N], in fp32, of up to ``most`` rows of an input."""
    layer, x, rows = given
    if (count := len(rows)) > most:
        # one of each of so many equal parts, the first of the first to the last of the last: in the same place of all
        # parts they would be at the same few positions of every sequence of 2^k tokens
        part = torch.arange(most, device=rows.device)
        rows = rows[part * count // most + part * (count // most) // most]
    if layer._is_plain():
        weight, bias = weights(layer, compaction.gate_of(layer), x, rows.dtype)
        gate = F.linear(rows, autograd.into_main(weight, mains_of(layer)[0]), bias)
    else:
        # an adapter, say
        gate = compaction.gate_by_call(layer, rows)
    return F.relu(gate).float()


def mains_of(layer: Any) -> list[Tensor | None]:
    """The tensors to which backward adds the gradients of a layer's weights; None where autograd keeps them."""
    names = ("gate_proj", "up_proj", "down_proj") if layer._gated else ("up_proj", "down_proj")
    mains: list[Tensor | None] | None = layer._main_grads(**{name: getattr(layer, name).weight for name in names})
    return mains or [None] * len(names)


def weights(layer: Any, projection: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The whole weight and bias of a projection, in the dtype of its input."""
    weight = _gathered(projection.weight, x)
    if weight.shape != (layer.intermediate, layer.hidden):
        raise ValueError(
            f"the gate's weight must be [{layer.intermediate}, {layer.hidden}], got {list(weight.shape)}: FSDP1 "
            "has flat parts outside of forward, unless its sharding strategy is SHARD_GRAD_OP or NO_SHARD; "
            "fully_shard (FSDP2) needs nothing"
        )
    bias = None if projection.bias is None else _gathered(projection.bias, x).to(dtype)
    return weight.to(dtype), bias


def _gathered(t: Tensor, x: Tensor) -> Tensor:
    """The whole of a parameter after forward, when FSDP2 has divided it again; ``x`` is as the layer saw it.

    Ranks of a tensor-parallel mesh, which x names, have the same tokens and compute the same gradient. Others have
    tokens of their own, and the gradient is the mean of theirs, as by FSDP2's default.
    """
    if not hasattr(t, "full_tensor"):
        return t
    # a torch without distributed support has no such tensors
    from torch.distributed.tensor import DTensor, Partial, Replicate

    assert isinstance(t, DTensor)
    names = t.device_mesh.mesh_dim_names or (None,) * t.device_mesh.ndim
    same: tuple[Any, ...] = ()
    if isinstance(x, DTensor):
        same = names if x.device_mesh == t.device_mesh else x.device_mesh.mesh_dim_names or ()
    return t.full_tensor(grad_placements=[Replicate() if name in same else Partial("avg") for name in names])
