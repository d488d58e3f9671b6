"""Whether a module computes what twell would put there: old and new are run on the same inputs and compared.

Nothing here runs the model's own modules. Two copies are made on the CPU, with few neurons and small random weights.
In one the layer or the pair is put in by the code that does so in a model. Both run once in each of a table of
settings, and must agree in outputs, gradients and state. What a run cannot show, a branch on something that no setting
varies, is the word of who names the module.
"""

import contextlib
import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from twell.base.activation import Activation
from twell.call.plain import HOOKS
from twell.nn.pairs import pair_up

Function = Callable[[Tensor], Tensor]
Replace = Callable[[Any], object]
# Attributes of copies by name, in place of those that a module has. None for a name says that ReLU takes the place of
# other activations in the code.
Put = Mapping[str | None, Any]
NOTHING: Put = {}

# Of the small weights, so many that a rearrangement in groups shows.
_NEURONS = 264
_LEAD = (2, 12)

_BF16, _F32 = torch.bfloat16, torch.float32

# Activations of F and torch that a module's code may have in place of ReLU.
_WRITTEN = {"silu": "SiLU", "gelu": "GELU", "sigmoid": "sigmoid", "tanh": "tanh", "mish": "Mish", "elu": "ELU"}

# An activation that cannot run here, since it compiles itself, by the class of its autograd.Function.
_COMPILED = {"fla.modules.activations.ops.SquaredReLUFunction": Activation("relu2")}

# The attributes that all modules have.
MACHINERY = frozenset(vars(nn.Module()))


class Form(NamedTuple):
    """The projections of a layer, by their names in a module, in the order of the formula: gate, up, down.

    Without a gate there are two. fused: the first holds gate and up, in this order ("gate first") or the other one.
    """

    children: tuple[str, ...]
    fused: Literal["", "gate first", "up first"] = ""

    @property
    def gated(self) -> bool:
        return bool(self.fused) or len(self.children) == 3

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.children[:-1]

    @property
    def down(self) -> str:
        return self.children[-1]


class Setting(NamedTuple):
    """A way to call a module.

    dtype: of the weights, None for the model's own. x_dtype: None is that of the weights. lead: the leading dimensions
    of x, whose rows have zeros and three sizes. scale: a factor of all of x.
    """

    dtype: torch.dtype | None
    training: bool
    grad: bool = True
    lead: tuple[int, ...] = _LEAD
    scale: float = 1.0
    autocast: bool = False
    x_dtype: torch.dtype | None = None

    @property
    def mixed(self) -> bool:
        return self.x_dtype is not None and not self.autocast

    def off(self, ours: Any, theirs: Any) -> str:
        """How two results differ; in 16 bits in norm, as a gate next to a threshold may pass it in one alone."""
        precision: Any = _BF16 if self.autocast or self.mixed else self.dtype
        return _off(ours, theirs, torch.finfo(precision).eps, precision.itemsize > 2)

    def __str__(self) -> str:
        x = f"x [{', '.join(map(str, (*self.lead, 'K')))}]{f' times {self.scale:g}' if self.scale != 1 else ''}"
        dtype = "under autocast" if self.autocast else f"in {self.x_dtype or self.dtype}"
        dtype += f" and weights in {self.dtype}" if self.mixed else ""
        mode = "training" if self.training else "evaluation"
        return f"{x} {dtype}, {mode} mode, {'with' if self.grad else 'without'} gradients"


_MIXED = Setting(_F32, True, x_dtype=_BF16)
SETTINGS = (
    Setting(_F32, True),
    Setting(_F32, False, grad=False),
    Setting(_F32, True, grad=False),
    Setting(_F32, False),
    Setting(_F32, True, lead=(1, 1)),
    Setting(_F32, False, grad=False, lead=(1,)),
    Setting(_F32, True, lead=(9,)),
    Setting(_F32, False, lead=()),
    Setting(_F32, True, lead=(2, 1, 3)),
    Setting(_F32, True, scale=1e5),
    Setting(_F32, True, scale=1e-4),
    Setting(None, True),
    Setting(None, False, grad=False),
    Setting(_F32, True, autocast=True),
    Setting(_F32, True, autocast=True, x_dtype=_BF16),
    _MIXED,
    Setting(_BF16, False, x_dtype=_F32),
)
# What dropouts of a module show in.
MODES = SETTINGS[:2]


class Copies:
    """Copies of a module on the CPU with small random weights and few neurons; nothing of them is the model's.

    replaced: the names of activations in whose place ReLU has run. casts: whether the module takes x of another dtype
    than that of its weights. Raises what copying raises.
    """

    def __init__(self, module: nn.Module, form: Form, model: nn.Module) -> None:
        self.k: int = module.get_submodule(form.children[0]).in_features  # type: ignore[assignment]
        self.replaced: set[str] = set()
        with _apart():
            self._made = copy.deepcopy(_small(module, form, model))
            self.casts = not isinstance(self.run(_MIXED, {}), str)

    def run(self, setting: Setting, put: Put, replace: Replace | None = None, seed: int = 0) -> Any:
        """Outputs, gradients and state of a copy in which ``replace`` may put something; a text if that raises."""
        module = copy.deepcopy(self._made).to(setting.dtype).train(setting.training)
        for name, value in put.items():
            holder, _, key = (name or "").rpartition(".")
            if name is not None:
                setattr(module.get_submodule(holder), key, value)
        try:
            if replace is not None:
                replace(module)
            in_code = None in put and replace is None
            with _AsReLU(self.replaced) if in_code else contextlib.nullcontext():
                return _results(module, _input(setting, self.k), setting, seed)
        except Exception as error:
            return f"{type(error).__name__}: {error}".partition("\n")[0]


def difference(
    copies: Copies, replace: Replace, dtype: torch.dtype, put: Put = NOTHING, settings: Sequence[Setting] = SETTINGS
) -> tuple[int, str] | None:
    """How a module of a model in ``dtype`` differs from what ``replace`` makes of it, and after how many settings."""
    with _apart():
        for after, given in enumerate(settings):
            setting = given._replace(dtype=given.dtype or dtype)
            theirs = copies.run(setting, put)
            if isinstance(theirs, str):
                # a module that raises for other dimensions than three, or other dtypes, is never called with them
                if setting.lead != _LEAD or setting.mixed:
                    continue
                return after, f"it cannot run on x alone ({theirs})"
            ours = copies.run(setting, put, replace)
            if isinstance(ours, str):
                return after, f"run sparse, it raises {ours}, for {setting}"
            for what, expected in theirs.items():
                if text := setting.off(ours.get(what), expected):
                    text = f"{what} {text} for {setting}"
                    if setting.training and setting.off(copies.run(setting, put, seed=1).get(what), expected):
                        text += "; it draws random numbers, as a dropout does: set its share to 0"
                    return after, text
    return None


def family(module: nn.Module, gated: bool) -> list[Activation]:
    """The activations that a module may have; one with a threshold must hold that as an attribute."""
    held = [value for inner in module.modules() for value in vars(inner).values()]
    held += [value for each in held for value in getattr(each, "keywords", {}).values()]
    levels = sorted({value for value in held if type(value) is float and 0 < value < math.inf})
    names = ("relu", "relu2", "drelu") if gated else ("relu", "relu2")
    return [*map(Activation, names), *(Activation("fatrelu", level) for level in levels)]


class _Around(nn.Module):
    """A layer of an activation."""

    def __init__(self, act: Function) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 8, False), act, nn.Linear(8, 64, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


def family_of(act: Function, dtype: torch.dtype) -> Activation | None:
    """The activation of the ReLU family, without a second ReLU, that ``act`` is; or None. dtype: of its model."""
    of = getattr(act, "__self__", None)
    if isinstance(of, type) and (named := _COMPILED.get(f"{of.__module__}.{of.__qualname__}")):
        return named
    with _apart():
        around, names = _Around(act), ("up", "down")
    try:
        copies = Copies(around, Form(names), around)
    except Exception:
        return None
    for kind in family(around, gated=False):
        options = {"strategy": "dense", **kind.options()}
        if difference(copies, lambda m: pair_up(m, names, "act", (), options), dtype) is None:  # noqa: B023
            return kind
    return None


class _AsReLU(TorchFunctionMode):
    """Has ReLU in place of other activations that code calls, and notes their names."""

    def __init__(self, seen: set[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _WRITTEN:
            return func(*args, **(kwargs or {}))
        self.seen.add(_WRITTEN[name])
        return F.relu(args[0])


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Leave the caller's device, autocast and inference mode, and keep all random numbers as they are."""
    state = random.getstate()
    try:
        with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.device("cpu"):
            with torch.random.fork_rng(devices=[]):
                yield
    finally:
        random.setstate(state)


def _draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device="cpu", dtype=_F32)


def _small(module: nn.Module, form: Form, model: nn.Module) -> nn.Module:
    """A copy of ``module`` with other tensors, random ones for parameters, and its projections with few neurons."""
    generator = torch.Generator().manual_seed(0)
    # deepcopy takes what is in its memo for a copy; the rest of the model is none of the module's business
    memo: dict[int, Any] = {
        id(t): torch.empty(0, device="cpu") for t in itertools.chain(model.parameters(), model.buffers())
    }
    linears: dict[str, Any] = {child: module.get_submodule(child) for child in form.children}
    k = linears[form.children[0]].in_features
    sizes = dict.fromkeys(form.inputs, (_NEURONS * (2 if form.fused else 1), k)) | {form.down: (k, _NEURONS)}
    for name, owner in module.named_modules():
        for key, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None:
                shape = sizes.get(name, tensor.shape)[: tensor.dim()]
                memo[id(tensor)] = made = _stand_in(generator, tensor, key in owner._parameters, tuple(shape))
                if name == form.children[0]:
                    # gates of 0, whose up projection is another number
                    made.data[0 :: _NEURONS + 1] = 0
    copied = copy.deepcopy(module, memo)
    for inner in copied.modules():
        # hooks are the user's functions
        for key in HOOKS:
            vars(inner)[key] = type(vars(inner)[key])()
        vars(inner)["_compiled_call_impl"] = None
        if "_hf_hook" in vars(inner):
            for key in ("_hf_hook", "_old_forward", "forward"):
                vars(inner).pop(key, None)
    for child in linears:
        small: Any = copied.get_submodule(child)
        small.out_features, small.in_features = sizes[child]
    return copied


def _stand_in(generator: torch.Generator, tensor: Tensor, is_parameter: bool, shape: tuple[int, ...]) -> Tensor:
    """A tensor on the CPU in place of one of a module: random where it is a parameter or has no values."""
    if not tensor.is_floating_point():
        return torch.zeros(shape, dtype=tensor.dtype, device="cpu") if tensor.is_meta else tensor.detach().cpu().clone()
    if is_parameter or tensor.is_meta:
        value = _draw(generator, *shape) / (shape[-1] ** 0.5 if len(shape) > 1 else 1)
        return nn.Parameter(value) if is_parameter else value
    return tensor.detach().to("cpu", _F32, copy=True)


def _input(setting: Setting, k: int) -> Tensor:
    x, rows = _draw(torch.Generator().manual_seed(1), *setting.lead, k) * setting.scale, math.prod(setting.lead)
    scales = torch.tensor([1.0, 0.0, 0.1, 10.0], device="cpu").repeat(rows)[:rows]
    return (x * scales.view(*setting.lead, 1)).to(setting.x_dtype or setting.dtype)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What the attributes of a module and of those within it hold, by name."""
    found: dict[str, Any] = {}
    for name, inner in module.named_modules():
        for key, value in vars(inner).items():
            for place, leaf in enumerate(tree_leaves(value) if key not in MACHINERY else ()):
                if isinstance(leaf, (Tensor, int, float, str)):
                    at = ".".join(filter(None, ("self", name, key))) + f", place {place}" * (place > 0)
                    found[at] = leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
    return found


def _results(module: Any, x: Tensor, setting: Setting, seed: int) -> dict[str, Any]:
    before, leaves = _attributes(module), {"x": x.clone(), **dict(module.named_parameters())}
    for leaf in leaves.values():
        leaf.requires_grad_(setting.grad and leaf.is_floating_point())
    # torch.manual_seed would seed the generators of GPUs, too
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    # a view, since in-place work on a leaf would raise
    with torch.set_grad_enabled(setting.grad), torch.autocast("cpu", _BF16, enabled=setting.autocast):
        outputs = module(leaves["x"].view(x.shape))
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    results: dict[str, Any] = {"the type of its output": type(outputs).__name__}
    results |= {f"output {place}" if tensors[0] is not outputs else "y": leaf for place, leaf in enumerate(tensors)}
    roots = [leaf for leaf in tensors if leaf.requires_grad]
    if setting.grad and roots:
        generator = torch.Generator().manual_seed(2)
        ups = [_draw(generator, *root.shape).to(root.dtype) for root in roots]
        inputs = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        grads = torch.autograd.grad(roots, list(inputs.values()), ups, allow_unused=True)
        results |= {f"the gradient of {name}": grad for name, grad in zip(inputs, grads)}
    set_here = {name: leaf for name, leaf in _attributes(module).items() if _off(before.get(name), leaf)}
    return results | leaves | dict(module.named_buffers()) | set_here


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} in {value.dtype}"
    return "missing" if value is None else repr(value)


def _off(ours: Any, theirs: Any, eps: float = 0.0, by_row: bool = True) -> str:
    """How two values differ by more than roundings, each row by its own size or all in norm; "" if they do not."""
    if _kind(ours) != _kind(theirs):
        return f"is {_kind(theirs)}, and {_kind(ours)} when run sparse,"
    if not isinstance(theirs, Tensor) or not theirs.numel():
        return ""
    a, b = ours.detach().double(), theirs.detach().double()
    finite = a.isfinite() & b.isfinite()
    sizes, gap = b.where(finite, 0.0).abs(), (a - b).abs().where(finite, 0.0)
    if by_row:
        near = gap <= eps**0.75 * (sizes.amax(-1, keepdim=True) if b.dim() else sizes)
        near &= finite | (a == b) | (a.isnan() & b.isnan())
    else:
        # float16 may overflow in one alone
        near = gap.norm() <= eps**0.5 * sizes.norm()
    if near.all():
        return ""
    return f"differs by {gap.max():.2g}, of {sizes.max():.2g},"
