"""Specs, their symbols and the list of shipped kernels."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cute_kernels import __main__, catalog, specs
from twell.choose import tuning


def test_symbols_are_distinct_names_that_lead_back() -> None:
    everything = specs.all_specs()
    assert len({spec.symbol for spec in everything}) == len(everything)
    for spec in everything:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", spec.symbol)
        assert specs.spec_from_symbol(spec.symbol) == spec


@pytest.mark.parametrize("symbol", ["", "gate_pack", "gate_pack_bf16_c3", "up_down_token_bf16_k2000_x1", "unpack_fp32"])
def test_other_symbols_are_refused(symbol: str) -> None:
    with pytest.raises(ValueError, match=repr(symbol)):
        specs.spec_from_symbol(symbol)


def test_every_supported_size_ships() -> None:
    shipped = catalog.SHIPPED
    assert set(shipped) <= set(specs.all_specs())
    assert len(set(shipped)) == len(shipped)
    for dtype in specs.DTYPES:
        assert specs.UnpackSpec(dtype) in shipped
        assert all(specs.GatePackSpec(dtype, tokens) in shipped for tokens in specs.GATE_TOKENS)
        # the hidden sizes of the models in question
        for k in (64, 1024, 2048, 4096, 8192):
            for gated in (False, True):
                for m in (1, 64, 300, 100_000):
                    assert tuning.up_down_token(getattr(torch, dtype), m, k, gated) in shipped


def test_k_class_is_the_smallest_that_holds_k() -> None:
    assert specs.k_class(8) == specs.K_CLASSES[0]
    for smaller, larger in zip(specs.K_CLASSES, specs.K_CLASSES[1:]):
        assert specs.k_class(smaller) == smaller
        assert specs.k_class(smaller + 8) == larger
    largest = specs.K_CLASSES[-1]
    assert specs.k_class(largest) == largest
    with pytest.raises(NotImplementedError, match=str(largest + 8)):
        specs.k_class(largest + 8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: specs.GatePackSpec("float32", 64), "float32"),
        (lambda: specs.GatePackSpec("bfloat16", 72), "tokens"),
        (lambda: specs.UpDownTokenSpec("bfloat16", 2000, 1, True), "k_max"),
        (lambda: specs.UpDownTokenSpec("bf16", 2048, 1, False), "bf16"),
        (lambda: specs.UnpackSpec("int8"), "int8"),
        (lambda: specs.UpDownTokenSpec("bfloat16", 512, 1, True, family="sm80"), "k_max must be one of"),
        (lambda: specs.UpDownTokenSpec("bfloat16", 2048, 2, True, family="sm80"), r"cluster must be one of \(1,\)"),
        (lambda: specs.GatheredSpec("bfloat16", 1, family="sm70"), "family must be one of"),
    ],
)
def test_a_spec_that_cannot_be_compiled_cannot_be_made(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


def test_every_op_has_its_kernel_module() -> None:
    for spec in specs.all_specs():
        assert importlib.util.find_spec(f"cute_kernels.{spec.module}") is not None


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """A function that runs the command line of kernels, and returns its status and what it prints."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            status = __main__.main([*arguments])
        except SystemExit as ended:
            status = ended.code  # type: ignore[assignment]
        return status, *capsys.readouterr()

    return run


def test_a_build_names_architectures(root: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    assert command("architectures")[1].split() == ["sm_90a"]
    assert command("architectures", "sm_100", "sm_80")[1].split() == ["sm_80", "sm_100"]
    assert command("architectures", "all")[1].split() == list(specs.ARCHITECTURES)
    status, printed, said = command("architectures", "sm_90a", "a100")
    assert (status, printed) == (2, "")
    assert "must be all, or some of sm_80, sm_90a, sm_100, sm_120, got a100" in said
    # the default of make, CMake and pip
    for file in ("Makefile", "pyproject.toml", "CMakeLists.txt"):
        lines = re.findall(r"ARCHITECTURES (?:\?=|= \{|\").*", (root / file).read_text())
        assert {name for line in lines for name in re.findall(r"sm_\w+", line)} == {"sm_90a"}, lines


def test_list_prints_what_ships(command: Callable[..., tuple[int, str, str]]) -> None:
    assert command("list")[1].split() == [spec.symbol for spec in catalog.SHIPPED]
    named = command("list", "--arch", "sm_80", "gate_pack_bf16_t144", "unpack_bf16", "gathered_portable_bf16_1")
    assert named[1].split() == ["unpack_bf16", "gathered_portable_bf16_1"]
    assert command("list", "--all")[1].split() == [spec.symbol for spec in specs.all_specs()]
    # no error: a build for several GPUs leaves out those that none of its kernels is for, with a warning
    missing = command("list", "--arch", "sm_80", "gate_pack_bf16_t144")
    assert missing == (0, "", "none of gate_pack_bf16_t144 compiles for sm_80\n")
