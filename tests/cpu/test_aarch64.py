"""Kernels for hosts with ARM processors: what is cross-compiled, looked at without running it."""

import io
import json
import platform
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from cubin import cubins
from elftools.elf.elffile import ELFFile

from cute_kernels import catalog, fingerprint
from cute_kernels.compile import compile_object, runtime_libraries
from cute_kernels.specs import spec_from_symbol
from tests.conftest import build_wheel

SYMBOL = "reglu_bf16"

pytestmark = pytest.mark.skipif(platform.machine() == "aarch64", reason="nothing is cross-compiled here")


@pytest.fixture
def check(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(root / "tools"))
    import elf_check  # type: ignore[import-not-found]

    return elf_check


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("aarch64") / f"{SYMBOL}.o"
    compile_object(spec_from_symbol(SYMBOL), path, host="aarch64")
    return path.read_bytes()


@pytest.fixture
def provided(check: Any) -> set[str]:
    """What an object may use; the runtime libraries of both processors offer the same."""
    return {name for library in runtime_libraries() for name in check.defined(library.read_bytes())}


@pytest.fixture(scope="module")
def here(wheel: Path) -> bytes:
    return zipfile.ZipFile(wheel).read("twell/_lib/libtwell_kernels.so")


def test_an_object_links_on_the_other_processor(check: Any, compiled: bytes, provided: set[str]) -> None:
    assert list(check.faults(compiled, [SYMBOL], provided)) == []


def test_the_device_half_is_the_same(compiled: bytes, here: bytes) -> None:
    (cubin,) = cubins(compiled)
    assert cubin in cubins(here)


def test_faults_are_named(check: Any, compiled: bytes, provided: set[str], wheel: Path, here: bytes) -> None:
    def said(code: bytes, symbol: str = SYMBOL, of: set[str] = provided) -> list[str]:
        return list(check.faults(code, [symbol], of))

    assert said(here) == ["is for EM_X86_64, expected EM_AARCH64"]
    assert said(compiled, "rank") == ["lacks __tvm_ffi_rank"]
    lacking = provided - {"TVMFFIEnvGetStream"}
    assert said(compiled, of=lacking) == ["needs TVMFFIEnvGetStream, which nothing provides"]
    # an address of 32 or 64 bits in the code, where it had a distance
    section = ELFFile(io.BytesIO(compiled)).get_section_by_name(".rela.text")
    for number, name in ((258, "ABS32"), (257, "ABS64"), (999, "")):
        broken = bytearray(compiled)
        struct.pack_into("<I", broken, section["sh_offset"] + 8, number)
        expected = f"R_AARCH64_{name}" if name else "another kind"
        assert said(bytes(broken)) == [f".rela.text has {expected}"]


@pytest.mark.nightly
def test_the_wheel_has_the_kernels_of_this_machines(wheel: Path, here: bytes, tmp_path: Path) -> None:
    """tools/wheel.py has looked for faults, and auditwheel for symbols of newer systems."""
    other = build_wheel(tmp_path, host="aarch64")
    assert other.name == wheel.name.replace("x86_64", "aarch64")
    assert other.stat().st_size < 5.3e6
    with zipfile.ZipFile(other) as archive, zipfile.ZipFile(wheel) as own:
        code = archive.read("twell/_lib/libtwell_kernels.so")
        manifest = json.loads(archive.read("twell/_lib/manifest.json"))
        assert sorted(name for name in archive.namelist() if ".dist-info" not in name) == sorted(
            name for name in own.namelist() if ".dist-info" not in name
        )
    assert sorted(cubins(code)) == sorted(cubins(here))
    assert manifest["symbols"] == [spec.symbol for spec in catalog.SHIPPED]
    assert manifest["source_hash"] == fingerprint.source_hash()
