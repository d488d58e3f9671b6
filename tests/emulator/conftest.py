"""One emulator for the folder. Each kernel is compiled once: a run that builds the wheel takes those of it."""

from collections.abc import Iterator

import pytest

from tests.conftest import GROUPS, ROOT
from tests.emulator import launch


@pytest.fixture(scope="session")
def emulator(
    request: pytest.FixtureRequest, symbols: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[launch.Emulator]:
    reason = launch.missing()
    if reason is not None:
        pytest.skip(reason)
    found = launch.Emulator(tmp_path_factory.mktemp("emulator"))
    if any(GROUPS.get(item.path.stem) == "wheel" for item in request.session.items):
        request.getfixturevalue("wheel")
        for name in (f"{symbol}{kind}" for symbol in symbols for kind in (".o", ".ptx")):
            (found.folder / name).symlink_to(ROOT / "build" / "wheel" / "objects" / name)
    yield found
    found.close()
