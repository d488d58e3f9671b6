"""Habits of entry points on a GPU: those that a GPU alone shows, and those that its kernels may change."""

from typing import Any

import pytest
import torch

from tests.habits.entries import ENTRIES, Call, Entry
from tests.habits.habits import HABITS, ON_GPU


class OnGpu(Entry):
    """An entry point whose operands lie on the GPU."""

    def call(self, strategy: Any = None, device: str = "cuda") -> Call:
        return super().call(strategy, device)


# the others are of code that no device changes, or Cases ask them on a GPU
COLUMNS = ("compiled", "repeats", "owned", "strides", "memory", "opcheck", "empty", "transforms", "backward")
HERE = ON_GPU | {name: HABITS[name] for name in COLUMNS}


# PyTorch does not derive its grouped products forward; its compiler adds an adapter's product before that is rounded
ABSENT = {("sparse_experts", "transforms"), ("adapted", "compiled")}


@pytest.mark.parametrize(
    ("entry", "habit"),
    [(a, b) for a, row in ENTRIES.items() for b in HERE if b not in row.absent and (a, b) not in ABSENT],
)
def test_habit(entry: str, habit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    plain = torch.library.opcheck
    # other checks compare all bytes of two runs, some of which mean nothing
    tests = {"test_utils": ("test_schema", "test_faketensor")}
    if "e4m3" in entry or entry == "Float8MLP":
        # PyTorch does not compare e4m3 values of a GPU
        tests = {"test_utils": ("test_faketensor",)}
    monkeypatch.setattr(torch.library, "opcheck", lambda op, args, kwargs, **how: plain(op, args, kwargs, **tests))
    HERE[habit](OnGpu(**vars(ENTRIES[entry])))
