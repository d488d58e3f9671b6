"""The screened gate of few tokens on a GPU: it has the bits of ``gate_pack``, and so has a layer that keeps a copy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import twell
from twell import ops, testing, tuning
from twell.testing import FFN

CUDA = torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16])
TOKENS = pytest.mark.parametrize("m", [1, 2, 3, 7, 8])
# columns below and above one block of both splits, no multiple of 64 or of 16; neurons below and above a tile
SHAPES = ((8, 8), (64, 264), (72, 520), (136, 256), (264, 1032), (896, 1000), (2048, 5632), (4096, 2816), (8192, 776))


def pack(problem: FFN, compression: int = 8, threshold: float = 0.0) -> testing.Packed:
    """The packed gate, compared with that of ``gate_pack`` in every bit that the format defines."""
    x, w_gate, b_gate = problem.x, problem.w_gate, problem.b_gate
    last = compression, threshold
    expected = testing.poisoned(lambda: ops.gate_pack(x, w_gate, b_gate, *last))
    for nearest in (True, False):
        quantized = ops.quantize_gate(w_gate, True, nearest)
        packed = testing.poisoned(
            lambda q=quantized, n=nearest: ops.gate_pack_screened(x, w_gate, b_gate, *q, *last, n)
        )
        testing.assert_packed_same(packed, expected, w_gate.shape[0], compression)
    return packed


def reals(m: int, k: int, n: int, dtype: torch.dtype, shift: float | None = None) -> FFN:
    """Normal x and weights; with ``shift`` a bias so many deviations of the product below zero."""
    x, *weights = (torch.randn(s, k, device=CUDA).to(dtype) for s in (m, n, n, n))
    bias = None if shift is None else ((torch.randn(n, device=CUDA) * 0.1 - shift) * math.sqrt(k)).to(dtype)
    return FFN(x, *weights, bias)


@DTYPES
@TOKENS
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_integers_are_exact(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    for density in (0.0, 0.03, 0.4, 1.0):
        for biases, compression in (("", 8), ("gate", 2), ("gate", 4)):
            problem = testing.integer_problem(m, k, n, density=density, biases=biases, device=CUDA, dtype=dtype)
            words, spill, _ = pack(problem, compression)
            gate = testing.float64_gate(problem).to(dtype)
            testing.assert_same(ops.unpack(words, spill, n, compression), gate, "gate")
            pack(problem, compression, threshold=1.5)


@DTYPES
@TOKENS
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_real_numbers_have_the_bits_of_gate_pack(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    """From all neurons as candidates to hardly any: every number of stages of the ring, and CTAs without any."""
    torch.manual_seed(k)
    for shift in (None, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0):
        pack(reals(m, k, n, dtype, shift))


@pytest.mark.parametrize("candidates", [*range(1, 18), 31, 32, 33, 40, 48, 57, 63, 64])
def test_any_number_of_candidates(candidates: int) -> None:
    """So many candidates in the first 64 neurons of each tile, at random places; 20 blocks of each split."""
    torch.manual_seed(candidates)
    problem = reals(8, 2560, 768, BF16)
    bias = torch.full((12, 64), -1000.0)
    for i, row in enumerate(bias):
        count = candidates if i % 4 == 0 else int(torch.randint(65, ()))
        row[torch.randperm(64)[:count]] = 200.0
    words, spill, _ = pack(problem._replace(b_gate=bias.flatten().to(CUDA, BF16)), 2)
    assert int((ops.unpack(words, spill, 768, 2)[:, :64] != 0).any(0).sum()) == candidates


def test_rows_that_are_not_read_may_hold_anything() -> None:
    torch.manual_seed(0)
    problem = reals(8, 1032, 1000, BF16, 2.0)
    quantized = ops.quantize_gate(problem.w_gate, True)
    bits = ops.gate_screen(*ops.quantize_gate(problem.x, False), *quantized, problem.b_gate)
    listed = (bits[0, :, None] >> torch.arange(32, device=CUDA) & 1).bool().flatten()[:1000]
    assert 0 < listed.sum() < 500
    weight = problem.w_gate.masked_fill(~listed[:, None], torch.nan)
    packed = ops.gate_pack_screened(problem.x, weight, problem.b_gate, *quantized, 8)
    expected = ops.gate_pack(problem.x, problem.w_gate, problem.b_gate, 8)
    testing.assert_packed_same(packed, expected, 1000, 8)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, 1e-30, 0.0])
def test_tokens_and_neurons_that_are_not_screened(value: float) -> None:
    torch.manual_seed(0)
    for bias in (None, 0.0, 1e-40, 1.0, -2.0, math.nan, math.inf, -math.inf):
        problem = reals(5, 264, 520, BF16, 2.0)
        given = None if bias is None else problem.b_gate.masked_fill(torch.arange(520, device=CUDA) % 3 == 0, bias)
        whole, one = value == 0.0 or value == 1e-30, problem.x.clone()
        (one[2] if whole else one[2, 7:8]).fill_(value)
        pack(problem._replace(x=one, b_gate=given))
        weight = problem.w_gate.clone()
        for neuron in (0, 63, 64, 300, 519):
            (weight[neuron] if whole else weight[neuron, 9:10]).fill_(value)
        pack(problem._replace(w_gate=weight, b_gate=given))
        pack(problem._replace(x=one, w_gate=weight, b_gate=given))


def test_strided_operands() -> None:
    torch.manual_seed(0)
    problem = reals(3, 200, 264, BF16, 1.0)
    wide = [torch.randn(t.shape[0], 264, device=CUDA).to(BF16) for t in (problem.x, problem.w_gate)]
    pack(problem._replace(x=wide[0][:, 8:208], w_gate=wide[1][:, 8:208]))
    # columns: copies are made between the two kernels
    pack(problem._replace(w_gate=torch.randn(200, 264, device=CUDA).to(BF16).t()))


def test_int8_rows_may_come_from_the_call_before() -> None:
    """The kernel reads them before the kernel ahead of it has ended."""
    torch.manual_seed(0)
    problem = reals(8, 4096, 4096, BF16, 2.0)
    weights = [problem.w_gate, *(torch.randn_like(problem.w_gate) for _ in range(3))]
    expected = [ops.gate_pack(problem.x, w, problem.b_gate, 8) for w in weights]
    for _ in range(100):
        found = []
        for w in weights:
            quantized = ops.quantize_gate(w, True)
            found.append(ops.gate_pack_screened(problem.x, w, problem.b_gate, *quantized, 8))
        for ours, right in zip(found, expected):
            testing.assert_packed_same(ours, right, 4096, 8)


def test_repeats_and_replays_have_the_same_bits() -> None:
    torch.manual_seed(0)
    problem = reals(8, 4096, 14336, BF16, 1.5)
    quantized = ops.quantize_gate(problem.w_gate, True)
    call = lambda: ops.gate_pack_screened(problem.x, problem.w_gate, problem.b_gate, *quantized, 8)  # noqa: E731
    first = call()
    dense = ops.unpack(*first[:2], 14336, 8)
    graph, static = testing.captured(call)
    for _ in range(300):
        again = call()
        graph.replay()
        for found in (again, static):
            assert torch.equal(found[0], first[0])
            assert torch.equal(found[2], first[2])
            assert torch.equal(ops.unpack(*found[:2], 14336, 8), dense)


@pytest.mark.parametrize("m", [1, 8, 9, 64, 65])
def test_a_layer_that_keeps_a_copy_has_the_same_bits(m: int) -> None:
    """Eager, and in a graph; after the weight has changed, too."""
    k, n = 4096, 9984
    assert tuning.screens_few(1, k, n)
    torch.manual_seed(0)
    module = twell.nn.SparseGatedMLP(k, n, strategy="row", device=CUDA, dtype=BF16).requires_grad_(False)
    x = torch.randn(m, k, device=CUDA).to(BF16)
    plain = module(x)
    twell.nn.keep_gate_copies(module)
    for strategy in ("row", "screened"):
        module.strategy = strategy
        found = module(x)
        if strategy == "row" or m <= 64:
            testing.assert_same(found, plain, strategy)
    # made for those alone who read it
    assert (module._gate_copy.nbytes > 0) == (m <= 8 or m > 64)
    module.strategy = "row"
    graph, static = testing.captured(lambda: module(x))
    graph.replay()
    testing.assert_same(static, plain, "a graph")
    module.gate_proj.weight.neg_()
    twell.nn.keep_gate_copies(module, False)
    expected = module(x)
    twell.nn.keep_gate_copies(module)
    testing.assert_same(module(x), expected, "a new weight")


def test_more_tokens_are_refused() -> None:
    problem = reals(9, 64, 256, BF16)
    quantized: tuple[Tensor, ...] = ops.quantize_gate(problem.w_gate, True)
    with pytest.raises(ValueError, match="x must have at most 8 rows"):
        ops.gate_pack_screened(problem.x, problem.w_gate, None, *quantized, 8)
