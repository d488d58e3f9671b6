"""Markdown of operators, commands and public names: blocks of docs/ that ``profiling.readme`` fills from the code."""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

# Modules of docs/api, and the commands of docs/command-line.md.
MODULES = (
    *("twell", "twell.nn", "twell.recipe", "twell.integrations.transformers", "twell.distributed"),
    *("twell.strategy.plan", "twell.strategy.costs", "twell.testing", "twell.reference"),
)
COMMANDS = ("demo", "info", "tune", "analyze", "serve-check", "convert")


@functools.cache
def blocks() -> dict[str, Callable[[], str]]:
    """The function that makes each block, by the block's name."""
    import twell.ops

    kinds = (
        ("operator", operator, twell.ops.__all__),
        ("command", command, COMMANDS),
        ("names", names, MODULES),
        # the others are for tests and for the curious
        ("docstrings", docstrings, MODULES[:5]),
    )
    return {f"{kind} {name}": functools.partial(make, name) for kind, make, found in kinds for name in found}


def operator(name: str) -> str:
    """The registered schema of an operator, then the docstring of its file."""
    try:
        module = importlib.import_module(f"twell.ops.{name}")
    except ImportError:
        module = importlib.import_module(f"twell.ops.{name.rpartition('_')[0]}")
    return f"```text\n{schema(name)}\n```\n\n{backquotes(inspect.getdoc(module) or '')}"


def schema(name: str) -> str:
    """The schema of ``torch.ops.twell.NAME``, one argument or result per line."""
    import torch

    text = str(getattr(torch.ops.twell, name).default._schema)
    found = re.fullmatch(r"twell::(\w+)\((.*)\) -> \(?(.*?)\)?", text)
    assert found, text
    called, given, returned = found.groups()

    def lines(parts: str) -> str:
        return "".join(f"    {part},\n" for part in parts.split(", "))

    out = returned if ", " not in returned else f"(\n{lines(returned)})"
    return f"{called}(\n{lines(given)}) -> {out}"


def backquotes(text: str) -> str:
    """A docstring as Markdown: single backquotes."""
    return text.replace("``", "`")


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of ``twell NAME``."""
    from twell.commands import cli

    subparsers = (a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    found: argparse.ArgumentParser = next(subparsers).choices[name]
    return found


def command(name: str) -> str:
    """A command's description and a table of its arguments; the end of long ones is in ``--help`` alone."""
    parser = parser_of(name)
    formatter = parser._get_formatter()
    rows = []
    for group in parser._action_groups:
        shown = [a for a in group._group_actions if a.help is not argparse.SUPPRESS and a.dest != "help"]
        if shown and group.description:
            rows.append(f"| | *{group.title}: {cell(group.description)}* |")
        for action in shown:
            rows.append(f"| `{called(action)}` | {cell(formatter._expand_help(action))} |")
    return "\n".join([cell(parser.description or ""), "", "| argument | |", "|---|---|", *rows])


def called(action: argparse.Action) -> str:
    """An argument as it is written: its flags, and the name or choices of its value."""
    choices = ",".join(map(str, action.choices or ()))
    value = action.metavar or (f"{{{choices}}}" if choices else action.dest.upper())
    value = value if isinstance(value, str) else " ".join(value)
    if not action.option_strings:
        return value if action.nargs not in ("*", "?") else f"[{value}]"
    if action.nargs == 0:
        value = ""
    elif action.nargs in ("+", "*"):
        value = f"{value} ..."
    return f"{', '.join(action.option_strings)} {value}".strip()


def cell(text: str) -> str:
    """Plain text as one line of Markdown."""
    return escaped(" ".join(text.split()))


def escaped(text: str) -> str:
    return re.sub(r"([|*<])", r"\\\1", text)


def described(module: str) -> Iterator[tuple[str, Any, str]]:
    """The name, object and docstring of each public function and class of a module."""
    found = importlib.import_module(module)
    for name in public(found):
        thing = getattr(found, name)
        if (inspect.isclass(thing) or callable(thing)) and (text := inspect.getdoc(thing)):
            yield name, thing, text


def names(module: str) -> str:
    """A table of a module's public names, with the first paragraph of each docstring."""
    rows = [f"| `{name}{arguments(thing)}` | {said(text)} |" for name, thing, text in described(module)]
    return "\n".join(["| name | |", "|---|---|", *rows])


def docstrings(module: str) -> str:
    """The whole docstring of each public name of a module and of the methods of its classes; the site has its own."""
    parts = []
    for name, thing, text in described(module):
        parts.append(f"### {name}\n\n~~~text\n{text}\n~~~")
        for method, function in vars(thing).items() if inspect.isclass(thing) else ():
            if not method.startswith("_") and inspect.isfunction(function) and function.__doc__:
                called = f"{name}.{method}{arguments(function)}".replace("(self, ", "(").replace("(self)", "()")
                parts.append(f"`{called}`\n\n~~~text\n{inspect.cleandoc(function.__doc__)}\n~~~")
    return "\n\n".join(["## Arguments, results and errors", *parts])


def arguments(thing: Any) -> str:
    """The parameters of a function or class with their defaults, without types; "" for one that shows none."""
    try:
        signature = inspect.signature(thing)
    except ValueError:
        return ""
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    text = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return "" if " object at 0x" in text else text.replace("|", "\\|")


def said(docstring: str) -> str:
    """The first paragraph of a docstring, for a table."""
    first = " ".join(docstring.partition("\n\n")[0].split())
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
