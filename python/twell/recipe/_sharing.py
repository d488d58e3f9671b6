"""A term of the loss that makes neighbouring tokens fire the same neurons."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twell import _compaction
from twell._activation import activation_of
from twell._arguments import require_integer
from twell.recipe._aux import layers, mean_over_layers, whole


def sharing_term(model: nn.Module, tokens: int = 32, windows: int = 64) -> Tensor:
    """The mean over layers and windows of neighbouring tokens of the norms of neurons over a window, a 0-d tensor.

    With a [T, N] the gate after its activation in a window of T tokens, a window has the sum over neurons of the
    Euclidean norm of a neuron's T values, over the root of T. That is the mean L1 norm of a token's gate if all tokens
    fire the same neurons equally, and up to the root of T times as much if no two tokens share one. So at equal L1 it
    is least where neighbours share neurons, which is what strategy "union" gains from. With T = 1 it is the L1 norm of
    the gate.

    Use it after each forward pass of a model that has been through ``record_aux(model, inputs=True)``, beside
    ``l1_term``; ``TargetSparsity`` combines both. It computes the gates of its windows once more.

    Args:
        tokens: T. Windows are cut from consecutive rows of the layers' inputs, whatever the ends of sequences.
        windows: the most windows per call of a layer, evenly spaced; they bound the cost.

    Reading clears the record. Raises RuntimeError if a layer kept no input.
    """
    require_integer("tokens", tokens, 1)
    require_integer("windows", windows, 1)
    return mean_over_layers(model, norms(read_inputs(model), tokens, windows))


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
        found += [(layer, whole(x)) for x in recorder.kept]
        recorder.kept.clear()
    return found


def norms(inputs: list[tuple[Any, Tensor]], tokens: int, windows: int) -> list[Tensor]:
    """The mean over windows that ``sharing_term`` takes the mean of, for each input that was read."""
    return [_norm(layer, x, tokens, windows) for layer, x in inputs]


def _norm(layer: Any, x: Tensor, tokens: int, windows: int) -> Tensor:
    """The mean over the windows of one call."""
    rows = x.reshape(-1, x.shape[-1])
    # a call with fewer tokens is one window
    tokens = max(1, min(tokens, len(rows)))
    count = len(rows) // tokens
    if count > windows:
        step = count // windows
        rows = rows[: windows * step * tokens].view(windows, step, tokens, -1)[:, 0]
    else:
        rows = rows[: count * tokens].view(count, tokens, -1)
    if layer._is_plain():
        projection: Any = _compaction.gate_of(layer)
        bias = None if projection.bias is None else whole(projection.bias).to(rows.dtype)
        gate = F.linear(rows, whole(projection.weight).to(rows.dtype), bias)
    else:
        # an adapter, say
        gate = _compaction.gate_by_call(layer, rows)
    fired = activation_of(layer.activation, layer.threshold, layer._gated).after(gate).float()
    norms: Tensor = torch.linalg.vector_norm(fired, dim=1)
    return norms.sum(1).mean() / math.sqrt(tokens)
