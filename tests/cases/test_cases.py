"""Every pinned case, and drawn ones, on the CPU: all that a case promises, by public functions and modules."""

from __future__ import annotations

import pytest

from tests.cases.drawn import Limits, draw
from tests.cases.pinned import PINNED
from tests.cases.verdicts import verdict
from twell.testing.case import KINDS, Case

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS = Limits.of("cpu")
# of each kind
DRAWN = dict.fromkeys(KINDS, 60) | {"layer": 240, "given": 100, "autoencoder": 80, "pair": 20}
# cases of one test
TOGETHER = 20


def wrong(cases: list[Case]) -> dict[str, str]:
    found = {str(case): verdict(case) for case in cases}
    return {line: said for line, said in found.items() if said != "ok"}


@pytest.mark.parametrize("first", range(0, len(PINNED), TOGETHER))
def test_pinned(first: int) -> None:
    # without graphs and streams
    some = [case.replace(call="eager") for case in PINNED[first : first + TOGETHER] if LIMITS.hold(case)]
    assert wrong(some) == {}


@pytest.mark.parametrize(("kind", "first"), [(k, i) for k, n in DRAWN.items() for i in range(0, n, TOGETHER)])
def test_drawn(kind: str, first: int) -> None:
    assert wrong([draw(71, number, LIMITS, (kind,)) for number in range(first, first + TOGETHER)]) == {}
