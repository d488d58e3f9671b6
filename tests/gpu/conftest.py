"""Fixtures of the GPU tests: recorded layers as a further workload, and poisoned memory."""

from pathlib import Path

import pytest

from twell import testing


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real-layers", type=Path, default=None, help="folder of recorded layers (layer3.npz, ...) to test as well"
    )


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Every test starts with NaN in the memory that torch hands out."""
    testing.poison_memory()


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
