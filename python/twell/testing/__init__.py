"""Problems and comparisons for tests, benchmarks and users: named workloads, exact integer problems, error budgets.

A problem is an ``FFN``: the tensors of one feed-forward layer. ``make`` draws a named workload, ``load_real`` reads a
recorded layer, ``integer_problem`` and ``pattern_problem`` build problems whose answer is the same in any order of
summation. ``compare`` and ``compare_gradients`` measure a result against float64 beside dense PyTorch, and
``machine_line`` names the machine. A ``Case`` is a problem and a way to call it on one line.
The activation is ReLU unless ``activation`` and ``threshold`` say otherwise. Gradients are dictionaries by the names of
``FFN``, each of its tensor's shape.
"""

from twell.testing.answers import (
    count_roundings,
    dense_gradients,
    dense_output,
    float64_gate,
    float64_gradients,
    float64_output,
    off_kinks,
    sparse_gradients,
    sparse_layer,
    sparse_output,
)
from twell.testing.bits import Packed as Packed
from twell.testing.bits import assert_hybrid_same, assert_packed_same, assert_same, captured, poison_memory, poisoned
from twell.testing.case import Case
from twell.testing.comparison import (
    BUDGET,
    ROW_FLOOR,
    Comparison,
    Errors,
    allowance,
    compare,
    compare_gradients,
    errors,
)
from twell.testing.exact import exact_gradients, exact_output, integer_problem, integer_upstream, pattern_problem
from twell.testing.machine import machine_line
from twell.testing.workloads import (
    CHUNK_ROWS,
    FFN,
    PAPER_HIDDEN,
    PAPER_MODELS,
    PAPER_NEURONS,
    WORKLOADS,
    Workload,
    load_real,
    make,
    real_names,
    real_upstream,
)

__all__ = ["BUDGET", "CHUNK_ROWS", "PAPER_HIDDEN", "PAPER_MODELS", "PAPER_NEURONS", "ROW_FLOOR", "WORKLOADS"]
__all__ += ["FFN", "Case", "Comparison", "Errors", "Workload"]
__all__ += ["allowance", "assert_hybrid_same", "assert_packed_same", "assert_same", "captured", "compare"]
__all__ += ["compare_gradients", "count_roundings", "dense_gradients", "dense_output", "errors", "exact_gradients"]
__all__ += ["exact_output", "float64_gate", "float64_gradients", "float64_output", "integer_problem"]
__all__ += ["integer_upstream", "load_real", "machine_line", "make", "off_kinks", "pattern_problem", "poison_memory"]
__all__ += ["poisoned", "real_names", "real_upstream", "sparse_gradients", "sparse_layer", "sparse_output"]
