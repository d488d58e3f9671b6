"""The places where pickles of version 0.2 look for classes, and the classes that they find there."""

from __future__ import annotations

import sys
from types import ModuleType

from twell.strategy import costs, site


class GateCopy:
    """A kept int8 copy of a gate weight; it holds nothing, and layers drop it."""


_CLASSES: dict[str, dict[str, type]] = {
    "twell._auto": {"AutoStrategy": site.AutoStrategy, "_Bucket": site.Bucket, "_Graph": site._Graph},
    "twell._gate_copies": {"GateCopy": GateCopy},
    "twell.tuning": {"Decision": costs.Decision, "Figures": costs.Figures, "Problem": costs.Problem},
}

for _module, _classes in _CLASSES.items():
    # unpickling imports the module and takes its attribute
    vars(sys.modules.setdefault(_module, ModuleType(_module))).update(_classes)
