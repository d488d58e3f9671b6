"""Where tests run: those under tests/gpu need an sm_90 GPU, some of tests/cpu need a checkout rather than a bundle."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]

# A bundle has no kernel sources to compile, no build files, no pages and no pictures.
if not (ROOT / "CMakeLists.txt").exists():
    absent = ("bundle", "catalog", "charts", "compile", "docs", "format", "imports", "requirements", "wheel")
    collect_ignore = [f"cpu/test_{name}.py" for name in absent]


def why_no_gpu() -> str | None:
    """Why the kernels cannot run here; None if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"needs compute capability 9.0, got {torch.cuda.get_device_capability()}"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_no_gpu()
    for item in items:
        if ROOT / "tests" / "gpu" in item.path.parents:
            item.add_marker("gpu")
        if "wheel" in getattr(item, "fixturenames", ()):
            # one process builds it
            item.add_marker(pytest.mark.xdist_group("wheel"))
        if reason is not None and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with every kernel, as `make wheel` makes it; only what changed is compiled again.

    Processes that run tests side by side take turns, as they share the folder of the build.
    """
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, str(ROOT / "tools" / "wheel.py"), "--out", str(out)]
    environment = {name: value for name, value in os.environ.items() if name != "TWELL_SYMBOLS"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    (ROOT / "build").mkdir(exist_ok=True)
    with FileLock(ROOT / "build" / "wheel.lock"):
        built = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert built.returncode == 0, built.stdout
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For a module's tiny products, which gain nothing from threads that wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
