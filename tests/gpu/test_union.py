"""``up_down_union`` and strategy "union": exact bits, any pattern, slices, real numbers, PyTorch's rules."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from tests.gpu.operands import gates_with, padded
from twell import ops, testing
from twell._runtime import device, geometry
from twell.testing import FFN

CUDA = torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16
BIASES = "gate up down"
BOTH = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16])
VARIANTS = [(BF16, 8), (FP16, 4), (BF16, 2), (FP16, 8), (BF16, 4), (FP16, 2)]


class Outputs(NamedTuple):
    """Outputs of the operator; l1 of the right answer is float64 [B]."""

    y: Tensor
    l1: Tensor
    union: Tensor


def right(problem: FFN, gated: bool) -> Outputs:
    """The only right answer: float64, except that the hidden state is rounded to the storage type before y."""
    wide, dtype, m = problem.map(Tensor.double), problem.x.dtype, problem.x.shape[0]
    gate = testing.float64_gate(problem)
    hidden = gate * F.linear(wide.x, wide.w_up, wide.b_up) if gated else gate
    y = F.linear(hidden.to(dtype).double(), wide.w_down.t(), wide.b_down).float().to(dtype)

    def by_tile(matrix: Tensor) -> Tensor:
        tiles = geometry.token_tiles(m)
        return F.pad(matrix, (0, 0, 0, -m % geometry.TOKEN_TILE)).view(tiles, geometry.TOKEN_TILE, gate.shape[1])

    return Outputs(y, by_tile(hidden).abs().sum((1, 2)), by_tile(gate != 0).any(1).sum(1, dtype=torch.int32))


def union_operands(problem: FFN, gated: bool, compression: int = 8) -> tuple[Any, ...]:
    """The arguments of the operator, the gate packed on the problem's device."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = problem
    words, spill, _ = ops.gate_pack(x, w_gate, b_gate, compression)
    return (x, words, spill, w_up if gated else None, w_down, b_up if gated else None, b_down, compression)


def run(problem: FFN, gated: bool, compression: int = 8) -> Outputs:
    arguments = union_operands(problem, gated, compression)
    return Outputs(*testing.poisoned(lambda: ops.up_down_union(*arguments)))


def assert_right(outputs: Outputs, expected: Outputs) -> None:
    """Compare y and union to the bit; sums of |h| too, if fp32 holds them."""
    testing.assert_same(outputs.y, expected.y, "y")
    testing.assert_same(outputs.union, expected.union, "union")
    sums = outputs.l1.sum(1, dtype=torch.float64)
    exact = expected.l1 < testing.EXACT_LIMIT
    testing.assert_same(sums.where(exact, 0), expected.l1.where(exact, 0), "l1")
    torch.testing.assert_close(sums, expected.l1, rtol=1e-6, atol=0)


def check(problem: FFN, compression: int = 8) -> None:
    for gated in (True, False):
        expected = right(problem, gated)
        assert_right(run(problem, gated, compression), expected)
        # a layer that is not measured has another kernel for few tokens
        y, l1, _ = testing.poisoned(lambda gated=gated: whole_layer(problem, gated, compression))
        testing.assert_same(y, expected.y, "y of the layer")
        total = expected.l1.sum()
        torch.testing.assert_close(l1.double(), total, rtol=0 if total < testing.EXACT_LIMIT else 1e-6, atol=0)


def whole_layer(problem: FFN, gated: bool, compression: int) -> tuple[Tensor, ...]:
    """y, the sum of |h| and the number of non-zeros, by strategy "union"."""
    layer = problem if gated else problem._replace(w_up=None, b_up=None)
    return tuple(ops.ffn_aux(*layer, compression, "union", None))


@pytest.mark.parametrize("ctas", [1, 3, 20, 100])
def test_bits_do_not_depend_on_how_units_are_dealt(ctas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rounds or in a part of one, whole or cut. In sums of |h| neither."""
    for name, m in (("topic29", 3000), ("skew29", 700), ("uniform29", 300)):
        arguments = union_operands(testing.make(name, m, 256, 2816), True)
        expected = testing.poisoned(lambda arguments=arguments: ops.up_down_union(*arguments))
        with monkeypatch.context() as patched:
            patched.setattr(device, "sm_count", lambda index: ctas)
            found = testing.poisoned(lambda arguments=arguments: ops.up_down_union(*arguments))
        for field, a, b in zip(Outputs._fields, found, expected, strict=True):
            testing.assert_same(a, b, f"{field} of {name}")


def by_strategy(problem: FFN, gated: bool = True, compression: int = 8) -> Tensor:
    return testing.sparse_output(problem, gated=gated, compression=compression, strategy="union")


# Exact: small integers, whose every sum fp32 holds

# One dimension at a time from its list of edges, then corners where several meet.
SHAPES = [
    *((m, 72, 264) for m in (0, 1, 63, 64, 127, 128, 129, 257, 1000)),
    *((m, 896, 5632) for m in (1, 65, 129)),
    *((129, 64, n) for n in (8, 136, 256, 264, 520, 5632, 8192)),
    *((129, k, 264) for k in (8, 72, 264, 896, 2048, 2056, 4096, 16384)),
    (1, 2056, 8192),
    (63, 4096, 5632),
    (127, 8, 8),
    (128, 8, 5632),
    (257, 2048, 5632),
    (257, 4096, 520),
    (1000, 264, 136),
]


@pytest.mark.parametrize(
    ("shape", "dtype", "compression", "biases"),
    [
        # two variants at each shape, one with biases
        (shape, *VARIANTS[(i + j) % 6], ("", BIASES)[(i + j) % 2])
        for i, shape in enumerate(SHAPES)
        for j in range(2)
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value) or "none",
)
def test_shapes(shape: tuple[int, int, int], dtype: torch.dtype, compression: int, biases: str) -> None:
    m, k, n = shape
    check(testing.integer_problem(m, k, n, density=0.05, biases=biases, device=CUDA, dtype=dtype), compression)


@pytest.mark.parametrize("density", [0, 0.005, 0.02, 0.3, 1])
@pytest.mark.parametrize(("dtype", "compression"), VARIANTS)
def test_densities(density: float, dtype: torch.dtype, compression: int) -> None:
    """No positive gate, few, many, all; the last tiles are partial."""
    problem = testing.integer_problem(300, 264, 2056, density=density, device=CUDA, dtype=dtype)
    share = float((testing.float64_gate(problem) > 0).double().mean())
    assert share == density if density in (0, 1) else 0.2 * density < share < 2 * density
    check(problem, compression)


@pytest.mark.parametrize(("m", "k", "n"), [(129, 2048, 5632), (1, 8, 8), (257, 72, 8192), (130, 4096, 264)])
@pytest.mark.parametrize("biases", ["", BIASES])
def test_every_neuron_of_every_token(m: int, k: int, n: int, biases: str) -> None:
    """The union of each tile is everything: as much arithmetic as dense, and as exact."""
    problem = testing.integer_problem(m, k, n, density=1, biases=biases, device=CUDA)
    assert run(problem, True).union.tolist() == [n] * geometry.token_tiles(m)
    check(problem, 8)


@pytest.mark.parametrize("biases", ["gate", "up", "down", "up down"])
@pytest.mark.parametrize("density", [0, 0.1, 1])
@DTYPES
def test_each_bias(biases: str, density: float, dtype: torch.dtype) -> None:
    """A bias of one projection alone; without non-zeros y is the down bias."""
    check(testing.integer_problem(130, 200, 264, density=density, biases=biases, device=CUDA, dtype=dtype))


@pytest.mark.parametrize("compression", [2, 8])
def test_most_neurons(compression: int) -> None:
    """N = 65,536: neurons with all 16 bits set, and unions of more than 32,767."""
    problem = testing.integer_problem(130, 64, 65536, density=0.06, device=CUDA)
    assert int(right(problem, True).union[0]) > 1 << 15
    check(problem, compression)
    last = torch.zeros(3, 65536, dtype=torch.int64)
    last[0, 65535], last[1, 0], last[2, 65528:] = 5, 6, 7
    check(testing.pattern_problem(last, 64, device=CUDA), compression)


@BOTH
@DTYPES
def test_cpu_operator_agrees(dtype: torch.dtype, gated: bool) -> None:
    """Every output with the CPU operator's, on the CPU's packed gate and on the GPU's own."""
    for density in (0.05, 1):
        problem = testing.integer_problem(300, 264, 776, density=density, biases=BIASES, dtype=dtype)
        on_gpu = problem.to(CUDA)
        for compression in (2, 4, 8):
            arguments = union_operands(problem, gated, compression)
            y, l1, union = ops.up_down_union(*arguments)
            expected = Outputs(y.cuda(), l1.sum(1, dtype=torch.float64).cuda(), union.cuda())
            moved = [a.cuda() if isinstance(a, Tensor) else a for a in arguments]
            assert_right(Outputs(*ops.up_down_union(*moved)), expected)
            assert_right(run(on_gpu, gated, compression), expected)


@pytest.mark.parametrize(
    ("dtype", "shifts"), [(FP16, (-14, 14)), (FP16, (-24, 14)), (BF16, (60, -60)), (BF16, (-60, 60))]
)
@pytest.mark.parametrize("mixed", [False, True])
def test_hidden_state_is_rounded_to_its_range(dtype: torch.dtype, shifts: tuple[int, int], mixed: bool) -> None:
    """Up and down weights times powers of two that cancel; in fp16 h is subnormal, and loses bits as in dense.

    ``mixed``: in every second neuron alone, so that large and small ones meet in one sum.
    """
    problem = testing.integer_problem(130, 264, 776, density=0.1, device=CUDA, dtype=dtype)
    up, down = (torch.full((776, 1), 2.0**shift, dtype=dtype, device=CUDA) for shift in shifts)
    if mixed:
        up[::2] = down[::2] = 1
    scaled = problem._replace(w_up=problem.w_up * up, w_down=problem.w_down * down)
    testing.assert_same(run(scaled, True).y, right(scaled, True).y)


def test_hidden_state_beyond_fp16_is_infinite() -> None:
    """As in dense PyTorch, and only for its tokens."""
    problem = testing.integer_problem(130, 264, 776, density=0.1, device=CUDA, dtype=FP16)
    clean = right(problem, True).y
    scale = torch.ones(776, 1, dtype=FP16, device=CUDA)
    scale[5] = 2.0**14
    scaled = problem._replace(w_up=problem.w_up * scale)
    y = run(scaled, True).y
    testing.assert_same(y, right(scaled, True).y)
    silent = testing.float64_gate(problem)[:, 5] == 0
    assert bool(silent.any())
    assert not bool(y.isfinite().all())
    testing.assert_same(y[silent], clean[silent])


# Where non-zeros fall


@DTYPES
@pytest.mark.parametrize("compression", [2, 4, 8])
def test_tiles_around_the_capacity(compression: int, dtype: torch.dtype) -> None:
    """Tiles one short of full, full, one over, with 255 and 256 side by side; 8 in the last."""
    width = 256 // compression
    choices = torch.tensor([0, 1, width - 2, width - 1, width, width + 1, 255, 256])
    rows = torch.arange(257)[:, None]
    counts = choices[(rows * 3 + torch.arange(7) * 5 + rows // 8) % 8]
    counts[:, 6] = 8
    gates = gates_with(counts, 6 * 256 + 8)
    problem = testing.pattern_problem(gates, 264, biases="gate down", device=CUDA, dtype=dtype)
    assert torch.equal((testing.float64_gate(problem) > 0).sum(1).cpu(), counts.sum(1))
    check(problem, compression)


@pytest.mark.parametrize(("k", "row"), [(264, 0), (896, 63), (2048, 128), (264, 127), (4096, 256)])
@pytest.mark.parametrize("nonzeros", [500, 5632])
def test_one_heavy_row_among_empty_ones(k: int, row: int, nonzeros: int) -> None:
    counts = torch.zeros(257, 22, dtype=torch.int64)
    counts[row] = torch.tensor([math.ceil((nonzeros - t) / 22) for t in range(22)])
    problem = testing.pattern_problem(gates_with(counts, 5632), k, device=CUDA)
    sizes = [0, 0, 0]
    sizes[row // 128] = nonzeros
    assert run(problem, True).union.tolist() == sizes
    check(problem)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 255, 256, 257, 511, 512, 513])
def test_union_sizes_around_tiles(size: int) -> None:
    """Lists that end just before, at and behind a chunk of 64 and 256 neurons; each token fires few of them."""
    generator = torch.Generator().manual_seed(size)
    neurons = torch.randperm(1544, generator=generator)[:size]
    gates = torch.full((256, 1544), -1)
    place = torch.arange(max(size, 128)) % size
    gates[torch.arange(len(place)) % 128, neurons[place]] = 3
    problem = testing.pattern_problem(gates, 264, device=CUDA)
    assert run(problem, True).union.tolist() == [size, 0]
    check(problem)


@pytest.mark.parametrize("nonzeros_per_tile", [23, 60, 227])
def test_all_rows_heavy(nonzeros_per_tile: int) -> None:
    """500, 1,300 and 5,000 non-zeros in every row."""
    counts = torch.full((131, 22), nonzeros_per_tile)
    check(testing.pattern_problem(gates_with(counts, 5632), 264, device=CUDA))


def test_mixed_rows() -> None:
    """Every load from no to all neurons in one batch, light and heavy rows side by side."""
    generator = torch.Generator().manual_seed(1)
    loads = torch.randperm(257, generator=generator)[:, None]
    counts = (loads * torch.rand(257, 22, generator=generator)).long()
    check(testing.pattern_problem(gates_with(counts, 5632), 896, biases="up down", device=CUDA), 4)


def test_neighbours_differ() -> None:
    """An empty tile, a full one, one with a single neuron in its last token, and a partial one are independent."""
    gates = torch.full((400, 776), -2)
    gates[128:256] = 1
    gates[383, 775] = 5
    gates[384:, ::3] = 2
    problem = testing.pattern_problem(gates, 400, biases="down", device=CUDA)
    assert run(problem, True).union.tolist() == [0, 776, 1, 259]
    check(problem)


@BOTH
def test_many_tokens(gated: bool) -> None:
    """70,000 tokens: more than 65,536, and more tiles than CTAs."""
    problem = testing.integer_problem(70_000, 72, 264, density=0.08, biases=BIASES, device=CUDA)
    assert_right(run(problem, gated), right(problem, gated))


# NaN and infinity


def assert_follows_cpu(problem: FFN, row: int | None = None) -> None:
    """Every output equals the CPU operator's; if there is a ``row``, all others are finite."""
    on_cpu = problem.to("cpu")
    for gated in (True, False):
        y, l1, union = run(problem, gated)
        expected_y, expected_l1, expected_union = ops.up_down_union(*union_operands(on_cpu, gated))
        testing.assert_same(y, expected_y, f"y, gated={gated}")
        testing.assert_same(union, expected_union, f"union, gated={gated}")
        testing.assert_same(l1.sum(1), expected_l1.sum(1), f"l1, gated={gated}")
        if row is not None:
            assert bool(torch.cat([y[:row], y[row + 1 :]]).isfinite().all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@DTYPES
def test_non_finite_token(value: float, dtype: torch.dtype) -> None:
    """One token has a non-finite feature: only its row shows it, and no neuron past the last tile appears."""
    problem = testing.integer_problem(150, 200, 264, density=0.1, device=CUDA, dtype=dtype)
    clean = right(problem, True).y
    problem.x[66, 5] = value
    assert_follows_cpu(problem, 66)
    y = run(problem, True).y
    assert bool(y[66].isnan().any())
    testing.assert_same(torch.cat([y[:66], y[67:]]), torch.cat([clean[:66], clean[67:]]))


def test_nan_spreads_as_in_dense() -> None:
    """A NaN token makes every gate NaN, so its whole output row is NaN, gated or not; its tile needs all neurons."""
    problem = testing.integer_problem(140, 72, 520, device=CUDA)
    problem.x[3] = math.nan
    for gated in (True, False):
        y, _, union = run(problem, gated)
        assert bool(y[3].isnan().all())
        assert torch.equal(y.isnan(), testing.dense_output(problem, gated=gated).isnan())
        assert int(union[0]) == 520


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_neuron(value: float) -> None:
    """A non-finite gate weight in the partial last tile: rows past M, 0 times the weight, do not count."""
    problem = testing.integer_problem(65, 72, 264, density=0.1, device=CUDA)
    problem.w_gate[263, 4] = value
    assert_follows_cpu(problem)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["b_gate", "b_up", "b_down"])
def test_non_finite_bias(name: str, value: float) -> None:
    problem = testing.integer_problem(65, 72, 264, density=0.1, biases=BIASES, device=CUDA)
    getattr(problem, name)[3] = value
    assert_follows_cpu(problem)


def test_weights_of_silent_neurons_are_not_read() -> None:
    """NaN in the up and down rows of neurons that no token fires, first, last and in between, does no harm."""
    problem = testing.integer_problem(130, 72, 264, density=0.1, device=CUDA)
    silent = [0, 100, 101, 263]
    problem.w_gate[silent] = 0
    expected = {gated: right(problem, gated) for gated in (True, False)}
    problem.w_up[silent] = problem.w_down[silent] = math.nan
    for gated in (True, False):
        assert_right(run(problem, gated), expected[gated])


@pytest.mark.parametrize("weight", ["w_up", "w_down"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_weight_reaches_only_tokens_beside_those_that_fire_it(weight: str, value: float) -> None:
    """A neuron with a non-finite row fires in every third token of the second tile: which others keep their bits.

    For an up row all of them, for a down row those of other tiles: 0 times the row is added in its own.
    """
    gates = gates_with(torch.full((300, 3), 9), 768)
    token = torch.arange(300)
    firing = (token % 3 == 0) & (token >= 128) & (token < 256)
    spared = ~firing if weight == "w_up" else (token < 128) | (token >= 256)
    gates[:, 300] = torch.where(firing, 2, 0)
    problem = testing.pattern_problem(gates, 304, device=CUDA)
    clean = {gated: right(problem, gated).y for gated in (True, False)}
    getattr(problem, weight)[300] = value
    for gated in (True, False):
        y = run(problem, gated).y
        testing.assert_same(y[spared], clean[gated][spared], f"gated={gated}")
        if gated or weight == "w_down":
            assert not bool(y[firing].isfinite().any())


# Slices: as many tokens at a time as entries have room


@BOTH
@pytest.mark.parametrize("density", [0, 0.08, 1])
@pytest.mark.parametrize(("m", "tiles"), [(128, 1), (129, 1), (1000, 1), (1000, 3), (897, 7), (1000, 8)])
def test_slices_do_not_change_a_bit(
    m: int, tiles: int, density: float, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for ``tiles`` token tiles at a time."""
    problem = testing.integer_problem(m, 136, 264, density=density, biases=BIASES, device=CUDA)
    whole = run(problem, gated)
    assert_right(whole, right(problem, gated))
    monkeypatch.setattr(geometry, "UNION_ENTRIES", tiles * geometry.TOKEN_TILE * 264)
    assert len(geometry.union_slices(m, 264)) == math.ceil(math.ceil(m / 128) / tiles)
    for name, actual, expected in zip(Outputs._fields, run(problem, gated), whole, strict=True):
        testing.assert_same(actual, expected, name)


@BOTH
@pytest.mark.parametrize("density", [0, 0.08, 1])
@pytest.mark.parametrize("compression", [2, 8])
@pytest.mark.parametrize(("m", "tiles"), [(1, 1), (300, 1), (1000, 3), (897, 7)])
def test_packing_slice_by_slice_does_not_change_a_bit(
    m: int, tiles: int, compression: int, density: float, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ffn_union`` has the results of the two operators, even if another kernel packs a short last slice."""
    p = testing.integer_problem(m, 136, 264, density=density, biases=BIASES, device=CUDA)
    words, spill, stats = ops.gate_pack(p.x, p.w_gate, p.b_gate, compression)
    weights = (p.w_up, p.w_down, p.b_up) if gated else (None, p.w_down, None)
    y, l1, union = ops.up_down_union(p.x, words, spill, *weights, p.b_down, compression)
    monkeypatch.setattr(geometry, "UNION_ENTRIES", tiles * geometry.TOKEN_TILE * 264)
    biases = (p.b_gate, p.b_up if gated else None, p.b_down)
    found = ops.ffn_union(p.x, p.w_gate, *weights[:2], *biases, compression)
    for name, actual, expected in zip(("y", "l1", "stats", "union"), found, (y, l1, stats, union), strict=True):
        testing.assert_same(actual, expected, name)


def test_many_tokens_take_the_memory_of_a_slice() -> None:
    """Beside y, the packed gate and the lists of one slice: less than dense PyTorch's gate alone."""
    m, n, k = 1 << 18, 5632, 64
    p = testing.integer_problem(512, k, n, density=0.005, device=CUDA)
    p = p._replace(x=p.x.repeat(m // 512, 1))
    expected = right(p.rows(0, 512), True).y
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = by_strategy(p)
    assert torch.cuda.max_memory_allocated() - before < m * n * 2 / 2
    assert all(bool((part == expected).all()) for part in y.view(-1, 512, k).split(64))


def test_slices_of_real_numbers_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = testing.make("topic29", 3000)
    whole = by_strategy(problem)
    monkeypatch.setattr(geometry, "UNION_ENTRIES", 1024 * 5632)
    assert len(geometry.union_slices(3000, 5632)) == 3
    testing.assert_same(by_strategy(problem), whole)


def test_two_slices() -> None:
    """N = 65,536 and more tokens than have room at a time, unchanged."""
    m = geometry.UNION_ENTRIES // 65536 + 130
    assert len(geometry.union_slices(m, 65536)) == 2
    block = testing.integer_problem(512, 64, 65536, density=0.04, device=CUDA)
    expected = {gated: right(block, gated) for gated in (True, False)}
    x = block.x.repeat(math.ceil(m / 512), 1)[:m].contiguous()
    for gated in (True, False):
        y, l1, union = run(block._replace(x=x), gated)
        for start in range(0, m, 512):
            part = y[start : start + 512]
            testing.assert_same(part, expected[gated].y[: len(part)], f"y from token {start}")
        whole = m // 512 * 4
        testing.assert_same(union[:whole], expected[gated].union.repeat(m // 512), "union")
        testing.assert_same(l1.sum(1, dtype=torch.float64)[:whole], expected[gated].l1.repeat(m // 512), "l1")


@pytest.mark.slow
def test_tokens_beyond_32_bits() -> None:
    """x and y of more than 2^31 elements. Up to 20 GB of GPU memory."""
    if torch.cuda.mem_get_info()[1] < 60e9:
        pytest.skip("needs a GPU with 60 GB")
    block = testing.integer_problem(128, 8192, 264, density=0.02, device=CUDA)
    tall = block._replace(x=block.x.repeat((1 << 31) // 8192 // 128 + 1, 1))
    assert tall.x.numel() > 1 << 31
    for gated in (True, False):
        y = by_strategy(tall, gated).view(-1, 128, 8192)
        expected = right(block, gated).y
        assert all(bool((part == expected).all()) for part in y.split(64))


@pytest.mark.slow
def test_rows_far_apart() -> None:
    """Tokens, then weights, so far apart that the last lie beyond 2^31 elements, with NaN between them."""
    if torch.cuda.mem_get_info()[1] < 60e9:
        pytest.skip("needs a GPU with 60 GB")

    def apart(matrix: Tensor) -> Tensor:
        rows, columns = matrix.shape
        stride = ((1 << 31) // (rows - 1) // 8 + 1) * 8
        spread = torch.full(((rows - 1) * stride + columns,), math.nan, dtype=matrix.dtype, device=CUDA)
        return spread.as_strided((rows, columns), (stride, 1)).copy_(matrix)

    problem = testing.integer_problem(257, 264, 776, density=0.1, device=CUDA)
    for gated in (True, False):
        expected = right(problem, gated)
        for name in ("x", "w_up", "w_down"):
            spread = problem._replace(**{name: apart(getattr(problem, name))})
            assert_right(run(spread, gated), expected)


# Layouts


@pytest.fixture
def layered() -> FFN:
    return testing.integer_problem(130, 264, 776, density=0.1, biases=BIASES, device=CUDA)


@BOTH
@pytest.mark.parametrize(("left", "right_"), [(8, 16), (0, 8), (3, 5), (1, 0)])
def test_strided_operands(layered: FFN, left: int, right_: int, gated: bool) -> None:
    """Row strides that kernels read in place, and base addresses and strides that they cannot."""
    strided = FFN(*(padded(t, left, right_) for t in layered[:4]), *layered[4:])
    assert_right(run(strided, gated), right(layered, gated))


@BOTH
def test_other_layouts(layered: FFN, gated: bool) -> None:
    """Column-major operands, every second row, one row for all tokens, a bias from the middle of a buffer."""
    expected = right(layered, gated)
    columns = layered._replace(**{name: getattr(layered, name).t().contiguous().t() for name in FFN._fields[:4]})
    assert_right(run(columns, gated), expected)
    second = layered._replace(x=layered.x.repeat_interleave(2, 0)[::2])
    assert_right(run(second, gated), expected)
    same = layered._replace(x=layered.x[5:6].expand(130, -1))
    testing.assert_same(run(same, gated).y, expected.y[5:6].expand(130, -1))

    def off_by_one(bias: Tensor) -> Tensor:
        return torch.cat([bias.new_full((1,), math.nan), bias])[1:]

    shifted = layered._replace(**{name: off_by_one(getattr(layered, name)) for name in FFN._fields[4:]})
    assert_right(run(shifted, gated), expected)


@BOTH
@pytest.mark.parametrize("shape", [(), (130,), (2, 65), (5, 1, 13, 2), (3, 0, 2), (0,)])
def test_leading_dimensions(layered: FFN, shape: tuple[int, ...], gated: bool) -> None:
    tokens = math.prod(shape)
    x = layered.x[:tokens].view(*shape, 264)
    y = by_strategy(layered._replace(x=x), gated)
    assert y.shape == x.shape
    testing.assert_same(y.view(-1, 264), right(layered.rows(0, tokens), gated).y)


# Real numbers


@BOTH
@DTYPES
def test_error_budget(workload: str, dtype: torch.dtype, gated: bool, real_layers: Path | None) -> None:
    """Every workload, with 2,048 of its tokens, at every compression: within dense's errors times 1.1, each row too."""
    problem = testing.load(workload, m=2048, dtype=dtype, real_layers=real_layers)
    for compression in (2, 4, 8):
        comparison = testing.compare(problem, by_strategy(problem, gated, compression), gated=gated)
        assert comparison.ok, f"compression {compression}: {comparison}"


@BOTH
@pytest.mark.parametrize(
    ("name", "m", "k", "n"),
    [
        ("topic29", 16384, 2048, 5632),
        ("dense911", 4096, 2048, 5632),
        ("topic128", 1024, 896, 4864),
        ("topic128", 1024, 4096, 11008),
        ("topic128", 1024, 8192, 2048),
    ],
)
def test_error_budget_of_other_sizes(name: str, m: int, k: int, n: int, gated: bool) -> None:
    problem = testing.make(name, m, k, n)
    comparison = testing.compare(problem, by_strategy(problem, gated), gated=gated)
    assert comparison.ok, str(comparison)


@BOTH
def test_error_budget_with_biases(gated: bool) -> None:
    problem = testing.make("skew29", 2048)
    generator = torch.Generator(CUDA).manual_seed(5)
    gate, up, down = (0.5 * torch.randn(s, generator=generator, device=CUDA).to(BF16) for s in (5632, 5632, 2048))
    problem = problem._replace(b_gate=gate, b_up=up, b_down=down)
    comparison = testing.compare(problem, by_strategy(problem, gated), gated=gated)
    assert comparison.ok, str(comparison)


@pytest.mark.parametrize("name", ["uniform29", "topic128", "dense911"])
def test_sums_and_unions_of_real_numbers(name: str) -> None:
    """The sum of |h| against float64 and the sizes of the unions, which decide what a call costs."""
    problem = testing.make(name, 2000)
    gate = testing.float64_gate(problem)
    hidden = gate * F.linear(problem.x.double(), problem.w_up.double())
    words, spill, _ = ops.gate_pack(problem.x, problem.w_gate, None, 8)
    active = F.pad(ops.unpack(words, spill, 5632, 8) != 0, (0, 0, 0, 48)).view(16, 128, 5632).any(1)
    _, l1, union = run(problem, True)
    assert torch.equal(union.long(), active.sum(1))
    assert float(l1.double().sum()) == pytest.approx(float(hidden.abs().sum()), rel=1e-4)


@BOTH
@pytest.mark.parametrize("busy", [False, True], ids=["alone", "busy"])
@pytest.mark.parametrize(("name", "m"), [("topic128", 2048), ("skew29", 1000), ("dense911", 300)])
def test_two_hundred_runs_give_the_same_bits(name: str, m: int, busy: bool, gated: bool) -> None:
    """``busy``: beside matrix products on another stream, so that CTAs start unevenly."""
    problem = testing.make(name, m)
    arguments = union_operands(problem, gated)
    first = ops.up_down_union(*arguments)
    different = torch.zeros(3, dtype=torch.int64, device=CUDA)
    other = torch.cuda.Stream()
    noise = torch.randn(1024, 1024, device=CUDA, dtype=BF16)
    torch.cuda.synchronize()
    for _ in range(200):
        if busy:
            with torch.cuda.stream(other):
                torch.mm(noise, noise)
        outputs = ops.up_down_union(*arguments)
        different += torch.stack(
            [(a.view(torch.int16) != b.view(torch.int16)).any().long() for a, b in zip(outputs, first, strict=True)]
        )
    assert different.tolist() == [0, 0, 0]


# PyTorch's rules


@BOTH
@pytest.mark.parametrize("biases", ["", BIASES], ids=["no-bias", "bias"])
def test_opcheck(biases: str, gated: bool) -> None:
    for m, density in ((0, 0.1), (130, 0.1), (70, 1)):
        problem = testing.integer_problem(m, 72, 264, density=density, biases=biases, device=CUDA)
        torch.library.opcheck(ops.up_down_union, union_operands(problem, gated))


def test_gradients_are_refused_by_the_operator(layered: FFN) -> None:
    arguments = union_operands(layered, True)
    wanting = (layered.x.clone().requires_grad_(), *arguments[1:])
    with pytest.raises(NotImplementedError, match=r"twell\.sparse_gated_ffn or twell\.sparse_ffn"):
        ops.up_down_union(*wanting)
    with torch.no_grad():
        ops.up_down_union(*wanting)


@BOTH
def test_gradients_of_the_strategy(layered: FFN, gated: bool) -> None:
    """A call that needs gradients trains as it does by any sparse strategy."""
    dy = testing.integer_upstream(layered)
    expected = testing.exact_gradients(layered, dy, gated=gated)
    for name, gradient in testing.sparse_gradients(layered, dy, gated=gated, strategy="union").items():
        testing.assert_same(gradient, expected[name].float().to(BF16), name)


@BOTH
def test_strategies_agree(gated: bool) -> None:
    """If h is exact in 16 bits, every strategy has the same answer and figures."""
    gates = gates_with(torch.full((130, 4), 20), 1000)
    problem = testing.pattern_problem(gates, 136, device=CUDA)
    expected = testing.exact_output(problem, gated=gated)
    if gated:
        hidden = testing.float64_gate(problem) * F.linear(problem.x.double(), problem.w_up.double())
        assert torch.equal(hidden, hidden.to(BF16).double())
    figures = []
    for strategy in ("row", "union"):
        y, aux = testing.sparse_layer(problem, gated=gated, strategy=strategy)
        testing.assert_same(y, expected, strategy)
        figures.append((float(aux.l1), float(aux.l0)))
    assert figures[0] == pytest.approx(figures[1], rel=1e-6)
    assert figures[1][1] == 80


@BOTH
def test_aux(layered: FFN, gated: bool) -> None:
    """l1 and l0 against float64; 0 without tokens."""
    expected = right(layered, gated)
    y, aux = testing.sparse_layer(layered, gated=gated, strategy="union")
    testing.assert_same(y, expected.y)
    assert float(aux.l1) == pytest.approx(float(expected.l1.sum()) / 130, rel=1e-6)
    assert float(aux.l0) == pytest.approx(float((testing.float64_gate(layered) > 0).sum()) / 130, rel=1e-6)
    _, aux = testing.sparse_layer(layered.rows(0, 0), gated=gated, strategy="union")
    assert [float(aux.l1), float(aux.l0)] == [0, 0]


@pytest.fixture
def fresh_compiler() -> None:
    torch.compiler.reset()


@BOTH
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_function(layered: FFN, backend: str, gated: bool) -> None:
    """fullgraph, with neighbours to fuse, for two numbers of tokens."""

    def block(problem: FFN) -> Tensor:
        doubled = problem._replace(x=problem.x * 2 - problem.x)
        return by_strategy(doubled, gated) + 1

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    with torch.no_grad():
        for problem in (layered, layered.rows(0, 77)):
            testing.assert_same(compiled(problem), right(problem, gated).y + 1)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_module(layered: FFN, mode: str | None) -> None:
    """Eager, compiled, and compiled into CUDA graphs, with new data in each call."""
    module = twell.nn.SparseGatedMLP(264, 776, True, strategy="union", device=CUDA, dtype=BF16).requires_grad_(False)
    for name, weight in (("gate", layered.w_gate), ("up", layered.w_up), ("down", layered.w_down.t())):
        linear = module.get_submodule(f"{name}_proj")
        linear.weight.copy_(weight)
        linear.bias.copy_(getattr(layered, f"b_{name}"))
    expected = {shift: right(layered._replace(x=layered.x.roll(shift, 0)), True).y for shift in range(4)}
    testing.assert_same(module(layered.x), expected[0])
    compiled = torch.compile(module, fullgraph=True, mode=mode)
    for shift, y in expected.items():
        testing.assert_same(compiled(layered.x.roll(shift, 0)), y)


@BOTH
def test_cuda_graph_follows_its_inputs(gated: bool) -> None:
    """One graph, captured with sparse data, is replayed with no non-zeros, all positive gates and sparse data again."""

    def problem(density: float, seed: int) -> FFN:
        return testing.integer_problem(300, 264, 776, density=density, biases=BIASES, seed=seed, device=CUDA)

    static = problem(0.1, 0)
    graph, outputs = testing.captured(
        lambda: (*ops.up_down_union(*union_operands(static, gated)), by_strategy(static, gated))
    )
    for density, seed in ((0.1, 0), (0, 1), (1, 2), (0.02, 3), (0.1, 0)):
        new = problem(density, seed)
        for old, tensor in zip(static, new, strict=True):
            old.copy_(tensor)
        for output in outputs:
            output.view(torch.uint8).fill_(0xFF)
        graph.replay()
        expected = right(new, gated)
        assert_right(Outputs(*outputs[:3]), expected)
        testing.assert_same(outputs[3], expected.y, f"density {density}")


def test_cuda_graph_of_slices_replays_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = testing.make("topic128", 2048)
    expected = by_strategy(problem)
    monkeypatch.setattr(geometry, "UNION_ENTRIES", 512 * 5632)
    graph, y = testing.captured(lambda: by_strategy(problem))
    for _ in range(100):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, expected)


@BOTH
def test_side_stream(layered: FFN, gated: bool) -> None:
    """All launches are on the current stream: they wait for its earlier writes, and the host does not wait."""
    x = torch.full_like(layered.x, torch.nan)

    def call() -> Tensor:
        return by_strategy(layered._replace(x=x), gated)

    call()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # for 0.1 s a launch on another stream would read NaN
        x.copy_(layered.x)
        y = call()
    assert not stream.query()
    stream.synchronize()
    testing.assert_same(y, right(layered, gated).y)


def test_nothing_waits_for_the_gpu(layered: FFN, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once kernels are loaded, no call does anything that makes the host wait, in one slice or in two."""

    def calls() -> None:
        for gated in (True, False):
            by_strategy(layered, gated)
            testing.sparse_layer(layered, gated=gated, strategy="union")
            by_strategy(layered._replace(b_gate=None, b_up=None, b_down=None), gated)

    for room in (geometry.UNION_ENTRIES, 128 * 776):
        monkeypatch.setattr(geometry, "UNION_ENTRIES", room)
        calls()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError):
                layered.x.sum().item()  # the mode detects a wait
            calls()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices(layered: FFN) -> None:
    """The tensors' device counts, not the current one."""
    expected = right(layered, True).y
    for current in (0, 1):
        with torch.cuda.device(current):
            for device in ("cuda:1", "cuda:0"):
                testing.assert_same(by_strategy(layered.to(device)), expected.to(device))
