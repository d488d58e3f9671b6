"""Cases of layers, training and over-full passes on the emulator: every bit, in order and in random schedules."""

import pytest

from tests.emulator import cases
from tests.emulator.launch import Emulator, Schedule
from tests.emulator.test_kernels import SCHEDULED, SEEDS
from twell.choose import tuning
from twell.runtime import geometry

LINES = """
layer m=130 k=72 n=264 density=0.02 strategy=union+screen aux=True
layer m=300 k=128 n=520 biases=gate+up+down density=0.05 strategy=union+screen aux=True
layer m=128 k=136 n=264 biases=gate density=0.3 strategy=union+screen aux=True
layer m=5 k=64 n=72 pattern=all density=1.0 strategy=union+screen aux=True
layer m=140 k=128 n=520 biases=down pattern=none strategy=union+screen aux=True
layer m=2300 k=72 n=264 biases=gate+up density=0.05 strategy=union wants=all aux=True  # lists are cut in three
layer m=128 k=136 gated=False biases=up density=0.3 strategy=union wants=all aux=True
layer m=130 k=72 n=264 activation=relu2 density=0.05 strategy=union wants=all aux=True
layer m=130 k=72 n=264 activation=drelu density=0.05 strategy=union wants=all aux=True
layer m=130 k=72 n=264 gated=False activation=relu2 density=0.05 strategy=union wants=all aux=True
layer m=130 k=72 n=264 activation=fatrelu threshold=2.0 density=0.2 strategy=union wants=all aux=True
layer m=5 k=64 n=72 pattern=all density=1.0 strategy=union wants=all aux=True
layer m=130 k=64 n=5632 density=0.012 strategy=union wants=all  # more neurons than threads of `count` load at a time
layer m=9 k=72 biases=gate+up+down activation=fatrelu by_neuron=True density=0.2 strategy=union wants=all
layer m=140 k=72 gated=False biases=up+down activation=fatrelu by_neuron=True density=0.2 strategy=union wants=all
kept m=300 k=72 biases=gate+up+down activation=fatrelu by_neuron=True density=0.2
kept m=130 k=64 n=5632 density=0.012
kept m=5 k=64 n=72 pattern=all density=1.0
layer m=3 k=16376 n=24 density=0.3 strategy=row+invariant  # the most columns of a cluster of four
experts m=40 k=136 gated=False experts=4 slots=3 hot=0.5 absent=0.2 wide=False
experts m=3 k=8200 n=24 density=0.3 experts=3 slots=2 absent=0.2
experts m=23 k=136 n=264 density=0.3 experts=4 slots=3 hot=0.5 absent=0.2
experts m=23 k=136 n=264 gated=False density=0.3 experts=4 slots=3 absent=0.2 strategy=row+invariant
experts m=40 k=72 n=136 gated=False density=0.3 experts=1024 slots=2  # more experts than threads
layer m=40 k=144 n=264 biases=gate+up+down density=0.2 scales=row tokens=e4m3
layer m=40 k=144 n=264 gated=False density=0.2 scales=row tokens=e4m3 fast=False
layer m=130 k=144 n=264 biases=gate+up+down density=0.2 strategy=union scales=row tokens=e4m3
experts m=40 k=144 gated=False experts=4 slots=2 hot=0.5 absent=0.2 activation=relu2 scales=row tokens=e4m3
""".strip().splitlines()
OVERFULL = """
layer m=320 k=72 n=136 biases=gate+up+down pattern=all strategy=union wants=all aux=True l1=True
layer m=600 k=72 biases=gate+up pattern=all strategy=union wants=w_gate+w_up+w_down+b_gate+b_up
layer m=600 k=72 n=136 pattern=all strategy=union wants=x
layer m=320 k=72 n=136 gated=False biases=up pattern=all strategy=union wants=all aux=True l1=True
layer m=520 k=328 n=136 biases=up pattern=all strategy=union wants=all mains=True
layer m=5 k=264 biases=down activation=relu2 pattern=all strategy=union wants=all
layer m=257 k=72 n=136 biases=gate+up activation=drelu pattern=all strategy=union wants=all
layer m=300 k=72 n=136 gated=False activation=fatrelu threshold=2.0 pattern=all strategy=union wants=w_up mains=True
layer m=300 k=72 n=136 biases=gate+up activation=fatrelu by_neuron=True pattern=all strategy=union wants=all
given m=320 k=72 n=136 biases=up pattern=all strategy=union wants=all aux=True l1=True
given m=128 k=72 gated=False activation=relu2 pattern=all strategy=union wants=all aux=True l1=True
""".strip().splitlines()


@SCHEDULED
@pytest.mark.parametrize("line", LINES)
def test_layers(emulator: Emulator, line: str, seed: int) -> None:
    with emulator.stands_in(3, Schedule.of(seed)):
        cases.run(emulator, line)


@SEEDS
@pytest.mark.parametrize("line", OVERFULL)
def test_too_many_non_zeros(emulator: Emulator, line: str, seed: int) -> None:
    """In one to three slices, by several clusters."""
    with emulator.stands_in(6, Schedule.of(seed)):
        teams = cases.run(emulator, line)
    assert len(teams) == 2
    assert all(teams)


@pytest.mark.parametrize("excess", [0, 8])
def test_as_many_non_zeros_as_there_is_room_for(
    emulator: Emulator, excess: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(geometry, "hybrid_capacity", lambda m, n, held=0: m * n - excess)
    with emulator.stands_in(6, Schedule()):
        assert bool(cases.run(emulator, OVERFULL[0])[1]) == (excess > 0)


def test_who_begins_late_computes_nothing(emulator: Emulator) -> None:
    """A schedule says how many CTAs run at a time: the others begin when these have ended."""
    teams = []
    for seed in range(8):
        with emulator.stands_in(8, Schedule.of(seed)):
            teams.append(cases.run(emulator, "layer m=300 k=16 n=72 pattern=all strategy=union wants=all")[1])
    assert min(teams) == 1
    assert max(teams) == 4


@SCHEDULED
@pytest.mark.parametrize(
    ("line", "cluster"),
    [
        # heavy tokens that many clusters share, beside light ones
        ("layer m=43 k=136 n=520 biases=up+down pattern=heavy-tokens density=0.02 aux=True", 4),
        ("given m=5 k=136 n=520 biases=up+down pattern=heavy-tokens density=0.02 aux=True", 4),
        ("given m=5 k=136 n=520 biases=up+down pattern=heavy-tokens density=0.02 aux=True", 1),
        # none is heavy, and all are
        ("layer m=100 k=136 gated=False biases=up+down density=0.01 aux=True", 4),
        ("layer m=36 k=72 biases=up+down pattern=all aux=True", 1),
        # threads that count several tokens
        ("layer m=530 k=64 n=64 biases=up+down pattern=heavy-tokens density=0.05 aux=True seed=2", 1),
    ],
)
def test_uneven_tokens_by_row(
    emulator: Emulator, line: str, cluster: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # every token with more than 8 non-zeros is heavy, unless that is less than a helper's share
    monkeypatch.setattr(tuning, "TOKEN_CLUSTERS", ((1 << 20, cluster, 8),))
    # without its cache
    monkeypatch.setattr(tuning, "up_down_token", tuning.up_down_token.__wrapped__)
    with emulator.stands_in(6, Schedule.of(seed)):
        cases.run(emulator, line)
