"""Energy of calls on a GPU, by NVML (``pip install 'twell[bench]'``).

``EnergyMeter`` reads the counter of the whole board's energy since the driver was loaded, in millijoules.
The counter moves in steps of 20 to 100 ms. A measurement waits for a step before its first call and for one after its
last, and subtracts the energy of an idle GPU between the last call and that step; the resolution left is the time
between two readings, about a millisecond.

The energy is that of the board with its memory, for every process on that GPU; no CPU and no power supply.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from twell._runtime.log import logger
from twell.commands.request import RequestError
from twell.commands.timing import reason

# Longest wait for the counter to move, and time between two readings, in seconds.
_LONGEST_STEP = 0.5
_LOOK = 0.001

# Wait before idle power: after work the clocks stay up for a moment.
_SETTLE = 0.5
_IDLE_SECONDS = 2.0

# Seconds of calls to queue behind the running one; at least two calls.
_AHEAD = 0.02


class Energy(NamedTuple):
    """The energy of ``calls`` calls in ``seconds``: ``joules`` in all; an idle GPU takes ``idle_joules`` of them."""

    joules: float
    seconds: float
    calls: int
    idle_joules: float

    @property
    def net_joules(self) -> float:
        """Joules above those of an idle GPU."""
        return self.joules - self.idle_joules


class EnergyMeter:
    """Measures the energy of calls on one GPU, by default the current one.

    NVML ignores CUDA_VISIBLE_DEVICES, so the GPU is found by its UUID. ``idle`` is the latest ``idle_watts``, None
    before the first. Raises ImportError without pynvml, RuntimeError if the GPU's energy cannot be read: a MIG instance
    has no counter of its own.
    """

    method = "total_energy_counter"

    def __init__(self, device: torch.device | None = None) -> None:
        try:
            import pynvml
        except ImportError:
            raise ImportError("measuring energy needs pynvml: pip install 'twell[bench]'") from None
        self._nvml: Any = pynvml
        self.idle: float | None = None
        self._device = torch.cuda.current_device() if device is None or device.index is None else device.index
        uuid = f"GPU-{str(torch.cuda.get_device_properties(self._device).uuid).removeprefix('GPU-')}"
        try:
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            self._counter()
        except self._nvml.NVMLError as error:
            raise RuntimeError(f"NVML does not count the energy of cuda:{self._device}, {uuid}: {error}") from error

    def idle_watts(self, seconds: float = _IDLE_SECONDS) -> float:
        """Measure the mean power of the idle GPU over ``seconds``; ``measure`` uses the latest."""
        torch.cuda.synchronize(self._device)
        time.sleep(_SETTLE)
        first, start = self._at_step()
        time.sleep(seconds)
        last, end = self._at_step()
        joules, elapsed = _risen(first, last), end - start
        self.idle = joules / elapsed
        return self.idle

    def measure(self, call: Callable[[], object], seconds: float) -> Energy:
        """Measure whole calls until ``seconds`` have passed.

        The GPU is synchronised before the first call and after the last. The first measurement begins with
        ``idle_watts``, unless that was called. From two seconds on the error of the counter's steps is below 1 %.
        Raises RuntimeError if the counter did not rise: it restarts when the driver is loaded again.
        """
        idle = self.idle_watts() if self.idle is None else self.idle
        torch.cuda.synchronize(self._device)
        first, start = self._at_step()
        calls = self._run(call, seconds)
        end = time.perf_counter()
        last, late = self._at_step()
        # the GPU was idle until the counter moved
        joules, elapsed = _risen(first, last) - idle * (late - end), end - start
        return Energy(joules, elapsed, calls, idle * elapsed)

    def _run(self, call: Callable[[], object], seconds: float) -> int:
        """Run whole calls for ``seconds``, wait for the GPU and return their number."""
        start, calls = time.perf_counter(), 0
        ahead: deque[Any] = deque()
        most = 0
        while not calls or time.perf_counter() - start < seconds:
            call()
            calls += 1
            if calls == 1:
                torch.cuda.synchronize(self._device)
                most = max(2, int(_AHEAD / max(time.perf_counter() - start, 1e-6)))
                continue
            # keep the GPU busy without queueing seconds of work
            ahead.append(torch.cuda.Event())
            ahead[-1].record(torch.cuda.current_stream(self._device))
            if len(ahead) > most:
                ahead.popleft().synchronize()
        torch.cuda.synchronize(self._device)
        return calls

    def _counter(self) -> float:
        """Joules since the driver was loaded."""
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3

    def _at_step(self) -> tuple[float, float]:
        """The counter right after a step, and the time; or its value after the longest wait."""
        before = self._counter()
        deadline = time.perf_counter() + _LONGEST_STEP
        while True:
            now, at = self._counter(), time.perf_counter()
            if now != before or at > deadline:
                return now, at
            time.sleep(_LOOK)


def energy_of(meter: EnergyMeter, name: str, call: Callable[[], object], seconds: float) -> Energy | None:
    """The energy of calls of the variant ``name``; None, with a warning, if it cannot be measured."""
    try:
        return meter.measure(call, seconds)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # NVML's own errors, too: they do not spoil the times
        logger.warning("energy of %s cannot be measured: %s", name, reason(error))
        return None


def open_meter(device: torch.device) -> EnergyMeter:
    """The meter for ``--energy``. Raises RequestError if energy cannot be measured on ``device``."""
    if device.type != "cuda":
        raise RequestError(f"--energy needs a CUDA device, got {device}")
    try:
        return EnergyMeter(device)
    except RuntimeError as error:
        raise RequestError(f"--energy: {error}") from error


def _risen(first: float, last: float) -> float:
    """Joules between two readings of the counter."""
    if not last > first:
        raise RuntimeError(f"the energy counter of the GPU does not rise: {first:.3f} J, later {last:.3f} J")
    return last - first
