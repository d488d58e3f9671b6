"""Up to 256 tokens, which have kernels of their own: the bits of the format, exact results, real numbers, repeats."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from tests.gpu.operands import gates_with, padded
from twell import ops, testing, tuning
from twell._runtime import specs
from twell.testing import FFN

CUDA = torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16
BIASES = "gate up down"
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16])
VARIANTS = [(BF16, 8), (FP16, 4), (BF16, 2), (FP16, 8), (BF16, 4), (FP16, 2)]

# Around every power of two, and one more than the limit.
TOKENS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
SOME = pytest.mark.parametrize("m", [1, 3, 8, 17, 64, 130, 256])


def pack(problem: FFN, compression: int) -> testing.Packed:
    """The packed gate of a GPU problem, compared with the CPU operator's in every bit that the format defines."""
    x, w_gate, b_gate = problem.x, problem.w_gate, problem.b_gate
    packed = testing.poisoned(lambda: ops.gate_pack(x, w_gate, b_gate, compression))
    bias = None if b_gate is None else b_gate.cpu()
    expected = ops.gate_pack(x.cpu(), w_gate.cpu(), bias, compression)
    testing.assert_packed_same(packed, expected, w_gate.shape[0], compression)
    return packed


def read(problem: FFN, packed: testing.Packed, gated: bool, compression: int) -> tuple[Tensor, Tensor]:
    """y and l1 of ``up_down`` with an up projection or without."""
    x, _, w_up, w_down, _, b_up, b_down = problem
    words, spill, _ = packed

    def call() -> tuple[Tensor, ...]:
        if gated:
            return ops.up_down(x, words, spill, w_up, w_down, b_up, b_down, compression)
        return ops.up_down(None, words, spill, None, w_down, None, b_down, compression)

    y, l1 = testing.poisoned(call)
    return y, l1


def check(problem: FFN, compression: int = 8) -> None:
    """``gate_pack``, ``unpack`` and both forms of ``up_down``: the only right bits of an exact problem."""
    packed = pack(problem, compression)
    gate = testing.float64_gate(problem)
    (dense,) = testing.poisoned(lambda: (ops.unpack(*packed[:2], gate.shape[1], compression),))
    testing.assert_same(dense, gate.to(problem.x.dtype), "unpack")
    bias = None if problem.b_up is None else problem.b_up.double()
    up = F.linear(problem.x.double(), problem.w_up.double(), bias)
    for gated, hidden in ((True, gate * up), (False, gate)):
        y, l1 = read(problem, packed, gated, compression)
        testing.assert_same(y, testing.exact_output(problem, gated=gated), f"y, gated={gated}")
        testing.assert_same(l1, hidden.abs().sum(1).float(), f"l1, gated={gated}")


def label(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.") or "none"


# Exact: small integers, whose every sum fp32 holds

SHAPES = [
    *((m, 264, 520) for m in TOKENS),
    *((m, 2048, 5632) for m in TOKENS),
    *((m, k, 264) for m in (1, 8, 33, 128) for k in (8, 72, 264, 896, 1024, 2048, 4096, 8192)),
    *((m, 72, n) for m in (1, 9, 64, 256) for n in (8, 136, 256, 264, 520, 2816, 5632)),
    (1, 8192, 5632),
    (2, 8, 8),
    (16, 4096, 2816),
    (17, 8192, 2816),
    (64, 1024, 2816),
    (255, 4096, 5632),
    (256, 8192, 520),
    (1, 8192, 264),
    (200, 8192, 136),
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
def test_shapes(shape: tuple[int, int, int], dtype: torch.dtype, compression: int, biases: str) -> None:
    m, k, n = shape
    check(testing.integer_problem(m, k, n, density=0.1, biases=biases, device=CUDA, dtype=dtype), compression)


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("density", [0, 0.01, 0.3, 1])
def test_densities(m: int, density: float) -> None:
    """No positive gate, few, many, all; the last tile is partial."""
    dtype, compression = VARIANTS[m % 6]
    problem = testing.integer_problem(m, 896, 2056, density=density, device=CUDA, dtype=dtype)
    if density in (0, 1):
        assert int((testing.float64_gate(problem) > 0).sum()) == density * m * 2056
    check(problem, compression)


@SOME
@pytest.mark.parametrize("biases", ["gate", "up", "down", "up down"])
@DTYPES
def test_each_bias(biases: str, m: int, dtype: torch.dtype) -> None:
    """One projection has a bias: gates of rows and neurons past the end of a tile would be positive."""
    for density in (0, 1):
        check(testing.integer_problem(m, 200, 264, density=density, biases=biases, device=CUDA, dtype=dtype))


@pytest.mark.parametrize("m", [1, 16, 130])
@pytest.mark.parametrize("compression", [2, 8])
def test_most_neurons(m: int, compression: int) -> None:
    """N = 65,536: the largest neuron index has all 16 bits set, so the word that holds it can be negative."""
    check(testing.integer_problem(m, 64, 65536, density=0.06, device=CUDA), compression)
    last = torch.zeros(m, 65536, dtype=torch.int64)
    last[0, 0], last[-1, 65535] = 6, 5
    check(testing.pattern_problem(last, 136, device=CUDA), compression)


@pytest.mark.parametrize("m", [1, 7, 16, 65, 256])
@DTYPES
def test_readers_take_the_cpu_gate(m: int, dtype: torch.dtype) -> None:
    """``up_down``, with and without up projection, on a gate packed by the CPU, against the CPU operators."""
    problem = testing.integer_problem(m, 264, 776, density=0.15, biases=BIASES, dtype=dtype)
    on_gpu = problem.to(CUDA)
    for compression in (2, 4, 8):
        packed = ops.gate_pack(problem.x, problem.w_gate, problem.b_gate, compression)
        moved = tuple(t.cuda() for t in packed)
        for gated in (True, False):
            expected = read(problem, packed, gated, compression)
            for ours, theirs in zip(read(on_gpu, moved, gated, compression), expected, strict=True):
                testing.assert_same(ours, theirs, f"gated={gated}")


@SOME
def test_gate_rounds_to_nearest_even(m: int) -> None:
    """Gates of 9 bits, one more than bf16 has: ties go to even in the packed value."""
    sums = torch.arange(256, 320)
    w_gate = torch.zeros(64, 64)
    w_gate[:, 0], w_gate[:, 1] = 256, sums - 256
    sign = 1 - 2 * (torch.arange(m)[:, None] % 3 == 1).float()
    x = torch.zeros(m, 64)
    x[:, :2] = sign
    problem = FFN(*(t.to(CUDA, BF16) for t in (x, w_gate, w_gate, w_gate)))
    expected = (sign * sums).relu().to(CUDA, BF16)
    for compression in (2, 8):
        testing.assert_same(ops.unpack(*pack(problem, compression)[:2], 64, compression), expected)


@SOME
def test_what_rounds_to_zero_is_no_nonzero(m: int) -> None:
    """fp16 at its limits: half the smallest number ties to 0 and is not counted; beyond the largest is infinity."""
    w_gate = torch.zeros(16, 64)
    w_gate[:7, 0] = 2.0 ** torch.arange(-8, -15, -1)
    w_gate[7, 0] = 1.5 * 2.0**-13
    w_gate[8, 1], w_gate[9, 1] = 256, 255
    x = torch.zeros(m, 64)
    x[:, 0], x[:, 1] = 2.0**-12, 256
    expected = [2.0**-20, 2.0**-21, 2.0**-22, 2.0**-23, 2.0**-24, 0, 0, 2.0**-24, torch.inf, 65280.0, *[0] * 6]
    packed = pack(FFN(*(t.to(CUDA, FP16) for t in (x, w_gate, w_gate, w_gate))), 8)
    testing.assert_same(ops.unpack(*packed[:2], 16, 8), torch.tensor(expected).to(FP16).expand(m, 16))
    assert int(packed[2][:, :, 0].sum()) == m * 8


@SOME
@pytest.mark.parametrize(
    ("dtype", "shifts"), [(FP16, (-14, 14)), (FP16, (-24, 14)), (BF16, (60, -60)), (BF16, (-60, 60))]
)
def test_hidden_state_keeps_its_range(m: int, dtype: torch.dtype, shifts: tuple[int, int]) -> None:
    """Up and down weights times powers of two that cancel: h lies far outside fp16, the output does not."""
    problem = testing.integer_problem(m, 264, 776, density=0.1, device=CUDA, dtype=dtype)
    up, down = (torch.full((776, 1), 2.0**shift, dtype=dtype, device=CUDA) for shift in shifts)
    up[::2] = down[::2] = 1
    scaled = problem._replace(w_up=problem.w_up * up, w_down=problem.w_down * down)
    testing.assert_same(testing.sparse_output(scaled, strategy="row"), testing.exact_output(scaled))


# Where non-zeros fall


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("compression", [2, 4, 8])
def test_tiles_around_the_capacity(m: int, compression: int) -> None:
    """Tiles one short of full, full, one over, with 255 and 256 side by side; 8 in the last."""
    width = 256 // compression
    choices = torch.tensor([0, 1, width - 2, width - 1, width, width + 1, 255, 256])
    rows = torch.arange(m)[:, None]
    counts = choices[(rows * 3 + torch.arange(10) * 5 + rows // 8) % 8]
    counts[:, 9] = 8
    gates = gates_with(counts, 9 * 256 + 8)
    problem = testing.pattern_problem(gates, 264, biases="gate down", device=CUDA, dtype=(BF16, FP16)[m % 2])
    assert torch.equal((testing.float64_gate(problem) > 0).sum(1).cpu(), counts.sum(1))
    check(problem, compression)


@pytest.mark.parametrize("m", [1, 2, 8, 9, 33, 64, 128, 256])
@pytest.mark.parametrize(("k", "nonzeros"), [(264, 500), (264, 5632), (2048, 5632), (8192, 5000)])
def test_one_heavy_token_among_empty_ones(m: int, k: int, nonzeros: int) -> None:
    """First, last and in between, with hundreds of neurons or all of them."""
    for row in {0, m // 2, m - 1}:
        counts = torch.zeros(m, 22, dtype=torch.int64)
        counts[row] = torch.tensor([math.ceil((nonzeros - t) / 22) for t in range(22)])
        assert int(counts.sum()) == nonzeros
        check(testing.pattern_problem(gates_with(counts, 5632), k, device=CUDA))


@pytest.mark.parametrize("m", [1, 2, 8, 17, 64, 256])
@pytest.mark.parametrize("k", [264, 2048])
def test_every_token_fires_every_neuron(m: int, k: int) -> None:
    problem = testing.integer_problem(m, k, 5632, density=1, biases=BIASES, device=CUDA)
    assert bool((testing.float64_gate(problem) > 0).all())
    for compression in (2, 8):
        check(problem, compression)


@pytest.mark.parametrize(
    ("m", "k", "neurons"), [*((m, 2048, 5632) for m in (1, 2, 8, 33, 66)), *((m, 4096, 2056) for m in (1, 9, 33, 66))]
)
def test_clusters_share_a_token(m: int, k: int, neurons: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact whatever the number of clusters; their sums depend on how the non-zeros are shared, and on nothing else."""
    problem = testing.integer_problem(m, k, neurons, density=0.3, biases=BIASES, device=CUDA)
    random = testing.make("dense911", m, k, neurons)
    results = {}
    # more pieces than a thread loads at a time
    for pieces in (1, 2, 16, 40):
        monkeypatch.setattr(tuning, "token_pieces", lambda m, spec, _, pieces=pieces: pieces if spec.shared else 1)
        check(problem)
        runs = [testing.sparse_output(random, strategy="row") for _ in range(20)]
        for run in runs[1:]:
            testing.assert_same(run, runs[0], f"{pieces} clusters")
        results[pieces] = runs[0]
    if tuning.family(0) == specs.PORTABLE:
        pytest.skip("how sums are shared shows in one 16-bit result of thousands, there maybe in none")
    # so they did share
    assert not torch.equal(results[1], results[2])


@pytest.mark.parametrize("m", [5, 16, 40, 130, 256])
def test_heavy_and_light_tokens_side_by_side(m: int) -> None:
    """Every load from no to all neurons, light and heavy tokens side by side."""
    generator = torch.Generator().manual_seed(m)
    loads = torch.randperm(m, generator=generator)[:, None] * 256 / max(m - 1, 1)
    counts = (loads * torch.rand(m, 22, generator=generator)).long()
    check(testing.pattern_problem(gates_with(counts, 5632), 896, biases="up down", device=CUDA), 4)


@pytest.mark.parametrize("m", [1, 8, 65])
@pytest.mark.parametrize("compression", [2, 8])
def test_two_full_tiles_in_a_light_token(m: int, compression: int) -> None:
    """One token's non-zeros fill two tiles, the first and the partial last; others have one in each."""
    counts = torch.zeros(m, 23, dtype=torch.int64)
    counts[torch.arange(m), torch.arange(m) % 22] = 1
    counts[m // 2] = 0
    counts[m // 2, 0], counts[m // 2, 22] = 256, 136
    check(testing.pattern_problem(gates_with(counts, 22 * 256 + 136), 896, device=CUDA), compression)


@SOME
def test_one_neuron(m: int) -> None:
    """A single non-zero in the whole batch, at any place."""
    for token in {0, m // 2, m - 1}:
        for neuron in (0, 255, 256, 5631):
            gates = torch.zeros(m, 5632, dtype=torch.int64)
            gates[token, neuron] = 3
            check(testing.pattern_problem(gates, 264, device=CUDA))


# NaN and infinity


def assert_follows_cpu(problem: FFN, row: int | None = None) -> None:
    """Every output equals the CPU operators'; if there is a ``row``, all others are finite."""
    packed = pack(problem, 8)
    on_cpu = problem.to("cpu")
    expected_packed = ops.gate_pack(on_cpu.x, on_cpu.w_gate, on_cpu.b_gate, 8)
    for gated in (True, False):
        y, l1 = read(problem, packed, gated, 8)
        expected_y, expected_l1 = read(on_cpu, expected_packed, gated, 8)
        testing.assert_same(y, expected_y, f"y, gated={gated}")
        testing.assert_same(l1, expected_l1, f"l1, gated={gated}")
        if row is not None:
            assert bool(torch.cat([y[:row], y[row + 1 :]]).isfinite().all())


@pytest.mark.parametrize("m", [1, 2, 8, 9, 16, 33, 70, 200])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@DTYPES
def test_non_finite_token(m: int, value: float, dtype: torch.dtype) -> None:
    """One token has a non-finite feature: only its row shows it, and no neuron past the last tile appears."""
    problem = testing.integer_problem(m, 200, 264, density=0.1, device=CUDA, dtype=dtype)
    row = m * 2 // 3
    problem.x[row, 5] = value
    assert_follows_cpu(problem, row)
    y = testing.sparse_output(problem, strategy="row")
    assert bool(y[row].isnan().any())


@pytest.mark.parametrize("m", [1, 8, 65])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_neuron_or_bias(m: int, value: float) -> None:
    """In the partial last tile: rows past M, zero times the weight, do not count."""
    problem = testing.integer_problem(m, 72, 264, density=0.1, device=CUDA)
    problem.w_gate[263, 4] = value
    assert_follows_cpu(problem)
    for name in ("b_gate", "b_up", "b_down"):
        problem = testing.integer_problem(m, 72, 264, density=0.1, biases=BIASES, device=CUDA)
        getattr(problem, name)[3] = value
        assert_follows_cpu(problem)


@SOME
def test_weights_of_silent_neurons_are_not_read(m: int) -> None:
    """NaN in the up and down rows of neurons that no token fires does no harm."""
    problem = testing.integer_problem(m, 72, 264, density=0.1, device=CUDA)
    silent = [0, 100, 101, 263]
    problem.w_gate[silent] = 0
    packed = pack(problem, 8)
    expected = {gated: testing.exact_output(problem, gated=gated) for gated in (True, False)}
    problem.w_up[silent] = problem.w_down[silent] = math.nan
    for gated in (True, False):
        testing.assert_same(read(problem, packed, gated, 8)[0], expected[gated])


@pytest.mark.parametrize("m", [17, 66, 200])
@pytest.mark.parametrize("weight", ["w_up", "w_down"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_weight_reaches_only_tokens_of_a_group_that_fires_it(m: int, weight: str, value: float) -> None:
    """A neuron with a non-finite row fires in every third of eight tokens: which other tokens keep their bits.

    For an up row all of them, for a down row those of other groups of eight: 0 times the row may be added in its own.
    """
    gates = gates_with(torch.full((m, 3), 9), 768)
    token = torch.arange(m)
    firing = (token % 3 == 0) & (token < 8)
    spared = ~firing if weight == "w_up" else token >= 8
    gates[:, 300] = torch.where(firing, 2, 0)
    problem = testing.pattern_problem(gates, 200, device=CUDA)
    packed = pack(problem, 8)
    clean = {gated: testing.exact_output(problem, gated=gated) for gated in (True, False)}
    getattr(problem, weight)[300] = value
    for gated in (True, False):
        y, _ = read(problem, packed, gated, 8)
        testing.assert_same(y[spared], clean[gated][spared], f"gated={gated}")
        if gated or weight == "w_down":
            assert not bool(y[firing].isfinite().any())


# Layouts


@SOME
@pytest.mark.parametrize(("left", "right"), [(8, 16), (0, 8), (3, 5), (1, 0)])
def test_strided_operands(m: int, left: int, right: int) -> None:
    """Row strides that kernels read in place, and base addresses and strides that they cannot."""
    problem = testing.integer_problem(m, 264, 776, density=0.1, biases=BIASES, device=CUDA)
    check(FFN(*(padded(t, left, right) for t in problem[:4]), *problem[4:]))


@SOME
def test_other_layouts(m: int) -> None:
    """Column-major operands, every second row, one row for all tokens, a bias from the middle of a buffer."""
    problem = testing.integer_problem(m, 264, 776, density=0.1, biases=BIASES, device=CUDA)
    check(problem._replace(**{name: getattr(problem, name).t().contiguous().t() for name in FFN._fields[:4]}))
    check(problem._replace(x=problem.x.repeat_interleave(2, 0)[::2]))
    check(problem._replace(x=problem.x[:1].expand(m, -1)))

    def off_by_one(bias: Tensor) -> Tensor:
        return torch.cat([bias.new_full((1,), math.nan), bias])[1:]

    check(problem._replace(**{name: off_by_one(getattr(problem, name)) for name in FFN._fields[4:]}))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2, 1, 3), (8, 1), (4, 32), (0, 3)])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    problem = testing.integer_problem(128, 264, 776, density=0.1, biases=BIASES, device=CUDA)
    tokens = math.prod(shape)
    x = problem.x[:tokens].view(*shape, 264)
    for gated in (True, False):
        y = testing.sparse_output(problem._replace(x=x), gated=gated, strategy="row")
        assert y.shape == x.shape
        testing.assert_same(y.view(-1, 264), testing.exact_output(problem.rows(0, tokens), gated=gated))
    packed = twell.pack(x, problem.w_gate, problem.b_gate)
    assert packed.shape == (*shape, 776)
    gate = testing.float64_gate(problem.rows(0, tokens))
    testing.assert_same(packed.unpack().view(-1, 776), gate.to(BF16))
    assert int(packed.nnz()) == int((gate > 0).sum())


# Real numbers


def assert_within_budget(problem: FFN, m: int, compression: int = 8) -> None:
    """Errors of all tokens, computed ``m`` at a time: a single token's errors are chance."""
    for gated in (True, False):
        parts = [problem.rows(first, first + m) for first in range(0, len(problem.x), m)]
        options = {"gated": gated, "compression": compression}
        y = torch.cat([testing.sparse_output(part, strategy="row", **options) for part in parts])
        comparison = testing.compare(problem, y, gated=gated)
        assert comparison.ok, f"gated={gated}, compression {compression}: {comparison}"


@pytest.mark.parametrize("m", [1, 2, 8, 16, 33, 64, 128, 256])
@pytest.mark.parametrize("name", list(testing.WORKLOADS))
def test_error_budget(name: str, m: int) -> None:
    """Every workload: within dense's errors times 1.1, in norm and in the worst row."""
    assert_within_budget(testing.make(name, 512, dtype=(BF16, FP16)[m in (2, 33)]), m, (2, 4, 8)[m % 3])


@pytest.mark.parametrize("m", [1, 16, 130])
@pytest.mark.parametrize(("k", "n"), [(896, 4864), (1024, 2816), (4096, 11008), (8192, 2048)])
def test_error_budget_of_other_models(k: int, n: int, m: int) -> None:
    assert_within_budget(testing.make("topic128", 260, k, n), m)


@pytest.mark.parametrize("m", [1, 8, 70, 256])
def test_gates_of_real_numbers(m: int) -> None:
    """The gate alone against float64, beside that of dense PyTorch; its statistics are those of what it holds."""
    problem = testing.make("topic128", m)
    words, spill, stats = ops.gate_pack(problem.x, problem.w_gate, None, 8)
    gate = ops.unpack(words, spill, 5632, 8)
    answer = testing.float64_gate(problem)
    dense = testing.errors(F.relu(F.linear(problem.x, problem.w_gate)), answer)
    assert testing.errors(gate, answer).within(dense)
    counts = F.pad((gate != 0).view(m, 22, 256).sum(2), (0, 0, 0, -m % 8)).view(-1, 8, 22)
    assert torch.equal(stats[:, :, 0].long(), counts.sum(1))
    assert torch.equal(stats[:, :, 1].long(), (counts > 31).sum(1))


@pytest.mark.parametrize("busy", [False, True], ids=["alone", "busy"])
@pytest.mark.parametrize(
    ("name", "m"), [("topic128", 1), ("skew29", 7), ("topic29", 64), ("dense911", 33), ("skew29", 256)]
)
def test_two_hundred_runs_give_the_same_bits(name: str, m: int, busy: bool) -> None:
    """``busy``: beside matrix products on another stream, so that CTAs start unevenly."""
    problem = testing.make(name, m)
    x, w_gate, w_up, w_down = problem[:4]

    def run() -> list[Tensor]:
        words, spill, stats = ops.gate_pack(x, w_gate, None, 8)
        gated = ops.up_down(x, words, spill, w_up, w_down, None, None, 8)
        return [words, stats, *gated, *ops.up_down(None, words, spill, None, w_down, None, None, 8)]

    first = run()
    different = torch.zeros(len(first), dtype=torch.int64, device=CUDA)
    other = torch.cuda.Stream()
    noise = torch.randn(1024, 1024, device=CUDA, dtype=BF16)
    torch.cuda.synchronize()
    for _ in range(200):
        if busy:
            with torch.cuda.stream(other):
                torch.mm(noise, noise)
        different += torch.stack(
            [(a.view(torch.int16) != b.view(torch.int16)).any().long() for a, b in zip(run(), first, strict=True)]
        )
    assert different.tolist() == [0] * len(first)


# PyTorch's rules


def both(problem: FFN) -> tuple[Tensor, Tensor]:
    return tuple(testing.sparse_output(problem, gated=gated, strategy="row") for gated in (True, False))


def assert_both(outputs: tuple[Tensor, ...], problem: FFN) -> None:
    for gated, y in zip((True, False), outputs, strict=True):
        testing.assert_same(y, testing.exact_output(problem, gated=gated), f"gated={gated}")


@pytest.mark.parametrize("m", [1, 16, 70])
@pytest.mark.parametrize("biases", ["", BIASES], ids=["no-bias", "bias"])
def test_opcheck(m: int, biases: str) -> None:
    """Every gate is positive and the tiles are whole, so that all of the spill is defined."""
    full = testing.integer_problem(m, 72, 512, density=1, biases=biases, device=CUDA)
    torch.library.opcheck(ops.gate_pack, (full.x, full.w_gate, full.b_gate, 8))
    words, spill, _ = ops.gate_pack(full.x, full.w_gate, full.b_gate, 8)
    up_down = (full.x, words, spill, full.w_up, full.w_down, full.b_up, full.b_down, 8)
    torch.library.opcheck(ops.up_down, up_down)
    torch.library.opcheck(ops.up_down, (None, words, spill, None, full.w_down, None, full.b_down, 8))


@SOME
def test_cuda_graph_follows_its_inputs(m: int) -> None:
    """One graph, captured with sparse data, is replayed with no non-zeros, all positive gates and sparse data again."""

    def problem(density: float, seed: int) -> FFN:
        return testing.integer_problem(m, 264, 776, density=density, biases=BIASES, seed=seed, device=CUDA)

    static = problem(0.1, 0)
    graph, outputs = testing.captured(lambda: both(static))
    for density, seed in ((0.1, 0), (0, 1), (1, 2), (0.02, 3), (0.1, 0)):
        new = problem(density, seed)
        for old, tensor in zip(static, new, strict=True):
            old.copy_(tensor)
        for output in outputs:
            output.fill_(math.nan)
        graph.replay()
        assert_both(outputs, new)


@pytest.mark.parametrize(("name", "m"), [("topic128", 1), ("dense911", 8), ("skew29", 64), ("topic128", 256)])
def test_cuda_graph_of_several_layers_replays_the_same_bits(name: str, m: int) -> None:
    """Consecutive layers, as in a step of decoding: each waits for the one before."""
    problem = testing.make(name, m)

    def step() -> Tensor:
        x = problem.x
        for _ in range(4):
            y = testing.sparse_output(problem._replace(x=x), strategy="row")
            # the first two features are the neurons' and the tokens' biases: they stay
            x = torch.cat([problem.x[:, :2], (problem.x + y)[:, 2:]], 1)
        return x

    expected = step()
    graph, x = testing.captured(step)
    for _ in range(100):
        x.fill_(math.nan)
        graph.replay()
        assert torch.equal(x, expected)


@pytest.mark.parametrize("m", [1, 16, 128])
def test_side_stream(m: int) -> None:
    """All launches are on the current stream: they wait for its earlier writes, and the host does not wait."""
    problem = testing.integer_problem(m, 264, 776, density=0.1, biases=BIASES, device=CUDA)
    late = problem._replace(x=torch.full_like(problem.x, math.nan))
    both(late)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # for 0.1 s a launch on another stream would read NaN
        late.x.copy_(problem.x)
        outputs = both(late)
    assert not stream.query()
    stream.synchronize()
    assert_both(outputs, problem)


@pytest.mark.parametrize("m", [1, 16, 128])
def test_two_streams_at_once(m: int) -> None:
    """Calls that overlap share no scratch memory."""
    problems = [testing.make(name, m, seed=i) for i, name in enumerate(("topic128", "skew29"))]
    expected = [both(problem) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(50):
        results = []
        for stream, problem in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                results.append(both(problem))
        torch.cuda.synchronize()
        for outputs, answers in zip(results, expected, strict=True):
            assert all(torch.equal(y, answer) for y, answer in zip(outputs, answers, strict=True))


@pytest.mark.parametrize("m", [1, 16, 256])
def test_nothing_waits_for_the_gpu(m: int) -> None:
    """Once kernels are loaded, no call makes the host wait."""
    problem = testing.integer_problem(m, 264, 776, density=0.1, biases=BIASES, device=CUDA)

    def calls() -> None:
        for gated in (True, False):
            testing.sparse_layer(problem, gated=gated, strategy="row")
        twell.pack(problem.x, problem.w_gate, problem.b_gate).unpack()

    calls()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError):
            problem.x.sum().item()  # the mode detects a wait
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_function(gated: bool, backend: str) -> None:
    """fullgraph, with neighbours to fuse; the number of tokens grows from few to many in one compiled function."""
    problem = testing.integer_problem(300, 264, 776, density=0.1, biases=BIASES, device=CUDA)

    def block(x: Tensor) -> Tensor:
        return testing.sparse_output(problem._replace(x=x * 2 - x), gated=gated, strategy="row") + 1

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    with torch.no_grad():
        for m in (8, 1, 33, 256, 300):
            y = compiled(problem.x[:m])
            testing.assert_same(y, testing.exact_output(problem.rows(0, m), gated=gated) + 1, f"{m} tokens")


@pytest.mark.parametrize("m", [1, 8, 33, 256])
@pytest.mark.parametrize("gated", [True, False])
def test_training_takes_few_tokens(m: int, gated: bool) -> None:
    """The gate of a training step is packed by the same operator."""
    problem = testing.integer_problem(m, 264, 776, density=0.05, biases=BIASES, device=CUDA)
    dy = testing.integer_upstream(problem)
    expected = testing.exact_gradients(problem, dy, gated=gated)
    for name, gradient in testing.sparse_gradients(problem, dy, gated=gated).items():
        testing.assert_same(gradient, expected[name].float().to(BF16), name)


@pytest.mark.parametrize("gated", [True, False])
def test_union_takes_few_tokens(gated: bool) -> None:
    """The other strategy reads the same packed gate."""
    for m in (1, 8, 33, 128, 256):
        gates = gates_with(torch.full((m, 4), 20), 1000)
        problem = testing.pattern_problem(gates, 264, device=CUDA)
        y = testing.sparse_output(problem, gated=gated, strategy="union")
        testing.assert_same(y, testing.exact_output(problem, gated=gated), f"{m} tokens")
