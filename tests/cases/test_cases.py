"""Every pinned case, and drawn ones, on the CPU: all that a case promises, by public functions and modules."""

import pytest
import torch

from tests.cases.drawn import Limits, draw
from tests.cases.pinned import PINNED
from tests.cases.verdicts import asks_nothing, attempt
from twell.testing.case import KINDS, Case

pytestmark = pytest.mark.usefixtures("one_thread")

CPU, LIMITS = torch.device("cpu"), Limits.of("cpu")
# of each kind
DRAWN = dict.fromkeys(KINDS, 50) | {"layer": 200, "given": 75, "autoencoder": 75, "pair": 15}
# cases of one test
TOGETHER = 25


def wrong(cases: list[Case], pinned: bool = False) -> dict[str, str]:
    """The cases that are not as they should be, and, of those that are pinned, that ask nothing."""
    found = {}
    for case in cases:
        result = attempt(case, CPU)
        if pinned and asks_nothing(case, result):
            found[str(case)] = "no gate fires"
        elif result.verdict != "ok":
            found[str(case)] = result.verdict
    return found


OF_KIND = {kind: [case for case in PINNED if case.kind == kind and LIMITS.hold(case)] for kind in KINDS}


@pytest.mark.parametrize(
    ("kind", "first"), [(k, i) for k, own in OF_KIND.items() for i in range(0, len(own), TOGETHER)]
)
def test_pinned(kind: str, first: int) -> None:
    # without graphs and streams
    assert wrong([case.replace(call="eager") for case in OF_KIND[kind][first : first + TOGETHER]], True) == {}


@pytest.mark.parametrize(("kind", "first"), [(k, i) for k, n in DRAWN.items() for i in range(0, n, TOGETHER)])
def test_drawn(kind: str, first: int) -> None:
    assert wrong([draw(71, number, LIMITS, (kind,)) for number in range(first, first + TOGETHER)]) == {}
