"""Tests with packages that are no dependency of development: `make test-neighbours` installs them.

Each file skips itself where its package is missing, before it imports anything large.
"""

from __future__ import annotations

import pytest
import torch

@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    torch.manual_seed(0)
    # nothing is looked up or sent
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "WANDB_DISABLED"):
        monkeypatch.setenv(name, "1")
