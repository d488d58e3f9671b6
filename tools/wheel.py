"""Build the wheel that is handed on, with the platform tag that indexes accept.

A wheel that pip builds from the sources is tagged linux_x86_64, which says nothing of the systems that it runs on.
auditwheel compares what its library needs with what the tag's systems have, and refuses a tag that does not hold.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# the oldest systems that torch, tvm-ffi and the DSL runtime run on, by the tags of their own wheels
PLATFORM = "manylinux_2_28_x86_64"
# libraries of those wheels, which install beside ours
EXTERNAL = ("libcute_dsl_runtime.so", "libtvm_ffi.so")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, str(ROOT)]
        subprocess.run(build, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        audit = [sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM, "--only-plat", "--patcher", "none"]
        audit += [f"--exclude={library}" for library in EXTERNAL]
        subprocess.run([*audit, "--wheel-dir", str(arguments.out), str(wheel)], check=True)


if __name__ == "__main__":
    main()
