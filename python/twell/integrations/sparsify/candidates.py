"""Which modules of a model ``sparsify_`` can replace, and what they compute."""

import inspect
import itertools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from twell.base.activation import NAMES_OF_FAMILY, RELU, Activation
from twell.call.plain import HOOKS, of_torch, only_moves
from twell.integrations.sparsify import equivalence
from twell.integrations.sparsify.equivalence import MODES, NOTHING, Copies, Form, Put, difference, family_of
from twell.integrations.sparsify.known import WITHOUT_METHODS, Known
from twell.integrations.sparsify.quantised import Stored, kept_dtype, stored, with_plain
from twell.nn.converted import below
from twell.nn.float8 import Float8MLP
from twell.nn.layers import GATED, PLAIN, SparseFFN
from twell.nn.pairs import SharedLinear
from twell.ops.float8 import BLOCK
from twell.runtime import geometry, specs

_HOOKS = (
    *HOOKS,
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)

LEAVE_OUT = "to leave it as it is, have filter_fn return False for it"

_OWN_MODULE = (
    "put its feed-forward layer into a module of its own, whose forward takes x alone, or use twell.nn.SparseMLP or "
    "SparseGatedMLP there"
)


class Candidate(NamedTuple):
    """A module to replace, itself or a pair of its children.

    name: in ``named_modules`` of the model. form: the names of the projections. kind: a "layer" becomes a layer of
    twell, a "pair" stays and its children are replaced. attribute: the name of the activation, None if it is in the
    code. activation: that of the new layer. was: the name of the one that it replaces, None if it is the module's own.
    dropouts: what may drop values of the hidden state. casts: whether weights are cast to the dtype of x. steps: what
    makes the gate, as in ``Known``. stored: what projections in e4m3 hold, with None for one in 16 bits; empty if all
    are in 16 bits. plain: plain projections without values, in place of those that the layer keeps as they are.
    """

    name: str
    module: nn.Module
    form: Form
    kind: Literal["layer", "pair"]
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
        shares = {name: self.module.get_submodule(name).p for name in self.dropouts}
        return "; ".join(f"{name}, p = {p}" for name, p in shares.items() if p)

    @property
    def shape(self) -> tuple[bool, int, int]:
        """Whether it has a gate, K and N."""
        weight: Any = (self.plain.get(self.form.down) or self.module.get_submodule(self.form.down)).weight
        return self.form.gated, weight.shape[0], weight.shape[1]

    @property
    def layer(self) -> str:
        """The qualified name of the twell layer that will be there."""
        return self.name if self.kind == "layer" else f"{self.name}.{self.form.down}".removeprefix(".")


# A candidate with the name of its activation as the one that is replaced, and that activation if it is of the family.
Examined = tuple[Candidate, Activation | None]


class Context(NamedTuple):
    """What all modules of a model are examined with; ``put`` puts a candidate's layer in its place."""

    model: nn.Module
    strategy: str
    put: Callable[[Candidate, dict[str, Any]], object]
    examined: dict[Any, Examined]


def outside_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of ``model`` that are neither twell layers nor within one."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, (SparseFFN, SharedLinear, Float8MLP)):
            inside.update(id(child) for child in module.modules())
        elif id(module) not in inside:
            yield name, module


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


def examine(name: str, module: nn.Module, known: Known, context: Context) -> Examined:
    """Make ``module`` a candidate; raise TypeError or ValueError if it cannot be replaced as it is."""
    where = label(name, module)
    children: dict[str, Any] = {child: module.get_submodule(child) for child in known.names}
    try:
        held = {child: stored(f"{where}: {child}", linear) for child, linear in children.items()}
    except NotImplementedError as error:
        raise ValueError(f"{error}; {LEAVE_OUT}") from None
    in_e4m3 = any(held.values())
    found = {} if in_e4m3 else {child: kept_dtype(f"{where}: {child}", linear) for child, linear in children.items()}
    own = {child: dtype for child, dtype in found.items() if dtype is not None}
    if in_e4m3 or own:
        # examined with plain projections in their place
        dtypes = {child: torch.bfloat16 for child, each in held.items() if each} | own
        for child in children.keys() - dtypes.keys():
            dtypes[child] = _plain_weight(f"{where}: {child}", children[child]).dtype
        _require_one(where, "device", [linear.weight for linear in children.values()])
        dtype = getattr(context.model, "dtype", None)
        if in_e4m3 and dtype in (torch.float16, torch.float32):
            raise TypeError(f"{where} has weights in e4m3, so the model must be in bfloat16, got {dtype}; {LEAVE_OUT}")
        _require_unhooked(where, children if in_e4m3 else {})
        made = with_plain(module, dtypes)
        candidate, of = examine(name, made, known, context)
        if own and candidate.kind == "pair":
            raise ValueError(
                f"{where} must have plain projections, of which the second does the work of both in a pair, got "
                f"adapted or quantised ones: merge adapters first, or load the model in 16 bits; {LEAVE_OUT}"
            )
        plain: Any = {child: made.get_submodule(child) for child in own}
        return candidate._replace(module=module, stored=held if in_e4m3 else {}, plain=plain), of
    form = Form(known.names, "gate first" if _is_fused([below(module, each) for each in known.names]) else "")
    _require_plain(where, module, form, context.strategy)
    if known.hidden:
        of = Activation("relu2")
        return Candidate(name, module, form, "pair", None, of, None), of
    linears = [module.get_submodule(child) for child in form.children]
    if known.attribute and all(type(linear).forward is nn.Linear.forward for linear in linears):
        return _known_pair(where, name, module, form, known, context)
    likeness = _likeness(module)
    if likeness not in context.examined:
        context.examined[likeness] = _prove(where, module, form, known, context)
    candidate, of = context.examined[likeness]
    if candidate.kind == "layer":
        _require_unhooked(where, dict(module.named_modules()))
    else:
        _require_unhooked(where, {str(candidate.attribute): operator.attrgetter(str(candidate.attribute))(module)})
    return candidate._replace(name=name, module=module), of


def _known_pair(where: str, name: str, module: nn.Module, form: Form, known: Known, context: Context) -> Examined:
    """As ``examine``, for a block of a class whose code is known: it is not run."""
    act = operator.attrgetter(known.attribute)(module)
    _require_unhooked(where, {known.attribute: act})
    for part in (child.partition(".")[0] for child in form.children if "." in child):
        owner: Any = module._modules[part]
        # its result is computed only when something uses it, which other code may not see
        if type(owner).__module__ not in {base.__module__ for base in type(module).__mro__}:
            kind = f"{type(owner).__module__}.{type(owner).__qualname__}"
            raise ValueError(f"{where}: {part} must be of the model's own classes, got {kind}; {LEAVE_OUT}")
        _require_forward(f"{where}: {part}", owner)
        _require_unhooked(where, {part: owner})
    candidate = Candidate(name, module, form, "pair", known.attribute, RELU, _kind(act), known.dropouts)
    dtype: Any = module.get_submodule(form.down).weight.dtype
    likeness = _likeness(act) if isinstance(act, nn.Module) else act, dtype
    if likeness not in context.examined:
        context.examined[likeness] = candidate, family_of(act, dtype)
    return candidate, context.examined[likeness][1]


def _prove(where: str, module: nn.Module, form: Form, known: Known, context: Context) -> Examined:
    """As ``examine``, by running copies: of the module as a layer, else as a block with a pair in it."""
    try:
        copies = Copies(module, form, context.model)
    except Exception as error:
        why = f"no copy of it can be made ({type(error).__name__}: {error})"
        raise ValueError(f"{where} cannot be tried, since {why}: {_OWN_MODULE}; {LEAVE_OUT}") from error
    first = Candidate("", module, form, "layer", None, RELU, None, casts=copies.casts, steps=known.steps)
    beyond = reason = _beyond_a_layer(module, form)
    if not beyond:
        attributes = _callables(module, form)
        layer = first._replace(attribute=attributes[0] if len(attributes) == 1 else None)
        forms = (form, form._replace(fused="up first")) if form.fused else (form,)
        found = _run([layer._replace(form=each) for each in forms], copies, context)
        if not isinstance(found, str):
            for child, role in zip(form.children, ("", "down_proj") if form.fused else GATED if form.gated else PLAIN):
                if child in GATED and child != role:
                    raise ValueError(
                        f"{where}: {child} must be the {child} of the layer, as layers of twell have it, got one that "
                        f"is its {role or 'gate and up in one'}: rename the child; {LEAVE_OUT}"
                    )
            return found
        reason = f"it must compute {_formula(form)} with an elementwise activation and nothing else: {found}"
    if type(module) is nn.Sequential:
        reason += "; other code may call the parts of an nn.Sequential, so put these three into one of their own"
    if form.gated or type(module) is nn.Sequential:
        raise ValueError(f"{where} cannot be run sparse: {reason}; {LEAVE_OUT}")
    pairs = [first._replace(kind="pair", attribute=key) for key in _callables(module, form, blocks=True)]
    found = _run(pairs, copies, context) if pairs else "its activation must be an attribute, such as an nn.ReLU"
    if isinstance(found, str):
        alone = f"as a block, it must use what {form.children[0]} returns for {form.down} and their activation alone"
        # that of a module with more in it says nothing of what is between the two
        said = alone if beyond.startswith("it must have") else f"{reason}; {alone}"
        raise ValueError(f"{where} cannot be run sparse: {said}: {found}: {_OWN_MODULE}; {LEAVE_OUT}")
    return found


def _beyond_a_layer(module: nn.Module, form: Form) -> str:
    """What of a module no layer would have; "" if there is nothing."""
    others = {key: m for key, m in module._modules.items() if m is not None and key not in form.children}
    others = {key: m for key, m in others.items() if type(m) not in (nn.Identity, nn.Dropout)}
    state = [*module._parameters, *module._buffers]
    state += [f"{key} ({type(m).__name__})" for key, m in others.items() if _has_state(m)]
    if state:
        return f"it must have {', '.join(form.children)} and an activation alone, got beside them {', '.join(state)}"
    if beside := list(inspect.signature(type(module).forward).parameters)[2:]:
        return f"its forward takes {', '.join(beside)} besides x"
    own = {name for base in type(module).__mro__[:-1] if not of_torch(base) for name in vars(base)} - WITHOUT_METHODS
    lost = sorted(own & vars(nn.Module).keys() - {"forward", "extra_repr", "__repr__"})
    return f"it has a {lost[0]} of its own, which would be lost" if lost else ""


def _run(bases: list[Candidate], copies: Copies, context: Context) -> Examined | str:
    """The candidate among some that computes what its module does, and its activation; else why there is none.

    Each is tried with the activations of the family, then with ReLU in place of what the module has.
    """
    module = bases[0].module
    dtype: Any = module.get_submodule(bases[0].form.down).weight.dtype
    reasons: list[tuple[int, str]] = []

    def differs(
        candidate: Candidate, put: Put = NOTHING, alone: bool = False, **settings: Any
    ) -> tuple[int, str] | None:
        def replace(copied: nn.Module) -> None:
            context.put(candidate._replace(module=copied), {"strategy": "dense"})
            if alone and candidate.kind == "pair":
                copied.get_submodule(candidate.form.children[0]).must = True  # type: ignore[assignment]

        return difference(copies, replace, dtype, put, **settings)

    shares = {f"{key}.p": m.p for key, m in module._modules.items() if type(m) is nn.Dropout}
    shares |= {key: p for key, p in vars(module).items() if is_share(key, p)}
    for own, base in itertools.product((True,) if bases[0].steps else (True, False), bases):
        act = None if base.attribute is None else operator.attrgetter(base.attribute)(module)
        relu: Any = nn.ReLU() if isinstance(act, nn.Module) else F.relu
        put: dict[str | None, Any] = {} if own else {base.attribute: relu}
        still: dict[str | None, Any] = put | dict.fromkeys([*shares], 0.0)
        kinds = [RELU]
        if own and base.kind == "pair":
            # a norm before it may keep values from the activation
            kinds = list(filter(None, [family_of(act, dtype)]))  # type: ignore[arg-type]
        elif own and not base.steps:
            kinds = equivalence.family(module, base.form.gated)
        for kind in kinds:
            candidate = base._replace(activation=kind)
            if why := differs(candidate, still, alone=True):
                reasons.append(why)
                continue
            for share in shares:
                # one that drops values of the hidden state, where the layer or the pair does so, too
                named, half = candidate._replace(dropouts=(share.removesuffix(".p"),)), {**still, share: 0.5}
                if differs(candidate, half, alone=True, settings=MODES) and not differs(named, half, settings=MODES):
                    candidate = candidate._replace(dropouts=(*candidate.dropouts, *named.dropouts))
            if any(shares.values()) and (why := differs(candidate, put, settings=MODES)):
                dropping = "; ".join(f"{share} = {p}" for share, p in shares.items() if p)
                return f"it may drop values of its hidden state alone, got {dropping}: {why[1]}"
            was = NAMES_OF_FAMILY[kind.name] if own else _kind(act) if act else " and ".join(sorted(copies.replaced))
            return candidate._replace(activation=RELU, was=None if base.steps else was), kind if own else None
    return max(reasons, key=operator.itemgetter(0))[1]


def is_share(key: str, value: object) -> bool:
    """Whether an attribute may be the share of a dropout."""
    return (type(value) is float or (type(value) is int and value == 0)) and ("drop" in key or key in ("p", "prob"))


def _formula(form: Form) -> str:
    if form.fused:
        return f"{form.down}(act(gate) * up), of the halves of {form.children[0]}(x),"
    return f"{form.down}(act({form.inputs[0]}(x)){f' * {form.inputs[1]}(x)' if form.gated else ''})"


def _callables(module: nn.Module, form: Form, blocks: bool = False) -> list[str]:
    """The names of attributes that may be an activation; with ``blocks`` those of children with projections, too."""
    holders: dict[str, Any] = {"": module}
    if blocks:
        holders |= {part: module._modules[part] for part in (child.partition(".")[0] for child in form.children)}
    found = []
    for name, holder in holders.items():
        keys = [key for key, m in holder._modules.items() if type(m) not in (nn.Identity, type(None)) and key != name]
        keys += [key for key, value in vars(holder).items() if key[0] != "_" and key != "forward" and callable(value)]
        for key in (f"{name}.{key}".removeprefix(".") for key in keys):
            value = operator.attrgetter(key)(module)
            odd = isinstance(value, nn.Module) and (_has_state(value) or isinstance(value, _DropoutNd))
            if not odd and key not in form.children:
                found.append(key)
    return found


def _likeness(module: nn.Module) -> Any:
    """A key that is equal for two modules only if they compute the same function of x and their weights."""
    plain = (str, bool, int, float, type(None))
    attributes = {key: value for key, value in vars(module).items() if key not in equivalence.MACHINERY}
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
    if "_hf_hook" in vars(linear):
        _require_forward(where, linear)
    kind = type(linear)
    own = [base for base in kind.__mro__ if base not in nn.Linear.__mro__]
    if not isinstance(linear, nn.Linear) or any(vars(base).keys() - _OF_LINEARS for base in own):
        raise TypeError(
            f"{where} must be an nn.Linear itself, got {kind.__module__}.{kind.__name__}: adapters of others "
            "than peft must be merged first, and quantised layers be in e4m3 as transformers has them, weight-only by "
            f"bitsandbytes or torchao, or be loaded in bfloat16; {LEAVE_OUT}"
        )
    _require_forward(where, linear)
    weight: Tensor = linear.weight
    parts = {**linear._parameters, **linear._buffers, **linear._modules}
    plain = parts.keys() == {"weight", "bias"} and {type(p) for p in parts.values()} <= {nn.Parameter, type(None)}
    shape = [linear.out_features, linear.in_features]
    if not plain or hasattr(weight, "ds_id") or list(getattr(weight, "shape", ())) != shape:
        shown = (f"{key}, a {type(p).__name__} {list(getattr(p, 'shape', ()))}" for key, p in parts.items())
        raise TypeError(
            f"{where} must have a weight {shape} and a bias alone, as plain nn.Parameters, got {'; '.join(shown)}: "
            "call sparsify_ before sharding, quantising and deepspeed.initialize. What DeepSpeed's ZeRO-3 has "
            "partitioned must be loaded in a new process without deepspeed.zero.Init, which replaces F.linear for "
            f"good, and trained by ZeRO-1 or 2; {LEAVE_OUT}"
        )
    if linear.bias is not None and linear.bias.dtype != weight.dtype:
        raise TypeError(f"{where}.bias must be {weight.dtype} as its weight, got {linear.bias.dtype}; {LEAVE_OUT}")
    return weight


def _require_forward(where: str, module: nn.Module) -> None:
    """Raise ValueError unless a module runs the methods of its class, perhaps in a hook that moves tensors."""
    kind, moved = type(module), "_hf_hook" in vars(module) and "forward" in vars(module)
    if moved and not only_moves(module):
        raise ValueError(
            f"{where} has a hook of accelerate that does more than move tensors between devices, as offloading by "
            f"device_map does, which leaves no weights to run on: keep it on a device; {LEAVE_OUT}"
        )
    patched = {key: v for key, v in vars(module).items() if callable(v) and callable(getattr(kind, key, None))}
    if moved:
        patched["forward"] = vars(module).get("_old_forward")
        if getattr(patched["forward"], "__func__", None) is kind.forward:
            del patched["forward"]
    for key in patched:
        raise ValueError(f"{where} has a {key} set on the instance, as patches do, which would be lost; {LEAVE_OUT}")


def _require_plain(where: str, module: nn.Module, form: Form, strategy: str) -> None:
    """Raise TypeError or ValueError unless the projections and their sizes are those that layers take."""
    children: dict[str, Any] = {child: module.get_submodule(child) for child in form.children}
    weights = [_plain_weight(f"{where}: {child}", linear) for child, linear in children.items()]
    _require_unhooked(where, children)
    _require_forward(where, module)
    n, k = weights[0].shape
    n //= 2 if form.fused else 1
    _require_one(where, "dtype", weights)
    _require_one(where, "device", weights)
    if not weights[0].is_floating_point():
        raise TypeError(f"{where} must have floating weights, got {weights[0].dtype}; {LEAVE_OUT}")
    for letter, size, limit in (("K", k, specs.K_CLASSES[-1]), ("N", n, geometry.MAX_NEURONS)):
        if strategy != "dense" and (size == 0 or size % 8 or size > limit):
            raise ValueError(
                f"{where}: {letter} must be a positive multiple of 8 up to {limit:,}, as the sparse kernels take, got "
                f"{size:,}; {LEAVE_OUT}"
            )


def _require_one(where: str, what: str, weights: Iterable[Tensor]) -> None:
    found = sorted({str(getattr(weight, what)) for weight in weights})
    if len(found) > 1:
        raise ValueError(f"{where} must have its weights on one {what}, got {' and '.join(found)}; {LEAVE_OUT}")


def _require_unhooked(where: str, modules: dict[str, Any]) -> None:
    for name, module in modules.items():
        if hooks := [hook.lstrip("_") for hook in _HOOKS if getattr(module, hook, None)]:
            raise ValueError(
                f"{where} has {hooks[0]}{f' on {name}' if name else ''}, which would be lost: remove them and register "
                f"them on the result; {LEAVE_OUT}"
            )


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))


def _kind(act: object) -> str:
    # transformers' classes end so
    return str(getattr(act, "__name__", type(act).__name__)).removesuffix("Activation") or "Activation"
