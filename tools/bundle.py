"""Make a folder that runs twell on a GPU host without network: the wheel, its dependencies, tests and benchmarks.

Use it on your own machines, never as a release: it contains the DSL runtime, which has its own licence. The host needs
Python, a CUDA build of torch, numpy and pytest.
"""

import argparse
import hashlib
import lzma
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT)]

# folders of a checkout; scratch/ is for experiments and need not exist
FOLDERS = ("tests", "profiling", "examples", "scratch")
# pip matches manylinux platforms one by one
PLATFORMS = [f"manylinux_2_{minor}_{platform.machine()}" for minor in (17, 24, 27, 28)]
# parts of a wheel that only builds need
UNUSED = ("/include/", "/src/", ".pyi", "/share/")
# 4 s for 44 MB, which become 15.3; lzma's default setting takes 29 s for 13.7 MB
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 1}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, required=True, help="the twell wheel to unpack")
    parser.add_argument("--python", default="3.12", help="Python version of the host (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bundle", help="default: %(default)s")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "cache", help="default: %(default)s")
    parser.add_argument("packages", nargs="*", help="more wheels, without their dependencies, as NAME==VERSION")
    arguments = parser.parse_args()

    if not arguments.wheel.is_file():
        parser.error(f"--wheel: expected a wheel, got {str(arguments.wheel)!r}, which is not there")
    if foreign := foreign_to_bundle(arguments.out):
        parser.error(f"--out: expected a new folder or an earlier bundle, got {str(arguments.out)!r} with {foreign}")
    arguments.cache.mkdir(parents=True, exist_ok=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    # whole or not at all
    with tempfile.TemporaryDirectory(dir=arguments.out.parent) as folder:
        made = Path(folder) / "bundle"
        made.mkdir()
        make(arguments, made)
        shutil.rmtree(arguments.out, ignore_errors=True)
        made.rename(arguments.out)
    size = sum(path.stat().st_size for path in arguments.out.rglob("*") if path.is_file())
    print(f"{arguments.out}: {size / 1e6:.1f} MB for Python {arguments.python}")


def foreign_to_bundle(out: Path) -> str:
    """What ``out`` has that no bundle has, in words; "" if it may be replaced."""
    if not out.exists():
        return ""
    if not out.is_dir():
        return "a file in its place"
    names = {path.name for path in out.iterdir()}
    if foreign := sorted(names - {*FOLDERS, "site", "runtime", "pyproject.toml", "run.sh"}):
        return f"{foreign[0]!r} in it"
    # a checkout has folders of the same names
    return "" if not names or (out / "run.sh").is_file() else "no run.sh in it"


def make(arguments: argparse.Namespace, out: Path) -> None:
    site = out / "site"
    unpack(arguments.wheel, site)
    # the version of tvm-ffi that the kernels were linked to
    for package in (f"apache-tvm-ffi=={metadata.version('apache-tvm-ffi')}", *arguments.packages):
        unpack(download(package, arguments.python, arguments.cache), site)
    runtime = pack_runtime(arguments.cache)
    (out / "runtime").mkdir()
    shutil.copyfile(runtime, out / "runtime" / "libcute_dsl_runtime.so.xz")
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "charts")
    for folder in FOLDERS:
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, out / folder, ignore=ignore)
    # pytest's settings
    shutil.copyfile(ROOT / "pyproject.toml", out / "pyproject.toml")
    script = (ROOT / "tools" / "run.sh").read_text()
    script = script.replace("@PYTHON@", arguments.python).replace("@RUNTIME@", runtime.name.partition(".")[0])
    (out / "run.sh").write_text(script)
    (out / "run.sh").chmod(0o755)


def unpack(wheel: Path, site: Path) -> None:
    """Unpack a wheel as an installer would, without the parts in ``UNUSED``."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not any(part in f"/{name}" for part in UNUSED)]
        archive.extractall(site, names)


def download(package: str, python: str, cache: Path) -> Path:
    """Download the wheel of ``NAME==VERSION`` for a Python version on this machine's processor, once."""
    folder = cache / f"{package}-py{python}"
    if not list(folder.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--implementation=cp", f"--python-version={python}", f"--dest={folder}", package]
        subprocess.run(command + [f"--platform={each}" for each in PLATFORMS], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def pack_runtime(cache: Path) -> Path:
    """Compress the DSL runtime library. The hash of its content names the file and the unpacked folder."""
    from cute_kernels.compile import runtime_libraries

    library = runtime_libraries()[0].read_bytes()
    packed = cache / f"runtime-{hashlib.sha256(library).hexdigest()[:16]}.xz"
    if not packed.exists():
        part = packed.with_suffix(f".{os.getpid()}")
        part.write_bytes(lzma.compress(library, filters=FILTERS))
        part.replace(packed)
    return packed


if __name__ == "__main__":
    main()
