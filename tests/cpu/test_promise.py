"""The promised bound, in roundings, for short sums, where the ratio to dense PyTorch's error is chance."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases.verdicts import attempt
from twell.choose import tuning
from twell.testing.case import Case

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
# two non-zeros in all, one for each of a few tokens, a few for each of many
ONE = {"m": 1, "k": 64, "n": 64, "density": 2 / 64}
FEW = {"m": 16, "k": 64, "n": 64, "density": 1 / 64}
MANY = {"m": 128, "k": 64, "n": 256, "density": 0.006}
TRAINING = {"wants": "x+w_gate+w_up+w_down", "aux": True}


def cases(strategy: str, sizes: dict[str, Any], dtype: str, wants: Any = (), count: int = 40) -> list[Case]:
    how = {"strategy": strategy, "dtype": dtype, "exact": False, **sizes, **dict(wants)}
    return [Case("layer", **how, seed=seed) for seed in range(count)]


@pytest.mark.parametrize(
    ("wants", "strategy", "sizes", "dtype"),
    [
        ((), "row", ONE, "bf16"),
        ((), "row", MANY, "fp16"),
        ((), "union", FEW, "bf16"),
        (TRAINING, "union", ONE, "fp16"),
        (TRAINING, "union", MANY, "bf16"),
    ],
    ids=["row one", "row many", "union few", "train one", "train many"],
)
def test_every_row_is_within_the_bound(wants: Any, strategy: str, sizes: dict[str, Any], dtype: str) -> None:
    """y and the gradients of x and all weights are, whatever dense PyTorch's error is."""
    results = [attempt(case, CPU) for case in cases(strategy, sizes, dtype, wants)]
    assert {result.verdict for result in results} == {"ok"}
    assert max(result.nonzeros for result in results) > 0
    # the bound is tight
    assert max(result.ratios["y"] for result in results) > 0.35


def drops_a_nonzero(gate: Tensor) -> None:
    gate.view(-1)[gate.argmax()] = 0


def rounds_again(gate: Tensor) -> None:
    gate.copy_((gate.view(torch.int16) & ~3).view(gate.dtype))


@pytest.mark.parametrize(
    ("fault", "sizes"),
    [(drops_a_nonzero, ONE), (drops_a_nonzero, MANY), (rounds_again, MANY)],
    ids=["dropped, one", "dropped, many", "rounded, many"],
)
def test_the_bound_finds_faults(fault: Any, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ffn, found = sys.modules["twell.ops.ffn"], []
    real = ffn.gate_on_cpu

    def gate_on_cpu(*given: Any) -> Tensor:
        gate: Tensor = real(*given)
        fault(gate[:, :256])
        return gate

    monkeypatch.setattr(ffn, "gate_on_cpu", gate_on_cpu)
    for case in cases("row", sizes, "bf16", count=20):
        result = attempt(case, CPU)
        if result.nonzeros:
            found.append(result.verdict.startswith("y: "))
    assert len(found) > 10
    assert all(found)


def test_the_number_of_tokens_chooses_kernels_where_readme_says() -> None:
    def kernels(m: int, k: int) -> tuple[Any, ...]:
        return (
            # tiles of all sizes give the same bits
            tuning.decode(torch.bfloat16, m, k, "gated") or tuning.gate_pack(torch.bfloat16, m, 5632, 66).op,
            tuning.up_down_token(torch.bfloat16, m, k, True),
        )

    changes = {m for k in (64, 2048, 4096, 8192, 16384) for m in range(1, 3000) if kernels(m, k) != kernels(m + 1, k)}
    *some, last = sorted(changes)
    page = (Path(__file__).resolve().parents[2] / "docs" / "promises.md").read_text()
    assert f"they change above {', '.join(f'{m:,}' for m in some)} and {last:,} tokens" in page
