"""What the results of ``profiling.bench float8`` say: tables of docs/float8.md."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from profiling.draw.common import machine, markdown

DENSE, BF16 = "dense fp8", "bfloat16"
Row = dict[str, Any]
# the variants of one layer and number of tokens, by name
Case = dict[str, Row]


def cases(rows: Iterable[Row]) -> list[Case]:
    """The timed rows by layer and tokens."""
    found: dict[tuple[Any, ...], Case] = {}
    for row in rows:
        if row["us"] and not row["red"]:
            found.setdefault((row["workload"], row["k"], row["n"], row["m"]), {})[row["variant"]] = row
    return list(found.values())


def fastest(case: Case, prefix: str) -> Row:
    """The fastest of the variants whose names begin so."""
    return min((row for name, row in case.items() if name.startswith(prefix)), key=lambda row: row["us"])


def speed(found: Mapping[str, Any], tokens: Sequence[int] = ()) -> str:
    """Layers beside dense fp8 and beside the fastest strategy in 16 bits; ``tokens``: which rows, all if none."""
    rows = []
    for case in cases(found["rows"]):
        auto = case['"auto"']
        if tokens and auto["m"] not in tokens:
            continue
        dense, wide = fastest(case, DENSE), fastest(case, f'{BF16} "')
        cells = [f"`{auto['workload']}`", f"{auto['m']:,}", f"{auto['nonzeros']:.0f}", f"{dense['us']:.0f}"]
        cells += [f"{wide['us']:.0f}", f"**{auto['us']:.0f}** {auto['strategy']}"]
        rows.append([*cells, *(f"**{other['us'] / auto['us']:.2f}**" for other in (dense, wide))])
    header = ["workload", "tokens", "non-zeros", "dense fp8, us", "bf16 twell", '"auto"']
    return markdown([*header, "over dense fp8", "over bf16 twell"], "l" + "r" * 7, rows)


def accuracy(found: Mapping[str, Any]) -> str:
    """Errors beside float64 of the weights before they were quantised, and beside the formula; the range of layers."""
    each = cases(found["rows"])
    names = {"bfloat16 dense": "bf16 dense", 'bfloat16 "row"': 'bf16 "row"', f"{DENSE}, two products": "dense fp8"}
    names |= {'"row"': 'e4m3 "row"', '"union"': 'e4m3 "union"'}
    rows = []
    for name, said in names.items():
        own = [case[name] for case in each if name in case]
        errors = ([row[kind] for row in own if row[kind] is not None] for kind in ("original", "error"))
        rows.append([said, *(f"{min(of):.4f} to {max(of):.4f}" if of else "" for of in errors)])
    return markdown(["", "from the layer in float64", "from the formula"], "lrr", rows)


def experts(found: Mapping[str, Any]) -> str:
    """Layers of experts in 16 bits and in e4m3."""
    of_sequences: dict[int, dict[str, Any]] = {}
    for row in found["rows"]:
        if row["sequences"] not in (32, 128):
            of_sequences.setdefault(row["sequences"], {})[row["variant"]] = row["us"]
    names = "grouped products", '"row"', 'e4m3 "auto"'
    rows = []
    for sequences, times in of_sequences.items():
        gains = [f"**{times[name] / times[names[-1]]:.2f}**" for name in names[:2]]
        rows.append([f"{sequences:,}", *(f"{times[name]:.0f}" for name in names), *gains])
    header = ["sequences", "bf16 grouped products, us", 'bf16 "row"', names[-1], "over grouped", 'over bf16 "row"']
    return markdown(header, "r" * len(header), rows)


def section(results: Mapping[str, Mapping[str, Any] | None]) -> Iterator[str]:
    """The section of docs/float8.md on figures, of the files of results that exist, by the ends of their names."""
    many, large, mixture = (results.get(name) for name in ("", "_large", "_experts"))
    if many or large:
        yield "## What to expect"
    if many:
        size = f"K = {many['rows'][0]['k']:,}, N = {many['rows'][0]['n']:,}"
        yield (
            f"{size}: microseconds of a call in CUDA graphs, x quantised within. Dense fp8 is the fastest form of "
            "`torch._scaled_mm` with passes that quantise, bf16 twell the fastest strategy in 16 bits:"
        )
        yield speed(many)
    if large:
        size = f"K = {large['rows'][0]['k']:,}, N = {large['rows'][0]['n']:,}"
        yield f"Few tokens, {size}, with weights that are not in L2:"
        yield speed(large, tokens=(1, 64, 256))
    if mixture:
        yield (
            "Decoding by a layer of 128 experts, 6 for each token, of Nemotron 3 Nano's sizes (K = 2,688, N = 1,856), "
            "where 9.3 % of the neurons fire. Routes and zeros are drawn. Grouped products are PyTorch's:"
        )
        yield experts(mixture)
    if many:
        yield (
            "Relative errors over 1,024 tokens, the least and the most of the layers of the first table; the layer in "
            "float64 has the weights before they were quantised:"
        )
        yield accuracy(many)
    if machines := dict.fromkeys(machine(dict(file)) for file in (many, large, mixture) if file):
        yield ". And ".join(machines)
