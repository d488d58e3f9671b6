"""Write the compiler's output for kernels: PTX, CUBIN and SASS of each symbol, and its registers.

    python -m profiling.dump gate_pack_bf16_t144 up_down_token_bf16_k2048_x1 -o build/dump

Needs the compiler, but no GPU. SASS needs nvdisasm or cuobjdump, from pip install "nvidia-cutlass-dsl[sass]", from
triton, or from a CUDA toolkit in the path or below /usr/local/cuda. Without one the other files are still written.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from twell._runtime import kernel_module, specs

DISASSEMBLERS = {"nvdisasm": ["--print-code"], "cuobjdump": ["--dump-sass"]}

# Folders of site-packages with these tools.
PACKAGED = ("nvidia/*/bin", "triton/backends/nvidia/bin")


def disassemblers() -> Iterator[list[str]]:
    """Commands that print the SASS of a CUBIN, whose path is to be appended; the most likely first."""
    for name, options in DISASSEMBLERS.items():
        found = [
            path for folder in sys.path for packaged in PACKAGED for path in Path(folder).glob(f"{packaged}/{name}")
        ]
        in_path = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
        for path in (*found, *([in_path] if in_path else [])):
            yield [str(path), *options]


def disassemble(cubin: Path, line_info: bool) -> str | None:
    """The SASS of ``cubin``, with source lines if requested; None if no tool can read it."""
    for command in disassemblers():
        lines = ["--print-line-info"] if line_info and "nvdisasm" in command[0] else []
        done = subprocess.run([*command, *lines, str(cubin)], capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout
        # a tool older than the compiler cannot read its files
        print(f"dump: {command[0]} failed: {done.stderr.strip()[:200]}", file=sys.stderr)
    return None


@contextlib.contextmanager
def scratch_folder() -> Iterator[None]:
    """Make the compiler write its own files to a temporary folder instead of the current one.

    The compiler reads the variable at import.
    """
    name = "CUTE_DSL_DUMP_DIR"
    if name in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            del os.environ[name]


def dump(compiler: Any, symbol: str, folder: Path, line_info: bool) -> list[Path]:
    """Write SYMBOL.ptx, .cubin, .sass and .txt (registers, spills, WGMMA warnings); return the written paths."""
    spec = specs.spec_from_symbol(symbol)
    compiled = compiler.compile_spec(spec, "--keep-ptx --keep-cubin" + (" --generate-line-info" if line_info else ""))
    written = [folder / f"{symbol}{suffix}" for suffix in (".ptx", ".cubin", ".txt")]
    ptx, cubin, text = written
    folder.mkdir(parents=True, exist_ok=True)
    ptx.write_text(compiled.__ptx__)
    cubin.write_bytes(compiled.__cubin__)
    lines = []
    for kernel in compiler.compile_and_report(spec)[1]:
        lines.append(f"{kernel.kernel}: {kernel.registers} registers, {kernel.spill_bytes} bytes spilled")
        lines += kernel.wgmma
    text.write_text("\n".join(lines) + "\n")
    sass = disassemble(cubin, line_info)
    if sass is not None:
        written.append(folder / f"{symbol}.sass")
        written[-1].write_text(sass)
    return written


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("symbols", nargs="+", metavar="SYMBOL", help="from python -m cute_kernels list --all")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FOLDER", help="created if missing")
    parser.add_argument("--line-info", action="store_true", help="source lines in PTX and SASS")
    arguments = parser.parse_args(argv)
    try:
        for symbol in arguments.symbols:
            specs.spec_from_symbol(symbol)
    except ValueError as error:
        parser.error(str(error))
    with scratch_folder():
        try:
            compiler = kernel_module("compile")
        except ImportError as error:
            print(f"dump: error: {error}", file=sys.stderr)
            return 2
        disassembled = True
        for symbol in arguments.symbols:
            written = dump(compiler, symbol, arguments.out, arguments.line_info)
            print(*written, sep="\n", flush=True)
            disassembled &= written[-1].suffix == ".sass"
    if not disassembled:
        print(
            'dump: no SASS: found no disassembler that reads these files; pip install "nvidia-cutlass-dsl[sass]"',
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
