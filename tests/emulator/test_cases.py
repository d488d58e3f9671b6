"""Cases of layers, training and over-full passes on the emulator: every bit, in order and in random schedules."""

import pytest

from tests.emulator import cases
from tests.emulator.launch import Emulator, Schedule
from tests.emulator.test_kernels import SCHEDULED, SEEDS
from twell.choose import tuning
from twell.runtime import geometry


@SCHEDULED
@pytest.mark.parametrize("line", cases.read("layers"))
def test_layers(emulator: Emulator, line: str, seed: int) -> None:
    with emulator.stands_in(3, Schedule.of(seed)):
        cases.run(emulator, line)


@SEEDS
@pytest.mark.parametrize("line", cases.read("overfull"))
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
        assert bool(cases.run(emulator, cases.read("overfull")[0])[1]) == (excess > 0)


def test_who_begins_late_computes_nothing(emulator: Emulator) -> None:
    """A schedule says how many CTAs run at a time: the others begin when these have ended."""
    teams = []
    for seed in range(8):
        with emulator.stands_in(8, Schedule.of(seed)):
            teams.append(cases.run(emulator, "layer m=300 k=16 n=72 pattern=all strategy=union wants=all")[1])
    assert min(teams) == 1
    assert max(teams) == 4


@SCHEDULED
@pytest.mark.parametrize("numbered", cases.read("uneven tokens"))
def test_uneven_tokens_by_row(emulator: Emulator, numbered: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, line = cases.numbered(numbered)
    # every token with more than 8 non-zeros is heavy, unless that is less than a helper's share
    monkeypatch.setattr(tuning, "TOKEN_CLUSTERS", ((1 << 20, cluster, 8),))
    # without its cache
    monkeypatch.setattr(tuning, "up_down_token", tuning.up_down_token.__wrapped__)
    with emulator.stands_in(6, Schedule.of(seed)):
        cases.run(emulator, line)
