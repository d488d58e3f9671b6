"""Registers and local memory of the kernels in an object file, read from its cubins.

A cubin is an ELF file. Its section .nv.info has records of a format and an attribute, a byte each, a size in 16 bits,
and for format 4 a symbol and a value in 32 bits each.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

ELF, CUDA = b"\x7fELF", 190
SIZED, REGISTERS, FRAME = 0x04, 0x2F, 0x11


class Resources(NamedTuple):
    """What a thread of a kernel takes: registers, and bytes of local memory, spilled registers among them."""

    registers: int
    local_bytes: int


def resources(data: bytes) -> dict[str, Resources]:
    """Return the resources of each kernel, by name. Raises ValueError if there is no cubin."""
    found: dict[str, dict[int, int]] = {}
    for cubin in cubins(data):
        for name, attribute, value in _records(cubin):
            found.setdefault(name, {})[attribute] = value
    kernels = {name: Resources(of[REGISTERS], of.get(FRAME, 0)) for name, of in found.items() if REGISTERS in of}
    if not kernels:
        raise ValueError("expected an object file with a cubin, got none")
    return kernels


def cubins(data: bytes) -> list[bytes]:
    found = []
    start = data.find(ELF)
    while start >= 0:
        if data[start + 18 : start + 20] == struct.pack("<H", CUDA):
            segments, sections = struct.unpack_from("<QQ", data, start + 32)
            sizes = struct.unpack_from("<4H", data, start + 54)
            # the tables are last
            end = max(segments + sizes[0] * sizes[1], sections + sizes[2] * sizes[3])
            found.append(data[start : start + end])
        start = data.find(ELF, start + 1)
    return found


def _records(elf: bytes) -> Iterator[tuple[str, int, int]]:
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, strings = struct.unpack_from("<HHH", elf, 58)
    # of each section: name, offset, length, and the section that it is linked to
    fields = (struct.unpack_from("<IIQQQQII", elf, table + i * size) for i in range(count))
    sections = [(f[0], f[4], f[5], f[6]) for f in fields]

    def text(section: int, offset: int) -> str:
        start = sections[section][1] + offset
        return elf[start : elf.index(b"\0", start)].decode()

    by_name = {text(strings, name): (offset, length, link) for name, offset, length, link in sections}
    symbols, _, names = by_name[".symtab"]
    at, length, _ = by_name[".nv.info"]
    end = at + length
    while at < end:
        form, attribute, taken = struct.unpack_from("<BBH", elf, at)
        if form == SIZED and taken >= 8:
            symbol, value = struct.unpack_from("<II", elf, at + 4)
            (name,) = struct.unpack_from("<I", elf, symbols + symbol * 24)
            yield text(names, name), attribute, value
        at += 4 + (taken if form == SIZED else 0)
