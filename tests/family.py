"""``--portable``, of pytest, the fuzzer and the sanitizer's driver: run the portable family of kernels on any GPU.

It is an option of a test program, never a variable or a setting: nothing in the package knows it, and it ends with the
process. And what else tests on a GPU of that family need: which refusals are of it, and rates for "auto".
"""

import dataclasses
from pathlib import Path

import torch

from twell.choose import cards, tuning
from twell.runtime import device as driver
from twell.runtime import geometry, specs

HELP = "run the kernels of the portable family on this GPU"


def run_portable() -> None:
    """Let this process run the portable family, whatever its GPU, by rates of that."""
    tuning.family = lambda index: specs.PORTABLE
    decide_by_shipped_rates()


def is_portable(device: torch.device) -> bool:
    """Whether calls on a device run the portable family: by this option, or because the GPU has no other."""
    return device.type == "cuda" and tuning.family(device.index or 0) == specs.PORTABLE


def is_absent(error: NotImplementedError) -> bool:
    """Whether an error says that the portable family lacks something: the screen, experts, e4m3, that many neurons."""
    said = "needs compute capability 9.0", "for sm_90a alone", f"at most {geometry.PORTABLE_UNION_NEURONS} neurons"
    return tuning.family(0) == specs.PORTABLE and any(message in str(error) for message in said)


def is_without_rates() -> bool:
    """Whether this GPU has kernels, but no rates that ship."""
    return driver.architecture(0) is not None and driver.capability(0) != driver.SM_90


def decide_by_shipped_rates() -> None:
    """Let "auto" choose in this process as if a user had measured those that ship on a portable GPU."""
    card = dataclasses.replace(cards.shipped("", specs.PORTABLE), file=Path("shipped"))
    cards._on = lambda index: card  # type: ignore[assignment]
