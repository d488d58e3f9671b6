"""Reports of a run: lines on the console, records in ``metrics.jsonl``, and the time of training."""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from twell import _files


class Console:
    """The console. It prints progress only after ``patience`` seconds without a line."""

    def __init__(self, say: Callable[[str], None], patience: float = 20.0) -> None:
        self._say, self.patience, self._said = say, patience, time.monotonic()

    def say(self, line: str) -> None:
        self._say(line)
        self._said = time.monotonic()

    def progress(self, line: str) -> None:
        if time.monotonic() - self._said > self.patience:
            self.say(line)


class Metrics:
    """Appends records to a file, one JSON object per line. With ``path`` None (ranks other than the first) writes
    nothing.

    ``evaluated`` are the steps of earlier records with a held-out loss.
    """

    def __init__(self, path: Path | None, resume_step: int | None) -> None:
        self.path, self.evaluated = path, set[float]()
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            if path.exists():
                path.replace(path.with_suffix(".old.jsonl"))
        elif path.exists():
            # records after the checkpoint will be written again
            kept = [line for line in path.read_text().splitlines() if _step(line) <= resume_step]
            self.evaluated = {_step(line) for line in kept if "held_out_ce" in json.loads(line)}
            _files.write_text(path, "".join(line + "\n" for line in kept))

    def write(self, **record: Any) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(record, default=str) + "\n")


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except ValueError:
        # truncated when the run ended
        return float("inf")


class Clock:
    """Seconds of training since the last ``lap``, without those spent in ``paused``; it begins at ``already``."""

    def __init__(self, device: torch.device, already: float = 0.0) -> None:
        self.device, self._since = device, time.perf_counter() - already

    def lap(self) -> float:
        """Seconds since the last lap. Call it after reading a result from the device, when nothing is in flight."""
        before, self._since = self._since, time.perf_counter()
        return self._since - before

    def so_far(self) -> float:
        """Seconds since the last lap, which goes on; waits for the device."""
        self._wait()
        return time.perf_counter() - self._since

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._wait()
        started = time.perf_counter()
        try:
            yield
        finally:
            self._wait()
            self._since += time.perf_counter() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def missed_target(target: float, reached: float, steps: int) -> str:
    """A warning if a run ended more than a tenth away from its ``target`` of non-zeros, else ""."""
    if abs(reached / target - 1) <= 0.1:
        return ""
    return (
        f"warning: the target of {target:g} non-zeros was missed: {reached:.1f} after {steps:,} steps; docs/relufy.md "
        "says how many a target needs"
    )


def peak_bytes(device: torch.device) -> int:
    """Peak memory: of tensors since the last call (GPU), or of this process so far (CPU)."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def machine(device: torch.device) -> str:
    """The machine, to name beside figures."""
    if device.type != "cuda":
        return f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, CUDA {torch.version.cuda}"
