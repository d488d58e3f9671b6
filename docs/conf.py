"""Sphinx configuration: ``python -m sphinx -W --keep-going -b html docs build/docs`` from the root."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# the checkout is what is documented, never an installed copy; the directives of these pages lie beside this file
sys.path[:0] = [str(ROOT / "python"), str(ROOT), str(ROOT / "profiling"), str(Path(__file__).parent)]

import twell  # noqa: E402

project = "twell"
author = "the twell authors"
release = version = twell.__version__
copyright = author
html_title = f"twell {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "twell_pages"]

# every heading can be linked to
myst_heading_anchors = 4

# Docstrings speak for themselves: nothing is inherited from torch or transformers, types stay in the signature.
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_type_aliases = {
    "Strategy": "twell.call.functional.Strategy",
    "DownLayout": "twell.nn.DownLayout",
}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False

nitpicky = True
# What other projects document. Nothing is fetched while building, so their inventories are not there.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|nn|collections|pathlib|argparse|os|typing|dataclasses|transformers)(\..*)?"),
    # imported from torch, type variables, options of overloads, and what autodoc calls an alias in a union
    (
        r"py:class",
        r"Tensor|twell\.[\w.]+\.(Module|Model|ExpertsSparsity|Card|Activation|Bucket|Transfer|_T)|"
        r"TypeAliasForwardRef|_\w+Options",
    ),
    # documented as data, which only Sphinx 9 finds for a type
    (r"py:class", r"(twell\.[\w.]+\.)?(Strategy|DownLayout)"),
]

html_theme = "furo"
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
