"""The threshold of FATReLU for a trained ReLU model, chosen by its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twell._activation import ActivationName
from twell._arguments import require_integer, require_number, require_positive
from twell._compaction import MLP
from twell._configuration import follow
from twell.recipe._aux import layers, mean_over_ranks


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
    group: dist.ProcessGroup | None = None,
) -> ThresholdChoice:
    """Set the greatest threshold that raises the loss by at most ``most_loss``, a share, in all layers of ``model``.

    This is the last step of a training: neurons whose gate is small fire for many tokens and say little. The layers
    must have "relu", or "fatrelu", whose threshold is replaced. With a threshold they have "fatrelu", with 0 "relu".
    A ``PreTrainedModel`` names it in its configuration, too, as ``TargetThreshold.settle`` says.

    The search doubles the threshold from ``least`` until the loss forbids it for the first time, then halves the
    interval, as long as there are ``evaluations``, of which the first is without a threshold. So with few of them it
    ends below the greatest, and finds 0 if ``least`` is too much.

    Args:
        evaluate: returns the loss of ``model``, mostly on held-out text. Report the final loss on other text: the
            choice favours this one.
        group: of ranks, all of which must call this: they take the mean of their losses, and choose alike. None: all,
            if torch.distributed is initialised.

    Raises ValueError for layers with another activation or with a threshold that moves, for a loss that is NaN or not
    above 0, for an infinite one without a threshold, and for one that no threshold changes. After an error the layers
    are as before.
    """
    require_number("most_loss", most_loss, 0)
    require_positive("least", least)
    require_integer("evaluations", evaluations, 2)
    found = require_relu(model)

    require_settled(found.values())

    before = [(layer, layer.activation, layer.threshold) for layer in found.values()]
    tried: list[tuple[float, float]] = []

    def put(layer: MLP, activation: ActivationName, threshold: float | Tensor) -> None:
        # "relu" takes a threshold of 0 alone
        layer.threshold, layer.activation = 0, activation
        layer.threshold = threshold

    def loss(threshold: float) -> float:
        for layer in found.values():
            put(layer, "fatrelu" if threshold else "relu", threshold)
        own = torch.tensor(
            float(evaluate()), dtype=torch.float64, device=next(iter(found.values())).down_proj.weight.device
        )
        value = float(mean_over_ranks(own, group))
        # a threshold may make a loss infinite: that is too much
        if not value > 0 or (value == math.inf and not threshold):
            raise ValueError(f"evaluate must return a finite loss above 0, got {value} with threshold {threshold:g}")
        tried.append((threshold, value))
        return value

    good, bad = 0.0, math.inf
    try:
        first = loss(0.0)
        limit = first + most_loss * first
        while len(tried) < evaluations and (good or bad == math.inf):
            candidate = 2 * good or least
            if bad < math.inf:
                candidate = math.sqrt(good * bad)
            if loss(candidate) <= limit:
                good = candidate
            else:
                bad = candidate
        if all(value == first for _, value in tried):
            raise ValueError(
                f"evaluate must return the loss of model, got {first} for every threshold up to {tried[-1][0]:g}"
            )
        for layer in found.values():
            put(layer, "fatrelu" if good else "relu", good)
        follow(model)
    except BaseException:
        for settings in before:
            put(*settings)
        raise
    return ThresholdChoice(good, tuple(tried))


def require_relu(model: nn.Module) -> dict[str, MLP]:
    """The twell layers of ``model``; ValueError unless they can have a threshold."""
    found = layers(model)
    for name, layer in found.items():
        if layer.activation not in ("relu", "fatrelu"):
            raise ValueError(f'{name or "the model"} must have "relu" or "fatrelu", got {layer.activation!r}')
    return found


def require_settled(found: Iterable[MLP]) -> None:
    """ValueError if the threshold of a layer moves."""
    if any(isinstance(layer.threshold, Tensor) for layer in found):
        raise ValueError(
            "the threshold of the layers must be a number, got a tensor, as of a TargetThreshold that moves it: "
            "settle() ends that one"
        )
