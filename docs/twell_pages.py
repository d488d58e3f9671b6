"""Sphinx extension of these pages: docstrings become reStructuredText, pictures follow the reader's theme.

The project's docstrings are plain English. Their markup is double backquotes, ``::`` before a literal block, lists,
tables and ``Args:``. A bar, an asterisk or a trailing underscore means itself. Fields of a class and arguments are
described as ``name: text``; short ones share a paragraph.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import re
from collections.abc import Iterable
from typing import Any

import torch
from sphinx.application import Sphinx

import twell
from profiling import reference

_LITERAL = re.compile(r"(``.+?``)")
_MARKUP = re.compile(r"[|\\]|(?<![\w*])\*(?=\S)|(?<=\w)_(?!\w)")
_RULE = re.compile(r"=+( +=+)+$")
PICTURE = re.compile(r'<picture>\s*<source [^>]*srcset="([^"]+)-dark\.svg">\s*<img alt="([^"]*)"[^>]*>\s*</picture>')
HIDDEN = re.compile(r"<!-- sphinx\n(.*?)\n-->", re.DOTALL)
# a link to a page above docs/: "../" once more than the page lies deep
OUTSIDE = r"\[([^\]]*)\]\(((?:\.\./){%d}[\w/]+\.md)(?:#[\w-]+)?\)"


def linked() -> dict[str, str]:
    """The full name of each documented object, by the names that docstrings use. A short name must be unambiguous."""
    found: dict[str, str] = {}
    for module in reference.MODULES:
        for name in importlib.import_module(module).__all__:
            full = f"{module}.{name}"
            found |= {full: full, full.removeprefix("twell."): full}
            if "_" in name.strip("_") or name[0].isupper():
                found[name] = full
    return found


_LINKED = linked()


def plain(line: str) -> str:
    """Escape characters of a line that are not markup, and link the names of documented objects."""

    def part(text: str) -> str:
        if not text.startswith("``"):
            return _MARKUP.sub(r"\\\g<0>", text)
        name = text.strip("`")
        return f":py:obj:`{name} <{_LINKED[name]}>`" if name in _LINKED else text

    return "".join(map(part, _LITERAL.split(line)))


def described(text: str, names: Iterable[str]) -> list[str]:
    """Split a paragraph of ``name: text`` into a list, one item per name. Another paragraph stays as it is."""
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
    """Convert the lines of a docstring to reStructuredText. ``names`` are its arguments or fields."""
    names = tuple(names)
    out: list[str] = []
    for block in blocks(lines):
        first, indented = block[0].strip(), block[0].startswith(" ")
        before = next((line for line in reversed(out) if line.strip()), "")
        if block[0].startswith("Args:"):
            out += [":Arguments:", ""]
            for item in items(block[1:]):
                out += ["    " + line for line in described(item, names)] + [""]
        elif _RULE.match(first) or (indented and (before.rstrip().endswith("::") or before.startswith(" "))):
            # what follows "::" is literal
            out += block
        elif not indented and any(re.match(rf"{re.escape(name)}[:,]", first) for name in names):
            for item in items(block):
                out += described(item, names)
        else:
            out += [plain(line) for line in block]
        out.append("")
    return out


def blocks(lines: list[str]) -> list[list[str]]:
    """Split lines into paragraphs."""
    return [list(block) for filled, block in itertools.groupby(lines, lambda line: bool(line.strip())) if filled]


def items(lines: list[str]) -> list[str]:
    """Join each line of the least indentation with the lines indented under it."""
    least = min(len(line) - len(line.lstrip()) for line in lines)
    found: list[str] = []
    for line in lines:
        if line[least] != " " or not found:
            found.append(line.strip())
        else:
            found[-1] += " " + line.strip()
    return found


def arguments(thing: Any) -> list[str]:
    """Names that a docstring may describe: parameters of a function, fields of a class."""
    found: list[str] = []
    with contextlib.suppress(TypeError, ValueError):
        found += inspect.signature(thing).parameters
    return found + [name for name in getattr(thing, "__annotations__", {}) if not name.startswith("_")]


def rewrite(app: Sphinx, what: str, name: str, thing: Any, options: object, lines: list[str]) -> None:
    if isinstance(thing, torch._ops.OpOverload):
        # its schema is below the docstring, which is a file's
        lines[:] = [*rst(lines[:-2], ()), "::", "", f"    {thing._schema}", ""]
    else:
        # a value would show the docstring of its type
        lines[:] = [] if what == "data" else rst(lines, arguments(thing))


def skip(app: Sphinx, what: str, name: str, thing: Any, skipped: bool, options: object) -> bool | None:
    """Leave out fields of named tuples: the docstring of the class describes them."""
    return True if type(thing).__name__ == "_tuplegetter" else None


def read_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Turn the parts of a page that GitHub reads otherwise into directives.

    A ``<picture>`` becomes one image for each theme. The content of a comment ``<!-- sphinx ... -->``, which GitHub
    leaves out, becomes part of the page. The page of docstrings gets those of operators, and their schemas. A link to a
    page above ``docs/`` becomes a download.
    """

    def images(found: re.Match[str]) -> str:
        stem, alt = found.groups()
        of = f"```{{image}} {stem}-THEME.svg\n:class: only-THEME\n:alt: {alt}\n```"
        return f"{of.replace('THEME', 'light')}\n\n{of.replace('THEME', 'dark')}"

    text = HIDDEN.sub(r"\1", PICTURE.sub(images, source[0]))
    if page == "docstrings":
        text += "\ntwell.ops\n---------\n\n.. py:module:: twell.ops\n\n"
        for name in twell.ops.__all__:
            given = ", ".join(each.name for each in getattr(twell.ops, name)._schema.arguments)
            text += f".. autofunction:: {name}({given})\n"
    source[0] = re.sub(OUTSIDE % (page.count("/") + 1), r"{download}`\1 <\2>`", text)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", rewrite)
    app.connect("autodoc-skip-member", skip)
    app.connect("source-read", read_page)
    return {"version": twell.__version__, "parallel_read_safe": True}
