"""The optimizer of both scripts, its learning rate, and the end of a run whose loss is lost."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from . import RequestError


class LostLoss(RequestError):
    """The loss is no longer a finite number."""


def require_finite(step: int, advice: str, **values: float) -> None:
    """LostLoss, with ``advice``, unless these values of ``step`` are finite."""
    for what, value in values.items():
        if not math.isfinite(value):
            raise LostLoss(f"the {what} became {value} by step {step}: try {advice}")


def adamw(parameters: Iterable[nn.Parameter], lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices only."""
    every = list(parameters)
    matrices, others = [p for p in every if p.dim() > 1], [p for p in every if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, steps: int, warmup: int, peak: float, least: float = 0.0) -> float:
    """Linear up to ``peak``, then half a cosine to ``least`` at the last of the ``steps``; then ``least``."""
    if step < warmup:
        return peak * (step + 1) / warmup
    passed = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return least + (peak - least) * (1 + math.cos(math.pi * passed)) / 2
