"""Whether a module computes one formula and nothing else, by running copies of it.

Nothing here runs the model's own modules. A copy is made on the CPU, with small random weights in place of its own. For
a module that is to become a layer, outputs and gradients of the copy are compared with those of the formula; for a
block, in which two layers are to become a pair, with those of a second copy that has such a pair. That is done in
float64, in the model's dtype and under autocast, in both modes, with and without gradients, for one token and for
several, at ordinary and at extreme magnitudes. In a layer every operator is recorded, since a clamp or a factor may
have no effect on these inputs. What a run cannot show, a branch on something else, is the word of who names the module.
"""

import contextlib
import copy
import functools
import gc
import inspect
import itertools
import math
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from twell._activation import Activation, ActivationName
from twell._plain import HOOKS
from twell._sparsify.modules import made_by, pair_up

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

# What drops values.
_DROPS = frozenset({"bernoulli", "bernoulli_", "native_dropout", "rand_like", "rand"})

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


# The leading dimensions of an activation's input.
_LEADS = ((2, 4), (2, 1, 3), (1, 2, 1, 2), (1, 1, 2, 1, 2))


def identity(x: Tensor) -> Tensor:
    """x itself."""
    return x


class Formula(NamedTuple):
    """``of_gate(gate) * of_up(up)``, without the second factor in a layer without a gate.

    written: other ways to write ``of_gate``, whose operators a module may run.
    """

    of_gate: Function
    of_up: Function = identity
    written: tuple[Function, ...] = ()


def formula_of(kind: Activation) -> Formula:
    """The formula of an activation as plain PyTorch has it."""
    if kind.name == "relu2":
        return Formula(_relu2, written=(lambda x: F.relu(x).pow(2), lambda x: F.relu(x) ** 2.0, *_RELUS))
    if kind.name == "drelu":
        return Formula(F.relu, F.relu, _RELUS)
    if kind.threshold:
        threshold = kind.threshold
        return Formula(lambda x: F.threshold(x, threshold, 0.0))
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

    @property
    def mixed(self) -> bool:
        """Whether x has another dtype than the weights, and the module has to see to it."""
        return self.x_dtype is not None and not self.autocast

    @property
    def precision(self) -> Any:
        """The dtype whose roundings the results have."""
        return torch.bfloat16 if self.autocast or self.mixed else self.dtype

    def __str__(self) -> str:
        x = f"x [{', '.join(map(str, (*self.lead, 'K')))}]{' of large values' if self.size else ''}"
        dtype = "under autocast" if self.autocast else f"in {self.x_dtype or self.dtype}"
        dtype += f" and weights in {self.dtype}" if self.mixed else ""
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
    _Trial(torch.float32, True, True, (2, 4), x_dtype=torch.bfloat16),
    _Trial(torch.bfloat16, False, True, (2, 4), x_dtype=torch.float32),
)

# Blocks run in fewer ways, since they are larger and each is run twice; in float32, as the constants of their code are.
_OF_BLOCKS = (
    _Trial(None, True, True, (2, 4)),
    _Trial(None, False, False, (2, 4)),
    _Trial(torch.float32, True, True, (2, 4)),
    _Trial(torch.float32, False, True, (1, 1)),
    _Trial(torch.float32, True, True, (9,)),
    _Trial(torch.float32, False, True, (2, 1, 3)),
    _Trial(torch.float32, True, True, (2, 4), 0.4),
    _Trial(torch.float32, True, True, _MORE_LEAD, neurons=_MORE_NEURONS),
    _Trial(torch.float32, True, True, (2, 4), autocast=True),
    _Trial(torch.float32, True, True, (2, 4), x_dtype=torch.bfloat16),
)

# Activations that cannot be tried here, since they compile themselves, by the class of their autograd.Function.
_COMPILED: dict[str, ActivationName] = {"fla.modules.activations.ops.SquaredReLUFunction": "relu2"}

_UNRECORDED = contextlib.nullcontext()

# The leading dimensions that every module must take.
_USUAL = ((2, 4), _MORE_LEAD)


class CannotCopyError(Exception):
    """Why no copy of a module can be made that a trial may run."""


class Copies:
    """Copies of a module on the CPU, in float64, with small random weights and a few neurons; nothing of them is real.

    Raises CannotCopyError if there is none, or none that leaves the modules of ``model`` alone.
    """

    def __init__(self, module: nn.Module, form: Form, model: nn.Module) -> None:
        self.form = form
        with _apart():
            self._made = {neurons: _small(module, form, neurons, model) for neurons in (_NEURONS, _MORE_NEURONS)}
            try:
                self.new()
            except Exception as error:
                raise CannotCopyError(_first_line(error)) from error

    def new(self, neurons: int = _NEURONS, dtype: torch.dtype = torch.float64) -> Any:
        """One to be used up."""
        return copy.deepcopy(self._made[neurons]).to(dtype)


def drops_hidden(copies: Copies, key: str) -> bool:
    """Whether a dropout of a module, a child or a share, drops values of what the down projection gets alone."""
    with _apart():
        trial = _Trial(torch.float32, True, True, (2, 4))
        own, other = (copies.new(dtype=torch.float32) for _ in range(2))
        width = own.get_submodule(copies.form.children[0]).in_features
        dropout = isinstance(getattr(own, key), nn.Module)
        for module, share in ((own, 0.5), (other, 0.0)):
            setattr(module, key, nn.Dropout(share) if dropout else share)
        down = other.get_submodule(copies.form.down)
        down.register_forward_pre_hook(lambda _, given: F.dropout(given[0], 0.5, other.training))
        for training in (True, False):
            try:
                x = _input(torch.float32, trial, width)
                ours, theirs = (_run(each.train(training), {}, x, trial) for each in (own, other))
            except Exception:
                return False
            if not all(_close(ours.get(what), expected, torch.float32) for what, expected in theirs.items()):
                return False
        return True


def casts(copies: Copies, parts: tuple[str, ...] = ("",)) -> bool:
    """Whether parts of a module, itself or projections, take x of another dtype than that of their weights.

    A projection must cast its weight, to the bit: one that computes in a wider dtype is no such one.
    """
    with _apart(), torch.no_grad():
        module = copies.new(dtype=torch.float32)
        try:
            for part in map(module.get_submodule, parts):
                width = (module.get_submodule(copies.form.children[0]) if part is module else part).in_features
                x = _draw(torch.Generator().manual_seed(1), 1, 4, width).bfloat16()
                y = part(x)
                if isinstance(part, nn.Linear):
                    bias = None if part.bias is None else part.bias.bfloat16()
                    if not torch.equal(y, F.linear(x, part.weight.bfloat16(), bias)):
                        return False
        except Exception:
            return False
    return True


def difference(
    copies: Copies,
    form: Form,
    formula: Formula,
    attribute: str | None,
    put: Any,
    dtype: torch.dtype,
    steps: tuple[str, ...] = (),
) -> str:
    """Describe how a module differs from ``down(formula(gate(x), up(x)))`` of its children; "" if it does not.

    attribute, put: the name of its activation, and what takes its place; None for itself. dtype: of the model. steps:
    what makes the gate in place of the formula, as ``made_by`` says; then the module may run any operator.
    """
    with _apart():
        first = copies.new()
        if beside := _further_inputs(first):
            return f"its forward takes {beside} besides x"
        own = () if attribute is None or put is not None else (getattr(first, attribute),)
        allowed = frozenset().union(*map(_operators, (formula.of_gate, formula.of_up, *formula.written, *own)))
        for trial in _TRIALS:
            here = trial._replace(dtype=trial.dtype or dtype)
            stock = copies.new(here.neurons, trial.dtype or dtype)
            if put is not None:
                setattr(stock, str(attribute), put)
            if steps:
                formula = Formula(functools.partial(made_by, stock, steps))
            if reason := _try(stock, form, formula, here, None if steps else allowed):
                return reason
    return ""


def difference_of_pair(
    copies: Copies, attribute: str, activation: Activation, put: dict[str, Any], dtype: torch.dtype
) -> str:
    """Describe how a block differs from itself with a pair; "" if it does not.

    put: what takes the place of attributes in both copies. The other arguments are those of ``difference``.
    """
    with _apart():
        first: Any = copies.new().get_submodule(copies.form.children[0])
        for trial in _OF_BLOCKS:
            here = trial._replace(dtype=trial.dtype or dtype)
            blocks = [copies.new(here.neurons, trial.dtype or dtype) for _ in range(2)]
            for block, (name, value) in itertools.product(blocks, put.items()):
                holder, _, key = name.rpartition(".")
                setattr(block.get_submodule(holder), key, value)
            options = {"strategy": "dense", **activation.options()}
            pair_up(blocks[1], copies.form.children, attribute, (), options, casts(copies, copies.form.children))
            if reason := _try_pair(blocks[0], blocks[1], first.in_features, here, must=trial.dtype is None):
                return reason
    return ""


def family_of(act: Function, dtype: torch.dtype) -> Activation | None:
    """The activation of the ReLU family, without a second ReLU, that ``act`` is in float64 and in ``dtype``; or None.

    Its values and gradients are compared at 0 and infinity, too, and at NaN, except for FATReLU, which code writes as
    ``x > threshold``. What runs is a copy of ``act``; None if there is no copy.
    """
    of = getattr(act, "__self__", None)
    if isinstance(of, type) and (named := _COMPILED.get(f"{of.__module__}.{of.__qualname__}")):
        return Activation(named)
    with _apart():
        try:
            act = copy.deepcopy(act)
        except Exception:
            return None
        for module in act.modules() if isinstance(act, nn.Module) else ():
            _strip(module)
        known = [Activation("relu"), Activation("relu2")]
        if level := _level(act):
            known.append(Activation("fatrelu", level))
        return next((kind for kind in known if _is(act, kind, dtype)), None)


def is_relu_but_at_zero(act: Function) -> bool:
    """Whether ``act`` has the values of ReLU and another gradient at 0, as a clamp has."""
    try:
        with _apart(), torch.enable_grad():
            x = _every_size(torch.float64, 0.0)
            x = x[x.isfinite()].requires_grad_()
            y = copy.deepcopy(act)(x.clone())
            (grad,) = torch.autograd.grad(y, x, torch.ones_like(x))
    except Exception:
        return False
    return torch.equal(y, F.relu(x)) and torch.equal(grad != (x > 0), x == 0)


def _level(act: Function) -> float:
    """The largest positive number in float64 at which ``act`` is zero, by bisection; 0 if it is not such a function."""

    def silent(x: float) -> bool:
        return not bool(act(torch.tensor([x], dtype=torch.float64, device="cpu")).any())

    try:
        with torch.no_grad():
            low, high = 0.0, float(torch.finfo(torch.float16).max)
            if not silent(low) or not silent(torch.finfo(torch.float64).tiny) or silent(high):
                return 0.0
            while low < (middle := (low + high) / 2) < high:
                low, high = (middle, high) if silent(middle) else (low, middle)
            return low
    except Exception:
        return 0.0


def _is(act: Function, kind: Activation, dtype: torch.dtype) -> bool:
    """Whether ``act`` is an activation and has its gradient, in float64 and in ``dtype``."""
    of_gate = formula_of(kind).of_gate
    precisions = dict.fromkeys((torch.float64, torch.float32, dtype) if kind.threshold else (torch.float64, dtype))
    flat = {precision: _every_size(precision, kind.threshold) for precision in precisions}
    # code may branch on the number of dimensions
    cases = [
        (x, training, grad) for x, training, grad in itertools.product(flat.values(), (True, False), (True, False))
    ]
    for lead, training in itertools.product(_LEADS, (True, False)):
        count = math.prod(lead)
        x = flat[dtype]
        cases.append((x[: len(x) // count * count].view(*lead, -1), training, True))
    for given, training, grad in cases:
        x = given.clone().requires_grad_(grad)
        # powers of two, whose products are exact
        dy = torch.ones_like(x).flatten().cumsum(0).remainder(5).exp2().view(x.shape)
        try:
            if isinstance(act, nn.Module):
                act.train(training)
            with torch.set_grad_enabled(grad):
                # a copy: act may work in place
                y, expected = act(x.clone()), of_gate(x)
                pairs = [(y, expected)]
                if grad:
                    pairs.append((torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(expected, x, dy)[0]))
        except Exception:
            return False
        if not all(_same(*pair) for pair in pairs):
            return False
    return True


def _same(ours: Any, theirs: Tensor) -> bool:
    if not isinstance(ours, Tensor) or ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all())


def _every_size(dtype: torch.dtype, threshold: float) -> Tensor:
    """All values of a 16-bit dtype; of a wider one powers of the square root of two, a grid to 16, infinity, 0 and NaN.

    With a threshold no NaN, no value of 16 bits next to it, and in the wider ones itself and the next number, which
    tell > from >=.
    """
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
def _apart() -> Iterator[None]:
    """Leave the caller's device, autocast and inference mode, and keep all random numbers as they are."""
    numpy: Any = sys.modules.get("numpy.random")
    states = random.getstate(), numpy and numpy.get_state()
    try:
        with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.device("cpu"):
            with torch.random.fork_rng(devices=[]):
                yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.set_state(states[1])


def _further_inputs(module: nn.Module) -> str:
    """The parameters of a module's forward after the first."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if parameters and parameters[0].kind in (parameters[0].POSITIONAL_ONLY, parameters[0].POSITIONAL_OR_KEYWORD):
        parameters = parameters[1:]
    return ", ".join(parameter.name for parameter in parameters)


# Copies, and what they are compared with


def _draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def _small(module: nn.Module, form: Form, neurons: int, model: nn.Module) -> nn.Module:
    """A copy of ``module`` with other tensors, random ones for parameters, and its projections with few ``neurons``."""
    generator = torch.Generator().manual_seed(0)
    # deepcopy takes what is in its memo for a copy; the rest of the model is none of the module's business
    memo: dict[int, Any] = {
        id(t): torch.empty(0, device="cpu") for t in itertools.chain(model.parameters(), model.buffers())
    }
    for owner in module.modules():
        for key, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None:
                memo[id(tensor)] = _stand_in(generator, tensor, key in owner._parameters, tuple(tensor.shape))
    linears: dict[str, Any] = {child: module.get_submodule(child) for child in form.children}
    k = linears[form.children[0]].in_features
    sizes = dict.fromkeys(form.inputs, (neurons * (2 if form.fused else 1), k)) | {form.down: (k, neurons)}
    for child, linear in linears.items():
        memo[id(linear.weight)] = _stand_in(generator, linear.weight, True, sizes[child])
        if linear.bias is not None:
            memo[id(linear.bias)] = _stand_in(generator, linear.bias, True, sizes[child][:1])
    try:
        made = copy.deepcopy(module, memo)
        for inner in made.modules():
            _strip(inner)
        for inner in made.children():
            if type(inner) is nn.Dropout:
                # see ``drops_hidden``
                inner.p = 0.0
        for child in linears:
            small: Any = made.get_submodule(child)
            small.out_features, small.in_features = sizes[child]
    except Exception as error:
        raise CannotCopyError(_first_line(error)) from error
    if held := _held(made, {id(inner): name for name, inner in model.named_modules()}):
        raise CannotCopyError(f"it still refers to {held} of the model, as the closure of a function does")
    return made


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _stand_in(generator: torch.Generator, tensor: Tensor, is_parameter: bool, shape: tuple[int, ...]) -> Tensor:
    """A tensor on the CPU in place of one of a module: random where it is a parameter or has no values."""
    if not tensor.is_floating_point():
        return torch.zeros(shape, dtype=tensor.dtype, device="cpu") if tensor.is_meta else tensor.detach().cpu().clone()
    if is_parameter or tensor.is_meta:
        value = _draw(generator, *shape) / (shape[-1] ** 0.5 if len(shape) > 1 else 1)
        return nn.Parameter(value) if is_parameter else value
    return tensor.detach().to("cpu", torch.float64, copy=True)


def _strip(module: nn.Module) -> None:
    """Take hooks of all kinds from a copy: they are the user's functions."""
    for key in HOOKS:
        vars(module)[key] = type(vars(module)[key])()
    vars(module)["_compiled_call_impl"] = None
    if "_hf_hook" in vars(module):
        for key in ("_hf_hook", "_old_forward", "forward"):
            vars(module).pop(key, None)


def _held(made: nn.Module, originals: dict[int, str]) -> str:
    """The name of a module among ``originals`` that something in a copy refers to; "" if there is none."""
    todo: list[Any] = [made]
    seen: set[int] = set()
    while todo:
        thing = todo.pop()
        if id(thing) in originals:
            return originals[id(thing)] or type(thing).__name__
        if id(thing) in seen or isinstance(thing, (type, types.ModuleType, Tensor)):
            continue
        seen.add(id(thing))
        if isinstance(thing, types.FunctionType):
            # not its globals, which may well have the model
            todo += [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, vars(thing)]
        elif isinstance(thing, weakref.ref):
            todo.append(thing())
        else:
            todo += gc.get_referents(thing)
    return ""


def _attributes(module: nn.Module) -> dict[str, list[Any]]:
    """What the attributes of a module and of those within it hold, by name."""
    machinery = vars(nn.Module()).keys()
    return {
        f"{name}.{key}".removeprefix("."): tree_leaves(value)
        for name, inner in module.named_modules()
        for key, value in vars(inner).items()
        if key not in machinery
    }


def _run(
    module: Any, leaves: dict[str, Tensor], x: Tensor, trial: _Trial, recorder: Any = _UNRECORDED
) -> dict[str, Any]:
    """The outputs of a module or function, and the gradients of x and of the weights ``leaves``."""
    given, wanted = x.clone(), {"x": x.clone().requires_grad_(trial.grad), **leaves}
    for leaf in leaves.values():
        leaf.requires_grad_(trial.grad and leaf.is_floating_point())
    # torch.manual_seed would seed the generators of GPUs, too
    torch.default_generator.manual_seed(0)
    random.seed(0)
    # a view, since in-place work on a leaf would raise
    with torch.set_grad_enabled(trial.grad), torch.autocast("cpu", torch.bfloat16, enabled=trial.autocast):
        own = wanted["x"].view(x.shape)
        with recorder:
            y = module(own)
    outputs = [leaf for leaf in tree_leaves(y) if isinstance(leaf, Tensor)]
    results: dict[str, Any] = {"y": y if isinstance(y, Tensor) else None}
    results |= {f"output {i}": leaf for i, leaf in enumerate(outputs)} if results["y"] is None else {}
    if not torch.equal(wanted["x"].detach(), given):
        results["x"] = wanted["x"]
    roots = [leaf for leaf in outputs if leaf.requires_grad]
    if trial.grad and roots:
        generator = torch.Generator().manual_seed(2)
        ups = [_draw(generator, *root.shape).to(root.dtype) for root in roots]
        inputs = {name: leaf for name, leaf in wanted.items() if leaf.requires_grad}
        with recorder:
            grads = torch.autograd.grad(roots, list(inputs.values()), ups, allow_unused=True)
        results |= {f"the gradient of {name}": grad for name, grad in zip(inputs, grads)}
    return results


def _try(stock: Any, form: Form, formula: Formula, trial: _Trial, allowed: frozenset[Any] | None) -> str:
    """Describe how a copy differs from the formula in one trial; "" if it does not.

    allowed: the operators that it may run besides those of linear layers; None for any.
    """
    assert trial.dtype is not None
    stock.train(trial.training)
    leaves = dict(stock.named_parameters())
    x = _input(trial.dtype, trial, stock.get_submodule(form.children[0]).in_features)
    before, versions, own = _attributes(stock), [p._version for p in leaves.values()], _Operators()
    try:
        ours = _run(stock, leaves, x, trial, own)
    except Exception as error:
        # a module that raises for other dimensions than three, or other dtypes, is never called with them
        must = trial.lead in _USUAL and not trial.mixed
        return f"its forward raised {type(error).__name__}: {error}" if must else ""
    if ours["y"] is None:
        return "its forward returns something else than one tensor, as a tuple"
    names = {name for name, _ in own.seen}
    if trial.training and names & _DROPS:
        return "it drops values in training; set the dropout of its configuration to 0"
    if versions != [p._version for p in leaves.values()]:
        return "it changes its weights"
    if changed := _changed(before, _attributes(stock)):
        return f"its forward sets self.{changed}, which a sparse layer would not"
    if "x" in ours:
        return "it changes x in place"
    theirs = _run(functools.partial(_formula, stock, form, formula), leaves, x, trial)
    for what, expected in theirs.items():
        if not _close(ours.get(what), expected, trial.precision):
            return f"{what} differs for {trial}"
    if allowed is None:
        return ""
    casting = trial.autocast or trial.mixed
    seen = {operator for operator in own.seen - allowed if not (casting and operator[0] == _CAST)}
    odd = {name for name, numbers in seen if not _is_linear(name, numbers) and not (form.fused and name == _SPLIT)}
    return f"it runs {', '.join(sorted(odd))}" if odd else ""


def _changed(before: dict[str, list[Any]], after: dict[str, list[Any]]) -> str:
    """The first attribute that is not what it was; "" if there is none."""
    for name in before.keys() | after.keys():
        was, now = before.get(name), after.get(name)
        if was is None or now is None or len(was) != len(now):
            return name
        equal = (
            a is b or (type(a) is type(b) and isinstance(a, (int, float, str)) and a == b) for a, b in zip(was, now)
        )
        if not all(equal):
            return name
    return ""


def _try_pair(stock: Any, paired: Any, width: int, trial: _Trial, must: bool) -> str:
    """Describe how two copies of a block differ, of which one has a pair, in one trial; "" if they do not.

    must: whether the block has to run in this way.
    """
    assert trial.dtype is not None
    found = []
    for block in (stock, paired):
        block.train(trial.training)
        leaves = dict(block.named_parameters())
        x = _input(trial.dtype, trial, width)
        try:
            results = _run(block, leaves, x, trial)
        except Exception as error:
            text = _first_line(error)
            if block is paired:
                return f"its forward must pass what its first projection returns to the other alone ({text})"
            return f"it cannot run on x alone ({text})" if must else ""
        kept = {
            f"self.{name}, place {place}": value
            for name, values in _attributes(block).items()
            for place, value in enumerate(values)
            if isinstance(value, Tensor)
        }
        buffers = {f"the buffer {name}": value for name, value in block.named_buffers()}
        found.append({**results, **kept, **buffers})
    if not any(isinstance(found[0].get(name), Tensor) for name in ("y", "output 0")):
        return "it returns no tensor"
    for name in found[0].keys() | found[1].keys():
        ours, theirs = (each.get(name) for each in found)
        if ours is not theirs and (theirs is None or not _close(ours, theirs, trial.precision)):
            return f"its forward must use what its first projection returns for the other: {name} differs, {trial}"
    return ""


def _is_linear(name: str, numbers: tuple[Any, ...]) -> bool:
    """Whether an operator, with the numbers among its arguments, can only be part of sums and products of tensors."""
    return name in _VIEWS or (name in _LINEAR and not numbers) or name.startswith("profiler::")


def _input(dtype: torch.dtype, trial: _Trial, k: int) -> Tensor:
    """x of a trial."""
    largest = torch.finfo(dtype).max
    x = _draw(torch.Generator().manual_seed(1), *trial.lead, k)
    if trial.size:
        x = (x * largest**trial.size).clamp(-largest, largest)
    else:
        # biases show where x is 0
        scales = torch.tensor([1.0, 0.0, 0.1, 10.0], dtype=torch.float64, device="cpu")
        x *= scales.repeat(x.numel() // k)[: x.numel() // k].view(*trial.lead, 1)
    return x.to(dtype).to(trial.x_dtype or dtype)


def _formula(module: Any, form: Form, formula: Formula, x: Tensor) -> Tensor:
    def project(child: str, value: Tensor) -> Tensor:
        linear = module.get_submodule(child)
        bias = None if linear.bias is None else linear.bias.to(value.dtype)
        return F.linear(value, linear.weight.to(value.dtype), bias)

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
