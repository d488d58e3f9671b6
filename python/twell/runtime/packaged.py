"""The libraries of compiled kernels in a wheel, and the loader for any library of kernels.

Needs tvm-ffi and the DSL's runtime library; never imports cutlass. ``_lib/`` holds ``libtwell_kernels.so`` for sm_90a
and ``manifest.json``: its architecture, versions, source hash and symbols. ``_lib/sm_80/`` holds the same for sm_80,
and so on. A library is loaded only where a GPU runs its code.
"""

import ctypes
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from twell.runtime import device, fingerprint
from twell.runtime.log import logger, warn_once

# ``_lib`` of the package, which an editable install has elsewhere than its sources.
_PLACES = [root / "_lib" for root in (Path(__file__).resolve().parents[1], *map(Path, sys.modules["twell"].__path__))]
FOLDER = next(filter(Path.is_dir, _PLACES), _PLACES[0])
LIBRARY = "libtwell_kernels.so"
RUNTIME = "libcute_dsl_runtime.so"
# Distributions that hold it, by the CUDA that they are for, and the versions that kernels run on, as in pyproject.toml.
RUNTIME_PACKAGES = {13: "nvidia-cutlass-dsl-libs-cu13", 12: "nvidia-cutlass-dsl-libs-cu12"}
LOWEST, BELOW = (4, 8), (4, 9)
RANGE = ">={}.{},<{}.{}".format(*LOWEST, *BELOW)

Kernel = Callable[..., None]

# 64-bit ELF header: the first 40 bytes, the offset of the table of sections, and the size and number of its entries
_ELF_HEADER = struct.Struct("<40sQ10xHH2x")


@dataclass(frozen=True)
class Manifest:
    """The build of the packaged library. toolkit: cu12 or cu13; versions: of distributions."""

    arch: str
    toolkit: str
    versions: dict[str, str]
    source_hash: str
    symbols: list[str]

    @property
    def dsl_version(self) -> str:
        return self.versions[fingerprint.DSL]

    @property
    def tvm_ffi_version(self) -> str:
        return self.versions[fingerprint.TVM_FFI]


def folder_of(arch: str) -> Path:
    return FOLDER if arch == fingerprint.ARCH else FOLDER / arch


def architectures() -> tuple[str, ...]:
    """The architectures that there are libraries for."""
    return tuple(arch for arch in device.ARCHITECTURES.values() if (folder_of(arch) / LIBRARY).is_file())


def advice(arch: str) -> str:
    """How to install kernels for ``arch`` where there are libraries for other GPUs alone; else ""."""
    present = architectures()
    if not present or arch in present:
        return ""
    return (
        f"the installed kernels are for {', '.join(present)}, and this GPU needs {arch}: in a checkout "
        f"`make wheel ARCHITECTURES={arch}` builds a wheel with them; the extra jit compiles each at its first call"
    )


def find(symbol: str, arch: str = fingerprint.ARCH) -> Kernel | None:
    """The packaged kernel of this name for ``arch``; None if there is no usable library or it lacks the symbol.

    A damaged library, and one for other GPUs alone, are reported once. Raises RuntimeError if the runtime that every
    library needs cannot be loaded.
    """
    folder = folder_of(arch)
    manifest = read_manifest(folder, arch)
    if manifest is None and (said := advice(arch)):
        warn_once(said)
    if manifest is None or symbol not in manifest.symbols:
        return None
    load_runtime()
    library = folder / LIBRARY
    try:
        require_whole(library)
        return load(library, symbol)
    except (OSError, RuntimeError) as error:
        warn_once(f"a packaged kernel cannot be used, install twell again: {error}")
        return None


@functools.cache
def require_whole(library: Path) -> None:
    """Raise OSError if ``library`` ends before its table of sections, the last part of a file that linkers write.

    The loader maps missing pages of a truncated library, and the process dies when it touches one.
    """
    with open(library, "rb") as file:
        header = file.read(_ELF_HEADER.size)
        size = os.fstat(file.fileno()).st_size
    if len(header) < _ELF_HEADER.size or not header.startswith(b"\x7fELF"):
        raise OSError(f"{library} is not a library")
    _, sections, entry, count = _ELF_HEADER.unpack(header)
    if sections + entry * count > size:
        raise OSError(f"{library} is cut short: expected at least {sections + entry * count} bytes, got {size}")


@functools.cache
def read_manifest(folder: Path, arch: str = fingerprint.ARCH) -> Manifest | None:
    """The manifest of the library for ``arch`` in ``folder``; None, with a logged reason, if it cannot be used."""
    if not (folder / LIBRARY).is_file():
        logger.info("no packaged kernels in %s", folder)
        return None
    try:
        manifest = Manifest(**json.loads((folder / "manifest.json").read_text()))
    except (OSError, TypeError, ValueError) as error:
        logger.warning("packaged kernels ignored: manifest.json in %s is not usable: %s", folder, error)
        return None
    if manifest.arch != arch:
        logger.warning("packaged kernels ignored: built for %s, expected %s", manifest.arch, arch)
        return None
    if manifest.source_hash != fingerprint.source_hash():
        logger.warning("packaged kernels ignored: the kernel sources changed since they were built")
        return None
    for package, built in manifest.versions.items():
        if version(package) != built:
            logger.info("packaged kernels were built with %s %s, installed is %s", package, built, version(package))
    logger.info("%d packaged kernels in %s", len(manifest.symbols), folder)
    return manifest


def version(package: str) -> str:
    """The installed version of a distribution, or "none"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def load(library: Path, symbol: str) -> Kernel:
    """The function ``symbol`` of a library of kernels; RuntimeError if it or the runtime cannot be loaded."""
    load_runtime()
    try:
        return opened(library)[symbol]  # type: ignore[no-any-return]
    except (AttributeError, OSError, RuntimeError) as error:
        raise RuntimeError(f"cannot load kernel {symbol} from {library}: {error}") from error


@functools.cache
def opened(library: Path) -> Any:
    """The module of a library, which stays loaded."""
    import tvm_ffi

    return tvm_ffi.load_module(str(library))


@functools.cache
def load_runtime() -> Path:
    """Load tvm-ffi and the DSL runtime globally, for every library to link against; return the DSL runtime's path.

    Raises RuntimeError naming the package to install if tvm-ffi or a DSL runtime that fits is missing.
    """
    try:
        import tvm_ffi  # noqa: F401  loads libtvm_ffi.so globally
    except ImportError as error:
        raise RuntimeError(f"tvm-ffi is not usable ({error}); install it with `pip install apache-tvm-ffi`") from error
    problems = [f"{each.package}: {each.trouble}" for each in installed() if each.trouble]
    # beside the library, in the DSL's wheel, on the dynamic loader's path
    places = (FOLDER / RUNTIME, *(folder / "lib" / RUNTIME for folder in toolkits()))
    for path in (*filter(Path.is_file, places), Path(RUNTIME)):
        try:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            problems.append(str(error))
            continue
        used = next((each.package for each in installed() if path.is_relative_to(each.folder)), "")
        logger.info("kernel runtime %s", "; not ".join([f"{path} {used}".rstrip(), *problems]))
        return path
    raise RuntimeError(
        f"{RUNTIME} of CuTe DSL {RANGE} cannot be loaded; install it with "
        f'`pip install "{RUNTIME_PACKAGES[12]}{RANGE}"` ({"; ".join(problems)})'
    )


class Toolkit(NamedTuple):
    """A DSL toolkit that is installed: its folder, its package with its version or "none", why it is not used."""

    folder: Path
    package: str
    trouble: str


def installed() -> list[Toolkit]:
    """The DSL toolkits that are installed, newest first."""
    package = importlib.util.find_spec("nvidia_cutlass_dsl")
    try:
        driver = device.driver_version()[0]
    except RuntimeError:
        driver = None
    found = []
    for root in map(Path, (package.submodule_search_locations or []) if package else []):
        for major, name in RUNTIME_PACKAGES.items():
            if not (folder := root / f"cu{major}").is_dir():
                continue
            beside = importlib.metadata.distributions(name=name, path=[str(root.parent)])
            number = next((each.version for each in beside), version(name))
            trouble = ""
            if driver is not None and driver < major:
                trouble = f"the driver has CUDA {driver}"
            elif (parts := re.match(r"(\d+)\.(\d+)", number)) and not LOWEST <= (int(parts[1]), int(parts[2])) < BELOW:
                trouble = f"kernels need {RANGE}"
            found.append(Toolkit(folder, f"{name} {number}", trouble))
    return found


def toolkits() -> Iterator[Path]:
    """Folders of the DSL toolkits that kernels can use, newest first."""
    return (each.folder for each in installed() if not each.trouble)
