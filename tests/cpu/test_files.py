"""Files appear whole or not at all, even if their writer fails or is killed."""

import errno
import os
import signal
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ranks

from twell.base import files


def test_the_new_takes_the_place_of_the_old(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for text, before in (("first", None), ("second", "first")):
        with files.replacing(path) as partial:
            partial.write_text(text)
            assert (path.read_text() if path.exists() else None) == before
        assert path.read_text() == text
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("where", ["block", "fsync", "replace"])
def test_a_writer_that_fails_leaves_the_old(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    path.write_text("old")

    def fail(*_: Any) -> None:
        assert path.read_text() == "old"
        raise OSError(errno.ENOSPC, "full")

    if where != "block":
        monkeypatch.setattr(os, where, fail)
    with pytest.raises(OSError, match="full"), files.replacing(path) as partial:  # noqa: PT012
        partial.write_text("new")
        if where == "block":
            fail()
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def killed_as_it_replaces(path: Path, after: bool) -> None:
    replace = os.replace

    def deadly(*names: Any) -> None:
        if after:
            replace(*names)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, "replace", deadly)  # noqa: B010
    files.write_text(path, "new")


@pytest.mark.parametrize("after", [False, True])
def test_a_writer_that_is_killed_leaves_the_old_or_the_new(after: bool, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")
    process = ranks.forks().Process(target=killed_as_it_replaces, args=(path, after))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert path.read_text() == ("new" if after else "old")


def test_writers_at_the_same_time_do_not_mix(tmp_path: Path) -> None:
    path, ready = tmp_path / "out", threading.Barrier(4)

    def write(text: str) -> None:
        with files.replacing(path) as partial:
            partial.write_text(text)
            ready.wait(30)

    with ThreadPoolExecutor(4) as writers:
        list(writers.map(write, "0123"))
    assert path.read_text() in ("0", "1", "2", "3")
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_links_modes_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    path, link, pipe = tmp_path / "secret", tmp_path / "link", tmp_path / "pipe"
    path.write_text("old")
    path.chmod(0o600)
    link.symlink_to("secret")
    files.write_text(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write_text(pipe, "through")
    assert os.read(reader, 20) == b"through"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(IsADirectoryError):
        files.write_text(tmp_path, "new")
