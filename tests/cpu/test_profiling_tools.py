"""Profiling without a GPU: tables of ncu's CSV, the profiled program, its scripts, dumps, checks of results."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from profiling import paper_code, parallel
from profiling.bench.layers import module_of
from profiling.nsight import profile_target, summarize
from twell import testing
from twell._runtime import specs

ROOT = Path(__file__).resolve().parents[2]

DENSE_AND_SPARSE = (("dense", 3.0), ("sparse", 2.0))

# Names of compiled kernels, without the types that follow.
COMPILED = {
    "kernel_cutlass_kernel_cute_kernelsgate_packGatePack_object_at__CopyAtom_ThrID10_0": ("gate_pack", "gate_pack"),
    "kernel_cutlass_kernel_twellcute_kernelsgate_packGatePack_object_at__CopyAtom_0": ("gate_pack", "gate_pack"),
    "kernel_cutlass_kernel_cute_kernelsgate_pack_fewGatePackFew_object_at__C_0": (*("gate_pack_few", "gate_pack_few"),),
    "kernel_cutlass_kernel_cute_kernelsup_down_tokenUpDownToken_object_at__t_0": (*("up_down_token", "up_down_token"),),
    "kernel_cutlass_compact_cute_kernelscompactCompact_object_at__tensorptri32_1": ("compact", "compact"),
    "kernel_cutlass_locate_cute_kernelscompactCompact_object_at__tensorptri32_0": ("compact", "compact locate"),
    "kernel_cutlass_kernel_cute_kernelsregluRegluBackward_object_at__tensor_0": ("reglu", "reglu backward"),
    "kernel_cutlass_kernel_cute_kernelsoverflowToken_object_at__tensorptrbf16_0": ("overflow", "overflow token"),
    "kernel_cutlass_kernel_cute_kernelsweight_gradWeightGrad_object_at__tensor_0": ("weight_grad", "weight_grad"),
    "kernel_cutlass_kernel_cute_kernelsrankRank_object_at__tensorptri32_0": ("rank", "rank"),
}


class TestNames:
    def test_of_the_compiler(self) -> None:
        for name, (op, label) in COMPILED.items():
            assert summarize.parse_name(name) == summarize.Name(op, None, label)

    def test_given(self) -> None:
        for spec in specs.all_specs():
            assert summarize.parse_name(f"twell_{spec.symbol}_0") == (summarize.Name(spec.op, spec, spec.symbol))


def quoted(rows: list[list[str]]) -> str:
    """CSV as ncu prints it: every cell in quotes."""
    return "".join(",".join('"' + cell.replace('"', '""') + '"' for cell in row) + "\n" for row in rows)


BEFORE = """==PROF== Connected to process 4242 (/usr/bin/python3.12)
profile_target: 3 calls of up_down: topic29, 16384 tokens
==PROF== Disconnected from process 4242
"""
LAUNCH = "ID,Process ID,Process Name,Host Name,Kernel Name,Context,Stream,Block Size,Grid Size".split(",")
ROW, PACK = (
    "kernel_cutlass_kernel_cute_kernelsup_down_tokenUpDownToken_object_at__tensorptrbf16_0",
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


def raw(*launches: tuple[str, list[str]]) -> str:
    """The raw page: a line of names, one of units, one for each launch."""
    rows = [[*LAUNCH, *RAW], ["" for _ in LAUNCH] + list(RAW.values())]
    rows += [[*launch(i, kernel), *values] for i, (kernel, values) in enumerate(launches)]
    return BEFORE + quoted(rows)


ROW_1 = ["410.5", "31.25", "88.5", "12.0", "128", "99.33", "1,024", "24.5", "25", "4.5", "4.0", "1.5", "1.0"]
ROW_2 = ["1,410.5", "33.25", "90.5", "14.0", "128", "99.33", "1,024", "25.5", "25", "6.5", "4.0", "1.5", "1.0"]
ROW_3 = ["420.5", "35.25", "92.5", "16.0", "128", "99.33", "1,024", "26.5", "25", "5.5", "4.0", "1.5", "1.0"]


class TestRaw:
    def test_medians(self) -> None:
        lines = raw((ROW, ROW_1), (ROW, ROW_2), (ROW, ROW_3)).splitlines(keepends=True)
        (row,) = summarize.summarize(summarize.read(lines))
        assert (row.kernel, row.launches) == ("up_down_token", 3)
        # the median of three, one with a thousands separator
        assert row.ms == pytest.approx(0.4205)
        assert (row.tensor, row.l2, row.dram) == (33.25, 90.5, 14.0)
        assert (row.registers, row.shared_bytes) == (128, pytest.approx(99330 + 1024))
        assert (row.achieved, row.theoretical) == (25.5, 25)
        # 5.5 + 1.5 + 1.0 of three states; warps not issued are already counted
        expected = {"long_scoreboard": 100 * 5.5 / 8, "barrier": 100 * 1.5 / 8, "selected": 100 / 8}
        assert row.stalls == pytest.approx(expected)
        assert list(row.stalls) == ["long_scoreboard", "barrier", "selected"]


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
    "token_rows": 300,
    "ceilings": {"flops": 1e12, "memory": 1e12, "l2": 2e12},
}
PACKED = 256 * 2 * 32 * 4 + 3 * 512


class TestFloors:
    @pytest.mark.parametrize(
        ("op", "expected"),
        [
            ("gate_pack", summarize.Work(2 * 256 * 512 * 64, 2 * 256 * 64 + 2 * 512 * 64 + PACKED)),
            ("up_down_token", summarize.Work(0, PACKED + 4 * 256 * 64 + 4 * 100 * 64, 2 * 2560 * 128)),
            ("unpack", summarize.Work(0, PACKED + 2 * 256 * 512)),
            ("compact", summarize.Work(0, PACKED + 4 * 2560)),
            ("sampled_up", summarize.Work(2 * 128 * 64 * 120, 2 * 256 * 64 + 2 * 100 * 64 + 8 * 2560, 120 * 128)),
            ("rank", None),
            ("overflow", None),
        ],
    )
    def test_work(self, op: str, expected: summarize.Work | None) -> None:
        assert summarize.work(op, None, FIGURES) == expected

    def test_every_kernel_with_work_has_a_floor(self) -> None:
        without = {spec.op for spec in specs.all_specs() if summarize.work(spec.op, spec, FIGURES) is None}
        # profiling.bench gives floors of layers of experts
        assert {op for op in without if not op.startswith("expert_")} == {"rank", "overflow"}


class TestSummary:
    def test_table_and_json(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for name, text in (("a.csv", raw((ROW, ROW_1), (PACK, ROW_3))), ("a.json", json.dumps(FIGURES))):
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
        assert [row["kernel"] for row in written["rows"]] == ["up_down_token", "gate_pack"]
        assert written["rows"][0]["floor_share"] > 0

    @pytest.mark.parametrize("text", [None, "nothing\n", raw()])
    def test_errors(self, text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "a.csv"
        if text is not None:
            path.write_text(text)
        assert summarize.main([str(path)]) == 2
        assert capsys.readouterr().err.startswith(f"summarize: error: {path}: ")


TINY = ["--device", "cpu", "--m", "130", "--k", "64", "--n", "264", "--workload", "nnz=10,skew=1"]


class TestTarget:
    def test_every_operator_runs(self, capsys: pytest.CaptureFixture[str]) -> None:
        every = ",".join((*profile_target.OPS, *profile_target.KERNELS))
        assert profile_target.main([every, *TINY, "--calls", "1", "--warm-up", "1"]) == 0
        assert capsys.readouterr().out == (
            f"profile_target: 1 call of {every.replace(',', ', ')}: nnz=10,skew=1, 130 tokens\n"
        )

    def test_figures(self) -> None:
        problem = testing.integer_problem(150, 8, 300, density=0.02, biases="gate")
        active = problem.x.float() @ problem.w_gate.float().t() + problem.b_gate.float() > 0  # type: ignore[union-attr]
        found = profile_target.figures(problem, 8)
        assert (found["m"], found["k"], found["n"], found["compression"]) == (150, 8, 300, 8)
        assert found["nonzeros"] == sum(row.sum().item() for row in active)
        assert found["fired"] == sum(bool(column.any()) for column in active.t())
        assert found["union_rows"] == sum(int(active[s : s + 128].any(0).sum()) for s in (0, 128))
        order = sorted(range(300), key=lambda neuron: -int(active[:, neuron].sum()))
        tiles = [order[s : s + 64] for s in range(0, 300, 64)]
        assert found["token_rows"] == sum(int(active[:, tile].any(1).sum()) for tile in tiles)

    def test_figures_are_written(self, tmp_path: Path) -> None:
        path = tmp_path / "figures.json"
        assert profile_target.main(["weight_grad", *TINY, "--figures", str(path)]) == 0
        written = json.loads(path.read_text())
        assert set(written) == set(FIGURES)
        assert summarize.work("weight_grad", None, written) is not None

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["ffn,nonsense"], "unknown operator nonsense; expected some of gate_pack, "),
            (["ffn", "--figures", "a", "--trace", "b"], "--figures records nothing: leave --trace out"),
            (["ffn", "--m", "0"], "expected an integer of at least 1, got 0"),
        ],
    )
    def test_refused(self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as error:
            profile_target.main([*arguments, "--device", "cpu"])
        assert error.value.code == 2
        assert message in capsys.readouterr().err


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
    """A folder for PATH, with the shell's own tools and no profiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "dirname", "sed", "mkdir", "rm", "cat", "env", "true", "false"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def stand_in(tools: Path, name: str, *, report: str, csv: str = "") -> Path:
    """Put a profiler into PATH; return the file in which it logs its calls."""
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
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=600)


class TestScripts:
    def test_refused(self, tools: Path, tmp_path: Path) -> None:
        done = script("ncu.sh", "ffn", "--kernel", "GatePack*", tools=tools, cwd=tmp_path)
        assert done.returncode == 2
        said = "ncu.sh: --kernel takes the name of a kernel or regex:EXPRESSION, got GatePack*"
        assert done.stderr.startswith(said)
        # no kernel matched
        stand_in(tools, "ncu", report="")
        done = script("ncu.sh", "unpack", "--no-floor", tools=tools, cwd=tmp_path, python="true")
        assert done.returncode == 2
        assert done.stderr.startswith("ncu.sh: nothing was measured: no kernel matched regex:cute_kernels|^twell_")

    @pytest.mark.nightly
    def test_ncu(self, tools: Path, tmp_path: Path) -> None:
        log = stand_in(tools, "ncu", report=".ncu-rep", csv=raw((ROW, ROW_1)))
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
        assert lines[3].startswith("up_down_token")
        assert lines[4].startswith("workload nnz=10,skew=1, m 130")

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


@pytest.mark.parametrize("training", [False, True])
def test_calls_beside_the_papers_code_are_of_one_layer(training: bool) -> None:
    problem = testing.integer_problem(16, 64, 264)
    dy = torch.ones_like(problem.x) if training else None
    calls = (
        paper_code.call_of_module(module_of(problem, "union"), dy),
        paper_code.call_of(testing.dense_output, problem, dy),
    )
    ours, dense = (call(problem.x) for call in calls)
    assert ours.keys() == dense.keys() == ({"x", "w_gate", "w_up", "w_down"} if training else {"y"})
    for name in dense:
        # integers are exact, but dense PyTorch adds two rounded products to the gradient of x
        assert dense[name].any()
        torch.testing.assert_close(ours[name], dense[name], rtol=0.01 * (name == "x"), atol=0)


def test_the_papers_code_is_wrong_above_twice_denses_error() -> None:
    problem = testing.make("topic29", 64, 64, 264, device="cpu")
    y, row = testing.dense_output(problem), paper_code.Row("topic29", "forward", 64, 29.0)
    assert paper_code.check(row, "paper", problem, None, {"y": y}) == ""
    assert paper_code.check(row, "paper", problem, None, {"y": y * 1.02}).startswith("y: error ")
    assert row.errors["paper"] == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("loss", "norm", "red"), [(2.01, 1.04, ""), (2.03, 1.0, "loss"), (2.0, 1.06, "norm"), (2.0, math.nan, "norm")]
)
def test_a_step_of_several_gpus_with_another_loss_or_norm_is_red(loss: float, norm: float, red: str) -> None:
    dense, sparse = rows = [parallel.Row("ddp", f"{kind} eager", 2, 64, ms=ms) for kind, ms in DENSE_AND_SPARSE]
    dense.loss, dense.norm, sparse.loss, sparse.norm = 2.0, 1.0, loss, norm
    parallel.compare(rows)
    assert sparse.red.startswith(red)
    assert bool(sparse.red) == bool(red)
    assert (dense.speedup, sparse.speedup) == (1.0, None if red else 1.5)
