"""The architecture that a kernel is being compiled for."""

from cutlass.base_dsl import Arch
from cutlass.base_dsl.dsl import BaseDSL


def at_least(capability: int) -> bool:
    """Whether it has this compute capability, as in 90 for 9.0, or a later one."""
    arch: Arch = BaseDSL._get_dsl().get_arch_enum()
    return bool(10 * arch.major + arch.minor >= capability)
