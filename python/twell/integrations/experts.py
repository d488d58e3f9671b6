"""Routed experts of transformers, stacked in tensors [E, N, K], through ``twell.sparse_experts``.

``sparsify`` of ``twell.integrations.transformers`` serves those with an activation of the ReLU family. A model does by
itself with ``from_pretrained(..., experts_implementation="twell")``, after an import of this module.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twell.base.activation import Activation
from twell.call.experts import sparse_experts
from twell.choose.plan import Facts, unpackable
from twell.integrations.sparsify.equivalence import family_of
from twell.runtime import modes
from twell.runtime.log import warn_once

try:
    from transformers.integrations import moe
except ImportError:
    # older than 5.0, with no experts that choose their function
    moe = None

NAME = "twell"


class Settings(NamedTuple):
    """How experts run; of an activation, what it was made of, and of the ReLU family."""

    act: Any
    activation: Activation | None
    strategy: str = "auto"
    compression: int = 8


def is_experts(module: nn.Module) -> bool:
    """Whether a module is experts that choose their function by name."""
    return moe is not None and all(
        hasattr(module, name) for name in ("has_gate", "is_transposed", "down_proj", "act_fn", "num_experts")
    )


# found before a trace, or as one begins
@modes.constant
def why_not(experts: Any) -> str:
    """Why twell does not compute these experts; "" if it does."""
    dtype = experts.down_proj.dtype
    if dtype.itemsize < 2:
        return f"their weights must be in 16 or 32 bits, got {dtype}: those of quantised experts stay as they are"
    if experts.is_transposed or (experts.has_gate and not experts.is_concatenated):
        return "their weights must be [E, N, K], gate and up one after the other"
    if experts.has_bias or experts.has_post_expert_norm:
        return "they must have weights alone, got biases or norms"
    if experts.has_gate and type(experts)._apply_gate is not moe._default_apply_gate:
        return "they must compute act(gate) * up, got a function of their own"
    if _settings(experts).activation is None:
        return f"their activation must be of the ReLU family, got {type(experts.act_fn).__name__}"
    _, k, n = experts.down_proj.shape
    refusal = unpackable(Facts("their sizes", n=n, k=k), instead="")
    return refusal.message if refusal else ""


def _settings(experts: Any) -> Settings:
    """The settings of experts, with their activation as it is now."""
    known: Settings | None = experts.__dict__.get("_twell")
    if known is None or known.act is not experts.act_fn:
        found = family_of(experts.act_fn, torch.float32)
        known = Settings(experts.act_fn, found, *(known[2:] if known else ()))
        experts.__dict__["_twell"] = known
    return known


def forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What experts compute: hidden_states [T, K], top_k_index and top_k_weights [T, k] -> [T, K].

    Those that twell does not compute run as by "grouped_mm", after a warning with the reason.
    """
    if reason := why_not(experts):
        warn_once(f"{type(experts).__name__} run as without twell: {reason}")
        others: Callable[..., Tensor] = moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]
        return others(experts, hidden_states, top_k_index, top_k_weights)
    w_gate, w_up = projections(experts)
    if experts._is_expert_parallel:
        # those of other ranks
        top_k_index = torch.where(top_k_index < experts.num_experts, top_k_index, -1)
    _, activation, strategy, compression = experts.__dict__["_twell"]
    options = {"strategy": strategy, "compression": compression, **activation.options()}
    return sparse_experts(hidden_states, w_up, experts.down_proj, top_k_index, top_k_weights, w_gate=w_gate, **options)


def projections(experts: Any) -> tuple[Tensor | None, Tensor]:
    """The gate and up projections [E, N, K] of experts that twell computes; without a gate the first is None."""
    return experts.gate_up_proj.chunk(2, 1) if experts.has_gate else (None, experts.up_proj)


def activation(experts: Any) -> Activation:
    """The activation of experts that twell computes."""
    found = _settings(experts).activation
    assert found is not None
    return found


if moe is not None:
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, forward)


def found(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Experts in ``model`` that twell computes."""
    for name, module in model.named_modules():
        if is_experts(module) and not why_not(module):
            yield name, module


def left(model: nn.Module) -> str:
    """Which experts in ``model`` twell does not compute, and why; "" if there are none."""
    reasons: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if is_experts(module) and (reason := why_not(module)):
            reasons.setdefault(reason, []).append(f"{name} ({type(module).__name__})")
    return "; ".join(
        f"experts that twell does not compute: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: "
        f"{reason}"
        for reason, names in reasons.items()
    )


def serve(model: Any, experts: list[Any], strategy: str, compression: int) -> None:
    """Let these experts run through twell. In a model for inference their down weights are laid by rows."""
    for each in experts:
        own = strategy if strategy in ("dense", "row") else "auto"
        each.__dict__["_twell"] = _settings(each)._replace(strategy=own, compression=compression)
        each.config._experts_implementation = NAME
        weight = each.down_proj
        if not (model.training or weight.is_meta or weight.stride(1) == 1):
            # [E, K, N] as the transposed view of a tensor [E, N, K], which kernels read in place
            weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
