"""Compiled kernels in the user's cache folder: one library per kernel, built once and trusted only while untouched.

``<cache>/<fingerprint>/<symbol>.<sha256>.so``. The fingerprint covers the kernel sources, the DSL, tvm-ffi, the toolkit
and the architecture. The hash is that of the file itself, so a damaged entry is noticed and rebuilt. An intact entry
stays, even if a process cannot load it: others can. Only the user can write there (mode 0700, checked, symlinks
refused). A build holds a file lock and ends in a rename, so other processes wait for it and see all of it or nothing.
"""

import errno
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
from contextlib import contextmanager, suppress
from pathlib import Path

from twell.runtime import env, kernel_module, packaged, specs
from twell.runtime import fingerprint as built_from
from twell.runtime.log import logger


class UnsafeCacheError(RuntimeError):
    """The cache folder belongs to someone else, can be written by someone else, or is a link."""


def load(spec: specs.Spec, arch: str = built_from.ARCH) -> packaged.Kernel:
    """Load the kernel of ``spec`` for ``arch`` from the user cache; compile it into the cache first if needed.

    If the folder cannot be used or an entry cannot be loaded, log a warning and compile for this process alone. Raises
    RuntimeError if the kernel must be compiled and cannot be, or may not be (``TWELL_JIT=off``).
    """
    try:
        entry = _entry(open_folder(fingerprint(arch)), spec, arch)
    except (OSError, UnsafeCacheError) as error:
        logger.warning("kernel cache not used: %s", error)
    else:
        try:
            return _load_entry(entry, spec)
        except (ImportError, OSError, RuntimeError) as error:
            if not env.jit():
                raise RuntimeError(f"kernel {spec} cannot be loaded from {entry}: {error}") from error
            # too little memory, too many open files or a folder mounted noexec: this process's problem alone
            logger.warning("kernel cache entry %s is left as it is and not used: %s", entry, error)
    try:
        with tempfile.TemporaryDirectory(prefix="twell-") as private:
            return _load_entry(_build(spec, Path(private), arch), spec)
    except OSError as error:
        raise RuntimeError(f"kernel {spec} cannot be compiled, no folder can hold it: {error}") from error


@functools.cache
def fingerprint(arch: str = built_from.ARCH) -> str:
    """Hash of all that an entry for ``arch`` depends on except for its spec: 16 hexadecimal digits."""
    toolkit = next(packaged.toolkits(), Path("none")).name
    versions = [packaged.version(package) for package in (built_from.DSL, built_from.TVM_FFI)]
    parts = (built_from.source_hash(), *versions, toolkit, arch, platform.machine(), *platform.libc_ver())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def open_folder(name: str | None = None) -> Path:
    """A folder of the cache, by default that of this fingerprint, created if need be.

    Raises ValueError, OSError or UnsafeCacheError.
    """
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
    """The intact entry of ``spec``; built if there is none."""
    if (entry := _intact(folder, spec)) is not None:
        return entry
    with lock(folder / f"{spec.symbol}.lock"):
        _clear(folder, spec)
        # another process may have built it meanwhile
        return _intact(folder, spec) or _build(spec, folder, arch)


def _intact(folder: Path, spec: specs.Spec) -> Path | None:
    for entry in _entries(folder, spec):
        try:
            if not _damage(entry):
                return entry
        except OSError as error:
            logger.warning("kernel cache entry %s cannot be read: %s", entry, error)
    return None


def _entries(folder: Path, spec: specs.Spec) -> Iterator[Path]:
    for suffix in ("so", "o"):
        yield from sorted(folder.glob(f"{spec.symbol}.*.{suffix}"))


def _clear(folder: Path, spec: specs.Spec) -> None:
    """Remove damaged entries and the scratch folders of interrupted builds of ``spec``; the caller holds the lock."""
    for entry in _entries(folder, spec):
        # another process may be able to read an entry that this one cannot
        with suppress(OSError):
            if damage := _damage(entry):
                logger.warning("kernel cache entry %s is discarded: %s", entry, damage)
                entry.unlink(missing_ok=True)
    for scratch in folder.glob(f"{_scratch(spec)}*"):
        logger.debug("removing %s, of a build that was interrupted", scratch)
        shutil.rmtree(scratch, ignore_errors=True)


def _scratch(spec: specs.Spec) -> str:
    """Prefix of the scratch folders of ``spec``."""
    return f".{spec.symbol}."


def _damage(entry: Path) -> str:
    """The damage of an entry, "" if it is intact. Raises OSError if this process cannot read it."""
    try:
        descriptor = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOENT):
            return error.strerror or str(error)
        raise
    with open(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return "it is not a regular file that only this user can write"
        if entry.name.split(".")[-2] != hashlib.sha256(file.read()).hexdigest():
            return "its content has changed"
    return ""


def _load_entry(entry: Path, spec: specs.Spec) -> packaged.Kernel:
    if entry.suffix == ".so":
        return packaged.load(entry, spec.symbol)
    # without a C compiler the entry is a bare object, which only the DSL can load
    import cutlass.cute

    kernel: packaged.Kernel = getattr(cutlass.cute.runtime.load_module(str(entry), enable_tvm_ffi=True), spec.symbol)
    return kernel


def _build(spec: specs.Spec, folder: Path, arch: str) -> Path:
    """Compile ``spec`` into ``folder`` and return its entry: a library if there is a C compiler, else a bare object."""
    if not env.jit():
        raise RuntimeError(
            f"kernel {spec} is neither packaged nor cached, and TWELL_JIT=off forbids compiling it; "
            'allow it once with TWELL_JIT=auto, or use strategy="dense"' + _more(arch)
        )
    start = time.perf_counter()
    try:
        compile_object = kernel_module("compile").compile_object
    except ImportError as error:
        raise RuntimeError(
            f"kernel {spec} is neither packaged nor cached, and cannot be compiled: {error}{_more(arch)}"
        ) from error
    logger.info("compiling kernel %s", spec.symbol)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_scratch(spec)) as scratch:
        product = Path(scratch) / f"{spec.symbol}.o"
        compile_object(spec, product, arch)
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler:
            product = _link(compiler, product)
        digest = hashlib.sha256(product.read_bytes()).hexdigest()
        entry = folder / f"{spec.symbol}.{digest}{product.suffix}"
        product.chmod(0o600)
        os.replace(product, entry)
    logger.info("compiled kernel %s in %.1f s", spec.symbol, time.perf_counter() - start)
    return entry


def _more(arch: str) -> str:
    """The advice for a GPU whose kernels are not installed, to follow an error."""
    return f"; {said}" if (said := packaged.advice(arch)) else ""


def _link(compiler: str, product: Path) -> Path:
    """Link an object into a library. Symbols of the runtime stay undefined: ``packaged.load_runtime`` supplies them."""
    library = product.with_suffix(".so")
    command = [compiler, "-shared", "-o", str(library), str(product)]
    environment = os.environ | {"LC_ALL": "C"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    full = os.strerror(errno.ENOSPC)
    if result.returncode and full in result.stderr:
        raise OSError(errno.ENOSPC, full, str(product.parent))
    if result.returncode:
        raise RuntimeError(f"linking kernel {product.stem} failed: {' '.join(command)}\n{result.stderr}")
    return library
