"""Run the commands behind profiling/results/, as many as fit the time, and go on with the others in the next call.

    python -m profiling.everything --list                  # what is older than kernels or version, and its seconds
    python -m profiling.everything --out results --budget-s 540 --real FOLDER     # on a GPU
    python -m profiling.everything auto screen --out results --budget-s 540 --real FOLDER

Without names: all that is older than the present kernels, and host times of another version than the present one, in
the order of ``measurements.txt``, except for what needs an input that is not given.
A command begins if its predicted seconds are left of --budget-s; one that runs over the budget is ended. Each
result is in --out as soon as it is done, and what each command printed in NAME.log there. done.json says which commands
ended: the same call goes on behind them, and repeats all after a change of kernels. Copy good files to
profiling/results/. --list with names prints their commands, too.

Exit status: 1 if a command failed or a result is red, 2 for a request that makes no sense, 3 if some are left, else 0.
"""

import argparse
import json
import os
import re
import shlex
import signal
import string
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import twell
from twell.base import files
from twell.commands.request import RequestError, at_least, exit_status
from twell.runtime import fingerprint

ROOT = Path(__file__).resolve().parents[1]
LIST, RESULTS = ROOT / "profiling" / "measurements.txt", ROOT / "profiling" / "results"
# Seconds of its budget that a command leaves unused.
SPARE_S = 20
# Exit status of a command, and of this one, that left something for the next call.
LEFT = 3


class Measurement(NamedTuple):
    """A file of results, and the commands that make it, with predicted ``seconds`` for each.

    kind: "", or "host", "dated" or "frozen", as ``measurements.txt`` explains them.
    """

    name: str
    content: str
    shown: str
    commands: tuple[str, ...]
    seconds: tuple[int, ...]
    kind: str = ""


def parsed(text: str) -> Iterator[Measurement]:
    """Each measurement of a list. ValueError for a line that is none."""
    known: dict[str, str] = {}
    for block in re.split(r"\n(?=\w)", re.sub(r"(?m)^#.*\n|\n(?=\n)", "", text).strip()):
        first, *commands = block.split("\n")
        if match := re.fullmatch(r"([A-Z_0-9]+) = (.*)", first):
            known[match[1]] = string.Template(match[2]).safe_substitute(known)
            continue
        match = re.fullmatch(r"(\w+)(?: \((host|dated|frozen)\))?: (.*) \| (.*)", first)
        parts = [re.fullmatch(r"  (\d+) (.*)", line) for line in commands]
        if match is None or None in parts:
            raise ValueError(f"{LIST.name}: expected a name, content and commands, got {block!r}")
        name, kind, content, shown = match.groups("")
        words = tuple(string.Template(part[2]).safe_substitute(known) for part in parts if part)
        yield Measurement(name, content, shown, words, tuple(int(part[1]) for part in parts if part), kind)


# All, and those that can be made again: frozen ones are of studies that ended.
LISTED = tuple(parsed(LIST.read_text(encoding="utf-8")))
ALL = tuple(each for each in LISTED if each.kind != "frozen")


def named(path: Path, what: str) -> str:
    """What the machine line of a file of results says of "kernels" or of "twell"; "" without a file or such a word."""
    line = json.loads(path.read_text()).get("machine", "") if path.exists() else ""
    found = re.search(rf"{what} ([^;\s]+)", line)
    return found[1] if found else ""


def present() -> str:
    return str(fingerprint.source_hash())[:12]


def is_old(each: Measurement) -> bool:
    """Whether its file is missing, not whole or of other kernels, or of another version where that counts."""
    path = RESULTS / f"{each.name}.json"
    # which stays as it is
    if each.kind == "dated" and path.exists():
        return False
    if named(path, "kernels") != present() or is_partial(path):
        return True
    return each.kind == "host" and named(path, "twell") != twell.__version__


def is_partial(path: Path) -> bool:
    return path.exists() and json.loads(path.read_text()).get("complete") is False


def main(argv: Sequence[str] | None = None) -> int:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("names", nargs="*", metavar="NAME", help="results to make (default: all that are older)")
    top.add_argument("--list", action="store_true", help="print what is older than the present kernels and end")
    top.add_argument("--out", type=Path, help="folder for results, logs and done.json")
    said = "seconds of this call (%(default)s)"
    top.add_argument("--budget-s", type=at_least(1), default=540, metavar="S", help=said)
    top.add_argument("--real", type=Path, metavar="FOLDER", help="recorded layers 3 and 6 of a model")
    arguments = top.parse_args(argv)
    return exit_status("profiling.everything", lambda: run(arguments))


def run(arguments: argparse.Namespace) -> int:
    known = {each.name: each for each in ALL}
    if unknown := [name for name in arguments.names if name not in known]:
        raise RequestError(f"NAME must be one of {', '.join(known)}, got {', '.join(unknown)}")
    chosen = [known[name] for name in arguments.names] or [each for each in ALL if is_old(each)]
    if arguments.list:
        for each in chosen:
            path = RESULTS / f"{each.name}.json"
            state = f"of kernels {named(path, 'kernels') or 'not named'}" if path.exists() else "not measured yet"
            if each.kind == "host" and path.exists():
                state += f", version {named(path, 'twell') or 'not named'}"
            print(f"{sum(each.seconds):6} s  {each.name:26} {state}")
            for command in each.commands if arguments.names else ():
                # words in capitals for what the reader chooses
                words = string.Template(command.replace(" --budget-s $BUDGET", ""))
                print(f"          {words.substitute(OUT='FILE', FOLDER='OUT', REAL='REAL')}")
        print(f"{sum(sum(each.seconds) for each in chosen):6} s in all; kernels {present()}")
        return 0
    if arguments.out is None:
        raise RequestError("expected --out FOLDER or --list, got neither")
    arguments.out.mkdir(parents=True, exist_ok=True)
    return Runner(arguments).run(chosen, named=bool(arguments.names))


class Runner:
    """Runs measurements into the folder ``arguments.out`` until the budget is spent."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.out: Path = arguments.out.resolve()
        # commands run in the checkout, wherever this was called
        self.real: Path | None = arguments.real and arguments.real.resolve()
        self.end = time.monotonic() + arguments.budget_s
        path = self.out / "done.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        # commands that ended, with seconds and exit status, by measurement
        self.done: dict[str, list[list[float]]] = found.get("done", {}) if found.get("kernels") == present() else {}

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()

    def run(self, chosen: Sequence[Measurement], named: bool) -> int:
        """Run what is missing; return the exit status. ``named``: they were asked for by name."""
        lacking = [each.name for each in chosen if "$REAL" in " ".join(each.commands) and self.real is None]
        if named and lacking:
            raise RequestError(f"{', '.join(lacking)} needs --real")
        found = {each.name: self.measure(each) for each in chosen if each.name not in lacking}
        failed = [name for name, status in found.items() if status not in (0, LEFT)]
        left = [name for name, status in found.items() if status == LEFT]
        said = {"left out, as they need --real": lacking, "failed or red": failed, "left for the next call": left}
        for what, names in said.items():
            if names:
                self.say(f"{what}: {', '.join(names)}")
        return 1 if failed else LEFT if left else 0

    def measure(self, measurement: Measurement) -> int:
        """Run the commands that did not end; return 0, 1 or 2 after a failure, and LEFT if there is no time."""
        name, ended = measurement.name, self.done.setdefault(measurement.name, [])
        path, count = self.out / f"{name}.json", len(measurement.commands)
        for number in range(len(ended), count):
            seconds = measurement.seconds[number]
            if self.left_s < seconds:
                return LEFT
            self.say(f"{name}: command {number + 1} of {count}, about {seconds} s")
            began, written = time.monotonic(), modified(path)
            status = self.execute(name, measurement.commands[number])
            if status in (0, 1) and is_partial(path):
                status = LEFT
            taken = round(time.monotonic() - began, 1)
            self.say(f"{name}: exit status {status} after {taken} s")
            if status == LEFT:
                return LEFT
            # without a new file 1 is not a red result, but a fault
            if status not in (0, 1) or (status == 1 and modified(path) == written):
                return 2
            ended.append([taken, status])
            text = json.dumps({"kernels": present(), "done": self.done}, indent=1)
            files.write_text(self.out / "done.json", text + "\n")
        return int(any(status for _, status in ended))

    def execute(self, name: str, command: str) -> int:
        """Run a command with its output in a log; return its status, LEFT if the budget was spent before."""
        known: dict[str, Any] = {"OUT": self.out / f"{name}.json", "FOLDER": self.out, "REAL": self.real}
        known["BUDGET"] = max(1, int(self.left_s - SPARE_S))
        words = shlex.split(string.Template(command).substitute(known))
        words = [sys.executable, *words[1:]] if words[0] == "python" else words
        with (self.out / f"{name}.log").open("a") as log:
            log.write(f"$ {shlex.join(words)}\n")
            log.flush()
            # a session of its own, which ends with its children
            process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                return process.wait(max(1.0, self.left_s))
            except subprocess.TimeoutExpired:
                self.say(f"{name}: ended, as the budget is spent")
                return LEFT
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def say(self, text: str) -> None:
        print(f"everything: {text}; {max(0.0, self.left_s):.0f} s left", flush=True)


def modified(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


if __name__ == "__main__":
    raise SystemExit(main())
