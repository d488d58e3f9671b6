"""The strategies of layers as ``twell.explain`` shows them: data, and a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from twell import tuning

# Strategies whose predicted times ``Explanation`` shows.
_TIMED = ("row", "union", "dense")


class Choice(NamedTuple):
    """The strategy of one layer for one kind of call: a row of ``Explanation``.

    layer: its qualified name. kind: "inference", "training" or "any". tokens: the range of token counts.
    graph: "captured" or "compiled" if a graph keeps this choice, else "". calls: how many calls there were, from
    compiled graphs without gradients, too.
    figures: the measured sparsity, or None. measured: the call that measured it. costs: predicted times as multiples of
    dense's; empty where nothing is known.
    """

    layer: str
    kind: str
    tokens: str
    graph: str
    strategy: str
    reason: str
    calls: int = 0
    figures: tuning.Figures | None = None
    measured: int | None = None
    costs: dict[str, float] = {}  # noqa: RUF012


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
        times = [f"{name} time" for name in _TIMED]
        header = ["layer", "calls", "tokens", "strategy", "non-zeros", "union", *times, "why"]
        lines = [header, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
        # names left-aligned, numbers right-aligned
        left = (0, 1, 2, 3, len(header) - 1)
        aligned = ([c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(x, widths))] for x in lines)
        return "\n".join("  ".join(cells).rstrip() for cells in aligned)


def _cells(row: Choice) -> list[str]:
    figures, union = row.figures, None if row.figures is None else row.figures.union
    calls = f"{row.calls} {row.kind}" if row.calls else row.kind
    measured = "" if row.measured is None else f" (measured in call {row.measured})"
    return [
        row.layer or "-",
        f"{row.graph} {row.kind}" if row.graph else calls,
        row.tokens,
        row.strategy,
        "-" if figures is None else f"{figures.nonzeros:.1f}",
        "-" if union is None else f"{union:.1%}",
        *(f"{row.costs[name]:.2f}" if name in row.costs else "-" for name in _TIMED),
        row.reason + measured,
    ]
