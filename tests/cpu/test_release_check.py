"""tools/release_check.py: what may not go into a release."""

import io
import json
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from twell.runtime import fingerprint


@pytest.fixture
def check(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(root / "tools"))
    monkeypatch.delitem(sys.modules, "release_check", raising=False)
    import release_check  # type: ignore[import-not-found]

    return release_check


def wheel_of(path: Path, symbols: dict[str, list[str]], sources: str, host: str = "libtwell_host.so") -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"twell/_lib/{host}", "")
        for arch, names in symbols.items():
            manifest = {"arch": arch, "symbols": names, "source_hash": sources}
            wheel.writestr(f"twell/_lib/{arch}/manifest.json", json.dumps(manifest))
    return path


def test_wheels_without_all_kernels_are_found(check: Any, tmp_path: Path) -> None:
    from cute_kernels import catalog, specs

    now = fingerprint.source_hash()
    whole = {arch: [spec.symbol for spec in catalog.of_architecture(arch)] for arch in specs.ARCHITECTURES}
    hopper = {"sm_90a": whole["sm_90a"]}
    assert check.of_wheel(wheel_of(tmp_path / "a.whl", hopper, now)) == []
    assert check.of_wheel(wheel_of(tmp_path / "b.whl", whole, now)) == []
    count, of_80 = len(whole.pop("sm_90a")), len(whole["sm_80"])
    whole["sm_80"].pop()
    assert check.of_wheel(wheel_of(tmp_path / "c.whl", whole, now)) == [
        f"c.whl must have {of_80} kernels for sm_80, got {of_80 - 1}",
        f"c.whl must have {count} kernels for sm_90a, got 0",
    ]
    others = check.of_wheel(wheel_of(tmp_path / "d.whl", hopper, "0" * 64))
    assert others == ["d.whl has kernels of other sources for sm_90a"]
    elsewhere = wheel_of(tmp_path / "e.whl", hopper, now, host="sm_80/libtwell_host.so")
    assert check.of_wheel(elsewhere) == [
        "e.whl must have twell/_lib/libtwell_host.so, without which launches take longer"
    ]


def test_sources_are_the_files_of_git(check: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as sources:
        for name in ("README.md", "runs/weights.bin", "PKG-INFO"):
            sources.addfile(tarfile.TarInfo(f"twell-0.3.0/{name}"), io.BytesIO())
    assert check.of_sources(path, ["README.md", "Makefile", ".ci/run"]) == [
        "a.tar.gz must not have runs/weights.bin",
        "a.tar.gz must have Makefile",
    ]
