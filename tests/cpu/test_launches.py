"""A kernel that starts before its predecessor has ended waits before it reads anything.

A kernel launched by ``launch.start``, or with ``use_pdl``, may run while its predecessor does.
``griddepcontrol.wait`` returns when the predecessor has ended and its writes are visible. Every kernel waits,
unconditionally, before it touches global memory, and lets its successor start only after that; or at once, by
``launch.start_next_early``, since it does not end before its wait. So all earlier kernels have ended, too, when a
kernel passes its wait. Threads for which ``self.waits`` is false do not wait, in a kernel where others do.

What a kernel does in ``start`` comes before: it may read what only kernels before its predecessor can have written, as
weights are behind a kernel of the same program. They have ended, because the predecessor has passed its own wait.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "cute_kernels"
WAIT, TRIGGER = "griddepcontrol_wait", "griddepcontrol_launch_dependents"
WAITS_IF = "(o.early == 0) | (warp < WARPS) | (warp >= self.sender)"


def attributes(node: ast.AST) -> set[str]:
    return {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def launched_early(tree: ast.AST) -> set[str]:
    """Return the names of kernels that a module launches by ``launch.start`` or with ``use_pdl``."""
    names, bound = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            bound |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            starts, has_pdl = ast.unparse(node.func) == "launch.start", any(k.arg == "use_pdl" for k in node.keywords)
            if starts or (node.func.attr == "launch" and has_pdl):
                kernel = node.args[0] if starts else node.func.value
                kernel = bound[kernel.id] if isinstance(kernel, ast.Name) else kernel
                assert isinstance(kernel, ast.Call)
                assert isinstance(kernel.func, ast.Attribute)
                names.add(kernel.func.attr)
    return names


def violations(source: str) -> list[str]:
    # one call for both
    tree, found = ast.parse(source.replace("launch.wait()", f"launch.{WAIT}(); launch.{TRIGGER}()")), []
    early = launched_early(tree)
    for kernel in functions(tree):
        decorated = any("kernel" in attributes(decorator) for decorator in kernel.decorator_list)
        if not decorated:
            if {WAIT, TRIGGER} & attributes(kernel):
                found.append(f"{kernel.name}: only kernels themselves wait and let go")
            continue
        if kernel.name not in early:
            if WAIT in attributes(kernel):
                found.append(f"{kernel.name}: waits, but is not launched with use_pdl")
            continue
        found += unordered(kernel, named_tuples(tree) | imported_tuples(tree))
    return found


def named_tuples(tree: ast.AST) -> set[str]:
    """Return the classes that hold tensors by name: all named tuples but those of integers."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any("NamedTuple" in names(base) for base in node.bases)
        and any(names(field.annotation) != {"Int32"} for field in node.body if isinstance(field, ast.AnnAssign))
    }


def imported_tuples(tree: ast.AST) -> set[str]:
    """Return the classes that a module imports from other kernels and that hold tensors by name."""
    imported = {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level for alias in node.names
    }
    return imported & TUPLES


def unordered(kernel: ast.FunctionDef, tuples: set[str]) -> Iterator[str]:
    body = [
        statement.body[0] if isinstance(statement, ast.If) and ast.unparse(statement.test) == WAITS_IF else statement
        for statement in kernel.body
    ]
    steps = [
        statement.value.func.attr
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Attribute)
        else ""
        for statement in body
    ]
    if steps.count(WAIT) != 1:
        yield f"{kernel.name}: must wait once, unconditionally"
        return
    wait = steps.index(WAIT)
    if any(TRIGGER in attributes(statement) for statement in kernel.body[:wait]):
        yield f"{kernel.name}: lets the next launch go before it waits"
    tensors = {
        argument.arg
        for argument in kernel.args.args
        if argument.annotation is None
        or "Tensor" in attributes(argument.annotation) | names(argument.annotation)
        or names(argument.annotation) & tuples
    } - {"self"}
    for statement in kernel.body[:wait]:
        for name in touched(statement, tensors):
            yield f"{kernel.name}: touches {name} before it waits"


def names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def touched(statement: ast.stmt, tensors: set[str]) -> set[str]:
    """Return the tensors of which a statement takes more than the shape, new names of tensors included.

    What a kernel takes by the name of a tuple counts as its tensors do, unless TMA descriptors are fetched ahead, or by
    ``start``.
    """
    found = set()
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Tuple):
        # names put side by side
        if all(isinstance(element, ast.Name) for element in statement.value.elts):
            tensors |= {t.id for t in statement.targets if isinstance(t, ast.Name)}
            return found
    parents = {child: node for node in ast.walk(statement) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and node.id in tensors:
            taken, outer = "", parents.get(node)
            while isinstance(outer, ast.Attribute):
                taken, outer = outer.attr, parents.get(outer)
            prefetch = isinstance(outer, ast.Call) and {"prefetch_descriptor", "start"} & attributes(outer.func)
            if taken != "shape" and not prefetch:
                found.add(node.id)
    return found


TUPLES = {name for path in KERNELS.rglob("*.py") for name in named_tuples(ast.parse(path.read_text()))}
# all but the calls themselves
FILES = sorted(
    path
    for path in KERNELS.rglob("*.py")
    if re.search(r"griddepcontrol|launch\.wait\(\)", path.read_text()) and path.parent.name != "common"
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_kernel_waits_before_it_reads_and_before_the_next_one_starts(path: Path) -> None:
    assert violations(path.read_text()) == []


def test_every_early_launch_is_looked_at() -> None:
    early = {path for path in KERNELS.rglob("*.py") if re.search(r"use_pdl=|launch\.start\(", path.read_text())}
    assert early - {KERNELS / "common/launch.py"} == set(FILES)
