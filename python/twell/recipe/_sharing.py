"""A term of the loss that makes neighbouring tokens fire the same neurons."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twell import _autograd, _compaction
from twell._arguments import require_integer
from twell.recipe._aux import mean_over_layers
from twell.recipe._inputs import Input, mains_of, read_inputs, weights


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

    Reading clears the record. Raises RuntimeError if no layer kept an input, or one kept it under no_grad although its
    weights require gradients. Inputs without tokens do not count; a layer without others has a term of 0.
    """
    require_integer("tokens", tokens, 1)
    require_integer("windows", windows, 1)
    return mean_over_layers(model, [norm(gates) for gates in gates_of(read_inputs(model), tokens, windows)])


def gates_of(inputs: list[tuple[Any, list[Input]]], tokens: int, windows: int) -> list[Tensor]:
    """The gates after ReLU [windows, tokens, N], in fp32, of evenly spaced windows of each input that was read."""
    return [_gates(each, tokens, windows) for _, found in inputs for each in found]


def _gates(given: Input, tokens: int, windows: int) -> Tensor:
    layer, kept, rows = given
    # a call with fewer tokens is one window
    tokens = max(1, min(tokens, len(rows)))
    count = len(rows) // tokens
    rows = rows[: count * tokens].view(count, tokens, rows.shape[-1])
    if count > windows:
        # one of each of so many equal parts, the first of the first to the last of the last: in the same place of all
        # parts windows would begin at the same few positions of every sequence of 2^k tokens
        part = torch.arange(windows, device=rows.device)
        rows = rows[part * count // windows + part * (count // windows) // windows]
    if layer._is_plain():
        weight, bias = weights(layer, _compaction.gate_of(layer), kept, rows.dtype)
        gate = F.linear(rows, _autograd.into_main(weight, mains_of(layer)[0]), bias)
    else:
        # an adapter, say
        gate = _compaction.gate_by_call(layer, rows)
    return F.relu(gate).float()


def l1(gates: Tensor) -> Tensor:
    """The mean over tokens of the L1 norm of gates [windows, tokens, N]."""
    total: Tensor = gates.sum(-1).sum() / max(1, gates.shape[0] * gates.shape[1])
    return total


def norm(gates: Tensor) -> Tensor:
    """The mean over windows that ``sharing_term`` takes the mean of."""
    total: Tensor = torch.linalg.vector_norm(gates, dim=1).sum(1).sum() / max(1, gates.shape[0])
    return total / math.sqrt(gates.shape[1])
