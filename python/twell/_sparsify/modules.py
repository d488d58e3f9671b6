"""The modules that ``sparsify_`` makes: layers whose projections keep their names, and the two halves of a pair."""

from __future__ import annotations

import functools
import itertools
import threading
import types
import weakref
from collections.abc import Iterable
from typing import Any, Literal, NoReturn, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from twell import _modes, functional
from twell._activation import RELU, Activation, activation_of
from twell._execution import Aux, dense_aux
from twell._plain import HOOKS, HOOKS_OF_ALL, behaves, calls_are_torchs, cast, of_torch, only_moves, runs_its_class
from twell._projections import Projection
from twell._runtime.log import warn_once
from twell.choose.plan import Facts, routed
from twell.nn import SparseFFN, SparseGatedMLP, SparseMLP
from twell.ops.calls import How
from twell.ops.operands import Layer

# The names of projections in layers of twell.
GATED = ("gate_proj", "up_proj", "down_proj")
PLAIN = ("up_proj", "down_proj")


class SharedLinear(nn.Linear):
    """An ``nn.Linear`` that shares the parameters of another; ``_share`` sets them."""

    def __init__(self) -> None:
        # nn.Linear's own would allocate
        nn.Module.__init__(self)

    def _share(self, linear: nn.Linear) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)
        _keep_attributes(self, linear)


class _HandedOn(threading.local):
    """The last input of each ``DeferredUp`` in this thread, with its version, until its ``SparseDown`` takes it."""

    def __init__(self) -> None:
        self.tensors: weakref.WeakKeyDictionary[DeferredUp, tuple[weakref.ref[Tensor], int]]
        self.tensors = weakref.WeakKeyDictionary()


_HANDED_ON = _HandedOn()


class Block:
    """A weak reference to the block of a pair, with names in it. In a copy of the block it refers to the copy.

    names: of the pair's layers. between: of what may run between them: the activation, and dropouts, which are modules
    or their ``p``.
    """

    def __init__(
        self, block: nn.Module | None = None, names: tuple[str, ...] = ("fc1", "fc2"), between: tuple[str, ...] = ()
    ) -> None:
        self.ref = None if block is None else weakref.ref(block)
        self.names, self.between = names, between

    def __call__(self) -> nn.Module | None:
        return None if self.ref is None else self.ref()

    def __deepcopy__(self, memo: dict[int, Any]) -> Block:
        block = self()
        return Block(None if block is None else memo.get(id(block)), self.names, self.between)

    def __reduce__(self) -> tuple[Any, ...]:
        return Block, (self(), self.names, self.between)


# Dynamo would compile such a method for itself where it has left the graph around it, and then reuse a comparison of
# one pair's modules for another's (torch 2.13).
_eagerly = torch._disable_dynamo  # type: ignore[attr-defined]


class DeferredUp(SharedLinear):
    """``fc1`` of a pair: holds the up projection's parameters and returns its input, which ``SparseDown`` takes."""

    _block = Block()
    _casts = False

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> x; where the block drops values of the hidden state, what is before the activation."""
        if self.drops():
            return applied(self, x)
        if _modes.compiling():
            self._require_unchanged()
        else:
            if isinstance(x, Tensor):
                _HANDED_ON.tensors[self] = weakref.ref(x), _version(x)
            # some code that takes x for the hidden state works with any size, adapters among it
            self._require_place(DeferredUp)
            self._require_place(PairDown)
        return x

    def _require_unchanged(self) -> None:
        """Raise NotImplementedError, while a graph is traced, if the block no longer uses the pair as it did."""
        # where Dynamo may leave the graph, the block then runs eagerly, which sees more
        if change := self._change():
            raise NotImplementedError(change)

    @_eagerly
    def _change(self) -> str:
        """Describe what may run in place of the pair or between its layers, by the block's children; "" if nothing."""
        block = self._block()
        if block is None:
            return ""
        (fc1, fc2), between = self._block.names, self._block.between
        # a dropout that drops is no change, as the block runs without the pair then
        looked_at = between[:1] if self.drops() else between
        odd = [name for name in looked_at if not _passes_on(_below(block, name), block.training)]
        if odd:
            thing = _below(block, odd[0])
            got = repr(thing) if isinstance(thing, (nn.Dropout, int, float)) else type(thing).__name__
            return (
                f"{odd[0]} between {fc1} and {fc2} of a twell pair must change nothing, since {fc2} does the work of "
                f"both and of the activation, got {got}: set it before sparsify_"
            )
        return self._misplaced(DeferredUp) or self._misplaced(PairDown)

    def drops(self) -> bool:
        """Whether the block drops values of the hidden state now. Then it runs as it did, without the pair."""
        # read here, for Dynamo to guard on it
        return self.training and bool(self.dropped_by())

    @_eagerly
    def dropped_by(self) -> str:
        """What of the block drops values of the hidden state in training; "" if nothing."""
        block = self._block()
        found = {} if block is None else {name: _below(block, name) for name in self._block.between[1:]}
        shares = {name: each.p if isinstance(each, _DropoutNd) else each for name, each in found.items()}
        return "; ".join(f"{name}, p = {p}" for name, p in shares.items() if isinstance(p, (float, int)) and p)

    @_eagerly
    def _require_place(self, kind: type[nn.Module]) -> None:
        """Raise NotImplementedError unless the block still calls this pair's layer of a kind under its name."""
        if misplaced := self._misplaced(kind):
            raise NotImplementedError(misplaced)

    def _misplaced(self, kind: type[nn.Module]) -> str:
        """Describe what the block has in place of this pair's layer of a kind; "" if it has that layer."""
        block = self._block()
        if block is None:
            return ""
        fc1, fc2 = self._block.names
        name = fc2 if kind is PairDown else fc1
        child = _below(block, name)
        if _is_within(child, kind, self):
            return ""
        got = f"{type(child).__module__}.{type(child).__name__}"
        return (
            f"{name} of a twell pair must be the {kind.__name__} that sparsify_ made, since {fc1} returns its input "
            f"and {fc2} does the work of both, got {got}: merge an adapter, and replace a layer, before sparsify_, or "
            "leave the block out by filter_fn"
        )

    @_eagerly
    def _bypassed(self) -> str:
        """Describe what the block has in place of ``fc1`` of this pair, or of one tied to it; "" if it has that."""
        block = self._block()
        if block is None or _is_within(_below(block, self._block.names[0]), DeferredUp):
            return ""
        return self._misplaced(DeferredUp)


# the mark of torch.compiler.assume_constant_result: what these read by a weak reference, tracing need not follow
DeferredUp._change._dynamo_marked_constant = True  # type: ignore[attr-defined]
DeferredUp.dropped_by._dynamo_marked_constant = True  # type: ignore[attr-defined]
DeferredUp._bypassed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_within(module: Any, kind: type[nn.Module], up: DeferredUp | None = None) -> bool:
    """Whether a module is a layer of a kind, perhaps in wrappers that call nothing else on its way.

    With ``up`` it must be of that pair.
    """
    # Sequential and wrappers that checkpoint, compile or shard pass their input to their first child
    while module is not None and not isinstance(module, kind) and of_torch(type(module)):
        inner = list(module.children())
        # what fc1 returns, fc2 must get
        alone = kind is PairDown or all(map(_passes_on, inner[1:]))
        module = inner[0] if inner and alone else None
    return isinstance(module, kind) and (up is None or module is up or getattr(module, "up_proj", None) is up)


def _passes_on(thing: Any, training: bool = True) -> bool:
    """Whether a module returns its input, or a dropout of a block in ``training`` does whose ``p`` this is."""
    if not isinstance(thing, nn.Module):
        return bool(thing == 0) or not training
    if isinstance(thing, _DropoutNd) and of_torch(type(thing)) and runs_its_class(thing):
        return thing.p == 0 or not thing.training
    if type(thing).forward in (nn.Identity.forward, HandOn.forward):
        return not _is_replaced(thing)
    inner = list(thing.children())
    return of_torch(type(thing)) and bool(inner) and all(map(_passes_on, inner))


def _is_replaced(module: nn.Module) -> bool:
    """Whether a module has a ``forward`` set on the instance that may do more than its class's."""
    return "forward" in vars(module) and not only_moves(module)


def keep_hook(made: nn.Module, of: nn.Module) -> None:
    """Let the hook of accelerate that moves the inputs of a module work on the one that takes its place."""
    wrapper: Any = vars(of).get("forward")
    if wrapper is not None and only_moves(of):
        own = types.MethodType(type(made).forward, made)
        # as accelerate does it; set past nn.Module, which has nothing to register here
        vars(made).update(_hf_hook=vars(of)["_hf_hook"], _old_forward=own)
        vars(made)["forward"] = functools.update_wrapper(functools.partial(wrapper.func, made), own)


class PairDown(nn.Module):
    """``fc2`` of a pair: checks that nothing has come between it and ``fc1``, which is ``up_proj`` but not a child."""

    up_proj: Any

    def _require_pair(self, x: Tensor) -> None:
        """Raise NotImplementedError if x may be another tensor than ``fc1`` got."""
        if _modes.compiling():
            self.up_proj._require_unchanged()
        else:
            self._require_handed_on(x)

    def _require_handed_on(self, x: Tensor) -> None:
        """Raise NotImplementedError if x is known to be another tensor than ``fc1`` got."""
        up = self.up_proj
        handed_on = _HANDED_ON.tensors.pop(up, None)
        if handed_on is None:
            # fc1 ran compiled or not at all, or another pair's did
            if any(other() is x for other, _ in _HANDED_ON.tensors.values()):
                raise NotImplementedError(
                    "fc2 of a twell pair must be called after its own fc1, since it does the work of both, got the "
                    "input of another pair's fc1; tie or copy layers before sparsify_, or both of a pair together"
                )
            up._require_place(DeferredUp)
        elif handed_on[0]() is x:
            if handed_on[1] != _version(x):
                raise NotImplementedError(
                    "fc2 of a twell pair must be called on what fc1 returns, its input, got one that was changed in "
                    "place in between: remove the hook that does so"
                )
            # a wrapper around fc1 may exchange its weight for the time of its call
            up._require_place(DeferredUp)
        elif not (any(HOOKS_OF_ALL) or _changed(up) or _changed(self)):
            raise NotImplementedError(
                "fc2 of a twell pair must be called on the very tensor that fc1 returns, its input, got another one: "
                "nothing may run between them or change either: merge an adapter, and replace a layer, before "
                "sparsify_, or leave the block out by filter_fn"
            )

    def _require_called(self) -> None:
        """Raise NotImplementedError if ``fc1`` has another forward; warn of hooks on either."""
        up = self.up_proj
        if _is_replaced(up):
            got = "one set on the instance: fc2 does the work of fc1 and would not call it"
            if "_hf_hook" in vars(up):
                got = (
                    "accelerate's, which offloads its weights: keep them on a device, by device_map, or offload no pair"
                )
            raise NotImplementedError(f"fc1 of a twell pair must keep its forward, got {got}")
        if not _modes.compiling():
            if any(HOOKS_OF_ALL) or _hooks(up):
                warn_once("fc1 of a twell pair has hooks: they see its input on both sides and must not change it")
            if _hooks_of_others(self):
                warn_once(
                    "fc2 of a twell pair has hooks: they see the input of fc1, and its gradient, where the hidden "
                    "state was, and must not change it"
                )


class SparseDown(PairDown, SparseMLP, SharedLinear):
    """``fc2`` of a pair: ``fc2(relu(fc1(x)))`` through ``twell.sparse_ffn`` on the input x [..., hidden] of ``fc1``.

    For blocks with both layers and the activation among their own children, which keep their own ``forward`` and their
    keys ``fc1.weight`` and ``fc2.weight``: ``fc1`` becomes a ``DeferredUp``, the activation a ``HandOn``. This layer,
    an ``nn.Linear`` with the down projection's parameters, does the work of all three. ``up_proj`` is the module
    ``fc1`` itself but not a child: copying, pickling, moving and loading the block keep the two together. All else is
    as in ``twell.nn.SparseMLP``.
    """

    up_proj: nn.Linear

    def __init__(self, up: DeferredUp, down: nn.Linear, **options: Any) -> None:
        SparseFFN.__init__(self, up.in_features, up.out_features, **options)
        self._share(down)
        # not through nn.Module, which would make it a child with state-dict keys of its own
        object.__setattr__(self, "up_proj", up)

    def _add_projections(self, *_: Any) -> None:
        """It is one itself, and has the other."""

    @overload
    def forward(self, x: Tensor, return_aux: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, return_aux: Literal[True]) -> tuple[Tensor, Aux]: ...
    def forward(self, x: Tensor, return_aux: bool = False) -> Tensor | tuple[Tensor, Aux]:
        """x [..., hidden], the very tensor that ``fc1`` got, -> y [..., hidden], as in ``SparseMLP``."""
        if self.up_proj.drops():  # type: ignore[operator]
            if return_aux or self._record_aux or self._accumulate_main_grad:
                self.require_whole()
            return applied(self, x)
        self._require_pair(x)
        return super().forward(x, return_aux)  # type: ignore[call-overload,no-any-return]

    def require_whole(self) -> None:
        """Raise NotImplementedError if the block drops values of the hidden state now, of which x is none then."""
        up: Any = self.up_proj
        if not self._given and up.drops():
            raise NotImplementedError(
                "figures and main gradients of a twell pair are of a whole hidden state, got a block that drops values "
                f"of it in training ({up.dropped_by()}): set it to 0"
            )

    def _refusal(self) -> str:
        up: DeferredUp = self.up_proj  # type: ignore[assignment]
        return up._change() or super()._refusal()

    def _dropped_by(self) -> str:
        up: Any = self.up_proj
        return up.dropped_by()  # type: ignore[no-any-return]

    def _is_plain(self) -> bool:
        self._require_called()
        # not by name: reading a parametrized weight computes it, and may change it
        parameters = itertools.chain(self.up_proj._parameters.values(), self._parameters.values())
        return calls_are_torchs() and all(map(behaves, parameters))

    def _readings(self) -> list[Projection | str]:
        why = "of a twell pair has weights that are not plain nn.Parameters"
        return [why, why]

    def take(self, other: Any) -> None:
        """Take the parameters, sizes and record of ``other``, a copy of this pair with other neurons."""
        for mine, theirs in ((self.up_proj, other.up_proj), (self, other)):
            mine._parameters.update(theirs._parameters)
            mine.in_features, mine.out_features = theirs.in_features, theirs.out_features
        self.intermediate = other.intermediate
        self._modules.pop("compaction", None)
        self._modules.update(other._modules)

    def _project(self, name: str, x: Tensor) -> Any:
        # the layer's own product, as if it were no part of a pair
        return applied(self if name == "down_proj" else self.up_proj, x)

    def reset_parameters(self) -> None:
        """Initialise this layer's own weight and bias again; ``fc1`` has its own ``reset_parameters``."""
        nn.Linear.reset_parameters(self)

    @property
    def down_proj(self) -> nn.Linear:  # type: ignore[override]
        """This layer itself."""
        return self


class GivenDown(SparseDown):
    """The second of two layers, on the non-zeros of a hidden state that the block's own code makes of the first.

    For activations in the code of a block. ``up_proj``, the first layer, stays what it is and is called as before.
    """

    _given = True
    _block = Block()

    def forward(self, x: Tensor, return_aux: bool = False) -> Any:
        """x [..., intermediate], no value below 0 -> y [..., hidden]. As nn.Linear where something changed x before."""
        if self._is_changed():
            y = applied(self, x)
            with_aux = return_aux or self._record_aux
            return self._finish((y, dense_aux(x, x, RELU)) if with_aux else y, return_aux)
        return SparseFFN.forward(self, x, return_aux)  # type: ignore[call-overload]

    @_eagerly
    def _is_changed(self) -> bool:
        """Whether a hook, or a wrapper in this layer's place, may hand it something else than the block made."""
        block = self._block()
        return block is None or _below(block, self._block.names[1]) is not self or bool(_hooks_of_others(self))

    def _is_plain(self) -> bool:
        return False

    def _dropped_by(self) -> str:
        return ""

    def _refusal(self) -> str:
        return "accumulate_main_grad: expected a layer that makes its gate itself" if self.accumulate_main_grad else ""

    def _readings(self) -> list[Projection | str]:
        return ["is called, and what it returns made the hidden state, by the block's own code", Projection(self)]

    def _pre_activations(self, x: Tensor) -> tuple[Any, Any]:
        return x, None

    def _gate(self, x: Tensor) -> Any:
        return x

    def _adapted(self, x: Tensor, with_aux: bool) -> Any:
        if refusal := self._refusal():
            raise NotImplementedError(refusal)
        routed(Facts(invariant=self._invariant, called=True))
        layer = Layer(None, None, None, self.weight, None, None, self.bias, x)
        how = How(RELU, self._site() or self._strategy, False, self._compression)
        return functional.run(functional.sparse_up_down, layer, how, None, with_aux)


GivenDown._is_changed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _hooks(module: nn.Module) -> list[Any]:
    """The hooks of a module's calls."""
    return [hook for kind in HOOKS for hook in getattr(module, kind).values()]


def _hooks_of_others(module: nn.Module) -> list[Any]:
    """Those of others than twell, and the hooks of all modules."""
    own = [hook for hook in _hooks(module) if not str(getattr(hook, "__module__", "")).startswith("twell.")]
    return [*own, *(hook for hooks in HOOKS_OF_ALL for hook in hooks.values())]


def _version(x: Tensor) -> int:
    """How often a tensor was changed in place, as far as it is known."""
    return 0 if x.is_inference() else x._version


def _changed(module: nn.Module) -> bool:
    """Whether hooks or a replaced forward may exchange the module's input or output for another tensor."""
    return "forward" in vars(module) or bool(_hooks(module))


def pair_up(
    block: nn.Module,
    names: tuple[str, ...],
    attribute: str,
    dropouts: tuple[str, ...],
    options: dict[str, Any],
    casts: bool = False,
) -> None:
    """Make two layers of a block a pair; ``attribute`` is the activation between them, ``casts`` as in a layer."""
    first, second = map(block.get_submodule, names)
    up = DeferredUp()
    up._share(first)  # type: ignore[arg-type]
    down = SparseDown(up, second, **options)  # type: ignore[arg-type]
    up._casts = down._casts = casts
    put_pair(block, names, attribute, dropouts, down)


def give(block: nn.Module, names: tuple[str, ...], options: dict[str, Any]) -> None:
    """Put a ``GivenDown`` in the place of the second of two layers of a block."""
    down = GivenDown(*map(block.get_submodule, names), **options)  # type: ignore[arg-type]
    down._block = Block(block, names)
    block.set_submodule(names[1], down)


def put_pair(
    block: nn.Module, names: tuple[str, ...], attribute: str, dropouts: tuple[str, ...], down: PairDown
) -> None:
    """Put a pair in the place of two layers of a block and of the activation between them.

    The objects that were there stay what they are, for whatever else refers to them.
    """
    up = down.up_proj
    for name, new in zip((*names, attribute), (up, down, HandOn(down))):
        holder, _, key = name.rpartition(".")
        old = getattr(block.get_submodule(holder), key)
        setattr(block.get_submodule(holder), key, new.train(getattr(old, "training", block.training)))
    up._block = Block(block, names, (attribute, *dropouts))
    if isinstance(block, nn.TransformerEncoderLayer):
        # else its fast path for inference would read the weights and run dense
        block.activation_relu_or_gelu = 0


class HandOn(nn.Identity):
    """The activation of a pair: returns its input, what ``fc1`` returned, unless the block runs without the pair.

    Where code reads the weights of both layers and calls neither, as some adapters do, nothing else would notice that
    there is no activation.
    """

    down: Any

    def __init__(self, down: PairDown) -> None:
        super().__init__()
        # as in SparseDown
        object.__setattr__(self, "down", down)

    @property
    def up(self) -> DeferredUp:
        """``fc1`` of the pair."""
        return self.down.up_proj  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """x -> x. NotImplementedError if ``fc1`` did not return it and is no longer in its place."""
        if self.up.drops():
            activation = activation_of(self.down.activation, self.down.threshold, gated=False)
            return activation.hidden(activation.after(x, inplace=False), None)
        if _modes.compiling() or all(other() is not x for other, _ in _HANDED_ON.tensors.values()):
            bypassed = self.up._bypassed()
            if bypassed:
                raise NotImplementedError(bypassed)
        return x


def applied(linear: Any, x: Tensor) -> Tensor:
    """The product of x with the weight of a half of a pair, which is cast to its dtype where the model's own is."""
    operands = [linear.weight, linear.bias]
    return F.linear(x, *(cast(operands, x.dtype) if linear._casts else operands))


class Applied(nn.Module):
    """An activation in the place of another one in a replaced ``nn.Sequential``, which runs it no longer."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation.hidden(self.activation.after(x), None)


class _Renamed(SparseFFN):
    """A layer whose projections are children of other names, ``_names``."""

    def __init__(self, names: tuple[str, ...], linears: Iterable[nn.Linear], **options: Any) -> None:
        linears = list(linears)
        SparseFFN.__init__(self, linears[0].in_features, linears[-1].in_features, **options)
        self._names = names
        for name, linear in zip(names, linears):
            # add_module would ask the properties of these names
            self._modules[name] = linear

    @property
    def _projections(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._names

    def _is_plain(self) -> bool:
        # nn.Module stores it beside the child that has the role
        if odd := [name for name in GATED if name in self._modules and name not in self._names]:
            raise AttributeError(
                f"{odd[0]} must be set by the child's own name in a layer whose projections are "
                f"{', '.join(self._names)}, got one set as {odd[0]}: delete it, and set the other"
            )
        return super()._is_plain()

    def _add_projections(self, *_: Any) -> None:
        """They are given."""

    _names: tuple[str, ...]


def _child(place: int) -> Any:
    """A property: the child whose name is at this place of ``_names``."""
    return property(lambda layer: layer._modules[layer._names[place]])


class NamedMLP(_Renamed, SparseMLP):  # type: ignore[misc]
    """A ``SparseMLP`` whose projections are children of other names, as ``wi`` and ``wo``; else the same."""

    up_proj = _child(0)
    down_proj = _child(1)


class NamedGatedMLP(_Renamed, SparseGatedMLP):
    """A ``SparseGatedMLP`` whose projections are children of other names, as ``w1``, ``w3`` and ``w2``."""

    gate_proj = _child(0)
    up_proj = _child(1)
    down_proj = _child(2)


class GivenGatedMLP(SparseGatedMLP):
    """A ``SparseGatedMLP`` whose gate is what the class that it was makes of its projection, by children and methods.

    They make the zeros, and no value below 0, so that ReLU behind them changes nothing.
    """

    _given = True

    def __init__(self, was: type[nn.Module], steps: tuple[str, ...], k: int, n: int, **options: Any) -> None:
        super().__init__(k, n, **options)
        self._was, self._steps = was, steps

    def _is_plain(self) -> bool:
        return False

    def _readings(self) -> list[Projection | str]:
        return ["has its gate made by the model's own code", *super()._readings()[1:]]

    def _gate(self, x: Tensor) -> Any:
        return made_by(self, self._steps, self._project("gate_proj", x))

    def __getattr__(self, name: str) -> Any:
        """A method of the class that it was, which its own code may call."""
        found = getattr(self.__dict__.get("_was"), name, None)
        return types.MethodType(found, self) if isinstance(found, types.FunctionType) else super().__getattr__(name)

    def _pre_activations(self, x: Tensor) -> tuple[Any, Any]:
        return self._gate(x), self._project("up_proj", x)


def made_by(module: nn.Module, steps: tuple[str, ...], gate: Tensor) -> Any:
    """The gate that children and methods of a module make of its projection; a trial raises ValueError below 0."""
    kind = vars(module).get("_was")
    for step in steps:
        child = module._modules.get(step)
        gate = child(gate) if child is not None else getattr(kind or type(module), step)(module, gate)
    if kind is None and bool((gate < 0).any()):
        raise ValueError("a gate below 0")
    return gate


class FusedGatedMLP(_Renamed, SparseGatedMLP):
    """A ``SparseGatedMLP`` whose gate and up projections are one child [2 N, K], as ``gate_up_proj`` of Phi-3.

    The kernels read its two halves in place. ``gate_proj`` and ``up_proj`` are new layers around these views.
    """

    def __init__(self, names: tuple[str, ...], linears: Iterable[nn.Linear], up_first: bool, **options: Any) -> None:
        super().__init__(names, linears, **options)
        self._up_first = up_first

    @property
    def gate_proj(self) -> nn.Linear:  # type: ignore[override]
        """A layer with the views of the gate's weight and bias."""
        return _view(*self._halves()[0])

    @property
    def up_proj(self) -> nn.Linear:  # type: ignore[override]
        """A layer with the views of the up projection's weight and bias."""
        return _view(*self._halves()[1])

    down_proj = _child(1)

    def _halves(self) -> list[tuple[Tensor, Tensor | None]]:
        weight, bias = self._applied(self._names[0])
        biases = (None, None) if bias is None else bias.chunk(2)
        return self._ordered(zip(weight.chunk(2), biases))

    def _ordered(self, halves: Iterable[Any]) -> list[Any]:
        return list(halves)[:: -1 if self._up_first else 1]

    def _operands(self) -> Iterable[tuple[Tensor, Tensor | None]]:
        return *self._halves(), self._applied(self._names[1])

    def _readings(self) -> list[Projection | str]:
        fused, down = super()._readings()
        if isinstance(fused, str):
            return [fused, fused, down]
        return [*self._ordered(fused._replace(part=part) for part in (0, 1)), down]

    def _pre_activations(self, x: Tensor) -> tuple[Any, Any]:
        gate, up = self._ordered(self._project(self._names[0], x).chunk(2, dim=-1))
        return gate, up

    def _gate(self, x: Tensor) -> Any:
        return self._pre_activations(x)[0]

    def _main_grads(self, **weights: Tensor) -> list[Tensor | None] | None:
        whole = {name: self._applied(name)[0] for name in self._names}
        mains = super()._main_grads(**whole)
        if mains is None:
            return None
        fused, down = mains
        return [*((None, None) if fused is None else self._ordered(fused.chunk(2))), down]

    def _owners(self, *weights: Tensor) -> tuple[Tensor, ...]:
        fused, _ = self._applied(self._names[0])
        return fused, fused, weights[-1]

    _up_first: bool


def _keep_attributes(made: nn.Module, of: nn.Module) -> None:
    """Give a new layer what a model's code has set on the one that it replaces, as a factor for its learning rate."""
    keep_hook(made, of)
    vars(made).update({name: value for name, value in vars(of).items() if not hasattr(made, name)})


class _Gone:
    """Stands in a layer for a function or a child that its module's code called before: all uses of it raise."""

    def __init__(self, name: str) -> None:
        vars(self)["_name"] = name

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        raise AttributeError(
            f"{vars(self).get('_name')} is gone: sparsify_ made its module a layer that applies the activation itself. "
            "Call the module and not its parts, or leave it out by filter_fn"
        )

    __call__ = __setattr__ = _raise


def turn(module: nn.Module, made: nn.Module) -> None:
    """Make ``module`` itself the layer ``made``, so that whatever refers to it has that layer.

    What the module's code computed with is gone: other code that calls its parts, and a method of its old class that
    something kept, raises or computes the same of the projections. Settings that are no functions stay readable.
    """
    functions = [key for key, value in vars(module).items() if callable(value) and key not in vars(made)]
    made.train(module.training)
    vars(made)["_compiled_call_impl"] = module._compiled_call_impl
    before = dict(vars(module))
    object.__setattr__(module, "__class__", type(made))
    vars(module).clear()
    vars(module).update(vars(made))
    vars(module).update(
        {key: value for key, value in before.items() if key not in functions and not hasattr(module, key)}
    )
    parts = (key for key in (*functions, *before["_modules"]) if key[0] != "_" and not hasattr(module, key))
    vars(module).update({key: _Gone(key) for key in parts})
    wrapped = types.SimpleNamespace(**{key: before[key] for key in ("forward", "_hf_hook") if key in before})
    keep_hook(module, wrapped)  # type: ignore[arg-type]


def _view(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """An ``nn.Linear`` around tensors that are no parameters."""
    made: Any = SharedLinear()
    made.weight, made.bias = weight, bias
    made.out_features, made.in_features = weight.shape
    return made  # type: ignore[no-any-return]


def below(module: nn.Module, name: str) -> nn.Module | None:
    """A child, or "child.name" the child of a child; None if there is none."""
    child, _, key = name.partition(".")
    found = module._modules.get(child)
    return found._modules.get(key) if key and found is not None else found


def _below(module: nn.Module, name: str) -> Any:
    """A child, perhaps of a child within wrappers of torch, or another attribute; None if there is none."""
    child, _, key = name.rpartition(".")
    holder: Any = module._modules.get(child) if child else module
    while child and holder is not None and key not in holder._modules and of_torch(type(holder)):
        holder = next(holder.children(), None)
    return getattr(holder, key, None)
