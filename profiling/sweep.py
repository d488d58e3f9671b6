"""Run ``profiling.bench`` over ranges and keep the results, one file per sweep: the data of profiling/draw.

    python -m profiling.sweep nnz --out build/sweeps --budget-s 200
    python -m profiling.sweep layers --real FOLDER

Sweeps:
  nnz      every strategy and the training step by non-zeros per token, on the uniform and the topic pattern
  m        the same by tokens per call: few with rotated weights (bench decode), many with rotated tokens
  layers   layer by layer: recorded layers (--real)
  memory   memory kept and peaks of a training step and of a forward pass, by non-zeros per token
  kernels  the time of each kernel in a forward pass and a training step

The file is written after each call of bench, and after Ctrl-C with the points measured so far. The same command
continues a sweep: it skips points that are in the file and right. A call begins only if its expected time is left of
--budget-s.

Exit status: 1 if a row is red, 2 if the request makes no sense, 130 after Ctrl-C, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
NONZEROS = (1, 2, 4, 8, 16, 29, 64, 128, 256, 512, 911, 2816, 5632)
TRAINED = (1, 8, 29, 128, 512, 911)
KEPT = (1, 8, 29, 64, 128, 256, 512, 911)
# Tokens of bench decode, which rotates weights, and of bench ffn, which rotates tokens.
FEW = (1, 4, 16, 64, 128, 256)
MANY = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
TRAINED_M = (1024, 4096, 16384, 65536)
PATTERNS = {"uniform": "", "topic": ",skew=1,tokens=0.5,topic=0.5"}
NAMED = ("uniform29", "skew29", "topic29", "topic128")
ALL = ("--strategy", "row,union,auto,dense")
AUTO = ("--strategy", "auto")

# Expected seconds on an H200: for a point of 16,384 tokens (float64, "auto" settling, recordings, 0.3 s of samples),
# for the ceilings of the machine in each call, and for torch.compile of a new shape.
POINT_S = {"ffn": 1.7, "train": 3.5, "decode": 1.2}
CALL_S = 3.0
COMPILE_S = {"ffn": 7.0, "train": 14.0, "decode": 7.0}
# Calls take about this many seconds, the most that a lost machine costs.
LONGEST_S = 40.0

Row = dict[str, Any]
Bench = Callable[[Sequence[str]], int]


class SweepError(Exception):
    """A request makes no sense, or a file cannot be continued."""


@dataclass(frozen=True)
class Point:
    """One workload with one number of tokens, as bench measures it. ``fields`` go into each of its rows.

    ``workload`` is the value of --workload, ``name`` the workload in rows, ``options`` all other options of bench.
    """

    op: str
    workload: str
    name: str
    m: int
    options: tuple[str, ...]
    label: str = ""
    fields: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def key(self) -> str:
        return f"{self.op} {self.label or self.name} m={self.m}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for points that may share a call. Rows do not name the folder of recorded layers, so folders differ."""
        return self.op, self.options, self.workload.rpartition("/")[0]

    @property
    def seconds(self) -> float:
        """Expected seconds. Half of a point's time does not shrink with its tokens."""
        size = 1.0 if self.op == "decode" else max(0.5, self.m / 16384)
        return POINT_S[self.op] * size

    @property
    def asked(self) -> list[str]:
        """The request as the file keeps it, without folders, whose paths differ by machine."""
        return [self.op, self.name, str(self.m), *self.options]


# The sweeps


def drawn(op: str, nnz: float, pattern: str, m: int, options: Sequence[str]) -> Point:
    """A point on a drawn pattern."""
    name = f"nnz={nnz:g}{PATTERNS[pattern]}"
    return Point(op, name, name, m, tuple(options), "", {"pattern": pattern})


def sized(arguments: argparse.Namespace) -> tuple[str, ...]:
    return ("-k", str(arguments.k), "-n", str(arguments.n))


def nonzeros(arguments: argparse.Namespace) -> Iterator[Point]:
    for op, counts, options in (("ffn", NONZEROS, ALL), ("train", TRAINED, AUTO)):
        for nnz in counts:
            if nnz <= arguments.n:
                for pattern in PATTERNS:
                    yield drawn(op, nnz, pattern, arguments.m, (*sized(arguments), *options))


def tokens(arguments: argparse.Namespace) -> Iterator[Point]:
    for op, counts, options in (("decode", FEW, ALL), ("ffn", MANY, ALL), ("train", TRAINED_M, AUTO)):
        for m in counts:
            for pattern in PATTERNS:
                yield drawn(op, min(29, arguments.n), pattern, m, (*sized(arguments), *options))


def layers(arguments: argparse.Namespace) -> Iterator[Point]:
    if not arguments.real:
        raise SweepError("layers takes --real FOLDER, got none")
    for op in ("ffn", "train"):
        for folder in arguments.real:
            source = f"layers recorded in {folder.resolve().name}"
            for layer in recorded(folder):
                yield real(op, folder, layer, arguments.m, AUTO, source=source)


def real(op: str, folder: Path, layer: int, m: int, options: tuple[str, ...], **fields: Any) -> Point:
    """A point on a recorded layer."""
    label = f"{folder.resolve().name}/{layer}"
    return Point(op, f"real:{folder}/{layer}", f"real{layer}", m, options, label, {"layer": layer, **fields})


def recorded(folder: Path) -> list[int]:
    """The numbers of the recorded layers in a folder."""
    numbers = sorted(int(path.stem[5:]) for path in folder.glob("layer*.npz") if path.stem[5:].isdecimal())
    if not numbers:
        raise SweepError(f"--real takes a folder of recorded layers (layer3.npz), got {folder}")
    return numbers


def memory(arguments: argparse.Namespace) -> Iterator[Point]:
    for op in ("train", "ffn"):
        for nnz in KEPT:
            if nnz <= arguments.n:
                yield drawn(op, nnz, "topic", arguments.m, (*sized(arguments), *AUTO, "--memory"))


def kernels(arguments: argparse.Namespace) -> Iterator[Point]:
    for op in ("ffn", "train"):
        for name in NAMED:
            yield Point(op, name, name, arguments.m, (*sized(arguments), *AUTO, "--kernels"))
        for folder in arguments.real:
            for layer in recorded(folder):
                yield real(op, folder, layer, arguments.m, (*AUTO, "--kernels"))


SWEEPS: dict[str, Callable[[argparse.Namespace], Iterator[Point]]] = {
    "nnz": nonzeros,
    "m": tokens,
    "layers": layers,
    "memory": memory,
    "kernels": kernels,
}


# Calls of bench


@dataclass(frozen=True)
class Call:
    """The points of one call of bench: all of its workloads with all of its numbers of tokens."""

    points: tuple[Point, ...]

    @property
    def argv(self) -> list[str]:
        first = self.points[0]
        workloads = dict.fromkeys(point.workload for point in self.points)
        counts = [str(m) for m in dict.fromkeys(point.m for point in self.points)]
        # decode takes its tokens from these 4,096
        size = ["-m", "4096", "--m-decode", *counts] if first.op == "decode" else ["-m", *counts]
        return [first.op, "--workload", *workloads, *size, *first.options]

    def seconds(self, compiled: set[tuple[Any, ...]] | None) -> float:
        """Expected seconds on an H200; ``compiled`` are the shapes that torch.compile has seen, None without it."""
        new = set() if compiled is None else self.shapes() - compiled
        return CALL_S + sum(point.seconds for point in self.points) + sum(COMPILE_S[shape[0]] for shape in new)

    def shapes(self) -> set[tuple[Any, ...]]:
        return {(point.op, point.m, *point.options) for point in self.points}


def next_call(points: Sequence[Point], longest: float) -> Call:
    """The next call: as many points as fit in about ``longest`` seconds, from the first on, at least one."""
    first = points[0]
    alike = [point for point in points if point.kind == first.kind]
    by_tokens: dict[int, list[Point]] = {}
    for point in alike:
        by_tokens.setdefault(point.m, []).append(point)
    workloads = [point.workload for point in by_tokens[first.m]]
    taken: list[Point] = []
    left = longest
    for same_m in by_tokens.values():
        cost = sum(point.seconds for point in same_m) + COMPILE_S[first.op]
        # a call measures each workload with each number of tokens
        if taken and ([point.workload for point in same_m] != workloads or cost > left):
            break
        while len(same_m) > 1 and not taken and sum(point.seconds for point in same_m) > longest:
            same_m = same_m[: (len(same_m) + 1) // 2]
            workloads = [point.workload for point in same_m]
        taken += same_m
        left -= cost
    return Call(tuple(taken))


class File:
    """The points and rows of a sweep."""

    def __init__(self, path: Path, name: str, arguments: dict[str, Any]) -> None:
        self.path, self.name = path, name
        self.data: dict[str, Any] = {"machine": "", "sweep": name, "arguments": arguments}
        self.data |= {"complete": False, "points": {}, "rows": []}
        if path.exists():
            try:
                found = json.loads(path.read_text())
                right = found["sweep"] == name and isinstance(found["points"], dict) and isinstance(found["rows"], list)
            except (ValueError, KeyError, TypeError) as error:
                raise SweepError(f"{path} is no file of a sweep: {error!r}") from error
            if not right:
                raise SweepError(f"{path} holds sweep {found['sweep']!r}, expected {name!r}")
            if found["arguments"] != arguments:
                raise SweepError(f"{path} was measured with {found['arguments']}, now {arguments}: name another --out")
            self.data = found

    def has(self, point: Point) -> bool:
        """Whether the file has the point, measured with the same request, and right."""
        known = self.data["points"].get(point.key)
        return known is not None and known["asked"] == point.asked and not known["red"]

    def add(self, found: dict[Point, list[Row]], result: dict[str, Any]) -> None:
        """Add or replace points and write the file."""
        machine, before = result.get("machine", ""), self.data["machine"]
        if machine and before and lasting(machine) != lasting(before):
            raise SweepError(f"{self.path} is of another machine or other kernels: {before}; now {machine}")
        keys = {point.key for point in found}
        self.data["rows"] = [row for row in self.data["rows"] if row["point"] not in keys]
        for point, rows in found.items():
            self.data["rows"] += [row | {"point": point.key} | point.fields for row in rows]
            self.data["points"][point.key] = {"asked": point.asked, "red": any(row.get("red") for row in rows)}
        self.data["machine"] = before or machine
        self.data["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        if "ceilings" in result:
            self.data["ceilings"] = result["ceilings"]
        self.write()

    def write(self) -> None:
        """Write the file whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        from twell import _files

        _files.write_text(self.path, json.dumps(self.data, indent=1) + "\n")


def lasting(machine: str) -> str:
    """The machine line without the current clocks and the commit."""
    return re.sub(r"SM \d+ MHz now, |; commit \S+", "", machine)


def measure(call: Call, more: Sequence[str], bench: Bench, folder: Path) -> tuple[int, dict[str, Any], str]:
    """Run a call of bench; return its exit status, its data and its error. Status 130 is Ctrl-C."""
    path = folder / "call.json"
    path.unlink(missing_ok=True)
    printed, why = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(printed):
            status = bench([*call.argv, *more, "--no-eager", "--json", str(path)])
    except KeyboardInterrupt:
        status = 130
    except SystemExit as error:
        raise SweepError(f"profiling.bench does not take {' '.join([*call.argv, *more])}") from error
    except Exception as error:  # a kernel fault may surface in a later call
        traceback.print_exc()
        status, why = 1, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if status == 2 and not result:
        # bench has printed the reason, which holds for all other calls
        raise SweepError(f"profiling.bench cannot serve this request, see above: {' '.join([*call.argv, *more])}")
    return status, result, why or f"profiling.bench gave no row, exit status {status}"


def rows_of(point: Point, result: dict[str, Any]) -> list[Row]:
    """The rows of a point. Rows of a workload that failed have 0 tokens."""
    rows = [row for row in result.get("rows", []) if row["workload"] == point.name]
    return [row for row in rows if row["tokens"] in (0, point.m)]


def failed(point: Point, why: str) -> Row:
    """The row of a point that could not be measured."""
    return {"workload": point.name, "variant": point.op, "requested": "", "tokens": point.m, "nnz": 0.0, "red": why}


def run(name: str, arguments: argparse.Namespace, bench: Bench, deadline: float) -> File:
    """Measure the missing points of a sweep."""
    points = list(SWEEPS[name](arguments))
    more = options(arguments)
    file = File(arguments.out / f"{arguments.prefix}_sweep_{name}.json", name, {"bench": more})
    missing = [point for point in points if not file.has(point)]
    say(f"{name}: {len(points) - len(missing)} of {len(points)} points are there")
    compiled: set[tuple[Any, ...]] | None = None if arguments.compile == "none" else set()
    with tempfile.TemporaryDirectory() as folder:
        while missing:
            left = deadline - time.monotonic()
            call = next_call(missing, min(LONGEST_S, left - CALL_S))
            if call.seconds(compiled) > left:
                say(f"{name}: stops, {left:.0f} s are left, the next call takes {call.seconds(compiled):.0f} s")
                break
            say(f"{name}: {len(missing)} points to go, now {' '.join(call.argv)}")
            begun = time.monotonic()
            status, result, why = measure(call, more, bench, Path(folder))
            found = {point: rows_of(point, result) for point in call.points}
            if status == 130:
                file.add({point: rows for point, rows in found.items() if rows}, result)
                raise KeyboardInterrupt
            file.add({point: rows or [failed(point, why)] for point, rows in found.items()}, result)
            say(f"{name}: {time.monotonic() - begun:.1f} s, {call.seconds(compiled):.0f} expected")
            missing = [point for point in missing if point not in call.points]
            if compiled is not None:
                compiled |= call.shapes()
    file.data["complete"] = all(point.key in file.data["points"] for point in points)
    if file.data["points"]:
        file.write()
    return file


def say(text: str) -> None:
    print(f"sweep: {text}", file=sys.stderr, flush=True)


def red_rows(file: File) -> int:
    """Print the faults of a sweep; return their number."""
    rows = [row for row in file.data["rows"] if row.get("red")]
    for row in rows:
        print(f"{row['point']}, {row['variant']} {row['requested']}: RED {row['red']}")
    return len(rows)


def options(arguments: argparse.Namespace) -> list[str]:
    """Options of every call of bench."""
    device = ["--device", arguments.device] if arguments.device else []
    return ["--seconds", f"{arguments.seconds:g}", "--compile", arguments.compile, *device]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("sweeps", nargs="+", choices=SWEEPS, metavar="SWEEP", help=", ".join(SWEEPS))
    add("--out", type=Path, default=RESULTS, metavar="FOLDER", help="default: profiling/results")
    add("--prefix", default="h200", help="of file names; the charts read h200 (default: %(default)s)")
    add(
        "--budget-s",
        type=float,
        default=600.0,
        metavar="S",
        help="begin no call that would end later (default: %(default)s)",
    )
    add("--seconds", type=float, default=0.3, help="seconds of samples per point (default: %(default)s)")
    add("--compile", choices=("default", "none"), default="default")
    add("-m", type=int, default=16384, help="tokens, except in sweep m (default: %(default)s)")
    add("-k", type=int, default=2048, help="hidden size")
    add("-n", type=int, default=5632, help="neurons")
    add("--real", type=Path, nargs="+", default=[], metavar="FOLDER", help="recorded layers, for layers and kernels")
    add("--device", help="of bench")
    arguments = parser.parse_args(argv)
    arguments.sweeps = list(dict.fromkeys(arguments.sweeps))
    for name in ("budget_s", "seconds", "m", "k", "n"):
        if not getattr(arguments, name) > 0:
            flag = name if len(name) == 1 else f"-{name.replace('_', '-')}"
            parser.error(f"-{flag} takes a number above 0, got {getattr(arguments, name)}")
    return arguments


def main(argv: Sequence[str] | None = None, bench: Bench | None = None) -> int:
    """Run the sweeps; ``bench`` replaces ``profiling.bench.main`` in tests."""
    arguments = parse(argv)
    deadline = time.monotonic() + arguments.budget_s
    files: list[File] = []
    try:
        # refuse a bad request for the last sweep before the first begins
        for name in arguments.sweeps:
            keys = [point.key for point in SWEEPS[name](arguments)]
            twice = sorted({key for key in keys if keys.count(key) > 1})
            if twice:
                raise SweepError(f"expected folders and files of different names, got {twice[0]!r} twice")
        if bench is None:
            from profiling.bench import main

            bench = main

        for name in arguments.sweeps:
            files.append(run(name, arguments, bench, deadline))
    except SweepError as error:
        print(f"sweep: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        say("interrupted; the files have the points measured so far; run it again to continue")
        return 130
    red = sum(red_rows(file) for file in files)
    if not all(file.data["complete"] for file in files):
        say("points are missing; run it again to continue")
    return int(red > 0)


if __name__ == "__main__":
    sys.exit(main())
