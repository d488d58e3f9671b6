"""Every pinned case, and drawn ones, on a GPU: in memory of NaN, twice, in graphs with other tokens, on streams."""

from __future__ import annotations

import pytest
import torch

from tests import family
from tests.cases.drawn import Limits, draw
from tests.cases.pinned import PINNED
from tests.cases.verdicts import verdict
from twell.testing.case import KINDS, Case

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of integers is exact only where partial sums are not rounded to 16 bits."""
    matmul = torch.backends.cuda.matmul
    monkeypatch.setattr(matmul, "allow_bf16_reduced_precision_reduction", False)
    monkeypatch.setattr(matmul, "allow_fp16_reduced_precision_reduction", False)


@pytest.mark.parametrize("case", PINNED, ids=str)
def test_pinned(case: Case) -> None:
    said = verdict(case, CUDA)
    if said.startswith("NotImplementedError") and family.is_portable(CUDA):
        pytest.skip(said)
    assert said == "ok"


@pytest.mark.parametrize("kind", KINDS)
def test_drawn(kind: str) -> None:
    limits = Limits.of("cuda", portable=family.is_portable(CUDA))
    found = {str(case): verdict(case, CUDA) for case in (draw(71, number, limits, (kind,)) for number in range(40))}
    assert {case: said for case, said in found.items() if said != "ok"} == {}
