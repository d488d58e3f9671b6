"""The ids that a router gives."""

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def expert_of(ids: cute.Tensor, pair: Int32, experts: Int32) -> Int32:
    """The expert of a pair; -1 if its id is no expert's."""
    expert = ids[pair, 0]
    exists = expert >= 0 and expert < experts
    if ids.shape[1] > 1:
        exists = exists and ids[pair, 1] == 0
    return expert if exists else Int32(-1)
