"""Compiled kernels in the user's cache folder: one library per kernel, ``<cache>/<fingerprint>/<symbol>.so``.

The fingerprint covers the kernel sources, the DSL, tvm-ffi, the toolkit and the architecture. Only the user can write
there (mode 0700, checked). A build holds a file lock and ends in a rename, so other processes wait for it and see all
of it or nothing. An entry that is cut short is built again.
"""

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twell.runtime import env, kernel_module, packaged, specs
from twell.runtime import fingerprint as built_from
from twell.runtime.log import logger


class UnsafeCacheError(RuntimeError):
    """The cache folder belongs to someone else, can be written by someone else, or is a link."""


def load(spec: specs.Spec, arch: str = built_from.ARCH) -> packaged.Kernel:
    """Load the kernel of ``spec`` from the user cache, compiled into it if need be; RuntimeError if that fails."""
    try:
        entry = _entry(open_folder(fingerprint(arch)), spec, arch)
    except (OSError, UnsafeCacheError) as error:
        said = f"kernel {spec} is not packaged, and the cache cannot hold it: {error}"
        raise RuntimeError(f"{said}; TWELL_CACHE_DIR can name another folder") from error
    return packaged.load(entry, spec.symbol)


@functools.cache
def fingerprint(arch: str = built_from.ARCH) -> str:
    """Hash of all that an entry for ``arch`` depends on except for its spec: 16 hexadecimal digits."""
    toolkit = next(packaged.toolkits(), Path("none")).name
    versions = [packaged.version(package) for package in (built_from.DSL, built_from.TVM_FFI)]
    parts = (built_from.source_hash(), *versions, toolkit, arch, platform.machine(), *platform.libc_ver())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def open_folder(name: str | None = None) -> Path:
    """A folder of the cache, by default this fingerprint's, made if need be; ValueError, OSError, UnsafeCacheError."""
    base = env.cache_dir()
    base.parent.mkdir(parents=True, exist_ok=True)
    # the user may keep the cache elsewhere through a link; its target is checked
    folder = Path(os.path.realpath(base)) / (name or fingerprint())
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
        _require_private(path)
    return folder


def _require_private(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafeCacheError(f"{folder} is not a folder")
    if status.st_uid != os.geteuid():
        raise UnsafeCacheError(f"{folder} belongs to user {status.st_uid}, expected {os.geteuid()}")
    if status.st_mode & 0o022:
        raise UnsafeCacheError(f"{folder} has mode {stat.S_IMODE(status.st_mode):o}, expected no write by others")


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` across processes; the system releases it if the process dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _entry(folder: Path, spec: specs.Spec, arch: str) -> Path:
    """The entry of ``spec``; built if there is none that is whole."""
    entry = folder / f"{spec.symbol}.so"
    if _is_whole(entry):
        return entry
    with lock(folder / f"{spec.symbol}.lock"):
        # another process may have built it meanwhile
        if not _is_whole(entry):
            if entry.exists():
                logger.warning("kernel cache entry %s is cut short, and is built again", entry)
            with tempfile.TemporaryDirectory(prefix="twell-") as scratch:
                built, partial = _build(spec, Path(scratch), arch), folder / f".{spec.symbol}"
                shutil.copyfile(built, partial)
            os.replace(partial, entry)
    return entry


def _is_whole(entry: Path) -> bool:
    try:
        packaged.require_whole(entry)
    except OSError:
        return False
    return True


def _build(spec: specs.Spec, folder: Path, arch: str) -> Path:
    """Compile ``spec`` into a library in ``folder``, whose undefined symbols ``load_runtime`` supplies."""
    start = time.perf_counter()
    try:
        compile_object = kernel_module("compile").compile_object
    except ImportError as error:
        said = f"kernel {spec} is neither packaged nor cached, and cannot be compiled: {error}"
        raise RuntimeError(f"{said}{_more(arch)}") from error
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError(f"kernel {spec} cannot be linked: expected cc, gcc or clang, got none{_more(arch)}")
    logger.info("compiling kernel %s", spec.symbol)
    product, library = (folder / f"{spec.symbol}.{suffix}" for suffix in ("o", "so"))
    compile_object(spec, product, arch)
    command = [compiler, "-shared", "-o", str(library), str(product)]
    environment = os.environ | {"LC_ALL": "C"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"linking kernel {spec.symbol} failed: {' '.join(command)}\n{result.stderr}")
    logger.info("compiled kernel %s in %.1f s", spec.symbol, time.perf_counter() - start)
    return library


def _more(arch: str) -> str:
    """The advice for a GPU whose kernels are not installed, to follow an error."""
    return f"; {said}" if (said := packaged.advice(arch)) else ""
