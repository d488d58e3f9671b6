"""Fixtures of the GPU tests: the family that runs, rates without the host's time, and poisoned memory."""

from collections.abc import Generator

import pytest

from tests import family as families
from twell import testing
from twell.choose import cards, rates


def pytest_addoption(parser: pytest.Parser) -> None:
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


@pytest.fixture
def same_family(request: pytest.FixtureRequest) -> str:
    """What a program in a process of its own begins with, so that it runs and chooses what this one does."""
    portable = request.config.getoption("--portable", default=False)
    lines = "from tests.family import run_portable; run_portable()\n" if portable else ""
    if families.is_without_rates():
        lines += "from tests.family import decide_by_shipped_rates; decide_by_shipped_rates()\n"
    return lines
