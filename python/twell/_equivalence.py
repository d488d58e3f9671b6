"""Whether a module computes one formula and nothing else, for ``sparsify_``.

The model's own tensors are not needed. The module's ``forward`` runs on small random weights beside the formula:
outputs and gradients are compared in float64, in the model's dtype and under autocast, in both modes, with and without
gradients, for one token and for several, at ordinary and at extreme magnitudes. Every operator is recorded, since a
clamp or a factor may have no effect on these inputs. So is all Python code that is not torch's: its other inputs
besides x and the projections may change later, and its source shows branches that the runs do not decide. Code that is
neither Python nor torch's is refused, since its source cannot be read.

A pair of layers within a larger block is read from source, and the block runs on meta tensors.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import functools
import gc
import inspect
import itertools
import math
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from twell._activation import Activation

Function = Callable[[Tensor], Tensor]

# Attributes of modules that hold the hooks of calls.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# Neurons of the small weights. A module's own code may rely on its hidden size, hardly ever on its neurons.
_NEURONS = 8

# Products and sums of tensors. A number among their arguments would be a factor or a summand.
_LINEAR = frozenset({"linear", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "add", "add_", "mul", "mul_"})
_VIEWS = frozenset(
    {"t", "transpose", "permute", "view", "_unsafe_view", "_reshape_alias", "expand", "squeeze", "unsqueeze"}
    | {"squeeze_", "unsqueeze_", "t_"}
    | {"alias", "detach", "clone", "sum"}
)

# The operator that divides the last dimension, under one name; and its variants, with the place of the dimension among
# the arguments and its default.
_SPLIT = "a division of the last dimension"
_PARTS = {
    "split": (2, 0),
    "split_with_sizes": (2, 0),
    "slice": (1, 0),
    "slice_backward": (2, 0),
    "cat": (1, 0),
}

# Attributes of every module; and those that give access to children and state by other means than their names.
_MACHINERY = frozenset(dir(nn.Module()))
_LISTINGS = frozenset(
    {"children", "named_children", "modules", "named_modules", "get_submodule", "parameters", "named_parameters"}
    | {"_modules", "_parameters", "__dict__", "__getattr__", "__getattribute__"}
)

# Builtins whose results depend on nothing but their arguments; builtins that run a function once per item; and special
# attributes that do only what their names say.
_HARMLESS = frozenset({getattr, hasattr, isinstance, issubclass, callable, len, any, all})
_RUNNERS = frozenset({map, filter})
_SPECIAL = frozenset({"__call__", "__class__", "__getattr__", "__init__", "__name__", "__qualname__"})

# Instructions that compare, choose, repeat or catch, of all versions of Python.
_CHOOSING = (
    "COMPARE_",
    "IS_OP",
    "CONTAINS_OP",
    "_IF_",
    "FOR_ITER",
    "SUBSCR",
    "SLICE",
    "MATCH_",
    "EXC",
    "SETUP_FINALLY",
)

# Attributes of an nn.Linear that its replacement keeps.
_KEPT = frozenset({"weight", "bias", "in_features", "out_features"})


def identity(x: Tensor) -> Tensor:
    """x itself."""
    return x


class Formula(NamedTuple):
    """``of_gate(gate) * of_up(up)``, without the second factor in a layer without a gate.

    written: other ways to write ``of_gate``, whose operators a module may run. number: a threshold that it may read.
    """

    of_gate: Function
    of_up: Function = identity
    written: tuple[Function, ...] = ()
    number: float = 0.0


def formula_of(kind: Activation) -> Formula:
    """The formula of an activation as plain PyTorch has it."""
    if kind.name == "relu2":
        return Formula(_relu2, written=(lambda x: F.relu(x).pow(2), lambda x: F.relu(x) ** 2.0, *_RELUS))
    if kind.name == "drelu":
        return Formula(F.relu, F.relu, _RELUS)
    if kind.threshold:
        threshold = kind.threshold
        return Formula(lambda x: F.threshold(x, threshold, 0.0), number=threshold)
    return Formula(F.relu, written=_RELUS)


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


_RELUS: tuple[Function, ...] = (F.relu, functools.partial(F.relu, inplace=True))


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


class _Trial(NamedTuple):
    """A way to call a module.

    dtype: None is the model's own. lead: the leading dimensions of x. size: the magnitude of its values on a
    logarithmic scale, from 0 for 1 to 1 for the largest of the dtype. x_dtype: None is that of the weights.
    """

    dtype: torch.dtype | None
    training: bool
    grad: bool
    lead: tuple[int, ...]
    size: float = 0.0
    autocast: bool = False
    x_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        x = f"x [{', '.join(map(str, (*self.lead, 'K')))}]{' of large values' if self.size else ''}"
        dtype = "under autocast" if self.autocast else f"in {self.dtype}"
        mode = "training" if self.training else "evaluation"
        return f"{x} {dtype}, {mode} mode, {'with' if self.grad else 'without'} gradients"


_TRIALS = (
    _Trial(torch.float64, True, True, (2, 4)),
    _Trial(torch.float64, True, False, (2, 4)),
    _Trial(torch.float64, False, True, (2, 4)),
    _Trial(torch.float64, False, False, (2, 4)),
    _Trial(torch.float64, True, True, (1, 1)),
    _Trial(torch.float64, False, False, (1,)),
    _Trial(torch.float64, False, True, ()),
    _Trial(torch.float64, True, True, (9,)),
    _Trial(torch.float64, False, False, (2, 1, 3)),
    _Trial(torch.float64, True, True, (2, 4), 0.4),
    _Trial(None, True, True, (2, 4)),
    _Trial(None, False, False, (1, 1)),
    _Trial(None, False, True, (2, 4), 0.4),
    _Trial(None, True, False, (2, 4), 1.0),
    _Trial(torch.float32, True, True, (2, 4), autocast=True),
    _Trial(torch.float32, True, True, (2, 4), autocast=True, x_dtype=torch.bfloat16),
)


def difference(module: nn.Module, form: Form, formula: Formula, own: Function | None) -> str:
    """Describe how ``module`` differs from ``down(formula(gate(x), up(x)))`` of its children; "" if it does not.

    own: the activation that the module applies, where it is known to compute that of the formula.
    """
    if beside := _further_inputs(module):
        return f"its forward takes {beside} besides x"
    linears: dict[str, Any] = {child: module.get_submodule(child) for child in form.children}
    first = linears[form.children[0]]
    watched = [m for m in module.modules() if not of_torch(type(m))]
    with _outside_of_modes(), _watch(watched) as state:
        functions = (formula.of_gate, formula.of_up, *formula.written, *(() if own is None else (own,)))
        allowed = frozenset().union(*map(_operators, functions))
        weights = _small(linears, form)
        for trial in _TRIALS:
            here = trial._replace(dtype=trial.dtype or first.weight.dtype)
            if reason := _try(module, weights, form, formula, here, allowed, state):
                return reason
    numbers: tuple[float, ...] = (first.in_features, first.out_features)
    numbers += (first.out_features // 2,) * bool(form.fused) + (formula.number,) * bool(formula.number)
    return _uncovered_input(module.modules(), state, numbers, frozenset(map(id, _codes_of(own))))


def _codes_of(act: Function | None) -> list[types.CodeType]:
    """The code of an activation, which ``family_of`` has run on all values."""
    functions = [type(m).forward for m in act.modules()] if isinstance(act, nn.Module) else [act]
    return [function.__code__ for function in functions if isinstance(function, types.FunctionType)]


def family_of(act: Function, dtype: torch.dtype) -> Activation | None:
    """The activation of the ReLU family, without a second ReLU, that ``act`` is in float64 and in ``dtype``; or None.

    Its values and gradients are compared at 0 and infinity, too, and at NaN, except for FATReLU, which code writes as
    ``x > threshold``.
    """
    known = [Activation("relu"), Activation("relu2")]
    if level := _level(act):
        known.append(Activation("fatrelu", level))
    return next((kind for kind in known if _is(act, kind, dtype)), None)


def _level(act: Function) -> float:
    """The largest positive number in float64 at which ``act`` is zero, by bisection; 0 if it is not such a function."""

    def silent(x: float) -> bool:
        return not bool(act(torch.tensor([x], dtype=torch.float64, device="cpu")).any())

    try:
        with _outside_of_modes(), torch.no_grad():
            below, above = 0.0, float(torch.finfo(torch.float16).max)
            if not silent(below) or not silent(torch.finfo(torch.float64).tiny) or silent(above):
                return 0.0
            while below < (middle := (below + above) / 2) < above:
                below, above = (middle, above) if silent(middle) else (below, middle)
            return below
    except Exception:
        return 0.0


def _is(act: Function, kind: Activation, dtype: torch.dtype) -> bool:
    """Whether ``act`` is an activation and has its gradient, in float64 and in ``dtype``."""
    modules = list(act.modules()) if isinstance(act, nn.Module) else []
    watched = [m for m in modules if not of_torch(type(m))]
    of_gate = formula_of(kind).of_gate
    with _outside_of_modes(), _watch(watched) as state:
        for precision, training, grad in itertools.product((torch.float64, dtype), (True, False), (True, False)):
            x = _every_size(precision, kind.threshold).requires_grad_(grad)
            # powers of two, whose products are exact
            dy = torch.ones_like(x).cumsum(0).remainder(5).exp2()
            try:
                with _mode(modules, training), torch.set_grad_enabled(grad), state.recording():
                    # a copy: act may work in place
                    y, expected = act(x.clone()), of_gate(x)
                    pairs = [(y, expected)]
                    if grad:
                        pairs.append((torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(expected, x, dy)[0]))
            except Exception:
                return False
            if not all(_same(*pair) for pair in pairs):
                return False
    numbers: tuple[float, ...] = (kind.threshold,) if kind.threshold else ()
    return _is_constant("", act, numbers, modules) and not _uncovered_input(
        modules, state, numbers, frozenset(id(ran.code) for ran in state.ran.values())
    )


def _same(ours: Any, theirs: Tensor) -> bool:
    if not isinstance(ours, Tensor) or ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all())


def _every_size(dtype: torch.dtype, threshold: float) -> Tensor:
    """All values of a 16-bit dtype; of a wider one the powers of the square root of two, infinity, 0 and NaN.

    With a threshold no NaN, no value of 16 bits next to it, and in float64 itself and its neighbour.
    """
    # named, as the default device may be another
    if dtype.itemsize == 2:
        every = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cpu").view(dtype)
        # code may round the threshold to the dtype or not, as torch's own does on a GPU and on a CPU
        apart = (every.double() - threshold).abs() > torch.finfo(dtype).eps * threshold
        return every[apart] if threshold else every
    powers = torch.arange(-2150, 2050, dtype=torch.float64, device="cpu").div(2).exp2()
    rest = [0.0, float("inf"), float("nan")]
    if threshold:
        rest = [0.0, float("inf"), *((threshold, math.nextafter(threshold, 2.0)) if dtype == torch.float64 else ())]
    others = torch.tensor(rest, dtype=torch.float64, device="cpu")
    return torch.cat([powers, -powers, others, -others]).to(dtype)


@contextlib.contextmanager
def _outside_of_modes() -> Iterator[None]:
    """Leave the caller's autocast and inference mode, and keep torch's random numbers as they are."""
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        yield


@contextlib.contextmanager
def _mode(modules: Iterable[nn.Module], training: bool) -> Iterator[None]:
    before = {m: m.training for m in modules}
    try:
        for m in before:
            m.training = training
        yield
    finally:
        for m, mode in before.items():
            m.training = mode


def of_torch(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).split(".")[0] == "torch"


def _further_inputs(module: nn.Module) -> str:
    """The parameters of a module's forward after the first."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if parameters and parameters[0].kind in (parameters[0].POSITIONAL_ONLY, parameters[0].POSITIONAL_OR_KEYWORD):
        parameters = parameters[1:]
    return ", ".join(parameter.name for parameter in parameters)


# Running a module beside the formula


def _draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")


def _small(linears: dict[str, Any], form: Form) -> dict[str, Tensor]:
    """Random float64 weights with few neurons, and biases where the layers have them, by name."""
    generator, weights = torch.Generator().manual_seed(0), {}
    k = linears[form.children[0]].in_features
    for child, linear in linears.items():
        inputs, outputs = (_NEURONS, k) if child == form.down else (k, _NEURONS * (2 if form.fused else 1))
        weights[f"{child}.weight"] = _draw(generator, outputs, inputs) / inputs**0.5
        if linear.bias is not None:
            weights[f"{child}.bias"] = _draw(generator, outputs)
    return weights


def _try(
    module: nn.Module,
    small: dict[str, Tensor],
    form: Form,
    formula: Formula,
    trial: _Trial,
    allowed: frozenset[Any],
    state: _State,
) -> str:
    """Describe how the module differs from the formula in one trial; "" if it does not."""
    assert trial.dtype is not None
    weights = {name: weight.to(trial.dtype) for name, weight in small.items()}
    x, dy = _inputs(trial.dtype, trial, next(iter(small.values())).shape[1])
    x = x.to(trial.x_dtype or x.dtype)
    given, own = x.clone(), _Operators()
    try:
        with _mode(module.modules(), trial.training), own, state.recording():
            ours = _results(lambda w, x: functional_call(module, w, (x,), tie_weights=False), weights, given, dy, trial)
    except Exception as error:
        # a module that raises for other dimensions than three is never called with them
        return f"its forward raised {type(error).__name__}: {error}" if trial.lead == (2, 4) else ""
    theirs = _results(functools.partial(_formula, form, formula), weights, x.clone(), dy, trial)
    for what, expected in theirs.items():
        if not _close(ours.get(what), expected, torch.bfloat16 if trial.autocast else trial.dtype):
            return f"{what} differs for {trial}"
    if not torch.equal(given, x):
        return "it changes x in place"
    # autocast adds casts
    seen = set() if trial.autocast else own.seen - allowed
    odd = {name for name, numbers in seen if not _is_linear(name, numbers) and not (form.fused and name == _SPLIT)}
    return f"it runs {', '.join(sorted(odd))}" if odd else ""


def _is_linear(name: str, numbers: tuple[Any, ...]) -> bool:
    """Whether an operator, with the numbers among its arguments, can only be part of sums and products of tensors."""
    return name in _VIEWS or (name in _LINEAR and not numbers) or name.startswith("profiler::")


def _inputs(dtype: torch.dtype, trial: _Trial, k: int) -> tuple[Tensor, Tensor]:
    """x and the gradient of y of a trial."""
    generator, largest = torch.Generator().manual_seed(1), torch.finfo(dtype).max
    x, dy = (_draw(generator, *trial.lead, k) for _ in range(2))
    if trial.size:
        x = (x * largest**trial.size).clamp(-largest, largest)
    else:
        # biases show where x is 0
        scales = torch.tensor([1.0, 0.0, 0.1, 10.0], dtype=torch.float64, device="cpu")
        x *= scales.repeat(x.numel() // k)[: x.numel() // k].view(*trial.lead, 1)
    return x.to(dtype), dy.to(dtype)


def _results(
    function: Callable[[dict[str, Tensor], Tensor], Any],
    weights: dict[str, Tensor],
    x: Tensor,
    dy: Tensor,
    trial: _Trial,
) -> dict[str, Any]:
    """The output of a function, and the gradients of x and of the weights."""
    wanted = {"x": x, **{name: weight.clone() for name, weight in weights.items()}}
    for leaf in wanted.values():
        leaf.requires_grad_(trial.grad)
    leaves = {name: wanted[name] for name in weights}
    with torch.set_grad_enabled(trial.grad), torch.autocast("cpu", torch.bfloat16, enabled=trial.autocast):
        # a view, since in-place work on a leaf would raise
        y = function(leaves, x.view(x.shape))
    if not trial.grad or not isinstance(y, Tensor) or y.shape != dy.shape:
        return {"y": y}
    grads: Iterable[Any] = itertools.repeat(None)
    if y.requires_grad:
        grads = torch.autograd.grad(y, list(wanted.values()), dy.to(y.dtype), allow_unused=True)
    return {"y": y, **{f"the gradient of {name}": grad for name, grad in zip(wanted, grads)}}


def _formula(form: Form, formula: Formula, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    def project(child: str, value: Tensor) -> Tensor:
        return F.linear(value, weights[f"{child}.weight"], weights.get(f"{child}.bias"))

    parts = [project(child, x) for child in form.inputs]
    if form.fused:
        parts = list(parts[0].chunk(2, dim=-1))[:: -1 if form.fused == "up first" else 1]
    hidden = formula.of_gate(parts[0])
    return project(form.down, hidden * formula.of_up(parts[1]) if form.gated else hidden)


def _close(ours: Any, theirs: Tensor, precision: torch.dtype) -> bool:
    """Whether two tensors differ by roundings, each row held to its own size, and overflow in the same places."""
    if not isinstance(ours, Tensor) or ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    a, b = ours.detach().double(), theirs.detach().double()
    finite = b.isfinite()
    slack = torch.finfo(precision).eps ** 0.75 * b.where(finite, 0.0).abs().amax(-1, keepdim=True)
    near = (a - b).abs() <= slack
    return bool(torch.equal(a.isfinite(), finite) and near[finite].all())


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators and the numbers among their arguments, in backward passes, too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[tuple[str, tuple[Any, ...]]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        numbers = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, (bool, int, float))]
        self.seen.add((_SPLIT, ()) if _of_last(name, args) else (name, tuple(numbers)))
        return func(*args, **(kwargs or {}))


def _of_last(name: str, args: Any) -> bool:
    """Whether an operator divides the last dimension of a tensor into parts, or is the gradient of that."""
    if name not in _PARTS:
        return False
    place, default = _PARTS[name]
    dim = args[place] if len(args) > place else default
    of = args[1] if name.endswith("_backward") else args[0][0] if name == "cat" else args[0]
    return (
        dim % (len(of) if isinstance(of, (list, tuple)) else of.dim())
        == (len(of) if isinstance(of, (list, tuple)) else of.dim()) - 1
    )


def _operators(function: Function) -> frozenset[Any]:
    """The operators of an elementwise function, forward and backward."""
    with _Operators() as recorded:
        for grad, view in itertools.product((True, False), (True, False)):
            x = torch.linspace(-4, 4, 8, dtype=torch.float64, device="cpu").requires_grad_(grad)
            with torch.set_grad_enabled(grad):
                # in-place work on a view, such as a linear layer's output, has its own backward
                y = function(x.clone().view(2, 4) if view else x.clone())
            if y.requires_grad:
                torch.autograd.grad(y, x, torch.ones_like(y))
    # their numbers are of elements, not factors
    return frozenset((name, numbers) for name, numbers in recorded.seen if name not in ("ones_like", "linspace"))


# Other inputs of a module's code besides x and its projections


class _Ran(NamedTuple):
    """Code that ran: its globals and free variables, and its names of watched modules and of tensors it was given."""

    code: types.CodeType
    names: dict[str, Any]
    free: list[tuple[str, Any]]
    modules: set[str]
    tensors: set[str]

    @property
    def name(self) -> str:
        return str(getattr(self.code, "co_qualname", self.code.co_name))


class _State:
    """A record of code.

    read: attributes of watched modules, with their values. written: names of those that were set. ran: all Python code
    that is not torch's. opaque: calls of functions that are neither Python nor torch's.
    """

    def __init__(self, watched: Iterable[nn.Module]) -> None:
        self.watched = set(map(id, watched))
        self.read: dict[str, Any] = {}
        self.written: set[str] = set()
        self.ran: dict[tuple[int, int], _Ran] = {}
        self.opaque: set[str] = set()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the code of this thread; forget it if it raises, for then the code has refused by itself."""
        before = {
            key: ran._replace(free=[*ran.free], modules={*ran.modules}, tensors={*ran.tensors})
            for key, ran in self.ran.items()
        }
        opaque, previous, collecting = set(self.opaque), sys.getprofile(), gc.isenabled()
        # finalizers of other objects are not the candidate's code
        gc.disable()
        sys.setprofile(self._profile)
        try:
            yield
        except BaseException:
            self.ran, self.opaque = before, opaque
            raise
        finally:
            _resume(previous)
            if collecting:
                gc.enable()

    def _profile(self, frame: types.FrameType, event: str, called: Any) -> None:
        if event == "call" and _is_own(frame):
            self._enter(frame)
        elif event == "c_call" and not _is_known(called) and _is_own(frame):
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            self.opaque.add(f"{name} calls {called.__qualname__}, which is neither Python nor torch's")

    def _enter(self, frame: types.FrameType) -> None:
        code, values = frame.f_code, frame.f_locals
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        modules = {name for name in (*arguments, *code.co_freevars) if id(values.get(name)) in self.watched}
        tensors = {name for name in arguments if isinstance(values.get(name), Tensor)}
        new = _Ran(code, frame.f_globals, [], modules, tensors)
        ran = self.ran.setdefault((id(code), id(frame.f_globals)), new)
        ran.modules.intersection_update(modules)
        ran.tensors.intersection_update(tensors)
        for name in code.co_freevars:
            if name in values and not any(name == other and values[name] is value for other, value in ran.free):
                ran.free.append((name, values[name]))


def _resume(profiler: Any) -> None:
    """Give the thread its previous profiler back."""
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        # cProfile's, before Python 3.12
        sys.setprofile(None)
        profiler.enable()


def _is_own(frame: types.FrameType | None) -> bool:
    """Whether a frame of a trial runs the candidate's code, not torch's or the standard library's on torch's behalf."""
    own = False
    while frame is not None and frame.f_globals is not globals():
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return False
        package = str(frame.f_globals.get("__name__")).split(".")[0]
        if package == "torch" and not own:
            return False
        own = own or not (package in sys.stdlib_module_names or package.startswith("namedtuple_"))
        frame = frame.f_back
    return own


def _is_known(function: Any) -> bool:
    """Whether a C function is torch's, and so recorded, or harmless."""
    owner = getattr(function, "__self__", None)
    if of_torch(function) or isinstance(owner, Tensor) or of_torch(type(owner)) or of_torch(owner):
        return True
    return function in _HARMLESS or function.__module__ == "math"


@contextlib.contextmanager
def _watch(modules: list[nn.Module]) -> Iterator[_State]:
    """Record the attributes that code reads and sets on ``modules``."""
    state = _State(modules)
    profiler = sys.getprofile()
    if profiler is not None and not callable(profiler) and not hasattr(profiler, "enable"):
        raise RuntimeError(
            f"recording what a forward runs needs the thread's profiler, got one that cannot be resumed "
            f"({type(profiler).__name__}): start it afterwards"
        )
    classes = {m: type(m) for m in modules}
    try:
        for m, kind in classes.items():
            object.__setattr__(m, "__class__", _watched(kind, state))
        yield state
    finally:
        for m, kind in classes.items():
            object.__setattr__(m, "__class__", kind)


def _watched(kind: Any, state: _State) -> type:
    # settings of torch's own activations, such as inplace; and what a subclass of nn.Linear shares with it, for it can
    # only be one of the projections, whose tensors the trials set
    settings = set(_KEPT) if issubclass(kind, nn.Linear) else set()
    settings |= {name for base in kind.__mro__ if of_torch(base) for name in getattr(base, "__constants__", ())}

    def read(self: Any, name: str) -> Any:
        value = super(made, self).__getattribute__(name)
        if name not in _MACHINERY and not name.startswith("__") and name not in settings:
            state.read[name] = value
        return value

    def write(self: Any, name: str, value: Any) -> None:
        # the trials themselves set this one
        if name != "training":
            state.written.add(name)
        super(made, self).__setattr__(name, value)

    names = {"__getattribute__": read, "__setattr__": write, "__module__": kind.__module__}
    made = type(kind)(kind.__name__, (kind,), names)
    return made  # type: ignore[no-any-return]


def _is_constant(name: str, value: Any, sizes: tuple[float, ...], modules: Iterable[nn.Module]) -> bool:
    """Whether a value that code reads counts as constant: a size, a dropout of 0, a function, a watched module, ...

    modules: those whose attributes are recorded when they are read.
    """
    if isinstance(value, nn.Module):
        seen = any(value is module for module in modules)
        return seen or (all(of_torch(type(m)) for m in value.modules()) and not [*value.parameters(), *value.buffers()])
    if isinstance(value, types.MethodType):
        return _is_constant(name, value.__self__, sizes, modules)
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        return all(_is_constant(name, part, sizes, modules) for part in parts)
    if isinstance(value, (torch.jit.ScriptFunction, Tensor)):
        return False
    if value is None or isinstance(value, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)):
        return True
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return of_torch(type(value)) or (isinstance(value, str) and value == "relu")
    return value in sizes or (value == 0 and (name == "p" or "drop" in name))


def _uncovered_input(
    modules: Iterable[nn.Module], state: _State, sizes: tuple[float, ...], by_value: frozenset[int] = frozenset()
) -> str:
    """Describe an input of the code that the trials do not cover; "" if there is none.

    by_value: the code that ran, or will have run, on all values of tensors.
    """
    if state.written:
        return f"its forward sets self.{min(state.written)}"
    if state.opaque:
        return min(state.opaque)
    modules = list(modules)
    for name, value in state.read.items():
        if not _is_constant(name, value, sizes, modules):
            return f"its forward reads self.{name} ({_short(value)}), which can be set to something else"
    within = {id(code) for ran in state.ran.values() for code in _codes(ran.code) if code is not ran.code}
    for ran in state.ran.values():
        if id(ran.code) in within:
            # its free variables are local to code that ran, too
            continue
        for name, value in [*ran.free, *_named(ran)]:
            if isinstance(value, type) and not _is_readable(value):
                return f"{ran.name} uses {name}, which is neither Python nor torch's"
            if not _is_constant(name, value, sizes, modules):
                return f"{ran.name} reads {name} ({_short(value)}), which can be set to something else"
        for reason in (_open_name(ran), _open_branch(ran, id(ran.code) in by_value)):
            if reason:
                return f"{ran.name} {reason}"
    return ""


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, (str, bool, int, float)) else type(value).__name__


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and the code of functions, lambdas and comprehensions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _named(ran: _Ran) -> Iterator[tuple[str, Any]]:
    """The globals that code reads, and the attributes of modules and classes among them, with their values."""
    for code in _codes(ran.code):
        name, value = "", None
        for instruction in dis.get_instructions(code):
            if instruction.opname == "EXTENDED_ARG":
                continue
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, (types.ModuleType, type)):
                name, value = f"{name}.{instruction.argval}", getattr(value, instruction.argval, None)
                continue
            if name:
                yield name, value
            name, value = "", None
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                name = instruction.argval
                value = ran.names.get(name, vars(builtins).get(name))
            if str(getattr(value, "__name__", "")).split(".")[0] == "torch":
                # torch's own modules are not looked into
                name, value = "", None


def _is_readable(kind: type) -> bool:
    """Whether a class is torch's, written in Python, or a builtin that runs none of its arguments."""
    if kind in vars(builtins).values():
        return kind not in _RUNNERS
    # heap types that are mutable
    return of_torch(kind) or (bool(kind.__flags__ & 1 << 9) and not kind.__flags__ & 1 << 8)


def _open_name(ran: _Ran) -> str:
    """Describe how code reaches values that no run shows, by imports or special attributes; "" if it does not."""
    for code in _codes(ran.code):
        for instruction in dis.get_instructions(code):
            name = str(instruction.argval)
            if instruction.opname == "IMPORT_NAME" and name.split(".")[0] != "torch":
                return f"imports {name} when it runs, and not where its file begins"
            special = name.startswith("__") and name.endswith("__") and name not in _SPECIAL
            if special and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                return f"uses {name}"
    return ""


def _open_branch(ran: _Ran, by_value: bool) -> str:
    """Describe a condition that depends on more than the trials vary; "" if there is none."""
    if not _decides(ran.code):
        return ""
    tree = _tree(ran.code)
    if tree is None:
        return "has branches, and its source cannot be read"
    function = tree.body[0]
    for statement in function.body if isinstance(function, ast.FunctionDef) else tree.body:
        for condition in _conditions(statement):
            if not (by_value and _is_of_values(condition, ran)) and not _is_decided(condition, ran.modules):
                return f"branches on {ast.unparse(condition).splitlines()[0]}, of which a run shows only one side"
    return ""


def _decides(code: types.CodeType) -> bool:
    """Whether code, or code within it, has anything for ``_conditions``: only then its source is needed."""
    for part in _codes(code):
        if "getattr" in part.co_names:
            return True
        for instruction in dis.get_instructions(part):
            subscript = instruction.opname == "BINARY_OP" and instruction.argrepr == "[]"
            if subscript or any(choosing in instruction.opname for choosing in _CHOOSING):
                return True
    return False


def _tree(function: Any) -> ast.Module | None:
    """The parsed source of a function or of its code, None if there is none."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


def _conditions(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions that decide which code runs, how often, and with which of several values."""
    # a branch that raises needs no check
    if isinstance(node, ast.Assert):
        return
    if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise):
        return
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield node.test
    elif isinstance(node, ast.comprehension):
        yield from node.ifs
    elif isinstance(node, ast.Match):
        yield node.subject
    elif isinstance(node, ast.Subscript):
        yield node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        yield from node.args[1:2]
    elif isinstance(node, (ast.BoolOp, ast.Compare, ast.Try)):
        yield node
    if isinstance(node, (ast.For, ast.comprehension)):
        listed = isinstance(node.iter, (ast.Tuple, ast.List))
        if not listed or any(isinstance(item, ast.Starred) for item in ast.iter_child_nodes(node.iter)):
            yield node.iter
    annotations = {getattr(node, "annotation", None), getattr(node, "returns", None)}
    for child in ast.iter_child_nodes(node):
        if child not in annotations:
            yield from _conditions(child)


def _is_of_values(node: ast.AST, ran: _Ran) -> bool:
    """Whether this compares an argument, a tensor, with a number or an attribute that is recorded."""
    if not isinstance(node, ast.Compare) or not isinstance(node.left, ast.Name) or node.left.id not in ran.tensors:
        return False
    return all(_is_decided(operand, ran.modules) for operand in node.comparators)


def _is_decided(node: ast.AST, modules: set[str]) -> bool:
    """Whether the trials vary all inputs of a condition: the mode, grad mode and the dimensions of a tensor.

    modules: names of those whose attributes are recorded when they are read.
    """
    if isinstance(node, ast.Compare) and all(map(_is_dtype, (node.left, *node.comparators))):
        return True
    if isinstance(node, (ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.Slice, ast.Tuple)):
        operands = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
        return all(_is_decided(operand, modules) for operand in operands)
    if isinstance(node, ast.Call):
        dim = isinstance(node.func, ast.Attribute) and node.func.attr == "dim" and isinstance(node.func.value, ast.Name)
        return dim or ast.unparse(node) == "torch.is_grad_enabled()" or _is_of_tensor(node)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id in modules or node.attr == "ndim"
    return isinstance(node, ast.Constant)


def _is_dtype(node: ast.AST) -> bool:
    """Whether this is a tensor's dtype, which under autocast varies, or an integer one, which no weight has."""
    if not isinstance(node, ast.Attribute):
        return False
    if node.attr in ("int8", "uint8"):
        return ast.unparse(node.value) == "torch"
    return node.attr == "dtype" and (isinstance(node.value, ast.Name) or _is_weight(node.value))


def _is_of_tensor(call: ast.Call) -> bool:
    """Whether a call asks if a weight is a tensor; weights that are anything else are not run."""
    kinds = ("Tensor", "torch.Tensor", "nn.Parameter", "torch.nn.Parameter")
    asks = ast.unparse(call.func) == "isinstance" and len(call.args) == 2
    return asks and _is_weight(call.args[0]) and ast.unparse(call.args[1]) in kinds


def _is_weight(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "weight"


# A pair of layers in a block


def read_pair(module: nn.Module, pair: tuple[str, ...]) -> tuple[str | None, str]:
    """(attribute of the activation in ``fc2(activation(fc1(x)))`` of a module's own forward, ""), or (None, reason).

    pair: the names of ``fc1`` and ``fc2`` in the module.

    The calls must be in one expression or in consecutive statements: code between them, other uses of their results
    and other methods that call them would get other values than before.
    """
    tree = _tree(inspect.unwrap(type(module).forward))
    if tree is None:
        return None, "the source of its forward cannot be read"
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    calls: dict[str, ast.Call] = {}
    fc1, fc2 = pair
    for name in pair:
        uses = [node for node in ast.walk(tree) if _is_self(node, name)]
        # reading fc1.weight and the like still works
        uses = [node for node in uses if getattr(parents[node], "attr", None) not in _KEPT]
        called = [node for node in map(parents.get, uses) if isinstance(node, ast.Call) and node.func in uses]
        if len(uses) != 1 or len(called) != 1 or len(called[0].args) != 1 or called[0].keywords:
            return None, f"its forward must call self.{name} once, on one argument, and use it nowhere else"
        calls[name] = called[0]

    consumed: list[ast.Name] = []
    argument, at = _source_of(calls[fc2], calls[fc2].args[0], parents, consumed)
    if (kept := _kept_whole(module, argument)) is not None:
        argument, at = _source_of(at, kept, parents, consumed)
    act = argument.func if isinstance(argument, ast.Call) and len(argument.args) == 1 else None
    if not isinstance(argument, ast.Call) or not isinstance(act, ast.Attribute) or not _is_self(act, act.attr):
        return None, f"its forward must call self.{fc2} right on the result of an activation, an attribute of self"
    if _source_of(at, argument.args[0], parents, consumed)[0] is not calls[fc1]:
        return None, f"its forward must call self.{act.attr} right on the result of self.{fc1}"
    if argument.keywords or len([node for node in ast.walk(tree) if _is_self(node, act.attr)]) != 1:
        return None, f"its forward must call self.{act.attr} once, on one argument, and use it nowhere else"
    if act.attr not in module._modules and act.attr not in vars(module):
        return None, f"self.{act.attr} must be an attribute of the instance, got one of its class"
    if reason := _other_uses(type(module), tree, parents, (*pair, act.attr)):
        return None, reason

    # after fc2 has returned, the name may get another value, which may be used
    final = _statement(calls[fc2], parents)
    renewed = _target(final)
    for name in {node.id for node in consumed}:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
                after = _place(node) > _place(final) and _statement(node, parents) is not final
                before = _place(node) <= min(_place(used) for used in consumed if used.id == name)
                if node not in consumed and not before and not (after and renewed == name):
                    return None, f"its forward must use {name} for self.{fc2} alone"
    return act.attr, ""


def _kept_whole(module: nn.Module, node: ast.expr) -> ast.expr | None:
    """What an expression drops values of, if it is a dropout whose p is an attribute of self and 0; else None."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    called = ast.unparse(node.func)
    p: Any = next((keyword.value for keyword in node.keywords if keyword.arg == "p"), (*node.args, None)[1])
    if called in ("nn.functional.dropout", "F.dropout", "torch.nn.functional.dropout"):
        kept = isinstance(p, ast.Attribute) and _is_self(p, p.attr) and getattr(module, p.attr, None) == 0
    else:
        layer = getattr(module, called.removeprefix("self."), None) if called.startswith("self.") else None
        kept = len(node.args) == 1 and type(layer) is nn.Dropout and layer.p == 0
    return node.args[0] if kept else None


def read_split(block: nn.Module, children: tuple[str, str], layer: str) -> str:
    """Describe what keeps two children, as ``intermediate`` and ``output`` of BERT, from being a pair; "" if nothing.

    Each has a linear layer of the name ``layer``. The block must call both once. The second must hand its first
    argument to that layer and use neither again; what the first one computes, and the order of calls, is left to runs.
    """
    for child in children:
        kind: Any = type(block.get_submodule(child))
        if not isinstance(kind.forward, types.FunctionType) or (tree := _tree(kind.forward)) is None:
            return f"the source of the forward of its {child} cannot be read"
        parents = {inner: node for node in ast.walk(tree) for inner in ast.iter_child_nodes(node)}
        if reason := _other_uses(kind, tree, parents, (layer, layer)):
            return f"{child}: {reason}"
        uses = [node for node in ast.walk(tree) if _is_self(node, layer)]
        called = [node for node in map(parents.get, uses) if isinstance(node, ast.Call) and node.func in uses]
        if len(uses) != 1 or len(called) != 1 or len(called[0].args) != 1 or called[0].keywords:
            return f"the forward of its {child} must call self.{layer} once, on one argument, and use it nowhere else"
        if child == children[1]:
            given = next((arg.arg for function in tree.body for arg in function.args.args[1:2]), "")  # type: ignore[attr-defined]
            argument, names = (
                called[0].args[0],
                [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == given],
            )
            renewed = _target(_statement(called[0], parents)) == given
            others = [node for node in names if node is not argument and isinstance(node.ctx, ast.Load)]
            late = all(_place(node) > _place(called[0]) for node in others)
            if argument not in names or (others and not (renewed and late)):
                return f"the forward of its {child} must use {given} for self.{layer} alone"
    found = dict.fromkeys(children, 0)
    for base in type(block).__mro__:
        if of_torch(base) or base is object:
            continue
        for name, value in vars(base).items():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if name == "__init__" or not isinstance(function, types.FunctionType):
                continue
            if (tree := _tree(function.__code__)) is None:
                return f"the source of its {name} cannot be read"
            for child in children:
                found[child] += sum(_is_self(node, child) for node in ast.walk(tree))
    odd = [child for child, uses_of in found.items() if uses_of != 1]
    return f"its class must use self.{odd[0]} once" if odd else ""


def _other_uses(kind: Any, tree: ast.AST, parents: dict[ast.AST, ast.AST], layers: tuple[str, ...]) -> str:
    """Describe a use of a pair's layers by the class besides the calls in its forward; "" if there is none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "self":
            of = parents[node]
            if not isinstance(of, ast.Attribute) or of.attr in _LISTINGS:
                got = ast.unparse(of).splitlines()[0]
                return (
                    f"its forward must reach {', '.join(layers[:-1])} and {layers[-1]} by these names alone, got {got}"
                )
    names = set(layers)
    for base in kind.__mro__:
        if of_torch(base) or base is object:
            continue
        for name, value in vars(base).items():
            if name in ("__init__", "forward"):
                continue
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if used := names & set().union(*map(_used, _wrapped(function))):
                return f"its {name} must use {min(used)}, which forward calls, for its parameters alone"
    if used := names & set().union(*map(_used, _wrapped(kind.forward)[:-1])):
        return f"a decorator of its forward must use {min(used)}, which forward calls, for its parameters alone"
    return ""


def _wrapped(function: Any) -> list[types.FunctionType]:
    """A function and the functions it wraps, by ``__wrapped__``: the last is the original."""
    found = []
    while function is not None:
        if isinstance(function, types.FunctionType):
            found.append(function)
        function = getattr(function, "__wrapped__", None)
    return found


def _used(function: types.FunctionType) -> set[str]:
    """The attributes and strings that a function uses, without those of which it reads only parameters and sizes."""
    # by its code: inspect would follow a function to the one it wraps
    tree, code = _tree(function.__code__), function.__code__
    if tree is None:
        return {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
    inside = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in _KEPT}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node not in inside}
    return used | {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def _is_self(node: ast.AST, attribute: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == attribute
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _place(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _statement(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.stmt:
    while not isinstance(node, ast.stmt):
        node = parents[node]
    return node


def _target(statement: ast.stmt) -> str | None:
    """The single name that a statement assigns to."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.expr = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    else:
        return None
    return target.id if isinstance(target, ast.Name) else None


def _source_of(
    user: ast.AST, argument: ast.expr, parents: dict[ast.AST, ast.AST], consumed: list[ast.Name]
) -> tuple[ast.expr, ast.AST]:
    """The expression that gives ``argument`` of ``user`` its value, and its node: ``user`` or the statement before."""
    if not isinstance(argument, ast.Name):
        return argument, user
    statement = _statement(user, parents)
    for _, block in ast.iter_fields(parents[statement]):
        if isinstance(block, list) and statement in block and (index := block.index(statement)):
            before = block[index - 1]
            if _target(before) == argument.id and before.value is not None:
                consumed.append(argument)
                return before.value, before
    return argument, user


class _Flow(TorchFunctionMode):
    """Follows the outputs of the first two layers of ``order`` while a block runs on meta tensors."""

    def __init__(self, sizes: dict[str, int], order: tuple[str, str, str]) -> None:
        super().__init__()
        self.sizes, self.order = sizes, order
        self.values: list[Tensor] = []
        self.reason = ""

    def stand_in(self, name: str) -> Function:
        """A function that replaces one of the layers and checks the order of calls."""

        def call(x: Tensor) -> Tensor:
            place = len(self.values)
            if place >= 3 or name != self.order[place] or (place and x is not self.values[-1]):
                self.reason = self.reason or f"its forward must call {', '.join(self.order)} once, in this order"
            with torch._C.DisableTorchFunction():
                y = x.new_empty([*x.shape[:-1], self.sizes.get(name, x.shape[-1])])
            self.values.append(y)
            return y

        return call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        p = (kwargs or {}).get("p", (*args, None, None)[1])
        if func in (torch.dropout, F.dropout) and args and p == 0:
            return args[0]
        if any(leaf is value for leaf in tree_leaves((args, kwargs)) for value in self.values[:2]):
            self.reason = (
                self.reason
                or "its forward must use what self.{} and self.{} return for self.{} alone".format(*self.order)
            )
        return func(*args, **(kwargs or {}))


class _Own(nn.Module):
    """A module's forward without the hooks of its call."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return type(self.module).forward(self.module, x)


@contextlib.contextmanager
def _unhooked(module: nn.Module) -> Iterator[None]:
    """Remove the hooks within ``module`` for a time; they must not see meta tensors."""
    before = [(m, key, vars(m)[key]) for m in module.modules() for key in HOOKS if vars(m).get(key)]
    try:
        for m, key, hooks in before:
            vars(m)[key] = type(hooks)()
        yield
    finally:
        for m, key, hooks in before:
            vars(m)[key] = hooks


def run_pair(module: nn.Module, pair: tuple[str, ...], attribute: str, must: bool = False) -> str:
    """Run a block on meta tensors and describe how its use of the pair differs from ``fc2(activation(fc1(x)))``.

    "" if it does not differ, or if the block cannot run so, for instance because it needs more than x: then its source
    decides, unless the block ``must`` run.
    """
    holder_name, _, key = attribute.rpartition(".")
    holder = module.get_submodule(holder_name)
    linears: Any = {name: module.get_submodule(name) for name in pair}
    own = _Own(module)
    meta = {
        name: torch.empty_like(t, device="meta")
        for name, t in itertools.chain(own.named_parameters(), own.named_buffers())
    }
    for training in (True, False):
        flow = _Flow({name: linear.out_features for name, linear in linears.items()}, (pair[0], attribute, pair[1]))
        act = getattr(holder, key)
        x = torch.empty(2, 4, linears[pair[0]].in_features, dtype=linears[pair[0]].weight.dtype, device="meta")
        places: list[Any] = [*linears.values(), *([act] if isinstance(act, nn.Module) else [])]
        try:
            for name, layer in zip(flow.order if len(places) == 3 else pair, [places[0], *places[2:], places[1]]):
                object.__setattr__(layer, "forward", flow.stand_in(name))
            if not isinstance(act, nn.Module):
                setattr(holder, key, flow.stand_in(attribute))
            with _outside_of_modes(), _mode(module.modules(), training), _unhooked(module), flow:
                with torch.set_grad_enabled(training):
                    functional_call(own, meta, (x,))
        except Exception as error:
            return flow.reason or (f"it cannot run on x alone ({type(error).__name__}: {error})" if must else "")
        finally:
            for layer in places:
                vars(layer).pop("forward", None)
            if not isinstance(act, nn.Module):
                setattr(holder, key, act)
        if flow.reason or len(flow.values) != 3:
            return flow.reason or f"its forward must call {', '.join(flow.order)} once, in this order"
    return ""
