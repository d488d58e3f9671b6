"""Kinds of calls whose way is known: one look-up leads from the call to what computes y.

A call that took the long way leaves a ``Known``. Who looks it up asks only what no kernel checks; how the operands lie
is compared by the program (``Executable.ran``).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.strategy.plan import Route
from twell.strategy.site import AutoStrategy, Bucket

# Kinds that a layer remembers.
_MOST = 64

# of x, w_gate, w_up, w_down and biases as ``Operands`` has them: y, or None, with nothing run, if they lie otherwise
Run = Callable[..., "Tensor | None"]


class Known(NamedTuple):
    """What computes y of a kind of calls; with a site, while ``bucket`` has this ``version``."""

    run: Run
    site: AutoStrategy | None = None
    bucket: Bucket | None = None
    version: int = 0

    def begins(self, x: Tensor) -> bool:
        """Whether a call on ``x`` may run so; it is counted then."""
        site, bucket = self.site, self.bucket
        if site is None or bucket is None:
            return True
        return bucket.version == self.version and site.heeds(x) and site.counted(bucket)

    def undo(self) -> None:
        """Take back that a call was counted, for one that begins again."""
        if self.site is not None and self.bucket is not None:
            self.site.uncount(self.bucket)


# by what tells the kinds apart
Memory = dict[tuple[Any, ...], Known]


def remember(
    memory: Memory,
    kind: tuple[Any, ...],
    run: Run,
    route: Route,
    site: AutoStrategy | None,
    chosen: tuple[torch.Size, int, bool, bool, bool, bool, bool],
) -> None:
    """Let calls of a kind, which ran by ``route``, go to ``run``.

    chosen: the arguments with which the ``site``, if there is one, was asked for the route, with the shape for x.
    """
    known = Known(run)
    if site is not None:
        found = site.routes.get(chosen)
        if found is None:
            # it measures, or waits for figures
            return
        known = Known(run, site, found[0], found[0].version)
        # another thread may have decided meanwhile
        if found[1] is not route or site.routes.get(chosen) is not found:
            return
    if len(memory) >= _MOST:
        memory.clear()
    memory[kind] = known
