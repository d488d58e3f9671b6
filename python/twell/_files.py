"""Files and folders that appear whole or not at all, whatever ends the process that writes them; files of a folder."""

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twell._runtime.log import logger

# of linux/fs.h and fcntl.h
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name beside ``path`` for a file or folder, which replaces ``path`` when the block ends.

    The new content is on the disk before it replaces the old. A block that raises leaves ``path`` as it was and nothing
    beside it. A symbolic link stays and its target is replaced. A pipe or a device is written directly. A file keeps
    the permissions of the one it replaces, a folder and its files by name. Raises ValueError as ``require_apart``.
    """
    target = Path(os.path.realpath(path))
    require_apart(path)
    if not is_replaceable(target):
        yield target
        return
    partial = target.with_name(f"{_prefix(target)}{secrets.token_hex(4)}")
    try:
        yield partial
        sync_all(partial)
        _install(partial, target)
    except BaseException as error:
        _remove(partial)
        if isinstance(error, OSError) and error.filename == str(partial):
            # the caller knows this name
            error.filename = str(path)
        raise


def require_apart(path: Path) -> None:
    """Raise ValueError if ``path`` is a folder that cannot make room: one in which processes work, or a mount point."""
    target = Path(os.path.realpath(path))
    if target.is_dir() and (Path.cwd().is_relative_to(target) or os.path.ismount(target)):
        what = "a mount point" if os.path.ismount(target) else "the current folder, or one around it"
        raise ValueError(f"expected a folder that can be replaced, got {str(path)!r}, {what}; name a folder in it")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to a file in UTF-8, whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def is_replaceable(path: Path) -> bool:
    """Whether ``path`` can be replaced: it is a file, a folder or absent, not a pipe or a device."""
    return path.is_file() or path.is_dir() or not path.exists()


def sync(path: str | Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(path: Path) -> None:
    """Flush a file, or a folder and all in it, to the disk."""
    for folder, _, names in os.walk(path):
        for name in names:
            sync(os.path.join(folder, name))
        sync(folder)
    if not path.is_dir():
        sync(path)


def _prefix(target: Path) -> str:
    return f".{target.name}.partial-"


def _install(partial: Path, target: Path) -> None:
    """Rename ``partial`` to ``target``, and remove the folder that it replaces."""
    replaced = partial.is_dir() and target.is_dir() and any(target.iterdir())
    _copy_modes(target, partial)
    if replaced:
        _exchange(partial, target)
    else:
        os.replace(partial, target)
    sync(target.parent)
    if replaced:
        _remove(partial)


def _copy_modes(old: Path, new: Path) -> None:
    """Give ``new``, and the files in it, the permissions of those of the same name and kind in ``old``."""
    if new.is_symlink() or not ((old.is_dir() and new.is_dir()) or (old.is_file() and new.is_file())):
        return
    if new.is_dir():
        for each in new.iterdir():
            _copy_modes(old / each.name, each)
    shutil.copymode(old, new)


def _exchange(one: Path, other: Path) -> None:
    """Swap the names of two folders, in one step where the file system can."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        if not rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
            return
        if (code := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise OSError(code, os.strerror(code), str(other))
    aside = other.with_name(f"{_prefix(other)}{secrets.token_hex(4)}")
    os.rename(other, aside)
    try:
        os.rename(one, other)
    except BaseException:
        os.rename(aside, other)
        raise
    os.rename(aside, one)


def _remove(path: Path) -> None:
    """Remove a file or a folder; warn if it stays, since the work itself is done."""
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)


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
