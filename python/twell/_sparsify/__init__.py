"""``sparsify_``: the feed-forward layers of a plain PyTorch model through twell, in place.

A module with the right children is a candidate (``candidates``). ``equivalence`` decides: it runs the module's own
``forward`` on small random weights, on the CPU, beside the formula. So neither the size nor the device of the model
matters, and differences that names do not show (dropout, another order, a factor, a residual) are found.
"""

from twell._sparsify.candidates import Candidate
from twell._sparsify.modules import Block as _Block  # noqa: F401  (whole models pickled by version 0.1 ask for it here)
from twell._sparsify.modules import DeferredUp, FusedGatedMLP, NamedGatedMLP, NamedMLP, SparseDown
from twell._sparsify.modules import PairMLP as _PairMLP  # noqa: F401  (likewise)
from twell._sparsify.replace import Filter, Names, Plan, apply, block_of, layers, plan, sparsify_

__all__ = [
    "Candidate",
    "DeferredUp",
    "Filter",
    "FusedGatedMLP",
    "NamedGatedMLP",
    "NamedMLP",
    "Names",
    "Plan",
    "SparseDown",
    "apply",
    "block_of",
    "layers",
    "plan",
    "sparsify_",
]
