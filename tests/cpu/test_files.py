"""Files and folders appear whole or not at all, even if their writer fails or is killed."""

import ctypes
import errno
import logging
import os
import shutil
import signal
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import ranks

from twell import _files


def make(path: Path, kind: str, text: str) -> None:
    if kind == "file":
        path.write_text(text)
        return
    (path / "inner").mkdir(parents=True)
    for name in ("a", "inner/b"):
        (path / name).write_text(text)


def read(path: Path) -> list[str]:
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return [file.read_text() for file in files]


@pytest.fixture(params=["file", "folder"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:

        def rename(*_: Any) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: type("Library", (), {"renameat2": staticmethod(rename)}))
    return bool(request.param)


@pytest.mark.usefixtures("exchange")
def test_the_new_takes_the_place_of_the_old(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    for text in ("first", "second"):
        with _files.replacing(path) as partial:
            make(partial, kind, text)
            assert read(path) == [] if text == "first" else ["first"] * (1 + (kind == "folder"))
        assert read(path) == [text] * (1 + (kind == "folder"))
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("where", ["block", "sync_all", "_install"])
def test_a_writer_that_fails_leaves_the_old(
    where: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    make(path, kind, "old")

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    if where != "block":
        monkeypatch.setattr(_files, where, fail)
    with pytest.raises(OSError, match="full"), _files.replacing(path) as partial:  # noqa: PT012
        make(partial, kind, "new")
        if where == "block":
            fail()
    assert set(read(path)) == {"old"}
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_a_swap_that_fails_half_way_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rename = tmp_path / "out", os.rename
    make(path, "folder", "old")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())

    def second(old: Path, new: Path) -> None:
        if new == path and ".partial-" in old.name and set(read(old)) == {"new"}:
            raise OSError(errno.EIO, "broken")
        rename(old, new)

    monkeypatch.setattr(os, "rename", second)
    with pytest.raises(OSError, match="broken"), _files.replacing(path) as partial:
        make(partial, "folder", "new")
    assert set(read(path)) == {"old"}
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_a_folder_in_use_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes would be left in one without a name."""
    (tmp_path / "out" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "out" / "inner")
    for path in (Path(), Path(".."), tmp_path / "out", Path("/proc")):
        with pytest.raises(ValueError, match="expected a folder that can be replaced, got"), _files.replacing(path):
            pass
    assert (tmp_path / "out" / "inner").samefile(".")


def killed_as_it_swaps(path: Path, after: bool) -> None:
    exchange = _files._exchange

    def deadly(*names: Path) -> None:
        if after:
            exchange(*names)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(_files, "_exchange", deadly)  # noqa: B010
    with _files.replacing(path) as partial:
        make(partial, "folder", "new")


@pytest.mark.parametrize("after", [False, True])
def test_a_writer_that_is_killed_leaves_the_old_or_the_new(after: bool, tmp_path: Path) -> None:
    path = tmp_path / "out"
    make(path, "folder", "old")
    process = ranks.forks().Process(target=killed_as_it_swaps, args=(path, after))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert read(path) == ["new" if after else "old"] * 2
    (left,) = tmp_path.glob(".out.partial-*")
    assert read(left) == ["old" if after else "new"] * 2


def test_writers_at_the_same_time_do_not_mix(kind: str, tmp_path: Path) -> None:
    path, ready = tmp_path / "out", threading.Barrier(4)
    make(path, kind, "old")

    def write(text: str) -> None:
        with _files.replacing(path) as partial:
            make(partial, kind, text)
            ready.wait(30)

    writers = [threading.Thread(target=write, args=(str(i),)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    (text,) = set(read(path))
    assert text in "0123"
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_links_modes_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    path, link, pipe = tmp_path / "secret", tmp_path / "link", tmp_path / "pipe"
    path.write_text("old")
    path.chmod(0o600)
    link.symlink_to("secret")
    _files.write_text(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    _files.write_text(pipe, "through")
    assert os.read(reader, 20) == b"through"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.usefixtures("exchange")
def test_a_folder_keeps_its_permissions_and_those_of_its_files(tmp_path: Path) -> None:
    path = tmp_path / "out"

    def modes() -> dict[str, int]:
        return {each.name: stat.S_IMODE(each.stat().st_mode) for each in (path, *path.rglob("*"))}

    make(path, "folder", "old")
    (path / "link").symlink_to("a")
    for name, mode in (("inner/b", 0o640), ("inner", 0o750), ("a", 0o600), ("", 0o700)):
        (path / name).chmod(mode)
    kept = modes()
    with _files.replacing(path) as partial:
        make(partial, "folder", "new")
        (partial / "more").write_text("new")
        # another kind of file than the old one of this name
        (partial / "link").mkdir(mode=0o755)
    assert read(path) == ["new"] * 3
    assert modes() == kept | {"more": modes()["more"], "link": 0o755}
    path.chmod(0o711)
    for each in (*path.glob("inner/*"), *(each for each in path.iterdir() if each.is_file())):
        each.unlink()
    for folder in ("inner", "link"):
        (path / folder).rmdir()
    # an empty folder is replaced in another way
    with _files.replacing(path) as partial:
        make(partial, "folder", "new")
    assert modes()["out"] == 0o711


def test_an_old_folder_that_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "out"
    make(path, "folder", "old")

    def refuse(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "no", str(folder))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with caplog.at_level(logging.WARNING, "twell"), _files.replacing(path) as partial:
        make(partial, "folder", "new")
    assert set(read(path)) == {"new"}
    (left,) = tmp_path.glob(".out.partial-*")
    assert f"{left} could not be removed" in caplog.text


def write_json(path: Path) -> None:
    from profiling import harness

    harness.write_json(path, [], machine="m", arguments={})


def test_files_of_users_are_replaced_whole_and_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, old = tmp_path / "out.json", "[]"
    path.write_text(old)
    synced: list[str] = []

    def sync(partial: Path) -> None:
        assert path.read_text() == old
        synced.append(partial.read_text())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_files, "sync_all", sync)
        with pytest.raises(KeyboardInterrupt):
            write_json(path)
    assert path.read_text() == old
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]
    write_json(path)
    # without its date
    assert path.read_text().splitlines()[-1] == synced[0].splitlines()[-1]
    assert path.read_text() != old
