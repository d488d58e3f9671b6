"""Energy of calls on a GPU, by NVML (``pip install 'twell[bench]'``).

``EnergyMeter`` reads the counter of the whole board's energy since the driver was loaded, in millijoules, if the GPU
has one (Volta and later). The counter moves in steps of 20 to 100 ms. A measurement waits for a step before its first
call and for one after its last, and subtracts the energy of an idle GPU between the last call and that step; the
resolution left is the time between two readings, about a millisecond.

For GPUs without the counter a thread samples the power and integrates it by trapezoids. The driver averages power over
up to a second, so calls run for a second before the samples count.

The energy is that of the board with its memory, for every process on that GPU; no CPU and no power supply.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from twell._runtime.log import warn_once
from twell.commands.request import RequestError

Method = Literal["total_energy_counter", "power_sampling"]

# Longest wait for the counter to move, and time between two readings, in seconds.
_LONGEST_STEP = 0.5
_LOOK = 0.001

# Time between two samples of power, and of calls before the first, in seconds.
_SAMPLE = 0.02
_WARM = 1.0

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
    """Measures the energy of calls on one GPU.

    ``device`` is torch's: an index or device among those in CUDA_VISIBLE_DEVICES, by default the current one. NVML
    ignores that variable, so the GPU is found by its UUID or PCI address. For a MIG instance it is the whole GPU, other
    instances included, which gives a warning.

    ``idle`` is the latest ``idle_watts``, None before the first. ``available`` says whether energy can be measured; if
    not, ``reason`` says why, and ``measure`` raises RuntimeError. Raises ImportError without pynvml.
    """

    def __init__(self, device: torch.device | int | None = None) -> None:
        try:
            import pynvml
        except ImportError:
            raise ImportError("measuring energy needs pynvml: pip install 'twell[bench]'") from None
        self._nvml: Any = pynvml
        self.idle: float | None = None
        self._device = 0
        self.reason = ""
        self.method: Method = "total_energy_counter"
        try:
            self._device = _index(device)
            self._nvml.nvmlInit()
            self._handle = _handle(self._nvml, self._device)
            self.method = self._find_method()
        except (RuntimeError, ValueError, self._nvml.NVMLError) as error:
            self.reason = str(error) or type(error).__name__

    @property
    def available(self) -> bool:
        """Whether energy can be measured."""
        return not self.reason

    def idle_watts(self, seconds: float = _IDLE_SECONDS) -> float:
        """Measure the mean power of the idle GPU over ``seconds``; ``measure`` uses the latest."""
        self._require(seconds)
        torch.cuda.synchronize(self._device)
        time.sleep(_SETTLE)
        if self.method == "power_sampling":
            sampler = _Sampler(self._watts)
            time.sleep(seconds)
            joules, elapsed = sampler.stop()
        else:
            first, start = self._at_step()
            time.sleep(seconds)
            last, end = self._at_step()
            joules, elapsed = _risen(first, last), end - start
        self.idle = joules / elapsed
        return self.idle

    def measure(self, call: Callable[[], None], seconds: float) -> Energy:
        """Measure whole calls until ``seconds`` have passed.

        The GPU is synchronised before the first call and after the last. The first measurement begins with
        ``idle_watts``, unless that was called. From two seconds on the error of the counter's steps is below 1 %.
        Raises RuntimeError if the counter did not rise: it restarts when the driver is loaded again.
        """
        self._require(seconds)
        idle = self.idle_watts() if self.idle is None else self.idle
        if self.method == "power_sampling":
            self._run(call, min(_WARM, seconds))
            sampler = _Sampler(self._watts)
            calls = self._run(call, seconds)
            joules, elapsed = sampler.stop()
        else:
            torch.cuda.synchronize(self._device)
            first, start = self._at_step()
            calls = self._run(call, seconds)
            end = time.perf_counter()
            last, late = self._at_step()
            # the GPU was idle until the counter moved
            joules, elapsed = _risen(first, last) - idle * (late - end), end - start
        return Energy(joules, elapsed, calls, idle * elapsed)

    def _run(self, call: Callable[[], None], seconds: float) -> int:
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
            ahead.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            ahead[-1].record(torch.cuda.current_stream(self._device))
            if len(ahead) > most:
                ahead.popleft().synchronize()
        torch.cuda.synchronize(self._device)
        return calls

    def _require(self, seconds: float) -> None:
        if not self.available:
            raise RuntimeError(f"energy cannot be measured: {self.reason}")
        if not seconds > 0:
            raise ValueError(f"seconds must be above 0, got {seconds}")

    def _find_method(self) -> Method:
        try:
            self._counter()
            return "total_energy_counter"
        except self._nvml.NVMLError:
            self._watts()
            return "power_sampling"

    def _counter(self) -> float:
        """Joules since the driver was loaded."""
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3

    def _watts(self) -> float:
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1e3

    def _at_step(self) -> tuple[float, float]:
        """The counter right after a step, and the time; or its value after the longest wait."""
        before = self._counter()
        deadline = time.perf_counter() + _LONGEST_STEP
        while True:
            now, at = self._counter(), time.perf_counter()
            if now != before or at > deadline:
                return now, at
            time.sleep(_LOOK)


def open_meter(device: torch.device) -> EnergyMeter:
    """The meter for ``--energy``. Raises RequestError if energy cannot be measured on ``device``."""
    if device.type != "cuda":
        raise RequestError(f"--energy needs a CUDA device, got {device}")
    meter = EnergyMeter(device)
    if not meter.available:
        raise RequestError(f"--energy: {meter.reason}")
    return meter


class _Sampler:
    """Samples power in a thread until ``stop``."""

    def __init__(self, watts: Callable[[], float]) -> None:
        self._watts = watts
        self._samples: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self._take()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _take(self) -> None:
        self._samples.append((time.perf_counter(), self._watts()))

    def _sample(self) -> None:
        try:
            while not self._ended.wait(_SAMPLE):
                self._take()
        except Exception as error:
            # raised by stop: here it would be lost
            self._failure = error

    def stop(self) -> tuple[float, float]:
        """End the sampling; return joules and seconds."""
        self._ended.set()
        self._thread.join()
        if self._failure is not None:
            raise RuntimeError(f"power could not be sampled: {self._failure}") from self._failure
        self._take()
        return trapezoids(self._samples), self._samples[-1][0] - self._samples[0][0]


def _risen(first: float, last: float) -> float:
    """Joules between two readings of the counter."""
    if not last > first:
        raise RuntimeError(f"the energy counter of the GPU does not rise: {first:.3f} J, later {last:.3f} J")
    return last - first


def trapezoids(samples: list[tuple[float, float]]) -> float:
    """Joules of power samples (seconds, watts), in their order."""
    pairs = itertools.pairwise(samples)
    return sum((later - earlier) * (before + after) / 2 for (earlier, before), (later, after) in pairs)


def _index(device: torch.device | int | None) -> int:
    """Torch's index of the device."""
    if isinstance(device, int):
        index: int | None = device
    else:
        if device is not None and device.type != "cuda":
            raise ValueError(f"device must be a CUDA device, got {device}")
        index = None if device is None else device.index
    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device")
    return torch.cuda.current_device() if index is None else index


def _handle(nvml: Any, index: int) -> Any:
    """NVML's handle of torch's GPU ``index``."""
    properties: Any = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", ""))
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    failure: Exception | None = None
    for prefix in ("GPU-", "MIG-") if bare else ():
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(prefix + bare)
            if prefix == "MIG-":
                handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            _warn_of_instances(nvml, handle)
            return handle
        except nvml.NVMLError as error:
            failure = error
    if hasattr(properties, "pci_bus_id"):
        address = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        handle = nvml.nvmlDeviceGetHandleByPciBusId(address)
        _warn_of_instances(nvml, handle)
        return handle
    raise RuntimeError(f"NVML knows no GPU with the UUID {uuid or '(none)'} of cuda:{index}: {failure}")


def _warn_of_instances(nvml: Any, handle: Any) -> None:
    """Warn if a GPU is divided: torch may give an instance the UUID of its GPU."""
    try:
        divided = nvml.nvmlDeviceGetMigMode(handle)[0]
    except nvml.NVMLError:
        # a GPU without MIG
        return
    if divided:
        warn_once("energy of a MIG instance is that of its whole GPU, other instances included")
