"""What a module's Python code reads besides x and its projections, and the branches that no run of it decides.

While a module runs, all Python code that is not torch's is recorded: its other inputs may change later, and its source
shows branches that the runs do not decide. Code that is neither Python nor torch's is refused, since its source cannot
be read.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import functools
import gc
import inspect
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Attributes of modules that hold the hooks of calls.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# Attributes of an nn.Linear that its replacement keeps.
KEPT = frozenset({"weight", "bias", "in_features", "out_features"})

# The leading dimensions of x that runs of a module have.
LEADS = ((), (9,), (2, 4), (2, 1, 3), (1, 2, 1, 2), (1, 1, 2, 1, 2))

# Attributes of every module.
_MACHINERY = frozenset(dir(nn.Module()))

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

# The standard library, with its backport that torch calls.
_STANDARD = sys.stdlib_module_names | {"typing_extensions"}

_ENTER_AUTOCAST = torch.autocast.__enter__.__code__


def of_torch(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).split(".")[0] == "torch"


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


class State:
    """A record of the code that runs while a module is tried.

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
        if event == "call" and frame.f_code is _ENTER_AUTOCAST and frame.f_back is not None:
            # the trials themselves enter it, too
            if not _is_of_trials(frame.f_back):
                self.opaque.add("its forward enters an autocast of its own, which may be of another device")
        elif event == "call" and _is_own(frame):
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


def _is_of_trials(frame: types.FrameType) -> bool:
    return frame.f_globals.get("__package__") == __package__


def _is_own(frame: types.FrameType | None) -> bool:
    """Whether a frame of a trial runs the candidate's code, not torch's or the standard library's on torch's behalf."""
    own = False
    while frame is not None and not _is_of_trials(frame):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return False
        package = str(frame.f_globals.get("__name__")).split(".")[0]
        if package == "torch" and not own:
            return False
        own = own or not (package in _STANDARD or package.startswith("namedtuple_"))
        frame = frame.f_back
    return own


def _is_known(function: Any) -> bool:
    """Whether a C function is torch's, and so recorded, or harmless."""
    owner = getattr(function, "__self__", None)
    if of_torch(function) or isinstance(owner, Tensor) or of_torch(type(owner)) or of_torch(owner):
        return True
    return function in _HARMLESS or function.__module__ == "math"


@contextlib.contextmanager
def watch(modules: list[nn.Module]) -> Iterator[State]:
    """Record the attributes that code reads and sets on ``modules``."""
    state = State(modules)
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


def _watched(kind: Any, state: State) -> type:
    # settings of torch's own activations, such as inplace; and what a subclass of nn.Linear shares with it, for it can
    # only be one of the projections, whose tensors the trials set
    settings = set(KEPT) if issubclass(kind, nn.Linear) else set()
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


def is_constant(name: str, value: Any, sizes: tuple[float, ...], modules: Iterable[nn.Module]) -> bool:
    """Whether a value that code reads counts as constant: a size, a dropout of 0, a function, a watched module, ...

    modules: those whose attributes are recorded when they are read.
    """
    if isinstance(value, nn.Module):
        seen = any(value is module for module in modules)
        return seen or (all(of_torch(type(m)) for m in value.modules()) and not [*value.parameters(), *value.buffers()])
    if isinstance(value, types.MethodType):
        return is_constant(name, value.__self__, sizes, modules)
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        return all(is_constant(name, part, sizes, modules) for part in parts)
    if isinstance(value, (torch.jit.ScriptFunction, Tensor)):
        return False
    if value is None or isinstance(value, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)):
        return True
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return of_torch(type(value)) or (isinstance(value, str) and value == "relu")
    return value in sizes or (value == 0 and (name == "p" or "drop" in name))


def uncovered_input(
    modules: Iterable[nn.Module], state: State, sizes: tuple[float, ...], by_value: frozenset[int] = frozenset()
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
        if not is_constant(name, value, sizes, modules):
            return f"its forward reads self.{name} ({_short(value)}), which can be set to something else"
    within = {id(code) for ran in state.ran.values() for code in _codes(ran.code) if code is not ran.code}
    for ran in state.ran.values():
        if id(ran.code) in within:
            # its free variables are local to code that ran, too
            continue
        for name, value in [*ran.free, *_named(ran)]:
            if isinstance(value, type) and not _is_readable(value):
                return f"{ran.name} uses {name}, which is neither Python nor torch's"
            if not is_constant(name, value, sizes, modules):
                return f"{ran.name} reads {name} ({_short(value)}), which can be set to something else"
        for reason in (_written(ran), _open_name(ran), _open_branch(ran, id(ran.code) in by_value)):
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


# Instructions that leave something behind, and what they change.
_LEAVING = {
    "STORE_ATTR": "the attribute ",
    "DELETE_ATTR": "the attribute ",
    "STORE_GLOBAL": "the global variable ",
    "DELETE_GLOBAL": "the global variable ",
    "STORE_SUBSCR": "an item",
    "DELETE_SUBSCR": "an item",
}


def _written(ran: _Ran) -> str:
    """Describe what code leaves behind but its result, such as values for a loss; "" if nothing."""
    for code in _codes(ran.code):
        for instruction in dis.get_instructions(code):
            name = str(instruction.argval)
            if instruction.opname in _LEAVING:
                what = f"{_LEAVING[instruction.opname]}{'' if instruction.argval is None else name}"
                return f"sets {what}, which a sparse layer would not"
            if instruction.opname == "STORE_DEREF" and name in ran.code.co_freevars:
                return f"sets the variable {name} of another function, which a sparse layer would not"
    return ""


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
    if not decides(ran.code):
        return ""
    tree = tree_of(ran.code)
    if tree is None:
        return "has branches, and its source cannot be read"
    function = tree.body[0]
    for statement in function.body if isinstance(function, ast.FunctionDef) else tree.body:
        for condition in _conditions(statement):
            decided = _is_decided(condition, ran.modules) and not _asks_for_more_dimensions(condition)
            if not (by_value and _is_of_values(condition, ran)) and not decided:
                return f"branches on {ast.unparse(condition).splitlines()[0]}, of which a run shows only one side"
    return ""


def decides(code: types.CodeType) -> bool:
    """Whether code, or code within it, has anything for ``_conditions``: only then its source is needed."""
    for part in _codes(code):
        if "getattr" in part.co_names:
            return True
        for instruction in dis.get_instructions(part):
            subscript = instruction.opname == "BINARY_OP" and instruction.argrepr == "[]"
            if subscript or any(choosing in instruction.opname for choosing in _CHOOSING):
                return True
    return False


def tree_of(function: Any) -> ast.Module | None:
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


def _asks_for_more_dimensions(condition: ast.AST) -> bool:
    """Whether this compares the dimensions of a tensor with more than the trials have."""
    nodes = list(ast.walk(condition))
    if not any(isinstance(node, ast.Attribute) and node.attr in ("dim", "ndim") for node in nodes):
        return False
    numbers = (node.value for node in nodes if isinstance(node, ast.Constant))
    return any(isinstance(number, (int, float)) and number > len(LEADS[-1]) for number in numbers)


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
