"""What "row" and "union" both promise: exact bits, any pattern, NaN, layouts, real numbers, PyTorch's rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from tests.gpu.operands import gates_with, padded
from tests.gpu.strategies import (
    BF16,
    BIASES,
    BOTH,
    BUSY,
    CUDA,
    DTYPES,
    FP16,
    NON_FINITE,
    VARIANTS,
    assert_follows_cpu,
    assert_nothing_waits,
    assert_repeats,
    assert_right,
    behind,
    check,
    exact,
    label,
    output,
    pack,
    read,
    right,
    run,
    written,
)
from twell import ops, testing, tuning
from twell.functional import Strategy
from twell.testing import FFN

NAMES: list[Strategy] = ["row", "union"]
BY_NAME = pytest.mark.parametrize("strategy", NAMES)


@pytest.fixture(params=[*NAMES, "row of many"])
def strategy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Strategy:
    """Each strategy, and "row" by the kernel of the most tokens whatever their number."""
    if request.param != "row of many":
        name: Strategy = request.param
        return name
    by_size = tuning.up_down_token
    monkeypatch.setattr(tuning, "up_down_token", lambda dtype, m, *rest: by_size(dtype, max(m, 1 << 20), *rest))
    return "row"


# Exact: small integers, whose every sum fp32 holds

# Around every number that chooses kernels, and around the tiles of each.
TOKENS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1024, 1025)
SOME = pytest.mark.parametrize("m", [1, 8, 17, 64, 130, 257, 600])
# One dimension at a time from its list of edges, then corners where several meet.
SHAPES = [
    *((m, 72, 264) for m in (0, *TOKENS)),
    *((m, 2048, 5632) for m in (1, 8, 9, 33, 65, 129, 257, 600)),
    *((m, k, 264) for m in (1, 33, 129, 520) for k in (8, 64, 896, 1024, 1032, 2048, 2056, 4096, 8192)),
    *((m, 72, n) for m in (1, 9, 64, 129) for n in (8, 16, 136, 248, 256, 520, 2816, 5632, 8192)),
    *((7, k, 520) for k in (16, 136, 256, 264, 1544, 3072, 5120)),
    *((1, 8192, 8192), (2, 8, 8), (63, 4096, 5632), (127, 8, 8), (128, 8, 5632), (257, 4096, 520), (1000, 264, 1536)),
]


@pytest.mark.parametrize(
    ("shape", "dtype", "compression", "biases"),
    [
        # two variants at each shape, one with biases
        (shape, *VARIANTS[(i + j) % 6], ("", BIASES)[(i + j) % 2])
        for i, shape in enumerate(SHAPES)
        for j in range(2)
    ],
    ids=label,
)
def test_shapes(
    shape: tuple[int, int, int], dtype: torch.dtype, compression: int, biases: str, strategy: Strategy
) -> None:
    m, k, n = shape
    problem = testing.integer_problem(m, k, n, density=0.1, biases=biases, device=CUDA, dtype=dtype)
    check(problem, strategy, compression)


@pytest.mark.parametrize("m", [1, 129])
def test_the_longest_rows(m: int, strategy: Strategy) -> None:
    if strategy == "row":
        pytest.importorskip("cutlass", reason="its kernel does not ship")
    check(testing.integer_problem(m, 16384, 264, density=0.1, biases=BIASES, device=CUDA), strategy)


@SOME
@pytest.mark.parametrize("density", [0, 0.01, 0.3, 1])
def test_densities(density: float, m: int, strategy: Strategy) -> None:
    """No positive gate, few, many, all; the last tiles are partial."""
    dtype, compression = VARIANTS[(m + int(10 * density)) % 6]
    problem = testing.integer_problem(m, 896, 2056, density=density, device=CUDA, dtype=dtype)
    share = float((testing.float64_gate(problem) > 0).double().mean())
    # of one token it is chance
    assert share == density if density in (0, 1) else m < 100 or 0.2 * density < share < 2 * density
    check(problem, strategy, compression)


@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 8, 8), (2, 264, 5632), (66, 2048, 5632), (257, 72, 8192), (130, 4096, 264)]
)
@pytest.mark.parametrize("biases", ["", BIASES])
def test_every_token_fires_every_neuron(m: int, k: int, n: int, biases: str, strategy: Strategy) -> None:
    """As much arithmetic as dense, and as exact."""
    problem = testing.integer_problem(m, k, n, density=1, biases=biases, device=CUDA)
    assert bool((testing.float64_gate(problem) > 0).all())
    for compression in (2, 8):
        check(problem, strategy, compression)


@SOME
@pytest.mark.parametrize("biases", ["gate", "up", "down", "up down"])
def test_each_bias(biases: str, m: int, strategy: Strategy) -> None:
    """Gates of rows and neurons past the end of a tile would be positive; without non-zeros y is the down bias."""
    for density, dtype in ((0, BF16), (0.1, FP16), (1, BF16), (1, FP16)):
        problem = testing.integer_problem(m, 200, 264, density=density, biases=biases, device=CUDA, dtype=dtype)
        check(problem, strategy)


@pytest.mark.parametrize("m", [1, 16, 130])
@pytest.mark.parametrize("compression", [2, 8])
def test_most_neurons(m: int, compression: int, strategy: Strategy) -> None:
    """N = 65,536: words of the last neuron are negative, and unions have more than 32,767 neurons."""
    check(testing.integer_problem(m, 64, 65536, density=0.06, device=CUDA), strategy, compression)
    last = torch.zeros(m, 65536, dtype=torch.int64)
    last[0, 0], last[m // 2, 65528:], last[-1, 65535] = 6, 7, 5
    check(testing.pattern_problem(last, 136, device=CUDA), strategy, compression)


@DTYPES
@pytest.mark.parametrize("m", [1, 16, 65, 300])
def test_cpu_operators_agree(m: int, dtype: torch.dtype, strategy: Strategy) -> None:
    """From the same gate, packed by the CPU."""
    for density in (0.15, 1):
        problem = testing.integer_problem(m, 264, 776, density=density, biases=BIASES, dtype=dtype)
        on_gpu = problem.to(CUDA)
        for compression in (2, 4, 8):
            packed = ops.gate_pack(problem.x, problem.w_gate, problem.b_gate, compression)
            moved = tuple(t.cuda() for t in packed)
            for gated in (True, False):
                found = read(on_gpu, moved, strategy, gated, compression)
                for ours, theirs in zip(found, read(problem, packed, strategy, gated, compression), strict=True):
                    if ours is not None:
                        # a tile has several sums of |h|
                        sums = [t.sum(1) if t.dtype == torch.float32 and t.dim() > 1 else t for t in (ours, theirs)]
                        testing.assert_same(*sums, f"gated={gated}")


@SOME
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "shifts"), [(FP16, (-14, 14)), (FP16, (-24, 14)), (BF16, (60, -60)), (BF16, (-60, 60))]
)
def test_the_range_of_the_hidden_state(
    m: int, dtype: torch.dtype, shifts: tuple[int, int], mixed: bool, strategy: Strategy
) -> None:
    """Up and down weights times powers of two that cancel: "row" keeps h in fp32, "union" rounds it as dense does.

    ``mixed``: in every second neuron alone, so that large and small ones meet in one sum.
    """
    problem = testing.integer_problem(m, 264, 776, density=0.1, device=CUDA, dtype=dtype)
    up, down = (torch.full((776, 1), 2.0**shift, dtype=dtype, device=CUDA) for shift in shifts)
    if mixed:
        up[::2] = down[::2] = 1
    scaled = problem._replace(w_up=problem.w_up * up, w_down=problem.w_down * down)
    testing.assert_same(run(scaled, strategy).y, exact(scaled, strategy))


# Where non-zeros fall


@pytest.mark.parametrize("m", TOKENS[:-5])
@pytest.mark.parametrize("compression", [2, 4, 8])
def test_tiles_around_the_capacity(m: int, compression: int, strategy: Strategy) -> None:
    """Tiles one short of full, full, one over, with 255 and 256 side by side; 8 in the last."""
    width = 256 // compression
    choices = torch.tensor([0, 1, width - 2, width - 1, width, width + 1, 255, 256])
    rows = torch.arange(m)[:, None]
    counts = choices[(rows * 3 + torch.arange(10) * 5 + rows // 8) % 8]
    counts[:, 9] = 8
    gates = gates_with(counts, 9 * 256 + 8)
    problem = testing.pattern_problem(gates, 264, biases="gate down", device=CUDA, dtype=(BF16, FP16)[m % 2])
    assert torch.equal((testing.float64_gate(problem) > 0).sum(1).cpu(), counts.sum(1))
    check(problem, strategy, compression)


@pytest.mark.parametrize(
    ("m", "k"), [(1, 264), (8, 2048), (9, 8192), (33, 264), (64, 4096), (128, 264), (257, 896), (264, 2048)]
)
@pytest.mark.parametrize("nonzeros", [500, 5632])
def test_one_heavy_token_among_empty_ones(m: int, k: int, nonzeros: int, strategy: Strategy) -> None:
    """First, last and in between, with hundreds of neurons or all of them."""
    for row in {0, m // 2, m - 1}:
        counts = torch.zeros(m, 22, dtype=torch.int64)
        counts[row] = torch.tensor([math.ceil((nonzeros - t) / 22) for t in range(22)])
        assert int(counts.sum()) == nonzeros
        check(testing.pattern_problem(gates_with(counts, 5632), k, device=CUDA), strategy)


@pytest.mark.parametrize("m", [1, 8, 65])
@pytest.mark.parametrize("compression", [2, 8])
def test_two_full_tiles_in_a_light_token(m: int, compression: int, strategy: Strategy) -> None:
    """One token's non-zeros fill two tiles, the first and the partial last; others have one in each."""
    counts = torch.zeros(m, 23, dtype=torch.int64)
    counts[torch.arange(m), torch.arange(m) % 22] = 1
    counts[m // 2] = 0
    counts[m // 2, 0], counts[m // 2, 22] = 256, 136
    check(testing.pattern_problem(gates_with(counts, 22 * 256 + 136), 896, device=CUDA), strategy, compression)


@pytest.mark.parametrize("nonzeros_per_tile", [23, 60, 227])
def test_all_tokens_heavy(nonzeros_per_tile: int, strategy: Strategy) -> None:
    """500, 1,300 and 5,000 non-zeros in every row."""
    counts = torch.full((259, 22), nonzeros_per_tile)
    check(testing.pattern_problem(gates_with(counts, 5632), 264, device=CUDA), strategy)


@pytest.mark.parametrize("k", [264, 4096, 8192])
def test_heavy_tokens_in_every_group(k: int, strategy: Strategy) -> None:
    """Three in each of 1,605 groups of eight, more groups than all clusters together."""
    counts = torch.ones(40, 22, dtype=torch.int64)
    for row in (0, 3, 7):
        counts[row::8] = 28
    few = testing.pattern_problem(gates_with(counts, 5632), k, biases="up down", device=CUDA)
    many = few._replace(x=few.x.repeat(321, 1))
    for gated in (True, False):
        (y,) = testing.poisoned(lambda gated=gated: (output(many, strategy, gated),))
        testing.assert_same(y, exact(few, strategy, gated).repeat(321, 1), f"gated {gated}")


@pytest.mark.parametrize("m", [5, 16, 40, 130, 257])
def test_heavy_and_light_tokens_side_by_side(m: int, strategy: Strategy) -> None:
    """Every load from no to all neurons."""
    generator = torch.Generator().manual_seed(m)
    loads = torch.randperm(m, generator=generator)[:, None] * 256 / max(m - 1, 1)
    counts = (loads * torch.rand(m, 22, generator=generator)).long()
    problem = testing.pattern_problem(gates_with(counts, 5632), 896, biases="up down", device=CUDA)
    check(problem, strategy, 4)


@pytest.mark.parametrize("m", [1, 17, 130, 257])
def test_one_neuron(m: int, strategy: Strategy) -> None:
    """A single non-zero in the whole batch, at any place."""
    for token in {0, m // 2, m - 1}:
        for neuron in (0, 255, 256, 5631):
            gates = torch.zeros(m, 5632, dtype=torch.int64)
            gates[token, neuron] = 3
            check(testing.pattern_problem(gates, 264, device=CUDA), strategy)


@BOTH
def test_many_tokens(gated: bool, strategy: Strategy) -> None:
    """70,000 tokens: more than 65,536, and more tiles than CTAs."""
    problem = testing.integer_problem(70_000, 72, 264, density=0.08, biases=BIASES, device=CUDA)
    assert_right(run(problem, strategy, gated), right(problem, strategy, gated))


@BOTH
def test_strategies_agree(gated: bool) -> None:
    """If h is exact in 16 bits, every strategy has the same answer and figures, with any number of tokens."""
    for m in (1, 8, 33, 128, 256):
        problem = testing.pattern_problem(gates_with(torch.full((m, 4), 20), 1000), 264, device=CUDA)
        expected = testing.exact_output(problem, gated=gated)
        testing.assert_same(exact(problem, "union", gated), expected)
        figures = []
        for name in NAMES:
            y, aux = testing.sparse_layer(problem, gated=gated, strategy=name)
            testing.assert_same(y, expected, name)
            figures.append((float(aux.l1), float(aux.l0)))
        assert figures[0] == pytest.approx(figures[1], rel=1e-6)
        assert figures[1][1] == 80


# NaN and infinity


@pytest.mark.parametrize("m", [1, 2, 9, 33, 70, 150, 300])
@NON_FINITE
@DTYPES
def test_non_finite_token(m: int, value: float, dtype: torch.dtype, strategy: Strategy) -> None:
    """One token has a non-finite feature: only its row shows it, and no neuron past the last tile appears."""
    problem = testing.integer_problem(m, 200, 264, density=0.1, device=CUDA, dtype=dtype)
    clean, row = exact(problem, strategy), m * 2 // 3
    problem.x[row, 5] = value
    assert_follows_cpu(problem, strategy, row)
    y = output(problem, strategy)
    assert bool(y[row].isnan().any())
    testing.assert_same(torch.cat([y[:row], y[row + 1 :]]), torch.cat([clean[:row], clean[row + 1 :]]))


def test_nan_spreads_as_in_dense(strategy: Strategy) -> None:
    """A NaN token makes every gate NaN, so its whole output row is NaN, gated or not; its tile needs all neurons."""
    problem = testing.integer_problem(140, 72, 520, device=CUDA)
    problem.x[3] = math.nan
    for gated in (True, False):
        y, _, union = run(problem, strategy, gated)
        assert bool(y[3].isnan().all())
        assert torch.equal(y.isnan(), testing.dense_output(problem, gated=gated).isnan())
        assert union is None or int(union[0]) == 520


@pytest.mark.parametrize("m", [1, 8, 65, 300])
@NON_FINITE
def test_non_finite_neuron_or_bias(m: int, value: float, strategy: Strategy) -> None:
    """In the partial last tile: rows past M, zero times the weight, do not count."""
    problem = testing.integer_problem(m, 72, 264, density=0.1, device=CUDA)
    problem.w_gate[263, 4] = value
    assert_follows_cpu(problem, strategy)
    for name in ("b_gate", "b_up", "b_down"):
        problem = testing.integer_problem(m, 72, 264, density=0.1, biases=BIASES, device=CUDA)
        getattr(problem, name)[3] = value
        assert_follows_cpu(problem, strategy)


@SOME
def test_weights_of_silent_neurons_are_not_read(m: int, strategy: Strategy) -> None:
    """NaN in the up and down rows of neurons that no token fires, first, last and in between, does no harm."""
    problem = testing.integer_problem(m, 72, 264, density=0.1, device=CUDA)
    silent = [0, 100, 101, 263]
    problem.w_gate[silent] = 0
    expected = {gated: right(problem, strategy, gated) for gated in (True, False)}
    problem.w_up[silent] = problem.w_down[silent] = math.nan
    for gated in (True, False):
        assert_right(run(problem, strategy, gated), expected[gated])


@pytest.mark.parametrize("weight", ["w_up", "w_down"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("m", [17, 300])
def test_non_finite_weight_reaches_only_tokens_that_fire_it(
    m: int, weight: str, value: float, strategy: Strategy
) -> None:
    """A neuron with a non-finite row fires in every third token of a tile: which other tokens keep their bits.

    All of them, except that "union" adds 0 times a down row to the tokens of its tile.
    """
    first = 128 if m > 256 else 0
    gates = gates_with(torch.full((m, 3), 9), 768)
    token = torch.arange(m)
    tile = (token >= first) & (token < first + 128)
    firing = (token % 3 == 0) & tile
    spared = ~tile if (strategy, weight) == ("union", "w_down") else ~firing
    gates[:, 300] = torch.where(firing, 2, 0)
    problem = testing.pattern_problem(gates, 304, device=CUDA)
    clean = {gated: exact(problem, strategy, gated) for gated in (True, False)}
    getattr(problem, weight)[300] = value
    for gated in (True, False):
        y = run(problem, strategy, gated).y
        testing.assert_same(y[spared], clean[gated][spared], f"gated={gated}")
        if gated or weight == "w_down":
            assert not bool(y[firing].isfinite().any())


# Layouts


def layer(m: int = 130, density: float = 0.1, seed: int = 0) -> FFN:
    return testing.integer_problem(m, 264, 776, density=density, biases=BIASES, seed=seed, device=CUDA)


@SOME
@pytest.mark.parametrize(("before", "after"), [(8, 16), (0, 8), (3, 5), (1, 0)])
def test_strided_operands(m: int, before: int, after: int, strategy: Strategy) -> None:
    """Row strides that kernels read in place, and base addresses and strides that they cannot."""
    problem = layer(m)
    check(FFN(*(padded(t, before, after) for t in problem[:4]), *problem[4:]), strategy)


@SOME
def test_other_layouts(m: int, strategy: Strategy) -> None:
    """Column-major operands, every second row, one row for all tokens, a bias from the middle of a buffer."""
    problem = layer(m)
    check(problem._replace(**{name: getattr(problem, name).t().contiguous().t() for name in FFN._fields[:4]}), strategy)
    check(problem._replace(x=problem.x.repeat_interleave(2, 0)[::2]), strategy)
    check(problem._replace(x=problem.x[:1].expand(m, -1)), strategy)

    def off_by_one(bias: Tensor) -> Tensor:
        return torch.cat([bias.new_full((1,), math.nan), bias])[1:]

    check(problem._replace(**{name: off_by_one(getattr(problem, name)) for name in FFN._fields[4:]}), strategy)


@BY_NAME
@pytest.mark.parametrize("shape", [(), (1, 1), (130,), (2, 65), (5, 1, 13, 2), (3, 0, 2), (0,)])
def test_leading_dimensions(shape: tuple[int, ...], strategy: Strategy) -> None:
    problem, tokens = layer(), math.prod(shape)
    x = problem.x[:tokens].view(*shape, 264)
    for gated in (True, False):
        y = output(problem._replace(x=x), strategy, gated)
        assert y.shape == x.shape
        testing.assert_same(y.view(-1, 264), exact(problem.rows(0, tokens), strategy, gated))
    packed = twell.pack(x, problem.w_gate, problem.b_gate, compression=4)
    assert (packed.shape, packed.dtype) == ((*shape, 776), x.dtype)
    gate = testing.float64_gate(problem.rows(0, tokens))
    testing.assert_same(packed.unpack().view(-1, 776), gate.to(x.dtype))
    assert int(packed.nnz()) == int((gate > 0).sum())


# Real numbers: as close to float64 as dense PyTorch is, and the same bits on every run


def assert_within_budget(problem: FFN, strategy: Strategy, compression: int = 8, at_once: int = 1 << 20) -> None:
    """Errors of all tokens, computed ``at_once`` at a time: a single token's errors are chance."""
    m = len(problem.x)
    for gated in (True, False):
        parts = [problem.rows(first, min(m, first + at_once)) for first in range(0, m, at_once)]
        y = torch.cat([output(part, strategy, gated, compression) for part in parts])
        comparison = testing.compare(problem, y, gated=gated)
        assert comparison.ok, f"gated={gated}, compression {compression}: {comparison}"


@BY_NAME
@DTYPES
def test_error_budget(workload: str, dtype: torch.dtype, strategy: Strategy, real_layers: Path | None) -> None:
    """Every workload, with 2,048 of its tokens, at every compression: within dense's errors, each row too."""
    problem = testing.load(workload, m=2048, dtype=dtype, real_layers=real_layers)
    for compression in (2, 4, 8):
        assert_within_budget(problem, strategy, compression)


@pytest.mark.parametrize("m", [1, 2, 8, 16, 33, 64, 128, 256])
@pytest.mark.parametrize("name", list(testing.WORKLOADS))
def test_error_budget_of_few_tokens(name: str, m: int) -> None:
    problem = testing.make(name, 512, dtype=(BF16, FP16)[m in (2, 33)])
    assert_within_budget(problem, "row", (2, 4, 8)[m % 3], m)


@BY_NAME
@pytest.mark.parametrize(
    ("name", "m", "k", "n"),
    [
        ("topic29", 16384, 2048, 5632),
        ("dense911", 4096, 2048, 5632),
        *(("topic128", 1024, *size) for size in ((896, 4864), (1024, 2816), (4096, 11008), (8192, 2048))),
    ],
)
def test_error_budget_of_other_sizes(name: str, m: int, k: int, n: int, strategy: Strategy) -> None:
    problem = testing.make(name, m, k, n)
    assert_within_budget(problem, strategy)
    if strategy == "row" and m == 1024:
        for at_once in (1, 16, 130):
            assert_within_budget(problem.rows(0, 260), strategy, at_once=at_once)


@BY_NAME
def test_error_budget_with_biases(strategy: Strategy) -> None:
    problem = testing.make("skew29", 2048)
    generator = torch.Generator(CUDA).manual_seed(5)
    gate, up, down = (0.5 * torch.randn(s, generator=generator, device=CUDA).to(BF16) for s in (5632, 5632, 2048))
    assert_within_budget(problem._replace(b_gate=gate, b_up=up, b_down=down), strategy)


@pytest.mark.parametrize("name", ["uniform29", "topic128", "dense911"])
def test_figures_of_real_numbers(name: str) -> None:
    """Counts of the gate, sums of |h| and unions, which decide what a call costs."""
    for m, compression in ((1, 8), (8, 2), (70, 8), (2000, 2), (2000, 8)):
        problem = testing.make(name, m)
        words, spill, stats = packed = ops.gate_pack(problem.x, problem.w_gate, None, compression)
        gate, answer = ops.unpack(words, spill, 5632, compression), testing.float64_gate(problem)
        if name == "topic128":
            dense = testing.errors(F.relu(F.linear(problem.x, problem.w_gate)), answer)
            assert testing.errors(gate, answer).within(dense)
        counts = F.pad((gate != 0).view(m, 22, 256).sum(2), (0, 0, 0, -m % 8)).view(-1, 8, 22)
        assert torch.equal(stats[:, :, 0].long(), counts.sum(1))
        assert torch.equal(stats[:, :, 1].long(), (counts > 256 // compression - 1).sum(1))
        total = float((answer * F.linear(problem.x.double(), problem.w_up.double())).abs().sum())
        by_row, by_union = (read(problem, packed, strategy, compression=compression) for strategy in NAMES)
        for outputs in (by_row, by_union):
            # fewer tokens have fewer roundings that cancel
            assert float(outputs.l1.double().sum()) == pytest.approx(total, rel=1e-4 if m == 2000 else 1e-2)
        assert by_union.union is not None
        active = F.pad(gate != 0, (0, 0, 0, -m % 128)).view(-1, 128, 5632).any(1)
        assert torch.equal(by_union.union.long(), active.sum(1))


@BUSY
@BY_NAME
@pytest.mark.parametrize(
    ("name", "m", "runs"),
    [
        *(("topic128", 1, 200), ("skew29", 7, 200), ("topic29", 64, 200), ("dense911", 33, 200), ("skew29", 256, 200)),
        *(("topic128", 2048, 1000), ("skew29", 1000, 1000), ("dense911", 300, 200)),
    ],
)
def test_many_runs_give_the_same_bits(name: str, m: int, runs: int, busy: bool, strategy: Strategy) -> None:
    problem = testing.make(name, m)

    def each() -> tuple[Tensor, ...]:
        words, spill, stats = packed = ops.gate_pack(problem.x, problem.w_gate, None, 8)
        found = [t for gated in (True, False) for t in written(problem, packed, strategy, gated) if t is not None]
        return (words, stats, *found, ops.unpack(words, spill, len(problem.w_gate), 8))

    assert_repeats(each, runs, busy)


@pytest.mark.parametrize(
    ("name", "m", "own"),
    [
        *(("row", 8, 1), ("row", 256, 1), ("row", 520, 8)),
        *(("union", 384, 16), ("union", 1024, 16), ("union", 1152, 128), ("training", 384, 128)),
    ],
)
def test_bits_of_a_token_depend_on_its_own_group_alone(name: str, m: int, own: int) -> None:
    """Other tokens in the call do not change the first group's bits; nor does their number, beyond few tokens."""
    problem = testing.make("topic29", 2048)
    dy = testing.real_upstream(problem)

    def first(order: Tensor) -> Tensor:
        part = problem._replace(x=problem.x[order])
        if name == "training":
            return testing.sparse_gradients(part, dy[order], strategy="union")["x"][:own]
        return testing.sparse_output(part, strategy=name)[:own]  # type: ignore[arg-type]

    order = torch.arange(m, device=CUDA)
    expected = first(order)
    testing.assert_same(first(torch.cat([order[:own], order[own:].flip(0)])), expected)
    if m > (tuning.UNION_TILE_TOKENS if name == "union" else 512):
        testing.assert_same(first(torch.arange(2048, device=CUDA)), expected)


# PyTorch's rules


def both(problem: FFN, strategy: Strategy) -> tuple[Tensor, ...]:
    """y gated and not, and the unpacked gate."""
    gate = twell.pack(problem.x, problem.w_gate, problem.b_gate).unpack()
    return (*(output(problem, strategy, gated) for gated in (True, False)), gate)


def assert_both(outputs: tuple[Tensor, ...], problem: FFN, strategy: Strategy) -> None:
    expected = (*(exact(problem, strategy, gated) for gated in (True, False)), testing.float64_gate(problem).to(BF16))
    for name, found, answer in zip(("gated", "plain", "gate"), outputs, expected, strict=True):
        testing.assert_same(found, answer, name)


@pytest.mark.parametrize("m", [1, 16, 70])
@pytest.mark.parametrize("biases", ["", BIASES], ids=["no-bias", "bias"])
def test_opcheck(m: int, biases: str) -> None:
    """Every gate is positive and the tiles are whole, so that all of the spill is defined."""
    full = testing.integer_problem(m, 72, 512, density=1, biases=biases, device=CUDA)
    packed = pack(full)
    for compression in (2, 4, 8):
        torch.library.opcheck(ops.gate_pack, (full.x, full.w_gate, full.b_gate, compression))
    torch.library.opcheck(ops.unpack, (*packed[:2], 512, 8))
    for gated in (True, False):
        torch.library.opcheck(ops.up_down, behind(full, packed, gated))
        none = full.rows(0, 0)
        torch.library.opcheck(ops.up_down, behind(none, pack(none), gated))


@BY_NAME
@SOME
def test_cuda_graph_follows_its_inputs(m: int, strategy: Strategy) -> None:
    """One graph, captured with sparse data, is replayed with no non-zeros, all positive gates and sparse data again."""
    static = layer(m)
    graph, outputs = testing.captured(lambda: both(static, strategy))
    for density, seed in ((0.1, 0), (0, 1), (1, 2), (0.02, 3), (0.1, 0)):
        new = layer(m, density, seed)
        for old, tensor in zip(static, new, strict=True):
            assert old is not None
            assert tensor is not None
            old.copy_(tensor)
        for found in outputs:
            found.fill_(math.nan)
        graph.replay()
        assert_both(outputs, new, strategy)


@BY_NAME
@pytest.mark.parametrize(
    ("name", "m"), [("topic128", 1), ("dense911", 8), ("skew29", 64), ("topic128", 256), ("topic128", 2048)]
)
def test_cuda_graph_of_several_layers_replays_the_same_bits(name: str, m: int, strategy: Strategy) -> None:
    """Consecutive layers, as in a step of decoding: each waits for the one before."""
    problem = testing.make(name, m)

    def step() -> Tensor:
        x = problem.x
        for _ in range(4):
            y = output(problem._replace(x=x), strategy)
            # the first two features are the neurons' and the tokens' biases: they stay
            x = torch.cat([problem.x[:, :2], (problem.x + y)[:, 2:]], 1)
        return x

    expected = step()
    graph, x = testing.captured(step)
    for _ in range(100):
        x.fill_(math.nan)
        graph.replay()
        assert torch.equal(x, expected)


@BY_NAME
@pytest.mark.parametrize("m", [1, 16, 130])
def test_side_stream(m: int, strategy: Strategy) -> None:
    """All launches are on the current stream: they wait for its earlier writes, and the host does not wait."""
    problem = layer(m)
    late = problem._replace(x=torch.full_like(problem.x, math.nan))
    both(late, strategy)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # for 0.1 s a launch on another stream would read NaN
        late.x.copy_(problem.x)
        outputs = both(late, strategy)
    assert not stream.query()
    stream.synchronize()
    assert_both(outputs, problem, strategy)


@BY_NAME
@pytest.mark.parametrize("m", [1, 16, 128, 4096])
def test_two_streams_at_once(m: int, strategy: Strategy) -> None:
    """Calls that overlap share no scratch memory."""
    problems = [testing.make(name, m, seed=i) for i, name in enumerate(("topic128", "skew29"))]
    expected = [both(problem, strategy) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for stream, problem in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                results.append(both(problem, strategy))
        torch.cuda.synchronize()
        for outputs, answers in zip(results, expected, strict=True):
            assert all(torch.equal(y, answer) for y, answer in zip(outputs, answers, strict=True))


@BY_NAME
@pytest.mark.parametrize("m", [1, 16, 257])
def test_nothing_waits_for_the_gpu(m: int, strategy: Strategy) -> None:
    problem = layer(m)
    bare = problem._replace(b_gate=None, b_up=None, b_down=None)

    def calls() -> None:
        for gated in (True, False):
            output(bare, strategy, gated)
            testing.sparse_layer(problem, gated=gated, strategy=strategy)
        packed = twell.pack(problem.x, problem.w_gate, problem.b_gate)
        packed.unpack()
        packed.nnz()

    assert_nothing_waits(calls)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@BY_NAME
def test_two_devices(strategy: Strategy) -> None:
    """The tensors' device counts, not the current one, in both orders; the current one is left alone."""
    problem = layer()
    expected = exact(problem, strategy)
    for current in (0, 1):
        with torch.cuda.device(current):
            for device in ("cuda:1", "cuda:0"):
                y = output(problem.to(device), strategy)
                assert y.device == torch.device(device)
                testing.assert_same(y, expected.to(device))
                assert torch.cuda.current_device() == current
    with pytest.raises(ValueError, match="cuda:1"):
        output(problem._replace(w_up=problem.w_up.to("cuda:1")), strategy)


@pytest.fixture
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@BY_NAME
@BOTH
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_function(gated: bool, backend: str, strategy: Strategy) -> None:
    """fullgraph, with neighbours to fuse; the number of tokens changes in one compiled function."""
    problem = layer(300)

    def block(x: Tensor) -> Tensor:
        return output(problem._replace(x=x * 2 - x), strategy, gated) + 1

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    with torch.no_grad():
        for m in (8, 1, 33, 256, 300):
            y = compiled(problem.x[:m])
            testing.assert_same(y, exact(problem.rows(0, m), strategy, gated) + 1, f"{m} tokens")


def test_gradients_are_refused_by_operators() -> None:
    problem = layer()
    arguments = behind(problem, pack(problem))
    calls: list[Callable[[], object]] = [
        lambda: ops.gate_pack(problem.x.clone().requires_grad_(), problem.w_gate, None, 8),
        lambda: ops.up_down(arguments[0].clone().requires_grad_(), *arguments[1:]),
        lambda: ops.up_down(*arguments[:4], arguments[4].clone().requires_grad_(), *arguments[5:]),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match=r"twell\.sparse"):
            call()
        with torch.no_grad():
            call()


@BY_NAME
@BOTH
@pytest.mark.parametrize("m", [1, 8, 33, 130, 256])
def test_a_call_that_needs_gradients_trains(m: int, gated: bool, strategy: Strategy) -> None:
    """As by any sparse strategy, from the same packed gate."""
    problem = testing.integer_problem(m, 264, 776, density=0.05, biases=BIASES, device=CUDA)
    dy = testing.integer_upstream(problem)
    expected = testing.exact_gradients(problem, dy, gated=gated)
    for name, gradient in testing.sparse_gradients(problem, dy, gated=gated, strategy=strategy).items():
        testing.assert_same(gradient, expected[name].float().to(BF16), name)


@BY_NAME
@BOTH
def test_aux(gated: bool, strategy: Strategy) -> None:
    """l1 and l0 against float64; 0 without tokens."""
    problem = layer()
    expected = right(problem, strategy, gated)
    y, aux = testing.sparse_layer(problem, gated=gated, strategy=strategy)
    testing.assert_same(y, expected.y)
    assert float(aux.l1) == pytest.approx(float(expected.l1.sum()) / 130, rel=1e-6)
    assert float(aux.l0) == pytest.approx(float((testing.float64_gate(problem) > 0).sum()) / 130, rel=1e-6)
    _, aux = testing.sparse_layer(problem.rows(0, 0), gated=gated, strategy=strategy)
    assert [float(aux.l1), float(aux.l0)] == [0, 0]
