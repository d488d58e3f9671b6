"""Checkpoints that are complete or absent. A run resumes from one as if it had never stopped.

``save`` writes the folder of a step under another name, syncs it to disk, adds a manifest of its files, and renames it.
A folder of an interrupted save has the wrong name or a manifest that does not match, and is never read. Checksums
reveal later damage when a run begins.

A checkpoint holds weights, moments and steps of the optimizer, the place in the text, random states, and the dead
neurons of the last observation. It leaves out the measurements of "auto": layers choose their strategies again within a
few steps. On the CPU a resumed run has the same bits. On a GPU no two runs are the same, because some sums have no
fixed order and strategies may differ.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from twell import _files

from . import RequestError
from .parallel import World
from .whole import damaged, manifest, seal

# a warning about a single process, which has no process group on purpose
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@contextlib.contextmanager
def alone(out: Path, here: World) -> Iterator[None]:
    """Lock the folder ``out`` against other runs. The system releases the lock however the process ends.

    RequestError if another run, or a process left by a killed torchrun, still writes there.
    """
    if not here.first:
        yield
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("a")
    except OSError as error:
        raise RequestError(f"--out: expected a folder to write to, got {str(out)!r}: {error.strerror}") from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(f"--out: expected a folder of this run alone, got {str(out)!r}: another runs") from None
        except OSError:
            # some file systems have no locks
            pass
        yield


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    about: dict[str, Any],
    here: World,
    keep: int,
) -> Path:
    """Write ``folder/step-N`` and remove all but the last ``keep``.

    ``state`` (tensors and plain values) is the same on all ranks, ``about`` (plain values) is for the manifest.
    """
    final = folder / f"step-{step:08d}"
    partial = final.with_suffix(".tmp")
    if here.first:
        for left in folder.glob("step-*.tmp"):
            shutil.rmtree(left)
        partial.mkdir(parents=True)
    here.barrier()
    try:
        _fill(partial, model, optimizer, state, here)
        here.barrier()
        if here.first:
            seal(partial, {"step": step, "ranks": here.size, **about})
    except Exception:
        # free the space: the disk may be full
        if here.first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if here.first:
        if final.exists():
            # it is incomplete, or the run would have resumed from it
            shutil.rmtree(final)
        partial.rename(final)
        _files.sync(folder)
        for old in complete(folder)[:-keep]:
            # under this name it is not a checkpoint, even if the removal is interrupted
            shutil.rmtree(old.rename(old.with_suffix(".tmp")))
    here.barrier()
    return final


def _fill(
    partial: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], here: World
) -> None:
    weights, moments = get_state_dict(model, optimizer)
    failure: BaseException | None = None
    try:
        everything = {"model": weights, "optimizer": moments}
        dcp.save(everything, checkpoint_id=partial, no_dist=here.size == 1)  # type: ignore[attr-defined]
    except CheckpointException as error:
        # CheckpointException is not an Exception, and prints the stack of every rank
        failure = next(iter(error.failures.values()))[0]
    # raised here, outside of the handler, so that it keeps its own cause
    if failure is not None:
        raise failure
    _write(random_state(here), partial / f"random-{here.rank}.pt")
    if here.first:
        _write(state, partial / "state.pt")


def _write(content: Any, path: Path) -> None:
    # torch's own file reports a full disk as an unexpected position
    with path.open("wb") as file:
        torch.save(content, file)


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of ``folder``, oldest first."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name) and manifest(path)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def choose(folder: Path, resume: str, check: bool = True) -> Path | None:
    """The checkpoint for ``resume`` ("auto", "never" or a path), or None.

    RequestError if it cannot be read, or if ``folder`` has later checkpoints, which would mix with those of this run.
    ``check``: read all of it to find damage; one rank is enough.
    """
    known = complete(folder)
    path = None if resume == "never" else Path(resume)
    if resume == "auto":
        path = known[-1] if known else None
    elif path is not None and manifest(path) is None:
        raise RequestError(f"--resume: expected a complete checkpoint, got {resume!r}; there are {_names(known)}")
    later = [each for each in known if path is None or each.name > path.name]
    if later:
        raise RequestError(
            f"--resume: expected no checkpoints after {path.name if path else 'the beginning'}, got {_names(later)}; "
            "remove them, or choose another --out"
        )
    if check and path is not None and (files := damaged(path)):
        raise RequestError(
            f"--resume: {path} is damaged: expected other bytes in {', '.join(files)}; remove it to go on from what is "
            f"left of {_names(known)}"
        )
    return path


def _names(paths: list[Path]) -> str:
    return ", ".join(map(str, paths)) or "none"


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, here: World) -> dict[str, Any]:
    """Load ``path`` into model, optimizer and random generators; return the saved ``state``."""
    weights, moments = get_state_dict(model, optimizer)
    saved: dict[str, Any] = {"model": weights, "optimizer": moments}
    dcp.load(saved, checkpoint_id=path, no_dist=here.size == 1)  # type: ignore[attr-defined]
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    random = path / f"random-{here.rank}.pt"
    # there may be more ranks now than when it was saved
    if random.exists():
        set_random_state(torch.load(random, weights_only=True), here)
    state: dict[str, Any] = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    return state


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """All weights, gathered from all ranks, on the CPU; complete only on the first rank."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def random_state(here: World) -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    if here.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(here.device)
    return state


def set_random_state(state: dict[str, Any], here: World) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and here.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], here.device)
