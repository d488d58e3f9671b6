"""What benches measure besides replays (``twell.commands.timing``): eager calls, memory and ceilings.

An eager call is timed in three ways. "queued": calls in a row, after which the host waits once; a time is
the longer of the host's and the GPU's. "waited": one call, and the wait for it. "host": calls in a row that are too few
to fill the GPU's queue, by the host's clock, without a wait.
A CPU stands in for a GPU without poisoned and peak memory.
"""

import dataclasses
import gc
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from twell import testing
from twell.commands import timing
from twell.commands.timing import Call, Recording, events, measure, spread

# Replays of the matrix product while the machine line is read: about two seconds on an H200.
BUSY_REPLAYS = 800


@dataclasses.dataclass
class Ceilings:
    """Rates of the machine that were measured in this run: flop/s of arithmetic, bytes/s of memory."""

    flops: float
    memory: float


class Eager(timing.Recording):
    """Eager calls on the GPU in one of three ways. Those in a row have one before them, as after many."""

    def __init__(self, way: str, call: Call, copies: int) -> None:
        super().__init__(call, copies)
        self.way = way

    def replay(self) -> Callable[[], float]:
        """Call on every copy: queued between two events, or by the host's clock."""
        if self.way == "waited":
            seconds = 0.0
            for i in range(self.copies):
                torch.cuda.synchronize()
                start = self._clock()
                self._call(i)
                torch.cuda.synchronize()
                seconds += self._clock() - start
            return lambda: seconds * 1e3
        torch.cuda.synchronize()
        if self.way == "host":
            return super().replay()
        self._call(0)
        first, last = events()
        first.record()
        for i in range(self.copies):
            self._call(i)
        last.record()
        return lambda: float(first.elapsed_time(last))

    def wait(self) -> None:
        torch.cuda.synchronize()


class Device(timing.Device):
    """The device of a benchmark: measures eager calls, memory, kernels and ceilings, too. This is a CPU."""

    def eager(self, way: str, call: Call, copies: int) -> Recording:
        """``call`` on each copy, outside of graphs, to be timed in one of three ways: on a CPU these are one."""
        return self.record(call, copies)

    def poison(self) -> None:
        """Leave NaN in the memory of the next allocations, where these can be foreseen."""

    def peak(self, call: Call) -> int | None:
        """Peak bytes of a call above its operands; None if unknown."""
        return None

    def joules(self, call: Call, seconds: float) -> float:
        """Energy of a call; NaN if unknown."""
        return math.nan

    def free(self) -> None:
        """Free unused memory: modules, their hooks and compiled code may refer to each other."""
        gc.collect()

    def kept(self, forward: Callable[[int], Tensor]) -> int | None:
        """Bytes that a forward pass saves for backward, without its operands and y; None if unknown."""
        return None

    def ceilings(self, dtype: torch.dtype) -> tuple[Ceilings, str]:
        """The ceilings, measured now, on a CPU by small matrices, and the machine line."""
        return _ceilings(self, 256, 1 << 22, dtype, 0.01)[0], testing.machine_line(self.torch_device)


class Gpu(timing.Gpu, Device):
    def eager(self, way: str, call: Call, copies: int) -> Recording:
        return Eager(way, call, copies)

    def poison(self) -> None:
        testing.poison_memory(self.torch_device)

    def peak(self, call: Call) -> int | None:
        self._settle(call)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(0)
        return torch.cuda.max_memory_allocated() - before

    def joules(self, call: Call, seconds: float) -> float:
        """Energy of the board with its memory, by NVML's counter, which moves in steps of 20 to 100 ms."""
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(self.torch_device).uuid).removeprefix("GPU-")
        board = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

        def at_step() -> float:
            before, until = pynvml.nvmlDeviceGetTotalEnergyConsumption(board), time.perf_counter() + 0.5
            while (now := pynvml.nvmlDeviceGetTotalEnergyConsumption(board)) == before and time.perf_counter() < until:
                time.sleep(0.001)
            return float(now) / 1e3

        self.wait()
        first, start, calls = at_step(), time.perf_counter(), 0
        while not calls or time.perf_counter() - start < seconds:
            call(calls)
            calls += 1
            # no seconds of queued work
            self.wait()
        return (at_step() - first) / calls

    def kept(self, forward: Callable[[int], Tensor]) -> int | None:
        self._settle(forward)
        before = torch.cuda.memory_stats()
        y = forward(0)
        name, after = "requested_bytes.all.current", torch.cuda.memory_stats()
        return int(after[name]) - int(before[name]) - y.nbytes

    def _settle(self, call: Callable[[int], object]) -> None:
        """So that leftovers, of compiling for instance, are not counted."""
        call(0)
        self.free()

    def free(self) -> None:
        super().free()
        torch.cuda.empty_cache()

    def ceilings(self, dtype: torch.dtype) -> tuple[Ceilings, str]:
        """Ceilings by a product of 8,192 x 8,192 and a kernel that reads and writes 2 GiB; the line of a busy GPU."""
        found, gemm = _ceilings(self, 8192, 1 << 31, dtype, 0.5)
        for _ in range(BUSY_REPLAYS):
            gemm.replay()
        machine = testing.machine_line(self.torch_device)
        self.wait()
        return found, machine


def _ceilings(device: Device, size: int, copied: int, dtype: torch.dtype, seconds: float) -> tuple[Ceilings, Recording]:
    """Rates of a matrix product of ``size`` and of a pass over ``copied`` bytes, and the product's recording."""
    where = device.torch_device
    a, b = (torch.randn(size, size, device=where).to(dtype) for _ in range(2))
    source = torch.randn(copied // 4, device=where)
    target = torch.empty_like(source)
    gemm = device.record(lambda i: (a @ b,), 2)
    # a kernel, since a copy node of a graph takes half as long again
    recordings = {"gemm": gemm, "copy": device.record(lambda i: (torch.neg(source, out=target),), 1)}
    times = {name: spread(samples).median / 1000 for name, samples in measure(recordings, seconds).items()}
    return Ceilings(2 * size**3 / times["gemm"], 2 * copied / times["copy"]), gemm
