"""Write the PTX and the host wrapper of kernels: SYMBOL.ptx and SYMBOL.o in the current folder.

    python -m tests.emulator.compile < SYMBOLS

Takes one symbol a line and answers each with it. A process of its own: the compiler leaves files in the folder in which
it was imported.
"""

import sys
from pathlib import Path

from cute_kernels import compile, specs


def main() -> None:
    for line in sys.stdin:
        symbol = line.strip()
        compile.compile_object(specs.spec_from_symbol(symbol), Path(f"{symbol}.o").absolute(), keep_ptx=True)
        print(symbol, flush=True)


if __name__ == "__main__":
    main()
