"""The fuzzer's ledgers: a line per case, and summaries.

A ledger is a sequence of runs: a line with the machine, the time and the arguments, a line for each case, and at
the end the summary, which is missing if a run hung or was killed.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.answers import Result
from tests.fuzz.problems import COMPILED_K, PACKAGED_K, Case
from twell import testing

Record = dict[str, Any]

KINDS = ("op", "strategy", "dtype", "pattern", "compression", "activation")
FLAGS = ("l1", "mains", "graph", "stream", "autocast", "filled")
EDGES = ("spill", "bitmap")


def header(device: torch.device, arguments: dict[str, Any]) -> Record:
    """The first line of a run."""
    options = {name: str(value) for name, value in arguments.items() if value is not None}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"machine": testing.machine_line(device), "date": now, "arguments": options}


def record_of(case: Case, result: Result) -> Record:
    """The line of a case."""
    record = {**asdict(case), "verdict": result.verdict, "seconds": round(result.seconds, 4)}
    record |= {key: {k: round(v, 4) for k, v in getattr(result, key).items()} for key in ("ratios", "dense")}
    return record | {"nonzeros": round(result.nonzeros, 2), "edges": result.edges}


class Tally:
    """Counts of cases by property, the largest errors, and the mismatches."""

    def __init__(self) -> None:
        self.cases = 0
        self.seconds = 0.0
        self.seen: set[tuple[int, int]] = set()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.worst: dict[str, tuple[float, str]] = {}
        self.mismatches: list[str] = []

    def add(self, record: Record) -> None:
        where = f"{record['seed']}:{record['number']}"
        self.cases += 1
        self.seconds += record["seconds"]
        self.seen.add((record["seed"], record["number"]))
        for kind in KINDS:
            # ledgers from before there were others have no activation
            self.counts[kind, str(record.get(kind, "relu"))] += 1
        self.counts["numbers", "integers" if record["exact"] else "reals"] += 1
        self.counts["layer", "gated" if record["gated"] else "plain"] += 1
        self.counts["class of K", str(next(c for c in (*PACKAGED_K, COMPILED_K) if record["k"] <= c))] += 1
        for flag in FLAGS:
            self.counts["with", flag] += record[flag]
        for edge in EDGES:
            self.counts["edges", edge] += edge in record["edges"]
        for key, kind in (("ratios", "of what is allowed"), ("dense", "times dense's")):
            for name, ratio in record[key].items():
                name = f"{name}, {kind}"
                self.worst[name] = max(self.worst.get(name, (0.0, "")), (ratio, where))
        if record["verdict"] != "ok":
            self.mismatches.append(f"{where} {record['verdict']}")

    def summary(self) -> dict[str, Any]:
        """``cases`` ran, ``distinct`` of them with a seed and number that none before had, in ``case_seconds``."""
        counts: dict[str, dict[str, int]] = {}
        for (kind, value), count in sorted(self.counts.items()):
            counts.setdefault(kind, {})[value] = count
        return {
            "cases": self.cases,
            "distinct": len(self.seen),
            "case_seconds": round(self.seconds, 3),
            "mismatches": self.mismatches,
            "counts": counts,
            "worst": {name: [round(ratio, 3), where] for name, (ratio, where) in sorted(self.worst.items())},
        }


def lines(path: Path) -> Iterable[Record]:
    """Return the lines of a ledger, gzipped or not; ValueError names a file that is not one."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                record = None
            if not isinstance(record, dict) or not {"machine", "summary", "verdict"} & record.keys():
                raise ValueError(f"{path}:{number} is no line of a ledger: {line.strip()[:80]!r}")
            yield record


def read(paths: Iterable[Path]) -> dict[str, Any]:
    """All ledgers together: machines, runs with their cases, seconds and mismatches, and the summary of all cases."""
    everything, runs = Tally(), []
    run, tally = None, Tally()
    for path in paths:
        for line in lines(path):
            if "machine" in line:
                tally = Tally()
                seed = int(line["arguments"]["seed"])
                run = {"machine": line["machine"], "date": line.get("date"), "seed": seed, "ended": False}
                runs.append((run, tally))
            elif run is None:
                raise ValueError(f"{path} begins without the line that names the machine")
            elif "summary" in line:
                run |= {"ended": True, "seconds": line["summary"]["seconds"]}
            else:
                tally.add(line)
                everything.add(line)
        run = None
    if not runs:
        raise ValueError("no run in these ledgers")
    for run, tally in runs:
        run |= {"cases": tally.cases, "mismatches": len(tally.mismatches)}
        run.setdefault("seconds", round(tally.seconds, 3))
    return {
        "machine": runs[0][0]["machine"],
        "date": runs[0][0]["date"],
        "runs": [run for run, _ in runs],
        "seconds": round(sum(run["seconds"] for run, _ in runs), 3),
        **everything.summary(),
    }


def print_summary(summary: dict[str, Any]) -> None:
    """Counts, the largest errors, and ``cases`` in ``seconds``, with the machines and mismatches of several runs."""
    for run in summary.get("runs", ()):
        ended = "" if run["ended"] else ", which did not end"
        print(f"seed {run['seed']}: {run['cases']} cases in {run['seconds']:.0f} s{ended}, on {run['machine']}")
    for kind, counts in summary["counts"].items():
        print(f"{kind:12} " + ", ".join(f"{value} {count}" for value, count in counts.items()))
    print("largest errors, and the case that has each")
    for name, (ratio, where) in summary["worst"].items():
        print(f"  {name:36} {ratio:7.3f}  {where}")
    if "runs" in summary:
        for mismatch in summary["mismatches"]:
            print(f"WRONG {mismatch}")
    cases, seconds = summary["cases"], summary["seconds"]
    again = cases - summary["distinct"]
    print(
        f"{cases} cases in {seconds:.0f} s ({cases / max(seconds, 1e-9):.1f} a second), "
        f"{len(summary['mismatches'])} mismatches" + (f"; {again} cases had run before" if again else "")
    )
