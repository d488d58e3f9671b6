"""The strategies of layers as ``twell.explain`` shows them: data, and a table."""

import dataclasses
import itertools
import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from twell.choose.rates import SCREENED, Figures

# Columns of a table, and the fewest that reasons have beside the others; else they have lines of their own.
_WIDTH, _BESIDE = 120, 40


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
    """The strategies of layers: ``rows`` has the data, ``str`` makes a table of at most 120 columns.

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
        cells = _merged(self.rows)
        reasons = [each.pop("why") for each in cells]
        # columns of figures are there if a row has something in them
        names = [name for name in cells[0] if name not in _FIGURES or any(each[name] != "-" for each in cells)]
        # the headers of times have two lines
        headers = [[header.rpartition(" ")[i] for header in names] for i in (0, 2)]
        lines = [*filter(any, headers), *([each[name] for name in names] for each in cells)]
        whys = [*([""] * (len(lines) - len(cells) - 1)), "why", *reasons]
        widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
        widths[0] = min(widths[0], _WIDTH - sum(widths[1:]) - 2 * len(names) + 2)
        begin = sum(widths) + 2 * len(widths)
        beside = _WIDTH - begin >= _BESIDE
        table = []
        for (layer, *others), why in zip(lines, whys):
            shown = layer if len(layer) <= widths[0] else f"...{layer[3 - widths[0] :]}"
            # words left-aligned, numbers right-aligned
            aligned = (c.rjust(w) if n in _FIGURES else c.ljust(w) for n, c, w in zip(names, (shown, *others), widths))
            row, wrapped = "  ".join(aligned), textwrap.wrap(why, _WIDTH - (begin if beside else 4))
            if beside and wrapped:
                row += f"  {wrapped.pop(0)}"
            table += [row.rstrip(), *(" " * (begin if beside else 4) + line for line in wrapped)]
        return "\n".join(table)


# Columns of numbers.
_TIMES = {"row time": "row", "union time": "union", "screen time": SCREENED}
_FIGURES = ("non-zeros", "union", *_TIMES)


def _merged(rows: tuple[Choice, ...]) -> list[dict[str, str]]:
    """The cells of the rows by columns. Neighbouring layers share them whose names differ in numbers alone."""
    layers = [(name, [_cells(row) for row in own]) for name, own in itertools.groupby(rows, lambda row: row.layer)]
    merged = []
    for (_, cells), group in itertools.groupby(layers, lambda each: (re.sub(r"\d+", "0", each[0]), each[1])):
        names = [name for name, _ in group]
        parts = [list(dict.fromkeys(part)) for part in zip(*(re.split(r"(\d+)", name) for name in names))]
        ranges = (part[0] if len(part) == 1 else "-".join(sorted(part, key=int)[:: len(part) - 1]) for part in parts)
        name = "".join(ranges) + (f" ({len(names)})" if len(names) > 1 else "")
        merged += [{"layer": name or "-", **each} for each in cells]
    return merged


def _cells(row: Choice) -> dict[str, str]:
    """The cells of a row by the names of their columns, in order, without that of its layer."""
    nonzeros, union, _, candidates = row.figures or (None,) * 4
    listed = "" if candidates is None else f"; candidates {candidates:.1%}"
    measured = "" if row.measured is None else f" (measured in call {row.measured})"
    times = {column: row.costs.get(name) for column, name in _TIMES.items()}
    return {
        "calls": f"{row.graph or row.calls or ''} {row.kind}".strip(),
        "tokens": row.tokens,
        "strategy": row.strategy,
        "non-zeros": "-" if nonzeros is None else f"{nonzeros:.1f}",
        "union": "-" if union is None else f"{union:.1%}",
        **{column: "-" if time is None else f"{time:.2f}" for column, time in times.items()},
        "layout": row.layout or "-",
        "why": row.reason + listed + measured,
    }
