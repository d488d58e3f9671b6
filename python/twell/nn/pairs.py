"""The two halves of a pair, which ``sparsify_`` makes of two layers of a block and the activation between them."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from twell.base.activation import RELU, Activation, activation_of
from twell.call.plain import HOOKS, HOOKS_OF_ALL, behaves, calls_are_torchs, cast, is_own, only_moves, runs_its_class
from twell.nn.layers import SparseFFN, SparseMLP
from twell.nn.projections import Projection
from twell.runtime import modes
from twell.runtime.log import warn_once


class SharedLinear(nn.Linear):
    """An ``nn.Linear`` that shares the parameters of another; ``_share`` sets them."""

    def __init__(self) -> None:
        # nn.Linear's own would allocate
        nn.Module.__init__(self)

    def _share(self, linear: nn.Linear) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("weight", linear.weight)  # type: ignore[arg-type]
        self.register_parameter("bias", linear.bias)
        self.train(linear.training)
        # what a model's code has set on it, as a factor for its learning rate
        keep_hook(self, linear)
        vars(self).update({name: value for name, value in vars(linear).items() if not hasattr(self, name)})


class Deferred:
    """What ``fc1`` of a pair returns, and the activation behind it: a tensor that is not computed until it is used.

    The pair's own ``fc2`` takes ``x`` and runs as a layer. All other code, by an operator or an attribute, gets the
    tensor that it would get without twell, and ``fc2`` runs on what that code returns: so nothing that is put between
    or around the layers needs to be known. x: the input of ``fc1``. act: the activation; None before it.
    """

    def __init__(self, up: DeferredUp, x: Any, before: Any = None, act: Any = None) -> None:
        self._up, self._x, self._act = up, x, act
        # a wrapper around fc1 may exchange them for the time of its call
        of: tuple[Any, Any] = (up.weight, up.bias) if before is None else (before._weight, before._bias)
        self._weight, self._bias = of
        self._seen = self._state() if before is None else before._seen
        self._grads = torch.is_grad_enabled()
        self._made: Tensor | None = None

    def _state(self) -> list[Any] | None:
        """Versions and the place of the weight, which tell whether the product is still the same; None if not known."""
        if modes.compiling():
            return None
        tensors = [t for t in (self._x, self._weight, self._bias) if t is not None]
        where = self._weight.data_ptr() if modes.eager(tensors) else 0
        plain = [t for t in tensors if isinstance(t, Tensor) and not t.is_inference()]
        return [*(t._version for t in plain), where]

    def behind(self, act: Any) -> Deferred:
        return Deferred(self._up, self.taken(), self, act)

    def is_of(self, down: PairDown) -> bool:
        """Whether the work of ``fc1`` and the activation of a pair is left to do, and nothing else was done."""
        up, held = down.up_proj, down.up_proj._parameters
        own = self._up is up and self._weight is held.get("weight") and self._bias is held.get("bias")
        return own and self._act is not None and self._made is None and down.applies(self._act)

    def taken(self) -> Any:
        """x. Raises NotImplementedError if the product would be another now."""
        now = self._state()
        if now != self._seen and None not in (now, self._seen):
            raise NotImplementedError(
                "fc1 of a twell pair computes when its result is used: expected its input and its weights as they "
                "were at the call, got one that was changed since; use the result before you change them"
            )
        self._require_grads()
        return self._x

    def _require_grads(self) -> None:
        if self._grads != torch.is_grad_enabled():
            raise NotImplementedError(
                "both layers of a twell pair, and what is between them, must run with gradients, or all without, got "
                "one of each: checkpoint the block as a whole, or with use_reentrant=False"
            )

    def value(self, why: str) -> Tensor:
        """The tensor. why: what needs it, for the log; "" for what is known to."""
        if self._made is not None:
            # code that knows tensors alone, such as an autograd.Function, would leave out its gradient
            self._require_grads()
            return self._made
        if self._up.must:
            raise NotImplementedError(f"{why or 'a dropout'} uses it")
        if why and not modes.compiling():
            vars(self._up)["used_by"] = why
            warn_once(f"a twell pair runs dense: {why} uses what its fc1 or its activation returns")
        y = self._up.product(self.taken(), self._weight, self._bias)
        self._made = y if self._act is None else activated(self._act, y)
        return self._made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, quiet = kwargs or {}, func in _DROPOUTS
        if quiet and (same := _undropped(*args, **kwargs)) is not None:
            return same
        if func in _ACTIVATIONS and len(args) == 1 and args[0]._made is None and not kwargs.get("inplace"):
            # as code of blocks writes them
            act, squares = args[0]._act, func is torch.square
            if act == RELU if squares else act is None:
                return args[0].behind(Activation("relu2") if squares else RELU)
        why = "" if quiet else getattr(func, "__name__", str(func))
        given = pytree.tree_map(lambda each: each.value(why) if type(each) is Deferred else each, (args, kwargs))
        return func(*given[0], **given[1])

    @property
    def dtype(self) -> torch.dtype:
        plain = self._x.dtype if self._up._casts else self._weight.dtype
        return modes.product_dtype(plain, self._weight.device.type)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.value(name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.value(name), name, value)


def _of_tensor(name: str) -> Any:
    def method(self: Deferred, *args: Any) -> Any:
        return getattr(self.value(name), name)(*args)

    return method


_OPERATORS = """
add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv rfloordiv ifloordiv mod rmod imod
pow rpow ipow matmul rmatmul neg pos abs lt le gt ge eq ne and rand iand or ror ior xor rxor ixor invert lshift ilshift
rshift irshift getitem setitem delitem contains len iter reversed bool float int index complex array format
"""
for _name in _OPERATORS.split():
    setattr(Deferred, f"__{_name}__", _of_tensor(f"__{_name}__"))

_OWN = frozenset({"_up", "_x", "_act", "_weight", "_bias", "_seen", "_grads", "_made"})
_DROPOUTS, _ACTIVATIONS = (F.dropout, torch.dropout), (torch.relu, F.relu, torch.square)


def _undropped(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """What a dropout returns that drops nothing; else None."""
    return None if p and training else input


class DeferredUp(SharedLinear):
    """``fc1`` of a pair: an ``nn.Linear`` whose product waits until something needs it (``Deferred``)."""

    _casts = False
    # whether anything but ``fc2`` that needs it is an error
    must = False
    # what else used it in the last eager call; "" where ``fc2`` did
    used_by = ""

    def forward(self, x: Tensor) -> Any:
        """x [..., hidden] -> [..., intermediate], deferred unless a hook, say, is to see it."""
        if self.defers():
            return Deferred(self, x)
        if not modes.compiling():
            warn_once("a twell pair runs dense: its fc1 has hooks, a forward of others or weights that are not plain")
        return self.product(x, self.weight, self.bias)

    def defers(self) -> bool:
        """Whether a call applies the weight and the bias and does nothing else."""
        parameters = self._parameters
        if _hooks(self) or any(HOOKS_OF_ALL) or not calls_are_torchs():
            return False
        if not ("weight" in parameters and "bias" in parameters):
            return False
        return runs_its_class(self) and all(map(behaves, parameters.values()))

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What a call of an ``nn.Linear`` with these returns."""
        return applied(self, x, weight, bias)


def keep_hook(made: nn.Module, of: nn.Module) -> None:
    """Let the hook of accelerate that moves the inputs of a module work on the one that takes its place."""
    wrapper: Any = vars(of).get("forward")
    if wrapper is not None and only_moves(of):
        own = types.MethodType(type(made).forward, made)
        # as accelerate does it; set past nn.Module, which has nothing to register here
        vars(made).update(_hf_hook=vars(of)["_hf_hook"], _old_forward=own)
        vars(made)["forward"] = functools.update_wrapper(functools.partial(wrapper.func, made), own)


class PairDown(nn.Module):
    """``fc2`` of a pair; ``fc1`` is its ``up_proj``, but not a child.

    names: of both in the block of the pair. attribute: of the activation there, None for one in the code. dropouts: of
    what may drop values of the hidden state there.
    """

    up_proj: Any
    names: tuple[str, ...] = ("fc1", "fc2")
    attribute: str | None = None
    dropouts: tuple[str, ...] = ()
    _fixed = False

    @property
    def down_proj(self) -> Any:
        return self

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """x: deferred, for the pair as a whole, or the hidden state. Hooks of others see a hidden state."""
        own = vars(self).get("forward")
        known = own is None or "_hf_hook" in vars(self) or hasattr(own, "_torchdynamo_orig_callable")
        if not (known or is_own(self, own)):
            got = "one set on the instance: use hooks, or leave the block out by filter_fn"
            raise NotImplementedError(f"fc2 of a twell pair must keep its forward, got {got}")
        if type(x) is Deferred:
            if x.is_of(self) and not any(HOOKS_OF_ALL) and all(map(_is_of_twell, _hooks(self))):
                if self.up_proj.used_by and not modes.compiling():
                    del self.up_proj.used_by
                return super().__call__(x.taken(), *args, **kwargs)
            x = x.value("fc2, which has hooks or is of another pair,")
        self._require_alone(args or kwargs)
        return super().__call__(x, *args, hidden=True, **kwargs)

    def block_of(self, name: str) -> str:
        return name.removesuffix(self.names[-1]).removesuffix(".")

    def applies(self, act: Any) -> bool:
        name, level = act if type(act) is Activation else (act.down.activation, act.down.threshold)
        layer: Any = self
        same = level is layer.threshold or (not isinstance(level, Tensor) and level == layer.threshold)
        return bool(name == layer.activation and same)

    def _require_alone(self, options: Any) -> None:
        """Raise NotImplementedError if more is asked for than the product with a hidden state that is given."""
        layer: Any = self
        if self.up_proj.must:
            raise NotImplementedError("other code makes what the second gets")
        figures = options or getattr(layer, "_record_aux", False) or any(map(_is_of_twell, _hooks(self)))
        if figures or layer._invariant or getattr(layer, "_accumulate_main_grad", False):
            raise NotImplementedError(
                "invariant, main gradients and figures of a twell pair are of a whole layer, got a hidden state that "
                "other code made: set dropouts of the hidden state to 0, and remove hooks and adapters"
            )
        if not (self.training or modes.compiling()):
            warn_once("a twell pair runs dense: its fc2 is given what other code made of the hidden state")


class SparseDown(PairDown, SparseMLP, SharedLinear):  # type: ignore[override]
    """``fc2`` of a pair: ``fc2(relu(fc1(x)))`` through ``twell.sparse_ffn`` on the input x [..., hidden] of ``fc1``.

    For blocks with both layers and the activation among their children, which keep their own ``forward`` and keys:
    ``fc1`` becomes a ``DeferredUp``, the activation a ``HandOn``. This layer, an ``nn.Linear`` with the down
    projection's parameters, does the work of all three where ``fc1`` and the activation have left it (``Deferred``),
    and is an ``nn.Linear`` on any other hidden state. ``up_proj`` is the module ``fc1`` itself but not a child:
    copying, pickling, moving and loading the block keep the two together. All else is as in ``twell.nn.SparseMLP``.
    """

    up_proj: nn.Linear

    def __init__(self, up: DeferredUp, down: nn.Linear, **options: Any) -> None:
        SparseFFN.__init__(self, up.in_features, up.out_features, **options)
        self._share(down)
        # not through nn.Module, which would make it a child with state-dict keys of its own
        object.__setattr__(self, "up_proj", up)

    def _add_projections(self, *_: Any) -> None:
        """It is one itself, and has the other."""

    def forward(self, x: Tensor, return_aux: bool = False, hidden: bool = False) -> Any:
        """x [..., hidden], the input of ``fc1``, -> y [..., hidden], as in ``SparseMLP``; or a ``hidden`` state."""
        return self._project("down_proj", x) if hidden else super().forward(x, return_aux)  # type: ignore[call-overload]

    def _dropped_by(self, block: nn.Module | None = None) -> str:
        found = {name: getattr(block, name, 0) for name in self.dropouts}
        shares = {name: getattr(each, "p", each) for name, each in found.items()}
        return "; ".join(f"{name}, p = {p}" for name, p in shares.items() if isinstance(p, (float, int)) and p)

    def _is_plain(self) -> bool:
        # not by name: reading a parametrized weight computes it, and may change it
        up: Any = self.up_proj
        return bool(up.defers()) and all(map(behaves, self._parameters.values()))

    def _readings(self) -> list[Projection | str]:
        pair = f"of the pair {', '.join(self.names)}: one has hooks, or weights that are not plain nn.Parameters"
        return [pair, pair]

    def _project(self, name: str, x: Tensor) -> Any:
        # the layer's own product, as if it were no part of a pair
        of: Any = self if name == "down_proj" else self.up_proj
        return applied(of, x, of.weight, of.bias)

    def reset_parameters(self) -> None:
        """Initialise this layer's own weight and bias again; ``fc1`` has its own ``reset_parameters``."""
        nn.Linear.reset_parameters(self)


class HandOn(nn.Identity):
    """The activation of a pair, deferred as its input is."""

    down: Any

    def __init__(self, down: PairDown) -> None:
        super().__init__()
        # as in SparseDown
        object.__setattr__(self, "down", down)

    def __call__(self, x: Any) -> Any:
        """x: deferred, or a tensor; hooks see a tensor."""
        if type(x) is Deferred and (x._act is not None or x._made is not None or _hooks(self) or any(HOOKS_OF_ALL)):
            x = x.value("its activation, which is called twice or has hooks,")
        return super().__call__(x)

    def forward(self, x: Any) -> Any:
        return x.behind(self) if type(x) is Deferred else activated(self, x)


def activated(act: Any, x: Tensor) -> Tensor:
    """What an activation of a pair makes of a tensor."""
    of = act if isinstance(act, Activation) else activation_of(act.down.activation, act.down.threshold, gated=False)
    return of.hidden(of.after(x), None)


def applied(linear: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of a half of a pair, whose weight is cast to the dtype of x where the model's own is."""
    return F.linear(x, *(cast([weight, bias], x.dtype) if linear._casts else (weight, bias)))


def _hooks(module: nn.Module) -> list[Any]:
    # by the dictionary: a graph does not look again at attributes that were empty
    return [hook for kind in HOOKS for hook in module.__dict__[kind].values()]


def _is_of_twell(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("twell.")


def pair_up(
    block: nn.Module,
    names: tuple[str, ...],
    attribute: str | None,
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


def put_pair(
    block: nn.Module, names: tuple[str, ...], attribute: str | None, dropouts: tuple[str, ...], down: PairDown
) -> None:
    """Put a pair in the place of two layers of a block and of the activation between them, None for one in the code.

    The objects that were there stay what they are, for whatever else refers to them.
    """
    down.names, down.attribute, down.dropouts, down._fixed = names, attribute, dropouts, attribute is None
    parts = {names[0]: down.up_proj, names[1]: down, **({} if attribute is None else {attribute: HandOn(down)})}
    for name, new in parts.items():
        holder, _, key = name.rpartition(".")
        old = getattr(block.get_submodule(holder), key)
        setattr(block.get_submodule(holder), key, new.train(getattr(old, "training", block.training)))
    if isinstance(block, nn.TransformerEncoderLayer):
        # else its fast path for inference would read the weights and run dense
        block.activation_relu_or_gelu = 0
