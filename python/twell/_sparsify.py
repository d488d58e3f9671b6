"""``sparsify_``: the ReLU feed-forward layers of a plain PyTorch model through twell, in place.

A module with the right children is a candidate. ``_equivalence`` decides: it runs the module's own ``forward`` on small
random weights, on the CPU, beside the formula. So neither the size nor the device of the model matters, and differences
that names do not show (dropout, another order, a factor, a residual) are found.
"""

from __future__ import annotations

import functools
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from twell import tuning
from twell._auto import AutoStrategy
from twell._equivalence import HOOKS, PAIR, Activation, difference, is_relu, of_torch, read_pair, run_pair
from twell._plain import HOOKS_OF_ALL, behaves, calls_are_torchs
from twell._runtime import geometry, specs
from twell._runtime.log import logger, warn_once
from twell.functional import Aux, Strategy
from twell.nn import (
    SparseFFN,
    SparseGatedMLP,
    SparseMLP,
)

Filter = Callable[[nn.Module, str], bool]

_GATED = ("gate_proj", "up_proj", "down_proj")
_PLAIN = ("up_proj", "down_proj")

# Children and parameters of feed-forward layers of other forms; a module with one of them is a near miss.
_TELLTALES = frozenset(
    {*_GATED, *PAIR, "gate_up_proj", "c_fc", "c_proj", "w1", "w2", "w3", "wi", "wi_0", "wi_1", "wo"}
    | {"dense_h_to_4h", "dense_4h_to_h"}
)

# Activations to try if a module has its activation in the code of its forward, not in an attribute.
_KNOWN: dict[str, Activation] = {
    "SiLU": F.silu,
    "GELU": F.gelu,
    "GELU (tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "squared ReLU": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}

_HOOKS = (
    *HOOKS,
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)

_MACHINERY = frozenset(vars(nn.Module()))

_LEAVE_OUT = "to leave it as it is, have filter_fn return False for it"


class _SharedLinear(nn.Linear):
    """An ``nn.Linear`` that shares the parameters of another; ``_share`` sets them."""

    def __init__(self) -> None:
        # nn.Linear's own would allocate
        nn.Module.__init__(self)

    def _share(self, linear: nn.Linear) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)


class _HandedOn(threading.local):
    """The last input of each ``DeferredUp`` in this thread, until its ``SparseDown`` takes it."""

    def __init__(self) -> None:
        self.tensors: weakref.WeakKeyDictionary[DeferredUp, weakref.ref[Tensor]] = weakref.WeakKeyDictionary()


_HANDED_ON = _HandedOn()


class _Block:
    """A weak reference to the block of a pair. In a copy of the block it refers to the copy."""

    def __init__(self, block: nn.Module | None = None) -> None:
        self.ref = None if block is None else weakref.ref(block)

    def __call__(self) -> nn.Module | None:
        return None if self.ref is None else self.ref()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Block:
        block = self()
        return _Block(None if block is None else memo.get(id(block)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Block, (self(),)


class DeferredUp(_SharedLinear):
    """``fc1`` of a pair: holds the up projection's parameters and returns its input, which ``SparseDown`` takes."""

    _block = _Block()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> x."""
        if not torch.compiler.is_compiling():
            if isinstance(x, Tensor):
                _HANDED_ON.tensors[self] = weakref.ref(x)
            # with other sizes, code that takes x for the hidden state raises by itself
            if self.in_features == self.out_features:
                self._require_place("fc2", SparseDown)
        return x

    def _require_place(self, name: str, kind: type[nn.Module]) -> None:
        """Raise NotImplementedError unless the block still calls this pair's layer under this name."""
        block = self._block()
        if block is None:
            return
        child: Any = block._modules.get(name)
        layer = child
        # Sequential and wrappers that checkpoint, compile or shard pass their input to their first child
        while layer is not None and not isinstance(layer, kind) and of_torch(type(layer)):
            layer = next(layer.children(), None)
        if not isinstance(layer, kind) or (layer is not self and getattr(layer, "up_proj", None) is not self):
            raise NotImplementedError(
                f"{name} of a twell pair must be the {kind.__name__} that sparsify_ made, since fc1 returns its input "
                f"and fc2 does the work of both, got {type(child).__name__}; wrap or replace layers, and merge "
                "adapters, before sparsify_"
            )


class SparseDown(SparseMLP, _SharedLinear):
    """``fc2`` of a pair: ``fc2(relu(fc1(x)))`` through ``twell.sparse_ffn`` on the input x [..., hidden] of ``fc1``.

    For blocks with both layers and the activation among their own children, which keep their own ``forward`` and their
    keys ``fc1.weight`` and ``fc2.weight``: ``fc1`` becomes a ``DeferredUp``, the activation an ``nn.Identity``, and
    this layer, an ``nn.Linear`` with the down projection's parameters, does the work of all three. ``up_proj`` is the
    module ``fc1`` itself but not a child: copying, pickling, moving and loading the block keep the two together. All
    else is as in ``twell.nn.SparseMLP``.
    """

    up_proj: nn.Linear

    def __init__(
        self, up: DeferredUp, down: nn.Linear, *, compression: int = 8, strategy: Strategy | AutoStrategy = "auto"
    ) -> None:
        SparseFFN.__init__(self, up.in_features, up.out_features, compression, strategy)
        self._share(down)
        # not through nn.Module, which would make it a child with state-dict keys of its own
        object.__setattr__(self, "up_proj", up)

    @overload
    def forward(self, x: Tensor, return_aux: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, return_aux: Literal[True]) -> tuple[Tensor, Aux]: ...
    def forward(self, x: Tensor, return_aux: bool = False) -> Tensor | tuple[Tensor, Aux]:
        """x [..., hidden], the very tensor that ``fc1`` got, -> y [..., hidden], as in ``SparseMLP``."""
        if not torch.compiler.is_compiling():
            self._require_handed_on(x)
        return super().forward(x, return_aux)  # type: ignore[call-overload,no-any-return]

    def _require_handed_on(self, x: Tensor) -> None:
        """Raise NotImplementedError if x is known to be another tensor than ``fc1`` got."""
        up: Any = self.up_proj
        handed_on = _HANDED_ON.tensors.pop(up, None)
        if handed_on is None:
            # fc1 ran compiled or not at all
            up._require_place("fc1", DeferredUp)
        elif handed_on() is not x and not (any(HOOKS_OF_ALL) or _changed(up) or _changed(self)):
            raise NotImplementedError(
                "fc2 of a twell pair must be called on the very tensor that fc1 returns, its input, got another one: "
                "nothing may run between them or change either; wrap or replace layers, and merge adapters, before "
                "sparsify_"
            )

    def _is_plain(self) -> bool:
        up: Any = self.up_proj
        # accelerate wraps each forward; that changes nothing unless it also offloads the weights
        if "forward" in vars(up) and getattr(vars(up).get("_hf_hook"), "offload", True):
            raise NotImplementedError(
                "fc1 of a twell pair must keep its forward, got one set on the instance: fc2 does the work of fc1 and "
                "would not call it"
            )
        if not torch.compiler.is_compiling():
            if any(HOOKS_OF_ALL) or _hooks(up):
                warn_once("fc1 of a twell pair has hooks: they see its input on both sides and must not change it")
            if any(HOOKS_OF_ALL) or any(not _of_twell(hook) for hook in _hooks(self)):
                warn_once(
                    "fc2 of a twell pair has hooks: they see the input of fc1, and its gradient, where the hidden "
                    "state was, and must not change it"
                )
        # not by name: reading a parametrized weight computes it, and may change it
        parameters = itertools.chain(up._parameters.values(), self._parameters.values())
        return calls_are_torchs() and all(map(behaves, parameters))

    def _project(self, name: str, x: Tensor) -> Any:
        # the layer's own product, as if it were no part of a pair
        return nn.Linear.forward(self if name == "down_proj" else self.up_proj, x)

    def reset_parameters(self) -> None:
        """Initialise this layer's own weight and bias again; ``fc1`` has its own ``reset_parameters``."""
        nn.Linear.reset_parameters(self)

    @property
    def down_proj(self) -> nn.Linear:  # type: ignore[override]
        """This layer itself."""
        return self


def _hooks(module: nn.Module) -> list[Any]:
    """The hooks of a module's calls."""
    return [hook for kind in HOOKS for hook in getattr(module, kind).values()]


def _of_twell(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).split(".")[0] == "twell"


def _changed(module: nn.Module) -> bool:
    """Whether hooks or a replaced forward may exchange the module's input or output for another tensor."""
    return "forward" in vars(module) or bool(_hooks(module))


class _PairMLP(nn.Module):
    """Replaces a module of ``fc1``, ReLU and ``fc2`` that has the ReLU in the code of its forward, not in a child."""

    def __init__(self, fc1: DeferredUp, fc2: SparseDown) -> None:
        super().__init__()
        self.fc1, self.fc2 = fc1, fc2
        fc1._block = _Block(self)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(self.fc1(x))
        return y


class Candidate(NamedTuple):
    """A module to replace, itself or a pair of its children.

    name: in ``named_modules`` of the model. form: "gated" is replaced by a ``SparseGatedMLP``, "plain" by a
    ``SparseMLP``, "whole" by a ``_PairMLP``; a "pair" stays and its children are replaced. attribute: the name of the
    activation, None if it is in the code. was: the activation that ReLU replaces, None if it was ReLU.
    """

    name: str
    module: nn.Module
    form: Literal["gated", "plain", "whole", "pair"]
    attribute: str | None
    was: str | None

    @property
    def layer(self) -> str:
        """The qualified name of the twell layer that will be there."""
        if self.form in ("gated", "plain"):
            return self.name
        return f"{self.name}.fc2" if self.name else "fc2"


class Plan(NamedTuple):
    """The candidates for ``apply``, and the names that ``filter_fn`` left out."""

    candidates: list[Candidate]
    left: list[str]


def sparsify_(
    model: nn.Module,
    filter_fn: Filter | None = None,
    *,
    activation: Literal["relu"] | None = None,
    compression: int = 8,
    strategy: Strategy = "auto",
) -> list[str]:
    """Run the ReLU feed-forward layers of ``model`` through twell, in place.

    Three forms are found by the names of ``nn.Linear`` children, wherever they are in ``model``:

    - ``gate_proj``, ``up_proj`` [N, K] and ``down_proj`` [K, N]: ``down(relu(gate(x)) * up(x))``, as in Llama, Qwen,
      Mistral and Gemma; the module becomes a ``twell.nn.SparseGatedMLP``.
    - ``up_proj`` and ``down_proj``: ``down(relu(up(x)))``; the module becomes a ``twell.nn.SparseMLP``.
    - ``fc1`` [N, K] and ``fc2`` [K, N]: ``fc2(relu(fc1(x)))``, as a module or among the other children of a block, as
      in OPT. The module stays; ``fc1`` passes its input to ``fc2``, which does the work of both, and the activation
      becomes an ``nn.Identity``. Hooks on these three see that.

    Parameters stay the same objects, stored as they were, and state dicts keep their keys, so optimizers, checkpoints
    and tied weights hold. ``twell.nn.set_down_layout(model, "rows")`` saves the kernels a copy of each down weight at
    each call. A module used in several places is replaced once, in all of them.

    A candidate must compute exactly the function named, with its gradients. Its ``forward`` runs beside the formula on
    small random weights, in float64, in the model's dtype and under autocast, in training and in evaluation, with and
    without gradients, for one token and for several, at ordinary and at extreme magnitudes. It may run only the
    operators of linear layers, ReLU and one product. The rule for all Python code in these runs that is not torch's,
    decorators and helpers included: it reads no attributes and globals except for children, functions and constants
    (sizes, a dropout of 0, None), sets none, branches only on conditions that the runs vary, and calls only Python and
    torch. The model's own tensors are neither read nor needed, so it may be on ``meta``. For ``fc1`` and ``fc2`` within
    a block the source of the block's class is read, and the block runs on meta tensors if x is its only input.

    Code outside of a candidate is not seen: code that calls ``fc1`` of a block, gives ``forward`` other inputs than x,
    keeps a reference to a module outside of ``model``, or later changes the settings of one of torch's activations. A
    module later put around or in place of ``fc1`` or ``fc2`` raises in eager mode if it would change the result, and in
    compiled graphs if sizes differ.

    Args:
        model: any module that contains such layers; for a model of transformers see
            ``twell.integrations.transformers.sparsify``, which also keeps its configuration right.
        filter_fn: called with each candidate and its qualified name; False leaves the candidate as it is.
        activation: None refuses candidates with an activation other than ReLU. "relu" replaces it with ReLU and logs
            that: the model then computes another function and is of use only after training.
        compression, strategy: of every layer, as in ``twell.sparse_gated_ffn``. With "auto" each chooses for itself.

    Returns the qualified names of the new twell layers, in the order of ``named_modules``. These are the keys of
    ``layers`` and the names that ``twell.explain`` shows.

    Raises TypeError or ValueError and changes nothing: if nothing is found; if a candidate computes something else, has
    further children or state, hooks, projections that are not plain ``nn.Linear`` (quantised, adapted, sharded), or
    sizes that the kernels do not take (multiples of 8, K up to 16,384 and N up to 65,536); or if ``model`` is itself a
    module to replace.
    """
    tuning.require_strategy(strategy)
    geometry.words_per_tile(compression)
    return apply(model, plan(model, filter_fn, activation, strategy), compression, strategy)


def layers(model: nn.Module) -> dict[str, SparseGatedMLP | SparseMLP]:
    """All twell layers of ``model`` by qualified name: gated, non-gated, and ``fc2`` of the pairs of OPT-like blocks.

    Each is listed once, under its first name; "" is the model itself.
    """
    return {name: m for name, m in model.named_modules() if isinstance(m, (SparseGatedMLP, SparseMLP))}


def plan(model: nn.Module, filter_fn: Filter | None, activation: str | None, strategy: str) -> Plan:
    """Plan ``sparsify_``: the same checks and errors, without any change."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"sparsify_: model must be an nn.Module, got {type(model).__name__}")
    if activation not in (None, "relu"):
        raise ValueError(f'sparsify_: activation must be None or "relu", got {activation!r}')
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"sparsify_: filter_fn must be a function of a module and its name, got {filter_fn!r}")
    candidates: list[Candidate] = []
    left: list[str] = []
    misses: dict[str, str] = {}
    examined: dict[Any, str | None] = {}
    for name, module in _outside_layers(model):
        children = _children_of_ffn(module)
        if children is None:
            if found := _TELLTALES & (module._modules.keys() | module._parameters.keys()):
                misses.setdefault(type(module).__name__, f"{_label(name, module)} with {', '.join(sorted(found))}")
        elif filter_fn is not None and not filter_fn(module, name):
            left.append(name)
        else:
            candidate = _examine(name, module, children, strategy, examined)
            if candidate.was is not None and activation is None:
                raise ValueError(_explain_activation(candidate))
            candidates.append(candidate)
    if not candidates:
        raise ValueError(_nothing_found(model, left, misses))
    _require_reachable(model, candidates)
    if candidates[0].name == "" and candidates[0].form != "pair":
        ours = "SparseGatedMLP.from_linear" if candidates[0].form == "gated" else "SparseMLP.from_linear"
        raise ValueError(
            "sparsify_: model must contain the layers to replace, but is itself one, which cannot be replaced in "
            f"place: got {type(model).__name__}; make a layer of its projections with twell.nn.{ours}"
        )
    return Plan(candidates, left)


def apply(model: nn.Module, planned: Plan, compression: int, strategy: Strategy) -> list[str]:
    """Replace the candidates of ``planned`` and return the names of the new layers."""
    replacements: dict[int, nn.Module] = {}
    for candidate in planned.candidates:
        module = candidate.module
        if candidate.form == "pair":
            _pair_up(module, candidate.attribute, compression, strategy)
        else:
            replacements[id(module)] = _replacement(candidate, compression, strategy).train(module.training)
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is not None and id(child) in replacements:
                parent._modules[key] = replacements[id(child)]
    if changed := sorted({c.was for c in planned.candidates if c.was is not None}):
        count = sum(c.was is not None for c in planned.candidates)
        logger.info("ReLU replaces %s; layers that need training before use: %d", " and ".join(changed), count)
    return [candidate.layer for candidate in planned.candidates]


def _replacement(candidate: Candidate, compression: int, strategy: Strategy) -> nn.Module:
    module: Any = candidate.module
    options: dict[str, Any] = {"compression": compression, "strategy": strategy}
    if candidate.form == "gated":
        return SparseGatedMLP.from_linear(module.gate_proj, module.up_proj, module.down_proj, **options)
    if candidate.form == "plain":
        return SparseMLP.from_linear(module.up_proj, module.down_proj, **options)
    return _PairMLP(*_pair(module, options))


def _pair_up(module: Any, attribute: str | None, compression: int, strategy: Strategy) -> None:
    assert attribute is not None
    fc1, fc2 = _pair(module, {"compression": compression, "strategy": strategy})
    module.fc1, module.fc2 = fc1, fc2
    fc1._block = _Block(module)
    setattr(module, attribute, nn.Identity().train(module.training))


def _pair(module: Any, options: dict[str, Any]) -> tuple[DeferredUp, SparseDown]:
    up = DeferredUp()
    up._share(module.fc1)
    return up, SparseDown(up, module.fc2, **options)


def _outside_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of ``model`` that are neither twell layers nor within one."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, (SparseFFN, _SharedLinear)):
            inside.update(id(child) for child in module.modules())
        elif id(module) not in inside:
            yield name, module


def _children_of_ffn(module: nn.Module) -> tuple[str, ...] | None:
    """The names of the projections, if the module's children are those of a form."""
    names = module._modules.keys()
    if isinstance(getattr(module, "fc2", None), SparseDown):
        return None
    for children in (_GATED, _PLAIN, PAIR):
        if all(isinstance(module._modules.get(child), nn.Module) for child in children):
            # another kind of gate makes it another function
            return None if children == _PLAIN and "gate_up_proj" in names else children
    return None


def _label(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def _examine(
    name: str, module: nn.Module, children: tuple[str, ...], strategy: str, examined: dict[Any, str | None]
) -> Candidate:
    """Make ``module`` a candidate; raise TypeError or ValueError if it cannot be replaced as it is.

    examined: the activations of earlier modules, by ``_likeness``.
    """
    where = _label(name, module)
    weights = {child: _plain_weight(f"{where}: {child}", module._modules[child]) for child in children}
    _require_sizes(where, weights, strategy)
    if "forward" in vars(module):
        raise ValueError(
            f"{where} has a forward set on the instance (as offloading and patches do), which would be lost; "
            f"{_LEAVE_OUT}"
        )
    reason = ""
    if children == PAIR:
        attribute, reason = read_pair(module)
        if attribute is not None:
            act = getattr(module, attribute)
            _require_unhooked(where, {"fc1": module.fc1, "fc2": module.fc2, attribute: act})
            _require_stateless(f"{where}: {attribute}", act)
            if reason := run_pair(module, attribute):
                raise ValueError(f"{where} cannot be run sparse: {reason}; {_LEAVE_OUT}")
            return Candidate(
                name, module, "pair", attribute, None if is_relu(act, weights["fc1"].dtype) else _kind(act)
            )

    others = {key: m for key, m in module._modules.items() if m is not None and key not in children and not _inert(m)}
    own = [*module._parameters, *module._buffers]
    if own or len(others) > 1:
        if reason:
            raise ValueError(f"{where} cannot be run sparse: {reason}; {_LEAVE_OUT}")
        got = [*own, *(f"{key} ({type(m).__name__})" for key, m in others.items())]
        raise ValueError(
            f"{where} must have {', '.join(children)} and an activation alone, got beside them {', '.join(got)}; "
            f"{_LEAVE_OUT}"
        )
    for key, other in others.items():
        _require_stateless(f"{where}: {key}", other)
    _require_unhooked(where, dict(module.named_modules()))
    callables = [*others, *(key for key, value in vars(module).items() if not key.startswith("_") and callable(value))]
    attribute = callables[0] if len(callables) == 1 else None
    form: Any = {_GATED: "gated", _PLAIN: "plain", PAIR: "whole"}[children]
    if (likeness := _likeness(module)) not in examined:
        examined[likeness] = _activation(where, module, children, attribute)
    return Candidate(name, module, form, attribute, examined[likeness])


def _likeness(module: nn.Module) -> Any:
    """A key that is equal for two modules only if they compute the same function of x and their weights."""
    plain = (str, bool, int, float, type(None))
    attributes = {key: value for key, value in vars(module).items() if key not in _MACHINERY}
    return (
        type(module),
        tuple((key, type(v), v if isinstance(v, plain) else id(v)) for key, v in attributes.items()),
        tuple((key, None if p is None else (p.shape, p.dtype)) for key, p in module._parameters.items()),
        tuple((key, None if child is None else _likeness(child)) for key, child in module._modules.items()),
    )


def _plain_weight(where: str, linear: nn.Module | None) -> Tensor:
    if type(linear) is not nn.Linear:
        raise TypeError(
            f"{where} must be an nn.Linear itself, got {type(linear).__module__}.{type(linear).__name__}: quantised "
            f"layers have no 16-bit weights to run on, and adapters must be merged first; {_LEAVE_OUT}"
        )
    if odd := [key for key, p in linear._parameters.items() if p is not None and type(p) is not nn.Parameter]:
        raise TypeError(
            f"{where}.{odd[0]} must be a plain nn.Parameter, got {type(linear._parameters[odd[0]]).__name__}: call "
            f"sparsify_ before sharding or quantising; {_LEAVE_OUT}"
        )
    if linear._parameters.keys() != {"weight", "bias"} or linear._buffers or linear._modules:
        got = sorted([*linear._parameters, *linear._buffers, *linear._modules])
        raise TypeError(f"{where} must have a weight and a bias alone, got {', '.join(got)}; {_LEAVE_OUT}")
    if linear.weight is None or "forward" in vars(linear):
        raise TypeError(f"{where} must be an nn.Linear as made, got one that was patched; {_LEAVE_OUT}")
    return linear.weight


def _require_sizes(where: str, weights: dict[str, Tensor], strategy: str) -> None:
    n, k = next(iter(weights.values())).shape
    for child, weight in weights.items():
        expected = [k, n] if child in ("down_proj", "fc2") else [n, k]
        if list(weight.shape) != expected:
            raise ValueError(
                f"{where}: {child}.weight must be {expected} (K = {k}, N = {n}), got {list(weight.shape)}; {_LEAVE_OUT}"
            )
    for what in ("dtype", "device"):
        if len(found := {str(getattr(weight, what)) for weight in weights.values()}) > 1:
            raise ValueError(
                f"{where} must have its weights on one {what}, got {' and '.join(sorted(found))}; {_LEAVE_OUT}"
            )
    if not next(iter(weights.values())).is_floating_point():
        raise TypeError(f"{where} must have floating weights, got {next(iter(weights.values())).dtype}; {_LEAVE_OUT}")
    for letter, size, limit in (("K", k, specs.K_CLASSES[-1]), ("N", n, geometry.MAX_NEURONS)):
        if strategy != "dense" and (size == 0 or size % 8 or size > limit):
            raise ValueError(
                f"{where}: {letter} must be a positive multiple of 8 up to {limit:,}, as the sparse kernels take, got "
                f"{size:,}; {_LEAVE_OUT}"
            )


def _require_unhooked(where: str, modules: dict[str, Any]) -> None:
    for name, module in modules.items():
        if hooks := [hook.lstrip("_") for hook in _HOOKS if getattr(module, hook, None)]:
            raise ValueError(
                f"{where} has {hooks[0]}{f' on {name}' if name else ''}, which would be lost: remove them and register "
                f"them on the result; {_LEAVE_OUT}"
            )


def _require_reachable(model: nn.Module, candidates: list[Candidate]) -> None:
    """Raise ValueError if something in ``model`` would still use a replaced module or an old down weight."""
    replaced = {id(c.module): c for c in candidates if c.form != "pair"}
    weights = {_down(c).weight.untyped_storage()._cdata: (c, _down(c).weight) for c in candidates}
    for name, owner in model.named_modules():
        where = _label(name, owner)
        compiled = owner._modules.get("_orig_mod")
        if id(compiled) in replaced or (owner._compiled_call_impl is not None and id(owner) in replaced):
            raise ValueError(f"{where} was compiled and would still run the old module: compile it after sparsify_")
        if "_fsdp_wrapped_module" in owner._modules and {id(c.module) for c in candidates} & set(
            map(id, owner.modules())
        ):
            raise ValueError(
                f"{where} has its parameters in one buffer: call sparsify_ before FullyShardedDataParallel"
            )
        for key, value in vars(owner).items():
            if key != "_modules" and (found := _first_held(value, replaced)):
                raise ValueError(
                    f"{_label(found.name, found.module)} must be reached by names of children alone, but {where} has "
                    f"it in {key}, too, and would still run the old module; {_LEAVE_OUT}"
                )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if type(tensor) not in (Tensor, nn.Parameter):
            continue
        candidate, weight = weights.get(tensor.untyped_storage()._cdata, (None, tensor))
        if candidate is not None and tensor is not weight and _overlap(tensor, weight):
            raise ValueError(
                f"{_label(candidate.name, candidate.module)} must have a down weight of its own or share the "
                f"nn.Parameter itself, got one that shares memory with {name}, which another layout would end; "
                f"{_LEAVE_OUT}"
            )


def _down(candidate: Candidate) -> Any:
    return candidate.module.get_submodule("down_proj" if candidate.form in ("gated", "plain") else "fc2")


def _first_held(value: Any, wanted: dict[int, Candidate], depth: int = 5) -> Candidate | None:
    """The first of the modules ``wanted`` that a value, a container, method or function, refers to."""
    if isinstance(value, nn.Module):
        return wanted.get(id(value))
    if depth == 0 or isinstance(value, (str, Tensor, type)):
        return None
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = value
    elif isinstance(value, types.MethodType):
        inner = (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        inner = (value.func, value.args, value.keywords)
    elif isinstance(value, types.FunctionType):
        cells = (cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType())
        inner = itertools.chain(cells, value.__defaults__ or (), (value.__kwdefaults__ or {}).values())
    found = (_first_held(item, wanted, depth - 1) for item in inner)
    return next((candidate for candidate in found if candidate is not None), None)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage share memory."""
    spans = []
    for t in (a, b):
        last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride())) if t.numel() else -1
        begin = t.storage_offset() * t.element_size()
        spans.append((begin, begin + (last + 1) * t.element_size()))
    return spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]


def _require_stateless(where: str, module: Any) -> None:
    if isinstance(module, nn.Module) and (state := [*dict(module.named_parameters()), *dict(module.named_buffers())]):
        raise ValueError(
            f"{where} must be an activation without state, got {type(module).__name__} with {', '.join(state)}; "
            f"{_LEAVE_OUT}"
        )


def _identity(x: Tensor) -> Tensor:
    return x


def _inert(module: nn.Module) -> bool:
    return type(module) is nn.Identity or (type(module) is nn.Dropout and module.p == 0)


def _kind(act: object) -> str:
    return str(getattr(act, "__name__", type(act).__name__))


def _activation(where: str, module: nn.Module, children: tuple[str, ...], attribute: str | None) -> str | None:
    """The activation of ``module``, None for ReLU. Raises ValueError if it is not one of the formulas of ``plan``."""
    act = None if attribute is None else getattr(module, attribute)
    first: Any = module.get_submodule(children[0])
    relu = act is not None and is_relu(act, first.weight.dtype)
    reason = difference(module, children, F.relu, act if relu else None)
    if not reason:
        return None
    if attribute is not None and act is not None and not relu:
        try:
            # it is the activation if the module is linear without it, and the formula with ReLU in its place
            setattr(module, attribute, nn.Identity() if isinstance(act, nn.Module) else _identity)
            other = difference(module, children, _identity, None)
            setattr(module, attribute, nn.ReLU() if isinstance(act, nn.Module) else F.relu)
            reason = difference(module, children, F.relu, None)
        finally:
            setattr(module, attribute, act)
        if not reason and not other:
            return _kind(act)
        if not reason:
            reason = f"{attribute} is not the activation, and {_kind(act)} would be lost"
    elif attribute is None:
        for known, function in _KNOWN.items():
            if not difference(module, children, function, None):
                return known
    if dropping := [name for name, child in module.named_modules() if isinstance(child, _DropoutNd) and child.p]:
        reason = f"it drops values ({', '.join(dropping)}); {reason}"
    *inputs, down = children
    formula = f"act({inputs[0]}(x)){f' * {inputs[1]}(x)' if len(inputs) > 1 else ''}"
    raise ValueError(
        f"{where} must compute {down}({formula}) with an elementwise activation and nothing else, got another function "
        f"of x: {reason}; {_LEAVE_OUT}"
    )


def _explain_activation(candidate: Candidate) -> str:
    return (
        f"sparsify_: {_label(candidate.name, candidate.module)} must apply ReLU, got {candidate.was}. The kernels skip "
        "neurons that ReLU sets to zero; SiLU, GELU and the like make values small, not zero, and the kernels compute "
        "no other activation. Train the model further with ReLU first (arXiv 2310.04564, ReLU Strikes Back; "
        f'twell.recipe adds the L1 term that makes it sparse). To do that, pass activation="relu"; {_LEAVE_OUT}'
    )


def _nothing_found(model: nn.Module, left: list[str], misses: dict[str, str]) -> str:
    forms = "; ".join(", ".join(form) for form in (_GATED, _PLAIN, PAIR))
    text = (
        "sparsify_: model must have modules with nn.Linear children named as in one of these forms: "
        f"{forms}; got {type(model).__name__} without any"
    )
    if left:
        text += f" that filter_fn accepts; it left out {len(left)}, the first {left[0] or 'the model'!r}"
    if already := layers(model):
        text += f"; {len(already)} layers of twell are there already, as {next(iter(already)) or 'the model itself'!r}"
    if misses:
        text += "; nearest are " + "; ".join(list(misses.values())[:5])
        text += ": fused projections, experts in one tensor and other names are not recognised; split or rename them, "
        text += "or call twell.sparse_gated_ffn"
    return text
