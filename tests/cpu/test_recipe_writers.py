"""What the recipe writes: CSV that survives stops, kills and full disks, TensorBoard and Weights & Biases."""

import csv
import io
import logging
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
from recipe_models import Model, inputs, tracked

from twell import recipe
from twell.recipe import StatsWriter, _writers


def stats_of(model: Model, **options: Any) -> recipe.SparsityStats:
    return recipe.SparsityStats(tracked(model, inputs()[0], **options))


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_csv_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, stats = tmp_path / "sparsity.csv", stats_of(Model())
    writer = StatsWriter(path, tensorboard=False)
    for number in (1, 2, 3, 4):
        writer.write(number, stats)
    whole = path.read_bytes()
    # cut anywhere, even in the header or in a number of the last line
    for cut in (3, len(whole) // 2, len(whole) - 1, len(whole)):
        path.write_bytes(whole[:cut])
        before = [line for line in table(path)[:-1] if int(line["step"]) <= 2] if cut > 300 else []
        StatsWriter(path, tensorboard=False, resume_step=2)
        writer = StatsWriter(path, tensorboard=False, resume_step=2)
        writer.write(3, stats)
        lines = table(path)
        assert lines[: len(before)] == before
        assert [line["step"] for line in lines[-2:]] == ["3", "3"]
        assert len({tuple(line) for line in lines}) == 1
        assert max(int(line["step"]) for line in lines) == 3
        assert not list(tmp_path.glob(".*"))
    # a machine that lost power may leave this
    kept = path.read_bytes()
    path.write_bytes(kept + b"\0" * 40 + b"\n\xff\xfe,1\nx" + kept.splitlines()[-1][1:] + b"\n")
    StatsWriter(path, tensorboard=False, resume_step=3)
    assert path.read_bytes() == kept
    # other columns
    writer = StatsWriter(path, tensorboard=False, resume_step=3)
    with pytest.raises(ValueError, match="must have the columns"):
        writer.write(4, stats_of(Model(), positions=(0,)))
    # a new run overwrites no other run's lines
    content = path.read_bytes()
    with caplog.at_level(logging.WARNING, "twell"):
        StatsWriter(path, tensorboard=False).write(1, stats)
        StatsWriter(path, tensorboard=False).write(1, stats)
    assert (tmp_path / "sparsity.csv.1").read_bytes() == content
    assert (tmp_path / "sparsity.csv.2").exists()
    assert "moved to" in caplog.text


@pytest.mark.parametrize(
    ("kind", "resume"), [("table", 5), ("line", None), ("folder", 5), ("pipe", None), ("link", 5), ("dangling", None)]
)
def test_what_is_not_its_own_is_left_alone(kind: str, resume: int | None, tmp_path: Path) -> None:
    path, text = tmp_path / "figures", "step,loss,note\n" + "".join(f"{i},0.5,mine\n" for i in range(20))
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "link":
        (tmp_path / "target").write_text(text)
        path.symlink_to(tmp_path / "target")
    else:
        path.write_text(text if kind == "table" else "precious")
    before = sorted((p.name, p.lstat().st_ino, p.lstat().st_size) for p in tmp_path.iterdir())
    with pytest.raises(ValueError, match="path must be a new file or one of a StatsWriter"):
        StatsWriter(path, resume_step=resume, tensorboard=False)
    assert sorted((p.name, p.lstat().st_ino, p.lstat().st_size) for p in tmp_path.iterdir()) == before


def test_a_write_that_takes_a_part_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:7])

    stats, monkey = stats_of(Model()), lambda path, mode, buffering: Slow(path, mode)
    StatsWriter(tmp_path / "whole.csv", tensorboard=False).write(1, stats)
    monkeypatch.setattr(_writers, "open", monkey, raising=False)
    StatsWriter(tmp_path / "parts.csv", tensorboard=False).write(1, stats)
    assert (tmp_path / "parts.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


@pytest.mark.parametrize(("written", "room"), [(0, 130), (1, 0), (1, 130)])
def test_lines_that_do_not_fit_raise_and_leave_none(written: int, room: int, tmp_path: Path) -> None:
    """A full disk takes part of a write: the header, or lines; none may stay or join others."""
    path, stats = tmp_path / "sparsity.csv", stats_of(Model())
    writer = StatsWriter(path, tensorboard=False)
    for number in range(written):
        writer.write(number, stats)
    size, limits = path.stat().st_size if written else 0, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            writer.write(7, stats)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == size
    writer.write(8, stats)
    lines = table(path)
    assert [line["step"] for line in lines] == [str(number) for number in (*range(written), 8) for _ in range(2)]
    assert not any(None in line or None in line.values() for line in lines)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    stats = stats_of(Model())
    writer = StatsWriter(tmp_path / "sparsity.csv")
    for number in (1, 2, 3):
        writer.write(number, stats)
    writer.close()
    writer = StatsWriter(tmp_path / "sparsity.csv", resume_step=2)
    writer.write(3, stats)
    writer.close()
    events = EventAccumulator(str(tmp_path / "sparsity.tensorboard"))
    events.Reload()
    scalars = events.Scalars("twell/l0/blocks.0.mlp")
    assert [scalar.step for scalar in scalars] == [1, 2, 3]
    assert scalars[0].value == pytest.approx(stats.layers[0].l0)
    assert events.Scalars("twell/dead/mean")[0].value == pytest.approx(stats.summary()["dead"])


def test_wandb_gets_what_a_run_that_is_active_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Run:
        logged: list[dict[str, Any]] = []  # noqa: RUF012
        metrics: list[Any] = []  # noqa: RUF012

        def log(self, values: dict[str, Any]) -> None:
            self.logged.append(values)

        def define_metric(self, *args: Any, **kwargs: Any) -> None:
            self.metrics.append((args, kwargs))

    class Wandb:
        run: Run | None = None

    monkeypatch.setitem(sys.modules, "wandb", Wandb())  # type: ignore[arg-type]
    stats = stats_of(Model())
    writer = StatsWriter(tmp_path / "sparsity.csv", tensorboard=False)
    writer.write(1, stats)
    Wandb.run = Run()
    writer.write(2, stats)
    StatsWriter(tmp_path / "other.csv", tensorboard=False, wandb=False).write(3, stats)
    (values,) = Run.logged
    assert values["twell/step"] == 2
    assert values["twell/l1/blocks.1.mlp"] == stats.layers[1].l1
    assert len(Run.metrics) == 2
