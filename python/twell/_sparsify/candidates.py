"""Which modules of a model ``sparsify_`` can replace, and what they compute."""

import functools
import itertools
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from twell._activation import NAMES_OF_FAMILY, RELU, Activation
from twell._float8_mlp import Float8MLP
from twell._plain import HOOKS, of_torch, only_moves
from twell._runtime import geometry, specs
from twell._sparsify.equivalence import (
    CannotCopyError,
    Copies,
    Form,
    Formula,
    Function,
    casts,
    difference,
    difference_of_pair,
    drops_hidden,
    family_of,
    formula_of,
    identity,
    is_relu_but_at_zero,
)
from twell._sparsify.kept import kept, with_plain
from twell._sparsify.known import WITHOUT_METHODS, Known
from twell._sparsify.modules import GATED, PLAIN, PairDown, SharedLinear, below
from twell._sparsify.quantised import Stored, stored
from twell.float8 import BLOCK
from twell.nn import SparseFFN

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

# Methods of every module besides those that a run calls or that print: a layer in its place would lose its override.
_INHERITED = frozenset(
    name for name, value in vars(nn.Module).items() if callable(value) and not (name[:2] == name[-2:] == "__")
) - {"forward", "extra_repr", "_get_name", "_call_impl", "_wrapped_call_impl"} | {"__getstate__", "__setstate__"}

LEAVE_OUT = "to leave it as it is, have filter_fn return False for it"

_OWN_MODULE = (
    "put its feed-forward layer into a module of its own, whose forward takes x alone, or use twell.nn.SparseMLP or "
    "SparseGatedMLP there"
)


class Candidate(NamedTuple):
    """A module to replace, itself or a pair of its children.

    name: in ``named_modules`` of the model. form: the names of the projections. kind: a "layer" becomes a layer of
    twell, a "pair" stays and its children are replaced, with a "hidden" state that its code makes the second one alone.
    attribute: the name of the activation, None if it is in the
    code. activation: that of the new layer. was: the name of the one that it replaces, None if it is the module's own.
    dropouts: what may drop values of the hidden state. casts: whether weights are cast to the dtype of x. steps: what
    makes the gate, as in ``Known``. stored: what projections in e4m3 hold, with None for one in 16 bits; empty if all
    are in 16 bits. plain: plain projections without values, in place of those that the layer keeps as they are.
    """

    name: str
    module: nn.Module
    form: Form
    kind: Literal["layer", "pair", "hidden"]
    attribute: str | None
    activation: Activation
    was: str | None
    dropouts: tuple[str, ...] = ()
    casts: bool = False
    steps: tuple[str, ...] = ()
    stored: Mapping[str, Stored | None] = types.MappingProxyType({})
    plain: Mapping[str, nn.Linear] = types.MappingProxyType({})

    @property
    def dequantised(self) -> str:
        """Why a layer of projections in e4m3 runs on weights in bfloat16; "" if it runs on e4m3."""
        if not self.stored:
            return ""
        if self.form.fused:
            return "gate and up are one projection"
        if None in self.stored.values():
            return "a projection is in 16 bits"
        if any(each is not None and each.weight.granularity == "block" for each in self.stored.values()):
            return f"scales are of blocks of {BLOCK} x {BLOCK}"
        return "K is no multiple of 16" if self.shape[1] % 16 else ""

    @property
    def dropped(self) -> str:
        """The dropouts of the hidden state of a layer that drop values in training, with their shares."""
        return _dropping(self.module, self.dropouts)

    @property
    def shape(self) -> tuple[bool, int, int]:
        """Whether it has a gate, K and N."""
        weight: Any = (self.plain.get(self.form.down) or self.module.get_submodule(self.form.down)).weight
        return self.form.gated, weight.shape[0], weight.shape[1]

    @property
    def layer(self) -> str:
        """The qualified name of the twell layer that will be there."""
        if self.kind == "layer":
            return self.name
        return f"{self.name}.{self.form.down}" if self.name else self.form.down


class Context(NamedTuple):
    """What all modules of a model are examined with; ``examined`` has what was found in earlier ones."""

    model: nn.Module
    strategy: str
    examined: dict[Any, tuple[Activation | None, str, Form, bool, tuple[str, ...]]]


def outside_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of ``model`` that are neither twell layers nor within one."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, (SparseFFN, SharedLinear, Float8MLP)):
            inside.update(id(child) for child in module.modules())
        elif id(module) not in inside:
            yield name, module


def has_children(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether a module has children of these names, none of which is of a pair already."""
    children = [below(module, name) for name in names]
    return all(child is not None and not isinstance(child, PairDown) for child in children)


def misfit(module: nn.Module, names: tuple[str, ...]) -> str:
    """What keeps children of these names from being the projections of a layer by their kind or sizes; "" if nothing.

    An ``nn.Linear`` in some wrapper, or without weights of 16 bits, is not seen here: it is one that must be refused.
    """
    children: list[Any] = [below(module, name) for name in names]
    # a container has other things under the same numbers, and what is wrapped or quantised is known by its sizes
    contained = type(module) in (nn.Sequential, nn.ModuleList)
    some = not contained and any(isinstance(child, nn.Linear) or hasattr(child, "in_features") for child in children)
    for name, child in zip(names, children):
        weight = child._parameters.get("weight")
        other = of_torch(type(child)) or type(weight) is nn.Parameter
        if not isinstance(child, nn.Linear) and (other or not some):
            kind = type(child)
            # an adapter's class may have the same name
            shown = f"{kind.__module__}.Linear" if kind.__name__ == "Linear" else kind.__name__
            return f"{name} is a {shown}, no nn.Linear"
    if not all(hasattr(child, "in_features") for child in children) or _is_fused(children):
        return ""
    shapes = [(child.out_features, child.in_features) for child in children]
    if set(shapes[:-1]) == {shapes[-1][::-1]}:
        return ""
    got = ", ".join(f"{name} from {k} to {n}" for name, (n, k) in zip(names, shapes))
    return f"its projections must go from K to N, the last one from N to K, got {got}"


def is_sequence(module: nn.Module) -> bool:
    """Whether a module is an ``nn.Sequential`` of two linear layers around a module without state, and nothing else."""
    layers = list(module.children())
    if type(module) is not nn.Sequential or len(layers) != 3 or list(layers[1].parameters()):
        return False
    return type(layers[0]) is type(layers[2]) is nn.Linear and type(layers[1]) is not nn.Linear


def _is_fused(layers: list[Any]) -> bool:
    """Whether these are two linear layers [2 N, K] and [K, N]."""
    shapes = [(layer.out_features, layer.in_features) for layer in layers if hasattr(layer, "in_features")]
    return len(layers) == len(shapes) == 2 and shapes[0] == (2 * shapes[1][-1], shapes[1][0])


def holds_stacked_experts(module: nn.Module) -> bool:
    """Whether the weights of several experts are parameters of one module, a matrix for each."""
    named = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3")
    return sum(name in named and p is not None and p.dim() == 3 for name, p in module._parameters.items()) > 1


def label(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def examine(name: str, module: nn.Module, known: Known, context: Context) -> tuple[Candidate, Activation | None]:
    """Make ``module`` a candidate; raise TypeError or ValueError if it cannot be replaced as it is.

    Returns it with the name of its activation as the one that is replaced, and that activation if it is of the family.
    """
    where = label(name, module)
    if any((held := _stored(where, module, known.names, context)).values()):
        projections: Any = {child: module.get_submodule(child) for child in held}
        dtypes = {child: torch.bfloat16 if each else projections[child].weight.dtype for child, each in held.items()}
        candidate, of = examine(name, with_plain(module, dtypes), known, context)
        return candidate._replace(module=module, stored=held), of
    children: Any = {child: module.get_submodule(child) for child in known.names}
    if own := kept(where, children):
        _require_one_device(where, children)
        rest = [child for child in children if child not in own]
        dtypes = own | {child: _plain_weight(f"{where}: {child}", children[child]).dtype for child in rest}
        made = with_plain(module, dtypes)
        plain: Any = {child: made.get_submodule(child) for child in own}
        for each in plain.values():
            # quantised projections cast their biases
            each.to(each.weight.dtype)
        candidate, of = examine(name, made, known, context)
        if candidate.kind == "pair":
            raise ValueError(
                f"{where} must have plain projections, of which the second does the work of both in a pair, got "
                f"adapted or quantised ones: merge adapters first, or load the model in 16 bits; {LEAVE_OUT}"
            )
        return candidate._replace(module=module, plain=plain), of
    form = Form(known.names, "gate first" if _is_fused([below(module, each) for each in known.names]) else "")
    weights = {child: _plain_weight(f"{where}: {child}", module.get_submodule(child)) for child in form.children}
    _require_sizes(where, weights, form, context.strategy)
    for child, weight in weights.items():
        bias = module.get_submodule(child).bias
        if isinstance(bias, Tensor) and bias.dtype != weight.dtype:
            expected = f"{where}: {child}.bias must be {weight.dtype} as its weight"
            raise TypeError(f"{expected}, got {bias.dtype}; {LEAVE_OUT}")
    _require_forward(where, module)
    if known.hidden:
        _require_unhooked(where, {child: module.get_submodule(child) for child in form.children})
        return Candidate(name, module, form, "hidden", None, RELU, None), RELU
    if known.attribute:
        if all(type(module.get_submodule(child)).forward is nn.Linear.forward for child in form.children):
            return _examine_known_pair(where, name, module, form, known)
        return _examine_block(where, name, module, form, "its projections have a forward of their own", context)
    others = {key: m for key, m in module._modules.items() if m is not None and key not in form.children}
    others = {key: m for key, m in others.items() if type(m) not in (nn.Identity, nn.Dropout)}
    more = [*module._parameters, *module._buffers, *(key for key, m in others.items() if _has_state(m))]
    reason = ""
    if more or len(others) > 1 or any("." in child for child in form.children):
        got = [*module._parameters, *module._buffers, *(f"{key} ({type(m).__name__})" for key, m in others.items())]
        reason = f"it must have {', '.join(form.children)} and an activation alone, got beside them {', '.join(got)}"
    else:
        try:
            return _examine_layer(where, name, module, form, list(others), known.steps, context)
        except _AnotherFunctionError as error:
            reason = str(error)
    if not form.gated and type(module) is not nn.Sequential:
        return _examine_block(where, name, module, form, reason, context)
    if type(module) is nn.Sequential:
        reason += "; other code may call the parts of an nn.Sequential, so put these three into one of their own"
    raise ValueError(f"{where} cannot be run sparse: {reason}; {LEAVE_OUT}")


def _stored(where: str, module: nn.Module, names: tuple[str, ...], context: Context) -> dict[str, Stored | None]:
    """What each projection holds, if it is in e4m3."""
    children = {name: module.get_submodule(name) for name in names}
    try:
        held = {name: stored(f"{where}: {name}", child) for name, child in children.items()}
    except NotImplementedError as error:
        raise ValueError(f"{error}; {LEAVE_OUT}") from None
    for name in (name for name, each in held.items() if each is None and any(held.values())):
        _plain_weight(f"{where}: {name}", children[name])
    if any(held.values()):
        _require_unhooked(where, children)
        _require_one_device(where, children)
        dtype = getattr(context.model, "dtype", None)
        if dtype in (torch.float16, torch.float32):
            raise TypeError(f"{where} has weights in e4m3, so the model must be in bfloat16, got {dtype}; {LEAVE_OUT}")
    return held


def _require_one_device(where: str, children: Mapping[str, Any]) -> None:
    devices = {str(child.weight.device) for child in children.values()}
    if len(devices) > 1:
        raise ValueError(f"{where} must have its weights on one device, got {' and '.join(devices)}; {LEAVE_OUT}")


class _AnotherFunctionError(ValueError):
    """A module is no layer as a whole."""


def _examine_layer(
    where: str,
    name: str,
    module: nn.Module,
    form: Form,
    others: list[str],
    steps: tuple[str, ...],
    context: Context,
) -> tuple[Candidate, Activation | None]:
    """As ``examine``, for a module that may be a layer as a whole; _AnotherFunctionError if it is not."""
    functions = [key for key, value in vars(module).items() if not key.startswith("_") and callable(value)]
    callables = [*others, *(key for key in functions if key != "forward")]
    attribute = callables[0] if len(callables) == 1 else None
    _require_unhooked(where, dict(module.named_modules()))
    own_names = {name for base in type(module).__mro__ if not of_torch(base) for name in vars(base)}
    if lost := sorted(_INHERITED & own_names - vars(object).keys()):
        raise ValueError(f"{where} has a {lost[0]} of its own, which would be lost; {LEAVE_OUT}")
    likeness = _likeness(module)
    if likeness not in context.examined:
        copies = _copies(where, module, form, context.model)
        dropouts = _dropouts_of_hidden(module, copies)
        dtype: Any = module.get_submodule(form.down).weight.dtype
        if not steps:
            found = _activation(where, module, form, attribute, context.model)
        elif reason := difference(copies, form, Formula(identity), None, None, dtype, steps):
            raise _AnotherFunctionError(f"it must make its gate by {' and '.join(steps)}: {reason}")
        else:
            found = RELU, "", form
        parts = [c for c in form.children if type(module.get_submodule(c)) is not nn.Linear]
        if (casting := casts(copies)) and parts and not casts(copies, tuple(parts)):
            raise _AnotherFunctionError("its projections must cast their weights where x has another dtype, not x")
        context.examined[likeness] = (*found, casting, dropouts)
    activation, was, form, casting, dropouts = context.examined[likeness]
    _require_roles(where, form)
    try:
        # what it takes to become another class; nn.Module itself has nothing else
        object.__setattr__(object.__new__(type(module)), "__class__", SparseFFN)
    except TypeError as error:
        raise ValueError(f"{where} cannot become a layer in place ({error}): {_OWN_MODULE}; {LEAVE_OUT}") from error
    kind = None if steps else was
    return Candidate(name, module, form, "layer", attribute, RELU, kind, dropouts, casting, steps), activation


def _dropouts_of_hidden(module: nn.Module, copies: Copies) -> tuple[str, ...]:
    """The dropout of a layer's hidden state, if it has one; _AnotherFunctionError for one that drops other values."""
    found = [key for key, m in module._modules.items() if type(m) is nn.Dropout and drops_hidden(copies, key)]
    others = [key for key, m in module._modules.items() if type(m) is nn.Dropout and key not in found[:1]]
    if dropping := _dropping(module, others):
        raise _AnotherFunctionError(
            f"it may drop values of its hidden state alone, got {dropping}: set p to 0, as most configurations can"
        )
    return tuple(found[:1])


def _dropping(module: nn.Module, names: Iterable[str]) -> str:
    """The dropouts among children of a module that drop values, with their shares."""
    shares = {name: module.get_submodule(name).p for name in names}
    return "; ".join(f"{name}, p = {p}" for name, p in shares.items() if p)


def _misnamed(form: Form) -> dict[str, str]:
    """The children that have the name of another projection in layers of twell, and which they are."""
    roles = ("", "down_proj") if form.fused else GATED if form.gated else PLAIN
    return {child: role for child, role in zip(form.children, roles) if child in GATED and child != role}


def _require_roles(where: str, form: Form) -> None:
    """Raise ValueError if a child has the name that another projection has in layers of twell."""
    for child, role in _misnamed(form).items():
        raise ValueError(
            f"{where}: {child} must be the {child} of the layer, as layers of twell have it, got one that is its "
            f"{role or 'gate and up in one'}: rename the child; {LEAVE_OUT}"
        )


def _examine_known_pair(
    where: str, name: str, module: nn.Module, form: Form, known: Known
) -> tuple[Candidate, Activation | None]:
    """As ``examine``, for a block of a class whose code is known: it is not run."""
    holder_name, _, key = known.attribute.rpartition(".")
    holder = module.get_submodule(holder_name)
    act = getattr(holder, key, None)
    if not callable(act):
        raise ValueError(f"{where} must have an activation {known.attribute}, got {act!r}; {LEAVE_OUT}")
    for part in (child.partition(".")[0] for child in form.children if "." in child):
        owner: Any = module._modules[part]
        # the table knows the classes of both children by the block's
        if type(owner).__module__ not in {base.__module__ for base in type(module).__mro__}:
            kind = f"{type(owner).__module__}.{type(owner).__qualname__}"
            raise ValueError(f"{where}: {part} must be of the model's own classes, got {kind}; {LEAVE_OUT}")
        _require_forward(f"{where}: {part}", owner)
        _require_unhooked(where, {part: owner})
    return _pair(where, name, module, form, known.attribute, act, known.dropouts)


def _pair(
    where: str, name: str, module: nn.Module, form: Form, attribute: str, act: Any, dropouts: tuple[str, ...] = ()
) -> tuple[Candidate, Activation | None]:
    """A candidate of two layers of a block and the activation between them."""
    layers = {child: module.get_submodule(child) for child in form.children}
    _require_unhooked(where, {**layers, attribute: act})
    _require_stateless(f"{where}: {attribute}", act)
    down: Any = layers[form.down]
    of = family_of(act, down.weight.dtype)
    kind = _kind(act) if of else _kind(act) + _oddity(act)
    return Candidate(name, module, form, "pair", attribute, RELU, kind, dropouts), of


def _examine_block(
    where: str, name: str, module: nn.Module, form: Form, reason: str, context: Context
) -> tuple[Candidate, Activation | None]:
    """As ``examine``, for a block of an unknown class: it must run on x alone and be the same with a pair in it."""
    reasons: list[str] = []
    copies = _copies(where, module, form, context.model)
    shares = {k: 0.0 for k, value in vars(module).items() if type(value) is float and 0 <= value < 1}
    shares |= {k: 0.0 for k, m in module._modules.items() if type(m) is nn.Dropout}
    # dropouts that lie between the two; those of nothing may drop something later
    between = {k: zero for k, zero in shares.items() if drops_hidden(copies, k)}
    still = {k: zero for k, zero in between.items() if k in vars(module)}
    holders = {"": module} | {part: module._modules[part] for part in (c.partition(".")[0] for c in form.children)}
    for holder_name, key in ((n, key) for n, m in holders.items() for key in _callables(m, form)):
        attribute = f"{holder_name}.{key}".removeprefix(".")
        act = getattr(holders[holder_name], key)
        if (isinstance(act, nn.Module) and _has_state(act)) or ("." in attribute and attribute in form.children):
            continue
        candidate, of = _pair(where, name, module, form, attribute, act)
        put: dict[str, Any] = {} if of else {attribute: nn.ReLU() if isinstance(act, nn.Module) else F.relu}
        dtype: Any = module.get_submodule(form.down).weight.dtype
        differs = functools.partial(difference_of_pair, copies, attribute, of or RELU, dtype=dtype)
        # an attribute that is of the family says more than one that need not be an activation
        reasons.insert(0 if of is not None else len(reasons), why := differs(put=put | still))
        if not why:
            return candidate._replace(dropouts=tuple(between), casts=casts(copies, form.children)), of
    why = reasons[0] if reasons else "its activation must be an attribute, such as an nn.ReLU"
    raise ValueError(f"{where} cannot be run sparse: {reason}; as a block, {why}: {_OWN_MODULE}; {LEAVE_OUT}")


def _callables(module: Any, form: Form) -> list[str]:
    """The attributes of a module that may be an activation."""
    parts = {k: m for k, m in module._modules.items() if m is not None and k not in form.children}
    children = [k for k, m in parts.items() if type(m) is not nn.Identity]
    functions = [k for k, value in vars(module).items() if not k.startswith("_") and callable(value)]
    return [k for k in (*children, *functions) if k != "forward" and not isinstance(getattr(module, k), _DropoutNd)]


def _copies(where: str, module: nn.Module, form: Form, model: nn.Module) -> Copies:
    try:
        return Copies(module, form, model)
    except CannotCopyError as error:
        raise ValueError(
            f"{where} cannot be tried, since no copy of it can be made ({error}): {_OWN_MODULE}; {LEAVE_OUT}"
        ) from error


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


# What a class of projections may define without being more than its forward shows.
_OF_LINEARS = WITHOUT_METHODS | {"forward", "reset_parameters", "extra_repr"}


def _plain_weight(where: str, linear: Any) -> Tensor:
    """The weight of a projection: an ``nn.Linear``, perhaps of a class that differs in its ``forward`` alone."""
    if "_hf_hook" in vars(linear) and not only_moves(linear):
        _require_forward(where, linear)
    kind = type(linear)
    own = [base for base in kind.__mro__ if base not in nn.Linear.__mro__]
    if not isinstance(linear, nn.Linear) or any(vars(base).keys() - _OF_LINEARS for base in own):
        raise TypeError(
            f"{where} must be an nn.Linear itself, got {kind.__module__}.{kind.__name__}: adapters of others "
            "than peft must be merged first, and quantised layers be in e4m3 as transformers has them, weight-only by "
            f"bitsandbytes or torchao, or be loaded in bfloat16; {LEAVE_OUT}"
        )
    if odd := [key for key, p in linear._parameters.items() if p is not None and type(p) is not nn.Parameter]:
        raise TypeError(
            f"{where}.{odd[0]} must be a plain nn.Parameter, got {type(linear._parameters[odd[0]]).__name__}: call "
            f"sparsify_ before sharding or quantising; {LEAVE_OUT}"
        )
    if linear._parameters.keys() != {"weight", "bias"} or linear._buffers or linear._modules:
        got = sorted([*linear._parameters, *linear._buffers, *linear._modules])
        raise TypeError(f"{where} must have a weight and a bias alone, got {', '.join(got)}; {LEAVE_OUT}")
    if linear.weight is None:
        raise TypeError(f"{where} must be an nn.Linear as made, got one without a weight; {LEAVE_OUT}")
    _require_forward(where, linear)
    weight: Tensor = linear.weight
    if hasattr(weight, "ds_id") or list(weight.shape) != [linear.out_features, linear.in_features]:
        raise ValueError(
            f"{where}.weight must be [{linear.out_features}, {linear.in_features}], got {list(weight.shape)}: where "
            "DeepSpeed's ZeRO-3 has partitioned it, load the model in a new process without deepspeed.zero.Init, which "
            "replaces F.linear for good, and call sparsify_ before deepspeed.initialize, with ZeRO-1 or 2; "
            f"{LEAVE_OUT}"
        )
    return weight


def _require_forward(where: str, module: nn.Module) -> None:
    """Raise ValueError unless a module runs the methods of its class, perhaps in a hook that moves tensors."""
    kind = type(module)
    if patched := [k for k, v in vars(module).items() if callable(v) and callable(getattr(kind, k, None))]:
        if patched != ["forward"]:
            raise ValueError(f"{where} has a {patched[0]} set on the instance, as patches do; {LEAVE_OUT}")
    if "forward" not in vars(module):
        return
    if "_hf_hook" in vars(module) and not only_moves(module):
        raise ValueError(
            f"{where} has a hook of accelerate that does more than move tensors between devices, as offloading by "
            f"device_map does, which leaves no weights to run on: keep it on a device; {LEAVE_OUT}"
        )
    own = vars(module).get("_old_forward") if only_moves(module) else None
    if not (isinstance(own, types.MethodType) and own.__func__ is type(module).forward):
        raise ValueError(f"{where} has a forward set on the instance, as patches do, which would be lost; {LEAVE_OUT}")


def _require_sizes(where: str, weights: dict[str, Tensor], form: Form, strategy: str) -> None:
    n, k = next(iter(weights.values())).shape
    if form.fused:
        n //= 2
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


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))


def _kind(act: object) -> str:
    # transformers' classes end so
    return str(getattr(act, "__name__", type(act).__name__)).removesuffix("Activation") or "Activation"


def _oddity(act: Any) -> str:
    """What keeps an activation out of the family that is nearly in it; else ""."""
    if isinstance(act, nn.Threshold) and act.threshold < 0:
        return " with a negative threshold"
    return ", which is ReLU except for its gradient at 0" if is_relu_but_at_zero(act) else ""


def _activation(
    where: str, module: nn.Module, form: Form, attribute: str | None, model: nn.Module
) -> tuple[Activation | None, str, Form]:
    """The activation of ``module`` if it is of the family, its name, and the form with the place of a fused gate.

    Raises _AnotherFunctionError if it computes none of the formulas.
    """
    act = None if attribute is None else getattr(module, attribute)
    first: Any = module.get_submodule(form.children[0])
    dtype = first.weight.dtype
    own = None if act is None else family_of(act, dtype)
    forms = [form, form._replace(fused="up first")] if form.fused else [form]
    copies = _copies(where, module, form, model)
    # whether the activation is known to be that of the formula, so that its operators may run
    named = attribute if own is not None else None
    differs = functools.partial(difference, copies, dtype=dtype)
    kinds = _to_try(module, own, attribute, form)
    reasons = []
    for kind, each in itertools.product(kinds, forms):
        reasons.append(differs(each, formula_of(kind), named, None))
        if not reasons[-1]:
            return kind, NAMES_OF_FAMILY[kind.name], each
    # the nearest kind may be another than the first
    reason = next((each for each in reasons if each.startswith("it runs ")), reasons[0])
    if attribute is not None and act is not None and own is None:
        puts = (nn.Identity(), nn.ReLU()) if isinstance(act, nn.Module) else (identity, F.relu)
        for each in forms:
            # it is the activation if the module is linear without it, and the formula with ReLU in its place
            other = differs(each, Formula(identity), attribute, puts[0])
            reason = differs(each, formula_of(RELU), attribute, puts[1])
            if not reason and not other:
                return None, _kind(act) + _oddity(act), each
            if not reason:
                reason = f"{attribute} is not the activation, and {_kind(act)} would be lost"
    elif attribute is None:
        for (known, function), each in itertools.product(_OTHERS.items(), forms):
            if not differs(each, Formula(function), None, None):
                return None, known, each
    if attribute is None and reason.startswith("it runs "):
        written = "F.relu(gate), its square or F.threshold(gate, self.threshold, 0.0)"
        reason += f"; in the code of forward the activation must be {written}"
    reason = _another_order(where, module, form, named, kinds, model) or reason
    *inputs, down = form.children
    formula = f"act({inputs[0]}(x)){f' * {inputs[1]}(x)' if len(inputs) > 1 else ''}"
    if form.fused:
        formula = f"act(gate) * up, the halves of {inputs[0]}(x)"
    raise _AnotherFunctionError(
        f"it must compute {down}({formula}) with an elementwise activation and nothing else, got another function "
        f"of x: {reason}"
    )


def _another_order(
    where: str, module: nn.Module, form: Form, named: str | None, kinds: list[Activation], model: nn.Module
) -> str:
    """What is another projection than ``form`` says, if they make a layer in another order; else ""."""
    down: Any = module.get_submodule(form.down)
    orders = () if form.fused else itertools.permutations(form.children)
    for names in (names for names in orders if names != form.children):
        tried, copies = Form(names), _copies(where, module, Form(names), model)
        if all(difference(copies, tried, formula_of(kind), named, None, down.weight.dtype) for kind in kinds):
            continue
        given = ", ".join(f'"{name}"' for name in names)
        remedy = "rename the children" if _misnamed(tried) else f"pass names=({given})"
        if names[0] == form.children[0]:
            return f"its last projection is {names[-1]}, not {form.down}: {remedy}"
        return f"its activation is on {names[0]}, not on {form.children[0]}: {remedy}"
    return ""


def _to_try(module: nn.Module, own: Activation | None, attribute: str | None, form: Form) -> list[Activation]:
    """The activations that a module may have whose attribute is ``own``; the first is ReLU where nothing is known."""
    if own is not None and own.name != "relu":
        return [own]
    tries = [RELU]
    if own is None and attribute is None:
        tries.append(Activation("relu2"))
        # a threshold in the code can only be an attribute that may be read
        levels = {value for value in vars(module).values() if type(value) is float and 0 < value < math.inf}
        tries += [Activation("fatrelu", level) for level in sorted(levels)]
    if form.gated and (own is not None or attribute is None):
        tries.append(Activation("drelu"))
    return tries
