"""Comparisons of one result: bits, the largest error of each element, or both bounds of a layer's."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from twell.testing import comparison
from twell.testing.bounds import STEP, STEP_TERMS, Bounded
from twell.testing.case import Case
from twell.testing.formula import MAIN, Answer

# with so many roundings chance averages out, see ``comparison.LUCK``
MANY = 4096


class Mismatch(Exception):
    """A result outside its bounds."""


@dataclass
class Result:
    """The outcome of a case.

    ratios: errors as shares of what is allowed. nonzeros: of a token.
    """

    verdict: str = "ok"
    seconds: float = 0.0
    ratios: dict[str, float] = field(default_factory=dict)
    nonzeros: float = 0.0


def judge_bits(name: str, found: Tensor, expected: Tensor) -> None:
    if not torch.equal(found, expected):
        raise Mismatch(f"{name} {difference(found, expected)}")


def judge_reals(
    case: Case, name: str, found: Tensor, answer: Bounded, references: list[Tensor], result: Result
) -> None:
    """Both bounds. references: what dense PyTorch computes; the worst counts."""
    if name in ("w_down", "main w_down"):
        found, references = found.t(), [t.t() for t in references]
    value, dtype = answer.value, case.torch_dtype
    if not value.numel():
        return
    found = found.detach().reshape(value.shape)
    error = error_of(found, value + MAIN if name.startswith("main ") else value, dtype)
    tiny = 1e-300
    rows = float((error.norm(dim=1) / answer.bound.clamp_min(tiny)).max())
    usual, count = float(answer.usual), float(answer.count)
    if case.coherent:
        # sums over K (gate, up projection, dh) lose the same share everywhere, which does not average out
        usual += 3 * STEP * case.k / STEP_TERMS * float(value.norm())
        # a coefficient's error has one sign in all columns of its row: a row is one draw
        count = min(count, float(answer.draws))
    allowed = usual
    # where dense PyTorch overflows to infinity, there is no error to compare with
    if references and all(bool(t.isfinite().all()) for t in references):
        theirs = max(float(error_of(t.detach().reshape(value.shape), value, dtype).norm()) for t in references)
        if count >= MANY and theirs:
            allowed = min(usual, theirs) if case.is_sparse else theirs
        elif not case.is_sparse:
            allowed = max(usual, theirs)
    norm = float(error.norm()) / max(comparison.BUDGET * (1 + comparison.LUCK / math.sqrt(count)) * allowed, tiny)
    result.ratios[name] = max(rows, norm)
    if not rows <= 1:
        raise Mismatch(f"{name}: a row is off by {rows:.2f} times what rounding can explain")
    if not norm <= 1:
        raise Mismatch(f"{name}: the error is {norm:.2f} times what is allowed ({count:.0f} roundings)")


def judge_elements(
    name: str, found: Tensor, answer: Answer, result: Result, share: float = 1.0, dtype: torch.dtype | None = None
) -> None:
    """``share``: of the absolute terms that roundings may take; terms beyond ``dtype`` may be infinite."""
    ours, value, off = found.detach().double().reshape(answer.value.shape), answer.value, answer.off
    finite = torch.ones_like(off, dtype=torch.bool)
    if found.is_floating_point():
        finite = torch.maximum(value.abs(), off / share) <= torch.finfo(dtype or found.dtype).max
    ratio = ((ours - value).abs() / off.clamp_min(1e-300)).where(finite, 0)
    if not value.numel():
        return
    result.ratios[name] = float(ratio.max())
    if not bool((ratio <= 1).all()):
        place = int(ratio.nan_to_num(math.inf).argmax())
        at = f"{float(ours.flatten()[place]):g}, expected {float(value.flatten()[place]):g}"
        raise Mismatch(f"{name}: {at}, off by at most {float(off.flatten()[place]):g}")


def error_of(found: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of ``found``; 0 where it is infinite because the dtype has no larger number."""
    most = torch.finfo(dtype).max
    beyond = found.isinf() & (found.sign() == value.sign()) & (value.abs() > most * (1 - 2.0**-8))
    return (found.double() - value).masked_fill(beyond, 0)


def difference(found: Tensor, expected: Tensor) -> str:
    wrong = ~((found == expected) | (found.isnan() & expected.isnan()))
    at = wrong.nonzero()[:1].flatten().tolist()
    place = tuple(at)
    return (
        f"differs in {int(wrong.sum())} of {wrong.numel()} elements, first at {at}: "
        f"{float(found[place])}, expected {float(expected[place])}"
    )
