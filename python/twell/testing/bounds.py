"""Layers of 16-bit weights in float64, and two bounds of how far the promised roundings may lead from each result.

The strategies promise where they round to 16 bits: the gate always, h where "union" and training project it, in
backward the up projection that forward kept, each coefficient and each result once. Overflows compute the up projection
again; rare neurons add what rounding left of a coefficient. The bounds:

- of a row in norm: each of these roundings at its worst, half of the last place;
- of the whole in the Frobenius norm: ``BUDGET`` times what they cost on average, a third of that squared, and times
  dense PyTorch's error where it is smaller. Where few roundings share most of the error, luck widens that.

Nothing here is the package's code.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from twell.runtime import geometry
from twell.testing.case import BIASES, Case
from twell.testing.formula import MAIN, SUMMATION
from twell.testing.operands import Operands, largest, level_of, rounds_hidden, sums

# Share that one tensor-core instruction, 16 terms of one sign, truncates on average (H200: 1e-7). A sum of
# neurons or tokens is in parts of ``format.LONGEST_SUM`` terms where the package adds it up.
STEP = 2.0**-23
STEP_TERMS = 16

# Most rows of a product whose likeness is counted: it costs a product of all pairs.
FEW_ROWS = 256

# Average error of a sum of products, as a share of the bound ``operands.ACCUMULATION``.
USUAL = 0.25


class Value(NamedTuple):
    """Numbers in float64, each with its largest error and its mean square error."""

    right: Tensor
    off: Tensor
    square: Tensor

    def times(self, other: Value) -> Value:
        a, b = self, other
        off = a.off * b.right.abs() + b.off * a.right.abs() + a.off * b.off
        square = a.square * b.right.square() + b.square * a.right.square() + a.square * b.square
        return Value(a.right * b.right, off, square)

    def squared(self) -> Value:
        """Both factors have the same error."""
        right = self.right
        return Value(right.square(), self.off * (2 * right.abs() + self.off), 4 * right.square() * self.square)

    def doubled(self) -> Value:
        return Value(2 * self.right, 2 * self.off, 4 * self.square)

    def rounded(self, dtype: torch.dtype) -> Value:
        half = half_step(self.right.abs() + self.off, dtype)
        return self._replace(off=self.off + half, square=self.square + half.square() / 3)

    def split(self, dtype: torch.dtype) -> Value:
        """Round to ``dtype`` and add the rounding error."""
        half = half_step(self.right.abs() + self.off, dtype)
        again = half_step(half, dtype)
        return self._replace(off=self.off + again, square=self.square + again.square() / 3)

    def before(self, bias: Tensor | None, dtype: torch.dtype) -> Value:
        """As PyTorch may do by some strides, round the product before it adds the bias."""
        half = 0 if bias is None else half_step((self.right - bias).abs() + self.off, dtype)
        return self._replace(off=self.off + half, square=self.square + half**2 / 3)

    def where(self, mask: Tensor, other: Value | None = None) -> Value:
        """Zeros, or ``other``, where ``mask`` does not hold."""
        return Value(*(torch.where(mask, a, 0 if other is None else b) for a, b in zip(self, other or self)))

    def t(self) -> Value:
        return Value(*(tensor.t() for tensor in self))


def exact(t: Tensor) -> Value:
    return Value(t, torch.zeros_like(t), torch.zeros_like(t))


def summed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Value:
    """A projection summed by tensor cores: truncation errors have one sign, so they add up."""
    right, reach = sums(x, weight, bias)
    drift = STEP * x.shape[1] / STEP_TERMS * right.abs()
    return Value(right, reach + drift, (USUAL * reach).square() + drift.square())


def rounding(dtype: torch.dtype) -> tuple[float, float]:
    """The largest relative rounding error of ``dtype``, and the largest absolute one near 0."""
    info = torch.finfo(dtype)
    return info.eps / 2, info.smallest_normal * info.eps / 2


def half_step(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of rounding ``t`` to ``dtype``: half of its last place."""
    unit, smallest = rounding(dtype)
    # the exponent of fp32 alone is the power of two below
    below = (t.float().view(torch.int32) & 0x7F800000).view(torch.float32).double()
    return (below * unit).clamp_min(smallest)


@dataclass(frozen=True)
class Alike:
    """Whether a token's x, and so its roundings, equals that of others, [M]: all tokens or the zero ones."""

    token: Tensor
    some: bool

    @classmethod
    def of(cls, case: Case, x: Tensor) -> Alike:
        token = torch.ones_like(x[:, 0], dtype=torch.bool) if case.x_layout == "expanded" else ~x.any(1)
        return cls(token, bool(token.any()))

    def merge(self, t: Tensor) -> Tensor:
        """Replace the rows [token] of equal tokens by one row, their sum."""
        if not self.some:
            return t
        together = self.token[:, None]
        return torch.cat([t.masked_fill(together, 0), t.masked_fill(~together, 0).sum(0, keepdim=True)])

    def sizes(self) -> Tensor:
        """How many tokens equal each, itself included."""
        return torch.where(self.token, self.token.sum(), 1).double()


@dataclass(frozen=True)
class Product:
    """Coefficients [R, J] and the exact rows [J, C] that they weigh. known: errors of the former that do not average.

    The squares of 16-bit numbers just above a power of two are all rounded down.
    """

    coefficients: Value
    rows: Tensor
    known: Tensor | None = None


@dataclass(frozen=True)
class Bounded:
    """A result [R, C] in float64 and its rounding bounds.

    bound: of its rows' errors in norm, at the worst. usual: of the whole's error in norm, on average. count: how many
    roundings share most of that. draws: how many do where all errors of a row have one sign.
    """

    value: Tensor
    bound: Tensor
    usual: Tensor
    count: Tensor
    draws: Tensor

    @classmethod
    def elements(cls, value: Value, alike: Alike) -> Bounded:
        """Elements [M, C] that are rounded one by one."""
        energy = alike.merge(value.square)
        draws = participants(energy.sum(1))
        return cls(value.right, value.off.norm(dim=1), value.square.sum().sqrt(), participants(energy), draws)

    @classmethod
    def of(
        cls,
        products: list[Product],
        dtype: torch.dtype | None,
        alike: Alike,
        *,
        by_token: bool,
        longest: int,
        bias: Tensor | None = None,
        shared: Tensor | None = None,
    ) -> Bounded:
        """The sum of ``products``, rounded to ``dtype``, or added to ``MAIN`` in fp32 where that is None.

        by_token: a row is a token, and a neuron otherwise. longest: terms that tensor cores add up in one go. shared:
        [R, J], mean products of the errors that the coefficients of two products have in common.
        """
        value = sum(p.coefficients.right @ p.rows for p in products) + (0 if bias is None else bias.double())
        assert isinstance(value, Tensor)
        if dtype is None:
            last = 2.0**-24 * (MAIN + value.abs())
            # a sum may be computed in two parts
            bound = 2 * last.norm(dim=1)
        else:
            last = half_step(value, dtype)
            unit, smallest = rounding(dtype)
            bound = unit * value.norm(dim=1) + smallest * math.sqrt(value.shape[1])
        square = last.square() / 3
        if dtype is not None and by_token:
            # such a sum is often right between two numbers or one of them
            square = square.where(~on_a_grid(products), last.square() / 2)
        shares, counts = [], []
        for p in products:
            right, off, average = p.coefficients
            lengths = p.rows.norm(dim=1)
            terms = int((right != 0).sum(1).max()) if right.numel() else 0
            lost = STEP * min(terms, longest) / STEP_TERMS
            drift = 2 * lost**2
            average = average if by_token else average * alike.sizes()
            square = square + (average + drift * right.square()) @ p.rows.square() + drift * value.square()
            # an inexact result is rounded at its own magnitude
            bound = bound + 1.01 * (off + (SUMMATION + 2 * lost) * right.abs()) @ lengths
            share = average * lengths.square()
            shares.append(alike.merge(share if by_token else share.t()).flatten())
            if share.shape[1] <= FEW_ROWS:
                # rows that are alike add up errors instead of averaging them: few draws share such a result
                gram = p.rows @ p.rows.t()
                together = ((average.t() @ average) * gram.square()).sum()
                counts.append((share.sum().square() / together).nan_to_num(1.0).clamp_min(1))
        if shared is not None:
            first, second = (p.rows for p in products)
            square = (square + 2 * shared @ (first * second)).clamp_min(0)
        usual = square.sum()
        for p in products:
            if p.known is not None:
                usual = usual.maximum((p.known @ p.rows).square().sum())
        energy = alike.merge(square) if by_token else square
        count = torch.stack((participants(energy), participants(torch.cat(shares)), *counts)).amin()
        return cls(value, bound, usual.sqrt(), count, participants(energy.sum(1)))


def on_a_grid(products: list[Product]) -> Tensor:
    """Whether a result [R, C] adds up 16-bit coefficients by weights that are all powers of two."""
    others = torch.zeros((), device=products[0].rows.device)
    for p in products:
        mantissas = p.rows.frexp().mantissa.abs()
        odd = (mantissas != 0.5) & (mantissas != 0)
        others = others + (p.coefficients.right != 0).double() @ odd.double()
    return others == 0


def participants(shares: Tensor) -> Tensor:
    """The effective number of equal shares; 1 if there are none."""
    return (shares.sum().square() / shares.square().sum()).nan_to_num(1.0).clamp_min(1)


@dataclass(frozen=True)
class Right:
    """All answers by name, gate and up projection, the sum of |h| with its bound, and the non-zeros."""

    answers: dict[str, Bounded]
    gate: Value
    up: Value | None
    l1: Tensor
    l1_bound: Tensor
    nonzeros: Tensor


@torch.no_grad()
def solve(case: Case, o: Operands) -> Right:
    """The layer and its gradients."""
    dtype, first, x = case.torch_dtype, case.first, o.get("x")
    tokens = o["dy"] if x is None else x
    alike = Alike.of(case, o["gate"] if x is None else x)
    if case.kind == "given":
        gate, kept = exact(o["gate"].double()), o["gate"]
    else:
        gate = summed(tokens, o[f"w_{first}"], o.get(f"b_{first}"))
        gate = gate if case.is_sparse else gate.before(o.get(f"b_{first}"), dtype)
        kept = gate.right.to(dtype)
    active = largest(kept, case.top) if case.top else gate.right > level_of(case, kept.device)
    gate = (gate if case.kind == "given" else gate.rounded(dtype)).where(active)
    up = summed(tokens, o["w_up"], o.get("b_up")) if first == "gate" and "w_up" in o else None
    answers: dict[str, Bounded] = {}
    hidden, squares = gate, case.activation == "relu2"
    if squares:
        hidden = gate.squared()
    if up is not None:
        hidden = hidden.times(fired(case, up if case.is_sparse else up.before(o.get("b_up"), dtype).rounded(dtype)))
    if up is not None or squares:
        if rounds_hidden(case, tokens.device):
            hidden = hidden.rounded(dtype)
        hidden = hidden.where(active)
    if "w_down" in o:
        known = squared_error(gate, dtype).where(active, 0) if squares and up is None else None
        down, bias = Product(hidden, o["w_down"].t().double(), known), o.get("b_down")
        y = Bounded.of([down], dtype, alike, by_token=True, longest=longest(case), bias=bias)
        if not case.is_sparse:
            last = exact(y.value).before(bias, dtype)
            usual = (y.usual**2 + last.square.sum()).sqrt()
            y = dataclasses.replace(y, bound=y.bound + last.off.norm(dim=1), usual=usual)
        answers["y"] = y
    if case.wants:
        answers |= gradients(case, o, alike, gate, up)
    if squares:
        # equal gates have equal squares, and these equal errors: few different gates are few draws
        different = torch.unique(gate.right[active].to(dtype), return_counts=True)[1].double()
        for name in answers.keys() & {"y", "w_down"}:
            draws = torch.minimum(answers[name].draws, participants(different))
            answers[name] = dataclasses.replace(answers[name], draws=draws)
    size = hidden.right.abs().sum()
    return Right(answers, gate, up, size, hidden.off.sum() + SUMMATION * size, active.sum())


def squared_error(gate: Value, dtype: torch.dtype) -> Tensor:
    """What rounding adds to the square of a gate."""
    narrow = gate.right.to(dtype).double()
    return narrow.square().to(dtype).double() - gate.right.square()


def fired(case: Case, up: Value) -> Value:
    """The factor of the up projection."""
    return up.where(up.right > 0) if case.activation == "drelu" else up


def gradients(case: Case, o: Operands, alike: Alike, gate: Value, up: Value | None) -> dict[str, Bounded]:
    dtype, first = case.torch_dtype, case.first
    dy, down = o["dy"], o["w_down"].t()
    active = gate.right > 0
    fits = int(active.sum()) <= geometry.hybrid_capacity(case.m, case.n)
    if up is not None and (fits or not case.is_sparse):
        up = up.rounded(dtype)
    squares = case.activation == "relu2"
    factor = gate.squared() if squares else gate
    rectified = None if up is None else fired(case, up)
    hidden = factor if rectified is None else factor.times(rectified)
    dh = summed(dy, down, None)
    if not case.is_sparse:
        # rounded before and after the gradient of |h| is added, which may cancel
        half = half_step(dh.right.abs() + case.dl1, dtype)
        dh = dh._replace(off=dh.off + 2 * half, square=dh.square + half.square())
    dh = dh._replace(right=dh.right + case.dl1 * hidden.right.sign())
    again = rare(active) if case.is_sparse and fits else torch.zeros_like(active.any(0))

    def coefficient(value: Value, is_rounded: bool = True) -> tuple[Value, Value]:
        """A coefficient for the gradient of x, and for those of the weights."""
        plain = value.rounded(dtype) if is_rounded else value
        return plain.where(active), (value.split(dtype).where(again, plain) if is_rounded else plain).where(active)

    by_gate = dh.times(gate.doubled()) if squares else dh
    for_x, for_gate = coefficient(by_gate if rectified is None else by_gate.times(rectified))
    inputs, by_neuron, shared = list[Product](), {}, None
    elements = {"gate": Bounded.elements(for_x, alike)} if case.kind == "given" else {}
    if f"w_{first}" in o and case.kind != "given":
        inputs, by_neuron = [Product(for_x, o[f"w_{first}"].double())], {first: for_gate}
    if up is not None:
        by_up = dh.times(factor)
        for_x, by_neuron["up"] = coefficient(by_up.where(up.right > 0) if case.activation == "drelu" else by_up)
        inputs.append(Product(for_x, o["w_up"].double()))
        if squares and rectified is not None and len(inputs) == 2:
            # both coefficients have the gate's error, 2 dh up and 2 dh gate times
            shared = (4 * dh.right.square() * rectified.right * gate.right * gate.square).where(active, 0)
    _, for_down = coefficient(hidden, is_rounded=up is not None or squares)
    ones = torch.ones_like(dy[:, :1]).double()
    products = {f"b_{name}": Product(value.t(), ones) for name, value in by_neuron.items()}
    products |= {f"w_{name}": Product(value.t(), o["x"].double()) for name, value in by_neuron.items()}
    known = squared_error(gate, dtype).where(active & ~again, 0).t() if squares and up is None else None
    products |= {"w_down": Product(for_down.t(), dy.double(), known)}
    products |= {"b_down": Product(exact(dy.double()).t(), ones)}
    out = {}
    for name in case.wanted:
        if name in elements:
            out[name] = elements[name]
        elif name == "x":
            out[name] = Bounded.of(inputs, dtype, alike, by_token=True, longest=longest(case), shared=shared)
        else:
            last = None if case.mains and name not in BIASES else dtype
            out[name] = Bounded.of([products[name]], last, alike, by_token=False, longest=longest(case))
    return out


def longest(case: Case) -> int:
    """The terms that tensor cores add up in one go: all of them if PyTorch may choose."""
    known = geometry.LONGEST_SUM.get(str(case.torch_dtype).removeprefix("torch."), 1 << 30)
    return known if case.is_sparse else 1 << 30


def rare(active: Tensor) -> Tensor:
    """Whether a neuron's tile of 64, by popularity, has few non-zeros, [N]."""
    counts, order = active.sum(0).sort(descending=True, stable=True)
    tile = torch.arange(len(counts), device=counts.device) // geometry.NEURON_TILE
    few = counts.new_zeros(int(tile[-1]) + 1).index_add_(0, tile, counts) <= geometry.RARE_ENTRIES
    return torch.empty_like(few[tile]).scatter_(0, order, few[tile])
