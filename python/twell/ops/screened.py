"""The int8 screen of the gate: "union" and training compute it only where an int8 product says that it may fire.

Rows of x and w_gate are quantised at each call. Each is rotated by a signed block Hadamard transform, scaled, and
rounded with a dither from a generator with a fixed seed. Of a row [R, K], with K at most 16,384, q is int8 [R, K], its
rows a multiple of 16 bytes apart; scale, spread and offset are float32 [R], as ``twell.ops.reference`` defines them.

Neurons that any of 128 tokens may fire are candidates of these tokens. Their gates are computed exactly, all others are
0, except with a probability of at most 2^-80 per gate. words, spill and stats of the packed gate are those of TwELL,
but a value's neuron is its place in the list of its 128 tokens' candidates.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.base.activation import RELU, Activation, threshold_pair
from twell.choose import tuning
from twell.choose.measurement import Measurement, beside_captures
from twell.ops import reference, union
from twell.ops.library import Shape, aligned, bias_view, on_device, rows
from twell.ops.operands import Layer, opened, run
from twell.runtime import device, geometry, screen, specs
from twell.runtime.program import Program, View

QuantizedViews = tuple[View, View, View, View]
# TMA: bytes of which a row's stride is a multiple
_PITCH = 16


class Lists(NamedTuple):
    """The candidates of each token tile: neurons int16 [B, 64 C], and sizes int32 [B + 1], the last one unused."""

    neurons: View
    sizes: View


def lists(p: Program, m: int, n: int) -> Lists:
    tiles = geometry.token_tiles(m)
    neurons = p.scratch(torch.int16, tiles, geometry.CHUNK * geometry.chunks(n))
    return Lists(neurons, p.scratch(torch.int32, tiles + 1))


def shapes(x: View, n: int) -> tuple[Shape, ...]:
    """Of y, l1, stats, and the sizes of the lists of neurons that fire and of candidates."""
    found = union.shapes(x, n)
    return *found, found[-1]


def candidates_shape(m: int, n: int) -> tuple[int, int]:
    """Of the candidates int32: bit n % 32 of word [t, n / 32] is set unless all gates of neuron n are 0 in tile t."""
    return geometry.token_tiles(m), geometry.tiles(n) * geometry.TILE // 32


def require(on: torch.device, call: str) -> None:
    """Raise NotImplementedError, which names ``call``, unless this GPU runs the kernels of the screen."""
    index = on.index or 0
    if tuning.family(index) != specs.SM90:
        got = "{}.{}".format(*device.capability(index))
        raise NotImplementedError(f"{call} needs compute capability 9.0, got {got} on cuda:{index}")


def firing_bias(w_gate: Tensor, bias: Tensor | None, activation: Activation) -> Tensor | None:
    """The bias that the screen takes: with it a gate is above 0 if it is above the threshold with ``bias``.

    The difference is rounded up to 16 bits, so no gate that fires is missed; docs/notes/screen.md has the argument.
    """
    opened_layer, activation = opened(Layer(w_gate, w_gate, None, w_gate, bias), activation)
    bias, level = opened_layer.b_gate, activation.level(w_gate.dtype)
    if not isinstance(level, Tensor) and not level:
        return aligned(bias)  # type: ignore[no-any-return]
    if bias is None:
        lowered: Tensor = w_gate.new_zeros(len(w_gate)) - level
        return lowered
    info = torch.finfo(bias.dtype)
    # the difference, raised by more than it is rounded here; exact without a bias
    less = bias.double() - level
    least = torch.where(bias == 0, less, less + less.abs() * 2**-52)
    # by more than half a unit in the last place of 16 bits
    above = (least + least.abs() * info.eps + info.smallest_normal * info.eps).clamp(min=info.min)
    nearest = least.clamp(min=info.min).to(bias.dtype)
    return torch.where(nearest >= least, nearest, above.to(bias.dtype))


@torch.no_grad()
def count(x: Tensor, w_gate: Tensor, b_gate: Tensor | None, activation: Activation = RELU) -> Tensor:
    """How many neurons the screen lists for each tile of 128 tokens of x [M, K]: int64 [ceil(M/128)]. Nothing waits."""
    firing, m = firing_bias(w_gate, b_gate, activation), len(x)
    if not x.is_cuda:
        quantized = reference.quantize_gate(x, False), reference.quantize_gate(w_gate, True)
        listed = F.pad(reference.gate_screen(*quantized, firing), (0, 0, 0, -m % geometry.TOKEN_TILE))
        return listed.view(-1, geometry.TOKEN_TILE, len(w_gate)).any(1).sum(1)
    with beside_captures(x):
        found: Tensor = _count_on_cuda(x, w_gate, firing)
        return found


@on_device
def _count_on_cuda(x: Tensor, w_gate: Tensor, firing: Tensor | None) -> Tensor:
    words = x.new_empty(candidates_shape(len(x), len(w_gate)), dtype=torch.int32)
    if len(x):
        run(_find_all, (rows(x), rows(w_gate), firing, words))
    # the number of ones in two, four and eight bits
    ones = words.view(torch.uint8)
    ones = ones - (ones >> 1 & 0x55)
    ones = (ones & 0x33) + (ones >> 2 & 0x33)
    found: Tensor = (ones + (ones >> 4) & 0x0F).sum(1)
    return found


def _find_all(p: Program, x: View, w_gate: View, firing: View | None, candidates: View) -> None:
    screen_rows(p, quantize(p, x, False), quantize(p, w_gate, True), bias_view(p, firing, x.dtype), candidates)


def wanted(measurement: Measurement, layer: Layer, activation: Activation) -> Tensor | None:
    """``count`` for x [..., K], of all slices, if the measurement wants it."""
    if not measurement.screen:
        return None
    x = layer.x.reshape(-1, layer.x.shape[-1])
    found, level = [], activation.threshold
    for first, last in geometry.neuron_slices(len(layer.w_gate)):
        own = layer.neurons(first, last)
        if isinstance(level, Tensor) and level.dim():
            activation = activation._replace(threshold=level[first:last])
        found.append(count(x, own.w_gate, own.b_gate, activation))
    return torch.stack(found).sum(0)


def quantized_shapes(r: int, k: int) -> tuple[Shape, Shape, Shape, Shape]:
    """Of q, with whole rows, scale, spread and offset."""
    return (torch.int8, r, -(-k // _PITCH) * _PITCH), (torch.float32, r), (torch.float32, r), (torch.float32, r)


def quantize(p: Program, matrix: View, weights: bool) -> QuantizedViews:
    """Launch what quantises rows of x, or of w_gate if ``weights``, into scratch."""
    q, scale, spread, offset = (p.scratch(*shape) for shape in quantized_shapes(*matrix.shape))
    found = q._replace(shape=matrix.shape), scale, spread, offset
    quantize_rows(p, matrix, *found, weights)
    return found


def quantize_rows(p: Program, matrix: View, q: View, scale: View, spread: View, offset: View, weights: bool) -> None:
    """Launch what fills the views behind ``matrix`` [R, K]."""
    r, k = matrix.shape
    if r:
        # where the dither of these rows is in a column's word, and that of the other side
        shifts = (screen.W_SHIFT, screen.X_SHIFT) if weights else (screen.X_SHIFT, screen.W_SHIFT)
        constants = (*shifts, screen.grid_error(k), p.multiprocessors)
        p.launch(tuning.quantize_gate(matrix.dtype, k), matrix, q, scale, spread, offset, *constants)


@functools.cache
def _constants(k: int) -> tuple[float, ...]:
    """What the kernel takes of ``k`` columns, in the order of its ``Constants``."""
    tail, grid = screen.dither_tail(), screen.grid_error(k)
    # root, tail, product, x_part, w_part, slack
    bound = (math.sqrt(k) / 2, tail, 2 * screen.ROTATION + screen.product_error(k), grid, tail + grid, screen.SLACK)
    # usual, block, dithers
    return *bound, float(screen.USUAL_SPREAD * k), float(screen.rotation_block(k)), screen.dither_product(k)


def screen_rows(p: Program, x: QuantizedViews, w_gate: QuantizedViews, b_gate: View, candidates: View) -> None:
    """Launch what fills the candidates; an empty bias is none."""
    blocks, words = candidates.shape
    halves = candidates.at(0, torch.int16, blocks, 2 * words)
    # a cluster is two CTAs, one per multiprocessor
    of_bound = (*_constants(x[0].shape[1]), p.multiprocessors // 2)
    p.launch(tuning.gate_screen(b_gate.dtype), *x, *w_gate, b_gate, halves, *of_bound)


def find(p: Program, x: View, firing: View | None, quantized: QuantizedViews) -> View:
    """Launch the screen of all tokens: the candidates. ``firing`` is the bias of ``firing_bias``."""
    candidates = p.scratch(torch.int32, *candidates_shape(x.shape[0], quantized[0].shape[0]))
    screen_rows(p, quantize(p, x, False), quantized, bias_view(p, firing, x.dtype), candidates)
    return candidates


def pack(
    p: Program,
    layer: Layer,
    bits: View,
    listed: Lists,
    packed: Sequence[View],
    compression: int,
    activation: Activation,
) -> None:
    """Launch what fills ``listed`` and ``packed``, from the ``bits`` of ``find`` for the tokens of the layer."""
    x, w_gate, b_gate = layer.x, layer.w_gate, bias_view(p, layer.b_gate, layer.x.dtype)
    p.launch(specs.ListCandidatesSpec(), bits, *listed, packed[2])
    form = (geometry.words_per_tile(compression), threshold_pair(activation, x.dtype), p.multiprocessors)
    p.launch(tuning.sampled_gate(x.dtype), x, w_gate, b_gate, *listed, *packed, *form)


def launches(
    p: Program, layer: Layer, firing: View | None, results: Sequence[View], compression: int, activation: Activation
) -> None:
    """Launch "union" on slices of the tokens, screened. ``firing`` is the bias of ``firing_bias``."""
    x, w_gate = layer.x, layer.w_gate
    *others, candidates = results
    bits = find(p, x, firing, quantize(p, w_gate, True))
    neurons = lists(p, x.shape[0], w_gate.shape[0]).neurons

    def pack_slice(first: int, last: int, packed: union.Packed) -> Lists:
        start, stop = first // geometry.TOKEN_TILE, geometry.token_tiles(last)
        # the element behind the sizes of a slice is not read
        listed = Lists(neurons.part(0, stop - start), candidates.part(start, stop + 1))
        tokens = layer._replace(x=x.part(first, last))
        pack(p, tokens, bits.part(start, stop), listed, packed, compression, activation)
        return listed

    union.by_slices(p, layer, pack_slice, others, compression, activation)
