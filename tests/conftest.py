"""Where tests run: tests/gpu on GPUs with kernels, some of tests/cpu in a checkout; which tests share a process."""

import functools
import gc
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from twell.runtime import device, host, packaged

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

# Imports and graphs make millions of objects that stay: at the usual thresholds, collections take a sixth of the time.
gc.set_threshold(20_000, 20, 20)

# A bundle has no kernel sources to compile, no build files, no pages and no pictures.
if not (ROOT / "CMakeLists.txt").exists():
    absent = "aarch64 bundle catalog charts compile docs format imports lint requirements wheel"
    collect_ignore = [*(f"cpu/test_{name}.py" for name in absent.split()), "emulator", "faults"]

# Test processes share the cores: threads that wait for each other take them from the other processes.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # no pool of processes for the few graphs that inductor compiles
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Files and folders whose fixtures take seconds: one process runs all tests of a group and makes each fixture once.
GROUPS = {
    **dict.fromkeys(("test_wheel", "test_bundle", "test_compile", "test_aarch64", "test_packaged"), "wheel"),
    **{f"test_{name}": name for name in ("bench_models", "docs", "quality", "transformers")},
    "emulator": "emulator",
    # processes that fork from one that took seconds to import: see ranks.py
    **dict.fromkeys(
        ("test_compaction", "test_files", "test_recipe_tracker", "test_trainer", "distributed"),
        "ranks",
    ),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand each of ``GROUPS`` to one process, the largest first, and then the cases of single tests to any process.

    Marks of xdist_group would say the same, but pytest 9.2 and pytest-xdist 3.8 drop them without a word.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = Path(nodeid.partition("::")[0])
            return GROUPS.get(path.stem) or GROUPS.get(path.parent.name) or nodeid.partition("[")[0]

    return Grouped(config, log)


@pytest.fixture(autouse=True, scope="module")
def _few_objects_to_collect() -> None:
    # a million objects of imported modules, and what earlier files left, which every full collection would visit
    gc.collect()
    gc.freeze()


def why_no_gpu() -> str | None:
    """Return why the kernels cannot run here; None if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major not in device.ARCHITECTURES:
        return f"needs compute capability {device.SUPPORTED}, got {major}.{minor}"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = why_no_gpu()
    for item in items:
        if ROOT / "tests" / "gpu" in item.path.parents:
            item.add_marker("gpu")
        if reason is not None and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))
    if "nightly" not in config.option.markexpr:
        later = {item for item in items if item.get_closest_marker("nightly") and not is_named(item, config.args)}
        config.hook.pytest_deselected(items=list(later))
        items[:] = [item for item in items if item not in later]


def is_named(item: pytest.Item, arguments: list[str]) -> bool:
    """Whether a command line names this very test, not its file or folder alone."""
    inner = item.nodeid.partition("::")[2] + "["
    named = (argument.partition("::")[::2] for argument in arguments)
    return any(
        item.path == Path(path).resolve() and inner.startswith((f"{test}[", f"{test}::")) for path, test in named
    )


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@functools.cache
def compiled_first() -> list[str]:
    """The kernels of Hopper that are compiled before others, which are nightly.

    Of each kernel in bfloat16 and in e4m3 the largest sizes: that with the fewest options and that with the most.
    Clusters of one CTA are an option and no size: they select other code. "plain" is the option of a gate less.
    """
    from cute_kernels import catalog

    found = [spec.symbol for spec in catalog.of_architecture("sm_90a") if "fp16" not in spec.symbol]
    largest = {re.sub(r"_(?!x1(?:_|$))[a-z]\d+(?=_|$)", "", symbol): symbol for symbol in found}
    kernels: dict[str, list[str]] = {}

    def number(item: tuple[str, str]) -> tuple[int, bool]:
        gated = item[0].replace("_plain", "")
        return len(gated), gated == item[0]

    for options, symbol in sorted(largest.items(), key=number):
        kernels.setdefault(re.split(r"(?<=_bf16|_e4m3)_", options)[0], []).append(symbol)
    chosen = {symbol for symbols in kernels.values() for symbol in (symbols[0], symbols[-1])}
    return [symbol for symbol in found if symbol in chosen]


@pytest.fixture(scope="session")
def symbols(request: pytest.FixtureRequest) -> list[str]:
    from cute_kernels import catalog

    if "nightly" in request.config.option.markexpr:
        return [spec.symbol for spec in catalog.of_architecture("sm_90a")]
    return compiled_first()


@pytest.fixture(scope="session")
def wheel(symbols: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `make wheel` makes, with the kernels of Hopper of this tier."""
    return build_wheel(of_all_processes(tmp_path_factory) / "wheel", symbols=symbols)


@pytest.fixture(scope="session")
def whole_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with the kernels of every GPU, for tests marked nightly."""
    return build_wheel(of_all_processes(tmp_path_factory) / "whole", "all")


def of_all_processes(factory: pytest.TempPathFactory) -> Path:
    """The folder of this run, which processes that share its tests have in common."""
    return factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()


def build_wheel(
    out: Path, architectures: str | None = None, host: str = platform.machine(), symbols: Sequence[str] = ()
) -> Path:
    """Build a wheel into ``out``, unless it has one; only what changed is compiled again.

    Several test processes take turns: they share the build folder.
    """
    command = [sys.executable, str(ROOT / "tools" / "wheel.py"), "--out", str(out), "--host", host]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TWELL_")}
    environment["TWELL_SYMBOLS"] = " ".join(symbols)
    if architectures is not None:
        environment["TWELL_ARCHITECTURES"] = architectures
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    (ROOT / "build").mkdir(exist_ok=True)
    with FileLock(ROOT / "build" / "wheel.lock"):
        if not [*out.glob("*.whl")]:
            built = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def c_compiler() -> list[str]:
    """The command of a C compiler with tvm-ffi's headers; tests that ask for it are skipped where there is none."""
    from tvm_ffi import libinfo

    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        pytest.skip("needs a C compiler: there is no cc, gcc or clang")
    headers = libinfo.find_include_path(), libinfo.find_dlpack_include_path()
    return [found, "-std=c11", "-Wall", "-Wextra", *(f"-I{folder}" for folder in headers)]


@pytest.fixture(scope="session")
def host_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C runner of programs, compiled from the checkout, in a bundle that of the wheel."""
    source = ROOT / "host" / "program.c"
    if not source.exists():
        return packaged.FOLDER / host.LIBRARY
    from tvm_ffi import libinfo

    library = tmp_path_factory.mktemp("host") / host.LIBRARY
    command = [*request.getfixturevalue("c_compiler"), "-O2", "-Werror", "-fPIC", "-shared", "-o", str(library)]
    subprocess.run([*command, str(source), libinfo.find_libtvm_ffi(), "-Wl,-z,defs"], check=True)
    return library


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread for a module of tiny products, which gain nothing from several on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
