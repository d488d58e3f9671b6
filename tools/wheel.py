"""Build the wheel for distribution, with a platform tag that package indexes accept.

A wheel that pip builds from the sources has the tag linux_x86_64, which does not name the supported systems. auditwheel
checks that the systems of a tag have all that the library needs, and refuses the tag otherwise. For another processor
than this machine's, a compiler and the libraries to link to come from the package index.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import elf_check  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parents[1]
# the oldest systems of torch, tvm-ffi and the DSL runtime, by the tags of their wheels
SYSTEM = "manylinux_2_28"
# libraries of those wheels, which are installed beside this one
EXTERNAL = {"libcute_dsl_runtime.so": "nvidia-cutlass-dsl-libs-cu12", "libtvm_ffi.so": "apache-tvm-ffi"}
# it reads wheels of every processor, and offers the tags of its own machine's alone
AUDITWHEEL = "import platform, sys; platform.machine = lambda: '{}'; from auditwheel.main import main; sys.exit(main())"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel (default: %(default)s)")
    here = platform.machine()
    hosts = sorted({here, "aarch64"})
    parser.add_argument("--host", choices=hosts, default=here, help="processor of the host (default: %(default)s)")
    arguments = parser.parse_args()
    host = arguments.host
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, str(ROOT)]
        # the same sources make the same bytes
        log = ["git", "log", "-1", "--format=%ct"]
        epoch = subprocess.run(log, cwd=ROOT, check=False, capture_output=True, text=True).stdout.strip()
        environment = {"SOURCE_DATE_EPOCH": epoch} if epoch else {}
        if host != here:
            fetch(host)
            build += [f"--config-setting=cmake.toolchain-file={ROOT / 'cmake' / f'{host}.cmake'}"]
            build += [f"--config-setting=build-dir=build/wheel-{host}"]
            # the tag, by which Python names its own system
            environment["_PYTHON_HOST_PLATFORM"] = f"linux-{host}"
        if status := subprocess.run(build, check=False, env={**os.environ, **environment}).returncode:
            # the build has said why
            sys.exit(status)
        (wheel,) = Path(folder).glob("*.whl")
        if host != here:
            linked = (ROOT / "build" / host / "linked").rglob("lib/*.so")
            if found := elf_check.of_wheel(wheel, linked):
                sys.exit("\n".join(found))
        audit = [sys.executable, "-c", AUDITWHEEL.format(host), "repair", "--plat", f"{SYSTEM}_{host}", "--only-plat"]
        audit += ["--patcher", "none", *(f"--exclude={library}" for library in EXTERNAL)]
        subprocess.run([*audit, "--wheel-dir", str(arguments.out), str(wheel)], check=True)


def fetch(host: str) -> None:
    """Install what cmake/HOST.cmake names: a cross compiler, and the versions here of what kernels link to."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--upgrade"]
    pip += ["--only-binary=:all:", f"--constraint={ROOT / 'constraints.txt'}"]
    subprocess.run([*pip, f"--target={ROOT / 'build' / host / 'compiler'}", "ziglang"], check=True)
    linked = [f"{package}=={metadata.version(package)}" for package in EXTERNAL.values()]
    target = [f"--target={ROOT / 'build' / host / 'linked'}", f"--platform={SYSTEM}_{host}"]
    subprocess.run([*pip, *target, *linked], check=True)


if __name__ == "__main__":
    main()
