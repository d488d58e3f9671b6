"""Packaged kernels: each loads, and the half of it that runs on the host does so up to its first check.

Of the installed wheel, on any processor; in a checkout of the wheel that `make wheel` makes.
"""

import zipfile
from pathlib import Path

import pytest

from twell.runtime import packaged


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if packaged.architectures():
        return packaged.FOLDER
    place = tmp_path_factory.mktemp("packaged")
    with zipfile.ZipFile(request.getfixturevalue("wheel")) as wheel:
        wheel.extractall(place)
    return place / "twell" / "_lib"


def test_every_kernel_says_what_it_takes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "FOLDER", folder)
    assert packaged.architectures()
    for arch in packaged.architectures():
        manifest = packaged.read_manifest(packaged.folder_of(arch), arch)
        assert manifest is not None
        assert manifest.symbols
        for symbol in manifest.symbols:
            kernel = packaged.find(symbol, arch)
            assert kernel is not None, symbol
            with pytest.raises(TypeError, match=r"^Expects \d+ parameters when calling: `__call__\("):
                kernel()
