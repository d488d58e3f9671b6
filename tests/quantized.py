"""Rows for `quantize_gate`, and what it must make of them, whatever sums its rotation is made of."""

import torch
from torch import Tensor

from twell.ops import reference
from twell.runtime import screen

# Most that a rotated value may be off, in units of the scale. A row is off by less than ROTATION of its norm, which is
# up to sqrt(K) times 126.5 units, and a single value by far less.
OFF = 2.0**-8


def hostile(r: int, k: int) -> Tensor:
    """Rows of many kinds: normal, with outliers, constant, one value, zeros, tiny, huge, not finite, denormal."""
    rows = torch.randn(r, k)
    kind = torch.arange(r) % 11
    rows[kind == 1, k // 2] *= 1000
    rows[kind == 2] = 1.5
    rows[kind == 3] = 0
    rows[kind == 3, 1] = -2.0
    rows[kind == 4] = 0
    rows[kind == 5] *= 1e-20
    rows[kind == 6] *= 1e30
    rows[kind == 7, 3] = torch.inf
    rows[kind == 8, k - 1] = torch.nan
    rows[kind == 9] *= 2.0 ** -torch.randint(0, 100, (k,))
    # tensor cores must not take these for rows of zeros
    rows[kind == 10] *= 1e-39
    return rows


def assert_right(found: tuple[Tensor, ...], rows: Tensor, weights: bool) -> None:
    """Compare q, scale, spread and offset of rows [R, K] with the float64 transform and the dithers."""
    q, scale, spread, offset = (t.cpu().double() for t in found)
    k, rows = rows.shape[1], rows.cpu()
    right = reference.quantize_gate(rows, weights)
    own, other = reference.dithers(k, weights)

    zero, outside = right[2] == 0, ~right[2].isfinite()
    assert torch.equal(spread == 0, zero), f"rows of zeros: got {spread[zero]}"
    assert torch.equal(spread.isfinite(), ~outside), f"rows that are not screened: got {spread[outside]}"
    apart = zero | outside
    assert (scale[apart] == 1).all()
    assert not q[apart].any()
    assert not offset[apart].any()
    q, scale, spread, offset, rows = (t[~apart] for t in (q, scale, spread, offset, rows))

    exact = reference.rotate(rows, torch.float64)
    largest, norm = exact.abs().amax(1), exact.norm(dim=1) / scale
    assert ((scale * screen.LEVELS - largest).abs() <= largest * OFF / screen.LEVELS).all()
    dithered = exact / scale[:, None] + (own + 0.5)
    wrong = (q < (dithered - OFF).floor()) | (q > (dithered + OFF).floor())
    assert not wrong.any(), f"q: got {q[wrong][0]}, expected the floor of {dithered[wrong][0]}, at {wrong.nonzero()[0]}"
    # few are off by so much as to differ from those of a CPU, except where ties are common
    different = (q != right[0][~apart]) & ((dithered - dithered.round()).abs() > OFF / 2)
    assert different.sum() <= q.numel() * OFF / 8
    assert (spread >= norm * (1 + screen.ROTATION) + screen.grid_error(k)).all()
    assert (spread <= norm * (1 + 2 * screen.SPREAD) + 2 * screen.grid_error(k)).all()
    # thirteen roundings of the sums and one of the result, of sums of up to 127 / 2 per column
    assert ((offset - q @ other).abs() <= 14 * 2.0**-24 * 127 / 2 * k).all()
