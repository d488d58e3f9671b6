"""Exact sparse ReLU feed-forward layers in the TwELL format (Tile-wise ELLPACK, arXiv 2603.23198).

``sparse_gated_ffn``, ``sparse_ffn``, ``sparse_up_down``, ``sparse_experts`` and ``pack`` are the functions,
``twell.nn`` has the modules, ``twell.ops`` the registered operators, ``explain`` shows the strategy of a layer, and
``analyze`` says whether a model's layers pay.
``sparsify_`` converts a model in place, ``twell.integrations.transformers`` one of Hugging Face. ``twell.recipe`` is
for training, ``twell.distributed`` for tensor parallelism; both are imported at first use. Importing twell needs torch
alone: no GPU, driver or compiler.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from twell import nn, ops
from twell._analyze import Analysis, analyze
from twell._compaction import CompactionReport, Firing, FiringCounts, compact, count_firing, restore
from twell._execution import Aux
from twell._quantize import quantize_
from twell._runtime import log
from twell._sparsify import sparsify_
from twell.choose.site import AutoStrategy
from twell.experts import sparse_experts
from twell.float8 import Float8, quantize
from twell.functional import pack, sparse_ffn, sparse_gated_ffn, sparse_up_down
from twell.nn import explain
from twell.packed import PackedTwell

__version__ = "0.3.0"

__all__ = [
    "Analysis",
    "AutoStrategy",
    "Aux",
    "CompactionReport",
    "Firing",
    "FiringCounts",
    "Float8",
    "PackedTwell",
    "__version__",
    "analyze",
    "compact",
    "count_firing",
    "explain",
    "nn",
    "ops",
    "pack",
    "quantize",
    "quantize_",
    "restore",
    "sparse_experts",
    "sparse_ffn",
    "sparse_gated_ffn",
    "sparse_up_down",
    "sparsify_",
]

# imported at first use: they take time or need more of torch
_SUBMODULES = ("distributed", "integrations", "recipe", "reference", "testing")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> ModuleType:
        if name not in _SUBMODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ImportError as error:
            raise AttributeError(f"{__name__}.{name} cannot be imported: {error}") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES})


log.configure()
