"""The operators of training on the CPU: the hybrid format, results, fakes, launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from twell import ops, testing
from twell._runtime import geometry
from twell.ops import hybrid, library

BF16 = torch.bfloat16
GATED = pytest.mark.parametrize("gated", [True, False])
NAMES = ("dx", "dw_gate", "dw_up", "dw_down", "db_gate", "db_up")
# N = 264 holds 64 non-zeros a token: a density of 1 does not fit
SHAPES = [
    (0, 264, 16, 0.1),
    (1, 8, 8, 0.5),
    (5, 264, 16, 0.05),
    (129, 72, 8, 0.3),
    (260, 136, 8, 0.1),
    (3, 264, 16, 1.0),
]


def problem(
    m: int, n: int, k: int, density: float, *, gated: bool = True, biases: str = "gate up down", dtype: Any = BF16
) -> testing.FFN:
    """Small integers; without gate there is neither up projection nor its bias."""
    ffn = testing.integer_problem(m, k, n, density=density, biases=biases, dtype=dtype)
    return ffn if gated else ffn._replace(w_up=None, b_up=None)


def forward(p: testing.FFN, compression: int = 8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, l1, nonzeros, kept = ops.hybrid_forward(*p, compression)
    return y, l1, nonzeros, kept


def parts(kept: Tensor, p: testing.FFN) -> hybrid.Kept:
    return hybrid.parts(kept, p.x.shape[0], p.w_gate.shape[0])


def upstream(p: testing.FFN, l1: float = 0.5) -> tuple[Tensor, Tensor]:
    """Return integers for dy, and dl1 in the dtype that goes with x's."""
    dy = torch.randint(-2, 3, p.x.shape).to(p.x.dtype)
    return dy, torch.tensor(l1, dtype=hybrid.accumulator(p.x.dtype))


def backward(p: testing.FFN, kept: Tensor, dy: Tensor, dl1: Tensor, *asked: bool) -> tuple[Tensor, ...]:
    return ops.hybrid_backward(dy, dl1, *p[:6], kept, *(asked or (True, True)))


def arguments_of_all(p: testing.FFN) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return (operator, arguments) of the three operators; main tensors have three layouts."""
    *_, kept = forward(p)
    saved = (*upstream(p), *p[:6], kept)
    n, k = p.w_gate.shape
    mains = [torch.ones(n, k), torch.ones(k, n).t(), torch.ones(n, k + 8)[:, :k]]
    if p.w_up is None:
        mains[1] = None
    return [
        (ops.hybrid_forward, (*p, 8)),
        (ops.hybrid_backward, (*saved, True, True)),
        (ops.hybrid_backward_accumulate, (*saved, *mains, True)),
    ]


# The format


def read(kept: hybrid.Kept, m: int, n: int) -> tuple[dict[tuple[int, int], int], list[tuple[int, int]]]:
    """{(token, neuron): value bits} and the entries' places in order, checking all that the format promises."""
    tiles, columns = -(-m // 128), -(-n // 64)
    lengths = kept.sizes.tolist()
    assert (kept.neurons.shape, kept.chunks.shape, len(lengths)) == (
        (tiles, 64 * columns),
        (tiles, columns + 1),
        tiles + 1,
    )
    values, order, at = {}, [], 0
    for tile in range(tiles):
        row = [int(v) & 0xFFFF for v in kept.neurons[tile]]
        length, padded = lengths[tile], -(-lengths[tile] // 64) * 64
        neurons = row[:length]
        assert neurons == sorted(set(neurons))
        assert all(neuron < n for neuron in neurons)
        assert set(row[length:padded]) <= {neurons[-1]} if neurons else padded == 0
        bounds = kept.chunks[tile].tolist()
        assert bounds[0] == at
        assert all(bound == bounds[-1] for bound in bounds[padded // 64 :])
        seen = set()
        for chunk in range(columns):
            last = -1
            assert bounds[chunk] <= bounds[chunk + 1]
            for word in kept.entries[bounds[chunk] : bounds[chunk + 1]].tolist():
                place, low = word >> 6 & 127, word & 8191
                assert low > last, "entries of a chunk ascend by token, then rank"
                last = low
                rank = 64 * chunk + (word & 63)
                assert rank < length
                seen.add(rank)
                token = 128 * tile + place
                assert token < m
                values[token, row[rank]] = word >> 16 & 0xFFFF
                order.append((token, row[rank]))
        assert len(seen) == length, "every neuron of a list is active in its tile"
        at = bounds[-1]
    assert len(values) == len(order) == at == lengths[-1] <= m * min(n, max(64, n // 36)) + 7
    return values, order


def up_of(kept: hybrid.Kept, m: int, n: int) -> Tensor:
    return hybrid.values(kept.entries, geometry.hybrid_capacity(m, n), BF16, 1)[0]


def test_more_non_zeros_than_fit_are_only_counted() -> None:
    p = problem(3, 264, 16, 1.0)
    *_, nonzeros, kept = forward(p)
    assert parts(kept, p).sizes.tolist() == hybrid.sizes(kept, 3).tolist() == [0, 3 * 264]
    assert int(nonzeros) == 3 * 264 > geometry.hybrid_capacity(3, 264)
    # as many as fit are no overflow
    exact = testing.pattern_problem((torch.arange(264) % 4 == 0).int()[:256].repeat(3, 1), 16)
    kept = parts(forward(exact)[-1], exact)
    assert int(kept.sizes[-1]) == geometry.hybrid_capacity(3, 256) == 3 * 64
    assert bool((kept.entries[: 3 * 64] != 0).all())


@pytest.mark.parametrize(("gated", "held"), [(True, 8), (False, 16), (True, 1000)])
def test_room_for_fewer_non_zeros(gated: bool, held: int) -> None:
    """The entries take what was asked for, at most the default."""
    p = problem(130, 264, 16, 0.07, gated=gated)
    y, l1, nonzeros, kept = forward(p)
    assert 8 * 130 < nonzeros < 24 * 130
    fewer = ops.hybrid_forward(*p, 8, held)
    for actual, expected in zip(fewer[:3], (y, l1, nonzeros), strict=True):
        assert torch.equal(actual, expected)
    capacity = min(-(-130 * held // 8) * 8, geometry.hybrid_capacity(130, 264))
    assert len(parts(fewer[3], p).entries) == geometry.hybrid_words(capacity, 2 * gated)
    dy, dl1 = upstream(p)
    ours, theirs = (backward(p, k, dy, dl1) for k in (fewer[3], kept))
    # only where a batch fits do rare neurons add what rounding left of their coefficients
    for actual, expected in zip(ours[: 6 if nonzeros <= capacity else 1], theirs):
        assert torch.equal(actual, expected)
    with pytest.raises(ValueError, match="held must be non-zeros per token, or 0 for the most, got -1"):
        ops.hybrid_forward(*p, 8, -1)


@GATED
@pytest.mark.parametrize("density", [0.1, 1.0])
def test_backward_reads_nothing_undefined(gated: bool, density: float) -> None:
    p = problem(130, 264, 16, density, gated=gated)
    *_, kept = forward(p)
    dy, dl1 = upstream(p)
    expected = backward(p, kept, dy, dl1)
    whole, total = kept.clone(), int(hybrid.sizes(kept, 130)[-1])
    # what lies between the parts, too
    lies = [t.storage_offset() + t.nbytes // 4 for t in parts(kept, p)]
    for end in lies:
        whole[end : -(-end // 64) * 64] = -1
    spoilt = parts(whole, p)
    if density == 1:
        for tensor in (spoilt.entries, spoilt.neurons, spoilt.chunks, spoilt.sizes[:-1], spoilt.popularity):
            tensor.fill_(-1)
    else:
        spoilt.entries[total : geometry.hybrid_capacity(130, 264)] = -1
        if gated:
            up_of(spoilt, 130, 264)[total:] = float("nan")
        for row, length in zip(spoilt.neurons, spoilt.sizes.tolist()):
            row[-(-length // 64) * 64 :] = -1
    for actual, answer in zip(backward(p, whole, dy, dl1), expected, strict=True):
        assert torch.equal(actual, answer)


def test_nan_and_infinity_are_non_zeros() -> None:
    p = problem(4, 72, 16, 0.1, biases="")
    p.x[0, 0], p.x[1, 0] = float("nan"), float("inf")
    p.w_gate[:, 0] = 1
    y, l1, _, kept = forward(p)
    values, _ = read(parts(kept, p), 4, 72)
    assert sum(token == 0 for token, _ in values) == 72
    assert y[0].isnan().all()
    assert l1.isnan()
    assert y[2:].isfinite().all()
    dx, dw_gate, *_ = backward(p, kept, *upstream(p))
    assert dx[0].isnan().all()
    assert dx[2:].isfinite().all()
    assert dw_gate.isnan().any()


@pytest.mark.parametrize(
    ("gated", "dtype", "density"), [(True, torch.float32, 0.1), (False, torch.float64, 0.1), (True, torch.float64, 1.0)]
)
def test_wider_values_are_kept_beside_the_up_projections(gated: bool, dtype: torch.dtype, density: float) -> None:
    p = problem(130, 264, 16, density, gated=gated, dtype=dtype)
    capacity = geometry.hybrid_capacity(130, 264)
    y, l1, nonzeros, kept = forward(p)
    whole, kept = kept, parts(kept, p)
    assert len(kept.entries) == geometry.hybrid_words(capacity, (1 + gated) * dtype.itemsize)
    assert (y.dtype, l1.dtype) == (dtype, dtype)
    narrow = parts(forward(testing.FFN(*(None if t is None else t.to(BF16) for t in p)))[-1], p)
    for name in ("neurons", "chunks", "sizes", "popularity"):
        assert torch.equal(getattr(kept, name), getattr(narrow, name))
    if density < 1:
        total = int(nonzeros)
        assert torch.equal(kept.entries[:total], narrow.entries[:total] & 0xFFFF)
        gates = hybrid.values(kept.entries, capacity, dtype, 1 + gated)[-1]
        assert torch.equal(gates[:total], (narrow.entries[:total] >> 16).short().view(BF16).to(dtype))
    dy, dl1 = upstream(p)
    leaves = [None if t is None else t.double().clone().requires_grad_() for t in p]
    hidden = torch.relu(leaves[0] @ leaves[1].t() + leaves[4])
    if gated:
        hidden = hidden * (leaves[0] @ leaves[2].t() + leaves[5])
    torch.autograd.backward([hidden @ leaves[3] + leaves[6], hidden.abs().sum()], [dy.double(), dl1.double()])
    assert torch.equal(y.double(), (hidden @ leaves[3] + leaves[6]).detach())
    assert l1 == hidden.abs().sum()
    for actual, leaf in zip(backward(p, whole, dy, dl1), leaves[:6], strict=True):
        assert torch.equal(actual.double(), leaf.grad) if leaf is not None else actual.shape == (0,)


def test_offsets_beyond_32_bits_are_refused() -> None:
    hybrid.require_offsets(6_882_960, 5632)
    with pytest.raises(NotImplementedError, match=r"with 5632 neurons a training step takes at most 6882960 tokens"):
        hybrid.require_offsets(6_882_968, 5632)


def test_rows_beyond_32_bit_offsets_are_copied() -> None:
    near = torch.empty_strided((500_000, 8), (65536, 1), dtype=BF16, device="meta")
    far = torch.empty_strided((600_000, 8), (65536, 1), dtype=BF16, device="meta")
    assert library.rows(near) is near
    assert library.rows(far).stride() == (8, 1)
    with pytest.raises(NotImplementedError, match=r"at most 34359738368 values, got 34359738376"):
        library.rows(torch.empty((2**32 + 1, 8), dtype=BF16, device="meta"))


# The contract with torch
