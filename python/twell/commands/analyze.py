"""``twell analyze``: the sparsity of a model's feed-forward layers on text, and whether twell pays for it.

One pass: load the model and the text, observe the layers (``sparsity``), look times up (``prediction``), report.
"""

import argparse
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from twell import _files, tuning
from twell._activation import NAMES_OF_FAMILY
from twell._runtime import geometry
from twell.choose.rates import in_use
from twell.commands import analyze_experts, experts, saved_model, sparsity
from twell.commands.prediction import HOST_BOUND, PAYS, Call, Forecast, Prediction, Requirement, forecast, requirement
from twell.commands.request import aligned, as_percent, at_least, check_file, listed, pick_device
from twell.commands.sparsity import (
    HEAVY,
    HEAVY_SHARE,
    HOTTEST,
    LEAST_TOKENS,
    SCREENED,
    UNIONS,
    LayerSparsity,
    figures_cells,
    figures_header,
)

DESCRIPTION = """\
Run a model on text, and report the sparsity of each feed-forward layer, the strategy that measured times favour, and
the speed-up to expect. The last line is the verdict: whether twell pays. Layers of stacked experts have a verdict of
their own. For a model with SiLU or GELU it says how sparse the model must become. Needs no GPU.
"""

COLUMNS = {
    "layer": "number of the layer",
    "name": "its qualified name in the model",
    "kind": '"gated" or "non-gated"',
    "activation": "relu, relu2, drelu or fatrelu",
    "threshold": "of fatrelu, else 0",
    "k": "hidden size",
    "n": "neurons",
    "compression": "of the TwELL format; a tile of 256 neurons holds 256 / compression - 1 non-zeros",
    "tokens": "tokens that ran",
    "mean": "mean non-zeros per token after ReLU",
    "p50": "median of the non-zeros per token",
    "p99": "99th percentile of the non-zeros per token",
    "max": "most non-zeros of a token",
    "first_token": "mean non-zeros of the first token of a sequence",
    "heavy": f"share of tokens with more than {HEAVY} non-zeros",
    "heavy_share": f"share of tokens with more than n / {HEAVY_SHARE} non-zeros",
    "overflowing": "share of tiles (256 neurons of a token) with more non-zeros than fit",
    "dead": "neurons that fired in no token",
    **{f"union_{t}": f"mean share of n that {t} consecutive tokens fire" for t in UNIONS},
    "candidates": "mean share of n that the int8 screen lists for 128 tokens: union_128, and of the other neurons the "
    f"share that it lists in the first {SCREENED:,} tokens",
    **{f"hottest_{h}": f"share of all non-zeros in the {h} most active neurons" for h in HOTTEST},
    "strategy_CALL": "strategy for a call: CALL is m64 for inference on 64 tokens, train16384 for a training step",
    "speedup_CALL": "expected speed-up of the whole layer over dense",
    "measured_CALL": "K x N of the measured layer behind it",
    "why_CALL": "reason for the strategy",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    saved_model.add_arguments(parser, tokens=65536, shorter=f"; of stacked experts 1 / {experts.STEPS[-1]} of --tokens")
    add = parser.add_argument
    add(
        "--compression",
        type=int,
        choices=geometry.COMPRESSIONS,
        help="compression of the TwELL format (default: the model's, or 8)",
    )
    add(
        "--tokens-per-call",
        type=at_least(1),
        nargs="+",
        metavar="M",
        default=[1, 64, 16384],
        help="tokens of the inference calls to predict (default: 1 64 16384)",
    )
    add(
        "--training-tokens",
        type=at_least(1),
        nargs="+",
        metavar="M",
        default=[16384],
        help="tokens of the training steps to predict (default: 16384)",
    )
    add("--csv", type=Path, metavar="FILE", help="write one row per layer; --help ends with a list of the columns")
    add("--plot", type=Path, metavar="FILE", help="draw a chart, PNG or SVG by suffix; needs matplotlib")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, COLUMNS))
    parts = {
        "columns of the CSV, shares from 0 to 1:": COLUMNS,
        "of layers of experts, which have those to n, tokens and mean, of a token and one of its experts, and": (
            analyze_experts.COLUMNS
        ),
    }
    parser.epilog = "\n".join(
        line
        for title, columns in parts.items()
        for line in (title, *(f"  {name:<{width}}  {meaning}" for name, meaning in columns.items()))
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and print. Raises RequestError before the model runs if the request cannot be met."""
    check_file("--csv", arguments.csv, (".csv",))
    check_file("--plot", arguments.plot, (".png", ".svg"))
    if arguments.plot is not None:
        from twell.commands import analyze_plots

        analyze_plots.require()
    calls = [Call(m, False) for m in dict.fromkeys(arguments.tokens_per_call)]
    calls += [Call(m, True) for m in dict.fromkeys(arguments.training_tokens)]
    try:
        loaded = saved_model.load(arguments, arguments.compression, saved_model.ACTIVATION_OPTION, True)
    except saved_model.WithoutZeros as model:
        table = in_use(pick_device(arguments.device))
        wanted = {"CSV": arguments.csv, "chart": arguments.plot}
        nothing = [f"No {what}: there are no zeros" for what, path in wanted.items() if path is not None]
        *lines, last = without_zeros(model, requirement(model.shapes, calls, table) if model.shapes else None)
        print(*lines, *nothing, last, sep="\n")
        return 0
    layers, routed = saved_model.layers(loaded.model), experts.layers(loaded.model)
    text = saved_model.read(loaded, arguments, LEAST_TOKENS, experts.STEPS[-1] if routed else 1)
    tallies = [experts.ExpertsTally(each, max(map(len, text.sequences))) for each in routed]
    batches = saved_model.batches(text.sequences, arguments.batch)
    table = in_use(next(loaded.model.parameters()).device)
    with saved_model.progress(text.tokens, "analyze") as done:
        reports = sparsity.analyze(loaded.model, batches, layers, done, {t.watched: t.add for t in tallies})
    of_experts = [tally.report() for tally in tallies]
    header = list(_header(loaded, reports, of_experts, text))
    print(*header, sep="\n")
    written = analyze_experts.rows(of_experts)
    verdicts: list[str] = []
    if reports:
        expected = forecast(reports, calls, table)
        print("", *_tables(reports, expected), "", *_summary(reports, expected), sep="\n")
        written = [*rows(reports, expected.layers), *written]
        verdicts.append(verdict(reports, expected, text.tokens, loaded.was))
    if of_experts:
        print("", *analyze_experts.tables(of_experts), "", sep="\n")
        verdicts.append(analyze_experts.verdict(of_experts, text.tokens))
    if arguments.csv is not None:
        write_csv(arguments.csv, written)
        print(f"CSV: {arguments.csv.absolute()}")
    if arguments.plot is not None and reports:
        analyze_plots.save(arguments.plot, reports, expected.layers, "\n".join(header))
        print(f"Chart: {arguments.plot.absolute()}")
    elif arguments.plot is not None:
        print("No chart: it shows layers without experts")
    print(*verdicts, sep="\n")
    return 0


# The report


def _header(
    loaded: saved_model.Loaded,
    reports: Sequence[LayerSparsity],
    of_experts: Sequence[experts.ExpertsSparsity],
    text: saved_model.Text,
) -> Iterator[str]:
    parameter = next(loaded.model.parameters())
    where = f"{parameter.device}, {tuning.dtype_name(parameter.dtype)}"
    kinds = f"{len(reports)} {_kinds(reports)} FFN layers; " if reports else ""
    yield f"{loaded.folder.absolute().name}: {kinds}{where}"
    shapes: dict[tuple[bool, int, int], list[int]] = {}
    for report in reports:
        shapes.setdefault((report.gated, report.k, report.n), []).append(report.number)
    for (gated, k, n), numbers in shapes.items():
        these = f"layers {', '.join(map(str, numbers))}: " if len(shapes) > 1 else ""
        yield f"{these}{'gated' if gated else 'non-gated'}, K = {k:,}, N = {n:,}"
    yield from analyze_experts.header(of_experts)
    if loaded.left:
        yield f"{loaded.left[0].upper()}{loaded.left[1:]}"
    if loaded.stored:
        yield f"Files by {loaded.stored}, whose weights were dequantised: figures and times are of layers in 16 bits"
        yield "Of quantised files sparsify and load take those in e4m3 alone (docs/float8.md)"
    if loaded.was:
        new = _kinds(reports)
        yield f"{new} in place of {loaded.was}, its activation in training: figures before any training with {new}"
    yield f"Text: {text}"


def _kinds(reports: Sequence[LayerSparsity]) -> str:
    """The activations of the layers, in words."""
    named = []
    for report in reports:
        level = f" (threshold {report.activation.threshold:g})" if report.activation.threshold else ""
        named.append(NAMES_OF_FAMILY[report.activation.name] + level)
    return " and ".join(dict.fromkeys(named))


def _tables(reports: Sequence[LayerSparsity], expected: Forecast) -> Iterator[str]:
    yield "Neurons that fire: values of the gate after its activation"
    yield from aligned([figures_header(reports[0].compression), *map(figures_cells, reports)])
    yield f"non-zeros: mean per token. > {HEAVY}, > N/{HEAVY_SHARE}: share of tokens with more. tiles: share of tiles"
    yield "  (256 neurons of a token) that overflow. dead: share of neurons that never fired. union: share of neurons"
    yield "  that this many consecutive tokens fire. hottest: share of the non-zeros in this many neurons."
    yield ""
    yield "Strategy and expected speed of the layer, dense is 1"
    header = ["layer", *map(str, expected.speeds)]
    yield from aligned(
        [
            header,
            *(
                [str(report.number), *(f"{each.strategy} {each.speedup:.2f}x" for each in row)]
                for report, row in zip(reports, expected.layers, strict=True)
            ),
        ]
    )
    if any(report.gated for report in reports):
        yield "Tokens of a call follow each other in a text, and dense computes gate and up in two products; `twell"
        yield "  serve-check` takes small calls for tokens of many texts, and dense for one product as in servers."
    else:
        yield "Tokens of a call follow each other in a text."


def _summary(reports: Sequence[LayerSparsity], expected: Forecast) -> Iterator[str]:
    mean = sum(report.mean for report in reports) / len(reports)
    share = sum(report.mean / report.n for report in reports) / len(reports)
    yield f"Mean over layers: {mean:,.1f} non-zeros per token, {as_percent(share)} of the neurons"
    listed = [report.candidates for report in reports if report.candidates is not None]
    if listed:
        chosen = "in the table where it is the fastest"
        if not expected.has_screen:
            chosen = "not in the table, which has no times of it"
        share = sum(listed) / len(listed)
        yield f"int8 screen: {as_percent(share)} of the neurons are candidates of 128 tokens; it is {chosen}"
    for (call, speed), of_call in zip(expected.speeds.items(), zip(*expected.layers), strict=True):
        dense: dict[str, list[int]] = {}
        for report, each in zip(reports, of_call, strict=True):
            if each.strategy == "dense":
                dense.setdefault(each.reason, []).append(report.number)
        count = sum(map(len, dense.values()))
        staying = f"; {count} of {len(reports)} layers stay dense" if count else ""
        yield f"{call}: FFNs {speed:.2f}x as fast as dense{staying}"
        for reason, numbers in dense.items():
            yield f"  layer{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}: {reason}"
    known = expected.basis
    yield ""
    yield f"Expected from times measured on {known.machine} in 16 bits, {known.date},"
    yield f"  {known.holds}."
    yield from known.far


# Where a verdict begins with doubt.
_DOUBT = "by the nearest measured layer, which is far from this model's, "


def verdict(reports: Sequence[LayerSparsity], expected: Forecast, tokens: int, was: str = "") -> str:
    """Whether twell pays, on which GPU and for which calls, from which figures. ``tokens``: of the text."""
    known = expected.basis
    if known.unknown:
        return known.unknown
    paying = [f"{_in_graphs(call)} ({value:.2f}x as fast)" for call, value in expected.speeds.items() if value >= PAYS]
    others = [str(call) for call, value in expected.speeds.items() if value < PAYS]
    mean = sum(report.mean for report in reports) / len(reports)
    share = sum(report.mean / report.n for report in reports) / len(reports)
    source = (
        f"from {mean:,.1f} non-zeros per token ({as_percent(share)}) on {tokens:,} tokens and layer times of "
        f"{known.date}"
    )
    if was:
        source = f"before any training with {_kinds(reports)} in place of {was}, {source}"
    source = f"{known.holds}; {source}"
    far = _DOUBT if known.far else ""
    if not paying:
        return f"Verdict: {far}twell does not pay on {known.gpu} for {listed(others, 'or')}; {source}"
    rest = f", not for {listed(others, 'or')}" if others else ""
    return f"Verdict: {far}twell pays on {known.gpu} for the FFNs with {listed(paying, 'and')}{rest}; {source}"


def _in_graphs(call: Call) -> str:
    """A call in words, with the condition of one that is shorter than the host's work for it."""
    return f"{call}{' in CUDA graphs' if call.tokens <= HOST_BOUND else ''}"


def without_zeros(model: saved_model.WithoutZeros, needed: Requirement | None) -> Iterator[str]:
    """What a model would need whose activation makes no zeros; the last line is the verdict."""
    if model.left:
        yield f"{model.folder.absolute().name}: {model.left}"
    if needed is None:
        yield "Verdict: twell does not pay, as it computes no layer of the model"
        return
    known = needed.basis
    yield f"{model.folder.absolute().name}: {len(model.shapes)} FFN layers with {model.was}, which makes no zeros"
    yield "To gain, it takes FATReLU, ReLU, squared ReLU or dReLU in its place and training until tokens have at most"
    yield f"so many non-zeros. A layer is then {PAYS:.2f} times as fast as dense, if tokens fire neurons independently"
    yield "of each other; if neighbours share neurons, more may fire. More than a quarter was not measured."
    lines = [["layer", *map(str, needed.calls)]]
    for (gated, k, n), limit in needed.limits.items():
        cells = [f"{most:,} ({as_percent(most / n)})" if most else "never" for most in limit]
        lines.append([f"{'gated' if gated else 'non-gated'}, K = {k:,}, N = {n:,}", *cells])
    yield from aligned(lines)
    yield "Published recipes: arXiv 2310.04564 (ReLU Strikes Back), 2402.13516 (ProSparse), 2406.05955 (TurboSparse)."
    yield f"{saved_model.TRAINING}."
    yield "`twell analyze --activation relu` shows the figures before any training."
    yield from known.far
    if known.unknown:
        yield known.unknown
        return
    gated, k, n = known.most_work
    needs = [
        f"{most:,} ({as_percent(most / n)}) for {_in_graphs(call)}"
        for call, most in zip(needed.calls, needed.limits[known.most_work], strict=True)
        if most
    ]
    what = f"it would, trained to non-zeros per token of at most {listed(needs, 'and')}" if needs else "at no sparsity"
    if len(needed.limits) > 1:
        kind = "gated" if gated else "non-gated"
        what += f", in the {kind} layers with K = {k:,}, N = {n:,}, which have most of the work"
    yield (
        f"Verdict: twell does not pay on {known.gpu} as {model.was} makes no zeros; {_DOUBT if known.doubtful else ''}"
        f"{what}; {known.holds}; from layer times of {known.date}"
    )


# Columns whose figure has another name in ``LayerSparsity``.
_FIELDS = {"layer": "number", "max": "most", "first_token": "first"}


def rows(reports: Sequence[LayerSparsity], predictions: Sequence[Sequence[Prediction]]) -> list[dict[str, Any]]:
    """One row per layer, with the columns of ``COLUMNS``; None if the text was too short for a union."""
    found = []
    for report, of_layer in zip(reports, predictions, strict=True):
        known = {
            **vars(report),
            "kind": "gated" if report.gated else "non-gated",
            "activation": report.activation.name,
            "threshold": report.activation.threshold,
            **{f"union_{tokens}": report.unions.get(tokens) for tokens in UNIONS},
            **{f"hottest_{neurons}": share for neurons, share in report.hottest.items()},
        }
        row = {name: known[_FIELDS.get(name, name)] for name in COLUMNS if not name.endswith("_CALL")}
        for each in of_layer:
            row[f"strategy_{each.call.key}"] = each.strategy
            row[f"speedup_{each.call.key}"] = each.speedup
            row[f"measured_{each.call.key}"] = "x".join(map(str, each.measured))
            row[f"why_{each.call.key}"] = each.reason
        found.append(row)
    return found


def write_csv(path: Path, table: Sequence[dict[str, Any]]) -> None:
    """Write rows, at least one; a column that a row does not have stays empty in it."""
    with _files.replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(column for row in table for column in row)))
        writer.writeheader()
        writer.writerows(table)
