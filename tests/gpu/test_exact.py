"""Small integers, whose sums are exact in fp32: every operator must give the reference's bits at every size."""

import pytest
import torch
from torch import Tensor

from twell import ops, testing, tuning
from twell._runtime import device, geometry, specs
from twell.ops import library
from twell.ops.gate_pack import outputs
from twell.testing import FFN, UGLY_K, UGLY_M

BF16, FP16 = torch.bfloat16, torch.float16


def check(problem: FFN, compression: int) -> None:
    """Run all operators on the GPU problem: the packed gate against the CPU operator, the rest against float64."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = problem
    n = w_gate.shape[0]

    packed = testing.poisoned(lambda: ops.gate_pack(x, w_gate, b_gate, compression))
    bias = None if b_gate is None else b_gate.cpu()
    testing.assert_packed_same(packed, ops.gate_pack(x.cpu(), w_gate.cpu(), bias, compression), n, compression)
    words, spill, stats = packed
    gate = testing.float64_gate(problem)
    assert int(stats[:, :, 0].sum()) == int((gate != 0).sum())

    (dense,) = testing.poisoned(lambda: (ops.unpack(words, spill, n, compression),))
    testing.assert_same(dense, gate.to(x.dtype), "unpack")

    up = torch.nn.functional.linear(x.double(), w_up.double(), None if b_up is None else b_up.double())
    y, l1 = testing.poisoned(lambda: ops.up_down(x, words, spill, w_up, w_down, b_up, b_down, compression))
    testing.assert_same(y, testing.exact_output(problem), "up_down y")
    testing.assert_same(l1, (gate * up).abs().sum(1).float(), "up_down l1")

    y, l1 = testing.poisoned(lambda: ops.up_down(None, words, spill, None, w_down, None, b_down, compression))
    testing.assert_same(y, testing.exact_output(problem, gated=False), "down y")
    testing.assert_same(l1, gate.sum(1).float(), "down l1")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("compression", [2, 8])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_tiles_of_all_sizes_give_the_same_bits(dtype: torch.dtype, compression: int, bias: bool) -> None:
    """Real numbers, a partial last tile in both directions, several tiles per CTA, and full row-tiles."""
    m, n, k = 1003, 16392, 136
    problem = testing.make("uniform29", m, k, n, dtype=dtype)
    b_gate = torch.randn(n if bias else 0, device="cuda").to(dtype) / 8
    # a band of neurons that fire for a band of tokens
    problem.x[300:340, 0] = 64.0
    problem.w_gate[512:1100, 0] = 1.0
    width, family = geometry.words_per_tile(compression), tuning.family(0)
    choices, ctas = specs.PORTABLE_GATE_TOKENS, device.sm_count(0)
    if family == specs.SM90:
        choices, ctas = specs.GATE_TOKENS, ctas // 2

    def pack(tokens: int) -> tuple[Tensor, ...]:
        packed = outputs(problem.x, problem.w_gate, compression)
        spec = specs.GatePackSpec(str(dtype).removeprefix("torch."), tokens, family=family)
        library.launch(spec, problem.x, problem.w_gate, b_gate, *packed, width, 0, ctas)
        return packed

    first, *others = (testing.poisoned(lambda tokens=tokens: pack(tokens)) for tokens in choices)
    assert int(first[2][:, :, 1].sum()) > 40
    for other in others:
        testing.assert_packed_same(other, first, n, compression)


# One dimension at a time from its list of edges, then the corners where several meet.
SHAPES = [
    *((m, 72, 264) for m in UGLY_M),
    *((m, 896, 5632) for m in (1, 65, 129)),
    *((129, 64, n) for n in (8, 16, 248, 256, 264, 512, 5632, 8192)),
    *((65, k, 264) for k in UGLY_K),
    *((7, k, 520) for k in (16, 136, 256, 264, 1032, 1544, 3072, 5120)),
    (1, 2048, 8192),
    (7, 8192, 8192),
    (63, 4096, 5632),
    (127, 8, 8),
    (128, 8, 5632),
    (129, 2048, 5632),
    (257, 2048, 5632),
    (257, 4096, 264),
    (1000, 512, 1536),
]
VARIANTS = [(BF16, 8), (FP16, 4), (BF16, 2), (FP16, 8), (BF16, 4), (FP16, 2)]


@pytest.mark.parametrize(
    ("shape", "dtype", "compression", "biases"),
    [
        # two variants at each shape, one with biases
        (shape, *VARIANTS[(i + j) % 6], ("", "gate up down")[(i + j) % 2])
        for i, shape in enumerate(SHAPES)
        for j in range(2)
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value) or "none",
)
@pytest.mark.usefixtures("row_kernel")
def test_shapes(shape: tuple[int, int, int], dtype: torch.dtype, compression: int, biases: str) -> None:
    m, k, n = shape
    check(testing.integer_problem(m, k, n, density=0.1, biases=biases, device="cuda", dtype=dtype), compression)


@pytest.mark.parametrize("density", [0, 0.02, 0.3, 1])
@pytest.mark.parametrize(("dtype", "compression"), VARIANTS)
@pytest.mark.usefixtures("row_kernel")
def test_densities(density: float, dtype: torch.dtype, compression: int) -> None:
    """No positive gate, few, many, all; the last tile is partial."""
    problem = testing.integer_problem(129, 896, 2056, density=density, device="cuda", dtype=dtype)
    share = float((testing.float64_gate(problem) > 0).double().mean())
    assert share == density if density in (0, 1) else 0.3 * density < share < 2 * density
    check(problem, compression)


@pytest.mark.parametrize("biases", ["gate", "up", "down", "up down"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.usefixtures("row_kernel")
def test_each_bias(biases: str, dtype: torch.dtype) -> None:
    """One projection has a bias: gates of rows and neurons past the end of a tile would be positive."""
    check(testing.integer_problem(65, 200, 264, density=1, biases=biases, device="cuda", dtype=dtype), 8)


@pytest.mark.parametrize("compression", [2, 8])
@pytest.mark.usefixtures("row_kernel")
def test_most_neurons(compression: int) -> None:
    """N = 65,536: the largest neuron index has all 16 bits set, so the word that holds it can be negative."""
    problem = testing.integer_problem(65, 64, 65536, density=0.06, device="cuda")
    gate = testing.float64_gate(problem)
    assert bool((gate[:, -256:] != 0).any())
    check(problem, compression)
    last = torch.zeros(3, 65536, dtype=torch.int64)
    last[0, 65535], last[1, 0], last[2, 65528:] = 5, 6, 7
    check(testing.pattern_problem(last, 64, device="cuda"), compression)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_cpu_operators_agree(dtype: torch.dtype) -> None:
    """The other operators against their CPU implementations, from the same packed gate."""
    problem = testing.integer_problem(130, 264, 776, density=0.1, biases="gate up down", dtype=dtype)
    on_gpu = problem.to("cuda")
    for compression in (2, 4, 8):
        words, spill, _ = ops.gate_pack(problem.x, problem.w_gate, problem.b_gate, compression)
        packed = words.cuda(), spill.cuda()
        assert_all_same(
            ops.up_down(on_gpu.x, *packed, on_gpu.w_up, on_gpu.w_down, on_gpu.b_up, on_gpu.b_down, compression),
            ops.up_down(problem.x, words, spill, *problem[2:4], *problem[5:], compression),
        )
        assert_all_same(
            ops.up_down(None, *packed, None, on_gpu.w_down, None, on_gpu.b_down, compression),
            ops.up_down(None, words, spill, None, problem.w_down, None, problem.b_down, compression),
        )
        n = problem.w_gate.shape[0]
        testing.assert_same(ops.unpack(*packed, n, compression), ops.unpack(words, spill, n, compression))


def assert_all_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        testing.assert_same(ours, theirs)


def test_gate_rounds_to_nearest_even() -> None:
    """Gates of 9 bits, one more than bf16 has: ties go to even, in the packed value and in all results."""
    sums = torch.arange(256, 320)
    w_gate = torch.zeros(64, 64)
    w_gate[:, 0], w_gate[:, 1] = 256, sums - 256
    x = torch.zeros(3, 64)
    x[:, :2] = 1
    x[1] *= -1
    x, w_gate = x.to("cuda", BF16), w_gate.to("cuda", BF16)
    expected = torch.stack([sums, 0 * sums, sums]).to(BF16)
    assert not torch.equal(expected[0].long(), sums)
    for compression in (2, 8):
        packed = ops.gate_pack(x, w_gate, None, compression)
        testing.assert_packed_same(packed, ops.gate_pack(x.cpu(), w_gate.cpu(), None, compression), 64, compression)
        testing.assert_same(ops.unpack(*packed[:2], 64, compression), expected)


def test_what_rounds_to_zero_is_no_nonzero() -> None:
    """fp16 at its limits: half the smallest number ties to 0 and is not counted; beyond the largest is infinity."""
    w_gate = torch.zeros(16, 64)
    exponents = [-8, -9, -10, -11, -12, -13, -14]
    w_gate[:7, 0] = torch.tensor([2.0**e for e in exponents])
    w_gate[7, 0] = 1.5 * 2.0**-13
    w_gate[8, 1], w_gate[9, 1] = 256, 255
    x = torch.zeros(65, 64)
    x[:, 0], x[:, 1] = 2.0**-12, 256
    expected = [2.0**-20, 2.0**-21, 2.0**-22, 2.0**-23, 2.0**-24, 0, 0, 2.0**-24, torch.inf, 65280.0, *[0] * 6]
    packed = ops.gate_pack(x.to("cuda", FP16), w_gate.to("cuda", FP16), None, 8)
    testing.assert_packed_same(packed, ops.gate_pack(x.to(FP16), w_gate.to(FP16), None, 8), 16, 8)
    testing.assert_same(ops.unpack(*packed[:2], 16, 8), torch.tensor(expected).to(FP16).expand(65, 16))
    assert int(packed[2][:, :, 0].sum()) == 65 * 8


@pytest.mark.parametrize(
    ("dtype", "shifts"),
    # beyond 65,504 an fp16 hidden value is infinite, here as in dense PyTorch
    [(FP16, (-14, 14)), (FP16, (-24, 14)), (BF16, (60, -60)), (BF16, (-60, 60))],
)
@pytest.mark.parametrize("mixed", [False, True])
def test_hidden_state_keeps_its_range(dtype: torch.dtype, shifts: tuple[int, int], mixed: bool) -> None:
    """Up and down weights times powers of two that cancel: the hidden state lies far outside fp16, the output does not.

    ``mixed``: in every second neuron alone, so that large and small ones meet in one sum.
    """
    problem = testing.integer_problem(130, 264, 776, density=0.1, device="cuda", dtype=dtype)
    up, down = (torch.full((776, 1), 2.0**shift, dtype=dtype, device="cuda") for shift in shifts)
    if mixed:
        up[::2] = down[::2] = 1
    scaled = problem._replace(w_up=problem.w_up * up, w_down=problem.w_down * down)
    testing.assert_same(testing.sparse_output(scaled), testing.exact_output(scaled))
