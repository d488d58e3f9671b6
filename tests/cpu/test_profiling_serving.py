"""profiling/serving: steps and their sizes, the recorded traces, and both measurements on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from profiling.serving import __main__ as serving
from profiling.serving import generate, replay, steps
from profiling.serving.replay import Phase, Size
from profiling.serving.steps import Step, Trace

TINY = ["--config", "2x64x256x2x256", "--nnz", "8", "--device", "cpu"]


@pytest.mark.parametrize(
    ("step", "size"),
    [
        (Step(0, 1, 9), (False, 1)),
        (Step(0, 257, 9), (False, 272)),
        (Step(0, 700, 9), (False, 700)),
        (Step(8190, 2, 9), (True, 8192)),
        (Step(256, 1, 9), (True, 512)),
    ],
)
def test_steps_of_one_size_share_a_time(step: Step, size: tuple[bool, int]) -> None:
    assert step.size == size


def test_recorded_traces_have_all_tokens_of_their_requests() -> None:
    content = json.loads(replay.TRACES.read_text())
    traces = steps.read(replay.TRACES)
    assert [trace.sequences for trace in traces] == [64, 256]
    for trace in traces:
        assert trace.requests == 2 * trace.sequences
        assert max(step.prefill + step.decode for step in trace.steps) == content["chunk"]
        assert max(step.decode for step in trace.steps) == trace.sequences
        for total, (least, most) in (
            (sum(step.prefill for step in trace.steps), content["prompt"]),
            # the first token of an output comes with the prompt
            (sum(step.decode for step in trace.steps) + trace.requests, content["output"]),
        ):
            assert total / trace.requests == pytest.approx((least + most) / 2, rel=0.1)


def test_phases_add_up_the_times_of_sizes() -> None:
    trace = Trace(4, 8, [Step(200, 4, 8), Step(0, 3, 9), Step(0, 4, 9), Step(0, 9, 9)])
    size = {"ffn_us": {"stock": 4.0, "dense": 3.0, "auto": 1.0}, "layers_us": {"stock": 8.0, "dense": 7.0, "auto": 5.0}}
    measured = {(True, 256): Size(252, 4, **size, attention_us=10.0), (False, 4): Size(0, 4, **size, attention_us=1.0)}
    prefill, decode = replay.phases_of(trace, measured, layers=10)
    assert (prefill.steps, prefill.tokens, prefill.missing) == (1, 204, 0)
    assert (decode.steps, decode.tokens, decode.missing) == (2, 7, 1)
    assert decode.ffn_s == pytest.approx({"stock": 80e-6, "dense": 60e-6, "auto": 20e-6})
    assert decode.attention_s == pytest.approx(20e-6)
    # the faster dense counts
    assert f"{7 / 60e-6:,.0f}" in list(replay.phase_lines(decode))[1]


def test_replay_measures_each_size_and_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"sequences": 4, "requests": 8, "steps": [[100, 2, 30], [0, 4, 99], [0, 3, 80]]}
    (tmp_path / "trace.json").write_text(json.dumps({"traces": [run]}))
    out = tmp_path / "out.json"
    sizes = ["--decode", "1", "4", "--prefill", "32", "--context", "8", "--seconds", "0.001"]
    assert serving.main(["replay", *TINY, *sizes, "--trace", str(tmp_path / "trace.json"), "--out", str(out)]) == 0
    data: dict[str, Any] = json.loads(out.read_text())
    assert [(row["prefill"], row["decode"]) for row in data["rows"]] == [(0, 1), (0, 4), (32, 0)]
    for row in data["rows"]:
        assert set(row["ffn_us"]) == set(row["layers_us"]) == set(row["each_us"]) == set(replay.VARIANTS)
        assert all(len(each) == 2 for each in row["each_us"].values())
    assert [Phase(**phase).steps for phase in data["phases"]] == [1, 2]
    assert "4 sequences, decode: 2 steps, 7 tokens, 0 not measured" in capsys.readouterr().out


def test_generate_is_timed_beside_stock(tmp_path: Path) -> None:
    small = ["--prompts", "1", "--prompt", "128", "--new", "3", "--runs", "1", "--sequences", "2", "--caches", "eager"]
    assert serving.main(["generate", *TINY, *small, "--out", str(tmp_path / "made.json")]) == 0
    rows = json.loads((tmp_path / "made.json").read_text())["rows"]
    assert [(row["what"], row["model"], row["sequences"]) for row in rows] == [
        *(("prompt", "stock", 1), ("prompt", "sparse", 1)),
        *(("eager", "stock", 2), ("eager", "sparse", 2)),
    ]
    assert all(row["tokens_per_s"] > 0 for row in rows)
    # on a CPU both run PyTorch's operators, and choose the same tokens
    assert rows[-1]["differing"] == 0
    assert rows[-1]["strategies"] == {"any: dense": 2}


def test_generate_sees_a_wrong_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sparsify = generate.sparsify

    def damaged(model: Any) -> Any:
        sparse = sparsify(model)
        sparse.get_decoder().layers[1].mlp.down_proj.weight.data.neg_()
        return sparse

    monkeypatch.setattr(generate, "sparsify", damaged)
    small = ["--prompts", "1", "--prompt", "128", "--new", "8", "--runs", "1", "--sequences", "8", "--caches", "eager"]
    assert serving.main(["generate", *TINY, *small, "--out", str(tmp_path / "made.json")]) == 0
    found = json.loads((tmp_path / "made.json").read_text())["rows"][-1]
    assert found["differing"] > found["ties"]
    assert found["worst"] > 4
