"""Errors of a result against float64, beside those of dense PyTorch on the same problem, and how large they may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twell.base.arguments import require
from twell.testing.answers import count_roundings, dense_gradients, dense_output, float64_gradients, float64_output
from twell.testing.workloads import CHUNK_ROWS, FFN

# Largest error against float64 as a multiple of dense PyTorch's, where many roundings share the error.
BUDGET = 1.1

# The norm of n errors of one size has a deviation of half to three quarters of its size over the root of n, so a right
# result of few terms may be further away by chance. This is four to six deviations.
LUCK = 3

# The budget of a bias's gradient. It is one vector: with skewed neurons a few elements hold most of its norm, and each
# is rounded by up to half a unit. Over 20 elements the ratio of two such errors has a standard deviation of 14 %; this
# is three of them.
BIAS_BUDGET = 1.4

# The budget of a gradient's worst row, the least lucky of thousands, which another order of sums changes.
ROW_BUDGET = 1.25

# A row's error is relative to at least this share of the root mean square row norm. A sum of 2,048 products in 128 fp32
# steps is off by up to 128 * 2^-23 = 1.5e-5 of its size: more than a row that cancels to nothing, but less than the
# rounding to bf16 (2^-9 = 2e-3) at this floor. Wrong rows still show: budgets are below 1e-2.
ROW_FLOOR = 1e-2


@dataclass(frozen=True)
class Errors:
    """Relative errors against float64: of the whole tensor in the Frobenius norm, and of the worst row.

    A row's error is relative to the largest of its own norm, ROW_FLOOR times the root mean square row norm and, for
    gradients, the norm of the row if its terms were orthogonal: if they cancel to little, their rounding, which dense
    PyTorch does too, is much of the rest and says nothing about a kernel.
    Both are infinite if the result is not finite although the answer is.
    """

    frobenius: float
    worst_row: float

    def within(self, other: Errors, factor: float = BUDGET, row_factor: float | None = None) -> bool:
        """Whether the errors are at most ``factor`` times those of ``other``, which must be finite.

        ``row_factor`` replaces it for the worst row.
        """
        if not (math.isfinite(other.frobenius) and math.isfinite(other.worst_row)):
            return False
        rows = factor if row_factor is None else row_factor
        return self.frobenius <= factor * other.frobenius and self.worst_row <= rows * other.worst_row

    def __str__(self) -> str:
        return f"{self.frobenius:.3e} (worst row {self.worst_row:.3e})"


@torch.no_grad()
def errors(out: Tensor, answer: Tensor, terms: Tensor | None = None) -> Errors:
    """Errors of ``out`` against the finite float64 ``answer``, both [M, K]; zero if there are no elements.

    ``terms`` [M]: the root of the sum of squares of each row's terms.
    """
    require("out", out, Tensor, "a tensor [M, K]")
    require("answer", answer, Tensor, "a tensor [M, K]")
    if out.shape != answer.shape:
        raise ValueError(f"shapes must agree, got {tuple(out.shape)} and {tuple(answer.shape)}")
    if not answer.numel():
        return Errors(0.0, 0.0)
    parts = zip(torch.split(out, CHUNK_ROWS), torch.split(answer, CHUNK_ROWS))
    wrong = torch.cat([(ours.double() - right).norm(dim=1) for ours, right in parts])
    right = answer.norm(dim=1)
    total = float(right.norm())
    if not math.isfinite(total):
        raise ValueError("the answer must be finite")
    if not bool(wrong.isfinite().all()):
        return Errors(math.inf, math.inf)
    if not total:
        error = math.inf if bool(wrong.any()) else 0.0
        return Errors(error, error)
    floor = ROW_FLOOR * total / math.sqrt(len(out))
    right = right.clamp_min(floor) if terms is None else right.clamp_min(floor).maximum(terms)
    return Errors(float(wrong.norm()) / total, float((wrong / right).max()))


@dataclass(frozen=True)
class Comparison:
    """The errors of a result and those of dense PyTorch on the same problem; ``roundings`` share most of these.

    Allowed are ``budget`` and ``row_budget`` times the errors of dense PyTorch, and more if the roundings are few: see
    ``allowance``.
    """

    ours: Errors
    dense: Errors
    roundings: float
    budget: float = BUDGET
    row_budget: float = BUDGET

    @property
    def factor(self) -> float:
        """The allowed error as a multiple of that of dense PyTorch."""
        return self.budget * allowance(self.roundings)

    @property
    def row_factor(self) -> float:
        """The same for the worst row."""
        return self.row_budget * allowance(self.roundings)

    @property
    def ok(self) -> bool:
        """Whether the result is as close to float64 as dense PyTorch is, times ``factor``, in norm and worst row."""
        return self.ours.within(self.dense, self.factor, self.row_factor)

    def __str__(self) -> str:
        return f"error {self.ours}, dense {self.dense}, allowed {self.factor:.3g} ({self.row_factor:.3g}) times dense"


def allowance(roundings: float) -> float:
    """The factor that widens a budget for chance: 4 for one rounding or none, towards 1 for many.

    Two right results round at different places, so the ratio of their errors is a matter of chance if few terms are
    summed. The ratio is a figure over workloads: no call promises it.
    """
    return 1 + LUCK / math.sqrt(max(roundings, 1))


def compare(problem: FFN, out: Tensor, *, gated: bool = True, **options: Any) -> Comparison:
    """Errors of ``out`` [M, K], a result for ``problem``, beside those of dense PyTorch.

    ``options``: activation and threshold.
    """
    answer = float64_output(problem, gated=gated, **options)
    dense = errors(dense_output(problem, gated=gated, **options), answer)
    return Comparison(errors(out, answer), dense, count_roundings(problem, gated=gated, **options))


def compare_gradients(
    problem: FFN, dy: Tensor, gradients: dict[str, Tensor], dl1: float = 0.0, *, gated: bool = True, **options: Any
) -> dict[str, Comparison]:
    """Errors of the ``gradients`` of ``problem`` beside those of dense PyTorch, by name.

    A row of x's gradient is a token, a row of a weight's gradient a neuron; both have ROW_BUDGET. The gradient of a
    bias is one row and has BIAS_BUDGET. ``allowance`` widens all of them. The problem should be ``off_kinks``.
    ``options``: activation and threshold.
    """
    answer = float64_gradients(problem, dy, dl1, gated=gated, **options)
    if gradients.keys() != answer.keys():
        raise ValueError(f"gradients must be those of {', '.join(answer)}, got {', '.join(gradients)}")
    squares = float64_gradients(problem, dy, dl1, gated=gated, each=torch.square, **options)
    baseline = dense_gradients(problem, dy, dl1, gated=gated, **options)
    roundings = count_roundings(problem, gated=gated, **options)
    compared = {}
    for name in answer:
        of_name = (found[name] for found in (gradients, baseline, answer, squares))
        ours, dense, right, square = (t.view(-1, t.shape[-1]) for t in of_name)
        terms = square.sum(1).sqrt()
        budgets = (BIAS_BUDGET, BIAS_BUDGET) if name.startswith("b_") else (BUDGET, ROW_BUDGET)
        compared[name] = Comparison(errors(ours, right, terms), errors(dense, right, terms), roundings, *budgets)
    return compared
