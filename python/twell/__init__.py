"""Exact sparse ReLU feed-forward layers in the TwELL format (Tile-wise ELLPACK, arXiv 2603.23198).

``sparse_gated_ffn``, ``sparse_ffn`` and ``pack`` are the functions, ``twell.nn`` the modules, ``twell.ops`` the
registered operators. Importing needs torch alone: no GPU, no driver, no compiler.
"""

from __future__ import annotations

from twell import _log, nn, ops
from twell.functional import Aux, pack, sparse_ffn, sparse_gated_ffn
from twell.packed import PackedTwell

__version__ = "0.1.0"

__all__ = ["Aux", "PackedTwell", "__version__", "nn", "ops", "pack", "sparse_ffn", "sparse_gated_ffn"]

_log.configure()
