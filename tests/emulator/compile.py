"""Write the PTX and the host wrapper of kernels: SYMBOL.ptx and SYMBOL.o in the current folder.

    python -m tests.emulator.compile < SYMBOLS

Takes one symbol a line and answers each with it. A process of its own: the compiler leaves files in the folder in which
it was imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cute_kernels import compile, specs


def main() -> None:
    for line in sys.stdin:
        symbol = line.strip()
        compiled = compile.compile_spec(specs.spec_from_symbol(symbol), "--keep-ptx")
        Path(f"{symbol}.ptx").write_text(compiled.__ptx__)
        compiled.export_to_c(f"{symbol}.o", function_name=symbol)
        print(symbol, flush=True)


if __name__ == "__main__":
    main()
