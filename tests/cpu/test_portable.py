"""The portable family compiles without a GPU, within 255 registers and 99 KB of shared memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cute_kernels import catalog, feasible
from twell import tuning
from twell._runtime import geometry, specs
from twell.ops import hybrid

PORTABLE = [arch for arch, family in specs.ARCHITECTURES.items() if family == specs.PORTABLE]

# of each kernel a symbol with most of its code; their shared memory is checked as they compile
KERNELS = {
    "gate_pack_portable_bf16_t128": 256,
    "gate_pack_few_portable_bf16_m64": 256,
    "up_down_portable_bf16_k2048": 512,
    "up_down_token_portable_bf16_k16384_x1": 256,
    "sampled_up_portable_bf16_training": 256,
    "sampled_grad_portable_fp16": 256,
    "overflow_portable_bf16_forward": 256,
    "overflow_portable_bf16_backward": 256,
    "reglu_bf16_backward": 256,
    "unpack_fp16": 256,
}


@pytest.mark.parametrize("arch", specs.ARCHITECTURES)
def test_every_architecture_has_its_family(arch: str) -> None:
    shipped = catalog.of_architecture(arch)
    assert {getattr(spec, "family", specs.ARCHITECTURES[arch]) for spec in shipped} == {specs.ARCHITECTURES[arch]}
    assert specs.UnpackSpec("bfloat16") in shipped


@pytest.mark.parametrize("arch", PORTABLE)
def test_compiles_within_budget(arch: str, root: Path) -> None:
    command = [sys.executable, "-m", "cute_kernels", "report", "--arch", arch, *KERNELS]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()[1:]]
    assert {symbol for symbol, *_ in lines} == set(KERNELS)
    for symbol, registers, spilled, *_ in lines:
        assert int(registers) <= feasible.registers_per_thread(KERNELS[symbol]), symbol
        # a few values outside the hot loops
        assert int(spilled) <= 80, symbol


@pytest.mark.parametrize(("m", "tokens"), [(1, 64), (64, 64), (65, 128), (16384, 128)])
def test_tiles_of_the_gate_gemm(m: int, tokens: int) -> None:
    """Up to 64 tokens have a kernel of their own, whose bits differ."""
    spec = tuning.gate_pack(torch.bfloat16, m, 5632, 66, True, specs.PORTABLE)
    assert spec == specs.GatePackSpec("bfloat16", tokens, family=specs.PORTABLE)
    if m <= 64:
        spec = specs.GatePackFewSpec("bfloat16", {1: 8, 64: 64}[m], family=specs.PORTABLE)
    assert tuning.gate_pack(torch.bfloat16, m, 5632, 66, False, specs.PORTABLE) == spec


@pytest.mark.parametrize(("k", "m"), [(64, 1), (2048, 2049), (2056, 100000), (16384, 1)])
def test_every_hidden_size_has_a_row_kernel(k: int, m: int) -> None:
    """Token by token without clusters; groups of tokens while shared memory holds their rows."""
    by_token = tuning.up_down_token(torch.bfloat16, m, k, True, False, specs.PORTABLE)
    if by_token is None:
        assert tuning.up_down(torch.bfloat16, k, True, specs.PORTABLE).k_max >= k
    else:
        assert by_token.cluster == 1
        assert by_token.k_max >= k
    invariant = tuning.up_down_token(torch.bfloat16, m, k, True, True, specs.PORTABLE)
    assert invariant == tuning.up_down_token(torch.bfloat16, 1, k, True, True, specs.PORTABLE)


def test_few_tokens_of_a_union_take_three_kernels() -> None:
    assert tuning.up_down_tile(torch.bfloat16, 16, 2048, 5632, True) is not None
    assert tuning.up_down_tile(torch.bfloat16, 16, 2048, 5632, True, specs.PORTABLE) is None


def test_more_neurons_than_shared_memory_holds_are_refused() -> None:
    most = geometry.PORTABLE_UNION_NEURONS
    hybrid.require_neurons(most, specs.PORTABLE)
    hybrid.require_neurons(65536, specs.SM90)
    with pytest.raises(NotImplementedError, match=f"at most {most} neurons, got {most + 8}"):
        hybrid.require_neurons(most + 8, specs.PORTABLE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: specs.GatePackSpec("bfloat16", 144, family="sm80"), r"tokens must be one of \(64, 128\), got 144"),
        (lambda: specs.UpDownSpec("bfloat16", 4096, True, family="sm80"), "k_max must be one of"),
        (lambda: specs.UpDownTokenSpec("bfloat16", 2048, 2, True, family="sm80"), r"cluster must be one of \(1,\)"),
        (lambda: specs.GatheredSpec("bfloat16", 1, family="sm70"), "family must be one of"),
    ],
)
def test_a_spec_outside_the_family_cannot_be_made(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
