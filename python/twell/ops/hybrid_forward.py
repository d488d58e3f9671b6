"""``hybrid_forward``: the forward pass of training. Returns y, the sum of |h|, the number of non-zeros and the pattern.

h[m, c] = gate[m, c] * (x[m] . w_up[c] + b_up[c]) for the non-zeros of gate = relu(x @ w_gate^T + b_gate), and
without ``w_up`` h = gate; y = h @ w_down + b_down. This is relu; ``twell.base.activation`` has the others. The gate is
rounded to x's dtype, and so is h, once. The gate is kept in the hybrid format of ``twell.ops.hybrid``, with room for
``held`` non-zeros per token on average, or for max(64, N / 36) if ``held`` is 0. Dtypes are bfloat16 and float16.

With ``screen`` a GPU computes gates only where an int8 product says that they may be non-zeros. It misses a gate with a
probability of at most 2^-80.

x [M, K]; w_gate, w_up and w_down [N, K]; b_gate and b_up [N], b_down [K]. With a given ``gate`` [M, N], before its
activation, there is neither w_gate nor b_gate, and without w_up neither x nor b_up. ``compression`` is that of words in
between. y is [M, K]; l1, the sum of |h|, is 0-d float32; nonzeros is 0-d int64. ``kept`` int32
is for backward, at most 1.0 KB per token at N = 5,632. ``activation`` and ``threshold`` are the layer's.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from twell.base.activation import RELU, Activation, activation_of
from twell.choose import tuning
from twell.ops import hybrid, hybrid_cpu, library, screened
from twell.ops.gate_pack import pack
from twell.ops.operands import Form, Gradients, Layer, has_thresholds
from twell.ops.pack import pack_gate, shapes, stats_shape
from twell.ops.slices import Added, is_sliced, require_sliceable
from twell.runtime import geometry
from twell.runtime.program import Executable, Program, View, allocate, contiguous, kept

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


def outputs(layer: Layer, held: int) -> Outputs:
    """Uninitialised y [M, K] of x's dtype, l1 (0-d, float32), nonzeros (0-d, int64) and kept (int32)."""
    tokens, (n, k) = layer.tokens, layer.w_down.shape
    l1 = tokens.new_empty((), dtype=torch.float32)
    nonzeros = tokens.new_empty((), dtype=torch.int64)
    words = hybrid.words if layer.gate is None else hybrid.words_of_slice
    kept = tokens.new_empty(words(tokens, n, layer.w_up is not None, held), dtype=torch.int32)
    return tokens.new_empty((tokens.shape[0], k)), l1, nonzeros, kept


def _grouped(implementation: Callable[..., Outputs]) -> library.Implementation:
    """The implementation as a function of the arguments of the schema."""

    def ungrouped(*arguments: Any) -> Outputs:
        layer, (compression, held, name, threshold, screen, gate) = Layer(*arguments[:7]), arguments[7:]
        layer = layer._replace(gate=gate)
        activation = activation_of(name, threshold, layer.w_up is not None, top_k=gate is None)
        return implementation(layer, compression, held, activation, screen)

    return ungrouped


@_grouped
def _fake(layer: Layer, compression: int, held: int, activation: Activation, screen: bool) -> Outputs:
    if screen and layer.gate is not None:
        raise ValueError("screen must be False with a given gate, got True")
    library.check_operands(layer)
    activation.level(layer.w_down.dtype)
    geometry.words_per_tile(compression)
    require_sliceable(layer.w_down.shape[0], activation)
    if held < 0:
        raise ValueError(f"held must be non-zeros per token, or 0 for the most, got {held}")
    if activation.k:
        hybrid.require_room(activation.k, len(layer.x), len(layer.w_down), held, screen)
    return outputs(layer, held)


def _by_slices(one: Callable[..., Outputs]) -> Callable[..., Outputs]:
    """The implementation ``one`` for any number of neurons."""

    def every(layer: Layer, *how: Any) -> Outputs:
        x, w_gate, w_up, *_ = layer
        compression, held, *others = how
        # what does not fit is refused below
        if w_gate is None or w_gate.dim() != 2 or not is_sliced(n := len(w_gate)):
            return one(layer, *how)
        y, l1, nonzeros, kept = outputs(layer, held)
        added = Added(y, layer.b_down)
        l1.zero_(), nonzeros.zero_()
        for first, last, own, room in hybrid.split(kept, x, n, w_up is not None):
            y_of_slice, of_l1, of_nonzeros, found = one(layer.neurons(first, last), compression, room, *others)
            added.add(y_of_slice)
            l1 += of_l1
            nonzeros += of_nonzeros
            own.copy_(found)
        added.store()
        return y, l1, nonzeros, kept

    return every


@_grouped
@_by_slices
def _cpu(layer: Layer, compression: int, held: int, activation: Activation, screen: bool) -> Outputs:
    y, l1, nonzeros, kept = _fake(*layer[:7], compression, held, *activation, screen, layer.gate)
    x, _, w_up, w_down, _, b_up, b_down, _ = layer.unscaled
    hybrid.require_offsets(y.shape[0], w_down.shape[0])
    gate = hybrid_cpu.gate_on_cpu(layer, activation)
    up = None if w_up is None else hybrid_cpu.project(x, w_up, b_up)
    hidden = activation.hidden(gate.float(), up).masked_fill(gate == 0, 0)
    l1.copy_(hidden.abs().sum())
    nonzeros.copy_((gate != 0).sum())
    y.copy_(hybrid_cpu.project(hidden.to(y.dtype), w_down.t(), b_down))
    hybrid_cpu.encode(gate, None if up is None else up.to(y.dtype), kept)
    return y, l1, nonzeros, kept


@_grouped
@_by_slices
def _cuda(layer: Layer, compression: int, held: int, activation: Activation, screen: bool) -> Outputs:
    library.check_operands(layer)
    if not layer.tokens.shape[0]:
        y, l1, nonzeros, kept = outputs(layer, held)
        return y, l1.zero_(), nonzeros.zero_(), kept.zero_()
    given = library.laid(layer._replace(w_down=layer.w_down.t())).unscaled
    forward = forward_of(Form.of(given), compression, held, activation, screen, True)
    assert forward is not None
    found = forward(*given)
    assert found is not None
    return found  # type: ignore[return-value]


class Forward:
    """The operator on the current device, for plain tensors of one form: two programs.

    Between them the packed gate, the largest tensor of the step, is given back, and y is allocated.
    """

    __slots__ = ("_activation", "_figures", "_m", "_multiply", "_pack", "_raised", "kept", "y")

    def __init__(
        self, form: Form, compression: int, held: int, activation: Activation, screen: bool, totals: bool
    ) -> None:
        p, layer = _layer_of(form)
        (k, n), gated, given = layer.w_down.shape, layer.w_up is not None, layer.gate is not None
        x: Any = layer.gate if given else layer.x
        m = x.shape[0]
        hybrid.require_offsets(m, n)
        hybrid.require_neurons(n, tuning.family(p.index), "training")
        if activation.k:
            hybrid.require_room(activation.k, m, n, held, screen)
        if screen:
            screened.require(torch.device("cuda", p.index), "torch.ops.twell.hybrid_forward with screen=True")
        self._m, self._activation = m, activation
        # with thresholds the screen takes a bias of its own
        self._raised = screen and (bool(activation.level(x.dtype)) or has_thresholds(layer.b_gate, n))
        # sums of |h| per token tile, written by the kernel that computes h; the total in ``sizes`` may be cut off
        self._figures: list[library.Shape] = []
        if totals:
            self._figures.append((torch.float32, geometry.token_tiles(m), geometry.training_sums(n)))
            if m * n > geometry.MOST:
                self._figures.append(stats_shape(m, n))
        shape = (m, k) if given else tuple(form.places[0][0])  # type: ignore[index]
        self.y = shape, contiguous(shape), x.dtype
        self.kept = ((hybrid.words_of_slice(x, n, gated, held),), (1,), torch.int32)
        capacity = geometry.hybrid_capacity(m, n, held)
        self._pack = self._packed(p, layer, compression, capacity, activation, screen)
        self._multiply = self._multiplied(*_layer_of(form), capacity, activation)

    def _packed(
        self, p: Program, layer: Layer, compression: int, capacity: int, activation: Activation, screen: bool
    ) -> Executable:
        """The gate, packed and then in the hybrid format."""
        x, w_gate, w_up, w_down, b_gate, _, _, gate = layer.unscaled
        m, n, dtype = self._m, w_down.shape[1], w_down.dtype
        firing = p.operand(dtype, n) if self._raised else b_gate
        entries, neurons, chunks, sizes, popularity, counters = hybrid.parts(
            p.operand(torch.int32, *self.kept[0]), m, n
        )
        sums, *figures = self._places(p, m, n, 2)
        words, spill, stats = shapes(dtype, m, n, compression)
        packed = p.scratch(*words), p.scratch(*spill), figures[0] if figures else p.scratch(*stats)
        listed: tuple[Any, ...] = (neurons, sizes, 0)
        if screen:
            bits = screened.find(p, x, firing, screened.quantize(p, w_gate, True))
            lists = screened.lists(p, m, n)
            screened.pack(p, layer, bits, lists, packed, compression, activation)
            # the words hold places in these lists
            listed = (*lists, 1)
        elif gate is not None:
            pack_gate(p, gate, *packed, compression, activation)
        else:
            pack(p, x, w_gate, b_gate, *packed, compression, activation)
        plain = 0 if w_up is not None else 1 + activation.code()
        form = n, geometry.words_per_tile(compression), plain, capacity
        # the popularity and the counters behind it
        cleared = popularity._replace(shape=(n + counters.shape[0],))
        spec = tuning.compact(dtype, True, family=tuning.family(p.index))
        p.launch(spec, *packed, entries, neurons, chunks, sizes, cleared, sums, *form, *listed)
        return p.compiled()

    def _multiplied(self, p: Program, layer: Layer, capacity: int, activation: Activation) -> Executable:
        """The up projection at the non-zeros, and y."""
        x, _, w_up, w_down, _, b_up, b_down, _ = layer.unscaled
        m, n, dtype = self._m, w_down.shape[1], w_down.dtype
        gated = w_up is not None
        family, code = tuning.family(p.index), activation.code()
        kept = hybrid.parts(p.operand(torch.int32, *self.kept[0]), m, n)
        pattern = kept.entries, kept.neurons, kept.chunks, kept.sizes
        shape, _, _ = self.y
        y = p.operand(dtype, *shape).matrix()
        (sums,) = self._places(p, m, n, 1)
        hidden = None
        if w_up is not None:
            up, hidden = kept.entries.at(4 * capacity, dtype, capacity), p.scratch(dtype, capacity)
            last = (up, hidden, sums, code, capacity, p.multiprocessors)
            up_bias = library.bias_view(p, b_up, dtype)
            p.launch(tuning.sampled_up(dtype, True, family=family), x, w_up, up_bias, *pattern, *last)
        w_down = library.down_rows(p, w_down)
        aside = hybrid.room_aside(p, dtype, n)
        # without an up projection the gates in the entries become h as they are read
        of_entries = RELU.code() if gated else code
        bias, behind = library.bias_view(p, b_down, dtype), (y, aside, of_entries, capacity, p.multiprocessors)
        p.launch(tuning.gathered(dtype, int(gated), family=family), hidden, w_down, None, None, bias, *pattern, *behind)
        given = hybrid.Backward(None, None, layer, kept, activation)
        hybrid.overflow(p, given, w_down, capacity, Gradients(y), aside, kept.counters, sums=sums)
        return p.compiled()

    def _places(self, p: Program, m: int, n: int, most: int) -> list[View]:
        """The first ``most`` figures as operands; without any the sums of |h|, which nothing reads."""
        if self._figures:
            return [p.operand(*shape) for shape in self._figures[:most]]
        return [p.scratch(torch.float32, geometry.token_tiles(m), geometry.training_sums(n))]

    def __call__(self, *layer: Any) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor] | None:
        """y, l1, nonzeros (Nones without totals) and kept; None, with nothing launched, for tensors of another form."""
        (x, w_gate), b_gate, given = layer[:2], layer[4], [t for t in layer if t is not None]
        x = layer[7] if x is None else x
        kept, figures = allocate(x, *self.kept), library.new(x, self._figures) if self._figures else []
        first: list[Any] = [screened.firing_bias(w_gate, b_gate, self._activation)] if self._raised else []
        if not self._pack.ran(*given, *first, kept, *figures):
            return None
        nonzeros = None
        if figures:
            stats = figures[1:]
            nonzeros = stats.pop().select(2, 0).sum() if stats else hybrid.sizes(kept, self._m)[-1].long()
            del figures[1:]
        y = allocate(x, *self.y)
        self._multiply(*given, kept, y, *figures)
        return y, figures[0].sum() if figures else None, nonzeros, kept


@kept
def forward_of(
    form: Form, compression: int, held: int, activation: Activation, screen: bool, totals: bool
) -> Forward | None:
    """The operator for x [..., K] and w_down [K, N] of this form; None if kernels read only copies, or slices."""
    if form.places[7] is None:
        shape, strides, _ = form.places[0]  # type: ignore[misc]
        sliced = is_sliced(form.places[1][0][0])  # type: ignore[index]
        if sliced or (len(shape) != 2 and strides != contiguous(shape)) or not library.are_laid(_layer_of(form)[1]):
            return None
    return Forward(form, compression, held, activation, screen, totals)


def _layer_of(form: Form) -> tuple[Program, Layer]:
    p, (x, *others) = form.program()
    return p, Layer(x if x is None or len(x.shape) == 2 else x.matrix(), *others)


hybrid_forward = library.register(
    f"hybrid_forward({library.LAYER}, int compression, int held=0, {library.ACTIVATION}, bool screen=False, "
    "Tensor? gate=None) -> (Tensor y, Tensor l1, Tensor nonzeros, Tensor kept)",
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
)
