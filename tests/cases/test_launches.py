"""Pinned cases on a GPU that is not there: launches fit their kernels, and the host reads nothing. No numbers."""

from pathlib import Path

import pytest
import torch

from tests.cases.drawn import Limits
from tests.cases.layouts import laid_out, surroundings
from tests.cases.pinned import PINNED
from tests.cpu import fake_gpu
from twell.runtime import geometry, specs
from twell.testing.calls import caller
from twell.testing.case import Case
from twell.testing.operands import build

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:Warning only once")]

CPU, LIMITS = torch.device("cpu"), Limits.of("cpu")
# a case, and behind "|" the kernels that it launches
_LINES = (Path(__file__).parent / "launches.txt").read_text().splitlines()
TABLE = [line.split("|") for line in _LINES if line[0] != "#"]


def launched(case: Case, family: str) -> list[str]:
    """The kernels that a case launches, again in a second call."""
    call = caller(case, laid_out(case, build(case, CPU)))
    with pytest.MonkeyPatch.context() as patch, fake_gpu.dispatched():
        gpu = fake_gpu.install(patch, family)
        for name in ("_scaled_mm", "_scaled_grouped_mm"):
            patch.setattr(torch, name, lambda a, b, *_, **__: torch.zeros(len(a), b.shape[-1], dtype=torch.bfloat16))
        try:
            with surroundings(case, CPU):
                fake_gpu.refuse_reads(patch)
                call()
                first = gpu.names()
                gpu.clear()
                call()
        finally:
            fake_gpu.forget_programs()
        assert gpu.names() == first
        assert {getattr(spec, "family", family) for spec, _ in gpu.launches} <= {family}
        return first


def sparse(case: Case, family: str) -> bool:
    alone = case.scales or case.kind == "experts" or case.strategy == "union+screen"
    portable = not alone and case.n <= geometry.PORTABLE_UNION_NEURONS
    in_16_bits = case.dtype in ("bf16", "fp16")
    return case.strategy != "dense" and in_16_bits and LIMITS.hold(case) and (portable or family == specs.SM90)


@pytest.mark.parametrize("family", [specs.SM90, specs.PORTABLE])
def test_launches_of_pinned_cases_fit_their_kernels(family: str) -> None:
    wrong = {}
    for case in PINNED:
        if sparse(case, family):
            try:
                launched(case.replace(call="eager"), family)
            except Exception as error:
                wrong[str(case)] = f"{type(error).__name__}: {error}"
    assert wrong == {}


@pytest.mark.parametrize(("line", "names"), TABLE)
def test_kernels_of_a_case(line: str, names: str) -> None:
    assert launched(Case.of(line), specs.SM90) == names.split()
