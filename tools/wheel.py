"""Build the wheel for distribution, with a platform tag that package indexes accept.

A wheel that pip builds from the sources has the tag linux_x86_64, which does not name the supported systems. auditwheel
checks that the systems of a tag have all that the library needs, and refuses the tag otherwise.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# the oldest systems of torch, tvm-ffi and the DSL runtime, by the tags of their wheels
SYSTEM = "manylinux_2_28"
# libraries of those wheels, which are installed beside this one
EXTERNAL = ("libcute_dsl_runtime.so", "libtvm_ffi.so")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, str(ROOT)]
        # the same sources make the same bytes
        log = subprocess.run(
            ["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=False, capture_output=True, text=True
        )
        environment = {"SOURCE_DATE_EPOCH": log.stdout.strip()} if log.stdout.strip() else {}
        if status := subprocess.run(build, check=False, env={**os.environ, **environment}).returncode:
            # the build has said why
            sys.exit(status)
        (wheel,) = Path(folder).glob("*.whl")
        audit = [sys.executable, "-m", "auditwheel", "repair", "--plat", f"{SYSTEM}_{platform.machine()}"]
        audit += ["--only-plat", "--patcher", "none", *(f"--exclude={library}" for library in EXTERNAL)]
        subprocess.run([*audit, "--wheel-dir", str(arguments.out), str(wheel)], check=True)


if __name__ == "__main__":
    main()
