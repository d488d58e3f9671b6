"""``twell info``: versions, devices, kernels, what launches them, the rates of "auto", the environment, anywhere."""

import json
import logging
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import twell
from twell._runtime import cache, device, env, fingerprint, host, packaged, specs
from twell._runtime.log import logger
from twell.choose.cards import read

# nvidia-cutlass-dsl is the compiler, which is optional
PACKAGES: tuple[str, ...] = ("cuda-python", "cuda-bindings", fingerprint.TVM_FFI, fingerprint.DSL, "nvidia-cutlass-dsl")
PACKAGES += tuple(packaged.RUNTIME_PACKAGES.values())
VARIABLES: dict[str, Callable[[], object]] = {
    "TWELL_JIT": lambda: "auto" if env.jit() else "off",
    "TWELL_CACHE_DIR": env.cache_dir,
    "TWELL_LOG": lambda: logging.getLevelName(level).lower() if (level := env.log_level()) is not None else "unset",
    "TWELL_VLLM": lambda: "auto" if env.vllm() else "off",
    "TWELL_NVTX": lambda: int(env.nvtx()),
    "TWELL_DEBUG": lambda: int(env.debug()),
}


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU; `sparse` says whether TwELL's kernels run on it, `tested` whether its tests ran on a GPU of this compute
    capability. Memory in bytes.
    """

    index: int
    name: str
    capability: str
    sm_count: int
    memory: int
    sparse: bool
    tested: bool


@dataclass(frozen=True)
class KernelInfo:
    """The packaged library for the first GPU, or Hopper's without one: its manifest, and whether it loads.

    `packaged`: the architectures that there are libraries for. `runtime`: the library that kernels link to, whose
    packages are among the versions; None if none can be loaded. `problems` in words.
    """

    library: str
    present: bool
    usable: bool
    loads: bool
    packaged: tuple[str, ...]
    runtime: str | None
    arch: str | None
    toolkit: str | None
    dsl_version: str | None
    tvm_ffi_version: str | None
    source_hash: str | None
    symbols: tuple[str, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class CacheInfo:
    """The user cache: `entries` kernels of `bytes` in all; `current` of them fit this installation's versions."""

    folder: str
    entries: int
    bytes: int
    current: int
    problem: str | None


@dataclass(frozen=True)
class RatesInfo:
    """The rates by which "auto" chooses on a GPU model: the GPU, date and file they are from, and a file ignored.

    `file` is None for rates that ship. `measured_on` is "" where there are none, and "auto" is dense. `problem`: why
    there is a file that is not used, or that it is of other kernels, or None.
    """

    gpu: str
    measured_on: str
    date: str
    file: str | None
    problem: str | None


@dataclass(frozen=True)
class Info:
    """The report of ``twell info``. `launches`: the runner of programs in use; `environment`: each variable's value."""

    versions: dict[str, str]
    devices: tuple[DeviceInfo, ...]
    device_problem: str | None
    kernels: KernelInfo
    launches: str
    cache: CacheInfo
    rates: tuple[RatesInfo, ...]
    environment: dict[str, str]


def collect() -> Info:
    """Collect the facts of this process and machine. Missing parts raise nothing; no compiler is imported."""
    driver = device.describe()
    versions = {
        "twell": twell.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "CUDA runtime (torch)": torch.version.cuda or "none",
        "CUDA driver": "{}.{}".format(*driver.version) if driver.version else "none",
    }
    versions.update((package, packaged.version(package)) for package in PACKAGES)
    devices = tuple(
        DeviceInfo(
            d.index,
            d.name,
            "{}.{}".format(*d.capability),
            d.sm_count,
            d.memory,
            d.capability[0] in device.ARCHITECTURES,
            d.capability == device.SM_90,
        )
        for d in driver.devices
    )
    environment = {name: _in_effect(value) for name, value in VARIABLES.items()}
    models = {d.name: d.capability == device.SM_90 for d in driver.devices if d.capability[0] in device.ARCHITECTURES}
    first = driver.devices[0].capability[0] if driver.devices else 9
    arch = device.ARCHITECTURES.get(first, fingerprint.ARCH)
    kernels = _kernels(packaged.folder_of(arch), arch)
    if driver.devices and (advice := packaged.advice(arch)):
        kernels = replace(kernels, problems=(*kernels.problems, advice))
    rates = tuple(_rates(*model) for model in models.items())
    with _warnings():
        launches = _in_effect(host.runner)
    return Info(versions, devices, driver.problem, kernels, launches, _cache(), rates, environment)


def _in_effect(value: Callable[[], object]) -> str:
    try:
        return str(value())
    except (OSError, ValueError) as error:
        return f"invalid: {error}"


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect twell's warnings instead of logging them."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    handlers, propagate, level = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.WARNING)
    try:
        yield messages
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def _kernels(folder: Path, arch: str = fingerprint.ARCH) -> KernelInfo:
    library = folder / packaged.LIBRARY
    with _warnings() as problems:
        manifest = packaged.read_manifest.__wrapped__(folder, arch)  # uncached, for its warnings
    loads, runtime = False, None
    try:
        runtime = str(packaged.load_runtime())
        for symbol in manifest.symbols if manifest else ():
            packaged.load(library, symbol)
        loads = manifest is not None
    except RuntimeError as error:
        problems.append(str(error))
    return KernelInfo(
        library=str(library),
        present=library.is_file(),
        usable=manifest is not None,
        packaged=packaged.architectures(),
        runtime=runtime,
        loads=loads,
        arch=manifest.arch if manifest else None,
        toolkit=manifest.toolkit if manifest else None,
        dsl_version=manifest.dsl_version if manifest else None,
        tvm_ffi_version=manifest.tvm_ffi_version if manifest else None,
        source_hash=manifest.source_hash if manifest else None,
        symbols=manifest.symbols if manifest else (),
        problems=tuple(problems),
    )


def _cache() -> CacheInfo:
    """Count the cache's entries; create nothing."""
    try:
        folder = env.cache_dir()
        entries = [path for path in folder.glob("*/*") if path.suffix in (".so", ".o") and not path.is_symlink()]
        current = sum(path.parent.name == cache.fingerprint() for path in entries)
        return CacheInfo(str(folder), len(entries), sum(path.stat().st_size for path in entries), current, None)
    except (OSError, ValueError) as error:
        return CacheInfo("", 0, 0, 0, str(error))


def _rates(gpu: str, shipped: bool) -> RatesInfo:
    """The rates for a GPU model, for which those that ship may stand in or not."""
    card = read(gpu, specs.SM90 if shipped else specs.PORTABLE)
    if card.file is None and not shipped:
        return RatesInfo(gpu, "", "", None, card.note or None)
    return RatesInfo(gpu, card.gpu, card.date, None if card.file is None else str(card.file), card.note or None)


def _rates_lines(rates: tuple[RatesInfo, ...]) -> Iterator[str]:
    for each in rates:
        if each.measured_on:
            yield f"  {each.gpu}: {each.file or 'shipped'}, measured on {each.measured_on}, {each.date[:10]}"
        else:
            yield f'  {each.gpu}: none, and "auto" is dense there until `twell tune` has measured it'
        if each.problem:
            yield f"  note: {each.problem}"
        if each.measured_on not in ("", each.gpu):
            yield f"  note: these are of another GPU; `twell tune` measures {each.gpu}"
    if not rates:
        yield '  none in use: "auto" is dense here'


def _fields(rows: dict[str, str]) -> Iterator[str]:
    width = max(map(len, rows))
    return (f"  {name.ljust(width)}  {value}" for name, value in rows.items())


def lines(info: Info, verbose: bool) -> Iterator[str]:
    """The report as text."""
    yield "Versions"
    yield from _fields(info.versions)
    yield "\nDevices"
    for d in info.devices:
        support = "sparse kernels run here"
        if not d.sparse:
            support = f"no sparse kernels: they need compute capability {device.SUPPORTED}"
        elif not d.tested:
            support = "kernels of the portable family, never run on this model for this release"
        yield f"  cuda:{d.index}  {d.name}, compute capability {d.capability}, {d.sm_count} SMs, " + (
            f"{d.memory / 2**30:.0f} GiB: {support}"
        )
    if info.device_problem:
        yield f"  none: {info.device_problem}"
    if not any(d.sparse for d in info.devices):
        yield "  TwELL runs here through its CPU operators: exact but not fast."
    kernels = info.kernels
    yield "\nPackaged kernels"
    if kernels.usable:
        rows = {
            "library": kernels.library,
            "kernels": f"{len(kernels.symbols)} for {kernels.arch}" + ("" if verbose else " (--verbose lists them)"),
            "libraries": f"for {', '.join(kernels.packaged)}",
            "built with": (
                f"CuTe DSL {kernels.dsl_version} ({kernels.toolkit}), {fingerprint.TVM_FFI} {kernels.tvm_ffi_version}"
            ),
            "sources": str(kernels.source_hash),
            "loads": "yes" if kernels.loads else "no",
        }
        yield from _fields(rows)
    else:
        yield f"  none in use ({'there is a' if kernels.present else 'no'} library at {kernels.library})"
        if kernels.packaged:
            yield f"  libraries: for {', '.join(kernels.packaged)}"
    yield from _fields({"runtime": kernels.runtime or "none"})
    yield from (f"  note: {problem}" for problem in kernels.problems)
    if verbose:
        yield from (f"    {symbol}" for symbol in kernels.symbols)
    yield f"\nLaunches: {info.launches}"
    yield "\nCache of compiled kernels"
    if info.cache.problem:
        yield f"  not usable: {info.cache.problem}"
    else:
        size = f"{info.cache.entries} kernels, {info.cache.bytes:,} bytes; {info.cache.current} fit these versions"
        yield from _fields({"folder": info.cache.folder, "holds": size})
    yield '\nRates of "auto"'
    yield from _rates_lines(info.rates)
    yield "\nEnvironment, as in effect"
    yield from _fields(info.environment)


def run(json: bool = False, verbose: bool = False) -> int:
    """Print the report, as JSON if asked. Return the exit code 0."""
    info = collect()
    print(_to_json(info) if json else "\n".join(lines(info, verbose)))
    return 0


def _to_json(info: Info) -> str:
    return json.dumps(asdict(info), indent=2)
