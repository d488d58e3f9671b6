"""profiling/engine without an engine: what it draws, asks and compares."""

import contextlib
import itertools
import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from profiling.engine import __main__ as engine


# Answers each request, and notes when it began and ended; the second one ends an engine that "dies".
def serve(connection: Any, name: str, log: Path) -> None:
    connection.send({"workloads": []})
    with contextlib.suppress(EOFError):
        for number in itertools.count():
            place, what = connection.recv()
            if name == "dies" and number == 1:
                return
            began = time.monotonic()
            time.sleep(0.05 if name == "fast" else 0.1)
            with log.open("a") as file:
                file.write(f"{began} {time.monotonic()} {name} {place} {what}\n")
            connection.send({"workloads": [place]})


def test_engines_run_one_at_a_time(tmp_path: Path) -> None:
    def start(name: str) -> engine.Engine:
        ours, theirs = multiprocessing.Pipe()
        process = threading.Thread(target=serve, args=(theirs, name, tmp_path / "log"), daemon=True)
        process.start()
        return engine.Engine(name, process, ours)

    engines = [start(name) for name in ("fast", "slow", "dies")]
    whole = engine.measure(engines, 2, 2, time.monotonic() + 5)
    assert whole == {name: {"workloads": [1]} for name in ("fast", "slow")}
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert all(float(this[1]) <= float(after[0]) for this, after in itertools.pairwise(lines))
    ran = [line[2:5] for line in lines if line[2] == "slow"]
    assert ran == [["slow", *line] for line in itertools.product("01", ("run", "run", "run", "end"))]


def test_an_engine_that_cannot_start_ends(tmp_path: Path) -> None:
    """Here for want of vLLM or of a model; what it said is in its log."""
    made = engine.start("stock", {"name": "stock", "folder": str(tmp_path), "workloads": [], "options": {}})
    assert made.heard(time.monotonic() + 300) is None
    made.process.join(60)
    made.end()
    assert "Error" in (tmp_path / "stock.log").read_text()


def test_tokens_of_engines_are_compared() -> None:
    figures: dict[str, Any] = {"prompt": 8, "sequences": 3, "new": 3, "seconds": [1.0], "per_s": 9.0, "step_ms": None}
    tokens = {"stock": [[1, 2, 3], [4, 5, 6], [7, 8, 9]], "auto": [[1, 2, 3], [4, 1, 1], [0, 8, 9]]}
    tokens |= {"row": tokens["stock"], "auto-eager": tokens["auto"]}
    found = {name: {"workloads": [figures | {"tokens": made}]} for name, made in tokens.items()}
    rows = {row["engine"]: row["differ"] for row in engine.rows_of(found)}
    assert rows == {"stock": 0, "auto": 2, "row": 0, "auto-eager": None}
