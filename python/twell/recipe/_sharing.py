"""A term of the loss that makes neighbouring tokens fire the same neurons."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twell import _compaction
from twell._arguments import require_integer
from twell.recipe._aux import layers, mean_over_layers, require_gradients, whole, with_tokens


def sharing_term(model: nn.Module, tokens: int = 32, windows: int = 64) -> Tensor:
    """The mean over layers and windows of neighbouring tokens of the norms of neurons over a window, a 0-d tensor.

    With a [T, N] the gate after ReLU, whatever FATReLU's threshold, in a window of T tokens, a window has the sum over
    neurons of the Euclidean norm of a neuron's T values, over the root of T. That is the mean L1 norm of a token's gate
    if all tokens fire the same neurons equally, and up to the root of T times as much if no two tokens share one. So at
    equal L1 it is least where neighbours share neurons, which is what strategy "union" gains from. With T = 1 it is the
    L1 norm of the gate.

    Use it after each forward pass of a model that has been through ``record_aux(model, inputs=True)``, beside
    ``l1_term``; ``TargetSparsity`` combines both. It computes the gates of its windows once more.

    Args:
        tokens: T. Windows are cut from consecutive rows of the layers' inputs, whatever the ends of sequences.
        windows: the most windows per call of a layer, evenly spaced; they bound the cost.

    Reading clears the record. Raises RuntimeError if a layer kept no input, or kept it under no_grad although its
    weights require gradients. Inputs without tokens do not count.
    """
    require_integer("tokens", tokens, 1)
    require_integer("windows", windows, 1)
    return mean_over_layers(model, [norm(gates) for gates in gates_of(read_inputs(model), tokens, windows)])


def read_inputs(model: nn.Module) -> list[tuple[Any, Tensor]]:
    """Each layer of ``model`` with each input that it has kept; reading clears the record."""
    found = []
    for name, layer in layers(model).items():
        recorder = getattr(layer, "_recorder", None)
        where = name or "the layer"
        if recorder is None or not recorder.keeping:
            raise RuntimeError(f"{where} keeps no inputs: call record_aux(model, inputs=True) first")
        if not recorder.kept:
            raise RuntimeError(f"{where} kept no input since the last read: it was not called in training mode")
        kept = with_tokens(recorder.kept, [each.x.numel() == 0 for each in recorder.kept])
        recorder.kept.clear()
        if torch.is_grad_enabled() and not all(each.grad for each in kept):
            require_gradients(f"{where} kept an input without its gradient", layer)
        found += [(layer, each.x) for each in kept]
    return found


def gates_of(inputs: list[tuple[Any, Tensor]], tokens: int, windows: int) -> list[Tensor]:
    """The gates after ReLU [windows, tokens, N], in fp32, of evenly spaced windows of each input that was read."""
    return [_gates(layer, x, tokens, windows) for layer, x in inputs]


def _gates(layer: Any, kept: Tensor, tokens: int, windows: int) -> Tensor:
    x = whole(kept)
    rows = x.reshape(-1, x.shape[-1])
    # a call with fewer tokens is one window
    tokens = max(1, min(tokens, len(rows)))
    count = len(rows) // tokens
    rows = rows[: count * tokens].view(count, tokens, x.shape[-1])
    if count > windows:
        # one of each of so many equal parts, the first of the first to the last of the last: in the same place of all
        # parts windows would begin at the same few positions of every sequence of 2^k tokens
        part = torch.arange(windows, device=rows.device)
        rows = rows[part * count // windows + part * (count // windows) // windows]
    if layer._is_plain():
        projection: Any = _compaction.gate_of(layer)
        weight = _gathered(projection.weight, kept)
        if weight.shape != (layer.intermediate, layer.hidden):
            raise ValueError(
                f"the gate's weight must be [{layer.intermediate}, {layer.hidden}], got {list(weight.shape)}: FSDP1 "
                "has flat parts outside of forward, unless its sharding strategy is SHARD_GRAD_OP or NO_SHARD; "
                "fully_shard (FSDP2) needs nothing"
            )
        bias = None if projection.bias is None else _gathered(projection.bias, kept).to(rows.dtype)
        gate = F.linear(rows, weight.to(rows.dtype), bias)
    else:
        # an adapter, say
        gate = _compaction.gate_by_call(layer, rows)
    return F.relu(gate).float()


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


def l1(gates: Tensor) -> Tensor:
    """The mean over tokens of the L1 norm of gates [windows, tokens, N]."""
    total: Tensor = gates.sum(-1).sum() / max(1, gates.shape[0] * gates.shape[1])
    return total


def norm(gates: Tensor) -> Tensor:
    """The mean over windows that ``sharing_term`` takes the mean of."""
    total: Tensor = torch.linalg.vector_norm(gates, dim=1).sum(1).sum() / max(1, gates.shape[0])
    return total / math.sqrt(gates.shape[1])
