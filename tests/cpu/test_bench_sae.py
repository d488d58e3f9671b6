"""``profiling.bench sae`` on a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from profiling import bench
from profiling.bench import sae_problem
from profiling.bench.sae_problem import Answer, draw
from twell.testing import operands
from twell.testing.operands import largest

CPU = torch.device("cpu")
SIZES = ["--hidden", "64", "--neurons", "256", "--tokens", "300", "--nonzeros", "8", "--top-k", "8"]
COMMAND = ["sae", *SIZES, "--device", "cpu", "--seconds", "0.01"]
DRAWN = {"m": 600, "k": 64, "nonzeros": 8.0, "top_k": 8}


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    assert bench.main([*COMMAND, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    found = [(row["pattern"], row["op"], row["variant"]) for row in rows]
    steps = ["dense eager", '"union"', '"auto"', '"union+screen"']
    assert found[5:9] == [("even", "training", name) for name in steps]
    assert [name for pattern, op, name in found if (pattern, op) == ("topk", "training")] == steps[:3]
    assert len(found) == 2 * (5 + 4) + 4 + 3
    for row in rows:
        assert row["ms"] > 0
        assert row["queued_over_dense"] > 0
        assert 7 < row["nonzeros"] < 9
        unchecked = row["pattern"] == "topk" and row["variant"] == "dense eager"
        assert row["error"] is None if unchecked else row["error"] < 1.2
    assert "over dense" in capsys.readouterr().out


@pytest.mark.parametrize("pattern", sae_problem.PATTERNS)
@pytest.mark.parametrize("wrong", range(5), ids=["y", *sae_problem.PARAMETERS])
def test_a_wrong_result_has_no_time(pattern: str, wrong: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Answer.check

    def check(self: Answer, strategy: str, call: object, outputs: tuple[Tensor, ...]) -> Any:
        one = outputs[wrong].clone()
        # of the checked rows, or elements of a bias, the first
        rows = {0: self.tokens, 4: torch.arange(len(one))}.get(wrong, self.neurons)
        one[rows[self.right["b_enc"].argmax() if wrong in (1, 2, 3) else 0]] *= 1.5
        return plain(self, strategy, call, (*outputs[:wrong], one, *outputs[wrong + 1 :]))

    monkeypatch.setattr(Answer, "check", check)
    out = tmp_path / "a.json"
    asked = ["--ops", "training", "--patterns", pattern, "--strategies", "row", "--no-eager", "--json", str(out)]
    assert bench.main([*COMMAND, *asked]) == 1
    (row,) = (row for row in json.loads(out.read_text())["rows"] if row["variant"] == '"union"')
    assert row["red"].startswith(f"{('y', *sae_problem.PARAMETERS)[wrong]}: error")
    assert row["ms"] is None


def test_draws_fire_as_asked() -> None:
    counts = {}
    for pattern in sae_problem.PATTERNS:
        o = draw(pattern, 2048, CPU, **DRAWN)
        pre = ((o.x - o.b_dec) @ o.w_enc.t()).detach()
        assert float(pre.float().std()) == pytest.approx(1, abs=0.02)
        fires = pre > o.thresholds if o.thresholds is not None else largest(pre, o.k)
        counts[pattern] = fires.sum(0)
        assert float(counts[pattern].sum()) / 600 == pytest.approx(8, rel=0.1)
    # the busiest hundredth of the neurons
    share: Any = {name: float(c.sort(descending=True).values[:20].sum() / c.sum()) for name, c in counts.items()}
    assert share["even"] < 0.05 < 0.3 < share["skewed"]


@pytest.mark.parametrize("pattern", sae_problem.PATTERNS)
def test_choices_that_rounding_decides_are_left_out(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    o = draw(pattern, 256, CPU, **DRAWN)
    assert len(Answer(o).tokens) > 200
    monkeypatch.setattr(operands, "ACCUMULATION", 1e-2)
    with pytest.raises(RuntimeError, match="rounding decides too many"):
        Answer(o)
