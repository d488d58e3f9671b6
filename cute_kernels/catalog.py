"""The ahead-of-time list: which specs a wheel carries. Other specs are compiled on first use."""

from .specs import ARCHITECTURES, PORTABLE, SM90, Spec, all_specs

# The largest class is compiled on demand: few models have such a hidden size.
MAX_SHIPPED_K = 8192
# They run everywhere, but the kernels beside them need Hopper.
_FOR_HOPPER = ("quantize_gate", "quantize_tokens", "list_candidates", "expert_pairs", "expert_union", "expert_sum")


def of_architecture(arch: str) -> tuple[Spec, ...]:
    """The specs of the family that ``arch`` runs, and those that all run, up to ``MAX_SHIPPED_K``."""
    family = ARCHITECTURES[arch]
    return tuple(
        s
        for s in all_specs()
        if getattr(s, "k_max", 0) <= MAX_SHIPPED_K
        and getattr(s, "family", family) == family
        and (family == SM90 or s.op not in _FOR_HOPPER)
    )


def compiles(spec: Spec, arch: str) -> bool:
    """Whether ``spec`` compiles for ``arch``: its own family, and the portable one everywhere."""
    return getattr(spec, "family", PORTABLE) in (PORTABLE, ARCHITECTURES[arch])


SHIPPED: tuple[Spec, ...] = of_architecture("sm_90a")
