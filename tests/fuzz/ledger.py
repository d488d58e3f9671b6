"""The fuzzer's ledgers: a line per case, and summaries.

A ledger is a sequence of runs: a line with the machine, the time and the arguments, a line for each case, and at
the end the seconds, which are missing if a run hung or was killed.
"""

import json
from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from tests.cases.judged import Result
from twell import testing
from twell.testing.case import Case

Record = dict[str, Any]


def header(device: torch.device, arguments: dict[str, Any]) -> Record:
    options = {name: str(value) for name, value in arguments.items() if value is not None}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"machine": testing.machine_line(device), "date": now, "arguments": options}


def record_of(seed: int, number: int, case: Case, result: Result) -> Record:
    record: Record = {"seed": seed, "number": number, "case": str(case), "kind": case.kind, "exact": case.exact}
    record |= {"verdict": result.verdict, "seconds": round(result.seconds, 4)}
    ratios = {name: round(ratio, 4) for name, ratio in result.ratios.items()}
    return record | {"ratios": ratios, "nonzeros": round(result.nonzeros, 2)}


def mismatches(records: Iterable[Record]) -> list[str]:
    return [f"{r['seed']}:{r['number']} {r['verdict']}" for r in records if r["verdict"] != "ok"]


def summary(records: list[Record]) -> dict[str, Any]:
    """Counts of cases by their numbers, the largest errors with the case of each, and the mismatches."""
    worst: dict[str, tuple[float, str]] = {}
    for record in records:
        for name, ratio in record["ratios"].items():
            name = f"{name}, of what is allowed"
            worst[name] = max(worst.get(name, (0.0, "")), (ratio, f"{record['seed']}:{record['number']}"))
    exact = sum(record["exact"] for record in records)
    return {
        "cases": len(records),
        "case_seconds": round(sum(record["seconds"] for record in records), 3),
        "mismatches": mismatches(records),
        "counts": {
            "numbers": {"integers": exact, "reals": len(records) - exact},
            "kinds": dict(sorted(Counter(record.get("kind", "layer") for record in records).items())),
        },
        "worst": dict(sorted(worst.items())),
    }


def read(paths: Iterable[Path]) -> dict[str, Any]:
    """All ledgers together: machines, runs with their cases, seconds and mismatches, and the summary of all cases."""
    runs: list[dict[str, Any]] = []
    parts: list[list[Record]] = []
    for path in paths:
        for number, text in enumerate(path.read_text().splitlines(), 1):
            try:
                line = json.loads(text)
                kind = next(key for key in ("machine", "ended_after", "verdict") if key in line)
            except (json.JSONDecodeError, StopIteration):
                raise ValueError(f"{path}:{number} is no line of a ledger: {text.strip()[:80]!r}") from None
            if kind == "machine":
                seed = int(line["arguments"]["seed"])
                runs.append({"machine": line["machine"], "date": line["date"], "seed": seed, "ended": False})
                parts.append([])
            elif number == 1:
                raise ValueError(f"{path} begins without the line that names the machine")
            elif kind == "verdict":
                parts[-1].append(line)
            else:
                runs[-1] |= {"ended": True, "seconds": line["ended_after"]}
    if not runs:
        raise ValueError("no run in these ledgers")
    for run, records in zip(runs, parts):
        run |= {"cases": len(records), "mismatches": len(mismatches(records))}
        run.setdefault("seconds", round(sum(record["seconds"] for record in records), 3))
    return {
        "machine": runs[0]["machine"],
        "date": runs[0]["date"],
        "runs": runs,
        "seconds": round(sum(run["seconds"] for run in runs), 3),
        **summary([record for records in parts for record in records]),
    }


def print_summary(found: dict[str, Any]) -> None:
    """Counts, the largest errors, and ``cases`` in ``seconds``, with the machines and mismatches of several runs."""
    for run in found.get("runs", ()):
        ended = "" if run["ended"] else ", which did not end"
        print(f"seed {run['seed']}: {run['cases']} cases in {run['seconds']:.0f} s{ended}, on {run['machine']}")
    print("largest errors, and the case that has each")
    for name, (ratio, where) in found["worst"].items():
        print(f"  {name:36} {ratio:7.3f}  {where}")
    for mismatch in found["mismatches"]:
        print(f"WRONG {mismatch}")
    rate = found["cases"] / max(found["seconds"], 1e-9)
    print(f"{found['cases']} cases in {found['seconds']:.0f} s ({rate:.1f} a second)")
