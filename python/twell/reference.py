"""Definitions of all operators, in few lines: slow, obvious, for tests and readers. CPU tensors, no gradients.

Shapes and dtypes are those of ``torch.ops.twell.*``: tokens [M, K], weights [N, K], bfloat16 or float16.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from twell._runtime import geometry, screen


def gate(
    x: Tensor, w_gate: Tensor, bias: Tensor | None, threshold: float | Tensor = 0.0, k: int | None = None
) -> Tensor:
    """relu(x @ w_gate^T + bias) [M, N], accumulated in fp32, rounded once to x's dtype. NaN stays NaN.

    Values up to ``threshold``, a number or one for each neuron [N], rounded to x's dtype, are 0. With ``k`` all but the
    k largest of each token are.
    """
    accumulator = x.float() @ w_gate.float().t()
    values = (accumulator if bias is None else accumulator + bias.float()).to(x.dtype)
    values = torch.where(values <= torch.as_tensor(threshold, dtype=x.dtype, device=x.device), 0, values)
    return values if k is None else largest(values, k)


def ranked(row: Tensor) -> list[int]:
    """The neurons of a token by their gates [N], the largest first: NaN is the largest, equal ones are by neuron."""
    values = row.tolist()
    return sorted(range(len(values)), key=lambda i: (0, 0, i) if math.isnan(values[i]) else (1, -values[i], i))


def largest(values: Tensor, k: int) -> Tensor:
    """Gates [M, N] that are after ReLU, with 0 for all but the k largest of each token."""
    kept = torch.zeros_like(values)
    for row in range(len(values)):
        for neuron in ranked(values[row])[:k]:
            kept[row, neuron] = values[row, neuron]
    return kept


def top_k(dense: Tensor, k: int) -> Tensor:
    """levels int32 [M, 2] of gates [M, N] before ReLU: the bits of the k-th largest, and the last neuron with it kept.

    They are 0 and -1 where fewer than k are positive. The bits of NaN are 0x7FFF.
    """
    levels = torch.zeros(len(dense), 2, dtype=torch.int32, device=dense.device)
    for row in range(len(dense)):
        at = ranked(dense[row])[k - 1] if k <= dense.shape[1] else None
        if at is None or dense[row, at] <= 0:
            levels[row, 1] = -1
            continue
        levels[row, 0] = 0x7FFF if dense[row, at].isnan() else int(dense[row, at].view(torch.int16))
        levels[row, 1] = at
    return levels


def window(gate: Tensor, level: Tensor, below: Tensor, above: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """near uint8 [M, N], counts int32 [3, N] and the gates [M, N] above the level, of bounds of neurons [N].

    near is 1 between the bounds. Counts are of gates that are near, near and above the level, above the level.
    """
    near, kept = torch.zeros_like(gate, dtype=torch.uint8), gate.clone()
    counts = torch.zeros(3, gate.shape[1], dtype=torch.int32, device=gate.device)
    for row in range(len(gate)):
        for neuron, value in enumerate(gate[row].tolist()):
            inside = float(below[neuron]) < value < float(above[neuron])
            silent = value <= float(level[neuron])
            near[row, neuron] = inside
            counts[:, neuron] += torch.tensor([inside, inside and not silent, not silent], device=gate.device)
            if silent:
                kept[row, neuron] = 0
    return near, counts, kept


def gate_pack(
    x: Tensor,
    w_gate: Tensor,
    bias: Tensor | None,
    compression: int,
    threshold: float | Tensor = 0.0,
    k: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """words int32 [M, T*W], spill [M, T*256], stats int32 [ceil(M/8), T, 2]; unused words and spill are 0."""
    dense = gate(x, w_gate, bias, threshold, k)
    m, n = dense.shape
    tiles, width = geometry.tiles(n), geometry.words_per_tile(compression)
    words = torch.zeros(m, tiles * width, dtype=torch.int32, device=x.device)
    spill = torch.zeros(m, tiles * geometry.TILE, dtype=x.dtype, device=x.device)
    stats = torch.zeros(-(-m // geometry.STATS_ROWS), tiles, 2, dtype=torch.int32, device=x.device)
    for row in range(m):
        for tile in range(tiles):
            values = dense[row, tile * geometry.TILE : (tile + 1) * geometry.TILE]
            active = [i for i, value in enumerate(values.tolist()) if value != 0]
            words[row, tile * width] = len(active)
            for place, i in enumerate(active[: width - 1], start=1):
                bits = int(values[i].view(torch.int16))
                words[row, tile * width + place] = bits << 16 | tile * geometry.TILE + i
            if len(active) > width - 1:
                spill[row, tile * geometry.TILE :][: len(values)] = values
            stats[row // geometry.STATS_ROWS, tile, 0] += len(active)
            stats[row // geometry.STATS_ROWS, tile, 1] += len(active) > width - 1
    return words, spill, stats


def unpack(words: Tensor, spill: Tensor, n: int, compression: int) -> Tensor:
    """The dense values [M, n] of the spill's dtype."""
    m, width = words.shape[0], geometry.words_per_tile(compression)
    dense = torch.zeros(m, geometry.tiles(n) * geometry.TILE, dtype=spill.dtype, device=words.device)
    for row in range(m):
        for tile in range(geometry.tiles(n)):
            count, *entries = words[row, tile * width : (tile + 1) * width].tolist()
            if count > width - 1:
                here = slice(tile * geometry.TILE, (tile + 1) * geometry.TILE)
                dense[row, here] = spill[row, here]
                continue
            for word in entries[:count]:
                dense[row, word & 0xFFFF] = torch.tensor(word >> 16, dtype=torch.int16, device=words.device).view(
                    spill.dtype
                )
    return dense[:, :n]


def up_down(
    x: Tensor | None,
    words: Tensor,
    spill: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    compression: int,
    activation: str = "relu",
) -> tuple[Tensor, Tensor]:
    """y [M, K] of the spill's dtype, l1 float32 [M]: fp32 sums over the gate's non-zeros alone, y rounded once.

    Without ``w_up`` the packed values are the hidden state, or its square roots.
    """
    dense = unpack(words, spill, w_down.shape[0], compression)
    y, l1 = (
        torch.zeros(words.shape[0], w_down.shape[1], device=words.device),
        torch.zeros(words.shape[0], device=words.device),
    )
    for row, neuron in (dense != 0).nonzero().tolist():
        hidden = dense[row, neuron].float()
        if activation == "relu2":
            hidden = hidden * hidden
        if x is not None and w_up is not None:
            up = x[row].float() @ w_up[neuron].float()
            up = up if b_up is None else up + b_up[neuron].float()
            hidden = hidden * (up.relu() if activation == "drelu" else up)
        y[row] += hidden * w_down[neuron].float()
        l1[row] += hidden.abs()
    return (y if b_down is None else y + b_down.float()).to(spill.dtype), l1


def hybrid(dense: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """entries, neurons, chunks, sizes and popularity of a gate [M, N] in the hybrid format; undefined values are 0."""
    m, n = dense.shape
    tiles, columns = geometry.token_tiles(m), geometry.chunks(n)
    neurons = torch.zeros(tiles, geometry.CHUNK * columns, dtype=torch.int32, device=dense.device)
    chunks = torch.zeros(tiles, columns + 1, dtype=torch.int32, device=dense.device)
    sizes = torch.zeros(tiles + 1, dtype=torch.int32, device=dense.device)
    entries = torch.zeros(geometry.hybrid_capacity(m, n), dtype=torch.int32, device=dense.device)
    active = dense != 0
    sizes[tiles], popularity = active.sum(), active.sum(0).int()
    if sizes[tiles] > geometry.hybrid_capacity(m, n):
        return (
            entries,
            neurons.short(),
            chunks,
            sizes * (torch.arange(tiles + 1, device=dense.device) == tiles),
            popularity,
        )

    count = 0
    for tile in range(tiles):
        tokens = slice(tile * geometry.TOKEN_TILE, (tile + 1) * geometry.TOKEN_TILE)
        union = [neuron for neuron in range(n) if active[tokens, neuron].any()]
        sizes[tile] = len(union)
        for place in range(geometry.CHUNK * geometry.chunks(len(union))):
            neurons[tile, place] = union[min(place, len(union) - 1)]
        for chunk in range(columns):
            chunks[tile, chunk] = count
            for token, values in enumerate(dense[tokens]):
                for rank, neuron in enumerate(union[geometry.CHUNK * chunk : geometry.CHUNK * (chunk + 1)]):
                    if values[neuron] != 0:
                        entries[count] = int(values[neuron].view(torch.int16)) << 16 | token << 6 | rank
                        count += 1
        chunks[tile, columns] = count
    return entries, neurons.short(), chunks, sizes, popularity


def hidden(
    gate: Tensor, x: Tensor, w_up: Tensor | None, b_up: Tensor | None, activation: str = "relu"
) -> tuple[Tensor, Tensor]:
    """h in fp32 and the up projection rounded to x's dtype, [M, N]; without ``w_up`` the latter is ones."""
    factor = gate.float() ** 2 if activation == "relu2" else gate.float()
    if w_up is None:
        return factor, torch.ones_like(gate)
    up = x.float() @ w_up.float().t()
    up = up if b_up is None else up + b_up.float()
    return torch.where(gate != 0, factor * (up.relu() if activation == "drelu" else up), 0), up.to(x.dtype)


def hybrid_forward(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    activation: str = "relu",
    threshold: float | Tensor = 0.0,
    k: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y [M, K] of x's dtype, the sum of |h| in fp32, the number of non-zeros. h is rounded before it is projected."""
    dense = gate(x, w_gate, b_gate, threshold, k)
    h, _ = hidden(dense, x, w_up, b_up, activation)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for row, neuron in (dense != 0).nonzero().tolist():
        y[row] += h[row, neuron].to(x.dtype).float() * w_down[neuron].float()
    return (y if b_down is None else y + b_down.float()).to(x.dtype), h.abs().sum(), (dense != 0).sum()


def hybrid_backward(
    dy: Tensor,
    dl1: Tensor,
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    activation: str = "relu",
    threshold: float | Tensor = 0.0,
    k: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dw_gate, dw_up, dw_down, db_gate, db_up in fp32: h, up and their gradients are rounded to x's dtype.

    For the weights and biases of rare neurons the rest of that rounding is rounded and added. In order of popularity,
    64 neurons at a time are rare if they have at most 2,048 non-zeros and all non-zeros fit into the hybrid format.
    """
    dense = gate(x, w_gate, b_gate, threshold, k)
    fits = int((dense != 0).sum()) <= geometry.hybrid_capacity(*dense.shape)
    counts, order = (dense != 0).sum(0).sort(descending=True, stable=True)
    rare = {
        neuron
        for tile, total in zip(torch.split(order, geometry.NEURON_TILE), torch.split(counts, geometry.NEURON_TILE))
        for neuron in tile.tolist()
        if fits and total.sum() <= geometry.RARE_ENTRIES
    }

    def split(value: Tensor, neuron: int) -> Tensor:
        rounded = value.to(x.dtype).float()
        return rounded + (value - rounded).to(x.dtype).float() if neuron in rare and rounded.isfinite() else rounded

    h, up = hidden(dense, x, w_up, b_up, activation)
    dx, dw_gate, dw_up, dw_down = (torch.zeros(t.shape, device=x.device) for t in (x, w_gate, w_gate, w_down))
    db_gate, db_up = torch.zeros(len(w_gate), device=x.device), torch.zeros(len(w_gate), device=x.device)
    for row, neuron in (dense != 0).nonzero().tolist():
        here = row, neuron
        dh = dy[row].float() @ w_down[neuron].float() + dl1 * h[here].sign()
        g, u = dense[here].float(), up[here].float()
        # h = factor * u, and the slope of factor; for drelu only where u is positive, or NaN
        factor, slope = (g * g, 2 * g) if activation == "relu2" else (g, torch.ones_like(g))
        silent = activation == "drelu" and bool(u <= 0)
        u = torch.zeros_like(u) if silent else u
        d_gate = dh * slope * u
        d_up = torch.zeros_like(u) if silent or w_up is None else dh * factor
        dx[row] += d_gate.to(x.dtype).float() * w_gate[neuron].float()
        if w_up is not None:
            dx[row] += d_up.to(x.dtype).float() * w_up[neuron].float()
        d_gate, d_up = split(d_gate, neuron), split(d_up, neuron)
        dw_gate[neuron] += d_gate * x[row].float()
        dw_up[neuron] += d_up * x[row].float()
        # from the rounded up projection, which forward saves
        wide = factor * u
        dw_down[neuron] += split(wide, neuron) * dy[row].float()
        db_gate[neuron] += d_gate
        db_up[neuron] += d_up
    return dx, dw_gate, dw_up, dw_down, db_gate, db_up


Quantized = tuple[Tensor, Tensor, Tensor, Tensor]


def rotate(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows [R, K] by the signed block Hadamard transform, not normalised, with sums of ``dtype`` level by level."""
    r, k = rows.shape
    places = [screen.sign_bits(column) for column in range(k)]
    words = screen.words(1 + max(line for line, _, _ in places), screen.SIGNS)
    signs = [1 - 2 * ((words[line] >> own ^ words[line] >> whole) & 1) for line, own, whole in places]
    values = rows.to(dtype) * torch.tensor(signs, dtype=dtype, device=rows.device)
    for level in screen.levels(k):
        low, high = values.view(r, k >> level + 1, 2, 1 << level).unbind(2)
        values = torch.stack((low + high, low - high), 2).view(r, k)
    return values


def dithers(k: int, weights: bool) -> tuple[Tensor, Tensor]:
    """The dithers of ``k`` columns without their mean of 1/2, and those of the other side: float64 [K].

    ``weights`` says whether the first are those of w_gate.
    """
    shifts = (screen.W_SHIFT, screen.X_SHIFT) if weights else (screen.X_SHIFT, screen.W_SHIFT)
    unit, words = 2.0 ** -(screen.FRACTION + 1), screen.words(k, screen.DITHERS)
    sides = [[screen.centred(word, shift) * unit for word in words] for shift in shifts]
    own, other = torch.tensor(sides, dtype=torch.float64, device="cpu")
    return own, other


def quantize_gate(rows: Tensor, weights: bool) -> Quantized:
    """q int8 [R, K], scale, spread and offset float32 [R] of rows [R, K] of x or w_gate.

    ``scale * (q - dither)`` is near rotate(rows), for dithers from -1/2 to 1/2 with mean 0, and ``offset`` is the
    product of q and the dithers of the other side. ``spread`` is at least |rotate(rows)| / scale. It is 0 for a row of
    zeros, and infinite for one that is not finite or of a magnitude that is not screened.
    """
    rotated, k = rotate(rows), rows.shape[1]
    largest = rotated.abs().amax(1)
    levels = torch.tensor(screen.LEVELS, dtype=torch.float32, device=rows.device) / largest
    own, other = (t.to(rows.device) for t in dithers(k, weights))
    screened = (largest >= screen.SMALLEST) & (largest <= screen.LARGEST)
    # the sum is rounded to fp32 before its floor is taken
    q = (rotated.double() * levels.double()[:, None] + (own + 0.5)).float().floor().where(screened[:, None], 0)
    scale = (largest * torch.tensor(1 / screen.LEVELS, dtype=torch.float32, device=rows.device)).where(screened, 1)
    norm = rows.double().norm(dim=1) * math.sqrt(screen.rotation_block(k))
    spread = norm / scale.double() * (1 + screen.SPREAD) + screen.grid_error(k)
    spread = spread.where(screened, torch.inf).where(largest != 0, 0)
    return q.char(), scale, spread.float(), (q.double() @ other).float()


def screen_bound(x_spread: Tensor, w_spread: Tensor, k: int, failure: float = screen.FAILURE) -> Tensor:
    """How far the product of q_x and q_w without dithers may be below (gate - bias), in units of the scales.

    float64 [M, N], for rows that are screened. The product is q_x . q_w - x_offset - w_offset + screen.dither_product.
    The gate is that of bf16 or fp16 products of ``k`` terms summed in fp32. A gate exceeds the bound with a
    probability of at most 2^-failure; docs/notes/screen.md derives it.
    """
    u, v, root = x_spread.double()[:, None], w_spread.double(), math.sqrt(k) / 2
    dithers = screen.dither_tail(failure) * (v**2 + (u + root) ** 2).sqrt()
    rounding = (2 * screen.ROTATION + screen.product_error(k)) * u * v + screen.grid_error(k) * (u + v)
    return dithers + rounding + screen.SLACK


def token_terms(
    scale: Tensor, spread: Tensor, offset: Tensor, k: int, failure: float = screen.FAILURE
) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and i [M]: ``a[m] + b[m] * w_spread[n]^2`` is at least ``screen_bound`` and corrections, ``i`` is 1 / scale.

    The corrections are ``screen.dither_product`` minus the offset. With the terms of a row of zeros the bias decides.
    """
    u, root = spread.double(), math.sqrt(k) / 2
    c, grid, p = screen.dither_tail(failure), screen.grid_error(k), u + root
    slope = c + (2 * screen.ROTATION + screen.product_error(k)) * u + grid
    # a square root is at most (its argument / r + r) / 2 for any r, and near to it if r is near to the root
    r = (screen.USUAL_SPREAD * k + c * p * p / slope).sqrt()
    a = (c * p * p / r + slope * r) / 2 + grid * u + screen.SLACK
    enlarged = 1 + screen.MARGIN
    a, b = a * enlarged - offset.double() + screen.dither_product(k), slope / (2 * r) * enlarged
    zero = u == 0
    return (
        a.masked_fill(zero, -screen.ABOVE_CORRECTIONS),
        b.masked_fill(zero, 0),
        (1 / scale.double()).masked_fill(zero, screen.LIFT),
    )


def neuron_terms(scale: Tensor, spread: Tensor, bias: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """spread^2 and the bias in units of 1 / scale, rounded up, [N]. The bias decides alone for a row of zeros."""
    b = torch.zeros_like(scale, dtype=torch.float64) if bias is None else bias.double()
    beta = b * screen.rotation_block(k) / scale.double()
    up, down = 1 + screen.BIAS_MARGIN, 1 - screen.BIAS_MARGIN
    beta = torch.where(b > 0, (beta * up).clamp(min=1 / screen.DECISIVE), beta * down)
    decisive = torch.where(b > 0, screen.DECISIVE, torch.where(b <= 0, -screen.DECISIVE, b))
    return spread.double() ** 2, torch.where(spread == 0, decisive, beta)


def gate_screen(x: Quantized, w_gate: Quantized, bias: Tensor | None) -> Tensor:
    """Which gates [M, N] may be positive or NaN, of rows from ``quantize_gate``: all others are 0 after ReLU."""
    (qx, x_scale, x_spread, x_offset), (qw, w_scale, w_spread, w_offset), k = x, w_gate, x[0].shape[1]
    a, b, i = token_terms(x_scale, x_spread, x_offset, k)
    v, beta = neuron_terms(w_scale, w_spread, bias, k)
    reach = i[:, None] * beta + (b[:, None] * v + a[:, None])
    # not a comparison that NaN fails
    return ~(qx.double() @ qw.double().t() - w_offset.double() <= -reach)
