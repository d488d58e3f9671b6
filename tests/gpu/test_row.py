"""Strategy "row" alone: the bits of the gate's format, tiles of its GEMM, clusters that share a token."""

import pytest
import torch
from torch import Tensor

from tests.gpu.strategies import BIASES, CUDA, DTYPES, FP16, exact, pack
from twell import ops, testing
from twell.choose import tuning
from twell.ops.gate_pack import outputs
from twell.runtime import device, geometry, program, specs
from twell.testing import FFN

SOME = pytest.mark.parametrize("m", [1, 3, 8, 17, 64, 65, 130, 256])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("compression", [2, 8])
@DTYPES
def test_tiles_of_all_sizes_give_the_same_bits(dtype: torch.dtype, compression: int, bias: bool) -> None:
    """Real numbers, a partial last tile in both directions, several tiles per CTA, and full row-tiles."""
    if tuning.family(0) != specs.SM90:
        pytest.skip("the gate of other GPUs is PyTorch's product")
    m, n, k = 1003, 16392, 136
    problem = testing.make("uniform29", m, k, n, dtype=dtype)
    b_gate = torch.randn(n if bias else 0, device=CUDA).to(dtype) / 8
    # a band of neurons that fire for a band of tokens
    problem.x[300:340, 0] = 64.0
    problem.w_gate[512:1100, 0] = 1.0
    width, clusters = geometry.words_per_tile(compression), device.sm_count(0) // 2

    def by_tiles(tokens: int) -> tuple[Tensor, ...]:
        packed = outputs(problem.x, problem.w_gate, compression)
        spec = specs.GatePackSpec(str(dtype).removeprefix("torch."), tokens)
        zeroed = torch.ones(5, dtype=torch.int32, device=CUDA)
        program.launch(spec, problem.x, problem.w_gate, b_gate, *packed, zeroed, width, 0, clusters)
        assert not zeroed.any()
        return packed

    first, *others = (testing.poisoned(lambda tokens=tokens: by_tiles(tokens)) for tokens in specs.GATE_TOKENS)
    # the band spilled
    assert int(first[2][:, :, 1].sum()) > 40
    for other in others:
        testing.assert_packed_same(other, first, n, compression)


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


@pytest.mark.parametrize(
    ("m", "k", "neurons"), [(m, *sizes) for m in (33, 66) for sizes in ((2048, 5632), (4096, 2056))]
)
def test_clusters_share_a_token(m: int, k: int, neurons: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact whatever the number of helpers; their sums depend on how the non-zeros are shared, and on nothing else."""
    problem = testing.integer_problem(m, k, neurons, density=0.3, biases=BIASES, device=CUDA)
    random = testing.make("dense911", m, k, neurons)
    results = {}
    # more pieces of a token than a thread loads at a time, and more helpers than tokens
    for helpers in (1, 2, 16, 200):
        monkeypatch.setattr(tuning, "token_helpers", lambda *_, helpers=helpers: helpers)
        # programs keep what they were made with
        program.forget()
        for gated in (True, False):
            y = testing.sparse_output(problem, gated=gated, strategy="row")
            testing.assert_same(y, exact(problem, "row", gated))
        runs = [testing.sparse_output(random, strategy="row") for _ in range(20)]
        for run in runs[1:]:
            testing.assert_same(run, runs[0], f"{helpers} helpers")
        results[helpers] = runs[0]
    monkeypatch.undo()
    program.forget()
    if tuning.family(0) == specs.PORTABLE:
        pytest.skip("how sums are shared shows in one 16-bit result of thousands, there maybe in none")
    # so they did share
    assert not torch.equal(results[1], results[200])
