"""Files that appear whole or not at all, whatever ends the process that writes them; files of a folder."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name beside ``path`` for a file, which replaces ``path`` when the block ends.

    The new content is on the disk before it replaces the old. A block that raises leaves ``path`` as it was and nothing
    beside it. A symbolic link stays and its target is replaced. A pipe or a device is written directly. A file keeps
    the permissions of the one it replaces.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        yield target
        return
    partial = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
    try:
        yield partial
        _sync(partial)
        if target.exists():
            shutil.copymode(target, partial)
        os.replace(partial, target)
        _sync(target.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(partial):
            # the caller knows this name
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to a file in UTF-8, whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "node_modules"}


def files_below(root: Path, suffix: str) -> Iterator[Path]:
    """Regular files below `root`, sorted by name, without hidden and installed ones."""
    for path in sorted(root.iterdir()):
        if path.name.startswith(".") or path.name in _SKIPPED_FOLDERS:
            continue
        if path.is_dir():
            if not path.is_symlink():
                yield from files_below(path, suffix)
        elif path.is_file() and path.name.endswith(suffix):
            yield path
