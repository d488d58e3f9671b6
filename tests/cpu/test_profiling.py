"""How eager calls are timed, with a GPU that records."""

import pytest
import torch
from torch import Tensor

from profiling import device
from profiling.device import Gpu
from twell.commands.timing import Recording


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of a GPU: each call takes it 3 ms, and the host's clock goes on by 1 ms when it is read."""
    found: list[str] = []

    class Event:
        def record(self) -> None:
            found.append("event")

        def elapsed_time(self, end: "Event") -> float:
            return 3.0 * found.count("call 1")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: found.append("wait"))
    monkeypatch.setattr(device, "events", lambda: (Event(), Event()))
    return found


def recording(log: list[str], way: str) -> Recording:
    def call(i: int) -> tuple[Tensor, ...]:
        log.append(f"call {i}")
        return ()

    made = Gpu(torch.device("cuda")).eager(way, call, 2)
    # each copy once, to load and allocate
    assert log == ["call 0", "call 1"]
    log.clear()
    return made


@pytest.mark.parametrize(
    ("way", "asked"),
    [
        # the GPU has a call when the host begins with the first one that counts
        ("queued", ["wait", "call 0", "event", "call 0", "call 1", "event"]),
        ("waited", ["wait", "call 0", "wait", "wait", "call 1", "wait"]),
        ("host", ["wait", "call 0", "call 1"]),
    ],
)
def test_eager_calls_on_a_gpu(log: list[str], way: str, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = recording(log, way)
    ticks = iter(range(100))
    monkeypatch.setattr(made, "_clock", lambda: next(ticks) / 1e3)
    span = made.replay()
    assert log == asked
    made.wait()
    # of both copies: by events, by the host for each call, by the host for all
    assert span() == pytest.approx({"queued": 3.0, "waited": 2.0, "host": 1.0}[way])
