"""The protocol of all benchmarks: how calls are recorded, replayed and timed, on a GPU and, as a trial, on a CPU.

- Each call runs on one of several copies of its operands, which together are at least twice the L2 cache, so that no
  call finds its operands there. There are at most 256 copies: few tokens are small beside the weights. All calls on a
  layer share the weights, as in a model's larger batches; ``decode`` copies them, too.
- On a GPU, one call on each copy is captured into a CUDA graph, after as many calls outside of it have loaded kernels
  and allocated memory. A time is that between two events around a replay, over the number of copies: without the host.
- All variants are replayed in turn, and the order rotates by one from round to round, so that clocks, temperature and
  predecessors are the same for each. Two rounds warm up, two more decide how many fit the seconds wanted, and that
  number, 10 to 200, is timed.
- A time is the median of its replays; its spread is from the 10th to the 90th percentile.
- The ceilings for rates are measured in the same run, by a large matrix product and a large copy; the machine line is
  read while the GPU is busy.

``Gpu`` and ``Cpu`` have one interface. On a CPU a replay is the calls themselves between two readings of a clock,
without the GPU's part (poisoned memory, peak memory): its times only show that a benchmark runs.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from twell import testing
from twell._runtime import resolve

Call = Callable[[int], tuple[Tensor, ...]]

# Errors of a variant that make its row red; a fault of a kernel is a RuntimeError.
FAILURES = (RuntimeError, NotImplementedError, ValueError, TypeError)

MOST_COPIES = 256
WARM_ROUNDS = 2
LEAST_ROUNDS, MOST_ROUNDS = 10, 200

# Replays of the matrix product while the machine line is read: about two seconds on an H200.
BUSY_REPLAYS = 800

# Cycles of sleep while the host queues a whole call: 20 ms on an H200.
SLEEP_CYCLES = 40_000_000


def reason(error: Exception) -> str:
    """An error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


@dataclasses.dataclass
class Ceilings:
    """Peak rates of the machine in flop/s and bytes/s: those of arithmetic and memory measured in this run."""

    flops: float
    memory: float
    l2: float


class Recording(Protocol):
    """Calls on every copy of the operands, for replay; ``outputs`` are those of the last copy."""

    copies: int
    outputs: tuple[Tensor, ...]

    def replay(self) -> Callable[[], float]:
        """Run the calls. The returned function gives their milliseconds after ``wait``."""
        ...

    def wait(self) -> None:
        """Wait for all replays."""
        ...

    def spoil(self) -> None:
        """Fill the outputs with NaN, so that an element that the next replay does not write shows."""
        ...


class Graph:
    """A recording in a CUDA graph. ``warm`` replaces ``call`` in the calls before the capture."""

    def __init__(self, call: Call, copies: int, warm: Call | None = None) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for i in range(copies):
                (warm or call)(i)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.copies = copies
        self.outputs: tuple[Tensor, ...] = ()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for i in range(copies):
                self.outputs = call(i)

    def replay(self) -> Callable[[], float]:
        """Start a replay."""
        start, end = _events()
        start.record()
        self._graph.replay()
        end.record()
        return lambda: float(start.elapsed_time(end))

    def wait(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize()

    def spoil(self) -> None:
        """Fill the outputs with NaN."""
        for output in self.outputs:
            output.view(torch.uint8).fill_(0xFF)


def _events() -> tuple[Any, Any]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Loop:
    """A recording without a GPU: the calls themselves, timed by ``clock``, in seconds."""

    def __init__(
        self, call: Call, copies: int, warm: Call | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.copies, self._call, self._clock = copies, call, clock
        self.outputs: tuple[Tensor, ...] = ()
        for i in range(copies):
            (warm or call)(i)

    def replay(self) -> Callable[[], float]:
        """Call on every copy."""
        start = self._clock()
        for i in range(self.copies):
            self.outputs = self._call(i)
        milliseconds = (self._clock() - start) * 1e3
        return lambda: milliseconds

    def wait(self) -> None:
        """Return at once: nothing runs asynchronously."""

    def spoil(self) -> None:
        """Drop the outputs: a replay makes new ones."""
        self.outputs = ()


def measure(recordings: Mapping[str, Recording], seconds: float, least: int = LEAST_ROUNDS) -> dict[str, list[float]]:
    """Milliseconds of one call, by name: replays in turn for about ``seconds``, ``least`` to 200 rounds."""

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
    rounds(WARM_ROUNDS)
    once = sum(min(times) * recordings[name].copies for name, times in rounds(WARM_ROUNDS).items()) / 1000
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


class Device(Protocol):
    """The device of a benchmark: records calls and measures memory, kernels and ceilings."""

    torch_device: torch.device

    def copies_for(self, bytes_each: int) -> int:
        """The number of copies of ``bytes_each`` that are at least twice the last cache."""
        ...

    def record(self, call: Call, copies: int, warm: Call | None = None) -> Recording:
        """Record ``call`` on each copy."""
        ...

    def wait(self) -> None:
        """Wait for all queued work."""
        ...

    def poison(self) -> None:
        """Leave NaN in the memory of the next allocations."""
        ...

    def peak(self, call: Call) -> int | None:
        """Peak bytes of a call above its operands; None if unknown."""
        ...

    def kept(self, forward: Callable[[int], Tensor]) -> int | None:
        """Bytes that a forward pass saves for backward, without its operands and y; None if unknown."""
        ...

    def kernel_times(self, call: Call, copies: int) -> dict[str, float]:
        """Mean milliseconds of each kernel in one call, by symbol; "torch" is the rest."""
        ...

    def ceilings(self, dtype: torch.dtype, l2_tbs: float) -> tuple[Ceilings, str]:
        """The ceilings, measured now, and the machine line."""
        ...


class Gpu:
    """The current CUDA device, ``torch_device``."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def copies_for(self, bytes_each: int) -> int:
        """Copies for twice the L2 cache."""
        return copies_for(bytes_each, torch.cuda.get_device_properties(self.torch_device).L2_cache_size)

    def record(self, call: Call, copies: int, warm: Call | None = None) -> Recording:
        """A CUDA graph."""
        return Graph(call, copies, warm)

    def wait(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize()

    def poison(self) -> None:
        """``testing.poison_memory``."""
        testing.poison_memory(self.torch_device)

    def peak(self, call: Call) -> int | None:
        """Peak bytes by the allocator's count."""
        self._settle_memory(call)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(0)
        return torch.cuda.max_memory_allocated() - before

    def kept(self, forward: Callable[[int], Tensor]) -> int | None:
        """Saved bytes by the allocator's count of requests."""

        def requested() -> int:
            return int(torch.cuda.memory_stats()["requested_bytes.all.current"])

        self._settle_memory(forward)
        before = requested()
        y = forward(0)
        return requested() - before - y.numel() * y.element_size()

    def _settle_memory(self, call: Callable[[int], object]) -> None:
        """Call once and collect garbage, so that leftovers, of compiling for instance, are not counted."""
        call(0)
        gc.collect()
        torch.cuda.empty_cache()

    def kernel_times(self, call: Call, copies: int, rounds: int = 5) -> dict[str, float]:
        """Times by events around launches; the GPU sleeps until the host has queued a call, so there are no gaps."""
        original = resolve.resolve
        launches: list[tuple[str, Any, Any]] = []

        def timed(spec: Any, arch: str = "sm_90a") -> Callable[..., None]:
            kernel = original(spec, arch)

            def launch(*arguments: Any) -> None:
                start, end = _events()
                start.record()
                kernel(*arguments)
                end.record()
                launches.append((spec.symbol, start, end))

            return launch

        resolve.resolve = timed
        wholes = []
        try:
            for i in range(rounds * copies):
                torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
                start, end = _events()
                start.record()
                call(i % copies)
                end.record()
                wholes.append((start, end))
                torch.cuda.synchronize()
        finally:
            resolve.resolve = original
        times: dict[str, float] = {}
        for symbol, start, end in launches:
            times[symbol] = times.get(symbol, 0.0) + start.elapsed_time(end) / len(wholes)
        times["torch"] = sum(start.elapsed_time(end) for start, end in wholes) / len(wholes) - sum(times.values())
        return times

    def ceilings(self, dtype: torch.dtype, l2_tbs: float) -> tuple[Ceilings, str]:
        """Ceilings by a product of 8,192 x 8,192 and a kernel that reads and writes 2 GiB; the line of a busy GPU."""
        found, gemm = _ceilings(self, 8192, 1 << 31, dtype, l2_tbs, 0.5)
        for _ in range(BUSY_REPLAYS):
            gemm.replay()
        machine = testing.machine_line(self.torch_device)
        self.wait()
        return found, machine


class Cpu:
    """The CPU. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.torch_device = torch.device("cpu")
        self._clock = clock

    def copies_for(self, bytes_each: int) -> int:
        """The fewest copies: no cache needs to be avoided."""
        return copies_for(bytes_each, 0)

    def record(self, call: Call, copies: int, warm: Call | None = None) -> Recording:
        """The calls themselves."""
        return Loop(call, copies, warm, self._clock)

    def wait(self) -> None:
        """Return at once: nothing runs asynchronously."""

    def poison(self) -> None:
        """Do nothing: a CPU's next allocation is not predictable."""

    def peak(self, call: Call) -> int | None:
        """None: unknown."""
        return None

    def kept(self, forward: Callable[[int], Tensor]) -> int | None:
        """None: unknown."""
        return None

    def kernel_times(self, call: Call, copies: int, rounds: int = 5) -> dict[str, float]:
        """The whole call as "torch": there are no kernels."""
        samples = []
        for i in range(rounds * copies):
            start = self._clock()
            call(i % copies)
            samples.append((self._clock() - start) * 1e3)
        return {"torch": statistics.mean(samples)}

    def ceilings(self, dtype: torch.dtype, l2_tbs: float) -> tuple[Ceilings, str]:
        """Ceilings by a product of 256 x 256 matrices and a copy of 4 MiB."""
        return _ceilings(self, 256, 1 << 22, dtype, l2_tbs, 0.01)[0], testing.machine_line(self.torch_device)


def _ceilings(
    device: Device, size: int, copied: int, dtype: torch.dtype, l2_tbs: float, seconds: float
) -> tuple[Ceilings, Recording]:
    """Rates of a matrix product of ``size`` and of a pass over ``copied`` bytes, and the product's recording."""
    where = device.torch_device
    a, b = (torch.randn(size, size, device=where).to(dtype) for _ in range(2))
    source = torch.randn(copied // 4, device=where)
    target = torch.empty_like(source)
    gemm = device.record(lambda i: (a @ b,), 2)
    # a kernel, since a copy node of a graph takes half as long again
    recordings = {"gemm": gemm, "copy": device.record(lambda i: (torch.neg(source, out=target),), 1)}
    times = {name: spread(samples).median / 1000 for name, samples in measure(recordings, seconds).items()}
    return Ceilings(2 * size**3 / times["gemm"], 2 * copied / times["copy"], l2_tbs * 1e12), gemm
