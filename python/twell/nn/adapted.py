"""Layers with LoRA adapters, quantised weights or a gate from elsewhere, through the sparse functions.

For ``W x + s B A x`` the adapter is columns: of gate and up ``[x, A_g x, A_u x] @ [W_g, s B_g, 0]^T``, of the down
projection ``h @ [W_d; A_d]^T`` with ``s B_d`` behind it. So x and y get R more columns, and the layer is an ordinary
one of width K + R. A gate that no columns can tell is called, and ``sparse_up_down`` takes it. Weights are concatenated
and dequantised in each pass: a copy could not be kept, as a write through ``.data`` raises no version. Deltas are never
added to weights, where 16 bits would round them away.
"""

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.call import functional
from twell.call.admission import sharded
from twell.call.execution import Extra, Made
from twell.call.plain import HOOKS_OF_ALL, calls_are_torchs, overridden
from twell.choose import cards
from twell.choose.plan import Facts, Refusal, Route, plan
from twell.choose.site import tokens_of
from twell.nn.columns import Matrix, Part, ReadFFN, beside, narrowed
from twell.nn.projections import Projection
from twell.nn.settings import name_of
from twell.ops.calls import How
from twell.ops.library import unviewed
from twell.ops.operands import Layer
from twell.runtime import modes

# "auto" calls the projections for fewer tokens if weights are copied, which takes longer than sparsity saves
FEWEST_TOKENS = 1024


class Way(NamedTuple):
    """How a layer runs sparse: its readings.

    gate: the first projection's, which is up in a layer without a gate; None where a call makes its pre-activations.
    up: None without a gate. before: those whose adapters make columns of x. added: the columns R.
    """

    gate: Projection | None
    up: Projection | None
    down: Projection
    before: list[Projection]
    added: int

    @property
    def dequantised(self) -> bool:
        return any(each.dequantise for each in (self.up, self.down) if each is not None)


def way_of(layer: Any) -> Way | str:
    """How ``layer`` may run sparse though a projection is more than a weight and a bias, or why it cannot."""
    if any(HOOKS_OF_ALL) or not calls_are_torchs():
        return "hooks of all modules, or a replaced call"
    first, *rest = layer._readings()
    # of gate and up in one the name is that of both
    for name, reading in zip(layer._projections[-len(rest) :], rest):
        if isinstance(reading, str):
            return f"{name} {reading}"
    *ups, down = rest
    up = ups[0] if ups else None
    if any(each.drops for each in down.adapters):
        name = layer._projections[-1]
        return f"{name} has an adapter with dropout of the hidden state (lora_dropout): kernels keep no zeros"
    gate = None if isinstance(first, str) or (first.dequantise and first.part is None) else first
    # the halves of one projection have the same adapters
    shared = up is not None and up.part is not None
    before = [each for each in (None if shared else gate, up) if each is not None]
    most = max(sum([each.rank for each in before]), down.rank)
    return Way(gate, up, down, before, -(-most // 8) * 8)


def planned(
    layer: Any, n: int, k: int, dtype: torch.dtype, device: torch.device, training: bool, **met: Any
) -> Route | Refusal:
    """How calls of ``layer`` on weights of these sizes run, in the dtype of their products; ``met``: facts of one."""
    asked = type(layer).__name__, name_of(layer._strategy), layer._invariant
    facts = Facts(*asked, n=n, k=k, dtype=dtype, device=device.type, sliced=True)
    imposed, moving = cards.imposed(device.type, device.index), isinstance(layer._threshold, Tensor)
    return plan(facts._replace(imposed=imposed, moving=moving, training=training, **met))


def foreseen(layer: Any, training: bool) -> Route | Refusal:
    """How calls run where a projection is more than a weight and a bias, as far as no call is known."""
    way = way_of(layer)
    if isinstance(way, str) or layer._invariant:
        asked = type(layer).__name__, name_of(layer._strategy), layer._invariant
        answer = plan(Facts(*asked, training=training, called=True))
        return answer._replace(reason=way) if isinstance(answer, Route) and isinstance(way, str) else answer
    device = way.down.linear.weight.device
    dtype = modes.product_dtype(way.down.own_dtype, device.type)
    answer = planned(layer, layer.intermediate, layer.hidden + way.added, dtype, device, training)
    if isinstance(answer, Refusal):
        # calls of the projections take it
        return Route("dense", reason=answer.message)
    parts = [f"{way.added} columns of adapters"] if way.added else []
    parts += ["a gate that is called"] if way.gate is None and layer._gated else []
    parts += ["dequantised weights"] if way.dequantised else []
    return answer._replace(reason=f"{answer.reason}; with {' and '.join(parts)}") if parts else answer


def run(layer: Any, x: Tensor, with_aux: bool) -> Any:
    """The result of the layer's function, or why its projections must be called; "" where that is the choice."""
    auto, m = name_of(layer._strategy) == "auto", tokens_of(x)
    if auto and not (layer._given or modes.tracing(m)) and m < FEWEST_TOKENS:
        return ""
    way = way_of(layer)
    if isinstance(way, str):
        return way
    if x.dim() == 0 or x.is_nested or x.layout is not torch.strided or x.shape[-1] != layer.hidden:
        return ""
    dtype = "x is sharded" if sharded({"x": x}) else _dtype(way, x)
    if isinstance(dtype, str):
        return dtype
    children = [layer._modules[name] for name in layer._projections]
    trains = x.requires_grad or any(p.requires_grad for child in children for p in child.parameters())
    how = layer.intermediate, layer.hidden + way.added, dtype, x.device, torch.is_grad_enabled() and trains
    met: dict[str, Any] = {"onnx": modes.to_onnx(), "exporting": modes.exporting(), "tracing": modes.tracing(m)}
    # weights may be of the transform, too
    transformed = "a call inside a transform" if modes.transforming() else ""
    answer = planned(layer, *how, site=True, transformed=transformed, overridden=overridden({"x": x}), **met)
    if isinstance(answer, Refusal):
        return answer.message
    copies = auto and (way.added or way.dequantised)
    # an exported program has no guard for the number of tokens
    if answer.strategy == "dense" or (copies and (modes.exporting() or m < FEWEST_TOKENS)):
        return ""
    return _run(layer, way, x, dtype, with_aux)


def _dtype(way: Way, x: Tensor) -> torch.dtype | str:
    """The dtype of the products, or why there is not one; "" if PyTorch would refuse the operands, too."""
    plain = modes.product_dtype(x.dtype, x.device.type)
    autocast = x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)
    used = [each for each in (way.gate, way.up, way.down) if each is not None]
    if not autocast and any(not each.dequantise and each.linear.weight.dtype != x.dtype for each in used):
        return ""
    found = {each.dtype(x, plain) for each in used}
    if len(found) > 1 or (autocast and found != {plain}):
        return "products in several dtypes, as quantised weights have their own"
    return found.pop()


def _run(layer: Any, way: Way, x: Tensor, dtype: torch.dtype, with_aux: bool) -> Any:
    gate, up, down, _, added = way
    k, given = layer.hidden, gate is None
    called = layer._gate(x) if given else None

    def projected() -> Any:
        if not given:
            return layer._pre_activations(x)
        return called, layer._project("up_proj", x) if layer._gated else None

    if given and (type(called) is not Tensor or called.shape != (*x.shape[:-1], layer.intermediate)):
        return layer._dense(*projected(), with_aux)
    matrices, sources, own = _sources(way, x.reshape(-1, k), dtype)
    # eager calls have a graph by ``ReadFFN``
    with contextlib.nullcontext() if modes.compiling() else torch.no_grad():
        *weights, lowering, raising = [matrix.read(sources) for matrix in matrices]
        wide = None if own is None else beside(own, None if lowering is None else lowering.t(), k + added)
    biases = [None if each is None else each.bias(dtype) for each in (gate, up, down)]
    if added and biases[2] is not None:
        biases[2] = F.pad(biases[2], (0, added))
    of_gate = None if called is None else called.reshape(-1, called.shape[-1]).to(dtype)
    apply, graph = None, (own, of_gate, *biases, *sources)
    if torch.is_grad_enabled() and not modes.compiling() and any(t is not None and t.requires_grad for t in graph):
        apply = functools.partial(ReadFFN.apply, matrices, lowering, raising, *sources, own)
    # frozen weights need no gradient in front of those of adapters
    frozen = not any(each.linear.weight.requires_grad for each in (gate, up, down) if each is not None)
    first = gate or down
    # operators find the site by a weight that the layer holds
    held = None if first.dequantise else first.linear.weight
    activation = layer._form()
    extra = Extra(Made(held, k if added and frozen else 0, lambda: layer._behind(*projected(), activation), apply))
    how = How(activation, layer._site() or layer._strategy, False, layer._compression)
    function: Any = functional.sparse_gated_ffn if layer._gated else functional.sparse_ffn
    function, operands = functional.sparse_up_down if given else function, Layer(*(wide, *weights, *biases, of_gate))
    result: Any = functional.run(function, operands, how, None, with_aux, extra)
    y, aux = result if with_aux else (result, None)
    # a dense call is of the projections
    y = y if y.shape == x.shape else unviewed(narrowed(y, raising, k), x.shape)
    # as the projections would return it: a quantised one returns the dtype of its input
    of_y = dtype
    if down.dequantise:
        of_y = dtype if called is None else called.dtype
        of_y = of_y if up is None else torch.promote_types(of_y, x.dtype if up.dequantise else dtype)
    return (y.to(of_y), aux) if with_aux else y.to(of_y)


def _sources(way: Way, x: Tensor, dtype: torch.dtype) -> tuple[list[Matrix], list[Tensor], Tensor | None]:
    """What ``ReadFFN`` reads, and of what, for a call on x [M, K]."""
    gate, up, down, before, added = way
    k, ranks = x.shape[1], [each.rank for each in before]
    sources: list[Tensor] = []
    lowering: list[Part] = []

    def zeros(count: int) -> list[Part]:
        return [Part(count)] if count else []

    def of_input(each: Projection | None, start: int) -> Matrix:
        if each is None:
            return Matrix((), dtype)
        parts = [each.weight(sources, k), *zeros(start), *each.raising(sources), *zeros(added - start - each.rank)]
        return Matrix(parts, dtype)

    # the columns of the adapters of up end those of x
    matrices = [of_input(gate, 0), of_input(up, sum(ranks[:-1]))]
    parts = [down.weight(sources, k), *down.lowering(sources), *zeros(added - down.rank)]
    matrices.append(Matrix(parts, dtype, 0))
    wide = x.to(dtype) if before else None
    if wide is not None and any(adapter.drops for each in before for adapter in each.adapters):
        # dropout takes what it drops in peft's own modules
        low = [columns for each in before for columns in each.lowered(x, dtype)]
        wide = torch.cat([wide, *low, wide.new_zeros((len(x), added - sum(ranks)))], 1)
    else:
        lowering = [each for one in before for each in one.lowering(sources)]
    matrices += [Matrix(lowering, dtype, 0), Matrix(down.raising(sources), dtype)]
    return matrices, sources, wide
