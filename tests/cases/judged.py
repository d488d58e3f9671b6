"""Comparisons of one result: bits, or the largest error of each element."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from twell.testing.formula import Answer


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


def difference(found: Tensor, expected: Tensor) -> str:
    wrong = ~((found == expected) | (found.isnan() & expected.isnan()))
    at = wrong.nonzero()[:1].flatten().tolist()
    place = tuple(at)
    return (
        f"differs in {int(wrong.sum())} of {wrong.numel()} elements, first at {at}: "
        f"{float(found[place])}, expected {float(expected[place])}"
    )
