"""Profiling without a GPU: tables of ncu's CSV, the program that is profiled, the scripts around it, dumps."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from profiling import dump
from profiling.nsight import profile_target, summarize
from twell import ops, testing
from twell._runtime import specs

ROOT = Path(__file__).resolve().parents[2]

# As compiled kernels are called, without the types that follow.
COMPILED = {
    "kernel_cutlass_kernel_cute_kernelsgate_packGatePack_object_at__CopyAtom_ThrID10_0": ("gate_pack", "gate_pack"),
    "kernel_cutlass_kernel_twellcute_kernelsgate_packGatePack_object_at__CopyAtom_0": ("gate_pack", "gate_pack"),
    "kernel_cutlass_kernel_cute_kernelsgate_pack_skinnyGatePackSkinny_object_at__C_0": (
        *("gate_pack_skinny", "gate_pack_skinny"),
    ),
    "kernel_cutlass_light_cute_kernelsup_downUpDown_object_at__tensorptrbf16_0": ("up_down", "up_down light"),
    "kernel_cutlass_compact_cute_kernelscompactCompact_object_at__tensorptri32_1": ("compact", "compact"),
    "kernel_cutlass_locate_cute_kernelscompactCompact_object_at__tensorptri32_0": ("compact", "compact locate"),
    "kernel_cutlass_kernel_cute_kernelsregluRegluBackward_object_at__tensor_0": ("reglu", "reglu backward"),
    "kernel_cutlass_kernel_cute_kernelsoverflowInput_object_at__tensorptrbf16_0": ("overflow", "overflow input"),
    "kernel_cutlass_kernel_cute_kernelsweight_gradWeightGrad_object_at__tensor_0": ("weight_grad", "weight_grad"),
    "kernel_cutlass_kernel_cute_kernelsrankRank_object_at__tensorptri32_0": ("rank", "rank"),
}


class TestNames:
    @pytest.mark.parametrize("name", COMPILED)
    def test_of_the_compiler(self, name: str) -> None:
        found = summarize.parse_name(name)
        assert (found.op, found.label, found.spec) == (*COMPILED[name], None)

    @pytest.mark.parametrize("spec", specs.all_specs(), ids=lambda spec: spec.symbol)
    def test_given(self, spec: specs.Spec) -> None:
        assert summarize.parse_name(f"twell_{spec.symbol}_0") == (summarize.Name(spec.op, spec, spec.symbol))

    def test_given_to_one_of_several(self) -> None:
        spec = specs.UpDownSpec("bfloat16", 2048, True, True)
        found = summarize.parse_name("twell_up_down_bf16_k2048_bias_heavy_1")
        assert found == summarize.Name("up_down", spec, "up_down_bf16_k2048_bias heavy")

    @pytest.mark.parametrize(
        ("name", "label"),
        [
            ("void at::native::vectorized_elementwise_kernel<4, at::native::Fill>(int, T)", "at::native::vectorized_"),
            ("nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_TNT", "nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_TNT"),
            ("twell_nonsense_0", "twell_nonsense_0"),
        ],
    )
    def test_of_others(self, name: str, label: str) -> None:
        found = summarize.parse_name(name)
        assert (found.op, found.spec) == (name, None)
        assert found.label.startswith(label)


def quoted(rows: list[list[str]]) -> str:
    """CSV as ncu prints it: every cell in quotes."""
    return "".join(",".join('"' + cell.replace('"', '""') + '"' for cell in row) + "\n" for row in rows)


BEFORE = """==PROF== Connected to process 4242 (/usr/bin/python3.12)
profile_target: 3 calls of up_down: topic29, 16384 tokens
==PROF== Disconnected from process 4242
"""
LAUNCH = [
    "ID",
    "Process ID",
    "Process Name",
    "Host Name",
    "Kernel Name",
    "Context",
    "Stream",
    "Block Size",
    "Grid Size",
]
LIGHT, HEAVY, PACK = (
    "kernel_cutlass_light_cute_kernelsup_downUpDown_object_at__tensorptrbf16_0",
    "kernel_cutlass_heavy_cute_kernelsup_downUpDown_object_at__tensorptrbf16_1",
    "kernel_cutlass_kernel_cute_kernelsgate_packGatePack_object_at__CopyAtom_0",
)

STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio".format
RAW = {
    "gpu__time_duration.sum": "us",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "%",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "%",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "%",
    "launch__registers_per_thread": "register/thread",
    "launch__shared_mem_per_block_dynamic": "Kbyte/block",
    "launch__shared_mem_per_block_static": "byte/block",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "%",
    "sm__maximum_warps_per_active_cycle_pct": "%",
    STALLED("long_scoreboard"): "inst",
    STALLED("long_scoreboard_not_issued"): "inst",
    STALLED("barrier"): "inst",
    STALLED("selected"): "inst",
}


def launch(number: int, kernel: str) -> list[str]:
    return [str(number), "4242", "python3.12", "127.0.0.1", kernel, "1", "7", "(256, 1, 1)", "(2,048, 1, 1)"]


def raw(*launches: tuple[str, list[str]], metrics: dict[str, str] | None = None) -> str:
    """The raw page: a line of names, one of units, one for each launch."""
    chosen = metrics or RAW
    rows = [[*LAUNCH, *chosen], ["" for _ in LAUNCH] + list(chosen.values())]
    rows += [[*launch(i, kernel), *values] for i, (kernel, values) in enumerate(launches)]
    return BEFORE + quoted(rows)


def details(*launches: tuple[str, list[tuple[str, str, str]]]) -> str:
    """The details page: a line for each metric, and for what rules say."""
    header = [*LAUNCH, "Device", "CC", "Section Name", "Metric Name", "Metric Unit", "Metric Value", "Rule Name"]
    header += ["Rule Type", "Rule Description"]
    rows = [header]
    for i, (kernel, metrics) in enumerate(launches):
        start = [*launch(i, kernel), "0", "9.0"]
        rows += [[*start, "Some Section", *metric, "", "", ""] for metric in metrics]
        rows.append([*start, "SpeedOfLight", "", "", "", "SOLBottleneck", "OPT", "Look at Memory, 20.5% is stalled."])
    return BEFORE + quoted(rows)


LIGHT_1 = ["410.5", "31.25", "88.5", "12.0", "128", "99.33", "1,024", "24.5", "25", "4.5", "4.0", "1.5", "1.0"]
LIGHT_2 = ["1,410.5", "33.25", "90.5", "14.0", "128", "99.33", "1,024", "25.5", "25", "6.5", "4.0", "1.5", "1.0"]
LIGHT_3 = ["420.5", "35.25", "92.5", "16.0", "128", "99.33", "1,024", "26.5", "25", "5.5", "4.0", "1.5", "1.0"]


class TestRaw:
    def test_medians(self) -> None:
        lines = raw((LIGHT, LIGHT_1), (LIGHT, LIGHT_2), (LIGHT, LIGHT_3)).splitlines(keepends=True)
        (row,) = summarize.summarize(summarize.read(lines))
        assert (row.kernel, row.launches) == ("up_down light", 3)
        # of three, one with a comma between thousands
        assert row.ms == pytest.approx(0.4205)
        assert (row.tensor, row.l2, row.dram) == (33.25, 90.5, 14.0)
        assert (row.registers, row.shared_bytes) == (128, pytest.approx(99330 + 1024))
        assert (row.achieved, row.theoretical) == (25.5, 25)
        # 5.5 + 1.5 + 1.0 of three states: those of warps not issued are counted already
        expected = {"long_scoreboard": 100 * 5.5 / 8, "barrier": 100 * 1.5 / 8, "selected": 100 / 8}
        assert row.stalls == pytest.approx(expected)
        assert list(row.stalls) == ["long_scoreboard", "barrier", "selected"]

    def test_order_is_that_of_the_launches(self) -> None:
        lines = raw((PACK, LIGHT_1), (LIGHT, LIGHT_1), (PACK, LIGHT_1)).splitlines(keepends=True)
        rows = summarize.summarize(summarize.read(lines))
        assert [(row.kernel, row.launches) for row in rows] == [("gate_pack", 2), ("up_down light", 1)]

    def test_what_is_missing_is_not_zero(self) -> None:
        metrics = {"gpu__time_duration.sum": "ms", "launch__registers_per_thread": "register/thread"}
        lines = raw((LIGHT, ["1.25", "n/a"]), (LIGHT, ["", ""]), metrics=metrics).splitlines(keepends=True)
        (row,) = summarize.summarize(summarize.read(lines))
        assert (row.ms, row.launches) == (1.25, 2)
        assert {row.registers, row.tensor, row.l2, row.dram, row.issue, row.shared_bytes, row.achieved} == {None}
        assert row.stalls == {}
        shown = [column.cell(row) for column in summarize.COLUMNS]
        assert shown == ["up_down light", "2", "1250.0", *["-"] * 9, "-/-"]

    @pytest.mark.parametrize(
        ("unit", "ms"), [("ns", 2e-6), ("nsecond", 2e-6), ("us", 2e-3), ("usecond", 2e-3), ("ms", 2), ("second", 2e3)]
    )
    def test_units_of_time(self, unit: str, ms: float) -> None:
        lines = raw((LIGHT, ["2"]), metrics={"gpu__time_duration.sum": unit}).splitlines(keepends=True)
        assert summarize.read(lines)[0].find("time") == pytest.approx(ms)

    def test_ranges_add_columns(self) -> None:
        name = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
        values = ["<0,twell:up_down:none:none>", "7.5"]
        lines = raw((LIGHT, values), metrics={name: "", "gpu__time_duration.sum": "us"}).splitlines(keepends=True)
        assert summarize.read(lines)[0].find("time") == pytest.approx(7.5e-3)

    @pytest.mark.parametrize(
        "text", ["", "==ERROR== No kernels were profiled.\n", "a,b\n1,2\n", '"ID","Name"\n"1","x"\n']
    )
    def test_what_is_no_export_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="expected the CSV of ncu"):
            summarize.read(text.splitlines(keepends=True))


class TestDetails:
    METRICS = (
        ("Duration", "msecond", "1,000.5"),
        ("L2 Cache Throughput", "%", "71.5"),
        ("DRAM Throughput", "%", "22.25"),
        ("Registers Per Thread", "register/thread", "168"),
        ("Static Shared Memory Per Block", "byte/block", "0"),
        ("Dynamic Shared Memory Per Block", "Kbyte/block", "213.0"),
        ("Driver Shared Memory Per Block", "Kbyte/block", "1.02"),
        ("Theoretical Occupancy", "%", "18.75"),
        ("Achieved Occupancy", "%", "18.6"),
        ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "%", "81.5"),
        ("Stall Long Scoreboard", "inst", "1.0"),
        ("Stall Wait", "inst", "3.0"),
        ("Cluster Size", "", "2"),
        ("Function Cache Configuration", "", "CachePreferNone"),
    )

    def test_the_same_columns(self) -> None:
        lines = details((PACK, list(self.METRICS)), (LIGHT, [("Duration", "us", "7")])).splitlines(keepends=True)
        pack, light = summarize.summarize(summarize.read(lines))
        assert pack.ms == pytest.approx(1000.5)
        assert (pack.tensor, pack.l2, pack.dram) == (81.5, 71.5, 22.25)
        assert (pack.registers, pack.shared_bytes) == (168, pytest.approx(214020))
        assert (pack.achieved, pack.theoretical) == (18.6, 18.75)
        assert pack.stalls == {"wait": 75, "long_scoreboard": 25}
        assert light.ms == pytest.approx(7e-3)

    def test_processes_have_launches_of_their_own(self) -> None:
        lines = details((PACK, [("Duration", "us", "7")])).splitlines(keepends=True)
        assert len(summarize.read([*lines, *(line.replace("4242", "4243") for line in lines[-2:])])) == 2


FIGURES: dict[str, Any] = {
    "workload": "topic29",
    "dtype": "bf16",
    "machine": "NVIDIA Something",
    "m": 256,
    "k": 64,
    "n": 512,
    "compression": 8,
    "nonzeros": 2560,
    "fired": 100,
    "spilled_tiles": 3,
    "union_rows": 120,
    "group_rows": 1800,
    "token_rows": 300,
    "ceilings": {"flops": 1e12, "memory": 1e12, "l2": 2e12},
}
PACKED = 256 * 2 * 32 * 4 + 3 * 512


class TestFloors:
    @pytest.mark.parametrize(
        ("op", "expected"),
        [
            ("gate_pack", summarize.Work(2 * 256 * 512 * 64, 2 * 256 * 64 + 2 * 512 * 64 + PACKED)),
            ("up_down", summarize.Work(0, PACKED + 4 * 256 * 64 + 4 * 100 * 64, 2 * 1800 * 128)),
            ("unpack", summarize.Work(0, PACKED + 2 * 256 * 512)),
            ("compact", summarize.Work(0, PACKED + 4 * 2560)),
            ("sampled_up", summarize.Work(2 * 128 * 64 * 120, 2 * 256 * 64 + 2 * 100 * 64 + 8 * 2560, 120 * 128)),
            ("rank", None),
            ("overflow", None),
        ],
    )
    def test_work(self, op: str, expected: summarize.Work | None) -> None:
        assert summarize.work(op, None, FIGURES) == expected

    def test_specs_tell_more(self) -> None:
        one, two = (summarize.work("gathered", specs.GatheredSpec("bfloat16", p, False), FIGURES) for p in (1, 2))
        assert one is not None
        assert two is not None
        assert (two.flop, two.gathered) == (2 * one.flop, 2 * one.gathered)
        plain = summarize.work("up_down", specs.UpDownSpec("bfloat16", 512, False, False), FIGURES)
        assert plain == summarize.Work(0, PACKED + 2 * 256 * 64 + 2 * 100 * 64, 1800 * 128)
        gated, plain = (
            summarize.work("weight_grad", specs.WeightGradSpec("bfloat16", g, False, False), FIGURES)
            for g in (True, False)
        )
        assert gated is not None
        assert plain is not None
        assert gated.flop == 3 * 2 * 64 * 64 * 300
        assert plain.flop == 2 * 2 * 64 * 64 * 300
        assert gated.gathered == plain.gathered == 300 * 2 * 128

    def test_every_kernel_with_work_has_a_floor(self) -> None:
        without = {spec.op for spec in specs.all_specs() if summarize.work(spec.op, spec, FIGURES) is None}
        assert without == {"rank", "overflow"}

    def test_the_longest_part_is_named(self) -> None:
        ceilings = {"flops": 1e12, "memory": 1e11, "l2": 1e13}
        assert summarize.Work(3e9, 2e8, 1e10).floor(ceilings) == (pytest.approx(3), "arithmetic")
        assert summarize.Work(1e9, 2e8, 1e10).floor(ceilings) == (pytest.approx(2), "memory")
        assert summarize.Work(1e9, 5e7, 1.5e10).floor(ceilings) == (pytest.approx(1.5), "L2")

    def test_kernels_of_an_operator_share_one(self) -> None:
        heavy = ["100.0", *LIGHT_1[1:]]
        lines = raw((LIGHT, LIGHT_1), (HEAVY, heavy), (PACK, LIGHT_1)).splitlines(keepends=True)
        rows = summarize.summarize(summarize.read(lines), FIGURES)
        by_kernel = {row.kernel: row for row in rows}
        light, pack = by_kernel["up_down light"], by_kernel["gate_pack"]
        assert by_kernel["up_down heavy"].floor_ms is None
        assert light.bound == "L2"
        assert light.floor_ms == pytest.approx(2 * 1800 * 128 / 2e12 * 1e3)
        assert light.floor_share == pytest.approx(light.floor_ms / (0.4105 + 0.1))
        assert pack.floor_share is not None

    def test_variants_that_look_alike_have_none(self) -> None:
        name = "kernel_cutlass_kernel_cute_kernelsgatheredGathered_object_at__{}_0"
        lines = raw((name.format("None"), LIGHT_1), (name.format("tensor"), LIGHT_1)).splitlines(keepends=True)
        assert [row.floor_ms for row in summarize.summarize(summarize.read(lines), FIGURES)] == [None, None]


class TestSummary:
    def test_table_and_json(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for name, text in (("a.csv", raw((LIGHT, LIGHT_1), (PACK, LIGHT_3))), ("a.json", json.dumps(FIGURES))):
            (tmp_path / name).write_text(text)
        files = [str(tmp_path / name) for name in ("a.csv", "a.json", "rows.json")]
        assert summarize.main([files[0], "--floor", files[1], "--json", files[2]]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split()[:3] == ["kernel", "launches", "us"]
        assert "long_scoreboard 64, barrier 21" in lines[1]
        assert "24/25" in lines[1]
        assert lines[-3:] == [
            "workload topic29, m 256, k 64, n 512, dtype bf16, compression 8: 10.0 non-zeros per token",
            "floors at 1 TFLOP/s, 1.00 TB/s of memory and 2.00 TB/s of L2",
            "NVIDIA Something",
        ]
        written = json.loads((tmp_path / "rows.json").read_text())
        assert written["machine"] == "NVIDIA Something"
        assert [row["kernel"] for row in written["rows"]] == ["up_down light", "gate_pack"]
        assert written["rows"][0]["floor_share"] > 0

    @pytest.mark.parametrize("text", [None, "nothing\n", raw()])
    def test_errors(self, text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "a.csv"
        if text is not None:
            path.write_text(text)
        assert summarize.main([str(path)]) == 2
        assert capsys.readouterr().err.startswith(f"summarize: error: {path}: ")


def test_the_measured_kernels_are_rows_of_the_table() -> None:
    found = json.loads((ROOT / "profiling" / "results" / "h200_ncu.json").read_text())
    rows = {row.kernel: row for row in (summarize.Row(**each) for each in found["rows"])}
    ceilings = found["figures"]["ceilings"]
    for name in ("gate_pack_bf16_c8", "sampled_up_bf16", "weight_grad_bf16"):
        op = name.split("_bf16")[0]
        needed = summarize.work(op, None, found["figures"])
        assert needed is not None
        assert rows[name].floor_ms == pytest.approx(needed.floor(ceilings)[0])
    assert all(row.ms is not None and row.stalls for row in rows.values())


TINY = ["--device", "cpu", "--m", "130", "--k", "64", "--n", "264", "--workload", "nnz=10,skew=1"]


class TestTarget:
    def test_every_operator_runs(self, capsys: pytest.CaptureFixture[str]) -> None:
        every = ",".join((*profile_target.OPS, *profile_target.KERNELS))
        assert profile_target.main([every, *TINY, "--calls", "1", "--warm-up", "1"]) == 0
        assert capsys.readouterr().out == (
            f"profile_target: 1 call of {every.replace(',', ', ')}: nnz=10,skew=1, 130 tokens\n"
        )

    @pytest.mark.parametrize("strategy", ["row", "dense", "auto"])
    def test_strategies(self, strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert profile_target.main(["ffn,sparse_ffn", *TINY, "--strategy", strategy]) == 0
        assert "3 calls of ffn, sparse_ffn" in capsys.readouterr().out

    def test_kernels_exist(self) -> None:
        assert set(profile_target.KERNELS) <= {spec.op for spec in specs.all_specs()}
        assert set(profile_target.KERNELS.values()) <= set(profile_target.OPS)

    def test_calls(self) -> None:
        """Warming up is not recorded; each call is made as often as asked for."""
        made: list[str] = []
        profile_target.record({"a": lambda: made.append("a"), "b": lambda: made.append("b")}, 2, on_gpu=False)
        assert made == ["a", "a", "b", "b"]

    def test_figures(self) -> None:
        problem = testing.integer_problem(150, 8, 300, density=0.02, biases="gate")
        active = problem.x.float() @ problem.w_gate.float().t() + problem.b_gate.float() > 0  # type: ignore[union-attr]
        found = profile_target.figures(problem, 8)
        assert (found["m"], found["k"], found["n"], found["compression"]) == (150, 8, 300, 8)
        assert found["nonzeros"] == sum(row.sum().item() for row in active)
        assert found["fired"] == sum(bool(column.any()) for column in active.t())
        assert found["union_rows"] == sum(int(active[s : s + 128].any(0).sum()) for s in (0, 128))
        assert found["group_rows"] == sum(int(active[s : s + 8].any(0).sum()) for s in range(0, 150, 8))
        order = sorted(range(300), key=lambda neuron: -int(active[:, neuron].sum()))
        tiles = [order[s : s + 64] for s in range(0, 300, 64)]
        assert found["token_rows"] == sum(int(active[:, tile].any(1).sum()) for tile in tiles)

    def test_spilled_tiles_are_those_of_the_format(self) -> None:
        problem = testing.integer_problem(70, 8, 304, density=0.3)
        _, _, stats = ops.gate_pack(problem.x, problem.w_gate, None, 8)
        assert profile_target.figures(problem, 8)["spilled_tiles"] == int(stats[:, :, 1].sum()) > 0

    def test_figures_are_written(self, tmp_path: Path) -> None:
        path = tmp_path / "figures.json"
        assert profile_target.main(["weight_grad", *TINY, "--figures", str(path)]) == 0
        written = json.loads(path.read_text())
        assert set(written) == set(FIGURES)
        assert set(written["ceilings"]) == {"flops", "memory", "l2"}
        assert summarize.work("weight_grad", None, written) is not None

    def test_trace(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "trace.json"
        assert profile_target.main(["up_down", *TINY, "--trace", str(path), "--calls", "2"]) == 0
        events = json.loads(path.read_text())["traceEvents"]
        (first, second) = [event for event in events if event.get("name") == "twell::up_down"]
        assert first["args"]["Input Dims"][0] == [130, 64]
        assert first["ts"] < second["ts"]
        assert "twell::up_down" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["ffn,nonsense"], "unknown operator nonsense; expected some of gate_pack, "),
            (["decode,ffn"], "decode beside other operators needs --m"),
            (["ffn", "--figures", "a", "--trace", "b"], "--figures records nothing: leave --trace out"),
            (["ffn", "--m", "0"], "expected an integer of at least 1, got 0"),
        ],
    )
    def test_refused(self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as error:
            profile_target.main([*arguments, "--device", "cpu"])
        assert error.value.code == 2
        assert message in capsys.readouterr().err

    @pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
    def test_needs_a_gpu(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            profile_target.main(["ffn"])
        assert "needs a CUDA device; --device cpu tries it out" in capsys.readouterr().err

    def test_unknown_workload(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert profile_target.main(["ffn", "--device", "cpu", "--workload", "nonsense"]) == 2
        assert "profile_target: error: --workload takes" in capsys.readouterr().err

    def test_few_tokens_by_default(self) -> None:
        assert profile_target.parse(["decode", "--device", "cpu"]).m == 16
        assert profile_target.parse(["ffn", "--device", "cpu"]).m == 16384


# Scripts

TOOL = """#!/usr/bin/env bash
# stands for a profiler: notes its arguments, runs the program, leaves a report
echo "{name} $*" >>{log}
output='' program=()
while [ $# -gt 0 ]; do
  case $1 in
    --import) cat {csv}; exit ;;
    stats) exit ;;
    --export | --output) output=$2; shift ;;
    */python* | true) program=("$@"); break ;;
  esac
  shift
done
"${{program[@]}}"
{leave}
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for the path, with the shell's own tools and no profiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "dirname", "sed", "mkdir", "rm", "cat", "env", "true", "false"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def stand_in(tools: Path, name: str, *, report: str, csv: str = "") -> Path:
    """Put a profiler into the path; the file that it notes its calls in."""
    log, canned = tools / f"{name}.log", tools / f"{name}.csv"
    canned.write_text(csv)
    leave = f'echo report >"$output{report}"' if report else ""
    tool = tools / name
    tool.write_text(TOOL.format(name=name, log=log, csv=canned, leave=leave))
    tool.chmod(0o755)
    return log


def script(
    name: str, *arguments: str, tools: Path, cwd: Path, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": str(tools), "PYTHON": python, "OMP_NUM_THREADS": "1"}
    environment.pop("TWELL_NVTX", None)
    command = [str(ROOT / "profiling" / "nsight" / name), *arguments]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120)


SCRIPTS = [("ncu.sh", "ncu"), ("nsys.sh", "nsys")]


class TestScripts:
    @pytest.mark.parametrize(("name", "tool"), SCRIPTS)
    def test_usage(self, name: str, tool: str, tools: Path, tmp_path: Path) -> None:
        asked = script(name, "--help", tools=tools, cwd=tmp_path)
        bare = script(name, tools=tools, cwd=tmp_path)
        assert (asked.returncode, bare.returncode) == (0, 2)
        assert asked.stdout == bare.stderr
        assert asked.stdout.startswith(f"usage: profiling/nsight/{name} OP[,OP...]")
        assert "set -euo" not in asked.stdout

    @pytest.mark.parametrize(("name", "tool"), SCRIPTS)
    def test_missing_tool(self, name: str, tool: str, tools: Path, tmp_path: Path) -> None:
        if Path("/usr/local/cuda/bin", tool).exists():
            pytest.skip(f"has {tool}")
        done = script(name, "ffn", tools=tools, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(f"{name}: no {tool} in the path")
        assert list(tmp_path.iterdir()) == [tools]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--out"], "--out needs a value"),
            (["--dry-run"], "expected an operator, got none"),
            (
                ["ffn", "--kernel", "GatePack*"],
                "--kernel takes the name of a kernel or regex:EXPRESSION, got GatePack*",
            ),
            (["ffn", "--launch-count", "x"], "--launch-skip and --launch-count take numbers, got x"),
        ],
    )
    def test_refused(self, arguments: list[str], message: str, tools: Path, tmp_path: Path) -> None:
        done = script("ncu.sh", *arguments, tools=tools, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(f"ncu.sh: {message}")

    def test_kernels_are_told_apart(self, tools: Path, tmp_path: Path) -> None:
        names = {f"twell_{spec.symbol}_0": spec.op for spec in specs.all_specs()}
        names |= {name: op for name, (op, _) in COMPILED.items()}
        for op in ("", *set(names.values())):
            chosen = ["--kernel", op] if op else []
            done = script("ncu.sh", "ffn", "--dry-run", "--no-floor", *chosen, tools=tools, cwd=tmp_path)
            (expression,) = re.findall(r"--kernel-name regex:(\S+)", done.stdout.replace("\\", ""))
            assert {n for n in names if re.search(expression, n)} == {n for n in names if op in ("", names[n])}
            assert not re.search(expression, "nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_TNT")

    def test_ncu(self, tools: Path, tmp_path: Path) -> None:
        log = stand_in(tools, "ncu", report=".ncu-rep", csv=raw((LIGHT, LIGHT_1)))
        arguments = ["up_down", *TINY, "--launch-skip", "1", "--launch-count", "2", "--kernel", "up_down"]
        done = script("ncu.sh", *arguments, "-o", "out/a", "--", "--verbose", tools=tools, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        first, second = log.read_text().splitlines()
        for option in (
            *(
                "--profile-from-start off",
                "--clock-control none",
                "--cache-control all",
                "--import-source yes",
                "--nvtx",
            ),
            *("--section SpeedOfLight", "--section MemoryWorkloadAnalysis", "--section SchedulerStats"),
            *("--section WarpStateStats", "--section LaunchStats", "--section Occupancy"),
            *("--launch-skip 1", "--launch-count 2", "--force-overwrite --export out/a --verbose"),
        ):
            assert option in first
        assert first.endswith(f"{ROOT}/profiling/nsight/profile_target.py up_down {' '.join(TINY)}")
        assert second == "ncu --import out/a.ncu-rep --csv --page raw"
        assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["a.csv", "a.json", "a.ncu-rep"]
        # figures and calls before the table, the workload after it
        lines = done.stdout.splitlines()
        assert lines[0] == "profile_target: wrote out/a.json"
        assert lines[1].startswith("profile_target: 3 calls of up_down")
        assert lines[3].startswith("up_down light")
        assert lines[4].startswith("workload nnz=10,skew=1, m 130")

    def test_a_kernel_stands_for_its_operator(self, tools: Path, tmp_path: Path) -> None:
        done = script("ncu.sh", "weight_grad", "--dry-run", "--floor", "f.json", tools=tools, cwd=tmp_path)
        profiled, _, table = done.stdout.splitlines()
        assert "cute_kernelsweight_grad" in profiled
        assert profiled.rstrip().endswith("profile_target.py weight_grad")
        assert table.rstrip().endswith("build/profiles/ncu-weight_grad.csv --floor f.json")

    def test_nothing_measured(self, tools: Path, tmp_path: Path) -> None:
        stand_in(tools, "ncu", report="")
        done = script("ncu.sh", "unpack", "--no-floor", tools=tools, cwd=tmp_path, python="true")
        assert done.returncode == 2
        assert done.stderr.startswith("ncu.sh: nothing was measured: no kernel matched regex:cute_kernels|^twell_")

    def test_a_failing_program_fails(self, tools: Path, tmp_path: Path) -> None:
        stand_in(tools, "ncu", report=".ncu-rep")
        done = script("ncu.sh", "unpack", tools=tools, cwd=tmp_path, python="false")
        assert done.returncode == 1
        assert not list(tmp_path.glob("build/profiles/*"))

    def test_nsys(self, tools: Path, tmp_path: Path) -> None:
        log = stand_in(tools, "nsys", report=".nsys-rep")
        done = script("nsys.sh", "unpack", *TINY, "-o", "out/a", tools=tools, cwd=tmp_path, python="true")
        assert done.returncode == 0, done.stderr
        profiled, *tables = log.read_text().splitlines()
        for option in ("--trace=cuda,nvtx", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"):
            assert option in profiled
        assert [line.split()[1] for line in tables] == ["stats", "stats"]
        assert all(line.endswith("out/a.nsys-rep") for line in tables)
        assert tables[1].split()[-3:-1] == ["--output", "out/a"]


# Dumps

SUFFIXES = ("ptx", "cubin", "txt", "sass")


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is written of one small kernel. A process of its own: pytest takes what the compiler prints."""
    pytest.importorskip("cutlass")
    folder = tmp_path_factory.mktemp("dump") / "made"
    command = [sys.executable, "profiling/dump.py", "unpack_bf16", "-o", str(folder)]
    paths = os.pathsep.join((str(ROOT / "python"), str(ROOT)))
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        str(path) for path in (folder / f"unpack_bf16.{s}" for s in SUFFIXES) if path.exists()
    ]
    return folder


class TestDump:
    def test_files(self, dumped: Path) -> None:
        assert not list(ROOT.glob("*.ptx"))
        ptx = (dumped / "unpack_bf16.ptx").read_text()
        (kernel,) = re.findall(r"\.entry (\w+)", ptx)
        assert ".target sm_90a" in ptx
        assert summarize.parse_name(kernel).op == "unpack"
        assert (dumped / "unpack_bf16.cubin").read_bytes()[:4] == b"\x7fELF"
        found = re.fullmatch(rf"{kernel}: (\d+) registers, 0 bytes spilled\n", (dumped / "unpack_bf16.txt").read_text())
        assert found is not None
        assert int(found[1]) < 64

    def test_sass(self, dumped: Path) -> None:
        if not list(dump.disassemblers()):
            pytest.skip("no disassembler")
        sass = (dumped / "unpack_bf16.sass").read_text()
        assert "LDG" in sass
        assert "EXIT" in sass

    def test_without_disassembler(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        asked: list[str] = []

        def compile_spec(spec: specs.Spec, options: str) -> SimpleNamespace:
            asked.append(options)
            return SimpleNamespace(__ptx__="// ptx", __cubin__=b"cubin")

        kernel = SimpleNamespace(kernel="k", registers=128, spill_bytes=4, wgmma=("serialised",))
        compiler = SimpleNamespace(compile_spec=compile_spec, compile_and_report=lambda spec: (None, [kernel]))
        monkeypatch.setattr(dump, "kernel_module", {"compile": compiler}.__getitem__)
        monkeypatch.setattr(dump, "disassemblers", lambda: iter(()))
        assert dump.main(["unpack_bf16", "rank", "-o", str(tmp_path), "--line-info"]) == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            f"{symbol}.{suffix}" for symbol in ("unpack_bf16", "rank") for suffix in SUFFIXES[:3]
        )
        assert (tmp_path / "rank.txt").read_text() == "k: 128 registers, 4 bytes spilled\nserialised\n"
        assert asked == ["--keep-ptx --keep-cubin --generate-line-info"] * 2
        assert capsys.readouterr().err.count("no SASS") == 1

    def test_a_tool_that_fails_is_passed_over(
        self, dumped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        commands = [["false"], ["echo", "SASS of"]]
        monkeypatch.setattr(dump, "disassemblers", lambda: iter(commands))
        cubin = dumped / "unpack_bf16.cubin"
        assert dump.disassemble(cubin, line_info=False) == f"SASS of {cubin}\n"
        assert "dump: false failed" in capsys.readouterr().err

    def test_unknown_symbol(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as error:
            dump.main(["unpack_bf16", "nonsense", "-o", str(tmp_path)])
        assert error.value.code == 2
        assert "no kernel is called 'nonsense'" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_without_compiler(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "cutlass", None)
        for name in [name for name in sys.modules if name.endswith("cute_kernels.compile")]:
            monkeypatch.delitem(sys.modules, name)
        assert dump.main(["unpack_bf16", "-o", str(tmp_path)]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("dump: error: no compiler of kernels (")
        assert printed.endswith("; install it with `pip install twell[jit]`\n")
