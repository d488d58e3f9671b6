"""Programmatic dependent launch, where the architecture has it: from sm_90 on.

Kernels are launched by ``start``. Elsewhere they follow each other, and the waits below are nothing.

The rule: a kernel that is launched so waits once, before it reads or writes global memory, and lets the next one start
only after that. Then it ends after all kernels before it, and whoever has waited for it finds the writes of all. A
kernel that did not wait could end before the one ahead of it, and the next one would not notice. One whose threads all
wait may let the next one start at once, by ``start_next_early``, since it ends after them all the same: that saves the
set-up of the next one where kernels take microseconds, and costs room on multiprocessors. Behind a kernel of its own
pass that keeps the rule some threads may read what that one does not write, as those of decode_e4m3.py do. A kernel
launched without ``use_pdl`` starts when all before it have ended, and lets the next one go whenever it likes.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import const_expr

from .architecture import at_least


def start(
    kernel: Any,
    grid: Any,
    threads: Any,
    stream: Any,
    cluster: int = 1,
    ctas_per_sm: int = 0,
    carveout: int | None = None,
) -> None:
    """Launch a kernel that keeps the rule; `ctas_per_sm` bounds registers, `carveout` is a percentage of the L1."""
    kernel.launch(
        grid=grid,
        block=threads,
        cluster=(cluster, 1, 1) if cluster > 1 else None,
        min_blocks_per_mp=ctas_per_sm,
        preferred_smem_carveout=carveout,
        stream=stream,
        use_pdl=at_least(90),
    )


@cute.jit
def griddepcontrol_wait() -> None:
    """Wait until the kernel before this one has ended and its writes are visible."""
    if const_expr(at_least(90)):
        cute.arch.griddepcontrol_wait()


@cute.jit
def start_next_early() -> None:
    """Let the next kernel start; before this one waits only if every thread of it will."""
    if const_expr(at_least(90)):
        cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def wait() -> None:
    """Wait for the kernel before this one, then let the next one start."""
    griddepcontrol_wait()
    start_next_early()
