"""The fuzzer's oracle: float64 answers, and how far the promised roundings may lead from them.

The strategies promise where they round to 16 bits: the gate always, h where "union" and training project it, in
backward the up projection that forward kept, each coefficient and each result once. Overflows compute the up projection
again; rare neurons add what rounding left of a coefficient. Two bounds follow for each result:

- of a row in norm: each of these roundings at its worst, half of the last place;
- of the whole in the Frobenius norm: ``testing.BUDGET`` times what they cost on average, a third of that squared, and
  times dense PyTorch's error where it is smaller. Where few roundings share most of the error, luck widens that.

"auto" may round where dense PyTorch does, and results that have its bits are right. Nothing here is the package's code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuzz.problems import BIASES, DTYPES, SPARSE, Case, Layer, largest, level_of, sums
from twell import testing
from twell._runtime import geometry

# Share that one tensor-core instruction, 16 terms of one sign, truncates on average (H200: 1e-7). A sum of
# neurons or tokens is in parts of ``format.LONGEST_SUM`` terms where the package adds it up.
STEP = 2.0**-23
STEP_TERMS = 16

# Worst error of such sums, as a share of the sum of absolute terms.
SUMMATION = 2.0**-16

# Average error of a sum of products, as a share of the bound ``problems.ACCUMULATION``.
USUAL = 0.25

# With so many roundings chance averages out, see ``testing.LUCK``.
LUCK = testing.LUCK
MANY = 4096

# Value of main gradients before a call adds to them.
MAIN = 3

Outputs = dict[str, Tensor]


class Mismatch(Exception):
    """A result outside its bounds."""


@dataclass
class Result:
    """The outcome of a case.

    ratios: errors as shares of what is allowed. nonzeros: of a token.
    """

    verdict: str = "ok"
    seconds: float = 0.0
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)
    nonzeros: float = 0.0


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
    """Return the largest relative rounding error of ``dtype``, and the largest absolute one near 0."""
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
    """Return [M] whether a token's x, and so its roundings, equals that of others: all tokens or the zero ones."""

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
        """Return how many tokens equal each, itself included."""
        return torch.where(self.token, self.token.sum(), 1).double()


@dataclass(frozen=True)
class Product:
    """Coefficients [R, J] and the exact rows [J, C] that they weigh."""

    coefficients: Value
    rows: Tensor


@dataclass(frozen=True)
class Answer:
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
    ) -> Answer:
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
        shares = []
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
        if shared is not None:
            first, second = (p.rows for p in products)
            square = (square + 2 * shared @ (first * second)).clamp_min(0)
        energy = alike.merge(square) if by_token else square
        count = torch.minimum(participants(energy), participants(torch.cat(shares)))
        return cls(value, bound, square.sum().sqrt(), count, participants(energy.sum(1)))


def on_a_grid(products: list[Product]) -> Tensor:
    """Return [R, C] whether a result adds up 16-bit coefficients by weights that are all powers of two."""
    others = torch.zeros(())
    for p in products:
        mantissas = p.rows.frexp().mantissa.abs()
        odd = (mantissas != 0.5) & (mantissas != 0)
        others = others + (p.coefficients.right != 0).double() @ odd.double()
    return others == 0


def participants(shares: Tensor) -> Tensor:
    """Return the effective number of equal shares; 1 if there are none."""
    return (shares.sum().square() / shares.square().sum()).nan_to_num(1.0).clamp_min(1)


@dataclass(frozen=True)
class Right:
    """All answers by name, the gate [M, N], the sum of |h| with its bound, and the non-zeros."""

    answers: dict[str, Answer]
    gate: Tensor
    l1: Tensor
    l1_bound: Tensor
    nonzeros: Tensor


@torch.no_grad()
def solve(case: Case, layer: Layer) -> Right:
    """Compute the layer and its gradients in float64."""
    dtype, sparse = DTYPES[case.dtype], case.strategy in SPARSE
    alike = Alike.of(case, layer.x)
    gate = summed(layer.x, layer.w_gate, layer.b_gate)
    active = gate.right > level_of(case, gate.right.device)
    if case.top:
        active = largest(gate.right.to(dtype), case.top)
    gate = gate.rounded(dtype).where(active)
    up = None if layer.w_up is None else summed(layer.x, layer.w_up, layer.b_up)
    hidden, squares = gate, case.activation == "relu2"
    if squares:
        hidden = gate.squared()
    if up is not None:
        hidden = hidden.times(fired(case, up if sparse else up.rounded(dtype)))
    if up is not None or squares:
        if case.strategy not in ("row", "row+invariant") or case.training:
            hidden = hidden.rounded(dtype)
        hidden = hidden.where(active)
    down = Product(hidden, layer.w_down.double())
    answers = {"y": Answer.of([down], dtype, alike, by_token=True, longest=longest(case), bias=layer.b_down)}
    if case.training:
        answers |= gradients(case, layer, alike, gate, up)
    if squares:
        # equal gates have equal squares, and these equal errors: few different gates are few draws
        different = gate.right[active].to(dtype).unique(return_counts=True)[1].double()
        for name in answers.keys() & {"y", "w_down"}:
            answers[name] = dataclasses.replace(
                answers[name], draws=torch.minimum(answers[name].draws, participants(different))
            )
    size = hidden.right.abs().sum()
    return Right(answers, gate.right, size, hidden.off.sum() + SUMMATION * size, active.sum())


def fired(case: Case, up: Value) -> Value:
    """The factor of the up projection."""
    return up.where(up.right > 0) if case.activation == "drelu" else up


def gradients(case: Case, layer: Layer, alike: Alike, gate: Value, up: Value | None) -> dict[str, Answer]:
    dtype, sparse = DTYPES[case.dtype], case.strategy in SPARSE
    active = gate.right > 0
    fits = int(active.sum()) <= geometry.hybrid_capacity(case.m, case.n)
    if up is not None and (fits or not sparse):
        up = up.rounded(dtype)
    squares = case.activation == "relu2"
    factor = gate.squared() if squares else gate
    rectified = None if up is None else fired(case, up)
    hidden = factor if rectified is None else factor.times(rectified)
    dh = summed(layer.dy, layer.w_down, None)
    if not sparse:
        # rounded before and after the gradient of |h| is added, which may cancel
        half = half_step(dh.right.abs() + dl1_of(case), dtype)
        dh = dh._replace(off=dh.off + 2 * half, square=dh.square + half.square())
    dh = dh._replace(right=dh.right + dl1_of(case) * hidden.right.sign())
    again = rare(active) if sparse and fits else torch.zeros_like(active.any(0))

    def coefficient(value: Value, is_rounded: bool = True) -> tuple[Value, Value]:
        """A coefficient for the gradient of x, and for those of the weights."""
        plain = value.rounded(dtype) if is_rounded else value
        return plain.where(active), (value.split(dtype).where(again, plain) if is_rounded else plain).where(active)

    by_gate = dh.times(gate.doubled()) if squares else dh
    for_x, for_gate = coefficient(by_gate if rectified is None else by_gate.times(rectified))
    x = layer.x.double()
    inputs = [Product(for_x, layer.w_gate.double())]
    by_neuron, shared = {"gate": for_gate}, None
    if layer.w_up is not None:
        assert up is not None
        by_up = dh.times(factor)
        for_x, by_neuron["up"] = coefficient(by_up.where(up.right > 0) if case.activation == "drelu" else by_up)
        inputs.append(Product(for_x, layer.w_up.double()))
        if squares and rectified is not None:
            # both coefficients have the gate's error, 2 dh up and 2 dh gate times
            shared = (4 * dh.right.square() * rectified.right * gate.right * gate.square).where(active, 0)
    _, for_down = coefficient(hidden, is_rounded=up is not None or squares)
    ones = torch.ones_like(x[:, :1])
    products = {f"w_{name}": Product(value.t(), x) for name, value in by_neuron.items()}
    products |= {f"b_{name}": Product(value.t(), ones) for name, value in by_neuron.items()}
    products |= {"w_down": Product(for_down.t(), layer.dy.double())}
    products |= {"b_down": Product(exact(layer.dy.double()).t(), ones)}
    out = {}
    for name in case.wanted:
        if name == "x":
            out[name] = Answer.of(inputs, dtype, alike, by_token=True, longest=longest(case), shared=shared)
        else:
            last = None if case.mains and name not in BIASES else dtype
            out[name] = Answer.of([products[name]], last, alike, by_token=False, longest=longest(case))
    return out


def longest(case: Case) -> int:
    """Return the terms that tensor cores add up in one go: all of them if PyTorch may choose."""
    return geometry.LONGEST_SUM[str(DTYPES[case.dtype]).removeprefix("torch.")] if case.strategy in SPARSE else 1 << 30


def rare(active: Tensor) -> Tensor:
    """Return [N] whether a neuron's tile of 64, by popularity, has few non-zeros."""
    counts, order = active.sum(0).sort(descending=True, stable=True)
    tile = torch.arange(len(counts), device=counts.device) // geometry.NEURON_TILE
    few = counts.new_zeros(int(tile[-1]) + 1).index_add_(0, tile, counts) <= geometry.RARE_ENTRIES
    return torch.empty_like(few[tile]).scatter_(0, order, few[tile])


def dl1_of(case: Case) -> float:
    """Return the gradient of the sum of |h|; None if that of its mean over tokens is not exact."""
    tokens = torch.tensor(float(max(case.m, 1)), device="cpu")
    # division by a host number, as on a GPU
    whole = bool(tokens * (1 / tokens) == 1)
    return (1.0 if case.exact and whole else 0.0 if case.exact else 0.25) if case.l1 else 0.0


@torch.enable_grad()
def dense(case: Case, t: dict[str, Tensor], dy: Tensor) -> Outputs:
    """The same in plain PyTorch, from the call's operands and with its names of outputs."""
    leaves = {name: operand.detach().requires_grad_(name in case.wanted) for name, operand in t.items()}
    gate = F.linear(leaves["x"], leaves["w_gate"], leaves.get("b_gate"))
    level = level_of(case, gate.device)
    if case.top:
        gate = torch.where(largest(gate.view(-1, case.n), case.top).view(gate.shape), gate, 0)
    else:
        gate = torch.where(gate <= level, 0, gate) if case.threshold or case.by_neuron else F.relu(gate)
    hidden = gate * gate if case.activation == "relu2" else gate
    if case.gated:
        up = F.linear(leaves["x"], leaves["w_up"], leaves.get("b_up"))
        if case.activation == "relu2":
            # the square is not rounded
            wide = gate.float()
            hidden = (wide * wide * up.float()).to(gate.dtype)
        else:
            hidden = gate * (F.relu(up) if case.activation == "drelu" else up)
    y = F.linear(hidden, leaves["w_down"], leaves.get("b_down"))
    l1, l0 = hidden.abs().sum(dtype=torch.float32), (gate > 0).sum().float()
    out = {"y": y.detach(), "l1": l1.detach() / max(case.m, 1), "l0": l0 / max(case.m, 1)}
    if not case.training:
        return out
    with torch.autocast(dy.device.type, enabled=False):
        found = derive([y, l1], leaves, [dy.view(y.shape), torch.full_like(l1, dl1_of(case))])
    return out | {name: torch.zeros_like(leaves[name]) if g is None else g for name, g in found.items()}


def derive(outputs: list[Tensor], leaves: dict[str, Tensor], upstream: list[Tensor]) -> dict[str, Tensor | None]:
    """Gradients of leaves that require them; the sum of |h| has none if only the down projection does."""
    inputs = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    pairs = [(y, dy) for y, dy in zip(outputs, upstream) if y.requires_grad]
    found = torch.autograd.grad(
        [y for y, _ in pairs], list(inputs.values()), [dy for _, dy in pairs], allow_unused=True
    )
    return dict(zip(inputs, found))


def packed_words(gate: Tensor, compression: int) -> tuple[Tensor, Tensor]:
    """words and stats of a gate [M, N] of 16 bits, as README has the format."""
    m, n = gate.shape
    tiles, width = -(-n // 256), 256 // compression
    values = F.pad(gate, (0, 256 * tiles - n)).view(m, tiles, 256)
    nonzero = values != 0
    counts = nonzero.sum(2)
    place = torch.where(nonzero, nonzero.cumsum(2), width).clamp(max=width)
    neurons = torch.arange(256 * tiles, device=gate.device, dtype=torch.int32).view(1, tiles, 256)
    entries = values.view(torch.int16).int() << 16 | neurons
    # the last column takes the other values
    words = torch.zeros(m, tiles, width + 1, dtype=torch.int32, device=gate.device).scatter_(2, place, entries)
    words[:, :, 0] = counts
    figures = torch.stack((counts, (counts >= width).long()), 2)
    stats = F.pad(figures, (0, 0, 0, 0, 0, -m % geometry.STATS_ROWS)).view(-1, geometry.STATS_ROWS, tiles, 2).sum(1)
    return words[:, :, :width].reshape(m, tiles * width), stats.int()


# Results


def same_bits(found: Outputs, first: Outputs, what: str) -> None:
    differing = [
        name
        for name, t in found.items()
        if t.shape != first[name].shape
        or not torch.equal(t.reshape(-1).view(torch.uint8), first[name].reshape(-1).view(torch.uint8))
    ]
    if differing or found.keys() != first.keys():
        raise Mismatch(f"{what} has other bits in {', '.join(differing) or sorted(found)}")


def check(
    case: Case,
    shape: torch.Size,
    right: Right,
    baseline: Outputs,
    plain: Outputs,
    found: Outputs,
    result: Result,
) -> None:
    """``baseline`` is dense PyTorch at its most precise, ``plain`` its results for the very operands."""
    if found["y"].shape != shape or found["y"].dtype != DTYPES[case.dtype]:
        raise Mismatch(f"y must be {list(shape)}, got {found['y'].dtype} {list(found['y'].shape)}")
    missing = {"y", *case.wanted} - {name.removeprefix("main ") for name in found}
    if missing:
        raise Mismatch(f"no {', '.join(sorted(missing))}")
    # depending on strides PyTorch may round a product before it adds the bias
    plainly = {name: t for name, t in plain.items() if name in found}
    if case.strategy == "dense":
        same_bits(found, plainly, "dense")
        return
    if case.strategy not in SPARSE:
        with contextlib.suppress(Mismatch):
            same_bits(found, plainly, "dense")
            return
    if "l1" in found:
        check_figures(case, right, found)
    for name, t in found.items():
        key = name.removeprefix("main ")
        if key in right.answers:
            # one that rounds before the bias may choose other gates
            same = None if case.top else plainly.get(name)
            references = [r for r in (baseline.get(key), same) if r is not None]
            check_answer(case, name, t, right.answers[key], references, result)


def check_answer(
    case: Case, name: str, found: Tensor, answer: Answer, references: list[Tensor], result: Result
) -> None:
    """Bits of exact cases, both bounds of others. references: what dense PyTorch computes; the worst counts."""
    if name in ("w_down", "main w_down"):
        found, references = found.t(), [t.t() for t in references]
    dtype, value, sparse = DTYPES[case.dtype], answer.value, case.strategy in SPARSE
    found = found.detach().reshape(value.shape)
    main = name.startswith("main ")
    # dense PyTorch adds two products to the gradient of x, each of them rounded
    if case.exact and (sparse or name != "x" or not case.gated):
        expected = (value + MAIN).float() if main else value.float().to(dtype).to(found.dtype)
        if not torch.equal(found, expected):
            raise Mismatch(f"{name} {difference(found, expected)}")
        return
    if not value.numel():
        return
    error = error_of(found, value + MAIN if main else value, dtype)
    rows = float((error.norm(dim=1) / answer.bound).max())
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
            allowed = min(usual, theirs) if sparse else theirs
        elif not sparse:
            allowed = max(usual, theirs)
    norm = 0.0 if case.exact else float(error.norm()) / (testing.BUDGET * (1 + LUCK / math.sqrt(count)) * allowed)
    result.ratios[name] = max(rows, norm)
    if not rows <= 1:
        raise Mismatch(f"{name}: a row is off by {rows:.2f} times what rounding can explain")
    if not norm <= 1:
        raise Mismatch(f"{name}: the error is {norm:.2f} times what is allowed ({count:.0f} roundings)")


def error_of(found: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the error of ``found``; 0 where it is infinite because the dtype has no larger number."""
    largest = torch.finfo(dtype).max
    beyond = found.isinf() & (found.sign() == value.sign()) & (value.abs() > largest * (1 - 2.0**-8))
    return (found.double() - value).masked_fill(beyond, 0)


def difference(found: Tensor, expected: Tensor) -> str:
    wrong = ~((found == expected) | (found.isnan() & expected.isnan()))
    at = wrong.nonzero()[:1].flatten().tolist()
    place = tuple(at)
    return (
        f"differs in {int(wrong.sum())} of {wrong.numel()} elements, first at {at}: "
        f"{float(found[place])}, expected {float(expected[place])}"
    )


def check_figures(case: Case, right: Right, found: Outputs) -> None:
    tokens = max(case.m, 1)
    l0, l1, total = float(found["l0"]), float(found["l1"]), float(right.l1)
    if l0 != float(right.nonzeros.float() / tokens):
        raise Mismatch(f"l0 {l0}, expected {float(right.nonzeros) / tokens}")
    allowed = float(right.l1_bound) / tokens
    if case.exact:
        allowed = 0.0 if total < testing.EXACT_LIMIT else 1e-5 * total / tokens
    if not abs(l1 - float(right.l1.float() / tokens)) <= allowed:
        raise Mismatch(f"l1 {l1}, expected {total / tokens}, off by at most {allowed}")


def check_packed(case: Case, layer: Layer, right: Right, found: Outputs) -> None:
    dtype = DTYPES[case.dtype]
    values = found["dense"].reshape(case.m, case.n)
    if case.exact:
        expected = right.gate.float().to(dtype)
        if not torch.equal(values, expected):
            raise Mismatch(f"gate {difference(values, expected)}")
    else:
        gate = summed(layer.x, layer.w_gate, layer.b_gate).rounded(dtype)
        off = (values.double() - right.gate).abs() > gate.off
        off |= (values > 0) != (right.gate > 0)
        if bool(off.any()):
            # assumes that the others are right
            expected = right.gate.where(off, values.double())
            raise Mismatch(f"gate {difference(values.double(), expected)}, off by at most {float(gate.off[off][0])}")
    words, stats = packed_words(values, case.compression)
    for name, expected in (("words", words), ("stats", stats)):
        if not torch.equal(found[name].reshape(expected.shape), expected):
            raise Mismatch(f"{name} {difference(found[name].reshape(expected.shape), expected)}")
    if int(found["nnz"]) != int(right.nonzeros):
        raise Mismatch(f"nnz {int(found['nnz'])}, expected {int(right.nonzeros)}")
