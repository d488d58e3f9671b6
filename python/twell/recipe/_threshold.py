"""The threshold of FATReLU for a trained ReLU model, chosen by its loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from twell._arguments import require_integer, require_number
from twell.recipe._aux import layers


class ThresholdChoice(NamedTuple):
    """The threshold chosen, 0 for none. tried: (threshold, loss) of each evaluation, in order."""

    threshold: float
    tried: tuple[tuple[float, float], ...]


def choose_threshold(
    model: nn.Module,
    evaluate: Callable[[], float],
    *,
    most_loss: float = 1e-3,
    least: float = 2**-10,
    evaluations: int = 16,
) -> ThresholdChoice:
    """Set the greatest threshold that raises the loss by at most ``most_loss``, a share, in all layers of ``model``.

    This is the last step of a training: neurons whose gate is small fire for many tokens and say little. The layers
    must have "relu", or "fatrelu", whose threshold is replaced. With a threshold they have "fatrelu", with 0 "relu".

    The search doubles the threshold from ``least`` while the loss allows it, then halves the interval, as long as there
    are ``evaluations``, of which the first is without a threshold.

    Args:
        evaluate: returns the loss of ``model``, mostly on held-out text. Report the final loss on other text: the
            choice favours this one.

    Raises ValueError for layers with another activation.
    """
    require_number("most_loss", most_loss, 0)
    require_number("least", least, 0)
    require_integer("evaluations", evaluations, 2)
    if not least:
        raise ValueError(f"least must be above 0, got {least}")
    found = layers(model)
    for name, layer in found.items():
        if layer.activation not in ("relu", "fatrelu"):
            raise ValueError(f'{name or "the model"} must have "relu" or "fatrelu", got {layer.activation!r}')

    tried: list[tuple[float, float]] = []

    def loss(threshold: float) -> float:
        for layer in found.values():
            # the threshold first where it falls to 0, which alone "relu" takes
            if threshold:
                layer.activation, layer.threshold = "fatrelu", threshold
            else:
                layer.threshold, layer.activation = 0, "relu"
        tried.append((threshold, float(evaluate())))
        return tried[-1][1]

    limit = loss(0.0) * (1 + most_loss)
    good, bad = 0.0, math.inf
    while len(tried) < evaluations:
        if not good and bad < math.inf:
            break
        candidate = 2 * good or least
        if bad < math.inf:
            candidate = math.sqrt(good * bad)
        if loss(candidate) <= limit:
            good = candidate
        else:
            bad = candidate
    if good != tried[-1][0]:
        for layer in found.values():
            layer.threshold = good
            if not good:
                layer.activation = "relu"
    return ThresholdChoice(good, tuple(tried))
