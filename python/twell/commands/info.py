"""``twell info``: versions, devices, kernels, what launches them, the rates of "auto", the environment, anywhere."""

import argparse
import json
import logging
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import twell
from twell.choose.cards import read
from twell.runtime import cache, device, env, fingerprint, host, packaged, specs
from twell.runtime.log import logger

DESCRIPTION = """\
Show versions, devices, packaged kernels and their launcher, the kernel cache, the table of costs that "auto" reads for
each GPU, and TWELL_* environment variables.
"""
# nvidia-cutlass-dsl is the compiler, which is optional
PACKAGES: tuple[str, ...] = ("cuda-python", "cuda-bindings", fingerprint.TVM_FFI, fingerprint.DSL, "nvidia-cutlass-dsl")
PACKAGES += tuple(packaged.RUNTIME_PACKAGES.values())
VARIABLES: dict[str, Callable[[], object]] = {
    "TWELL_CACHE_DIR": env.cache_dir,
    "TWELL_LOG": lambda: logging.getLevelName(level).lower() if (level := env.log_level()) is not None else "unset",
    "TWELL_VLLM": lambda: "auto" if env.vllm() else "off",
    "TWELL_DEBUG": lambda: int(env.debug()),
}


def collect() -> dict[str, Any]:
    """The facts of this process and machine, as ``--json`` prints them. Missing parts raise nothing.

    devices: memory in bytes; sparse: whether TwELL's kernels run there; tested: whether its tests ran on a GPU of this
    compute capability. launches: the runner of programs in use. environment: the value of each variable in effect.
    """
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
    devices = [asdict(each) | _abilities(each.capability) for each in driver.devices]
    first = driver.devices[0].capability[0] if driver.devices else 9
    arch = device.ARCHITECTURES.get(first, fingerprint.ARCH)
    kernels = _kernels(packaged.folder_of(arch), arch)
    if driver.devices and (advice := packaged.advice(arch)):
        kernels["problems"].append(advice)
    models = {each["name"]: each["tested"] for each in devices if each["sparse"]}
    with _warnings():
        launches = _in_effect(host.runner)
    found = {"versions": versions, "devices": devices, "device_problem": driver.problem, "kernels": kernels}
    found |= {"launches": launches, "cache": _cache(), "rates": [_rates(*model) for model in models.items()]}
    return found | {"environment": {name: _in_effect(value) for name, value in VARIABLES.items()}}


def _abilities(capability: tuple[int, int]) -> dict[str, Any]:
    """Which kernels a GPU runs."""
    sparse, tested = capability[0] in device.ARCHITECTURES, capability == device.SM_90
    runs = "kernels of the portable family, never run on this model for this release"
    if not sparse:
        runs = f"no sparse kernels: they need compute capability {device.SUPPORTED}; operators of the CPU are exact"
    runs = "sparse kernels" if tested else runs
    return {"capability": "{}.{}".format(*capability), "sparse": sparse, "tested": tested, "runs": runs}


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


def _kernels(folder: Path, arch: str = fingerprint.ARCH) -> dict[str, Any]:
    """The library for this architecture: its manifest, whether it loads, the runtime it links to, and ``problems``."""
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
    names = ("arch", "toolkit", "dsl_version", "tvm_ffi_version", "source_hash")
    found = {"library": str(library), "present": library.is_file(), "usable": manifest is not None}
    found |= {"packaged": packaged.architectures(), "runtime": runtime, "loads": loads}
    found |= {name: getattr(manifest, name, None) for name in names}
    return found | {"symbols": manifest.symbols if manifest else (), "problems": problems}


def _cache() -> dict[str, Any]:
    """Count the kernels of the cache, and those that fit this installation's versions; create nothing."""
    found: dict[str, Any] = {"folder": "", "entries": 0, "bytes": 0, "current": 0, "problem": None}
    try:
        folder = env.cache_dir()
        entries = [path for path in folder.glob("*/*") if path.suffix in (".so", ".o") and not path.is_symlink()]
        sizes = [path.stat().st_size for path in entries]
        current = sum(path.parent.name == cache.fingerprint() for path in entries)
        return found | {"folder": str(folder), "entries": len(entries), "bytes": sum(sizes), "current": current}
    except (OSError, ValueError) as error:
        return found | {"problem": str(error)}


def _rates(gpu: str, shipped: bool) -> dict[str, Any]:
    """The rates for a GPU model, for which those that ship may stand in or not: then "auto" is dense there."""
    card = read(gpu, specs.SM90 if shipped else specs.PORTABLE)
    known = card.file is not None or shipped
    found = {"gpu": gpu, "measured_on": card.gpu if known else "", "date": card.date if known else ""}
    note = card.note
    if not note and (not known or card.gpu != gpu):
        note = f"{'of another GPU' if known else 'auto is dense'}: `twell tune` measures {gpu}"
    return found | {"file": None if card.file is None else str(card.file), "problem": note or None}


def lines(facts: Any, indent: str = "") -> Iterator[str]:
    """The facts as text: a line for each, and deeper ones below their name."""
    if isinstance(facts, dict):
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            if name == "symbols":
                value = f"{len(value)} kernels"
            if isinstance(value, (dict, list, tuple)) and value:
                yield f"{indent}{name}"
                yield from lines(value, f"{indent}  ")
            else:
                yield f"{indent}{name.ljust(width)}  {'none' if value in (None, '', [], ()) else value}"
        return
    for each in facts:
        if isinstance(each, dict):
            yield from lines(each, indent)
        else:
            yield f"{indent}{each}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, with the names of all packaged kernels")


def run(arguments: argparse.Namespace) -> int:
    """Print the report, as JSON if asked. Return the exit code 0."""
    found = collect()
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(lines(found)))
    return 0
