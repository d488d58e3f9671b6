"""Put each seeded fault into a copy of the tree, and run the tests that must find it.

    python -m tests.faults [--only NAME ...]

The same tests must pass without the fault. Exit status: 1 if a fault was not found or its tests cannot tell, 2 if one
does not fit the tree.
"""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.faults.faults import FAULTS, ROOT, Fault, apply

# of the environment with packages of others, see the Makefile
NEIGHBOURS = str(ROOT / "build" / "neighbours-env" / "bin" / "python")


class Run(NamedTuple):
    """How pytest ended: "passed", "failed" by a test, or otherwise; the first test that failed, and the last lines."""

    outcome: str
    test: str
    seconds: float
    tail: str


def copy_tree(root: Path, to: Path) -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in sorted({name for name in names if name and (root / name).is_file()}):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, to / name)


def run_tests(root: Path, tests: str, timeout: float) -> Run:
    options = ["-q", "-x", "-rfE", "--tb=line", "-p", "no:cacheprovider", *shlex.split(tests)]
    # bytecode is known by the second and the size of its source, and a fault may change neither
    settings = {"PYTHONPATH": os.pathsep.join([str(root / "python"), str(root)]), "PYTHONDONTWRITEBYTECODE": "1"}
    python = NEIGHBOURS if tests.startswith("tests/neighbours/") else sys.executable
    if not Path(python).exists():
        return Run(f"no {python}: `make test-neighbours` makes it", "", 0.0, "")
    began = time.monotonic()
    process = subprocess.Popen(
        [python, "-m", "pytest", *options],
        cwd=root,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=timeout)
        outcome = {0: "passed", 1: "failed"}.get(process.returncode, f"pytest ended with {process.returncode}")
    except subprocess.TimeoutExpired:
        text, outcome = "", f"no end in {timeout:.0f} s"
    finally:
        # the compiler of kernels and other children, too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    named = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", text, re.MULTILINE)
    return Run(outcome, named[1] if named else "", time.monotonic() - began, text[-2000:])


def verdict(clean: Run, broken: Run) -> str:
    """What two runs of the same tests say of a fault, the first one without it."""
    if clean.outcome != "passed":
        return f"cannot tell: without the fault, {clean.outcome} {clean.test}".rstrip()
    return {"failed": "found", "passed": "NOT FOUND"}.get(broken.outcome, f"cannot tell: {broken.outcome}")


def run(faults: list[Fault], root: Path, timeout: float) -> int:
    """Run all of ``faults`` on a copy of ``root``, print a line for each and return the exit status."""
    found, clean = 0, dict[str, Run]()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_tree(root, copy)
        # whether all of them fit, before the first test runs
        for fault in faults:
            text = apply(fault, copy)
            (copy / fault.file).write_text(text, encoding="utf-8")
        for number, fault in enumerate(faults, 1):
            if fault.tests not in clean:
                clean[fault.tests] = run_tests(copy, fault.tests, timeout)
            before = last = clean[fault.tests]
            if before.outcome == "passed":
                text = apply(fault, copy)
                last = run_tests(copy, fault.tests, timeout)
                (copy / fault.file).write_text(text, encoding="utf-8")
            said = verdict(before, last)
            print(f"{number} of {len(faults)}: {fault.name}: {said} {last.test} ({last.seconds:.0f} s)", flush=True)
            if said != "found":
                print(last.tail, flush=True)
            found += said == "found"
    print(f"{found} of {len(faults)} faults found")
    return int(found < len(faults))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="faults, or rooms of them")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one run of tests (%(default)s)")
    given = parser.parse_args(arguments)
    wanted = set(given.only or ())
    if unknown := wanted - {name for fault in FAULTS for name in (fault.name, fault.room)}:
        parser.error(f"--only must name faults or rooms, got {', '.join(sorted(unknown))}")
    chosen = [fault for fault in FAULTS if not wanted or wanted & {fault.name, fault.room}]
    try:
        return run(chosen, ROOT, given.timeout)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
