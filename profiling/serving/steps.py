"""Steps of a server's scheduler, and the file that keeps them.

Those of profiling/traces/ are of vLLM on a CPU: requests that all arrive at once, twice as many as run at a time, with
prompts and outputs of the lengths in the file. Only the sizes of steps matter, which do not depend on the model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# vLLM's sizes of CUDA graphs on a Hopper GPU, from the documentation of its configuration.
CAPTURED = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
# Steps with prompts have any number of tokens; a multiple of this stands for those below it.
ROUNDED = 256


class Step(NamedTuple):
    """One forward pass: tokens of prompts, sequences that decode one token each, and all their tokens so far."""

    prefill: int
    decode: int
    context: int

    @property
    def tokens(self) -> int:
        """The tokens to time: where all decode they are padded to the size of a CUDA graph, else to ``ROUNDED``."""
        if self.prefill:
            return -(-(self.prefill + self.decode) // ROUNDED) * ROUNDED
        return next((size for size in CAPTURED if size >= self.decode), self.decode)

    @property
    def size(self) -> tuple[bool, int]:
        """Whether there are prompts, and the tokens to time: steps that share both share a time."""
        return self.prefill > 0, self.tokens


@dataclass(frozen=True)
class Trace:
    """The steps of one run. ``sequences``: the most that run at a time."""

    sequences: int
    requests: int
    steps: list[Step]

    @property
    def name(self) -> str:
        return f"{self.sequences} sequences"


def read(path: Path) -> list[Trace]:
    """The traces of a file, in which a step is [prefill, decode, context]."""
    runs = json.loads(path.read_text())["traces"]
    return [Trace(run["sequences"], run["requests"], [Step(*step) for step in run["steps"]]) for run in runs]
