"""The int8 screen of the gate: it misses no gate on hostile data, its bound holds in float64, its dither is random."""

import itertools
import math
import sys
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tests import family as families
from twell import ops, testing
from twell.base.activation import RELU, Activation
from twell.choose.plan import Route
from twell.ops import reference, screened
from twell.ops.hybrid_cpu import gate_on_cpu
from twell.ops.operands import Layer
from twell.runtime import device, screen

BF16 = torch.bfloat16


def gaussian(r: int, k: int) -> Tensor:
    return torch.randn(r, k)


def outliers(r: int, k: int) -> Tensor:
    rows = torch.randn(r, k)
    rows[:, torch.randperm(k)[: max(1, k // 256)]] *= 1000
    return rows


def constant(r: int, k: int) -> Tensor:
    return torch.randn(r, 1).expand(r, k)


def equal_signs(r: int, k: int) -> Tensor:
    return torch.rand(r, k) + 0.5


def one_value(r: int, k: int) -> Tensor:
    """Rows with a single non-zero: all rotated values have one magnitude, and the scale is exact."""
    rows = torch.zeros(r, k)
    rows[torch.arange(r), torch.randint(k, (r,))] = torch.randn(r)
    return rows


def denormals(r: int, k: int) -> Tensor:
    return torch.randn(r, k) * 2.0 ** -torch.randint(0, 133, (r, k))


def far_apart(r: int, k: int) -> Tensor:
    return torch.randn(r, k) * 2.0 ** torch.randint(-60, 45, (r, 1))


def back_rotated(r: int, k: int) -> Tensor:
    """Rows whose rotation has one huge value in each block: the other values get few of the 127 levels."""
    rows = torch.zeros(r, k)
    rows[:, :: screen.rotation_block(k)] = 100.0
    return reference.rotate(rows + torch.randn(r, k))


HOSTILE = (gaussian, outliers, constant, equal_signs, one_value, denormals, far_apart, back_rotated)
SIZES = (64, 72, 896, 2048, 16384)
# of tests that take long
QUICK = [pytest.param(k, marks=[pytest.mark.nightly] * (k > 8192)) for k in SIZES]


def quantized(x: Tensor, w: Tensor) -> tuple[reference.Quantized, reference.Quantized]:
    return reference.quantize_gate(x, False), reference.quantize_gate(w, True)


def centred_product(x: reference.Quantized, w: reference.Quantized) -> Tensor:
    """The product of both sides' q without their dithers, from the operators' corrections, [M, N]."""
    product = x[0].double() @ w[0].double().t()
    return product - x[3].double()[:, None] - w[3].double() + screen.dither_product(x[0].shape[1])


def dithers(k: int, shift: int) -> Tensor:
    """The centred dithers of x or of w, by their place in a column's word."""
    words = screen.words(k, screen.DITHERS)
    return torch.tensor([screen.centred(word, shift) for word in words]).double() * 2.0 ** -(screen.FRACTION + 1)


def errors(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """How far the centred product is below that in float64, in its units, and the bound, for rows that are screened."""
    of_x, of_w = quantized(x, w)
    x, *of_x = (t[of_x[2].isfinite() & (of_x[2] > 0)] for t in (x, *of_x))
    w, *of_w = (t[of_w[2].isfinite() & (of_w[2] > 0)] for t in (w, *of_w))
    k = x.shape[1]
    units = screen.rotation_block(k) / (of_x[1].double()[:, None] * of_w[1].double())
    exact = (x.double() @ w.double().t()) * units
    return exact - centred_product(of_x, of_w), reference.screen_bound(of_x[2], of_w[2], k)


def test_philox_gives_the_published_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known answers of Random123 for counters and keys of zeros, and of ones."""
    monkeypatch.setattr(screen, "KEY", (0, 0))
    assert screen.philox(0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


@pytest.mark.parametrize("k", QUICK)
def test_the_bound_holds_on_hostile_data(k: int) -> None:
    for tokens, weights in itertools.product(HOSTILE, HOSTILE):
        torch.manual_seed(k)
        error, bound = errors(tokens(24, k).to(BF16), weights(40, k).to(BF16))
        assert error.numel()
        # at 2^-80 no error comes near: the worst of a million normal ones is at half of the bound
        assert (error.abs() / bound).max() < 0.75, (tokens, weights)


@pytest.mark.parametrize("k", SIZES[:4])
def test_no_gate_is_missed(k: int) -> None:
    """Gates of both signs, near to zero or not, with and without a bias that nearly cancels the product."""
    for rows, dtype in itertools.product(HOSTILE, (BF16, torch.float16)):
        torch.manual_seed(k)
        x, w = rows(48, k).to(dtype), gaussian(96, k).to(dtype)
        product = (x.float() @ w.float().t()).nan_to_num(0, 0, 0)
        for bias in (None, (-product.median(0)[0]).to(dtype), torch.full((96,), 2.0**-24).to(dtype)):
            gate = gate_on_cpu(Layer(x, w, None, None, bias), RELU)
            candidates = reference.gate_screen(*quantized(x, w), bias)
            assert not ((gate != 0) & ~candidates).any(), (rows, dtype)


def test_gates_far_below_zero_are_no_candidates() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(128, 2048).to(BF16), torch.randn(512, 2048).to(BF16)
    bias = torch.full((512,), -110.0).to(BF16)
    gate, candidates = gate_on_cpu(Layer(x, w, None, None, bias), RELU), reference.gate_screen(*quantized(x, w), bias)
    # the error of the screen has a deviation of 0.4, and its bound is 11 such: the deviation of a gate is 45
    assert 0 < (gate != 0).sum() <= candidates.sum() < 1.4 * (gate != 0).sum()


def test_rows_that_are_not_screened() -> None:
    """Zero rows are decided by the bias alone; every gate of a row that is not finite, tiny or huge is a candidate."""
    torch.manual_seed(0)
    x, w = torch.randn(8, 64).to(BF16), (torch.randn(16, 64) * 1e-3).to(BF16)
    ordinary = quantized(x, torch.randn(16, 64).to(BF16))
    for size in (torch.inf, 3e38):
        candidates = reference.gate_screen(*ordinary, torch.tensor([size, -size] * 8, dtype=BF16))
        assert candidates[:, ::2].all()
        assert not candidates[:, 1::2].any()
    x[1], w[1] = 0, 0
    x[2, 5], x[3, 0], x[4, 1], x[5] = torch.nan, -torch.inf, 3e38, 1e-30
    w[2, 5], w[3, 0], w[4, 1], w[5] = torch.nan, torch.inf, -3e38, -1e-38
    special = [2, 3, 4, 5]
    plain = [i for i in range(16) if i not in special]
    biases = ((None, False), (-1e4, False), (0.0, False), (-0.0, False), (1e-40, True), (1.0, True), (torch.nan, True))
    for value, of_zero in biases:
        bias = None if value is None else torch.full((16,), value, dtype=BF16)
        candidates = reference.gate_screen(*quantized(x, w), bias)
        assert candidates[special].all()
        assert candidates[:, special].all()
        assert (candidates[1, plain] == of_zero).all()
        assert (candidates[[0, 1, 6, 7], 1] == of_zero).all()
        if value == -1e4:
            assert not candidates[6:8, 6:].any()


@pytest.mark.parametrize("k", SIZES)
def test_the_kernels_form_of_the_bound_is_larger_but_little(k: int) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(64, k).to(BF16), torch.randn(64, k).to(BF16)
    x[:32, 0] *= 100
    (_, sx, ux, ox), (_, sw, uw, _) = quantized(x, w)
    a, b, _ = reference.token_terms(sx, ux, ox, k)
    v, _ = reference.neuron_terms(sw, uw, None, k)
    reach = (a + ox.double() - screen.dither_product(k))[:, None] + b[:, None] * v
    ratio = reach / reference.screen_bound(ux, uw, k)
    assert ratio.min() > 1
    assert ratio.max() < 1.1
    assert ratio[32:].mean() < 1.02


def test_constants_cover_the_roundings_that_the_page_counts() -> None:
    """In exact arithmetic, with the counts of docs/notes/screen.md: of the rotation, the spread and the corrections."""
    e, half, k = Fraction(1, 2**24), Fraction(1, 2**8), 16384
    # sums of 16 and, of both halves, of 32 terms; the halves; three levels of fp32
    first, both = (1 + 2 * e) ** 16 - 1, 1 + 2 * half
    second = 4 * both * ((1 + 2 * e) ** 32 - 1)
    rotated = (1 + 4 * first) * (1 + half**2 + second) * (1 + e) ** 3 - 1
    # the reciprocal by two units, with its product and two roundings of the scale
    assert (1 + rotated) * (1 + 5 * e) - 1 < Fraction(screen.ROTATION)
    # the sum of squares has 47 roundings, of which the root has half; the root two units; the factor; three products
    spread = (1 - rotated) * (1 - 47 * e) * (1 - 10 * e) * (1 + Fraction(screen.SPREAD))
    assert spread > 1 + Fraction(screen.ROTATION)
    assert (1 + 2 * e) ** k - 1 < Fraction(screen.product_error(k))
    # an offset and the product of dithers stay below 2^20; underflow and 35 roundings of such numbers
    assert 127 * k / 2 + k / 4 < 2**20
    least = screen.SMALLEST / screen.LEVELS
    assert k * 2.0**-149 * screen.ROTATED / least**2 + 35 * 2**20 * float(e) < screen.SLACK


@pytest.mark.parametrize("weights", [False, True])
def test_the_error_of_one_value_is_at_most_half_a_step(weights: bool) -> None:
    torch.manual_seed(1)
    rows = outliers(64, 2048).to(BF16)
    q, scale, spread, _ = reference.quantize_gate(rows, weights)
    exact = reference.rotate(rows).double() / scale.double()[:, None]
    error = q - dithers(2048, screen.W_SHIFT if weights else screen.X_SHIFT) - exact
    assert (error.abs() < 0.5 + 2.0**-14).all()
    norm = exact.norm(dim=1)
    assert (spread > norm * (1 + screen.ROTATION)).all()
    assert (spread < norm * (1 + 1e-4) + 1e-3).all()


def halves(r: int, k: int) -> Tensor:
    """Rows whose scaled values are -126.5 and 126.5: the worst for a dither that stays in the product."""
    return one_value(r, k).sign()


def wholes(r: int, k: int) -> Tensor:
    """Rows of which half of the scaled values are 0: a dither that stays in the product leaves them alone."""
    rows = torch.zeros(r, k)
    rows[:, 0], rows[torch.arange(r), 1 + torch.randint(k - 1, (r,))] = 1, 1
    return rows


@pytest.mark.parametrize("rows", [gaussian, halves, wholes], ids=lambda f: f.__name__)
def test_the_error_is_unbiased_and_its_variance_does_not_depend_on_fractions(
    rows: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over seeds, by its deviation sqrt((|a|^2 + |c|^2) / 12 + K / 144), which knows nothing of the fractions."""
    torch.manual_seed(0)
    k, seeds, of_values, of_products, above = 64, 500, [], [], torch.zeros(4, 8)
    for seed in range(seeds):
        monkeypatch.setattr(screen, "KEY", (seed, 7))
        # the seed changes the signs of the rotation, too
        x, w = rows(4, k).to(BF16), gaussian(8, k).to(BF16)
        of_x, of_w = quantized(x, w)
        a, c = (reference.rotate(t).double() / q[1].double()[:, None] for t, q in ((x, of_x), (w, of_w)))
        of_values.append(of_x[0] - dithers(k, screen.X_SHIFT) - a)
        lost = a @ c.t() - centred_product(of_x, of_w)
        norms = a.square().sum(1)[:, None] + c.square().sum(1)
        of_products.append(lost / (norms / 12 + k / 144).sqrt())
        above += lost > reference.screen_bound(of_x[2], of_w[2], k, failure=3)
    value, product = torch.stack(of_values), torch.stack(of_products)
    # of 256 means of 500 values, and of 256 mean squares, whose deviation is sqrt(1/180)
    assert (value.mean(0).abs() < 4.5 * math.sqrt(1 / 12 / seeds)).all()
    assert ((value.square().mean(0) - 1 / 12).abs() < 4.5 * math.sqrt(1 / 180 / seeds)).all()
    assert (product.mean(0).abs() < 4.5 / math.sqrt(seeds)).all()
    assert ((product.square().mean(0) - 1).abs() < 4.5 * math.sqrt(2 / seeds)).all()
    # with a bound of probability 2^-3 per gate, fewer than that exceed it, and some do
    assert (above / seeds).max() < 2**-3
    assert above.sum() > 0


@pytest.mark.parametrize("k", [8, 24, *QUICK])
def test_no_value_needs_clamping(k: int) -> None:
    torch.manual_seed(k)
    special = (torch.zeros, lambda r, k: torch.full((r, k), torch.nan), lambda r, k: torch.randn(0, k))
    for rows, weights, dtype in itertools.product((*HOSTILE, *special), (False, True), (BF16, torch.float16)):
        matrix = rows(9, k).to(dtype)
        q, scale, spread, offset = reference.quantize_gate(matrix, weights)
        assert (q.int().abs() <= 127).all()
        # rows that are not screened have no values
        unscreened = ~(spread.isfinite() & (spread > 0))
        assert (scale[unscreened] == 1).all()
        assert not q[unscreened].any()
        assert not offset[unscreened].any()


def weight(bias: Tensor) -> Tensor:
    return bias.new_empty((len(bias), 8))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_the_bias_less_the_threshold_is_rounded_up(dtype: torch.dtype) -> None:
    """Every 16-bit bias beside some thresholds: what the screen takes is never below the exact difference."""
    every = torch.arange(1 << 16).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    info = torch.finfo(dtype)
    thresholds = [info.smallest_normal * info.eps, info.tiny, 1 / 3, 0.45, 1.0, 3.0, 1e3, 3e4, float(info.max)]
    for number, given in enumerate((*thresholds, torch.tensor(1 / 3), torch.tensor(3e4))):
        activation, some = Activation("fatrelu", given), every[number % 4 :: 4]
        level = float(activation.level(dtype))
        found = screened.firing_bias(weight(some), some, activation)
        assert found.dtype == dtype
        exact = [Fraction(b) - Fraction(level) for b in some.double().tolist()]
        for value, wanted in zip(found.double().tolist(), exact, strict=True):
            assert value >= wanted
        # and little above it
        near = exact[:: 1 << 8]
        for value, wanted in zip(found.double().tolist()[:: 1 << 8], near, strict=True):
            if info.min < value < info.max:
                assert value <= wanted + abs(wanted) * Fraction(2 * info.eps) + Fraction(info.tiny)
        none = screened.firing_bias(weight(every[:3]), None, activation)
        assert none.tolist() == screened.firing_bias(weight(every[:3]), every.new_zeros(3), activation).tolist()
    special = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)
    assert not (screened.firing_bias(weight(special), special, Activation("fatrelu", 1.0)) <= 0).any()
    assert screened.firing_bias(weight(every), every, RELU) is every
    assert screened.firing_bias(weight(every), None, RELU) is None


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_threshold_screens_as_well_as_a_bias(dtype: torch.dtype) -> None:
    """Few neurons far below it are candidates, and all that fire."""
    torch.manual_seed(0)
    m, k, n = 256, 512, 1024
    draw = [torch.randn(s) for s in ((m, k), (n, k), (n, k), (n, k), (n,), (n,), (k,))]
    for shift, biased in itertools.product((0.0, 3.0), (False, True)):
        threshold = shift * math.sqrt(k)
        p = testing.FFN(*(t.to(dtype) for t in draw))
        p = p if biased else p._replace(b_gate=None, b_up=None, b_down=None)
        fires = gate_on_cpu(Layer(*p), Activation("fatrelu", threshold)) != 0
        union = fires.view(-1, 128, n).any(1).sum(1)
        candidates = screened.count(p.x, p.w_gate, p.b_gate, Activation("fatrelu", threshold))
        shifted = draw[4] * biased - threshold
        of_bias = screened.count(p.x, p.w_gate, shifted.to(dtype))
        assert union.sum() <= candidates.sum() <= 1.05 * of_bias.sum()
        assert shift == 0 or 0 < union.sum() < candidates.sum() < n


def test_what_screens_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other dtypes, and the portable family."""
    p = testing.integer_problem(4, 72, 264)
    torch.library.opcheck(ops.hybrid_forward, (*p, 8, 0, "relu", 0.0, True))
    with pytest.raises(TypeError, match="x must be bfloat16 or float16"):
        ops.hybrid_forward(*(None if t is None else t.float() for t in p), 8, 0, screen=True)
    monkeypatch.setattr(device, "capability", lambda index: (8, 9))
    with pytest.raises(NotImplementedError) as refusal:
        sys.modules["twell.ops.ffn"].on_cuda(Layer(*p), 8, RELU, Route("union", screen=True), False)
    said = "torch.ops.twell.ffn with screen=True needs compute capability 9.0, got 8.9 on cuda:0"
    assert str(refusal.value) == said
    # tests there are skipped by it
    assert families.is_absent(refusal.value)
