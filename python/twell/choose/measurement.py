"""Figures on their way from a call that measures to its ``AutoStrategy``: sums on the device, copied without a wait."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.choose import rates
from twell.runtime import device, geometry, modes

# Pinned memory of transfers that are no more, and the event behind each. It is never freed: torch would record an event
# in the stream that used it, and one that is recorded while the stream captures a graph fails when torch looks at it.
_MEMORY: list[tuple[Any, Tensor]] = []


def _memory() -> Tensor:
    """Pinned memory for four integers, to which no copy is on its way."""
    with suppress(IndexError):
        event, memory = _MEMORY.pop()
        if event.query():
            return memory
        _MEMORY.insert(0, (event, memory))
    # which calls outside of inference mode write to as well
    with torch.inference_mode(False):
        return torch.empty(4, dtype=torch.int64, pin_memory=True, device="cpu")


class Transfer:
    """Up to four integers on their way from a GPU to the host."""

    def __init__(self, values: Tensor) -> None:
        self._host, self._event = _memory(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._values = self._host[: len(values)]
        self._values.copy_(values, non_blocking=True)
        self._event.record(torch.cuda.current_stream(values.device))

    def __del__(self, memory: list[tuple[Any, Tensor]] = _MEMORY) -> None:
        memory.append((self._event, self._host))

    def arrived(self) -> bool:
        """Whether ``read`` may be called; does not wait."""
        with device.relaxed_capture():
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[int]:
        """The values, after they have arrived."""
        return self._values.tolist()


def beside_captures(tensor: Tensor) -> AbstractContextManager[None]:
    """A context in which a measurement may allocate while another thread captures a graph."""
    return device.relaxed_capture() if tensor.is_cuda else nullcontext()


class Measurement(NamedTuple):
    """A call whose figures the site, an ``AutoStrategy``, wants; ``screen``: also the candidates of the int8 screen."""

    site: Any
    problem: rates.Problem
    call: int
    screen: bool = False

    @torch.no_grad()
    def dense(self, gate: Tensor, threshold: float = 0.0, candidates: Tensor | None = None) -> None:
        """Leave the figures of a dense gate [..., N], before or after its activation: what is above ``threshold``."""
        with beside_captures(gate), modes.unseen():
            m, n = self.problem.m, self.problem.n
            silent, whole = gate.reshape(-1, n) <= threshold, m // geometry.TOKEN_TILE
            tiles = silent[: whole * geometry.TOKEN_TILE].view(whole, geometry.TOKEN_TILE, n)
            nonzeros = F.pad(n - silent.sum(1), (0, -m % rates.HEAVY_GROUP))
            groups = nonzeros.view(-1, rates.HEAVY_GROUP).sum(1)
            self.counts(groups.sum(), n - tiles.all(1).sum(1), heaviest=groups.amax(), candidates=candidates)

    @torch.no_grad()
    def counts(
        self,
        nonzeros: Tensor,
        unions: Tensor | None,
        most: int | None = None,
        heaviest: Tensor | None = None,
        candidates: Tensor | None = None,
    ) -> None:
        """Leave the number of non-zeros (0-d) and, if known, the union of each tile: the neurons its 128 tokens fire.

        With more than ``most`` non-zeros the unions are not used. ``heaviest``, 0-d, is the number of non-zeros of the
        8 consecutive tokens that have the most. ``candidates`` is how many neurons the screen lists for each tile.
        """
        whole = self.problem.m // geometry.TOKEN_TILE
        with beside_captures(nonzeros), modes.unseen():
            values = {"nonzeros": nonzeros.long()}
            # a partial tile has a smaller union
            for name, of_tiles in (("unions", unions), ("candidates", candidates)):
                if of_tiles is not None and whole:
                    values[name] = of_tiles[:whole].sum()
            if heaviest is not None:
                values["heaviest"] = heaviest.long()
            transfer = Transfer(torch.stack(tuple(values.values())))
        self.site.expect(Expected(self.problem, self.call, transfer, most, tuple(values)))


class Expected(NamedTuple):
    """The counts of a call, still on their way."""

    problem: rates.Problem
    call: int
    transfer: Transfer
    most: int | None
    names: tuple[str, ...]

    def figures(self) -> rates.Figures:
        m, n = self.problem.m, self.problem.n
        values = dict(zip(self.names, self.transfer.read()))
        neurons = m // geometry.TOKEN_TILE * n
        of = {"nonzeros": m, "unions": neurons, "heaviest": min(m, rates.HEAVY_GROUP), "candidates": neurons}
        if self.most is not None and values["nonzeros"] > self.most:
            values.pop("unions", None)
        found = {name: count / of[name] for name, count in values.items()}
        return rates.Figures(found["nonzeros"], *map(found.get, ("unions", "heaviest", "candidates")))
