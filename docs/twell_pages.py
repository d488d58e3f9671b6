"""Sphinx extension of these pages: docstrings become reStructuredText, pictures follow the reader's theme.

The project's docstrings are plain English. Their markup is double backquotes, ``::`` before a literal block, lists,
tables and ``Args:``, which napoleon reads. A bar, an asterisk or a trailing underscore means itself.
"""

from __future__ import annotations

import importlib
import itertools
import re
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


def rst(lines: list[str]) -> list[str]:
    """Escape what is no markup, and link names, except in literal blocks and tables."""
    out: list[str] = []
    for _, found in itertools.groupby(lines, lambda line: bool(line.strip())):
        block = list(found)
        before = next((line for line in reversed(out) if line.strip()), "")
        literal = (block[0].startswith(" ") and before.startswith(" ")) or before.endswith("::")
        out += block if literal or _RULE.match(block[0].strip()) else map(plain, block)
    return out


def rewrite(app: Sphinx, what: str, name: str, thing: Any, options: object, lines: list[str]) -> None:
    if isinstance(thing, torch._ops.OpOverload):
        # its schema is below the docstring, which is a file's
        lines[:] = [*rst(lines[:-2]), "::", "", f"    {thing._schema}", ""]
    else:
        # a value would show the docstring of its type
        lines[:] = [] if what == "data" else rst(lines)


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
    # before napoleon reads "Args:"
    app.connect("autodoc-process-docstring", rewrite, priority=400)
    app.connect("autodoc-skip-member", skip)
    app.connect("source-read", read_page)
    return {"version": twell.__version__, "parallel_read_safe": True}
