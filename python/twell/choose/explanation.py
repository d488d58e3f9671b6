"""The strategies of layers as ``twell.explain`` shows them: data, and a table."""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from twell.choose.rates import Figures


class Choice(NamedTuple):
    """The strategy of one layer for one kind of call: a row of ``Explanation``.

    layer: its qualified name. kind: "inference", "training" or "any". tokens: the range of token counts.
    graph: "captured" or "compiled" if a graph keeps this choice, else "". strategy: "union+screen" is "union" with the
    int8 screen, "none" that calls raise or run code of others. calls: how many calls there were, from compiled graphs
    without gradients, too. figures: the measured sparsity, or None. measured: the call that measured it. costs:
    predicted times as multiples of dense's; empty where nothing is known. layout: how the layer's down weight is stored
    now, "linear" or "rows".
    """

    layer: str
    kind: str
    tokens: str
    graph: str
    strategy: str
    reason: str
    calls: int = 0
    figures: Figures | None = None
    measured: int | None = None
    costs: dict[str, float] = {}  # noqa: RUF012
    layout: str = ""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The strategies of layers: ``rows`` has the data, ``str`` makes a table, with the reason below each line.

    Neighbouring layers whose rows are alike share them there: "layers.0-27.mlp (28)" are 28 layers with such names.
    """

    rows: tuple[Choice, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return "no layers of twell"
        lines = [("layer", "calls", "tokens", "strategy", "non-zeros", "union", "layout", ""), *_merged(self.rows)]
        *columns, _ = zip(*lines)
        widths = [max(map(len, column)) for column in columns]
        table = []
        for *cells, why in lines:
            table.append("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())
            table += [f"    {why}"] if why else []
        return "\n".join(table)


def _merged(rows: tuple[Choice, ...]) -> list[tuple[str, ...]]:
    """The cells of the rows. Neighbouring layers share them whose names differ in numbers alone."""
    layers = [(name, [_cells(row) for row in own]) for name, own in itertools.groupby(rows, lambda row: row.layer)]
    merged = []
    for (_, cells), group in itertools.groupby(layers, lambda each: (re.sub(r"\d+", "0", each[0]), each[1])):
        names = [name for name, _ in group]
        parts = [list(dict.fromkeys(part)) for part in zip(*(re.split(r"(\d+)", name) for name in names))]
        ranges = (part[0] if len(part) == 1 else "-".join(sorted(part, key=int)[:: len(part) - 1]) for part in parts)
        name = "".join(ranges) + (f" ({len(names)})" if len(names) > 1 else "")
        merged += [(name or "-", *each) for each in cells]
    return merged


def _cells(row: Choice) -> tuple[str, ...]:
    """The cells of a row without that of its layer, and the reason."""
    nonzeros, union, *_ = row.figures or (None, None)
    measured = "" if row.measured is None else f" (measured in call {row.measured})"
    calls = f"{row.graph or row.calls or ''} {row.kind}".strip()
    figures = "-" if nonzeros is None else f"{nonzeros:.1f}", "-" if union is None else f"{union:.1%}"
    return calls, row.tokens, row.strategy, *figures, row.layout or "-", row.reason + measured
