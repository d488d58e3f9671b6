"""``sparsify_``: the feed-forward layers of a plain PyTorch model through twell, in place.

Modules are taken by the names of their classes (``known``) or by the names of children that the user tells. A copy of
each that is to become a layer runs on small random weights, on the CPU, beside the formula (``equivalence``), so
neither the size nor the device of the model matters, and the model itself is never run.
"""

from twell.integrations.sparsify.candidates import Candidate
from twell.integrations.sparsify.replace import Filter, Names, Plan, apply, plan, sparsify_
from twell.nn.models import named_layers as layers

__all__ = ["Candidate", "Filter", "Names", "Plan", "apply", "layers", "plan", "sparsify_"]
