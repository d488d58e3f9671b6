"""Markdown of operators, commands and public names: blocks of docs/ that ``profiling.readme`` fills from the code."""

import argparse
import functools
import importlib
import inspect
import re
import types
from collections.abc import Callable
from typing import Any

import twell

# Modules of docs/api.md, and the commands of docs/command-line.md.
MODULES = ("twell", "twell.nn", "twell.recipe", "twell.integrations.transformers", "twell.nn.distributed")
COMMANDS = ("demo", "info", "tune", "analyze")
# What functions return or make, and a base: the site has them.
RETURNED = {"Analysis", "Aux", "CompactionReport", "Firing", "Float8MLP", "LayerStats", "PackedTwell"}
RETURNED |= {"SparseFFN", "SparsityStats"}


def blocks() -> dict[str, Callable[[], str]]:
    """The function that makes each block, by the block's name."""
    made = {f"command {name}": functools.partial(command, name) for name in COMMANDS}
    return made | {f"names {name}": functools.partial(names, name) for name in MODULES} | {"operators": operators}


def operators() -> str:
    """A table of the operators, with the first sentence of the docstring of the file of each."""
    import twell.ops

    named: dict[str, list[str]] = {}
    for name in twell.ops.__all__:
        first = getattr(twell.ops, name).__doc__.partition("\n\n")[0]
        computed = re.split(r"(?<=\.)\s", first.partition(": ")[2])[0]
        named.setdefault(computed, []).append(f"`{name}`")
    rows = [f"| {', '.join(names)} | {said(computed)} |" for computed, names in named.items()]
    return "\n".join(["| operator | computes |", "|---|---|", *rows])


def command(name: str) -> str:
    """A command's description and its arguments, which ``--help`` explains."""
    from twell.commands import cli

    subparsers = (a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    parser: argparse.ArgumentParser = next(subparsers).choices[name]
    groups = (group._group_actions for group in parser._action_groups)
    shown = [a for actions in groups for a in actions if a.help is not argparse.SUPPRESS and a.dest != "help"]
    given = ", ".join(f"`{called(action)}`" for action in shown)
    return f"{escaped(' '.join((parser.description or '').split()))}\n\nArguments: {given}."


def called(action: argparse.Action) -> str:
    """An argument as it is written: its flags, and the name or choices of its value."""
    choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()
    value = action.metavar or choices
    value = value if isinstance(value, str) else " ".join(value)
    if not action.option_strings:
        return value if action.nargs not in ("*", "?") else f"[{value}]"
    if action.nargs == 0:
        value = ""
    elif action.nargs in ("+", "*"):
        value = f"{value} ..."
    return f"{', '.join(action.option_strings)} {value}".strip()


def escaped(text: str) -> str:
    return re.sub(r"([|*<])", r"\\\1", text)


def names(module: str) -> str:
    """A table of public functions and classes, with the first paragraph of each docstring."""
    found, rows, first = importlib.import_module(module), list[str](), dict[str, str]()
    for name in public(found):
        thing = getattr(found, name)
        text = inspect.getdoc(thing) if callable(thing) else None
        if not text or name in RETURNED or (module != "twell" and thing is getattr(twell, name, None)):
            continue
        given = arguments(thing)
        # classes of one base share their arguments
        same = first.setdefault(given, name) if inspect.isclass(thing) else name
        rows.append(f"| `{name}{given if same == name else f'(as {same})'}` | {said(text)} |")
    return "\n".join(["| name | |", "|---|---|", *rows])


def arguments(thing: Any) -> str:
    """The parameters of a function or class with their defaults, without types; "" for one that shows none."""
    try:
        signature = inspect.signature(thing)
    except ValueError:
        return ""
    # "**gone" are options that raise
    plain = [each.replace(annotation=each.empty) for each in signature.parameters.values() if each.name != "gone"]
    text = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return "" if " object at 0x" in text else text.replace("|", "\\|")


def said(docstring: str) -> str:
    """The first paragraph of a docstring up to a semicolon, for a table."""
    first = " ".join(docstring.partition("\n\n")[0].split()).partition("; ")[0].rstrip(".")
    parts = re.split(r"(``.+?``)", first)
    return "".join(
        part.replace("``", "`").replace("|", "\\|") if part.startswith("``") else escaped(part) for part in parts
    )


def public(module: types.ModuleType) -> list[str]:
    """``__all__`` of a module, else the functions and classes that it defines."""
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not isinstance(getattr(module, name), types.ModuleType)]
    return [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and getattr(thing, "__module__", "") == module.__name__
        and (inspect.isclass(thing) or inspect.isfunction(thing))
    ]
