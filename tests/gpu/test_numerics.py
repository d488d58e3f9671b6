"""Real numbers: as close to float64 as dense PyTorch is, and the same bits on every run."""

from pathlib import Path

import pytest
import torch

from twell import ops, testing, tuning

BF16, FP16 = torch.bfloat16, torch.float16


def check(problem: testing.FFN, compression: int) -> None:
    for gated in (True, False):
        comparison = testing.compare(
            problem, testing.sparse_output(problem, gated=gated, compression=compression), gated=gated
        )
        assert comparison.ok, f"gated={gated}: {comparison}"


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_error_budget(workload: str, dtype: torch.dtype, real_layers: Path | None) -> None:
    """Every workload, with 2,048 of its tokens, at every compression."""
    problem = testing.load(workload, m=2048, dtype=dtype, real_layers=real_layers)
    for compression in (2, 4, 8):
        check(problem, compression)


@pytest.mark.parametrize("name", ["topic29", "dense911"])
def test_error_budget_of_a_full_batch(name: str) -> None:
    check(testing.load(name), 8)


@pytest.mark.parametrize(("k", "n"), [(896, 4864), (4096, 11008), (8192, 2048)])
def test_error_budget_of_other_models(k: int, n: int) -> None:
    check(testing.make("topic128", 1024, k, n), 8)


def test_error_budget_with_biases() -> None:
    problem = testing.make("skew29", 2048)
    generator = torch.Generator("cuda").manual_seed(5)
    gate, up, down = (
        0.5 * torch.randn(size, generator=generator, device="cuda").to(BF16) for size in (5632, 5632, 2048)
    )
    check(problem._replace(b_gate=gate, b_up=up, b_down=down), 8)


@pytest.mark.parametrize("name", ["uniform29", "topic128"])
def test_statistics_are_the_true_counts(name: str) -> None:
    """stats against counts and overflows taken from the unpacked gate, 8 rows at a time."""
    problem = testing.make(name, 2000)
    for compression in (2, 8):
        words, spill, stats = ops.gate_pack(problem.x, problem.w_gate, None, compression)
        nonzero = ops.unpack(words, spill, 5632, compression) != 0
        counts = nonzero.view(2000, 22, 256).sum(2).view(250, 8, 22)
        assert torch.equal(stats[:, :, 0].long(), counts.sum(1))
        assert torch.equal(stats[:, :, 1].long(), (counts > 256 // compression - 1).sum(1))


@pytest.mark.parametrize("busy", [False, True], ids=["alone", "busy"])
@pytest.mark.parametrize(("name", "m"), [("topic128", 2048), ("skew29", 1000)])
def test_a_thousand_runs_give_the_same_bits(name: str, m: int, busy: bool) -> None:
    """1,000 runs of every operator; ``busy``: beside matrix products on another stream, so that CTAs start unevenly."""
    problem = testing.make(name, m)
    x, w_gate, w_up, w_down = problem[:4]

    def run() -> list[torch.Tensor]:
        words, spill, stats = ops.gate_pack(x, w_gate, None, 8)
        gated = ops.up_down(x, words, spill, w_up, w_down, None, None, 8)
        non_gated = ops.up_down(None, words, spill, None, w_down, None, None, 8)
        return [words, stats, *gated, *non_gated, ops.unpack(words, spill, w_gate.shape[0], 8)]

    first = run()
    different = torch.zeros(len(first), dtype=torch.int64, device="cuda")
    other = torch.cuda.Stream()
    noise = torch.randn(1024, 1024, device="cuda", dtype=BF16)
    torch.cuda.synchronize()
    for _ in range(1000):
        if busy:
            with torch.cuda.stream(other):
                torch.mm(noise, noise)
        different += torch.stack(
            [
                (a.view(torch.int16) != b.view(torch.int16)).any().long()  # bits, not values
                for a, b in zip(run(), first, strict=True)
            ]
        )
    assert different.tolist() == [0] * len(first)


@pytest.mark.parametrize(
    ("strategy", "m", "own"),
    [
        *(("row", 8, 1), ("row", 256, 1), ("row", 520, 8)),
        *(("union", 384, 16), ("union", 1024, 16), ("union", 1152, 128), ("training", 384, 128)),
    ],
)
def test_bits_of_a_token_depend_on_its_own_group_alone(strategy: str, m: int, own: int) -> None:
    """Other tokens in the call do not change the first group's bits; nor does their number, beyond few tokens."""
    problem = testing.make("topic29", 2048)
    dy = testing.real_upstream(problem)

    def first(order: torch.Tensor) -> torch.Tensor:
        part = problem._replace(x=problem.x[order])
        if strategy == "training":
            return testing.sparse_gradients(part, dy[order], strategy="union")["x"][:own]
        return testing.sparse_output(part, strategy=strategy)[:own]

    order = torch.arange(m, device="cuda")
    expected = first(order)
    testing.assert_same(first(torch.cat([order[:own], order[own:].flip(0)])), expected)
    if m > (tuning.UNION_TILE_TOKENS if strategy == "union" else 512):
        testing.assert_same(first(torch.arange(2048, device="cuda")), expected)
