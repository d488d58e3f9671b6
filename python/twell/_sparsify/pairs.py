"""Whether a block uses two linear layers as a pair, ``fc2(activation(fc1(x)))``: from its source and a run on meta."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from twell._sparsify.equivalence import Function, mode, outside_of_modes
from twell._sparsify.other_inputs import HOOKS, KEPT, of_torch, tree_of

# Attributes that give access to children and state by other means than their names.
_LISTINGS = frozenset(
    {"children", "named_children", "modules", "named_modules", "get_submodule", "parameters", "named_parameters"}
    | {"_modules", "_parameters", "__dict__", "__getattr__", "__getattribute__"}
)

# Statements that run others again, and functions that read local variables by other means than their names.
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_READERS = frozenset({"locals", "vars", "eval", "exec", "_getframe", "currentframe"})


def read_pair(module: nn.Module, pair: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """(attributes between the two in ``fc2(activation(fc1(x)))`` of a module's own forward, ""), or ((), reason).

    pair: the names of ``fc1`` and ``fc2`` in the module. Returned are those of the activation and, behind it, of a
    dropout of nothing or of its p.

    The calls must be in one expression or in consecutive statements: code between them, other uses of their results
    and other methods that call them would get other values than before.
    """
    forward = inspect.unwrap(type(module).forward)
    tree = tree_of(forward)
    if tree is None:
        return (), "the source of its forward cannot be read"
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    calls: dict[str, ast.Call] = {}
    fc1, fc2 = pair
    for name in pair:
        uses = [node for node in ast.walk(tree) if _is_self(node, name)]
        # reading fc1.weight and the like still works
        uses = [node for node in uses if getattr(parents[node], "attr", None) not in KEPT]
        called = [node for node in map(parents.get, uses) if isinstance(node, ast.Call) and node.func in uses]
        if len(uses) != 1 or len(called) != 1 or len(called[0].args) != 1 or called[0].keywords:
            return (), f"its forward must call self.{name} once, on one argument, and use it nowhere else"
        calls[name] = called[0]

    consumed: dict[ast.Name, ast.stmt] = {}
    argument, at = _source_of(calls[fc2], calls[fc2].args[0], parents, consumed)
    kept, dropout = _kept_whole(module, argument)
    if kept is not None:
        argument, at = _source_of(at, kept, parents, consumed)
    act = argument.func if isinstance(argument, ast.Call) and len(argument.args) == 1 else None
    if not isinstance(argument, ast.Call) or not isinstance(act, ast.Attribute) or not _is_self(act, act.attr):
        return (), f"its forward must call self.{fc2} right on the result of an activation, an attribute of self"
    if _source_of(at, argument.args[0], parents, consumed)[0] is not calls[fc1]:
        return (), f"its forward must call self.{act.attr} right on the result of self.{fc1}"
    if argument.keywords or len([node for node in ast.walk(tree) if _is_self(node, act.attr)]) != 1:
        return (), f"its forward must call self.{act.attr} once, on one argument, and use it nowhere else"
    if act.attr not in module._modules and act.attr not in vars(module):
        return (), f"self.{act.attr} must be an attribute of the instance, got one of its class"
    names = (*pair, act.attr)
    if reason := _other_uses(type(module), tree, parents, names) or _uses_of_instance(module, names):
        return (), reason

    hidden = {node.id for node in consumed}
    if reason := _shared_locals(tree, forward.__code__, hidden):
        return (), reason
    # after fc2 has returned, the name may get another value, which may be used
    final = _statement(calls[fc2], parents)
    renewed = _target(final)
    again = set().union(*(ast.walk(loop) for loop in _around(final, parents) if isinstance(loop, _LOOPS)))
    for name in hidden:
        begin = min(_place(made) for node, made in consumed.items() if node.id == name)
        for node in _reads(tree, name):
            if node in consumed:
                continue
            at = _statement(node, parents)
            before = _place(at) <= begin and (node not in again or renewed == name)
            if not before and not (_place(at) > _place(final) and renewed == name):
                return (), f"its forward must use {name} for self.{fc2} alone"
    return (act.attr, *dropout), ""


def _shared_locals(tree: ast.AST, code: types.CodeType, names: Iterable[str]) -> str:
    """Describe how a forward may read these local variables where its source does not show it; "" if it does not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id != "self":
            used = node.attr
        else:
            used = node.id if isinstance(node, ast.Name) else ""
        if used in _READERS:
            return f"its forward must read local variables by their names alone, got {used}"
    for name in sorted(names):
        if name in code.co_cellvars or name not in code.co_varnames:
            return f"its forward must keep {name} to itself, got a function within it or a global that has it, too"
    return ""


def _uses_of_instance(module: nn.Module, layers: tuple[str, ...]) -> str:
    """Describe a use of a pair's layers by functions that are attributes of the instance; "" if there is none."""
    # hooks and the like do not belong to the forward
    machinery = vars(nn.Module())
    for name, value in vars(module).items():
        if name not in machinery and (used := set(layers) & _used_by(value)):
            return f"its {name} must use {min(used)}, which forward calls, for its parameters alone"
    return ""


def _used_by(value: Any, depth: int = 5) -> set[str]:
    """The attributes and strings that a function uses, or those in a container, as ``_used``."""
    inner: Iterable[Any] = ()
    if isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, (list, tuple)):
        inner = value
    elif isinstance(value, types.MethodType):
        inner = [value.__func__]
    elif isinstance(value, types.FunctionType):
        return set().union(*map(_used, _wrapped(value)))
    return set().union(*(_used_by(item, depth - 1) for item in inner if depth))


def _reads(tree: ast.AST, name: str) -> Iterator[ast.Name]:
    """Where a variable is read, which ``name += 1`` does, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            yield node
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            yield node.target


def _kept_whole(module: nn.Module, node: ast.expr) -> tuple[ast.expr | None, list[str]]:
    """What an expression drops values of, if it is a dropout whose p is an attribute of self and 0, and its name."""
    if not isinstance(node, ast.Call) or not node.args:
        return None, []
    called = ast.unparse(node.func)
    p: Any = next((keyword.value for keyword in node.keywords if keyword.arg == "p"), (*node.args, None)[1])
    if called in ("nn.functional.dropout", "F.dropout", "torch.nn.functional.dropout"):
        name = p.attr if isinstance(p, ast.Attribute) and _is_self(p, p.attr) else ""
        kept = bool(name) and getattr(module, name, None) == 0
    else:
        name = called.removeprefix("self.")
        layer = getattr(module, name, None) if called.startswith("self.") else None
        kept = len(node.args) == 1 and type(layer) is nn.Dropout and layer.p == 0
    return (node.args[0], [name]) if kept else (None, [])


def read_split(block: nn.Module, children: tuple[str, str], layer: str) -> str:
    """Describe what keeps two children, as ``intermediate`` and ``output`` of BERT, from being a pair; "" if nothing.

    Each has a linear layer of the name ``layer``. The block must call both once. The second must hand its first
    argument to that layer and use neither again; what the first one computes, and the order of calls, is left to runs.
    """
    for child in children:
        kind: Any = type(block.get_submodule(child))
        if not isinstance(kind.forward, types.FunctionType) or (tree := tree_of(kind.forward)) is None:
            return f"the source of the forward of its {child} cannot be read"
        parents = {inner: node for node in ast.walk(tree) for inner in ast.iter_child_nodes(node)}
        if reason := _other_uses(kind, tree, parents, (layer, layer)) or _uses_of_instance(
            block.get_submodule(child), (layer,)
        ):
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
            if reason := _shared_locals(tree, inspect.unwrap(kind.forward).__code__, [given]):
                return f"{child}: {reason}"
            if any(isinstance(outer, _LOOPS) for outer in _around(called[0], parents)):
                return f"the forward of its {child} must call self.{layer} once, got a loop"
            renewed = _target(_statement(called[0], parents)) == given
            others = [node for node in names if node is not argument and isinstance(node.ctx, ast.Load)]
            late = all(_place(node) > _place(called[0]) for node in others)
            if argument not in names or (others and not (renewed and late)):
                return f"the forward of its {child} must use {given} for self.{layer} alone"
    found = dict.fromkeys(children, 0)
    for name, function in _functions(type(block)):
        if name == "__init__":
            continue
        if (tree := tree_of(function.__code__)) is None:
            return f"the source of its {name} cannot be read"
        for child in children:
            found[child] += sum(_is_self(node, child) for node in ast.walk(tree))
    odd = [child for child, uses_of in found.items() if uses_of != 1]
    return f"its class must use self.{odd[0]} once" if odd else _uses_of_instance(block, children)


def calls_parts(owner: nn.Module, child: str) -> str:
    """Describe a call of single layers of an ``nn.Sequential``, a child, by its owner's class; "" if none is seen.

    A loop that passes each result to the next layer, and does nothing else, is fine.
    """
    for name, function in _functions(type(owner)):
        tree = tree_of(function.__code__) if name != "__init__" else None
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Subscript) and getattr(node.value, "attr", None) == child:
                parts, taken = {ast.unparse(node)}, ast.unparse(node)
            elif isinstance(node, (ast.For, ast.comprehension)) and any(
                getattr(part, "attr", None) == child for part in ast.walk(node.iter)
            ):
                taken = ast.unparse(node.iter)
                parts = {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
                if isinstance(node, ast.For) and _passes_along(node):
                    continue
            else:
                continue
            if any(isinstance(call, ast.Call) and ast.unparse(call.func) in parts for call in ast.walk(tree)):  # type: ignore[arg-type]
                return f"{name} calls what it takes from {taken}"
    return ""


def _passes_along(loop: ast.For) -> bool:
    """Whether a loop over layers only does ``x = layer(x)``."""
    layer = ast.unparse(loop.target)
    return len(loop.body) == 1 and bool(re.fullmatch(rf"(\w+) = {re.escape(layer)}\(\1\)", ast.unparse(loop.body[0])))


def _functions(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    """The functions of a class and of its bases that are not torch's, by name; properties are read by one."""
    for base in kind.__mro__:
        if of_torch(base) or base is object:
            continue
        for name, value in vars(base).items():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                yield name, function


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
    tree, code = tree_of(function.__code__), function.__code__
    if tree is None:
        return {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
    inside = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in KEPT}
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


def _around(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while node := parents.get(node):  # type: ignore[assignment]
        yield node


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
    user: ast.AST, argument: ast.expr, parents: dict[ast.AST, ast.AST], consumed: dict[ast.Name, ast.stmt]
) -> tuple[ast.expr, ast.AST]:
    """The expression that gives ``argument`` of ``user`` its value, and its node: ``user`` or the statement before.

    consumed: gets a variable that is read, with the statement that sets it.
    """
    if not isinstance(argument, ast.Name):
        return argument, user
    statement = _statement(user, parents)
    for _, block in ast.iter_fields(parents[statement]):
        if isinstance(block, list) and statement in block and (index := block.index(statement)):
            before = block[index - 1]
            if _target(before) == argument.id and before.value is not None:
                consumed[argument] = before
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
            with outside_of_modes(), mode(module.modules(), training), _unhooked(module), flow:
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
