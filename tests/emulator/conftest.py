"""One emulator for the folder, which compiles each kernel once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.emulator import launch


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[launch.Emulator]:
    reason = launch.missing()
    if reason is not None:
        pytest.skip(reason)
    found = launch.Emulator(tmp_path_factory.mktemp("emulator"))
    yield found
    found.close()
