"""What is wrong with code that was compiled for ARM: objects of kernels, and the libraries of a wheel.

The machine that compiled it cannot load it, so this looks for what a loader would stumble over.
"""

import io
import json
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from elftools.elf.elffile import ELFFile
from elftools.elf.enums import ENUM_RELOC_TYPE_AARCH64
from elftools.elf.relocation import RelocationSection

MACHINE = "EM_AARCH64"
# The first three are for the loader, to fill words of data. The linker resolves all others, by distances between places
# in a library, which are the same wherever it is loaded.
RELOCATIONS = {
    f"R_AARCH64_{name}"
    for name in """RELATIVE GLOB_DAT JUMP_SLOT ADR_PREL_PG_HI21 ADD_ABS_LO12_NC LDST8_ABS_LO12_NC LDST16_ABS_LO12_NC
    LDST32_ABS_LO12_NC LDST64_ABS_LO12_NC LDST128_ABS_LO12_NC ADR_GOT_PAGE LD64_GOT_LO12_NC CALL26 JUMP26 PREL32
    PREL64""".split()
}
# an address, which the linker leaves to the loader: in an object's data alone
ADDRESS = "R_AARCH64_ABS64"
# by number; the table of pyelftools lacks one
NAMES = {number: name for name, number in ENUM_RELOC_TYPE_AARCH64.items()} | {299: "R_AARCH64_LDST128_ABS_LO12_NC"}
WRITABLE = 1


def of_wheel(wheel: Path, linked: Iterable[Path]) -> list[str]:
    """Faults of the libraries in ``wheel``, which may use the C library and the libraries ``linked``."""
    provided = {name for library in linked for name in defined(library.read_bytes())}
    found = []
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = PurePosixPath(name)
            if path.suffix == ".so":
                exports = ["program"]
                if path.name == "libtwell_kernels.so":
                    exports = json.loads(archive.read(str(path.with_name("manifest.json"))))["symbols"]
                found += [f"{name}: {said}" for said in faults(archive.read(name), exports, provided)]
    return found


def faults(code: bytes, exports: Iterable[str], provided: set[str]) -> Iterator[str]:
    """Faults of an object or library that exports functions of tvm-ffi and may use what is ``provided``."""
    elf = ELFFile(io.BytesIO(code))
    if elf["e_machine"] != MACHINE:
        yield f"is for {elf['e_machine']}, expected {MACHINE}"
        return
    for name in sorted({f"__tvm_ffi_{name}" for name in exports} - defined(code)):
        yield f"lacks {name}"
    for name in sorted(undefined(elf) - provided):
        yield f"needs {name}, which nothing provides"
    for section in elf.iter_sections():
        if not isinstance(section, RelocationSection):
            continue
        # of an object: the section that they change
        data = elf["e_type"] == "ET_REL" and elf.get_section(section["sh_info"])["sh_flags"] & WRITABLE
        kinds = {NAMES.get(each["r_info_type"], "another kind") for each in section.iter_relocations()}
        for kind in sorted(kinds - RELOCATIONS - ({ADDRESS} if data else set())):
            yield f"{section.name} has {kind}"
    dynamic = elf.get_section_by_name(".dynamic")
    if dynamic is not None and any(tag.entry.d_tag == "DT_TEXTREL" for tag in dynamic.iter_tags()):
        yield "has relocations of its text"


def defined(code: bytes) -> set[str]:
    """The symbols that an object or library offers to others."""
    return {symbol.name for symbol in _symbols(ELFFile(io.BytesIO(code))) if symbol["st_shndx"] != "SHN_UNDEF"}


def undefined(elf: Any) -> set[str]:
    """The symbols that an object or library must find elsewhere, without versioned ones, which auditwheel knows."""
    versions = elf.get_section_by_name(".gnu.version")
    return {
        symbol.name
        for index, symbol in enumerate(_symbols(elf))
        if symbol["st_shndx"] == "SHN_UNDEF"
        and symbol["st_info"]["bind"] == "STB_GLOBAL"
        and (versions is None or versions.get_symbol(index)["ndx"] in ("VER_NDX_LOCAL", "VER_NDX_GLOBAL"))
    }


def _symbols(elf: Any) -> Iterator[Any]:
    table = elf.get_section_by_name(".dynsym") or elf.get_section_by_name(".symtab")
    return table.iter_symbols()
