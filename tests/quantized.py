"""What `quantize_gate` must be, whatever sums its rotation is made of."""

from __future__ import annotations

import torch
from torch import Tensor

from twell import reference
from twell._runtime import screen

# Most that a rotated value may be off, in units of the scale. A row is off by less than ROTATION of its norm, which is
# up to sqrt(K) times 126.5 units, and a single value by far less.
OFF = 2.0**-8


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
