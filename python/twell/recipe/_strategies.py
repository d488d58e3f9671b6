"""The strategies of layers, and naming them from measurements where a compiled graph cannot choose by itself."""

from __future__ import annotations

from torch import nn

from twell._arguments import require
from twell._execution import copies_down
from twell.nn import SparseGatedMLP, explain
from twell.recipe._aux import layers, recorder_of
from twell.recipe._stats import SparsityStats
from twell.strategy import tables
from twell.strategy.costs import Figures, Problem, decide
from twell.strategy.site import AutoStrategy


def strategies(model: nn.Module) -> dict[str, str]:
    """The strategy of most training calls of each layer so far, by its name; ``twell.explain`` gives the reasons.

    For a layer not called in training it is that of other calls, "auto" if there were none. Does not wait.
    """
    chosen = {}
    for name, layer in layers(model).items():
        rows = explain(layer).rows
        training = [row for row in rows if row.kind == "training"] or list(rows)
        # a graph does not count its calls, and a compiled model runs little else
        chosen[name] = max(training, key=lambda row: (bool(row.graph), row.calls)).strategy
    return chosen


def settle(model: nn.Module, stats: SparsityStats) -> dict[str, tuple[str, str]]:
    """Set the strategy of each layer with "auto" to the best one for training by ``stats``; return changes (old, new).

    Eager layers need no help: "auto" measures and chooses. A compiled graph keeps the choice of its trace, usually
    "dense" in training, because nothing had been measured. Changing ``strategy`` makes torch.compile trace the layer
    again at its next call, so call this rarely, as sparsity settles: after a tenth of the run, say, then each time the
    non-zeros have halved. Layers that it named before are decided again if that saves at least 2 %. Layers that the
    caller named stay, as do layers that were not observed and layers on devices that leave no choice.
    ``layer.strategy = "auto"`` undoes it, for instance for inference, where another strategy may be best.

    ``stats`` come from ``SparsityTracker.read`` and are the same on all ranks, and so are the strategies.
    """
    require("stats", stats, SparsityStats, "the SparsityStats that SparsityTracker.read returns")
    changes = {}
    figures = {row.layer: row for row in stats.layers}
    for name, layer in layers(model).items():
        row, before = figures.get(name), layer.strategy
        weight = layer.down_proj.weight
        device = weight.device
        settled = getattr(getattr(layer, "_recorder", None), "settled", None)
        free = (before == "auto" or isinstance(before, AutoStrategy) or before == settled) and not layer.invariant
        if row is None or row.observed_l0 is None or not free or tables.imposed(device.type, device.index):
            continue
        gated, k = isinstance(layer, SparseGatedMLP), layer.hidden
        sizes = (row.tokens // row.calls, k, row.neurons, gated)
        problem = Problem(*sizes, training=True, down_copied=copies_down(weight.detach()))
        current = settled if before == settled else None
        figures_now = Figures(row.observed_l0, row.union)
        decision = decide(problem, figures_now, current, tables.in_use(device))
        if decision.strategy != before:
            changes[name] = (str(before), decision.strategy)
        recorder_of(layer).settled = layer.strategy = decision.strategy  # type: ignore[assignment]
    return changes
