"""The cases of pinned.txt, edges and what was wrong once, and of pinned_gpu.txt, which are for GPUs alone."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

from twell.testing.case import Case


def cases(line: str) -> Iterator[Case]:
    """The cases of a line: "m=1|9" is one for each, and "dtype=bf16/fp16" one of these, drawn by the other words."""
    kind, *words = line.partition("#")[0].split()
    fields = [word.partition("=")[::2] for word in words]
    if wrong := [word for word, (name, value) in zip(words, fields) if not (name and value)]:
        raise ValueError(f"a line has words such as m=128, got {wrong[0]!r} in {line!r}")
    for values in itertools.product(*(value.split("|") for _, value in fields)):
        own = {
            name: random.Random(f"{kind} {values} {name}").choice(value.split("/"))
            for (name, _), value in zip(fields, values)
        }
        # of biases or gradients, none is one of several
        yield Case.of(" ".join([kind, *(f"{name}={value}" for name, value in own.items() if value)]))


def read(name: str) -> list[Case]:
    lines = (Path(__file__).parent / name).read_text().splitlines()
    return [case for line in lines if line.partition("#")[0].strip() for case in cases(line)]


# edges, and what was wrong once
PINNED = read("pinned.txt")
ON_GPUS = [*dict.fromkeys([*PINNED, *read("pinned_gpu.txt")])][len(PINNED) :]
