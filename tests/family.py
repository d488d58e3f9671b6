"""``--portable``, of pytest, the fuzzer and the sanitizer's driver: run the portable family of kernels on any GPU.

It is an option of a test program, never a variable or a setting: nothing in the package knows it, and it ends with the
process.
"""

import torch

from twell import tuning
from twell._runtime import specs

HELP = "run the kernels of the portable family on this GPU"


def run_portable() -> None:
    """Let this process run the portable family, whatever its GPU."""
    tuning.family = lambda index: specs.PORTABLE


def is_portable(device: torch.device) -> bool:
    """Whether calls on a device run the portable family: by this option, or because the GPU has no other."""
    return device.type == "cuda" and tuning.family(device.index or 0) == specs.PORTABLE
