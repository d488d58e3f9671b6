"""``profiling.bench moe`` on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from profiling import bench
from twell.testing.experts import draw_experts, hidden_of


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    sizes = ["--shapes", "tiny", "--sequences", "1", "9", "--skew", "0", "1.5", "--seconds", "0.01"]
    assert bench.main(["moe", *sizes, "--device", "cpu", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [(row["variant"], row["sequences"], row["skew"]) for row in found["rows"]][:3] == [
        ('"row"', 1, 0.0),
        ('"dense"', 1, 0.0),
        ('"auto"', 1, 0.0),
    ]
    assert len(found["rows"]) == 12
    assert all(row["us"] > 0 and row["error"] < 1.5 for row in found["rows"])
    assert "over copy" in capsys.readouterr().out


def test_draws_fire_and_route_as_asked() -> None:
    problem = draw_experts(400, 64, 256, 8, 2, firing=0.1, skew=1.0)
    shares = [float(hidden_of(problem, expert)[1].float().mean()) for expert in range(4)]
    assert all(0.07 < share < 0.13 for share in shares)
    counts = torch.bincount(problem.expert_ids.flatten(), minlength=8)
    assert counts[0] > 2 * counts[7]
    assert all(len(set(ids)) == 2 for ids in problem.expert_ids.tolist())
