"""The operators of training on the CPU: the hybrid format, results, fakes, launches."""

from typing import Any

import pytest
import torch
from torch import Tensor

from twell import ops, testing
from twell.ops import hybrid, library
from twell.runtime import geometry

BF16 = torch.bfloat16
GATED = pytest.mark.parametrize("gated", [True, False])


# The format of N = 264 holds 64 non-zeros per token, so a density of 1 does not fit.
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
    dy = torch.randint(-2, 3, p.x.shape).to(p.x.dtype)
    return dy, torch.tensor(l1)


def backward(p: testing.FFN, kept: Tensor, dy: Tensor, dl1: Tensor, *asked: bool) -> tuple[Tensor, ...]:
    return ops.hybrid_backward(dy, dl1, *p[:6], kept, *(asked or (True, True)))


def up_of(kept: hybrid.Kept, m: int, n: int) -> Tensor:
    return hybrid.values(kept.entries, geometry.hybrid_capacity(m, n), BF16)


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
    # all neurons of the first token, whose place in its tile is 0
    entries = parts(kept, p).entries[: hybrid.sizes(kept, 4)[-1]]
    assert int((entries >> 6 & 127 == 0).sum()) == 72
    assert y[0].isnan().all()
    assert l1.isnan()
    assert y[2:].isfinite().all()
    dx, dw_gate, *_ = backward(p, kept, *upstream(p))
    assert dx[0].isnan().all()
    assert dx[2:].isfinite().all()
    assert dw_gate.isnan().any()


def test_rows_beyond_32_bit_offsets_are_copied() -> None:
    near = torch.empty_strided((500_000, 8), (65536, 1), dtype=BF16, device="meta")
    far = torch.empty_strided((600_000, 8), (65536, 1), dtype=BF16, device="meta")
    assert library.rows(near) is near
    assert library.rows(far).stride() == (8, 1)
    with pytest.raises(NotImplementedError, match=r"at most 34359738368 values, got 34359738376"):
        library.rows(torch.empty((2**32 + 1, 8), dtype=BF16, device="meta"))
