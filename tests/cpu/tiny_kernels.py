"""Libraries of one small function that stand in for kernels. Needs a C compiler."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from twell.runtime import cache, fingerprint, packaged, specs

# A function by the calling convention of tvm-ffi that returns an integer.
SOURCE = """
#include <stdint.h>
typedef struct {{ int32_t type_index; uint32_t padding; int64_t value; }} Any;
int __tvm_ffi_{symbol}(void *self, const Any *args, int32_t count, Any *result) {{
    result->type_index = 1; result->padding = 0; result->value = {answer};
    return 0;
}}
"""


def compile_tiny(symbol: str, out: Path, answer: int = 42, *flags: str) -> None:
    """Build an object, or with ``-shared`` a library, whose function ``symbol`` returns ``answer``."""
    source = out.with_suffix(".c")
    source.write_text(SOURCE.format(symbol=symbol, answer=answer))
    subprocess.run(["cc", *(flags or ("-c",)), "-fPIC", "-o", out, source], check=True)
    source.unlink()


def package_tiny(folder: Path, spec: specs.Spec, answer: int, **changes: Any) -> None:
    """Make a folder with a packaged library of one kernel, and its manifest with these changes."""
    folder.mkdir(parents=True, exist_ok=True)
    compile_tiny(spec.symbol, folder / packaged.LIBRARY, answer, "-shared")
    manifest = {"arch": fingerprint.ARCH, "toolkit": "cu13", "versions": fingerprint.versions()}
    manifest |= {"source_hash": fingerprint.source_hash(), "symbols": [spec.symbol]}
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


class Compiler:
    """A stand-in for the DSL: its kernels return 42, 43, ... in the order of compilation."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def compile_object(self, spec: specs.Spec, out: Path, arch: str) -> None:
        self.compiled.append(spec.symbol)
        compile_tiny(spec.symbol, out, answer=41 + len(self.compiled))


def install(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(cache, "kernel_module", lambda name: compiler)
    return compiler
