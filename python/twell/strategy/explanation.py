"""The strategies of layers as ``twell.explain`` shows them: data, and a table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from twell.strategy.costs import Figures
from twell.strategy.tables import SCREENED

# Strategies whose predicted times ``Explanation`` shows; that of the screen where a row has one.
_TIMED = ("row", "union", SCREENED, "dense")


class Choice(NamedTuple):
    """The strategy of one layer for one kind of call: a row of ``Explanation``.

    layer: its qualified name. kind: "inference", "training" or "any". tokens: the range of token counts.
    graph: "captured" or "compiled" if a graph keeps this choice, else "". strategy: "union+screen" is "union" with the
    int8 screen. calls: how many calls there were, from compiled graphs without gradients, too.
    figures: the measured sparsity, or None. measured: the call that measured it. costs: predicted times as multiples of
    dense's; empty where nothing is known. layout: how the layer's down weight is stored now, "linear" or "rows".
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
    """The strategies of layers: ``rows`` has the data, ``str`` makes a table."""

    rows: tuple[Choice, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return "no layers of twell"
        cells = [_cells(row) for row in self.rows]
        # columns of the int8 screen are there if a row has something in them
        header = [name for name in cells[0] if name not in _OF_SCREEN or any(each[name] != "-" for each in cells)]
        lines = [header, *([each[name] for name in header] for each in cells)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
        # names left-aligned, numbers right-aligned
        left = (0, 1, 2, 3, len(header) - 1)
        aligned = ([c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(x, widths))] for x in lines)
        return "\n".join("  ".join(cells).rstrip() for cells in aligned)


_OF_SCREEN = ("candidates", f"{SCREENED} time")


def _cells(row: Choice) -> dict[str, str]:
    """The cells of a row by the names of their columns, in order."""
    figures = row.figures or Figures(math.nan, None)
    calls = f"{row.calls} {row.kind}" if row.calls else row.kind
    measured = "" if row.measured is None else f" (measured in call {row.measured})"
    shares = {"union": figures.union, "candidates": figures.candidates}
    times = {f"{name} time": row.costs.get(name) for name in _TIMED}
    return {
        "layer": row.layer or "-",
        "calls": f"{row.graph} {row.kind}" if row.graph else calls,
        "tokens": row.tokens,
        "strategy": row.strategy,
        "non-zeros": "-" if row.figures is None else f"{figures.nonzeros:.1f}",
        **{name: "-" if share is None else f"{share:.1%}" for name, share in shares.items()},
        **{name: "-" if time is None else f"{time:.2f}" for name, time in times.items()},
        "layout": row.layout or "-",
        "why": row.reason + measured,
    }
