"""Fixtures of the GPU tests: recorded layers as a further workload, and poisoned memory."""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests import family as families
from twell import testing
from twell.choose import cards, rates


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real-layers", type=Path, default=None, help="folder of recorded layers (layer3.npz, ...) to test as well"
    )
    parser.addoption("--portable", action="store_true", help=families.HELP)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--portable", default=False):
        families.run_portable()


def _skip_absent() -> Generator[None]:
    """Skip a test of what the portable family does not have, on a GPU of it and with ``--portable``."""
    try:
        return (yield)
    except NotImplementedError as error:
        if families.is_absent(error):
            pytest.skip(str(error))
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None]:
    """A fixture may be refused, too."""
    return (yield from _skip_absent())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    return (yield from _skip_absent())


@pytest.fixture(autouse=True)
def times_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" chooses by the GPU's times alone, by rates that ship where it would be dense."""
    monkeypatch.setattr(rates, "HOST", {False: {}, True: {}})
    if families.is_without_rates():
        monkeypatch.setattr(cards, "_on", cards._on)
        families.decide_by_shipped_rates()


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
def same_family(request: pytest.FixtureRequest) -> str:
    """What a program in a process of its own begins with, so that it runs and chooses what this one does."""
    portable = request.config.getoption("--portable", default=False)
    lines = "from tests.family import run_portable; run_portable()\n" if portable else ""
    if families.is_without_rates():
        lines += "from tests.family import decide_by_shipped_rates; decide_by_shipped_rates()\n"
    return lines


@pytest.fixture
def real_layers(request: pytest.FixtureRequest) -> Path | None:
    folder: Path | None = request.config.getoption("--real-layers", default=None)
    return folder
