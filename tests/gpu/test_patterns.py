"""Patterns and values of non-zeros, and layouts of operands: overflow, heavy rows, NaN, strides, batches."""

import math

import pytest
import torch
from torch import Tensor

import twell
from tests.gpu.operands import gates_with, padded
from twell import ops, testing
from twell.testing import FFN

CUDA = torch.device("cuda")


def run(problem: FFN, compression: int) -> tuple[Tensor, Tensor]:
    """The gated and the non-gated layer of a GPU problem, after its packed gate was compared with the CPU operator."""
    b_gate = None if problem.b_gate is None else problem.b_gate.cpu()
    packed = testing.poisoned(lambda: ops.gate_pack(*problem[:2], problem.b_gate, compression))
    expected = ops.gate_pack(problem.x.cpu(), problem.w_gate.cpu(), b_gate, compression)
    testing.assert_packed_same(packed, expected, problem.w_gate.shape[0], compression)
    words, spill, _ = packed
    x, _, w_up, w_down, _, b_up, b_down = problem
    gated = testing.poisoned(lambda: ops.up_down(x, words, spill, w_up, w_down, b_up, b_down, compression))
    non_gated = testing.poisoned(lambda: ops.up_down(None, words, spill, None, w_down, None, b_down, compression))
    return gated[0], non_gated[0]


def check(problem: FFN, compression: int) -> None:
    for gated, y in zip((True, False), run(problem, compression), strict=True):
        testing.assert_same(y, testing.exact_output(problem, gated=gated), "gated" if gated else "non-gated")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compression", [2, 4, 8])
@pytest.mark.usefixtures("row_kernel")
def test_tiles_around_the_capacity(compression: int, dtype: torch.dtype) -> None:
    """Tiles one short of full, full, one over, with 255 and 256 side by side; 8 in the last."""
    width = 256 // compression
    choices = torch.tensor([0, 1, width - 2, width - 1, width, width + 1, 255, 256])
    rows = torch.arange(129)[:, None]
    counts = choices[(rows * 3 + torch.arange(7) * 5 + rows // 8) % 8]
    counts[:, 6] = 8
    gates = gates_with(counts, 6 * 256 + 8)
    problem = testing.pattern_problem(gates, 200, biases="gate down", device=CUDA, dtype=dtype)
    assert torch.equal((testing.float64_gate(problem) > 0).sum(1).cpu(), counts.sum(1))
    check(problem, compression)


@pytest.mark.parametrize(("k", "row"), [(896, 0), (896, 63), (896, 128), (264, 263), (2048, 64), (8192, 17)])
@pytest.mark.parametrize("nonzeros", [500, 5000])
@pytest.mark.usefixtures("row_kernel")
def test_one_heavy_row_among_empty_ones(k: int, row: int, nonzeros: int) -> None:
    counts = torch.zeros(264, 22, dtype=torch.int64)
    counts[row] = torch.tensor([math.ceil((nonzeros - t) / 22) for t in range(22)])
    assert int(counts.sum()) == nonzeros
    check(testing.pattern_problem(gates_with(counts, 5632), k, device=CUDA), 8)


@pytest.mark.parametrize("compression", [2, 8])
@pytest.mark.usefixtures("row_kernel")
def test_heavy_tiles_in_light_rows(compression: int) -> None:
    """One row's non-zeros fill two tiles, the first and the partial last; other rows have one in each."""
    counts = torch.zeros(65, 23, dtype=torch.int64)
    counts[torch.arange(65), torch.arange(65) % 22] = 1
    counts[17] = 0
    counts[17, 0], counts[17, 22] = 256, 136
    check(testing.pattern_problem(gates_with(counts, 22 * 256 + 136), 896, device=CUDA), compression)


@pytest.mark.parametrize("nonzeros_per_tile", [23, 60, 227])
@pytest.mark.usefixtures("row_kernel")
def test_all_rows_heavy(nonzeros_per_tile: int) -> None:
    """500, 1,300 and 5,000 non-zeros in every row."""
    counts = torch.full((259, 22), nonzeros_per_tile)
    check(testing.pattern_problem(gates_with(counts, 5632), 264, device=CUDA), 8)


@pytest.mark.parametrize("k", [264, 4096, 8192])
@pytest.mark.usefixtures("row_kernel")
def test_heavy_rows_in_every_group(k: int) -> None:
    """Three in each of 1,605 groups, more groups than all clusters together."""
    counts = torch.ones(40, 22, dtype=torch.int64)
    for row in (0, 3, 7):
        counts[row::8] = 28
    few = testing.pattern_problem(gates_with(counts, 5632), k, biases="up down", device=CUDA)
    many = few._replace(x=few.x.repeat(321, 1))
    for gated in (True, False):
        (y,) = testing.poisoned(lambda gated=gated: (testing.sparse_output(many, gated=gated),))
        testing.assert_same(y, testing.exact_output(few, gated=gated).repeat(321, 1), f"gated {gated}")


@pytest.mark.usefixtures("row_kernel")
def test_mixed_rows() -> None:
    """Every load from no to all neurons in one batch, light and heavy rows side by side."""
    generator = torch.Generator().manual_seed(1)
    loads = torch.randperm(257, generator=generator)[:, None]
    counts = (loads * torch.rand(257, 22, generator=generator)).long()
    check(testing.pattern_problem(gates_with(counts, 5632), 896, biases="up down", device=CUDA), 4)


# NaN and infinity


def assert_rows_follow_cpu(problem: FFN, row: int | None) -> None:
    """Every row equals the CPU operators'; all except for ``row`` are finite."""
    on_cpu = problem.to("cpu")
    outputs = run(problem, 8)
    for gated, y in zip((True, False), outputs, strict=True):
        testing.assert_same(y, testing.sparse_output(on_cpu, gated=gated), f"gated={gated}")
        others = torch.ones(len(y), dtype=torch.bool, device=y.device)
        if row is not None:
            others[row] = False
            assert bool(y[others].isfinite().all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_non_finite_token(value: float, dtype: torch.dtype) -> None:
    """One token has a non-finite feature: only its row shows it, and no neuron past the last tile appears."""
    problem = testing.integer_problem(70, 200, 264, density=0.1, device=CUDA, dtype=dtype)
    clean = testing.exact_output(problem)
    problem.x[66, 5] = value
    assert_rows_follow_cpu(problem, 66)
    y = testing.sparse_output(problem)
    assert bool(y[66].isnan().any())
    testing.assert_same(torch.cat([y[:66], y[67:]]), torch.cat([clean[:66], clean[67:]]))


def test_nan_spreads_as_in_dense() -> None:
    """A NaN token makes every gate NaN, so its whole output row is NaN, gated or not."""
    problem = testing.integer_problem(65, 72, 520, device=CUDA)
    problem.x[3] = math.nan
    for gated in (True, False):
        y = testing.sparse_output(problem, gated=gated)
        assert bool(y[3].isnan().all())
        assert torch.equal(y.isnan(), testing.dense_output(problem, gated=gated).isnan())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_neuron(value: float) -> None:
    """A non-finite gate weight in the partial last tile: rows past M, 0 times the weight, do not count."""
    problem = testing.integer_problem(65, 72, 264, density=0.1, device=CUDA)
    problem.w_gate[263, 4] = value
    assert_rows_follow_cpu(problem, None)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_bias(value: float) -> None:
    problem = testing.integer_problem(65, 72, 264, density=0.1, biases="gate up down", device=CUDA)
    assert problem.b_gate is not None
    problem.b_gate[3] = value
    assert_rows_follow_cpu(problem, None)


def test_weights_of_silent_neurons_are_not_read() -> None:
    """NaN in the up and down rows of a neuron that no token fires does no harm."""
    problem = testing.integer_problem(65, 72, 264, density=0.1, device=CUDA)
    problem.w_gate[100] = 0
    expected = testing.exact_output(problem)
    problem.w_up[100] = problem.w_down[100] = math.nan
    testing.assert_same(testing.sparse_output(problem), expected)


@pytest.mark.parametrize("weight", ["w_up", "w_down"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_weight_reaches_only_tokens_that_fire_it(weight: str, value: float) -> None:
    """A neuron with a non-finite row fires in every third of 24 tokens: which other tokens keep their bits.

    For an up row all of them, for a down row those whose group of eight does not fire it: 0 times the row is added.
    """
    gates = gates_with(torch.full((66, 3), 9), 768)
    token = torch.arange(66)
    firing = (token % 3 == 0) & (token < 24)
    spared = ~firing if weight == "w_up" else token >= 24
    gates[:, 300] = torch.where(firing, 2, 0)
    problem = testing.pattern_problem(gates, 136, device=CUDA)
    clean = {gated: testing.exact_output(problem, gated=gated) for gated in (True, False)}
    getattr(problem, weight)[300] = value
    for gated in (True, False):
        y = testing.sparse_output(problem, gated=gated)
        testing.assert_same(y[spared], clean[gated][spared], f"gated={gated}")
        if gated or weight == "w_down":
            assert not bool(y[firing].isfinite().any())


# Layouts


@pytest.fixture
def layered() -> FFN:
    return testing.integer_problem(130, 264, 776, density=0.1, biases="gate up down", device=CUDA)


@pytest.mark.parametrize(("left", "right"), [(8, 16), (0, 8), (3, 5), (1, 0)])
def test_strided_operands(layered: FFN, left: int, right: int) -> None:
    """Row strides that kernels read in place, and base addresses and strides that they cannot."""
    strided = FFN(*(padded(t, left, right) for t in layered[:4]), *layered[4:])
    for gated in (True, False):
        testing.assert_same(testing.sparse_output(strided, gated=gated), testing.exact_output(layered, gated=gated))


def test_other_layouts(layered: FFN) -> None:
    """Column-major operands, every second row, one row for all tokens, a bias from the middle of a buffer."""
    columns = layered._replace(**{name: getattr(layered, name).t().contiguous().t() for name in FFN._fields[:4]})
    testing.assert_same(testing.sparse_output(columns), testing.exact_output(layered))
    second = layered._replace(x=layered.x.repeat_interleave(2, 0)[::2])
    testing.assert_same(testing.sparse_output(second), testing.exact_output(layered))
    same = layered._replace(x=layered.x[5:6].expand(130, -1))
    testing.assert_same(testing.sparse_output(same), testing.exact_output(layered)[5:6].expand(130, -1))
    shifted = layered._replace(**{name: off_by_one(getattr(layered, name)) for name in FFN._fields[4:]})
    testing.assert_same(testing.sparse_output(shifted), testing.exact_output(layered))


def off_by_one(bias: Tensor) -> Tensor:
    return torch.cat([bias.new_full((1,), math.nan), bias])[1:]


@pytest.mark.parametrize("shape", [(), (130,), (2, 65), (5, 1, 13, 2), (3, 0, 2), (0,)])
def test_leading_dimensions(layered: FFN, shape: tuple[int, ...]) -> None:
    tokens = math.prod(shape)
    x = layered.x[:tokens].view(*shape, 264)
    batch = layered._replace(x=x)
    for gated in (True, False):
        y = testing.sparse_output(batch, gated=gated)
        assert y.shape == x.shape
        testing.assert_same(y.view(-1, 264), testing.exact_output(layered.rows(0, tokens), gated=gated))
    packed = twell.pack(x, layered.w_gate, layered.b_gate, compression=4)
    assert packed.shape == (*shape, 776)
    assert packed.dtype == x.dtype
    gate = testing.float64_gate(layered.rows(0, tokens))
    testing.assert_same(packed.unpack().view(-1, 776), gate.to(x.dtype))
    assert int(packed.nnz()) == int((gate > 0).sum())


def test_unsupported_sizes_are_refused() -> None:
    """Clear errors before any launch: a hidden size and a number of neurons that no kernel has."""
    for k, n, error in ((12, 64, ValueError), (64, 20, ValueError), (16392, 64, NotImplementedError)):
        x, w = (torch.zeros(size, k, dtype=torch.bfloat16, device=CUDA) for size in (4, n))
        with pytest.raises(error):
            twell.sparse_gated_ffn(x, w, w, w.t())
    x, w = (torch.zeros(size, 8, dtype=torch.bfloat16, device=CUDA) for size in (4, 65544))
    with pytest.raises(NotImplementedError):
        twell.sparse_gated_ffn(x, w, w, w.t())
    x, w = (torch.zeros(size, 64, dtype=torch.float32, device=CUDA) for size in (4, 64))
    with pytest.raises(TypeError):
        twell.sparse_gated_ffn(x, w, w, w.t())
