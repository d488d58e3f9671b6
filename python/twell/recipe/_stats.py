"""The report of a sparsity tracker: figures of each layer, and of a model."""

from dataclasses import dataclass
from typing import NamedTuple


class LayerStats(NamedTuple):
    """Figures of one layer, over all ranks; None if unknown.

    layer: its qualified name. neurons: N. l0, l1: means over all calls since the last read, per token, as ``Aux``.

    tokens, dead: how many were observed in the last complete window, and the neurons that fired for none of these.

    strategy: of most training calls so far; ``twell.explain`` gives the reasons.
    """

    layer: str
    neurons: int
    l0: float | None
    l1: float | None
    tokens: int
    dead: int | None
    strategy: str


@dataclass(frozen=True)
class SparsityStats:
    """``LayerStats`` of all layers, in the model's order."""

    layers: tuple[LayerStats, ...]

    def summary(self) -> dict[str, float]:
        """Means over the layers: l0, l1, dead (as a share of the neurons), without unknown ones."""
        shares = [None if row.dead is None else row.dead / row.neurons for row in self.layers]
        columns = {"l0": [r.l0 for r in self.layers], "l1": [r.l1 for r in self.layers], "dead": shares}
        known = {name: [v for v in values if v is not None] for name, values in columns.items()}
        return {name: sum(values) / len(values) for name, values in known.items() if values}


def ratio(total: float, count: float) -> float | None:
    return total / count if count else None
