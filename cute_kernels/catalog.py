"""The ahead-of-time list: which specs a wheel carries. Other specs are compiled on first use."""

from __future__ import annotations

from .specs import SM90, Spec, all_specs

# The largest class is compiled on demand: few models have such a hidden size.
MAX_SHIPPED_K = 8192

SHIPPED: tuple[Spec, ...] = tuple(
    s for s in all_specs() if getattr(s, "k_max", 0) <= MAX_SHIPPED_K and getattr(s, "family", SM90) == SM90
)
