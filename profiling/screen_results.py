"""The table of layers with and without the int8 screen of the gate, from results of ``twell bench``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from profiling.draw.common import markdown
from twell._tables import SCREENED

CALLS = {"ffn": "forward", "train": "training step"}


def table(rows: Sequence[dict[str, Any]], base: str) -> str:
    """Each call with the screen and by "auto" over ``base``, which has none; empty columns are left out."""
    calls: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["variant"] in CALLS and row["ms"] and not row["red"]:
            calls.setdefault((row["workload"], row["tokens"], row["variant"]), {})[row["requested"]] = row
    lines = []
    for (workload, tokens, variant), own in calls.items():
        if {base, SCREENED, "auto"} <= own.keys():
            theirs, ours, chosen = own[base], own[SCREENED], own["auto"]
            cells = [f"`{workload}`", f"{tokens:,}", CALLS[variant], f"{theirs['ms'] * 1e3:.1f}"]
            cells += [f"**{ours['ms'] * 1e3:.1f}**", f"**{ours['ms'] / theirs['ms']:.3f}**"]
            cells += [f"{chosen['strategy']} {chosen['ms'] / theirs['ms']:.3f}"]
            cells += [beside(theirs, ours, "energy_mj", 1, ".3f"), beside(theirs, ours, "peak_bytes", 1e6, ".0f")]
            lines.append(cells)
    over = [f'"{base}", us', f'"{SCREENED}"', "over", '"auto", over']
    header = ["workload", "tokens", "call", *over, "mJ per token", "MB"]
    kept = [place for place in range(len(header)) if any(line[place] for line in lines)]
    left = "".join("lrlrrrlrr"[place] for place in kept)
    return markdown([header[place] for place in kept], left, [[line[place] for place in kept] for line in lines])


def beside(theirs: dict[str, Any], ours: dict[str, Any], field: str, unit: float, form: str) -> str:
    """Both values of a field, or nothing if one was not measured."""
    if not (theirs[field] and ours[field]):
        return ""
    return f"{theirs[field] / unit:{form}} / {ours[field] / unit:{form}}"
