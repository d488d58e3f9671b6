"""Tests with packages of others: `make test-neighbours` installs them. A file skips itself where its one is missing."""

from pathlib import Path

import pytest
import torch


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Only where the folder is named: the imports of these packages take seconds, and development has some of them."""
    here, start = Path(__file__).parent, config.invocation_params.dir
    named = [(start / argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(here) for path in named) else True


@pytest.fixture(autouse=True)
def _repeatable(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    # nothing is looked up or sent
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")
