"""Tests with packages of others: `make test-neighbours` installs them. A file skips itself where its one is missing."""

from __future__ import annotations

import pytest
import torch


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Only where the folder is named: the imports of these packages take seconds, and development has some of them."""
    return None if any("neighbours" in argument for argument in config.args) else True


@pytest.fixture(autouse=True)
def _repeatable(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    # nothing is looked up or sent
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")
