"""Layers with LoRA adapters, quantised weights or a gate from elsewhere, through the sparse functions.

For ``W x + s B A x`` the adapter is columns: of gate and up ``[x, A_g x, A_u x] @ [W_g, s B_g, 0]^T``, of the down
projection ``h @ [W_d; A_d]^T`` with ``s B_d`` behind it. So x and y get R more columns, and the layer is an ordinary
one of width K + R. A gate that no columns can tell is called, and ``sparse_up_down`` takes it. Weights are concatenated
and dequantised in each call: a copy could not be kept, as a write through ``.data`` raises no version. Deltas are never
added to weights, where 16 bits would round them away.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import _modes, functional
from twell._activation import activation_of
from twell._admission import sharded
from twell._columns import Matrix, Part, assembled, narrowed, widened
from twell._execution import Extra, Made
from twell._plain import HOOKS_OF_ALL, calls_are_torchs, overridden
from twell._projections import LowRank, Projection
from twell.ops.calls import How
from twell.ops.operands import Layer
from twell.strategy import tables
from twell.strategy.plan import Facts, Refusal, Route, plan
from twell.strategy.site import AutoStrategy, tokens_of

# "auto" calls the projections for fewer tokens if weights are copied, which takes longer than sparsity saves
FEWEST_TOKENS = 1024


class Way(NamedTuple):
    """How a layer runs sparse: its readings, gate and up None where they are called or not there.

    given: whether the gate, or without one the up projection, is called. added: the columns R.
    """

    gate: Projection | None
    up: Projection | None
    down: Projection
    given: bool
    added: int

    @property
    def sources(self) -> list[Projection]:
        """The readings whose adapters make columns of x."""
        # the halves of one projection have the same ones
        shared = self.up is not None and self.up.part is not None
        return [each for each in (None if shared else self.gate, self.up) if each is not None]

    @property
    def lowering(self) -> list[LowRank]:
        """The adapters that make columns of x."""
        return [adapter for each in self.sources for adapter in each.adapters]

    @property
    def drops(self) -> bool:
        """Whether one of them drops values of x now."""
        # not any(): Dynamo of torch 2.9 cannot trace it of a generator
        return True in [adapter.drops for adapter in self.lowering]

    @property
    def copies(self) -> bool:
        """Whether a call makes weights."""
        return bool(self.added) or any(each.quantised for each in (self.up, self.down) if each is not None)

    @property
    def rank(self) -> int:
        """The columns of x that adapters make."""
        return sum(each.rank for each in self.sources)


def way_of(layer: Any) -> Way | str:
    """How ``layer`` may run sparse though a projection is more than a weight and a bias, or why it cannot."""
    if any(HOOKS_OF_ALL) or not calls_are_torchs():
        return "hooks of all modules, or a replaced call"
    names, readings = _names(layer), layer._readings()
    first, *rest = readings
    for name, reading in zip(names[1:], rest):
        if isinstance(reading, str):
            return f"{name} {reading}"
    *ups, down = rest
    up = ups[0] if ups else None
    if any(each.drops for each in down.adapters):
        return f"{names[-1]} has an adapter with dropout of the hidden state (lora_dropout): kernels keep no zeros"
    given = isinstance(first, str) or bool(first.quantised and first.part is None)
    way = Way(None if given else first, up, down, given, 0)
    return way._replace(added=-(-max(way.rank, down.rank) // 8) * 8)


def planned(
    layer: Any, n: int, k: int, dtype: torch.dtype, device: torch.device, training: bool, x: Tensor | None = None
) -> Route | Refusal:
    """How calls of ``layer`` on weights of these sizes run, in the dtype of their products; ``x`` is that of one."""
    facts = Facts(
        type(layer).__name__,
        _asked(layer),
        layer._invariant,
        n=n,
        k=k,
        dtype=dtype,
        device=device.type,
        imposed=tables.imposed(device.type, device.index),
        training=training,
        moving=isinstance(layer._threshold, Tensor),
    )
    if x is not None:
        facts = facts._replace(
            site=True,
            # weights may be of the transform, too
            transformed="a call inside a transform" if _modes.transforming() else "",
            overridden=overridden({"x": x}),
            onnx=_modes.to_onnx(),
            exporting=_modes.exporting(),
            tracing=_modes.tracing(tokens_of(x)),
        )
    return plan(facts)


def foreseen(layer: Any, training: bool) -> Route | Refusal:
    """How calls run where a projection is more than a weight and a bias, as far as no call is known."""
    way = way_of(layer)
    if isinstance(way, str) or layer._invariant:
        answer = plan(Facts(type(layer).__name__, _asked(layer), layer._invariant, training=training, called=True))
        return answer._replace(reason=way) if isinstance(answer, Route) and isinstance(way, str) else answer
    device = way.down.linear.weight.device
    dtype = _modes.product_dtype(way.down.own_dtype, device.type)
    answer = planned(layer, layer.intermediate, layer.hidden + way.added, dtype, device, training)
    if isinstance(answer, Refusal):
        # calls of the projections take it
        return Route("dense", reason=answer.message)
    parts = [f"{way.added} columns of adapters"] if way.added else []
    parts += ["a gate that is called"] if way.given and layer._gated else []
    parts += ["dequantised weights"] if any(each.quantised for each in (way.up, way.down) if each) else []
    return answer._replace(reason=f"{answer.reason}; with {' and '.join(parts)}") if parts else answer


def _asked(layer: Any) -> Any:
    """The name of the layer's strategy."""
    return "auto" if isinstance(layer._strategy, AutoStrategy) else layer._strategy


def run(layer: Any, x: Tensor, with_aux: bool) -> Any:
    """The result of the layer's function, or why its projections must be called; "" where that is the choice."""
    auto, m = _asked(layer) == "auto", tokens_of(x)
    if auto and not (layer._given or _modes.tracing(m)) and m < FEWEST_TOKENS:
        return ""
    way = way_of(layer)
    if isinstance(way, str):
        return way
    if x.dim() == 0 or x.is_nested or x.layout is not torch.strided or x.shape[-1] != layer.hidden:
        return ""
    dtype = "x is sharded" if sharded({"x": x}) else _dtype(way, x)
    if isinstance(dtype, str):
        return dtype
    training = torch.is_grad_enabled() and (x.requires_grad or _trains(layer))
    answer = planned(layer, layer.intermediate, layer.hidden + way.added, dtype, x.device, training, x)
    if isinstance(answer, Refusal):
        return answer.message
    # an exported program has no guard for the number of tokens
    if answer.strategy == "dense" or (auto and way.copies and (_modes.exporting() or m < FEWEST_TOKENS)):
        return ""
    return _run(layer, way, x, dtype, with_aux)


def _dtype(way: Way, x: Tensor) -> torch.dtype | str:
    """The dtype of the products, or why there is not one; "" if PyTorch would refuse the operands, too."""
    plain = _modes.product_dtype(x.dtype, x.device.type)
    autocast = x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)
    used = [each for each in (way.gate, way.up, way.down) if each is not None]
    if not autocast and any(not each.quantised and each.linear.weight.dtype != x.dtype for each in used):
        return ""
    found = {each.dtype(x, plain) for each in used}
    if len(found) > 1 or (autocast and found != {plain}):
        return "products in several dtypes, as quantised weights have their own"
    return found.pop()


def _trains(layer: Any) -> bool:
    children = layer._modules
    return any(p.requires_grad for name in layer._projections for p in children[name].parameters())


def _run(layer: Any, way: Way, x: Tensor, dtype: torch.dtype, with_aux: bool) -> Any:
    gate, up, down, given, added = way
    k, lead, called = layer.hidden, x.shape[:-1], None
    if given:
        called = layer._gate(x)
        if type(called) is not Tensor or called.shape != (*lead, layer.intermediate):
            return layer._dense(called, layer._project("up_proj", x) if layer._gated else None, with_aux)

    def dense() -> Any:
        if called is None:
            return layer._behind(*layer._pre_activations(x))
        return layer._behind(called, layer._project("up_proj", x) if layer._gated else None)

    matrices, weights = _weights(way, dtype)
    w_gate, w_up, w_down = (weights.get(name) for name in ("gate", "up", "down"))
    wide = _wide(way, x, weights.get("lowering"), dtype) if added else x.to(dtype)
    b_gate, b_up, b_down = (None if each is None else each.bias(dtype) for each in (gate, up, down))
    if added and b_down is not None:
        b_down = F.pad(b_down, (0, added))
    strategy = layer._site() or layer._strategy
    activation = activation_of(layer._activation, layer._threshold, layer._gated)
    # frozen weights need no gradient in front of those of adapters
    frozen = not any(each.linear.weight.requires_grad for each in (gate, up, down) if each is not None)
    first = down if given else gate
    # operators find the site by a weight that the layer holds
    held = None if first is None or first.quantised else first.linear.weight
    extra = Extra(Made(held, k if added and frozen else 0, dense))
    how = How(activation, strategy, False, layer._compression)
    result: Any
    with _made_again(x, [(matrices[name], weights[name]) for name in ("gate", "up", "down") if name in weights]):
        if called is None:
            function = functional.sparse_gated_ffn if layer._gated else functional.sparse_ffn
            operands = Layer(wide, w_gate, w_up, w_down, b_gate, b_up, b_down)
            result = functional.run(function, operands, how, None, with_aux, extra)
        else:
            of_gate = called.reshape(-1, called.shape[-1]) if added else called
            own = None if up is None else wide
            operands = Layer(own, None, w_up, w_down, None, b_up, b_down, of_gate.to(dtype))
            result = functional.run(functional.sparse_up_down, operands, how, None, with_aux, extra)
    y, aux = result if with_aux else (result, None)
    # a dense call is of the projections
    if y.shape[-1] != k:
        y = narrowed(y, weights["raising"] if "raising" in weights else y.new_empty((k, 0))).view(*lead, k)
    y = y.to(_dtype_of_y(way, x, called, dtype))
    return (y, aux) if with_aux else y


def _weights(way: Way, dtype: torch.dtype) -> tuple[dict[str, Matrix], dict[str, Tensor]]:
    """The weights of the projections that are not called, and of adapters: of all before x, and behind the down one."""
    gate, up, down, _, added = way
    matrices = {"down": _of_output(down, dtype, added)}
    if gate is not None:
        matrices["gate"] = _of_input(gate, dtype, 0, added)
    if up is not None:
        # the columns of its adapters end those of x
        matrices["up"] = _of_input(up, dtype, way.rank - up.rank, added)
    if way.lowering and not way.drops:
        matrices["lowering"] = Matrix([Part(adapter.a.weight) for adapter in way.lowering], dtype, 0)
    if down.adapters:
        matrices["raising"] = Matrix(down.raising(), dtype)
    weights = dict(zip(matrices, assembled([*matrices.values()])))
    if added:
        weights["down"] = weights["down"].t()
    return matrices, weights


def _wide(way: Way, x: Tensor, lowering: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The columns of x [M, K] and those of adapters."""
    x = x.reshape(-1, x.shape[-1])
    wide = x.to(dtype)
    if lowering is not None:
        return widened(wide, lowering, x.shape[1] + way.added)
    # dropout takes what it drops in peft's own modules
    low = [Part(columns) for each in way.sources for columns in each.lowered(x, dtype)]
    return assembled([Matrix([Part(wide), *low, way.added - sum([part.shape[1] for part in low])], dtype)])[0]


def _of_input(each: Projection, dtype: torch.dtype, start: int, added: int) -> Matrix:
    """The weight of gate or up with ``added`` columns, of which those from ``start`` on are its adapters'."""
    if not added:
        return Matrix([each.weight()], dtype)
    return Matrix([each.weight(), start, *each.raising(), added - start - each.rank], dtype)


def _of_output(each: Projection, dtype: torch.dtype, added: int) -> Matrix:
    """The weight of the down projection; with ``added`` rows by rows of neurons, as kernels read it, [N, K + R]."""
    weight = each.weight()
    if not added:
        return Matrix([weight], dtype)
    lowering = [Part(adapter.a.weight, transposed=True) for adapter in each.adapters]
    return Matrix([weight._replace(transposed=True), *lowering, added - each.rank], dtype)


class _Kept(NamedTuple):
    """What backward keeps of a tensor: how it is made, and the versions of what it is made of."""

    make: Callable[[], Tensor]
    sources: tuple[Tensor, ...]
    versions: tuple[int, ...]

    def __call__(self) -> Tensor:
        if tuple(t._version for t in self.sources) != self.versions:
            raise RuntimeError("an operand of an adapted twell layer was changed by an inplace operation")
        with torch.no_grad():
            return self.make()


def _kept(make: Callable[[], Tensor], *sources: Tensor) -> _Kept:
    return _Kept(make, sources, tuple(t._version for t in sources))


def _made_again(x: Tensor, weights: Iterable[tuple[Matrix, Tensor]]) -> contextlib.AbstractContextManager[Any]:
    """A context in which backward keeps how ``weights`` are made instead of them, which are of this call alone.

    Else training would hold a copy of all weights. Hooks of others, as of checkpoints, drop or move what is kept.
    """
    if not torch.is_grad_enabled() or not _modes.eager((x,)) or _modes.checkpointed():
        return contextlib.nullcontext()
    made: dict[Any, _Kept] = {}
    for matrix, weight in weights:
        if not matrix.is_source() or matrix.present[0].origin is not None:
            make, sources = matrix.kept()
            transposed: Callable[[], Tensor] = functools.partial(_transposed, make)
            # that of the down projection is a view of what is made; autograd may save either
            ways = (transposed, make) if matrix.present[0].transposed else (make, transposed)
            for view, how in zip((weight, weight.t()), ways):
                made[_place(view)] = _kept(how, *sources)
    if not made:
        return contextlib.nullcontext()

    def pack(tensor: Tensor) -> _Kept:
        if isinstance(tensor, torch.nn.Parameter):
            # its memory, as above
            tensor = tensor.detach()
        # hooks take the check of versions over
        return made.get(_place(tensor)) or _kept(lambda: tensor, tensor)

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept())


def _transposed(make: Callable[[], Tensor]) -> Tensor:
    return make().t()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _dtype_of_y(way: Way, x: Tensor, called: Tensor | None, dtype: torch.dtype) -> torch.dtype:
    """The dtype that the projections would return: a quantised one returns that of its input."""
    if not way.down.quantised:
        return dtype
    of_gate = called.dtype if called is not None else dtype
    up = way.up
    return of_gate if up is None else torch.promote_types(of_gate, x.dtype if up.quantised else dtype)


def _names(layer: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = layer._projections
    # gate and up in one
    return (names[0], *names) if layer._gated and len(names) == 2 else names
