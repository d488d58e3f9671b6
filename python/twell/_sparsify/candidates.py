"""Which modules of a model ``sparsify_`` can replace: their forms, by the names of children, and what they compute."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from twell._activation import NAMES_OF_FAMILY, RELU, Activation
from twell._runtime import geometry, specs
from twell._sparsify.equivalence import (
    Form,
    Formula,
    Function,
    difference,
    family_of,
    formula_of,
    identity,
    is_relu_but_at_zero,
)
from twell._sparsify.modules import GATED, PAIR, PLAIN, SharedLinear, SparseDown, below
from twell._sparsify.other_inputs import HOOKS, of_torch
from twell._sparsify.pairs import read_pair, read_split, run_pair
from twell.nn import SparseFFN

# The names of projections: gate, up and down; up and down, where up may hold the gate, too. A module with the first
# three is a layer, and an error where it is not one that can be taken; one with the others must also have layers of
# fitting sizes, since other kinds of modules have such names, too.
CERTAIN = (GATED, PLAIN, PAIR)
_KNOWN_NAMES = (
    *(GATED, ("w1", "w3", "w2"), ("wi_0", "wi_1", "wo")),
    *(("gate_up_proj", "down_proj"), PLAIN, PAIR, ("wi", "wo"), ("dense_h_to_4h", "dense_4h_to_h")),
    *(("c_fc", "c_proj"), ("linear1", "linear2"), ("lin1", "lin2"), ("linear_1", "linear_2"), ("w1", "w2")),
    *(("fc_in", "fc_out"), ("w_1", "w_2")),
)

# Children and parameters of feed-forward layers of all forms; a module with one of them is a near miss.
TELLTALES = frozenset(itertools.chain(*_KNOWN_NAMES))

# A pair whose layers are in two children of a block, as in BERT.
_SPLIT = ("intermediate.dense", "output.dense")

# torch's own blocks: one method of each calls the feed-forward layers, and nothing else does.
_TORCHS_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)

# Activations to try if a module has its activation in the code of its forward, not in an attribute.
_OTHERS: dict[str, Function] = {
    "SiLU": F.silu,
    "GELU": F.gelu,
    "GELU (tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}

_HOOKS = (
    *HOOKS,
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)

_MACHINERY = frozenset(vars(nn.Module()))

# Methods of every module besides those that a run calls or that print: a class of its own would lose its override.
_INHERITED = frozenset(
    name for name, value in vars(nn.Module).items() if callable(value) and not (name[:2] == name[-2:] == "__")
) - {"forward", "extra_repr", "_get_name", "_call_impl", "_wrapped_call_impl"} | {"__getstate__", "__setstate__"}

LEAVE_OUT = "to leave it as it is, have filter_fn return False for it"


class Candidate(NamedTuple):
    """A module to replace, itself or a pair of its children.

    name: in ``named_modules`` of the model. form: the names of the projections. kind: "layer" is replaced by a layer
    of twell, "whole" by a ``PairMLP``; a "pair" stays and its children are replaced. attribute: the name of the
    activation, None if it is in the code. activation: that of the new layer. was: the name of the one that it replaces,
    None if it is the module's own. dropouts: what drops nothing between the layers of a pair, but may do so later.
    """

    name: str
    module: nn.Module
    form: Form
    kind: Literal["layer", "whole", "pair"]
    attribute: str | None
    activation: Activation
    was: str | None
    dropouts: tuple[str, ...] = ()

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


def outside_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of ``model`` that are neither twell layers nor within one."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, (SparseFFN, SharedLinear)):
            inside.update(id(child) for child in module.modules())
        elif id(module) not in inside:
            yield name, module


def forms_of(module: nn.Module, told: list[tuple[str, ...]]) -> list[Form]:
    """The names of the projections, if the module's children are those of a form; several of an ``nn.Sequential``."""
    if type(module) is nn.Sequential:
        return _forms_in_sequence(module)
    if any(isinstance(child, SparseDown) for child in (*module._modules.values(), below(module, _SPLIT[1]))):
        return []
    if _fit([below(module, name) for name in _SPLIT]):
        return [Form(_SPLIT)]
    for names in (*told, *_KNOWN_NAMES):
        layers = [module._modules.get(name) for name in names]
        if not all(isinstance(layer, nn.Module) for layer in layers):
            continue
        fused = _is_fused(layers)
        if names in (*told, *CERTAIN) or fused or _fit(layers):
            # another kind of gate makes it another function
            odd = names == PLAIN and "gate_up_proj" in module._modules and names not in told
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


def between_fitting(module: nn.Module) -> str:
    """The modules between two linear layers of an ``nn.Sequential`` that fit, if there is more than one; else ""."""
    up, between = None, list[str]()
    for layer in module if type(module) is nn.Sequential else ():
        if type(layer) is not nn.Linear:
            between.append(type(layer).__name__)
        elif len(between) > 1 and _fit([up, layer]):
            return ", ".join(between)
        else:
            up, between = layer, []
    return ""


def unfit_sizes(module: nn.Module) -> str:
    """The sizes of two linear layers around another in an ``nn.Sequential`` that are not K to N to K; else ""."""
    layers = list(module._modules.values()) if type(module) is nn.Sequential else []
    for up, _, down in zip(layers, layers[1:], layers[2:]):
        if type(up) is type(down) is nn.Linear and up.out_features == down.in_features:
            if up.in_features != down.out_features:
                return f"{up.in_features} to {up.out_features} to {down.out_features}"
    return ""


def _fit(layers: Sequence[nn.Module | None]) -> bool:
    """Whether these are linear layers of the sizes of a feed-forward layer: [N, K], the last one [K, N]."""
    shapes = [(layer.out_features, layer.in_features) for layer in layers if isinstance(layer, nn.Linear)]
    return len(shapes) == len(layers) and set(shapes[:-1]) == {shapes[-1][::-1]}


def _is_fused(layers: Sequence[nn.Module | None]) -> bool:
    """Whether these are two linear layers [2 N, K] and [K, N]."""
    shapes = [(layer.out_features, layer.in_features) for layer in layers if isinstance(layer, nn.Linear)]
    return len(layers) == len(shapes) == 2 and shapes[0] == (2 * shapes[1][-1], shapes[1][0])


def holds_stacked_experts(module: nn.Module) -> bool:
    """Whether the weights of several experts are parameters of one module, a matrix for each."""
    return sum(p is not None and p.dim() == 3 and name in TELLTALES for name, p in module._parameters.items()) > 1


def label(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def label_between(name: str, module: nn.Module, between: str) -> str:
    return f"{label(name, module)} with {between} between two linear layers"


class Found(NamedTuple):
    """What ``_activation`` finds: the activation if it is of the family, its name, and where a fused gate lies."""

    activation: Activation | None
    name: str
    form: Form


def examine(
    name: str, module: nn.Module, form: Form, strategy: str, examined: dict[Any, Found]
) -> tuple[Candidate, Activation | None]:
    """Make ``module`` a candidate; raise TypeError or ValueError if it cannot be replaced as it is.

    Returns it with the name of its activation as the one that is replaced, and that activation if it is of the family.
    examined: what was found in earlier modules, by ``_likeness``.
    """
    where, children = label(name, module), form.children
    torchs = type(module) in _TORCHS_BLOCKS
    of_block = torchs or type(module) is nn.Sequential
    exact = of_block or children in (PAIR, _SPLIT)
    weights = {child: _plain_weight(f"{where}: {child}", module.get_submodule(child), exact) for child in children}
    _require_sizes(where, weights, form, strategy)
    if "forward" in vars(module):
        raise ValueError(
            f"{where} has a forward set on the instance (as offloading and patches do), which would be lost; "
            f"{LEAVE_OUT}"
        )
    if of_block:
        return _examine_torchs(where, name, module, form)
    if children == _SPLIT:
        return _examine_split(where, name, module, form)
    others = {key: m for key, m in module._modules.items() if m is not None and key not in children and not _inert(m)}
    own = [*module._parameters, *module._buffers]
    dropping = [f"{key}, p = {m.p}" for key, m in others.items() if isinstance(m, _DropoutNd)]
    block, reason = bool(own) or len(others) - len(dropping) > 1, ""
    if len(children) == 2 and not form.fused and (block or children == PAIR):
        between, reason = read_pair(module, children)
        if between:
            act = getattr(module, between[0])
            layers = {child: module._modules[child] for child in children}
            _require_unhooked(where, {**layers, between[0]: act})
            _require_stateless(f"{where}: {between[0]}", act)
            if reason := run_pair(module, children, between[0]):
                raise ValueError(f"{where} cannot be run sparse: {reason}; {LEAVE_OUT}")
            return _paired(name, module, form, between[0], act, *between[1:])
    if dropping and not block:
        raise ValueError(
            f"{where} must drop no values in training, as no kernel does, got {'; '.join(dropping)}: set p to 0, as "
            f"most configurations can; {LEAVE_OUT}"
        )
    if own or len(others) > 1:
        if reason:
            raise ValueError(f"{where} cannot be run sparse: {reason}; {LEAVE_OUT}")
        got = [*own, *(f"{key} ({type(m).__name__})" for key, m in others.items())]
        raise ValueError(
            f"{where} must have {', '.join(children)} and an activation alone, got beside them {', '.join(got)}; "
            f"{LEAVE_OUT}"
        )
    for key, other in others.items():
        _require_stateless(f"{where}: {key}", other)
    _require_unhooked(where, dict(module.named_modules()))
    callables = [*others, *(key for key, value in vars(module).items() if not key.startswith("_") and callable(value))]
    attribute = callables[0] if len(callables) == 1 else None
    if (likeness := _likeness(module)) not in examined:
        examined[likeness] = _activation(where, module, form, attribute)
    found = examined[likeness]
    own_names = {name for base in type(module).__mro__ if not of_torch(base) for name in vars(base)}
    if lost := sorted(_INHERITED & own_names - vars(object).keys()):
        raise ValueError(f"{where} has a {lost[0]} of its own, which would be lost; {LEAVE_OUT}")
    kind: Any = "whole" if children == PAIR and not form.fused else "layer"
    if kind == "layer":
        _require_roles(where, form)
    return Candidate(name, module, found.form, kind, attribute, RELU, found.name), found.activation


def _require_roles(where: str, form: Form) -> None:
    """Raise ValueError if a child has the name that another projection has in layers of twell."""
    roles = ("", "down_proj") if form.fused else GATED if form.gated else PLAIN
    for child, role in zip(form.children, roles):
        if child in GATED and child != role:
            is_what = role or "gate and up in one"
            raise ValueError(
                f"{where}: {child} must be the {child} of the layer, as layers of twell have it, got one that is its "
                f"{is_what}: rename the child; {LEAVE_OUT}"
            )


def _paired(
    name: str, module: nn.Module, form: Form, attribute: str, act: Any, *dropouts: str
) -> tuple[Candidate, Activation | None]:
    weight: Any = module.get_submodule(form.children[0]).weight
    of = family_of(act, weight.dtype)
    kind = _kind(act) if of else _kind(act) + _oddity(act)
    return Candidate(name, module, form, "pair", attribute, RELU, kind, dropouts), of


def _examine_torchs(where: str, name: str, module: Any, form: Form) -> tuple[Candidate, Activation | None]:
    """As ``examine``, for torch's own blocks and containers."""
    attribute, reason = "activation", ""
    up, down = form.children
    if type(module) is nn.Sequential:
        keys = list(module._modules)
        attribute = keys[keys.index(up) + 1]
    act = getattr(module, attribute)
    _require_unhooked(where, {up: module._modules[up], down: module._modules[down], attribute: act})
    _require_stateless(f"{where}: {attribute}", act)
    candidate, of = _paired(
        name, module, form, attribute, act, *(() if type(module) is nn.Sequential else ("dropout",))
    )
    if type(module) is not nn.Sequential:
        if module.dropout.p:
            raise ValueError(
                f"{where} must drop no values in training, as no kernel does, got dropout, p = {module.dropout.p}: set "
                f"p to 0; {LEAVE_OUT}"
            )
        reason = run_pair(module, form.children, attribute)
    elif of is not None:
        alone = nn.Sequential(module._modules[up], act, module._modules[down])
        reason = difference(alone, Form(("0", "2")), formula_of(of), act)
    if reason:
        raise ValueError(f"{where} cannot be run sparse: {reason}; {LEAVE_OUT}")
    return candidate, of


def _examine_split(where: str, name: str, module: nn.Module, form: Form) -> tuple[Candidate, Activation | None]:
    """As ``examine``, for a block with the two layers in two children, as in BERT."""
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
        dropouts = (f"{first}.{n}" for n, m in inner._modules.items() if isinstance(m, _DropoutNd))
        candidate, of = _paired(name, module, form, f"{first}.{attribute}", act, *dropouts)
        alone = nn.Sequential(inner, module.get_submodule(form.down))
        reason = difference(alone, Form((f"0.{key}", "1")), Formula(act) if of is None else formula_of(of), act)
        reason = reason or read_split(module, (first, second), key)
        reason = reason or run_pair(module, form.children, f"{first}.{attribute}", must=True)
    if reason:
        raise ValueError(f"{where} cannot be run sparse: {reason}; {LEAVE_OUT}")
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
            f"layers have no 16-bit weights to run on, and adapters must be merged first; {LEAVE_OUT}"
        )
    if odd := [key for key, p in linear._parameters.items() if p is not None and type(p) is not nn.Parameter]:
        raise TypeError(
            f"{where}.{odd[0]} must be a plain nn.Parameter, got {type(linear._parameters[odd[0]]).__name__}: call "
            f"sparsify_ before sharding or quantising; {LEAVE_OUT}"
        )
    if linear._parameters.keys() != {"weight", "bias"} or linear._buffers or linear._modules:
        got = sorted([*linear._parameters, *linear._buffers, *linear._modules])
        raise TypeError(f"{where} must have a weight and a bias alone, got {', '.join(got)}; {LEAVE_OUT}")
    if linear.weight is None or "forward" in vars(linear):
        raise TypeError(f"{where} must be an nn.Linear as made, got one that was patched; {LEAVE_OUT}")
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
                f"{where}: {child}.weight must be {expected} (K = {k}, N = {n}), got {list(weight.shape)}; {LEAVE_OUT}"
            )
    for what in ("dtype", "device"):
        if len(found := {str(getattr(weight, what)) for weight in weights.values()}) > 1:
            raise ValueError(
                f"{where} must have its weights on one {what}, got {' and '.join(sorted(found))}; {LEAVE_OUT}"
            )
    if not next(iter(weights.values())).is_floating_point():
        raise TypeError(f"{where} must have floating weights, got {next(iter(weights.values())).dtype}; {LEAVE_OUT}")
    for letter, size, limit in (("K", k, specs.K_CLASSES[-1]), ("N", n, geometry.MAX_NEURONS)):
        if strategy != "dense" and (size == 0 or size % 8 or size > limit):
            raise ValueError(
                f"{where}: {letter} must be a positive multiple of 8 up to {limit:,}, as the sparse kernels take, got "
                f"{size:,}; {LEAVE_OUT}"
            )


def _require_unhooked(where: str, modules: dict[str, Any]) -> None:
    for name, module in modules.items():
        if hooks := [hook.lstrip("_") for hook in _HOOKS if getattr(module, hook, None)]:
            raise ValueError(
                f"{where} has {hooks[0]}{f' on {name}' if name else ''}, which would be lost: remove them and register "
                f"them on the result; {LEAVE_OUT}"
            )


def _require_stateless(where: str, module: Any) -> None:
    if isinstance(module, nn.Module) and (state := [*dict(module.named_parameters()), *dict(module.named_buffers())]):
        raise ValueError(
            f"{where} must be an activation without state, got {type(module).__name__} with {', '.join(state)}; "
            f"{LEAVE_OUT}"
        )


def _inert(module: nn.Module) -> bool:
    return type(module) is nn.Identity or (type(module) is nn.Dropout and module.p == 0)


def _kind(act: object) -> str:
    # transformers' classes end so
    return str(getattr(act, "__name__", type(act).__name__)).removesuffix("Activation") or "Activation"


def _oddity(act: Any) -> str:
    """What keeps an activation out of the family that is nearly in it; else ""."""
    if isinstance(act, nn.Threshold) and act.threshold < 0:
        return " with a negative threshold"
    return ", which is ReLU except for its gradient at 0" if is_relu_but_at_zero(act) else ""


def _activation(where: str, module: nn.Module, form: Form, attribute: str | None) -> Found:
    """The activation of ``module``. Raises ValueError if it computes none of the formulas."""
    act = None if attribute is None else getattr(module, attribute)
    first: Any = module.get_submodule(form.children[0])
    own = None if act is None else family_of(act, first.weight.dtype)
    forms = [form, form._replace(fused="up first")] if form.fused else [form]
    reasons = []
    kinds = _to_try(module, own, attribute, form)
    for kind, each in itertools.product(kinds, forms):
        reasons.append(difference(module, each, formula_of(kind), act if own else None))
        if not reasons[-1]:
            return Found(kind, NAMES_OF_FAMILY[kind.name], each)
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
                return Found(None, _kind(act) + _oddity(act), each)
            if not reason:
                reason = f"{attribute} is not the activation, and {_kind(act)} would be lost"
    elif attribute is None:
        for (known, function), each in itertools.product(_OTHERS.items(), forms):
            if not difference(module, each, Formula(function), None):
                return Found(None, known, each)
    if attribute is None and reason.startswith("it runs "):
        written = "F.relu(gate), its square or F.threshold(gate, self.threshold, 0.0)"
        reason += f"; in the code of forward the activation must be {written}"
    if len(form.children) == 3:
        gate, up, down = form.children
        swapped = Form((up, gate, down))
        if not all(difference(module, swapped, formula_of(kind), act if own else None) for kind in kinds):
            remedy = "rename the children" if gate in GATED else f'pass names=("{up}", "{gate}", "{down}")'
            reason = f"its activation is on {up}, not on {gate}: {remedy}"
    if dropping := [name for name, child in module.named_modules() if isinstance(child, _DropoutNd) and child.p]:
        reason = f"it drops values ({', '.join(dropping)}); {reason}"
    *inputs, down = form.children
    formula = f"act({inputs[0]}(x)){f' * {inputs[1]}(x)' if len(inputs) > 1 else ''}"
    if form.fused:
        formula = f"act(gate) * up, the halves of {inputs[0]}(x)"
    raise ValueError(
        f"{where} must compute {down}({formula}) with an elementwise activation and nothing else, got another function "
        f"of x: {reason}; {LEAVE_OUT}"
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
