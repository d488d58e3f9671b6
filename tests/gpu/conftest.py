"""Tests that need a GPU of compute capability 9.0; without one they are skipped."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from twell import testing

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real-layers", type=Path, default=None, help="folder of recorded layers (layer3.npz, ...) to test as well"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes seconds and up to 40 GB of GPU memory")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if not torch.cuda.is_available():
        reason = "no CUDA device"
    elif torch.cuda.get_device_capability() != (9, 0):
        reason = f"needs compute capability 9.0, got {torch.cuda.get_device_capability()}"
    if reason is not None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Every test starts with NaN in the memory that torch hands out."""
    testing.poison_memory()


@pytest.fixture
def no_sync() -> Iterator[None]:
    """Turn every operation of torch that waits for the GPU into an error while the test runs."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``workload`` runs over the named workloads, and over the recorded layers where their folder is given."""
    if "workload" in metafunc.fixturenames:
        folder = metafunc.config.getoption("--real-layers", default=None)
        real = [] if folder is None else testing.real_names(folder)
        metafunc.parametrize("workload", [*testing.WORKLOADS, *real])


@pytest.fixture
def real_layers(request: pytest.FixtureRequest) -> Path | None:
    folder: Path | None = request.config.getoption("--real-layers", default=None)
    return folder
