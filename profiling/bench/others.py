"""Layers of others that benches time beside dense PyTorch, if they can be imported: for each, what to call.

A maker takes the weights [N, K] of a layer, up None without a gate, its activation and whether calls have gradients; it
returns the call y of x, with the weights that are its leaves, or None where it has no such layer.
"""

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Made = tuple[Callable[[Tensor], Tensor], list[Tensor]] | None
_numbers = itertools.count()


def imported(name: str) -> Any:
    """A module; None if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def quack(gate: Tensor, up: Tensor | None, down: Tensor, activation: str, training: bool) -> Made:
    """The fused ReGLU, and relu2 without a gate, of Dao-AILab/quack."""
    known = {("relu", True): "reglu", ("relu2", False): "relu_sq", ("relu", False): "relu"}
    module, name = imported("quack.mlp"), known.get((activation, up is not None))
    if module is None or name is None:
        return None
    # rows of gate and up in turn
    first = (gate if up is None else torch.stack((gate, up), 1).flatten(0, 1)).detach().requires_grad_(training)
    second = down.detach().t().contiguous().requires_grad_(training)
    return lambda x: module.mlp_func(x, first, second, name), [first, second]


def paper(gate: Tensor, up: Tensor | None, down: Tensor, activation: str, training: bool) -> Made:
    """The code of SakanaAI/sparser-faster-llms, whose checkout is in PYTHONPATH; it compiles its kernels on loading."""
    if activation != "relu" or up is None or imported("custom_models") is None:
        return None
    if not training:
        inference = imported("custom_models.twell_modules.twell")
        # what the extension knows of a layer goes with its number
        layer = inference.TwELLGatedMLP(layer_number=next(_numbers), GATE=gate, UP=up, DOWN=down, ext=None)
        return layer, []
    imported("custom_models.hybrid_modules.sparse_ops_loader").load_sparse_ops()
    leaves = [weight.detach().requires_grad_() for weight in (gate, up, down)]
    # it reads the number of tokens from the first two sizes
    return lambda x: torch.ops.sparse_ops.ff_forward_gated(x[None], *leaves)[0][0], leaves


# By the names of variants; whether a CUDA graph captures them: the paper's code launches on the default stream.
ALL: dict[str, tuple[Callable[..., Made], bool]] = {"quack": (quack, True), "paper": (paper, False)}
