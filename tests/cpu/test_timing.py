"""How benchmarks time things: the order of replays, medians, copies, and the machine line of a busy GPU."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from profiling.device import Device
from twell import testing
from twell.commands.timing import Graph, Recording, copies_for, measure, spread


class Recorded:
    """A recording that takes ``milliseconds`` per call and logs its replays."""

    def __init__(self, name: str, log: list[str], milliseconds: float = 1.0, copies: int = 1) -> None:
        self.name, self.log, self.milliseconds, self.copies = name, log, milliseconds, copies
        self.outputs: tuple[Tensor, ...] = ()
        self.waited = True

    def replay(self) -> Callable[[], float]:
        self.log.append(self.name)
        self.waited = False

        def span() -> float:
            assert self.waited, "read before the replay was through"
            return self.milliseconds * self.copies

        return span

    def wait(self) -> None:
        self.waited = True

    def spoil(self) -> None:
        self.outputs = ()


class Clock:
    """A clock that advances at each look."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_replays_take_turns_and_the_order_rotates() -> None:
    log: list[str] = []
    times = measure({name: Recorded(name, log) for name in "abc"}, 0.03)
    assert {name: len(each) for name, each in times.items()} == {"a": 10, "b": 10, "c": 10}
    # two rounds to warm up, two to learn the time, ten
    assert len(log) == 3 * 14
    rounds = ["".join(log[i : i + 3]) for i in range(0, len(log), 3)]
    assert rounds[:4] == ["abc", "bca"] * 2
    assert rounds[4:] == ["abc", "bca", "cab"] * 3 + ["abc"]


@pytest.mark.parametrize(("seconds", "rounds"), [(1e-9, 10), (0.06, 20), (1e9, 200)], ids=str)
def test_rounds_fill_the_seconds_between_ten_and_two_hundred(seconds: float, rounds: int) -> None:
    log: list[str] = []
    # 1 ms and 2 calls of 1 ms: 3 ms a round; a time is that of one call
    times = measure({"a": Recorded("a", log), "b": Recorded("b", log, copies=2)}, seconds)
    assert times == {"a": [1.0] * rounds, "b": [1.0] * rounds}


def test_median_and_percentiles_are_of_the_samples() -> None:
    samples = [float(value) for value in range(101)]
    assert spread(samples[::-1]) == (50.0, 0.0, 10.0, 90.0)
    assert spread([2.0]) == (2.0, 2.0, 2.0, 2.0)
    # one slow sample moves neither
    assert spread([*([1.0] * 19), 1e6]) == (1.0, 1.0, 1.0, 1.0)


@given(st.integers(1, 10**9), st.integers(0, 10**8))
def test_copies_are_the_fewest_that_exceed_twice_the_cache(bytes_each: int, cache: int) -> None:
    copies = copies_for(bytes_each, cache)
    assert copies == 256 or copies * bytes_each >= 2 * cache
    assert copies == 2 or (copies - 1) * bytes_each < 2 * cache
    assert 2 <= copies <= 256


def test_loop_calls_on_every_copy() -> None:
    called: list[str] = []

    def call(i: int) -> tuple[Tensor, ...]:
        called.append(f"call {i}")
        return (torch.tensor(i),)

    def warm(i: int) -> tuple[Tensor, ...]:
        called.append(f"warm {i}")
        return ()

    loop = Recording(call, 3, warm, Clock(0.5))
    assert called == ["warm 0", "warm 1", "warm 2"]
    span = loop.replay()
    assert called[3:] == ["call 0", "call 1", "call 2"]
    assert int(loop.outputs[0]) == 2
    loop.wait()
    assert span() == 500.0
    loop.spoil()
    assert loop.outputs == ()


def test_outputs_of_a_graph_are_spoiled_in_any_layout() -> None:
    graph = object.__new__(Graph)
    graph.outputs = (torch.zeros(3, 2, dtype=torch.bfloat16).t(), torch.zeros(2, dtype=torch.int32))
    graph.spoil()
    assert torch.isnan(graph.outputs[0]).all()
    assert graph.outputs[1].tolist() == [-1, -1]


def test_ceilings_are_rates_of_a_product_and_a_copy() -> None:
    ceilings, machine = Device(Clock(0.001)).ceilings(torch.bfloat16)
    # 1 ms a replay: two products, or one copy that reads and writes 4 MiB
    assert math.isclose(ceilings.flops, 2 * 2 * 256**3 / 0.001)
    assert math.isclose(ceilings.memory, 2 * (1 << 22) / 0.001)
    assert machine == testing.machine_line("cpu")
