"""``EnergyMeter`` on a simulated GPU and NVML: energy, and the choice of the GPU."""

import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from profiling.bench import energy
from profiling.bench.energy import EnergyMeter, open_meter
from twell.commands.request import RequestError

IDLE, BUSY = 100.0, 600.0  # watts

UUIDS = [f"{number}0000000-0000-4000-8000-00000000000{number}" for number in range(3)]


class Board:
    """A GPU that draws BUSY watts while a call runs, and the clock of its host; its counter moves in ``step``s."""

    def __init__(self, step: float = 0.1) -> None:
        self.step, self.now = step, 1000.0
        self.busy: list[tuple[float, float]] = []

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, seconds: float) -> None:
        self.busy.append((self.now, self.now + seconds))
        self.now += seconds

    def counter(self) -> int:
        until = self.now // self.step * self.step
        busy = sum(max(0.0, min(end, until) - start) for start, end in self.busy)
        return round((IDLE * until + (BUSY - IDLE) * busy) * 1e3)


class Nvml(ModuleType):
    """The used part of pynvml, with the GPUs of UUIDS in NVML's own order."""

    class NVMLError(Exception): ...

    def __init__(self, board: Board, missing: str = "") -> None:
        super().__init__("pynvml")
        self.board, self.missing = board, missing

    def _check(self, what: str) -> None:
        if self.missing == what:
            raise self.NVMLError(f"{what} not supported")

    def nvmlInit(self) -> None:
        self._check("init")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        # an instance of a divided GPU is not found by the UUID that torch gives
        self._check("uuid")
        if uuid.removeprefix("GPU-") not in UUIDS:
            raise self.NVMLError("not found")
        return uuid.removeprefix("GPU-")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._check("counter")
        return self.board.counter()


Install = Callable[..., Board]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def with_gpus(board: Board, order: Sequence[int] = (0,), missing: str = "") -> Board:
        monkeypatch.setattr(energy, "time", board)
        monkeypatch.setitem(sys.modules, "pynvml", Nvml(board, missing))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        gpus = [SimpleNamespace(uuid=UUIDS[i]) for i in order]
        monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
        for name in ("synchronize", "current_stream", "Event"):
            monkeypatch.setattr(torch.cuda, name, MagicMock())
        return board

    return with_gpus


@pytest.mark.parametrize("duration", [0.001, 0.15, 0.33])
def test_energy_is_the_difference_of_the_counter(install: Install, duration: float) -> None:
    board = install(Board())
    meter = EnergyMeter()
    assert meter.idle_watts(2.0) == pytest.approx(IDLE, rel=1e-3)
    found = meter.measure(lambda: board.run(duration), 2.0)
    calls = len(board.busy)
    assert found.calls == calls
    assert 2.0 <= found.seconds < 2.0 + duration + 0.01
    assert found.seconds == pytest.approx(calls * duration, rel=0.01)
    # a call that begins anywhere between two steps of 0.1 s would be 3 % off
    assert found.joules == pytest.approx(calls * duration * BUSY, rel=0.005)
    assert found.idle_joules == pytest.approx(found.seconds * IDLE, rel=0.005)
    assert found.net_joules == pytest.approx(calls * duration * (BUSY - IDLE), rel=0.01)


def test_a_counter_that_stands_still_is_no_energy(install: Install) -> None:
    board = install(Board(step=1e6))
    meter = EnergyMeter()
    meter.idle = IDLE
    for use in (lambda: meter.idle_watts(1.0), lambda: meter.measure(lambda: board.run(0.5), 1.0)):
        with pytest.raises(RuntimeError, match="counter of the GPU does not rise"):
            use()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (2,), (1, 0)])
def test_finds_the_gpu_that_torch_means(install: Install, order: tuple[int, ...]) -> None:
    """NVML numbers all GPUs; torch numbers those of CUDA_VISIBLE_DEVICES, in its order."""
    install(Board(), order)
    for index, physical in enumerate(order):
        assert EnergyMeter(torch.device("cuda", index))._handle == UUIDS[physical]
    assert EnergyMeter()._handle == EnergyMeter(torch.device("cuda"))._handle == UUIDS[order[0]]


@pytest.mark.parametrize("missing", ["init", "uuid", "counter"])
def test_what_nvml_cannot_read_is_refused(install: Install, missing: str) -> None:
    install(Board(), missing=missing)
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
