"""How calls are recorded, replayed and timed, on a GPU and, as a trial, on a CPU.

- Each call runs on one of several copies of its operands, which together are at least twice the L2 cache, so that no
  call finds its operands there. There are at most 256 copies: few tokens are small beside the weights.
- On a GPU, one call on each copy is captured into a CUDA graph, after as many calls outside of it have loaded kernels
  and allocated memory. A time is that between two events around a replay, over the number of copies: without the host.
- All variants are replayed in turn, and the order rotates by one from round to round, so that clocks, temperature and
  predecessors are the same for each. Two rounds warm up, two more decide how many fit the seconds wanted, and that
  number, 10 to 200, is timed.
- A time is the median of its replays; its spread is from the 10th to the 90th percentile.

On a CPU a replay is the calls themselves between two readings of a clock, which only shows that a measurement runs.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.testing.bits import captured

Call = Callable[[int], tuple[Tensor, ...]]

# Errors of a variant that make its row red; a fault of a kernel is a RuntimeError.
FAILURES = (RuntimeError, NotImplementedError, ValueError, TypeError)

MOST_COPIES = 256
WARM_ROUNDS = 2
LEAST_ROUNDS, MOST_ROUNDS = 10, 200


def reason(error: Exception) -> str:
    """An error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _last(call: Call, copies: int) -> tuple[Tensor, ...]:
    """Call on every copy; the outputs of the last one."""
    outputs: tuple[Tensor, ...] = ()
    for i in range(copies):
        outputs = call(i)
    return outputs


class Recording:
    """Calls on every copy of the operands, for replay, timed by ``clock``; ``outputs`` are those of the last copy."""

    def __init__(
        self, call: Call, copies: int, warm: Call | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.copies, self._call, self._clock = copies, call, clock
        self.outputs: tuple[Tensor, ...] = ()
        _last(warm or call, copies)

    def replay(self) -> Callable[[], float]:
        """Call on every copy. The returned function gives their milliseconds after ``wait``."""
        start = self._clock()
        self.outputs = _last(self._call, self.copies)
        milliseconds = (self._clock() - start) * 1e3
        return lambda: milliseconds

    def wait(self) -> None:
        """Wait for all replays."""

    def spoil(self) -> None:
        """Drop the outputs, or fill them with NaN, so that an element that the next replay does not write shows."""
        self.outputs = ()


class Graph(Recording):
    """A recording in a CUDA graph. ``warm`` replaces ``call`` in the calls before the capture."""

    def __init__(self, call: Call, copies: int, warm: Call | None = None) -> None:
        self.copies = copies
        self._graph, self.outputs = captured(lambda: _last(call, copies), lambda: _last(warm or call, copies))

    def replay(self) -> Callable[[], float]:
        start, end = events()
        start.record()
        self._graph.replay()
        end.record()
        return lambda: float(start.elapsed_time(end))

    def wait(self) -> None:
        torch.cuda.synchronize()

    def spoil(self) -> None:
        """Fill the outputs with NaN, integers with -1."""
        for output in self.outputs:
            output.fill_(math.nan if output.is_floating_point() else -1)


def events() -> tuple[Any, Any]:
    """Two CUDA events with times."""
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def measure(
    recordings: Mapping[str, Recording], seconds: float, least: int | None = None, warm: int | None = None
) -> dict[str, list[float]]:
    """Milliseconds of one call, by name: replays in turn for about ``seconds``, ``least`` (10) to 200 rounds.

    Twice ``warm`` (2) rounds come before.
    """
    least, warm = LEAST_ROUNDS if least is None else least, WARM_ROUNDS if warm is None else warm

    def rounds(count: int) -> dict[str, list[float]]:
        spans: dict[str, list[Callable[[], float]]] = {name: [] for name in recordings}
        order = list(recordings)
        for _ in range(count):
            for name in order:
                spans[name].append(recordings[name].replay())
            order = order[1:] + order[:1]  # none always follows the same one
        for recording in recordings.values():
            recording.wait()
        return {name: [span() / recordings[name].copies for span in each] for name, each in spans.items()}

    if not recordings:
        return {}
    rounds(warm)
    once = sum(min(times) * recordings[name].copies for name, times in rounds(warm).items()) / 1000
    wanted = seconds / once if once else MOST_ROUNDS
    return rounds(int(max(least, min(MOST_ROUNDS, wanted))))


class Spread(NamedTuple):
    """The median, the minimum and the 10th and 90th percentiles of samples."""

    median: float
    least: float
    p10: float
    p90: float


def spread(samples: Sequence[float]) -> Spread:
    """The spread of at least one sample. A percentile is the sample nearest to it."""
    ordered = sorted(samples)
    p10, p90 = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
    return Spread(statistics.median(ordered), ordered[0], p10, p90)


def copies_for(bytes_each: int, cache: int) -> int:
    """The number of copies of ``bytes_each`` that are at least twice ``cache`` bytes: 2 to 256."""
    return min(max(2, math.ceil(2 * cache / bytes_each)), MOST_COPIES)


class Device:
    """The device of a measurement: the CPU, whose ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.torch_device = torch.device("cpu")
        self.clock = clock

    def copies_for(self, bytes_each: int) -> int:
        """The number of copies of ``bytes_each`` that are at least twice the last cache, which a CPU's need not be."""
        return copies_for(bytes_each, 0)

    def record(self, call: Call, copies: int, warm: Call | None = None) -> Recording:
        """Record ``call`` on each copy; ``warm`` replaces it before."""
        return Recording(call, copies, warm, self.clock)

    def wait(self) -> None:
        """Wait for all queued work."""


class Gpu(Device):
    """The current CUDA device, ``torch_device``."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def copies_for(self, bytes_each: int) -> int:
        return copies_for(bytes_each, torch.cuda.get_device_properties(self.torch_device).L2_cache_size)

    def record(self, call: Call, copies: int, warm: Call | None = None) -> Recording:
        return Graph(call, copies, warm)

    def wait(self) -> None:
        torch.cuda.synchronize()
