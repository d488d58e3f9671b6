"""Kernels compile within their registers and shared memory: one of each for Hopper, nightly every one that ships."""

import subprocess
import sys
from pathlib import Path

import pytest
from cubin import resources

from cute_kernels import catalog, feasible, specs
from cute_kernels.all_gpus import quantize_gate
from cute_kernels.compile import parse_remarks
from cute_kernels.specs import Spec
from tests.conftest import compiled_first

SHIPPED = [
    pytest.param(arch, spec, id=f"{arch}-{spec.symbol}", marks=[pytest.mark.nightly] * later)
    for arch in specs.ARCHITECTURES
    for spec in catalog.of_architecture(arch)
    for later in [arch != "sm_90a" or spec.symbol not in compiled_first()]
]


# threads of a CTA, and CTAs that must fit on an SM; those of the portable family that differ are below
OCCUPANCY = {
    "gate_pack": (384, 1),
    "gate_screen": (384, 1),
    "list_candidates": (256, 4),
    "quantize_tokens": (256, 3),
    "sampled_gate": (384, 1),
    "pack": (256, 5),
    "top_k": (1024, 1),
    "window": (256, 3),
    "unpack": (256, 8),
    "reglu": (256, 5),
    "compact": (1024, 1),
    "decode": (384, 1),
    "sampled_up": (384, 1),
    "sampled_grad": (384, 1),
    "gathered": (384, 1),
    "rank": (512, 2),
    "scatter": (256, 8),
    "matrix_transpose": (256, 4),
    "transpose": (1024, 1),
    "weight_grad": (384, 1),
    "expert_pairs": (256, 4),
    "expert_pack": (288, 2),
    "expert_union": (256, 2),
    "expert_gathered": (384, 2),
    "expert_sum": (256, 4),
}


PORTABLE_OCCUPANCY = {"compact": (1024, 1), "transpose": (1024, 1)}
# of the kernels of every family where they were not measured: half of the warps that fit on an SM of 12.0
ELSEWHERE = (256, 3)


def on_main_loop(spec: Spec) -> bool:
    """Whether a kernel is of the portable family, or has its main loop everywhere."""
    return isinstance(spec, specs.OverflowSpec) or getattr(spec, "family", specs.SM90) == specs.PORTABLE


def register_budget(spec: Spec, kernel: str, arch: str) -> int:
    """Return the registers that a thread may use so that the intended number of CTAs fits on an SM."""
    if isinstance(spec, specs.UpDownTokenSpec):
        return feasible.registers_per_thread(256, spec.ctas_per_sm)
    if on_main_loop(spec):
        return feasible.registers_per_thread(*PORTABLE_OCCUPANCY.get(spec.op, (256, 1)))
    if not hasattr(spec, "family") and arch != "sm_90a":
        return feasible.registers_per_thread(*ELSEWHERE)
    if isinstance(spec, specs.QuantizeGateSpec):
        whole, shorter, ctas = quantize_gate.WARPS[spec.k_max // quantize_gate.COLUMNS]
        return feasible.registers_per_thread(32 * (shorter if kernel.endswith("_1") else whole), ctas)
    if isinstance(spec, specs.ExpertGatheredSpec) and spec.dtype == specs.E4M3:
        return feasible.registers_per_thread(384, 1)
    return feasible.registers_per_thread(*OCCUPANCY[spec.op])


def local_budget(spec: Spec, kernel: str) -> int:
    """Return the bytes of local memory of a thread: none, except for a few spilled counters outside the hot loops."""
    if on_main_loop(spec):
        # an over-full pass has the registers of its main loop in its epilogue, too
        return 88 if isinstance(spec, specs.OverflowSpec) else 80
    if isinstance(spec, specs.QuantizeGateSpec):
        # 16 warps share an SM: that was faster than 12 with more registers
        return 32 if spec.k_max >= 4096 and kernel.endswith("_0") else 0
    if isinstance(spec, specs.GatheredSpec) and spec.dtype == specs.E4M3 and kernel.endswith("_0"):
        # the one that flushes sums
        return 8
    if isinstance(spec, specs.DecodeSpec) and spec.tokens == 32:
        # counters and addresses, of 128 sums a thread
        return 176
    return 0


@pytest.mark.parametrize(("arch", "spec"), SHIPPED)
def test_compiles_within_budget(arch: str, spec: Spec, root: Path, request: pytest.FixtureRequest) -> None:
    """Each kernel checks its shared memory as it is traced: 99 KB in the portable family, and 227 on sm_90a."""
    request.getfixturevalue("wheel" if arch == "sm_90a" and spec.symbol in compiled_first() else "whole_wheel")
    folder = root / "build" / "wheel" / ("" if arch == "sm_90a" else arch) / "objects"
    for name, taken in resources((folder / f"{spec.symbol}.o").read_bytes()).items():
        assert name.startswith(f"twell_{spec.symbol}")
        assert 0 < taken.registers <= register_budget(spec, name, arch), name
        assert taken.local_bytes <= local_budget(spec, name), name


# of each kernel with WGMMA a symbol with most of its code
WGMMA = (
    *("gate_pack_bf16_t144", "expert_pack_bf16_m64", "sampled_up_bf16_training"),
    *("gate_screen_bf16", "sampled_gate_bf16"),
    *("gathered_bf16_2", "sampled_grad_bf16", "weight_grad_bf16"),
)


@pytest.mark.nightly
def test_no_wgmma_is_serialised(root: Path) -> None:
    command = [sys.executable, "-m", "cute_kernels", "report", *WGMMA]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # warnings would stand below their kernel
    assert {line.split()[0] for line in done.stdout.splitlines()[1:]} == set(WGMMA)


def test_resources_of_a_file_without_kernels_are_refused() -> None:
    with pytest.raises(ValueError, match="expected an object file with a cubin, got none"):
        resources(b"\x7fELF" + bytes(60))


# What the compiler printed for a kernel whose wait was removed and for one that spilled, with shorter names; the second
# form is wrapped, and repeats what it says for every place in the source.
SERIALISED = """\x1b[96mremark[ptxas info]:\x1b[0m ptxas output: ptxas info    : (C7514) Potential Performance Loss: \
wgmma.mma_async instructions are serialized due to non wgmma instructions reading accumulator registers of a wgmma \
between start and end of the pipeline stage in the function 'kernel_0' in line 0
ptxas info    : (C7517) wgmma.wait_group is injected in around line 2467 by compiler to allow use of registers defined \
by GMMA in function 'kernel_0'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel_0' for 'sm_90a'
ptxas info    : Function properties for kernel_0
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
"""
SPILLED = """\x1b[96mremark[ptxas]:\x1b[0m ptxas detected register spills
  \x1b[96mremark:\x1b[0m Spilled values are placed in local memory. ptxas reports spill usage at kernel granularity.

          ptxas output:
          ptxas info    : 0 bytes gmem
          ptxas info    : Compiling entry function
          'heavy_1'
          for 'sm_90a'
          ptxas info    : Function properties for
          heavy_1
          ptxas         .     296 bytes stack frame, 400 bytes spill
          stores, 404 bytes spill loads
          ptxas info    : Used 96 registers, used 1 barriers, 296 bytes cumulative stack size
          ptxas info    : Compiling entry function 'light_0' for 'sm_90a'
          ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
          ptxas info    : Used 64 registers, used 1 barriers
"""


def test_reports_have_serialised_wgmma_and_spills() -> None:
    first, heavy, light = parse_remarks("name", SERIALISED + SPILLED + SPILLED)
    serialised, injected = first.wgmma
    assert serialised.startswith("(C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized")
    assert injected.startswith("(C7517) wgmma.wait_group is injected")
    found = [(each.kernel, each.registers, each.spill_bytes) for each in (first, heavy, light)]
    assert found == [("kernel_0", 168, 0), ("heavy_1", 96, 804), ("light_0", 64, 0)]
    with pytest.raises(RuntimeError, match="unknown form of ptxas report"):
        parse_remarks("name", SPILLED.replace("registers", "regs"))


def test_object_exports_the_symbol(root: Path, tmp_path: Path) -> None:
    """The compiler would take -d for an option of its own, and end the process."""
    command = [sys.executable, "-m", "cute_kernels", "compile", "unpack_bf16", "--arch", "sm_80", "-d", str(tmp_path)]
    done = subprocess.run(
        [*command, "--depfile", str(tmp_path / "x.d")], cwd=root, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert b"\0__tvm_ffi_unpack_bf16\0" in (tmp_path / "unpack_bf16.o").read_bytes()
    target, _, sources = (tmp_path / "x.d").read_text().partition(": ")
    assert target == str(tmp_path / "unpack_bf16.o")
    assert {str(root / "cute_kernels" / name) for name in ("all_gpus/unpack.py", "geometry.py", "compile.py")} <= set(
        sources.split()
    )
    assert not any("up_down" in source for source in sources.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["unpack_bf16.o", "x.d"]
