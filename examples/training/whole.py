"""Folders that say what they hold: what was cut short, or damaged later, is told from what is whole."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from twell import _files

MANIFEST = "manifest.json"


def seal(folder: Path, about: dict[str, Any]) -> None:
    """Write the manifest of a folder of files, with ``about`` in it, and force all of it to disk."""
    paths = sorted(folder.iterdir())
    files = {path.name: path.stat().st_size for path in paths}
    checksums = {path.name: _checksum(path) for path in paths}
    (folder / MANIFEST).write_text(json.dumps({**about, "files": files, "checksums": checksums}, indent=1))
    _files.sync_all(folder)


def manifest(folder: Path) -> dict[str, Any] | None:
    """What was said of ``folder`` as it was sealed; None where a file is missing or cut short."""
    try:
        about: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        whole = all((folder / name).stat().st_size == size for name, size in about["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return about if whole else None


def damaged(folder: Path) -> list[str]:
    """The files of a folder with a manifest that are not as they were written."""
    checksums = (manifest(folder) or {}).get("checksums", {})
    return [name for name, checksum in checksums.items() if _checksum(folder / name) != checksum]


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(16 << 20):
            value = zlib.crc32(piece, value)
    return value
