"""``experts``: a layer of experts without gradients, y[t] = sum over its experts e of weights[t, e] * ffn_e(x[t]).

By "row" few tokens without a gate take one pass over the weights. Else the gate GEMM computes the experts that are
touched. Then each token of layers with a gate reads the weight rows of its non-zeros, those of all its experts in one
sum. Without a gate, units of up to 8, 32 or 64 tokens of an expert read the rows that any of them needs, and multiply
them with rounded hidden states. "dense" is grouped products of PyTorch. An id that is no expert's, below 0 or too
large, adds nothing.

x [T, K]; w_gate, w_up and w_down [E, N, K], with E up to 1,024; ids int32 or int64 and weights float32, both [T, k],
with k up to 32; shared_up and shared_down [S, K], a layer of all tokens beside. Without a gate w_up is None, and the up
projection stands at w_gate. Each weight may be a part of a larger one, as gate and up often are, if all its rows are
equally far apart.

Weights in e4m3 have float32 scales: gate_scale and up_scale [E, N], down_scale [E, K]. Then x is e4m3 with x_scale [T],
or bfloat16, which is quantised per token or by a static x_scale [1]; K is a multiple of 16, y is bfloat16, "row" takes
no w_up, and nothing is invariant or shared.

``compression`` is 2, 4 or 8, ``strategy`` "auto", "dense" or "row"; ``invariant`` goes with "auto"
and "row". ``activation`` and ``threshold`` are the layer's. y is [T, K]. On a CPU "auto" is dense, and an id below -1
or of E or more raises ValueError; on a GPU "auto" is as in ``twell.sparse_experts``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import _modes, tuning
from twell._activation import Activation, activation_of, threshold_pair
from twell._arguments import require_choice
from twell._runtime import geometry, specs
from twell._runtime.program import Program, View
from twell.ops import decode, experts_e4m3, hybrid
from twell.ops.e4m3 import require_no_scales
from twell.ops.gate_pack import gate_on_cpu
from twell.ops.library import ACTIVATION, check, check_matrix, register, rows
from twell.ops.operands import run
from twell.ops.pairs import (
    GROUPS,
    add_up,
    aligned,
    all_rows,
    by_units,
    check_ids,
    check_routes,
    hidden_states,
    in_order,
    is_readable,
    order,
    slabs,
)

STRATEGIES = ("auto", "dense", "row")


class Experts(NamedTuple):
    """x [T, K]; w_gate, w_up and w_down [E, N, K]; ids and weights [T, k]; shared_up and shared_down [S, K].

    Without a gate there is no w_up, and the up projection stands at w_gate. Weights in e4m3 have scales [E, N] and, of
    w_down, [E, K]; then x is e4m3 with x_scale [T], or bfloat16, with x_scale [1] if that is static.
    """

    x: Any
    w_gate: Any
    w_up: Any
    w_down: Any
    ids: Any
    weights: Any
    shared_up: Any = None
    shared_down: Any = None
    x_scale: Any = None
    gate_scale: Any = None
    up_scale: Any = None
    down_scale: Any = None


def check_experts(given: Experts) -> None:
    """Raise unless the operands fit each other."""
    x, w_gate, w_up, w_down, ids, weights, *shared = given[:8]
    check_matrix("x", x)
    for name, weight in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down)):
        if weight is not None and weight.dim() != 3:
            raise ValueError(f"{name} must have three dimensions, got {list(weight.shape)}")
    count, n, _ = w_gate.shape
    for name, weight in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down)):
        if weight is not None:
            check(name, weight, (count, n, x.shape[1]), x.dtype)
    if n % 8 or not 0 < n <= geometry.MAX_NEURONS:
        raise ValueError(f"N must be a positive multiple of 8 up to {geometry.MAX_NEURONS}, got {n}")
    check_routes(ids, weights, x.shape[0], count)
    if (shared[0] is None) != (shared[1] is None) or (w_up is not None and shared[0] is not None):
        raise ValueError("shared_up and shared_down must be given together, to experts without a gate")
    if shared[0] is not None:
        check_matrix("shared_up", shared[0])
        for name, weight in zip(("shared_up", "shared_down"), shared):
            check(name, weight, (shared[0].shape[0], x.shape[1]), x.dtype)


def _fake(*arguments: Any) -> Tensor:
    given, (compression, strategy, name, threshold, invariant) = _given(arguments)
    require_how(strategy, invariant)
    geometry.words_per_tile(compression)
    scaled = given.down_scale is not None
    dtype = torch.bfloat16 if scaled else given.x.dtype
    activation_of(name, threshold, given.w_up is not None).level(dtype)
    if scaled:
        experts_e4m3.check(given, strategy, invariant)
    else:
        require_no_scales(given)
        check_experts(given)
    y: Tensor = given.x.new_empty(given.x.shape, dtype=dtype)
    return y


def require_how(strategy: str, invariant: bool) -> None:
    """Raise ValueError unless a call may be asked to run so."""
    require_choice("strategy", strategy, STRATEGIES)
    if invariant and strategy == "dense":
        raise ValueError('strategy must be "auto" or "row" with invariant=True, got "dense"')


def _cpu(*arguments: Any) -> Tensor:
    y = _fake(*arguments)
    given, (_, strategy, name, threshold, invariant) = _given(arguments)
    check_ids(given.ids, len(given.w_gate))
    activation = activation_of(name, threshold)
    if given.down_scale is not None:
        y.copy_(experts_e4m3.sums(given, activation, strategy == "row"))
        return y
    if strategy == "dense" or (strategy == "auto" and not invariant):
        return dense(given, activation)
    if not invariant and _in_one_pass(given, specs.SM90):
        return y.copy_(_sums(given, activation, True))
    routed = given._replace(shared_up=None, shared_down=None)
    return _with_shared(y.copy_(_sums(routed, activation, False)), given, activation)


def _given(arguments: Sequence[Any]) -> tuple[Experts, Sequence[Any]]:
    """The operands among the arguments of the schema, and the others."""
    return Experts(*arguments[:6], *arguments[11:]), arguments[6:11]


def _sums(given: Experts, activation: Activation, rounds: bool) -> Tensor:
    """y in fp32, of gates that are rounded, and hidden states that are once they are weighted, or not."""
    x, w_gate, w_up, w_down, ids, weights, shared_up, shared_down, *_ = given
    y = torch.zeros(x.shape, dtype=torch.float32, device="cpu")

    def add(tokens: Tensor, first: Tensor, second: Tensor | None, down: Tensor, weight: Tensor) -> None:
        gate = gate_on_cpu(x[tokens], first, None, Activation("fatrelu", activation.threshold)).float()
        up = None if second is None else hybrid.project(x[tokens], second, None)
        hidden = activation.hidden(gate, up).masked_fill(gate == 0, 0) * weight[:, None]
        if rounds:
            # one pass has no h where the gate is zero, whatever the weight
            hidden = hybrid.rounded(hidden.masked_fill(gate == 0, 0), x.dtype)
        y.index_add_(0, tokens, hybrid.project(hidden, down.t(), None))

    if shared_up is not None:
        every = torch.arange(len(x), device="cpu")
        add(every, shared_up, None, shared_down, torch.ones_like(every))
    for expert in ids[ids >= 0].unique().tolist():
        routed = ids == expert
        tokens = routed.any(1).nonzero()[:, 0]
        second = None if w_up is None else w_up[expert]
        # of all slots of a token together
        add(tokens, w_gate[expert], second, w_down[expert], weights.where(routed, 0).sum(1)[tokens])
    return y


def _cuda(*arguments: Any) -> Tensor:
    y = _fake(*arguments)
    given, (compression, strategy, name, threshold, invariant) = _given(arguments)
    activation = activation_of(name, threshold)
    x, w_gate, w_up, w_down, ids, weights, shared_up, shared_down, *_ = given
    if not x.numel():
        return y
    if given.down_scale is not None:
        return experts_e4m3.on_cuda(given, y, compression, strategy, activation)
    family = tuning.family(x.device.index)
    one_pass = not invariant and _in_one_pass(given, family)
    if strategy == "auto" and not invariant:
        few = one_pass or tuning.experts_by_row(len(x), ids.shape[1], len(w_gate), w_up is not None)
        # weights in another layout would be copied; other dense products let the host wait
        readable = all(is_readable(weight) for weight in (w_gate, w_up, w_down) if weight is not None)
        by_row = family == specs.SM90 and readable and (few or not _never_waits(x, len(w_gate)))
        strategy = "row" if by_row else "dense"
    if strategy == "dense":
        if family != specs.SM90 or not _never_waits(x, len(w_gate)):
            return dense(given, activation)
        laid = given._replace(x=rows(x), ids=aligned(ids), weights=aligned(weights))
        return _with_shared(_dense_on_hopper(laid, activation, y), given, activation)
    if family != specs.SM90:
        raise NotImplementedError('experts have kernels for sm_90a alone; strategy="dense" runs everywhere')
    operands = rows(x), slabs(w_gate), slabs(w_down), aligned(ids), aligned(weights)
    if one_pass:
        shared = (None, None) if shared_up is None else (rows(shared_up), rows(shared_down))
        run(_one_pass, (*operands, *shared, y), activation)
        return y
    run(launches, (*operands, None if w_up is None else slabs(w_up), y), compression, activation, invariant)
    return _with_shared(y, given, activation)


def _in_one_pass(given: Experts, family: str) -> bool:
    """Whether one kernel computes all experts of these tokens, by tiles of neurons."""
    if given.w_up is not None or (given.shared_up is not None and len(given.shared_up) > geometry.MAX_NEURONS):
        return False
    return tuning.decode(given.x.dtype, *given.x.shape, "experts", family) is not None


def _overflows(dtype: torch.dtype, activation: Activation) -> bool:
    """Whether hidden states are not rounded: the squares of float16 may exceed it."""
    return dtype == torch.float16 and activation.name == "relu2"


def _one_pass(p: Program, x: View, w_up: View, w_down: View, ids: View, weights: View, *rest: Any) -> None:
    shared_up, shared_down, y, activation = rest
    shared = None if shared_up is None else (shared_up, shared_down)
    decode.launch_experts(p, x, w_up, w_down, ids, weights, shared, y, activation)


def _with_shared(y: Tensor, given: Experts, activation: Activation) -> Tensor:
    """y and what the shared layer adds, by PyTorch's own operators."""
    if given.shared_up is None:
        return y
    hidden = activation.hidden(activation.after(F.linear(given.x, given.shared_up)), None)
    return torch.addmm(y, hidden, given.shared_down)


def launches(
    p: Program,
    x: View,
    w_gate: View,
    w_down: View,
    ids: View,
    weights: View,
    w_up: View | None,
    y: View,
    compression: int,
    activation: Activation,
    invariant: bool,
) -> None:
    """Launch what fills ``y``: by the rows of each token or, of many tokens, by the union of rows of each unit."""
    (t, k), (count, n, _), top = x.shape, w_gate.shape, ids.shape[1]
    number, name = t * top, tuning.dtype_name(x.dtype)
    by_union = tuning.by_union_of_experts(x.dtype, n, w_up is not None, invariant)
    by_union = by_union and not _overflows(x.dtype, activation)
    most = tuning.expert_tokens(number, count, invariant)
    down = tuning.expert_down(x.dtype, k, w_up is not None)
    first = 0 if by_union else geometry.TOKEN_COUNTERS + t * down.cluster
    counters = p.scratch(torch.int32, first + t)
    pairs = in_order(p, ids, x, count, most, counters)
    width = geometry.words_per_tile(compression)
    how = width, threshold_pair(activation, x.dtype), activation.code()
    spec = specs.ExpertPackSpec(name, most)
    if by_union:
        hidden = hidden_states(p, spec, pairs, (pairs.rows,), (w_gate,), n, how)
        by_units(p, pairs, hidden, most, specs.ExpertGatheredSpec(name, most), w_down, (), weights, y)
        return
    tiles = geometry.tiles(n)
    words = p.scratch(torch.int32, number, tiles * width)
    spill = p.scratch(x.dtype, number, tiles * geometry.TILE)
    p.launch(spec, pairs.rows, w_gate, words, spill, pairs.units, pairs.total, p.scratch(x.dtype, 0, n), *how)
    (up, up_rows), (second, down_rows) = (None, 0) if w_up is None else all_rows(w_up), all_rows(w_down)
    # helpers add up the non-zeros of all tokens
    shared = not invariant and number * n < 1 << 31
    helpers = tuning.token_helpers(t, down, p.multiprocessors) if shared else 0
    sums = p.scratch(torch.float32, 2 * helpers, k + 8)
    layer = x if w_up is not None else None, words, spill, up, second, y, p.scratch(torch.float32, t), sums
    own, heavy = counters.part(0, first), counters.part(first, first + t)
    numbers = up_rows, down_rows, helpers, tuning.light_nonzeros(t), width, activation.code()
    p.launch(down, *layer, own, heavy, pairs.owners, pairs.places, weights, *numbers)


# Grouped products


def dense(given: Experts, activation: Activation) -> Tensor:
    """y by PyTorch's own operators, which have gradients."""
    x, w_gate, w_up, w_down, ids, weights, *_ = given
    count, top = len(w_gate), ids.shape[1]
    exists = (ids >= 0) & (ids < count)
    # the weight of a slot without an expert may be NaN
    owners, weights = torch.where(exists, ids, count).flatten(), torch.where(exists, weights, 0)
    order = owners.argsort(stable=True)
    found = owners[order]
    ends = torch.searchsorted(found, torch.arange(count, device=x.device, dtype=found.dtype), right=True)
    # products behind the last expert's are undefined, and so are their gradients
    without, ends = (found == count)[:, None], ends.int()
    gathered = x[order // top].masked_fill(without, 0)
    gate = activation.after(_grouped(gathered, w_gate.transpose(1, 2), ends))
    up = None if w_up is None else _grouped(gathered, w_up.transpose(1, 2), ends)
    made = _grouped(activation.hidden(gate, up), w_down, ends).masked_fill(without, 0)
    # places of a token's pairs
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=x.device)).view(ids.shape)
    y = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    for slot in range(top):
        y = y + made[places[:, slot]].to(y.dtype) * weights[:, slot, None].to(y.dtype)
    return _with_shared(y.to(x.dtype), given, activation)


_grouped_mm: Any = getattr(F, "grouped_mm", getattr(torch, "_grouped_mm", None))


def _never_waits(values: Tensor, experts: int) -> bool:
    """Whether dense products of so many experts are one operator of PyTorch, without the host."""
    return _grouped_mm is not None and experts < GROUPS and values.is_cuda and values.dtype == torch.bfloat16


def _dense_on_hopper(given: Experts, activation: Activation, y: Tensor) -> Tensor:
    """The same without gradients: y, filled by one operator for each product and kernels around them."""
    x, w_gate, w_up, w_down, ids, weights, *_ = given
    places, ends = (torch.empty(n, dtype=torch.int32, device=x.device) for n in (ids.numel(), len(w_gate)))
    gathered = x.new_empty(ids.numel(), x.shape[1])
    run(order, (x, ids, gathered, places, ends))
    gate = activation.after(_grouped(gathered, w_gate.transpose(1, 2), ends), inplace=True)
    up = None if w_up is None else _grouped(gathered, w_up.transpose(1, 2), ends)
    run(add_up, (_grouped(activation.hidden(gate, up), w_down, ends), places, weights, y))
    return y


def _grouped(values: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """values [P, C] of each expert, which end at ``ends`` [E], times weights [E, C, D] -> [P, D]."""
    if _never_waits(values, len(weights)):
        # the operator wants aligned rows or columns
        pitch = max(weights.stride()[1:])
        aligned = pitch % 8 == 0 and weights.stride(0) % 8 == 0 and 1 in weights.stride()[1:]
        products: Tensor = _grouped_mm(values, weights if aligned else weights.contiguous(), offs=ends)
        return products
    # a graph cannot loop over lengths that it does not know
    return (_products_in_graphs if _modes.compiling() else _products)(values, weights, ends)


def _products(values: Tensor, others: Tensor, ends: Tensor) -> Tensor:
    """The same; or, of others [P, D], values of each expert transposed times others of it -> [E, C, D]."""
    lengths = torch.diff(ends, prepend=ends.new_zeros(1), append=ends.new_full((1,), len(values)))
    # the host waits for the lengths
    sizes = lengths.tolist()
    *parts, rest = torch.split(values, sizes)
    if others.dim() == 2:
        return torch.stack([part.t() @ other for part, other in zip(parts, torch.split(others, sizes))])
    found = [part @ weight for part, weight in zip(parts, others)]
    return torch.cat([*found, rest.new_zeros(len(rest), others.shape[2])])


@torch.library.custom_op("twell_internal::expert_products", mutates_args=())
def _products_in_graphs(values: Tensor, others: Tensor, ends: Tensor) -> Tensor:
    """``_products`` as one operator, with gradients."""
    with torch.autocast(values.device.type, enabled=False):
        return _products(values, others, ends)


@_products_in_graphs.register_fake
def _(values: Tensor, others: Tensor, ends: Tensor) -> Tensor:
    rows = values.shape[:1] if others.dim() == 3 else (ends.shape[0], values.shape[1])
    return values.new_empty(*rows, others.shape[-1])


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    values, others, ends = ctx.saved_tensors
    return _products_in_graphs(grad, others.transpose(1, 2), ends), _products_in_graphs(values, grad, ends), None


_products_in_graphs.register_autograd(
    _gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


experts = register(
    "experts(Tensor x, Tensor w_gate, Tensor? w_up, Tensor w_down, Tensor ids, Tensor weights, int compression, "
    f"str strategy, {ACTIVATION}, bool invariant=False, Tensor? shared_up=None, Tensor? shared_down=None, "
    "Tensor? x_scale=None, Tensor? gate_scale=None, Tensor? up_scale=None, Tensor? down_scale=None) -> Tensor",
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
    instead="twell.sparse_experts",
)
