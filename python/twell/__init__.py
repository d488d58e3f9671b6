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
from twell.call.execution import Aux
from twell.call.experts import sparse_experts
from twell.call.functional import sparse_ffn, sparse_gated_ffn, sparse_up_down
from twell.call.packed import PackedTwell, pack
from twell.choose.site import AutoStrategy
from twell.integrations.analyze import Analysis, analyze
from twell.integrations.quantize import quantize_
from twell.integrations.sparsify import sparsify_
from twell.nn.compaction import CompactionReport, Firing, compact, count_firing
from twell.nn.models import explain
from twell.ops.float8 import Float8, quantize
from twell.runtime import log

__version__ = "0.4.0"

__all__ = [
    "Analysis",
    "AutoStrategy",
    "Aux",
    "CompactionReport",
    "Firing",
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
    "sparse_experts",
    "sparse_ffn",
    "sparse_gated_ffn",
    "sparse_up_down",
    "sparsify_",
]

# imported at first use, by their names here: they take time or need more of torch
_SUBMODULES = {name: f"{__name__}.{name}" for name in ("integrations", "recipe", "testing")} | {
    "distributed": f"{__name__}.nn.distributed",
    "reference": f"{__name__}.ops.reference",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> ModuleType:
        if name not in _SUBMODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return importlib.import_module(_SUBMODULES[name])
        except ImportError as error:
            raise AttributeError(f"{__name__}.{name} cannot be imported: {error}") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES})


log.configure()
