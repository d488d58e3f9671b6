"""Whether a module computes one formula and nothing else, by running it.

The model's own tensors are not needed. The module's ``forward`` runs on small random weights beside the formula:
outputs and gradients are compared in float64, in the model's dtype and under autocast, in both modes, with and without
gradients, for one token and for several, at ordinary and at extreme magnitudes. Every operator is recorded, since a
clamp or a factor may have no effect on these inputs, and so is the code that runs (``other_inputs``).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from twell._activation import Activation
from twell._sparsify.other_inputs import LEADS, State, decides, is_constant, of_torch, uncovered_input, watch

Function = Callable[[Tensor], Tensor]

# Neurons of the small weights. A module's own code may rely on its hidden size, hardly ever on its neurons. With eight
# of them, two sequences or four tokens, a rearrangement in as many groups changes nothing: hence the larger numbers.
_NEURONS, _MORE_NEURONS = 8, 264
_MORE_LEAD = (4, 24)

# Products and sums of tensors. A number among their arguments would be a factor or a summand.
_LINEAR = frozenset({"linear", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "add", "add_", "mul", "mul_"})
_VIEWS = frozenset(
    {"t", "transpose", "permute", "view", "_unsafe_view", "_reshape_alias", "expand", "squeeze", "unsqueeze"}
    | {"squeeze_", "unsqueeze_", "t_"}
    | {"alias", "detach", "clone", "sum"}
)

# What autocast adds.
_CAST = "_to_copy"

# The operator that divides the last dimension in halves, under one name; and its variants, with the place of the
# dimension among the arguments and its default.
_SPLIT = "a division of the last dimension in halves"
_PARTS = {
    "split": (2, 0),
    "split_with_sizes": (2, 0),
    "slice": (1, 0),
    "slice_backward": (2, 0),
    "cat": (1, 0),
}


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
    logarithmic scale, from 0 for 1 to 1 for the largest of the dtype. x_dtype: None is that of the weights. neurons:
    those of the small weights.
    """

    dtype: torch.dtype | None
    training: bool
    grad: bool
    lead: tuple[int, ...]
    size: float = 0.0
    autocast: bool = False
    x_dtype: torch.dtype | None = None
    neurons: int = _NEURONS

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
    _Trial(torch.float64, True, True, _MORE_LEAD, neurons=_MORE_NEURONS),
    _Trial(torch.float64, False, False, _MORE_LEAD, neurons=_MORE_NEURONS),
    _Trial(None, True, True, (2, 4)),
    _Trial(None, False, False, (1, 1)),
    _Trial(None, False, True, (2, 4), 0.4),
    _Trial(None, True, False, (2, 4), 1.0),
    _Trial(torch.float32, True, True, (2, 4), autocast=True),
    _Trial(torch.float32, True, True, (2, 4), autocast=True, x_dtype=torch.bfloat16),
)

# Code may branch on the mode, on grad mode, on the dimensions and on the dtypes of x and the weights: these are all
# combinations, with no leading dimension of x to five.
_COMBINATIONS = tuple(
    _Trial(dtype, training, grad, lead, autocast=dtype == torch.float32, x_dtype=x_dtype)
    for (dtype, x_dtype), training, grad, lead in itertools.product(
        ((torch.float64, None), (torch.float32, None), (torch.float32, torch.bfloat16)),
        (True, False),
        (True, False),
        LEADS,
    )
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
    with outside_of_modes(), watch(watched) as state:
        functions = (formula.of_gate, formula.of_up, *formula.written, *(() if own is None else (own,)))
        allowed = frozenset().union(*map(_operators, functions))
        weights = {neurons: _small(linears, form, neurons) for neurons in (_NEURONS, _MORE_NEURONS)}
        for trials in (_TRIALS, _COMBINATIONS):
            for trial in trials:
                here = trial._replace(dtype=trial.dtype or first.weight.dtype)
                if reason := _try(module, weights[here.neurons], form, formula, here, allowed, state):
                    return reason
            if not any(decides(ran.code) for ran in state.ran.values()):
                break
    numbers: tuple[float, ...] = (first.in_features, first.out_features)
    numbers += (first.out_features // 2,) * bool(form.fused) + (formula.number,) * bool(formula.number)
    return uncovered_input(module.modules(), state, numbers, frozenset(map(id, _codes_of(own))))


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


def is_relu_but_at_zero(act: Function) -> bool:
    """Whether ``act`` has the values of ReLU and another gradient at 0, as a clamp has."""
    x = _every_size(torch.float64, 0.0)
    x = x[x.isfinite()].requires_grad_()
    try:
        with outside_of_modes(), torch.enable_grad():
            y = act(x.clone())
            (grad,) = torch.autograd.grad(y, x, torch.ones_like(x))
    except Exception:
        return False
    return torch.equal(y, F.relu(x)) and torch.equal(grad != (x > 0), x == 0)


def _level(act: Function) -> float:
    """The largest positive number in float64 at which ``act`` is zero, by bisection; 0 if it is not such a function."""

    def silent(x: float) -> bool:
        return not bool(act(torch.tensor([x], dtype=torch.float64, device="cpu")).any())

    try:
        with outside_of_modes(), torch.no_grad():
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
    with outside_of_modes(), watch(watched) as state:
        precisions = dict.fromkeys((torch.float64, torch.float32, dtype) if kind.threshold else (torch.float64, dtype))
        for precision, training, grad in itertools.product(precisions, (True, False), (True, False)):
            x = _every_size(precision, kind.threshold).requires_grad_(grad)
            # powers of two, whose products are exact
            dy = torch.ones_like(x).cumsum(0).remainder(5).exp2()
            try:
                with mode(modules, training), torch.set_grad_enabled(grad), state.recording():
                    # a copy: act may work in place
                    y, expected = act(x.clone()), of_gate(x)
                    pairs = [(y, expected)]
                    if grad:
                        pairs.append((torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(expected, x, dy)[0]))
            except Exception:
                return False
            if not all(_same(*pair) for pair in pairs):
                return False
        # code may branch on the number of dimensions
        flat = _every_size(dtype, kind.threshold)
        for lead, training in itertools.product(LEADS[1:], (True, False)):
            count = math.prod(lead)
            x = flat[: len(flat) // count * count].view(*lead, -1).requires_grad_()
            dy = torch.ones_like(x).flatten().cumsum(0).remainder(5).exp2().view(x.shape)
            try:
                with mode(modules, training), torch.enable_grad(), state.recording():
                    y, expected = act(x.clone()), of_gate(x)
                    gradients = [torch.autograd.grad(each, x, dy)[0] for each in (y, expected)]
            except Exception:
                return False
            if not (_same(y, expected) and _same(*gradients)):
                return False
    numbers: tuple[float, ...] = (kind.threshold,) if kind.threshold else ()
    return is_constant("", act, numbers, modules) and not uncovered_input(
        modules, state, numbers, frozenset(id(ran.code) for ran in state.ran.values())
    )


def _same(ours: Any, theirs: Tensor) -> bool:
    if not isinstance(ours, Tensor) or ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all())


def _every_size(dtype: torch.dtype, threshold: float) -> Tensor:
    """All values of a 16-bit dtype; of a wider one powers of the square root of two, a grid to 16, infinity, 0 and NaN.

    With a threshold no NaN, no value of 16 bits next to it, and in the wider ones itself and the next number, which
    tell > from >=.
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
        level = torch.tensor(threshold, dtype=dtype, device="cpu")
        rest = [0.0, math.inf, level.item(), level.nextafter(level.new_tensor(math.inf)).item()]
    others = torch.tensor(rest, dtype=torch.float64, device="cpu")
    close = torch.arange(1, 2**14, dtype=torch.float64, device="cpu").mul(2**-10)
    return torch.cat([powers, -powers, close, -close, others, -others]).to(dtype)


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """Leave the caller's autocast and inference mode, and keep torch's random numbers as they are."""
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        yield


@contextlib.contextmanager
def mode(modules: Iterable[nn.Module], training: bool) -> Iterator[None]:
    before = {m: m.training for m in modules}
    try:
        for m in before:
            m.training = training
        yield
    finally:
        for m, mode in before.items():
            m.training = mode


def _further_inputs(module: nn.Module) -> str:
    """The parameters of a module's forward after the first."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if parameters and parameters[0].kind in (parameters[0].POSITIONAL_ONLY, parameters[0].POSITIONAL_OR_KEYWORD):
        parameters = parameters[1:]
    return ", ".join(parameter.name for parameter in parameters)


# Running a module beside the formula


def _draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")


def _small(linears: dict[str, Any], form: Form, neurons: int) -> dict[str, Tensor]:
    """Random float64 weights with few ``neurons``, and biases where the layers have them, by name."""
    generator, weights = torch.Generator().manual_seed(0), {}
    k = linears[form.children[0]].in_features
    for child, linear in linears.items():
        inputs, outputs = (neurons, k) if child == form.down else (k, neurons * (2 if form.fused else 1))
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
    state: State,
) -> str:
    """Describe how the module differs from the formula in one trial; "" if it does not."""
    assert trial.dtype is not None
    weights = {name: weight.to(trial.dtype) for name, weight in small.items()}
    x, dy = _inputs(trial.dtype, trial, next(iter(small.values())).shape[1])
    x = x.to(trial.x_dtype or x.dtype)
    given, own = x.clone(), _Operators()
    try:
        with mode(module.modules(), trial.training), own, state.recording():
            ours = _results(lambda w, x: functional_call(module, w, (x,), tie_weights=False), weights, given, dy, trial)
    except Exception as error:
        # a module that raises for other dimensions than three is never called with them
        return f"its forward raised {type(error).__name__}: {error}" if trial.lead in ((2, 4), _MORE_LEAD) else ""
    theirs = _results(functools.partial(_formula, form, formula), weights, x.clone(), dy, trial)
    for what, expected in theirs.items():
        if not _close(ours.get(what), expected, torch.bfloat16 if trial.autocast else trial.dtype):
            return f"{what} differs for {trial}"
    if not torch.equal(given, x):
        return "it changes x in place"
    seen = {operator for operator in own.seen - allowed if not (trial.autocast and operator[0] == _CAST)}
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
        self.seen.add((_SPLIT, ()) if _halves(name, args) else (name, tuple(numbers)))
        return func(*args, **(kwargs or {}))


def _halves(name: str, args: Any) -> bool:
    """Whether an operator divides the last dimension of a tensor in halves, or is the gradient of that."""
    if name not in _PARTS:
        return False
    place, default = _PARTS[name]
    dim = args[place] if len(args) > place else default
    if name == "slice_backward":
        # of a gradient; its second argument is the shape
        sizes, bounds = args[1], args[3:5]
    elif name == "cat":
        sizes = args[0][0].shape
    else:
        sizes, bounds = args[0].shape, args[2:4]
    if dim % len(sizes) != len(sizes) - 1:
        return False
    whole = sizes[-1]
    if name == "cat":
        return len(args[0]) == 2 and args[0][1].shape[-1] == whole
    if name.startswith("slice"):
        first, last = (*bounds, None, None)[:2]
        return (first or 0, whole if last is None else min(last, whole)) in ((0, whole // 2), (whole // 2, whole))
    parts = args[1] if name == "split_with_sizes" else [args[1]]
    return all(2 * part == whole for part in parts)


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
