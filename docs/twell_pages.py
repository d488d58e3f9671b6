"""What the pages generate: docstrings as reStructuredText, and directives for operators, commands, tables, pictures.

The project's docstrings are plain English. Of markup they have double backquotes, ``::`` before a literal block, lists,
tables and ``Args:``; a bar, an asterisk or a trailing underscore means itself. Fields of a class and arguments are
described as ``name: text``, several in a paragraph if they are short.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import twell
from twell.commands import bench, cli
from twell.commands.bench import models
from twell.commands.bench import parser as bench_parser

# What is documented under a name that docstrings use, by the module that has it.
_MODULES = ("twell", "twell.nn", "twell.recipe", "twell.distributed", "twell.integrations.transformers")
_LITERAL = re.compile(r"(``.+?``)")
_MARKUP = re.compile(r"[|\\]|(?<![\w*])\*(?=\S)|(?<=\w)_(?!\w)")
_RULE = re.compile(r"=+( +=+)+$")


def linked() -> dict[str, str]:
    """What docstrings call documented objects, and their full names. Short names are those that mean nothing else."""
    found: dict[str, str] = {}
    for module in _MODULES:
        for name in importlib.import_module(module).__dict__.get("__all__", ("SparseGatedMLP", "SparseMLP")):
            full = f"{module}.{name}"
            found[full] = full
            found[full.removeprefix("twell.")] = full
            if "_" in name.strip("_") or name[0].isupper():
                found[name] = full
    return found


_LINKED = linked()


def plain(line: str) -> str:
    """A line of prose: markup that is none escaped, names of documented objects linked."""

    def part(text: str) -> str:
        if not text.startswith("``"):
            return _MARKUP.sub(r"\\\g<0>", text)
        name = text.strip("`")
        return f":py:obj:`{name} <{_LINKED[name]}>`" if name in _LINKED else text

    return "".join(map(part, _LITERAL.split(line)))


def described(text: str, names: Iterable[str]) -> list[str]:
    """``name: text`` of a paragraph as a list, a name each; a paragraph that does not begin so stays one."""
    one = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    label = re.compile(rf"(?:(?<=\A)|(?<=[.;] ))((?:{one})(?:, (?:{one}))*):[ \n]")
    pieces = label.split(text)
    if not one or len(pieces) < 3 or pieces[0]:
        return [plain(text)]
    items = []
    for labels, rest in zip(pieces[1::2], pieces[2::2]):
        bold = ", ".join(f"**{label}**" for label in labels.split(", "))
        items += [f"* {bold}: {plain(rest.strip())}", ""]
    return items


def rst(lines: list[str], names: Iterable[str]) -> list[str]:
    """The lines of a docstring as reStructuredText. ``names``: of its arguments or fields."""
    names = tuple(names)
    out: list[str] = []
    for block in blocks(lines):
        first, indented = block[0].strip(), block[0].startswith(" ")
        if block[0].startswith("Args:"):
            out += [":Arguments:", ""]
            for item in items(block[1:]):
                out += ["    " + line for line in described(item, names)] + [""]
        elif _RULE.match(first) or (indented and literal(out)):
            out += block
        elif not indented and any(re.match(rf"{re.escape(name)}[:,]", first) for name in names):
            for item in items(block):
                out += described(item, names)
        else:
            out += [plain(line) for line in block]
        out.append("")
    return out


def literal(before: list[str]) -> bool:
    """Whether what follows ``before`` and is indented is literal."""
    text = [line for line in before if line.strip()]
    return bool(text) and (text[-1].rstrip().endswith("::") or text[-1].startswith(" "))


def blocks(lines: list[str]) -> list[list[str]]:
    """Paragraphs, indented lines apart from those that are not."""
    found: list[list[str]] = [[]]
    for line in lines:
        if not line.strip():
            found.append([])
        else:
            found[-1].append(line)
    return [block for block in found if block]


def items(lines: list[str]) -> list[str]:
    """One text for each line of the least indentation with the lines indented under it."""
    least = min(len(line) - len(line.lstrip()) for line in lines)
    found: list[str] = []
    for line in lines:
        if line[least] != " " or not found:
            found.append(line.strip())
        else:
            found[-1] += " " + line.strip()
    return found


def arguments(thing: Any) -> list[str]:
    """Names of what a docstring may describe: parameters of a function, fields of a class."""
    try:
        found = list(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        found = []
    return found + [name for name in getattr(thing, "__annotations__", {}) if not name.startswith("_")]


def rewrite(app: Sphinx, what: str, name: str, thing: Any, options: object, lines: list[str]) -> None:
    # a value has the docstring of its type
    lines[:] = [] if what == "data" else rst(lines, arguments(thing))


def skip(app: Sphinx, what: str, name: str, thing: Any, skipped: bool, options: object) -> bool | None:
    """Leave fields of named tuples out: the docstring of the class describes them, their own says nothing."""
    return True if type(thing).__name__ == "_tuplegetter" else None


class Generated(SphinxDirective):
    """A directive whose content is Markdown that ``markdown`` makes."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        try:
            text = self.markdown()
        except LookupError as error:
            raise self.error(str(error)) from error
        return self.parse_text_to_nodes(text)

    def markdown(self) -> str:
        raise NotImplementedError


def fenced(kind: str, text: str) -> str:
    return f"````{kind}\n{text}\n````\n"


def schema(op: str) -> str:
    """The registered schema of an operator, an argument or result a line."""
    text = str(getattr(torch.ops.twell, op).default._schema).removeprefix("twell::")
    name, given, _, returned = re.fullmatch(r"(\w+)\((.*)\) -> (\()?(.*?)\)?", text).groups()  # type: ignore[union-attr]

    def listed(parts: str) -> str:
        return "".join(f"    {part},\n" for part in parts.split(", "))

    out = returned if ", " not in returned else f"(\n{listed(returned)})"
    return f"{name}(\n{listed(given)}) -> {out}"


class Op(Generated):
    """``{op} NAME``: schema of ``torch.ops.twell.NAME``, what its file says, what it returns."""

    def markdown(self) -> str:
        op = self.arguments[0]
        if op not in twell.ops.__all__:
            raise LookupError(f"op must be one of {', '.join(twell.ops.__all__)}, got {op!r}")
        try:
            module = importlib.import_module(f"twell.ops.{op}")
        except ImportError:
            module = importlib.import_module(f"twell.ops.{op.removesuffix('_backward')}")
        summary, _, rest = inspect.getdoc(module).partition("\n\n")  # type: ignore[union-attr]
        told = rst([*summary.splitlines(), "", *rest.splitlines()], ())
        return fenced("text", schema(op)) + fenced("{eval-rst}", "\n".join(told))


def command_parser(words: list[str]) -> argparse.ArgumentParser:
    """The parser of ``twell WORDS``."""
    if words in (["bench"], ["bench", "model"]):
        model = len(words) > 1
        told = models.DESCRIPTION if model else bench.DESCRIPTION
        made = argparse.ArgumentParser(prog=f"twell {' '.join(words)}", description=told)
        (models if model else bench_parser).add_arguments(made)
        return made
    parser = cli.parser()
    for word in words:
        choices = next((a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)), {})
        if word not in choices:
            raise LookupError(f"command must be one of {', '.join(choices)}, got {word!r}")
        parser = choices[word]
    return parser


class Help(Generated):
    """``{help} COMMAND``: what ``twell COMMAND --help`` prints."""

    def markdown(self) -> str:
        # what argparse fills lines and colours by
        os.environ.update(COLUMNS="100", NO_COLOR="1")
        return fenced("text", command_parser(self.arguments[0].split()).format_help().rstrip())


class Picture(Generated):
    """``{picture} STEM``: STEM-light.svg on a light page, STEM-dark.svg on a dark one, relative to this page."""

    option_spec = {"alt": directives.unchanged_required}  # noqa: RUF012

    def markdown(self) -> str:
        stem, alt = self.arguments[0], self.options["alt"]
        images = []
        for theme in ("light", "dark"):
            path = f"{stem}-{theme}.svg"
            if not Path(self.env.relfn2path(path)[1]).exists():
                raise LookupError(f"no picture {path}")
            images.append(fenced(f"{{image}} {path}", f":class: only-{theme}\n:alt: {alt}"))
        return "\n".join(images)


PICTURE = re.compile(r'<picture>\s*<source [^>]*srcset="([^"]+)-dark\.svg">\s*<img alt="([^"]*)"[^>]*>\s*</picture>')


def pictures(app: Sphinx, page: str, source: list[str]) -> None:
    """Pictures that GitHub shows by the reader's theme become ``{picture}`` directives, which do so here."""
    source[0] = PICTURE.sub(lambda found: fenced(f"{{picture}} {found[1]}", f":alt: {found[2]}"), source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", rewrite)
    app.connect("autodoc-skip-member", skip)
    app.connect("source-read", pictures)
    found = {"op": Op, "help": Help, "picture": Picture}
    for name, directive in found.items():
        app.add_directive(name, directive)
    return {"version": twell.__version__, "parallel_read_safe": True}
