"""``EnergyMeter`` on a simulated GPU and NVML: energy, and the choice of the GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from profiling.bench import energy
from profiling.bench.energy import EnergyMeter, open_meter
from twell.commands.request import RequestError

IDLE, BUSY = 100.0, 600.0  # watts

UUIDS = [f"{number}0000000-0000-4000-8000-00000000000{number}" for number in range(3)]


class Clock:
    """A clock that advances with sleep, and slightly with each look."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Board:
    """A GPU that draws BUSY watts while a call runs; its counter moves in steps of ``step`` seconds."""

    def __init__(self, clock: Clock, step: float = 0.1) -> None:
        self.clock, self.step = clock, step
        self.busy: list[tuple[float, float]] = []

    def run(self, seconds: float) -> None:
        self.busy.append((self.clock.now, self.clock.now + seconds))
        self.clock.now += seconds

    def joules(self, until: float) -> float:
        return IDLE * until + (BUSY - IDLE) * sum(max(0.0, min(end, until) - start) for start, end in self.busy)

    def counter(self) -> int:
        moved = self.clock.now // self.step * self.step
        return round(self.joules(moved) * 1e3)


class FakeError(Exception):
    """NVMLError."""


class Nvml(ModuleType):
    """The used part of pynvml, with the GPUs of UUIDS in NVML's own order."""

    NVMLError = FakeError

    def __init__(self, board: Board | None = None, **missing: bool) -> None:
        super().__init__("pynvml")
        self.board, self.missing = board, missing

    def _check(self, what: str) -> None:
        if self.missing.get(what):
            raise FakeError(f"{what} not supported")

    def nvmlInit(self) -> None:
        self._check("init")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        # an instance of a divided GPU is not found by the UUID that torch gives
        self._check("uuid")
        if uuid.removeprefix("GPU-") not in UUIDS:
            raise FakeError("not found")
        return uuid.removeprefix("GPU-")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._check("counter")
        assert self.board is not None
        return self.board.counter()


class FakeEvent:
    def record(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made_up = Clock()
    monkeypatch.setattr(energy, "time", made_up)
    return made_up


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int]], None]:
    """Let torch see these GPUs, in this order."""

    def choose(order: list[int]) -> None:
        gpus = [SimpleNamespace(uuid=UUIDS[i]) for i in order]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)

    choose([0])
    return choose


def install(monkeypatch: pytest.MonkeyPatch, nvml: Nvml) -> Nvml:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


@pytest.mark.parametrize("duration", [0.001, 0.15, 0.33])
def test_energy_is_the_difference_of_the_counter(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, visible: Callable[[list[int]], None], duration: float
) -> None:
    board = Board(clock)
    install(monkeypatch, Nvml(board))
    meter = EnergyMeter()
    assert meter.idle_watts(2.0) == pytest.approx(IDLE, rel=1e-3)
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        board.run(duration)

    found = meter.measure(call, 2.0)
    assert found.calls == calls
    assert 2.0 <= found.seconds < 2.0 + duration + 0.01
    assert found.seconds == pytest.approx(calls * duration, rel=0.01)
    # a call that begins anywhere between two steps of 0.1 s would be 3 % off
    assert found.joules == pytest.approx(calls * duration * BUSY, rel=0.005)
    assert found.idle_joules == pytest.approx(found.seconds * IDLE, rel=0.005)
    assert found.net_joules == pytest.approx(calls * duration * (BUSY - IDLE), rel=0.01)


def test_a_counter_that_stands_still_is_no_energy(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, visible: Callable[[list[int]], None]
) -> None:
    board = Board(clock, step=1e6)
    install(monkeypatch, Nvml(board))
    meter = EnergyMeter()
    meter.idle = IDLE
    for use in (lambda: meter.idle_watts(1.0), lambda: meter.measure(lambda: board.run(0.5), 1.0)):
        with pytest.raises(RuntimeError, match="counter of the GPU does not rise"):
            use()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (2,), (1, 0)])
def test_finds_the_gpu_that_torch_means(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, visible: Callable[[list[int]], None], order: tuple[int, ...]
) -> None:
    """NVML numbers all GPUs; torch numbers those of CUDA_VISIBLE_DEVICES, in its order."""
    visible(list(order))
    install(monkeypatch, Nvml(Board(clock)))
    for index, physical in enumerate(order):
        assert EnergyMeter(torch.device("cuda", index))._handle == UUIDS[physical]
    assert EnergyMeter()._handle == EnergyMeter(torch.device("cuda"))._handle == UUIDS[order[0]]


@pytest.mark.parametrize("missing", ["init", "uuid", "counter"])
def test_what_nvml_cannot_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, visible: Callable[[list[int]], None], missing: str
) -> None:
    install(monkeypatch, Nvml(Board(clock), **{missing: True}))
    with pytest.raises(RequestError, match=f"--energy: NVML does not count the energy of cuda:0, .*: {missing} not"):
        open_meter(torch.device("cuda"))
    with pytest.raises(RequestError, match="--energy needs a CUDA device, got cpu"):
        open_meter(torch.device("cpu"))


def test_names_the_extra_where_pynvml_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ImportError, match=r"pip install 'twell\[bench\]'"):
        EnergyMeter()


def test_the_real_pynvml_has_what_is_used() -> None:
    pynvml = pytest.importorskip("pynvml")
    used = [name for name in vars(Nvml) if name.startswith("nvml")]
    assert [name for name in used if not callable(getattr(pynvml, name, None))] == []
    assert issubclass(pynvml.NVMLError, Exception)
