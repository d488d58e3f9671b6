"""``sparsify_``: the ReLU feed-forward layers of a plain PyTorch model through twell, in place.

A module with the right children is a candidate. ``_equivalence`` decides: it runs the module's own ``forward`` on small
random weights, on the CPU, beside the formula. So neither the size nor the device of the model matters, and differences
that names do not show (dropout, another order, a factor, a residual) are found.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from twell import tuning
from twell._activation import RELU, Activation, ActivationName
from twell._auto import AutoStrategy
from twell._equivalence import (
    HOOKS,
    Form,
    Formula,
    Function,
    difference,
    family_of,
    formula_of,
    identity,
    of_torch,
    read_pair,
    read_split,
    run_pair,
)
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
_PAIR = ("fc1", "fc2")

# The names of projections: gate, up and down; up and down, where up may hold the gate, too. A module with the first
# three is a layer, and an error where it is not one that can be taken; one with the others must also have layers of
# fitting sizes, since other kinds of modules have such names, too.
_CERTAIN = (_GATED, _PLAIN, _PAIR)
_KNOWN_NAMES = (
    *(_GATED, ("w1", "w3", "w2"), ("wi_0", "wi_1", "wo")),
    *(("gate_up_proj", "down_proj"), _PLAIN, _PAIR, ("wi", "wo"), ("dense_h_to_4h", "dense_4h_to_h")),
    *(("c_fc", "c_proj"), ("linear1", "linear2"), ("lin1", "lin2"), ("linear_1", "linear_2"), ("w1", "w2")),
    *(("fc_in", "fc_out"), ("w_1", "w_2")),
)

# Children and parameters of feed-forward layers of all forms; a module with one of them is a near miss.
_TELLTALES = frozenset(itertools.chain(*_KNOWN_NAMES))

# A pair whose layers are in two children of a block, as in BERT.
_SPLIT = ("intermediate.dense", "output.dense")

# torch's own blocks, whose feed-forward layers are called in this method alone.
_TORCHS_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)

# Activations to try if a module has its activation in the code of its forward, not in an attribute.
_OTHERS: dict[str, Function] = {
    "SiLU": F.silu,
    "GELU": F.gelu,
    "GELU (tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}

# What another activation may be replaced with; the threshold of fatrelu must be chosen first.
_TARGETS = ("relu", "relu2", "drelu")

_STACKED = (
    "experts whose weights are stacked in one tensor stay as they are, since each gets few tokens and the kernels take "
    "the weights of one layer"
)

# The family in words.
NAMES_OF_FAMILY = {"relu": "ReLU", "relu2": "squared ReLU", "drelu": "dReLU", "fatrelu": "FATReLU"}

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
    """A weak reference to the block of a pair, with the pair's names. In a copy of the block it refers to the copy."""

    def __init__(self, block: nn.Module | None = None, names: tuple[str, ...] = _PAIR) -> None:
        self.ref = None if block is None else weakref.ref(block)
        self.names = names

    def __call__(self) -> nn.Module | None:
        return None if self.ref is None else self.ref()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Block:
        block = self()
        return _Block(None if block is None else memo.get(id(block)), self.names)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Block, (self(), self.names)


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
                self._require_place(SparseDown)
        return x

    def _require_place(self, kind: type[nn.Module]) -> None:
        """Raise NotImplementedError unless the block still calls this pair's layer of a kind under its name."""
        block = self._block()
        if block is None:
            return
        fc1, fc2 = self._block.names
        name = fc2 if kind is SparseDown else fc1
        child: Any = _below(block, name) if "." in name else block._modules.get(name)
        layer = child
        # Sequential and wrappers that checkpoint, compile or shard pass their input to their first child
        while layer is not None and not isinstance(layer, kind) and of_torch(type(layer)):
            layer = next(layer.children(), None)
        if not isinstance(layer, kind) or (layer is not self and getattr(layer, "up_proj", None) is not self):
            raise NotImplementedError(
                f"{name} of a twell pair must be the {kind.__name__} that sparsify_ made, since {fc1} returns its "
                f"input and {fc2} does the work of both, got {type(child).__name__}; wrap or replace layers, and merge "
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
        self,
        up: DeferredUp,
        down: nn.Linear,
        *,
        compression: int = 8,
        strategy: Strategy | AutoStrategy = "auto",
        activation: ActivationName = "relu",
        threshold: float = 0,
    ) -> None:
        SparseFFN.__init__(
            self, up.in_features, up.out_features, compression, strategy, activation=activation, threshold=threshold
        )
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
            up._require_place(DeferredUp)
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


class NamedMLP(SparseMLP):
    """A ``SparseMLP`` whose projections are children of other names, as ``wi`` and ``wo``; else the same."""

    def __init__(self, names: tuple[str, ...], linears: Iterable[nn.Linear], **options: Any) -> None:
        _name(self, names, linears, options)

    @property
    def _projections(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._names

    @property
    def up_proj(self) -> nn.Linear:  # type: ignore[override]
        """The child that is the up projection."""
        return self._modules[self._names[0]]  # type: ignore[return-value]

    @property
    def down_proj(self) -> nn.Linear:  # type: ignore[override]
        """The child that is the down projection."""
        return self._modules[self._names[1]]  # type: ignore[return-value]

    _names: tuple[str, ...]


class NamedGatedMLP(SparseGatedMLP):
    """A ``SparseGatedMLP`` whose projections are children of other names, as ``w1``, ``w3`` and ``w2``."""

    def __init__(self, names: tuple[str, ...], linears: Iterable[nn.Linear], **options: Any) -> None:
        _name(self, names, linears, options)

    @property
    def _projections(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._names

    @property
    def gate_proj(self) -> nn.Linear:  # type: ignore[override]
        """The child that is the gate projection."""
        return self._modules[self._names[0]]  # type: ignore[return-value]

    @property
    def up_proj(self) -> nn.Linear:  # type: ignore[override]
        """The child that is the up projection."""
        return self._modules[self._names[1]]  # type: ignore[return-value]

    @property
    def down_proj(self) -> nn.Linear:  # type: ignore[override]
        """The child that is the down projection."""
        return self._modules[self._names[2]]  # type: ignore[return-value]

    _names: tuple[str, ...]


class FusedGatedMLP(SparseGatedMLP):
    """A ``SparseGatedMLP`` whose gate and up projections are one child [2 N, K], as ``gate_up_proj`` of Phi-3.

    The kernels read its two halves in place. ``gate_proj`` and ``up_proj`` are new layers around these views.
    """

    def __init__(self, names: tuple[str, ...], linears: Iterable[nn.Linear], up_first: bool, **options: Any) -> None:
        _name(self, names, linears, options)
        self._up_first = up_first

    @property
    def _projections(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._names

    @property
    def gate_proj(self) -> nn.Linear:  # type: ignore[override]
        """A layer with the views of the gate's weight and bias."""
        return _view(*self._halves()[0])

    @property
    def up_proj(self) -> nn.Linear:  # type: ignore[override]
        """A layer with the views of the up projection's weight and bias."""
        return _view(*self._halves()[1])

    @property
    def down_proj(self) -> nn.Linear:  # type: ignore[override]
        """The child that is the down projection."""
        return self._modules[self._names[1]]  # type: ignore[return-value]

    def _halves(self) -> list[tuple[Tensor, Tensor | None]]:
        weight, bias = self._applied(self._names[0])
        biases = (None, None) if bias is None else bias.chunk(2)
        return self._ordered(zip(weight.chunk(2), biases))

    def _ordered(self, halves: Iterable[Any]) -> list[Any]:
        return list(halves)[:: -1 if self._up_first else 1]

    def _operands(self) -> Iterable[tuple[Tensor, Tensor | None]]:
        return *self._halves(), self._applied(self._names[1])

    def _pre_activations(self, x: Tensor) -> tuple[Any, Any]:
        gate, up = self._ordered(self._project(self._names[0], x).chunk(2, dim=-1))
        return gate, up

    def _main_grads(self, **weights: Tensor) -> list[Tensor | None] | None:
        whole = {name: self._applied(name)[0] for name in self._names}
        mains = super()._main_grads(**whole)
        if mains is None:
            return None
        fused, down = mains
        return [*((None, None) if fused is None else self._ordered(fused.chunk(2))), down]

    _names: tuple[str, ...]
    _up_first: bool


def _name(layer: Any, names: tuple[str, ...], linears: Iterable[nn.Linear], options: dict[str, Any]) -> None:
    """Initialise a layer whose projections are children of other names."""
    linears = list(linears)
    intermediate = linears[-1].in_features
    SparseFFN.__init__(layer, linears[0].in_features, intermediate, **options)
    layer._names = names
    for name, linear in zip(names, linears):
        # add_module would ask the properties of these names
        layer._modules[name] = _shared(linear)


def _shared(linear: nn.Linear) -> nn.Linear:
    """A plain ``nn.Linear`` with the parameters of another."""
    made = nn.Linear(linear.in_features, linear.out_features, False, device="meta")
    made.weight, made.bias = linear.weight, linear.bias
    return made


def _view(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """An ``nn.Linear`` around tensors that are no parameters."""
    made: Any = _SharedLinear()
    made.weight, made.bias = weight, bias
    made.out_features, made.in_features = weight.shape
    return made  # type: ignore[no-any-return]


class Candidate(NamedTuple):
    """A module to replace, itself or a pair of its children.

    name: in ``named_modules`` of the model. form: the names of the projections. kind: "layer" is replaced by a layer
    of twell, "whole" by a ``_PairMLP``; a "pair" stays and its children are replaced. attribute: the name of the
    activation, None if it is in the code. activation: that of the new layer. was: the name of the one that it replaces,
    None if it is the module's own.
    """

    name: str
    module: nn.Module
    form: Form
    kind: Literal["layer", "whole", "pair"]
    attribute: str | None
    activation: Activation
    was: str | None

    @property
    def shape(self) -> tuple[bool, int, int]:
        """Whether it has a gate, K and N."""
        weight: Any = self.module.get_submodule(self.form.down).weight
        return self.form.gated, weight.shape[0], weight.shape[1]

    @property
    def layer(self) -> str:
        """The qualified name of the twell layer that will be there."""
        if self.kind == "layer":
            return self.name
        return f"{self.name}.{self.form.down}" if self.name else self.form.down


class Plan(NamedTuple):
    """The candidates for ``apply``, the names that ``filter_fn`` left out, and modules that hold stacked experts."""

    candidates: list[Candidate]
    left: list[str]
    stacked: list[str]


Names = Sequence[str] | Sequence[Sequence[str]]


def sparsify_(
    model: nn.Module,
    filter_fn: Filter | None = None,
    *,
    activation: Literal["relu", "relu2", "drelu"] | None = None,
    compression: int = 8,
    strategy: Strategy = "auto",
    names: Names | None = None,
) -> list[str]:
    """Run the feed-forward layers of ``model`` that have ReLU, or another activation of its family, through twell.

    In place. The activations are relu, relu2 (squared), drelu and fatrelu, with its threshold. Layers are found by the
    names of ``nn.Linear`` children, wherever they are in ``model``:

    - gate, up [N, K] and down [K, N]: ``gate_proj``, ``up_proj``, ``down_proj`` as in Llama; ``w1``, ``w3``, ``w2``;
      ``wi_0``, ``wi_1``, ``wo``; or gate and up in one [2 N, K], ``gate_up_proj`` as in Phi-3, read as two views. The
      module becomes a ``twell.nn.SparseGatedMLP`` with the same children.
    - up and down: ``up_proj``, ``down_proj`` as in Nemotron; ``dense_h_to_4h``, ``dense_4h_to_h``; ``wi``, ``wo``;
      ``c_fc``, ``c_proj``; ``linear1``, ``linear2`` and others. The module becomes a ``twell.nn.SparseMLP``.
    - a pair of them among the other children of a block, as ``fc1`` and ``fc2`` of OPT; ``linear1`` and ``linear2`` of
      ``nn.TransformerEncoderLayer``, which then leaves its fast path; two layers around an activation in an
      ``nn.Sequential``; and every module of ``fc1`` and ``fc2``. The module stays; the first layer passes its input to
      the second, which does the work of both, and the activation becomes an ``nn.Identity``. Hooks on these three see
      that.

    The page on models has a table of architectures. Parameters stay the same objects, stored as they were, and state
    dicts keep their keys, so optimizers, checkpoints and tied weights hold.
    ``twell.nn.set_down_layout(model, "rows")`` saves the kernels a copy of each down weight at
    each call. A module used in several places is replaced once, in all of them. Experts that are modules count as
    layers; experts stacked in one tensor stay as they are, which is logged.

    A candidate must compute exactly the function named, with its gradients. Its ``forward`` runs beside the formula on
    small random weights, in float64, in the model's dtype and under autocast, in training and in evaluation, with and
    without gradients, for one token and for several, at ordinary and at extreme magnitudes. It may run only the
    operators of linear layers, the activation and one product. The rule for all Python code in these runs that is not
    torch's, decorators and helpers included: it reads no attributes and globals except for children, functions and
    constants (sizes, a dropout of 0, the threshold, None), sets none, branches only on conditions that the runs vary,
    and calls only Python and torch. The model's own tensors are neither read nor needed, so it may be on ``meta``. For
    a pair within a block the source of the block's class is read, and the block runs on meta tensors if x is its only
    input.

    Code outside of a candidate is not seen: code that calls ``fc1`` of a block, gives ``forward`` other inputs than x,
    keeps a reference to a module outside of ``model``, or later changes the settings of one of torch's activations. A
    module later put around or in place of ``fc1`` or ``fc2`` raises in eager mode if it would change the result, and in
    compiled graphs if sizes differ.

    Args:
        model: any module that contains such layers; for a model of transformers see
            ``twell.integrations.transformers.sparsify``, which also keeps its configuration right.
        filter_fn: called with each candidate and its qualified name; False leaves the candidate as it is.
        activation: None keeps each layer's own and refuses candidates with none of the family. Another replaces what
            differs and logs that: the model then computes another function and is of use only after training. "drelu"
            needs gates.
        compression, strategy: of every layer, as in ``twell.sparse_gated_ffn``. With "auto" each chooses for itself.
        names: of the children, where they are others: (gate, up, down), (up, down) or (gate and up in one, down), or a
            list of such tuples.

    Returns the qualified names of the new twell layers, in the order of ``named_modules``. These are the keys of
    ``layers`` and the names that ``twell.explain`` shows.

    Raises TypeError or ValueError and changes nothing: if nothing is found; if a candidate computes something else, has
    further children or state, hooks, projections that are not plain ``nn.Linear`` (quantised, adapted, sharded), or
    sizes that the kernels do not take (multiples of 8, K up to 16,384 and N up to 65,536); or if ``model`` is itself a
    module to replace.
    """
    tuning.require_strategy(strategy)
    geometry.words_per_tile(compression)
    return apply(model, plan(model, filter_fn, activation, strategy, names), compression, strategy)


def layers(model: nn.Module) -> dict[str, SparseGatedMLP | SparseMLP]:
    """All twell layers of ``model`` by qualified name: gated, non-gated, and ``fc2`` of the pairs of OPT-like blocks.

    Each is listed once, under its first name; "" is the model itself.
    """
    return {name: m for name, m in model.named_modules() if isinstance(m, (SparseGatedMLP, SparseMLP))}


def plan(
    model: nn.Module, filter_fn: Filter | None, activation: str | None, strategy: str, names: Names | None = None
) -> Plan:
    """Plan ``sparsify_``: the same checks and errors, without any change."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"sparsify_: model must be an nn.Module, got {type(model).__name__}")
    if activation not in (None, *_TARGETS):
        raise ValueError(f"sparsify_: activation must be None or one of {', '.join(_TARGETS)}, got {activation!r}")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"sparsify_: filter_fn must be a function of a module and its name, got {filter_fn!r}")
    told = _told(names)
    candidates: list[Candidate] = []
    left: list[str] = []
    stacked: list[str] = []
    misses: dict[str, str] = {}
    examined: dict[Any, _Found] = {}
    for name, module in _outside_layers(model):
        forms = _forms_of(module, told)
        if not forms:
            if _holds_stacked_experts(module):
                stacked.append(_label(name, module))
            elif found := _TELLTALES & (module._modules.keys() | module._parameters.keys()):
                misses.setdefault(type(module).__name__, f"{_label(name, module)} with {', '.join(sorted(found))}")
        elif filter_fn is not None and not filter_fn(module, name):
            left.append(name)
        else:
            for form in forms:
                candidate, of = _examine(name, module, form, strategy, examined)
                if of is None and type(module) is nn.Sequential:
                    # what lies between two linear layers need not be an activation
                    misses.setdefault("Sequential", f"{_label(name, module)} with {candidate.was}")
                    continue
                if of is None and activation is None:
                    raise ValueError(_explain_activation(candidate))
                candidates.append(_with_activation(candidate, of, activation))
    if not candidates:
        raise ValueError(_nothing_found(model, left, misses, stacked))
    _require_reachable(model, candidates)
    if candidates[0].name == "" and candidates[0].kind != "pair":
        ours = "SparseGatedMLP.from_linear" if candidates[0].form.gated else "SparseMLP.from_linear"
        raise ValueError(
            "sparsify_: model must contain the layers to replace, but is itself one, which cannot be replaced in "
            f"place: got {type(model).__name__}; make a layer of its projections with twell.nn.{ours}"
        )
    return Plan(candidates, left, stacked)


def _told(names: Any) -> list[tuple[str, ...]]:
    """``names`` as a list of tuples of two or three names."""
    if names is None:
        return []
    groups = [names] if not isinstance(names, str) and all(isinstance(name, str) for name in names) else names
    told = [] if isinstance(groups, str) else [tuple(group) for group in groups if not isinstance(group, str)]
    if not told or any(len(group) not in (2, 3) or not all(isinstance(n, str) for n in group) for group in told):
        raise ValueError(
            "sparsify_: names must be the names of a layer's projections, (gate, up, down), (up, down) or (gate and "
            f"up in one, down), or several such, got {names!r}"
        )
    return told


def _with_activation(candidate: Candidate, of: Activation | None, wanted: str | None) -> Candidate:
    """The candidate with the activation that its layer will have; ``of`` is its own, if it is of the family."""
    if of is not None and wanted in (None, of.name):
        return candidate._replace(activation=of, was=None)
    if wanted == "drelu" and not candidate.form.gated:
        raise ValueError(
            f'sparsify_: {_label(candidate.name, candidate.module)} must have a gate for activation="drelu", got '
            f"{' and '.join(candidate.form.children)}; {_LEAVE_OUT}"
        )
    return candidate._replace(activation=Activation(str(wanted)))


def apply(model: nn.Module, planned: Plan, compression: int, strategy: Strategy) -> list[str]:
    """Replace the candidates of ``planned`` and return the names of the new layers."""
    replacements: dict[int, nn.Module] = {}
    for candidate in planned.candidates:
        module, options = candidate.module, {"compression": compression, "strategy": strategy}
        if candidate.kind == "pair":
            _pair_up(candidate, options)
        else:
            replacements[id(module)] = _replacement(candidate, options).train(module.training)
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is not None and id(child) in replacements:
                parent._modules[key] = replacements[id(child)]
        if isinstance(parent, nn.TransformerEncoder) and any(
            isinstance(getattr(layer, "linear2", None), SparseDown) for layer in parent.layers
        ):
            # it would make a nested tensor of a padded batch, for the fast path of its layers
            parent.use_nested_tensor = False
    if planned.stacked:
        logger.info("%s: %s", _STACKED, ", ".join(planned.stacked[:3]))
    if changed := [candidate for candidate in planned.candidates if candidate.was is not None]:
        new = NAMES_OF_FAMILY[changed[0].activation.name]
        were = " and ".join(sorted({str(candidate.was) for candidate in changed}))
        logger.info("%s replaces %s; layers that need training before use: %d", new, were, len(changed))
    return [candidate.layer for candidate in planned.candidates]


def _replacement(candidate: Candidate, options: dict[str, Any]) -> nn.Module:
    module, (names, fused) = candidate.module, candidate.form
    linears: Any = [module.get_submodule(name) for name in names]
    if candidate.kind == "whole":
        return _PairMLP(*_pair(candidate, options))
    options = {**options, **candidate.activation.options()}
    if fused:
        return FusedGatedMLP(names, linears, fused == "up first", **options)
    if names == _GATED:
        return SparseGatedMLP.from_linear(*map(_shared, linears), **options)
    if names == _PLAIN:
        return SparseMLP.from_linear(*map(_shared, linears), **options)
    return (NamedGatedMLP if len(names) == 3 else NamedMLP)(names, linears, **options)


def _pair_up(candidate: Candidate, options: dict[str, Any]) -> None:
    module, names, attribute = candidate.module, candidate.form.children, candidate.attribute
    assert attribute is not None
    up, down = _pair(candidate, options)
    for name, new in zip((*names, attribute), (up, down, nn.Identity().train(module.training))):
        holder, _, key = name.rpartition(".")
        setattr(module.get_submodule(holder), key, new)
    up._block = _Block(module, names)
    if isinstance(module, nn.TransformerEncoderLayer):
        # else its fast path for inference would read the weights and run dense
        module.activation_relu_or_gelu = 0


def _pair(candidate: Candidate, options: dict[str, Any]) -> tuple[DeferredUp, SparseDown]:
    first, second = map(candidate.module.get_submodule, candidate.form.children)
    up = DeferredUp()
    up._share(first)  # type: ignore[arg-type]
    return up, SparseDown(up, second, **options, **candidate.activation.options())  # type: ignore[arg-type]


def _outside_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of ``model`` that are neither twell layers nor within one."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, (SparseFFN, _SharedLinear)):
            inside.update(id(child) for child in module.modules())
        elif id(module) not in inside:
            yield name, module


def _forms_of(module: nn.Module, told: list[tuple[str, ...]]) -> list[Form]:
    """The names of the projections, if the module's children are those of a form; several of an ``nn.Sequential``."""
    if type(module) is nn.Sequential:
        return _forms_in_sequence(module)
    if any(isinstance(child, SparseDown) for child in (*module._modules.values(), _below(module, _SPLIT[1]))):
        return []
    if _fit([_below(module, name) for name in _SPLIT]):
        return [Form(_SPLIT)]
    for names in (*told, *_KNOWN_NAMES):
        layers = [module._modules.get(name) for name in names]
        if not all(isinstance(layer, nn.Module) for layer in layers):
            continue
        fused = _is_fused(layers)
        if names in (*told, *_CERTAIN) or fused or _fit(layers):
            # another kind of gate makes it another function
            odd = names == _PLAIN and "gate_up_proj" in module._modules and names not in told
            return [] if odd else [Form(names, "gate first" if fused else "")]
    return []


def _forms_in_sequence(module: nn.Sequential) -> list[Form]:
    """Two linear layers around a module without children and state, wherever they follow each other."""
    layers, forms = list(module._modules.items()), []
    while len(layers) >= 3:
        (up, first), (_, act), (down, second) = layers[:3]
        linear = type(first) is type(second) is nn.Linear and act is not None
        if found := linear and _fit([first, second]) and not [*act.children(), *act.parameters(), *act.buffers()]:
            forms.append(Form((up, down)))
        layers = layers[3 if found else 1 :]
    return forms


def _below(module: nn.Module, name: str) -> nn.Module | None:
    """The child of a child, or None."""
    child, _, key = name.partition(".")
    return getattr(module._modules.get(child), "_modules", {}).get(key)


def _fit(layers: Sequence[nn.Module | None]) -> bool:
    """Whether these are linear layers of the sizes of a feed-forward layer: [N, K], the last one [K, N]."""
    shapes = [(layer.out_features, layer.in_features) for layer in layers if isinstance(layer, nn.Linear)]
    return len(shapes) == len(layers) and set(shapes[:-1]) == {shapes[-1][::-1]}


def _is_fused(layers: Sequence[nn.Module | None]) -> bool:
    """Whether these are two linear layers [2 N, K] and [K, N]."""
    shapes = [(layer.out_features, layer.in_features) for layer in layers if isinstance(layer, nn.Linear)]
    return len(layers) == len(shapes) == 2 and shapes[0] == (2 * shapes[1][-1], shapes[1][0])


def _holds_stacked_experts(module: nn.Module) -> bool:
    """Whether the weights of several experts are parameters of one module, a matrix for each."""
    return sum(p is not None and p.dim() == 3 and name in _TELLTALES for name, p in module._parameters.items()) > 1


def _label(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


class _Found(NamedTuple):
    """What ``_activation`` finds: the activation if it is of the family, its name, and where a fused gate lies."""

    activation: Activation | None
    name: str
    form: Form


def _examine(
    name: str, module: nn.Module, form: Form, strategy: str, examined: dict[Any, _Found]
) -> tuple[Candidate, Activation | None]:
    """Make ``module`` a candidate; raise TypeError or ValueError if it cannot be replaced as it is.

    Returns it with the name of its activation as the one that is replaced, and that activation if it is of the family.
    examined: what was found in earlier modules, by ``_likeness``.
    """
    where, children = _label(name, module), form.children
    torchs = type(module) in _TORCHS_BLOCKS
    of_block = torchs or type(module) is nn.Sequential
    exact = of_block or children in (_PAIR, _SPLIT)
    weights = {child: _plain_weight(f"{where}: {child}", module.get_submodule(child), exact) for child in children}
    _require_sizes(where, weights, form, strategy)
    if "forward" in vars(module):
        raise ValueError(
            f"{where} has a forward set on the instance (as offloading and patches do), which would be lost; "
            f"{_LEAVE_OUT}"
        )
    if of_block:
        return _examine_torchs(where, name, module, form)
    if children == _SPLIT:
        return _examine_split(where, name, module, form)
    others = {key: m for key, m in module._modules.items() if m is not None and key not in children and not _inert(m)}
    own = [*module._parameters, *module._buffers]
    dropping = [f"{key}, p = {m.p}" for key, m in others.items() if isinstance(m, _DropoutNd)]
    block, reason = bool(own) or len(others) - len(dropping) > 1, ""
    if len(children) == 2 and not form.fused and (block or children == _PAIR):
        attribute, reason = read_pair(module, children)
        if attribute is not None:
            act = getattr(module, attribute)
            layers = {child: module._modules[child] for child in children}
            _require_unhooked(where, {**layers, attribute: act})
            _require_stateless(f"{where}: {attribute}", act)
            if reason := run_pair(module, children, attribute):
                raise ValueError(f"{where} cannot be run sparse: {reason}; {_LEAVE_OUT}")
            return _paired(name, module, form, attribute, act)
    if dropping and not block:
        raise ValueError(
            f"{where} must drop no values in training, as no kernel does, got {'; '.join(dropping)}: set p to 0, as "
            f"most configurations can; {_LEAVE_OUT}"
        )
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
    if (likeness := _likeness(module)) not in examined:
        examined[likeness] = _activation(where, module, form, attribute)
    found = examined[likeness]
    kind: Any = "whole" if children == _PAIR and not form.fused else "layer"
    return Candidate(name, module, found.form, kind, attribute, RELU, found.name), found.activation


def _paired(name: str, module: nn.Module, form: Form, attribute: str, act: Any) -> tuple[Candidate, Activation | None]:
    weight: Any = module.get_submodule(form.children[0]).weight
    of = family_of(act, weight.dtype)
    return Candidate(name, module, form, "pair", attribute, RELU, _kind(act)), of


def _examine_torchs(where: str, name: str, module: Any, form: Form) -> tuple[Candidate, Activation | None]:
    """As ``_examine``, for torch's own blocks and containers."""
    attribute, reason = "activation", ""
    up, down = form.children
    if type(module) is nn.Sequential:
        keys = list(module._modules)
        attribute = keys[keys.index(up) + 1]
    act = getattr(module, attribute)
    _require_unhooked(where, {up: module._modules[up], down: module._modules[down], attribute: act})
    _require_stateless(f"{where}: {attribute}", act)
    candidate, of = _paired(name, module, form, attribute, act)
    if type(module) is not nn.Sequential:
        if module.dropout.p:
            raise ValueError(
                f"{where} must drop no values in training, as no kernel does, got dropout, p = {module.dropout.p}: set "
                f"p to 0; {_LEAVE_OUT}"
            )
        reason = run_pair(module, form.children, attribute)
    elif of is not None:
        alone = nn.Sequential(module._modules[up], act, module._modules[down])
        reason = difference(alone, Form(("0", "2")), formula_of(of), act)
    if reason:
        raise ValueError(f"{where} cannot be run sparse: {reason}; {_LEAVE_OUT}")
    return candidate, of


def _examine_split(where: str, name: str, module: nn.Module, form: Form) -> tuple[Candidate, Activation | None]:
    """As ``_examine``, for a block with the two layers in two children, as in BERT."""
    (first, _, key), (second, _, _) = (child.partition(".") for child in form.children)
    inner: Any = module.get_submodule(first)
    reached = {first: inner, second: module.get_submodule(second), form.down: module.get_submodule(form.down)}
    _require_unhooked(where, {**reached, **{f"{first}.{n}": m for n, m in inner.named_modules() if n}})
    others = [n for n, m in inner._modules.items() if m is not None and n != key and not _inert(m)]
    functions = [n for n, value in vars(inner).items() if not n.startswith("_") and callable(value)]
    attribute, reason = "", f"{first} must have one linear layer and an activation alone"
    if len([*others, *functions]) == 1 and not [*inner._parameters, *inner._buffers] and "forward" not in vars(inner):
        attribute = [*others, *functions][0]
        act = getattr(inner, attribute)
        _require_stateless(f"{where}: {first}.{attribute}", act)
        candidate, of = _paired(name, module, form, f"{first}.{attribute}", act)
        alone = nn.Sequential(inner, module.get_submodule(form.down))
        reason = difference(alone, Form((f"0.{key}", "1")), Formula(act) if of is None else formula_of(of), act)
        reason = reason or read_split(module, (first, second), key)
        reason = reason or run_pair(module, form.children, f"{first}.{attribute}", must=True)
    if reason:
        raise ValueError(f"{where} cannot be run sparse: {reason}; {_LEAVE_OUT}")
    return candidate, of


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


class _Bare(nn.Linear):
    pass


def _plain_weight(where: str, linear: Any, exact: bool) -> Tensor:
    """The weight of a projection: an ``nn.Linear`` itself or, unless ``exact``, with a ``forward`` of its own."""
    # which runs with its module
    kind = type(linear)
    own = not exact and kind.__base__ is nn.Linear and set(vars(kind)) <= {*vars(_Bare), "forward", "__doc__"}
    if kind is not nn.Linear and not own:
        raise TypeError(
            f"{where} must be an nn.Linear itself, got {kind.__module__}.{kind.__name__}: quantised "
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
    weight: Tensor = linear.weight
    return weight


def _require_sizes(where: str, weights: dict[str, Tensor], form: Form, strategy: str) -> None:
    n, k = next(iter(weights.values())).shape
    if form.fused:
        n //= 2
    for child, weight in weights.items():
        expected = [k, n] if child == form.down else [2 * n if form.fused else n, k]
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
    replaced = {id(c.module): c for c in candidates if c.kind != "pair"}
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
    return candidate.module.get_submodule(candidate.form.down)


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


def _inert(module: nn.Module) -> bool:
    return type(module) is nn.Identity or (type(module) is nn.Dropout and module.p == 0)


def _kind(act: object) -> str:
    # transformers' classes end so
    return str(getattr(act, "__name__", type(act).__name__)).removesuffix("Activation") or "Activation"


def _activation(where: str, module: nn.Module, form: Form, attribute: str | None) -> _Found:
    """The activation of ``module``. Raises ValueError if it computes none of the formulas."""
    act = None if attribute is None else getattr(module, attribute)
    first: Any = module.get_submodule(form.children[0])
    own = None if act is None else family_of(act, first.weight.dtype)
    forms = [form, form._replace(fused="up first")] if form.fused else [form]
    reasons = []
    for kind, each in itertools.product(_to_try(module, own, attribute, form), forms):
        reasons.append(difference(module, each, formula_of(kind), act if own else None))
        if not reasons[-1]:
            return _Found(kind, NAMES_OF_FAMILY[kind.name], each)
    reason = reasons[0]
    if attribute is not None and act is not None and own is None:
        for each in forms:
            try:
                # it is the activation if the module is linear without it, and the formula with ReLU in its place
                setattr(module, attribute, nn.Identity() if isinstance(act, nn.Module) else identity)
                other = difference(module, each, Formula(identity), None)
                setattr(module, attribute, nn.ReLU() if isinstance(act, nn.Module) else F.relu)
                reason = difference(module, each, formula_of(RELU), None)
            finally:
                setattr(module, attribute, act)
            if not reason and not other:
                return _Found(None, _kind(act), each)
            if not reason:
                reason = f"{attribute} is not the activation, and {_kind(act)} would be lost"
    elif attribute is None:
        for (known, function), each in itertools.product(_OTHERS.items(), forms):
            if not difference(module, each, Formula(function), None):
                return _Found(None, known, each)
    if dropping := [name for name, child in module.named_modules() if isinstance(child, _DropoutNd) and child.p]:
        reason = f"it drops values ({', '.join(dropping)}); {reason}"
    *inputs, down = form.children
    formula = f"act({inputs[0]}(x)){f' * {inputs[1]}(x)' if len(inputs) > 1 else ''}"
    if form.fused:
        formula = f"act(gate) * up, the halves of {inputs[0]}(x)"
    raise ValueError(
        f"{where} must compute {down}({formula}) with an elementwise activation and nothing else, got another function "
        f"of x: {reason}; {_LEAVE_OUT}"
    )


def _to_try(module: nn.Module, own: Activation | None, attribute: str | None, form: Form) -> list[Activation]:
    """The activations that a module may have whose attribute is ``own``; the first is ReLU where nothing is known."""
    if own is not None and own.name != "relu":
        return [own]
    tries = [RELU]
    if own is None and attribute is None:
        tries.append(Activation("relu2"))
        # a threshold in the code can only be an attribute: another number would be refused where the code reads it
        levels = {value for value in vars(module).values() if type(value) is float and 0 < value < math.inf}
        tries += [Activation("fatrelu", level) for level in sorted(levels)]
    if form.gated and (own is not None or attribute is None):
        tries.append(Activation("drelu"))
    return tries


def _explain_activation(candidate: Candidate) -> str:
    return (
        f"sparsify_: {_label(candidate.name, candidate.module)} must apply ReLU, got {candidate.was}. The kernels skip "
        "neurons that ReLU and its family (squared ReLU, dReLU, FATReLU) set to zero; SiLU, GELU and the like make "
        "values small, not zero, and the kernels compute no other activation. Train the model further with ReLU first "
        "(arXiv 2310.04564, ReLU Strikes Back; twell.recipe adds the L1 term that makes it sparse). To do that, pass "
        f'activation="relu"; {_LEAVE_OUT}'
    )


def _nothing_found(model: nn.Module, left: list[str], misses: dict[str, str], stacked: list[str]) -> str:
    forms = "; ".join(", ".join(form) for form in _CERTAIN)
    text = (
        "sparsify_: model must have modules with nn.Linear children named as in one of these forms: "
        f"{forms}; got {type(model).__name__} without any"
    )
    if left:
        text += f" that filter_fn accepts; it left out {len(left)}, the first {left[0] or 'the model'!r}"
    if already := layers(model):
        text += f"; {len(already)} layers of twell are there already, as {next(iter(already)) or 'the model itself'!r}"
    if stacked:
        text += f"; {stacked[0]}: {_STACKED}"
    if misses:
        text += "; nearest are " + "; ".join(list(misses.values())[:5])
        text += ": only nn.Linear projections are recognised, and other names only if names= tells them; or call "
        text += "twell.sparse_gated_ffn"
    return text
