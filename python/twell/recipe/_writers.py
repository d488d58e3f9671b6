"""Writers of figures: CSV always, TensorBoard and Weights & Biases if they are installed."""

import csv
import importlib.util
import io
import os
import stat
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from twell import _files
from twell._arguments import require, require_flag, require_integer, require_path
from twell._runtime.log import logger
from twell.recipe._stats import LayerStats, SparsityStats

_SUMMARY = "mean"
# the columns that every file begins with; others are l0_at_...
_COLUMNS = ["step", *(name for name in LayerStats._fields if name != "positions")]


class StatsWriter:
    """Writes ``SparsityStats`` of steps: a line per layer to a CSV file, the same numbers to TensorBoard and W&B.

    Only rank 0 writes; other ranks do nothing. The lines of a step are written together and reach the operating system
    before ``write`` returns: a killed run leaves at most its last line cut short.

    Args:
        path: of the CSV file. Its folder is made. ValueError if there is something else than a regular file that begins
            with the columns of a StatsWriter, or an empty one: nothing else is moved, cut or written to.
        resume_step: None begins a file and moves an existing one to the first free name of "NAME.1", "NAME.2", ...
            A number continues the existing file after that step: lines of later steps and a line cut short are removed.
            ``write`` raises ValueError if its columns differ from the figures.
        tensorboard: write to this folder; True: to ``path`` with the suffix ".tensorboard". Without tensorboard
            installed nothing happens.
        wandb: log to the run that is active at ``write``, if any.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        resume_step: int | None = None,
        tensorboard: bool | str | os.PathLike[str] = True,
        wandb: bool = True,
    ) -> None:
        require_path("path", path)
        if resume_step is not None:
            require_integer("resume_step", resume_step, 0)
        require("tensorboard", tensorboard, (bool, str, os.PathLike), "True, False or a folder")
        require_flag("wandb", wandb)
        self.path, self.active = Path(path), _is_first_rank()
        self._columns: list[str] | None = None
        self._board: Any = None
        self._wandb, self._defined = wandb, False
        if not self.active:
            return
        if os.path.lexists(self.path):
            _require_own(self.path)
            if resume_step is None:
                _move_aside(self.path)
            else:
                self._columns = _cut_back(self.path, resume_step)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if tensorboard and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            folder = self.path.with_suffix(".tensorboard") if tensorboard is True else Path(tensorboard)
            purge = None if resume_step is None else resume_step + 1
            self._board = SummaryWriter(str(folder), purge_step=purge)

    def write(self, step: int, stats: SparsityStats) -> None:
        """Write the figures of all layers, and to TensorBoard and W&B their means as layer "mean"."""
        require("stats", stats, SparsityStats, "the SparsityStats that SparsityTracker.read returns")
        if not self.active:
            return
        rows = [{"step": step, **row} for row in stats.rows()]
        self._write_csv(rows)
        values = {
            f"twell/{key}/{row['layer'] or 'layer'}": value
            for row in stats.rows()
            for key, value in row.items()
            if isinstance(value, (int, float)) and key not in ("neurons", "calls")
        }
        values |= {f"twell/{name}/{_SUMMARY}": value for name, value in stats.summary().items()}
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()
        # an active run has imported wandb
        run = getattr(sys.modules.get("wandb"), "run", None) if self._wandb else None
        if run is not None:
            if not self._defined:
                run.define_metric("twell/step")
                run.define_metric("twell/*", step_metric="twell/step")
                self._defined = True
            run.log({**values, "twell/step": step})

    def close(self) -> None:
        """Close the TensorBoard writer; the CSV file is not kept open."""
        if self._board is not None:
            self._board.close()
            self._board = None

    def _write_csv(self, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        columns = list(rows[0])
        text = ""
        if self._columns is None:
            text = _lines([columns])
        elif self._columns != columns:
            raise ValueError(f"{self.path} must have the columns {', '.join(columns)}, got {', '.join(self._columns)}")
        text += _lines([[_cell(row[column]) for column in columns] for row in rows])
        _append(self.path, text.encode())
        self._columns = columns


def _is_first_rank() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _append(path: Path, data: bytes) -> None:
    """Append ``data`` to the file; if that fails, cut the file back to its length before."""
    with open(path, "ab", buffering=0) as file:
        before, rest = os.fstat(file.fileno()).st_size, memoryview(data)
        try:
            # a write may take only a part, such as the part that fits on the disk
            while rest:
                rest = rest[file.write(rest) :]
        except BaseException:
            file.truncate(before)
            raise


def _require_own(path: Path) -> None:
    """ValueError unless ``path`` is a regular file, no link, that begins as a StatsWriter begins one, or is empty."""
    kind = path.lstat().st_mode
    begin, got = _lines([_COLUMNS]), f"no regular file ({stat.filemode(kind)})"
    if stat.S_ISREG(kind):
        with open(path, "rb") as file:
            line = file.readline(1 << 20).decode(errors="replace")
        # a run that was killed may have left a part of its first line
        if begin.startswith(line) or line.startswith(f"{begin[:-1]},l0_"):
            return
        got = f"one that begins with {line[:60]!r}"
    raise ValueError(
        f"path must be a new file or one of a StatsWriter, whose first line begins with {begin[:-1]}, got {got}: "
        f"{path}; give another path, or move what is there"
    )


def _move_aside(path: Path) -> None:
    free = next(other for i in range(1, 1 << 20) if not os.path.lexists(other := path.with_name(f"{path.name}.{i}")))
    path.rename(free)
    logger.warning("%s is of another run: moved to %s", path, free)


def _cut_back(path: Path, step: int) -> list[str] | None:
    """Remove lines of steps after ``step`` and broken lines; return the columns, None if the file has no line."""
    text = path.read_bytes()
    # a machine that lost power may leave anything at the end
    whole = text[: text.rfind(b"\n") + 1].decode(errors="replace").replace("\0", "")
    lines = list(csv.reader(io.StringIO(whole)))
    if not lines:
        path.unlink()
        return None
    columns = lines[0]
    place = columns.index("step")
    whole_lines = [line for line in lines[1:] if len(line) == len(columns) and line[place].isdecimal()]
    kept = [line for line in whole_lines if int(line[place]) <= step]
    _files.write_text(path, _lines([columns, *kept]))
    return columns


def _lines(rows: list[Any]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _cell(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value
