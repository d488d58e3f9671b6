"""Folders with a manifest, which reveals missing, truncated and damaged files."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from twell import _files

MANIFEST = "manifest.json"


def seal(folder: Path, about: dict[str, Any]) -> None:
    """Write the manifest of a folder, with ``about`` in it, and sync everything to disk."""
    paths = sorted(folder.iterdir())
    files = {path.name: path.stat().st_size for path in paths}
    checksums = {path.name: _checksum(path) for path in paths}
    (folder / MANIFEST).write_text(json.dumps({**about, "files": files, "checksums": checksums}, indent=1))
    _files.sync_all(folder)


def manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of ``folder``; None if a file is missing or truncated."""
    try:
        about: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        whole = all((folder / name).stat().st_size == size for name, size in about["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return about if whole else None


def damaged(folder: Path) -> list[str]:
    """Files of a sealed folder whose checksums differ."""
    checksums = (manifest(folder) or {}).get("checksums", {})
    return [name for name, checksum in checksums.items() if _checksum(folder / name) != checksum]


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(16 << 20):
            value = zlib.crc32(piece, value)
    return value
