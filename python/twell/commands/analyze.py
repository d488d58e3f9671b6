"""``twell analyze``: the sparsity of a model's feed-forward layers on text, and whether twell pays for it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from twell import tuning
from twell._activation import NAMES_OF_FAMILY
from twell._runtime import geometry
from twell._tables import Table, in_use
from twell.commands import saved_model, sparsity
from twell.commands.request import at_least, pick_device
from twell.commands.sparsity import (
    COLUMNS,
    HEAVY,
    HEAVY_SHARE,
    HOST_BOUND,
    LEAST_TOKENS,
    PAYS,
    TOO_FAR,
    Call,
    LayerSparsity,
    Prediction,
    Shape,
    aligned,
    as_percent,
    distance,
    figures_cells,
    figures_header,
    gpu_of,
    most_nonzeros,
    nearest,
    predict,
    rows,
    speedup,
    write_csv,
)

DESCRIPTION = """\
Run a model on text and report for each feed-forward layer its sparsity, the best strategy by measured kernel times and
the speed-up to expect. The last line is the verdict: whether twell pays, on which GPU and for how many tokens, from
which figures. For a model with SiLU or GELU, which make no zeros, it says what it would take.
"""


def _tables(reports: Sequence[LayerSparsity], predictions: Sequence[Sequence[Prediction]]) -> Iterator[str]:
    yield "Neurons that fire: values of the gate after its activation"
    yield from aligned([figures_header(reports[0].compression), *map(figures_cells, reports)])
    yield f"non-zeros: mean per token. > {HEAVY}, > N/{HEAVY_SHARE}: share of tokens with more. tiles: share of tiles"
    yield "  (256 neurons of a token) that overflow. dead: share of neurons that never fired. union: share of neurons"
    yield "  that this many consecutive tokens fire. hottest: share of the non-zeros in this many neurons."
    yield ""
    yield "Strategy and expected speed of the layer, dense is 1"
    header = ["layer", *(str(each.call) for each in predictions[0])]
    yield from aligned(
        [
            header,
            *(
                [str(report.number), *(f"{each.strategy} {each.speedup:.2f}x" for each in row)]
                for report, row in zip(reports, predictions, strict=True)
            ),
        ]
    )
    if any(report.gated for report in reports):
        yield "Tokens of a call follow each other in a text, and dense computes gate and up in two products; `twell"
        yield "  serve-check` takes small calls for tokens of many texts, and dense for one product as in servers."
    else:
        yield "Tokens of a call follow each other in a text."


def _summary(
    reports: Sequence[LayerSparsity], predictions: Sequence[Sequence[Prediction]], table: Table
) -> Iterator[str]:
    mean = sum(report.mean for report in reports) / len(reports)
    share = sum(report.mean / report.n for report in reports) / len(reports)
    yield f"Mean over layers: {mean:,.1f} non-zeros per token, {as_percent(share)} of the neurons"
    listed = [report.candidates for report in reports if report.candidates is not None]
    if listed:
        known = any(tuning.SCREENED in entry for nodes in table.costs.values() for entry in nodes.values())
        chosen = "in the table where it is the fastest" if known else "not in the table, which has no times of it"
        share = sum(listed) / len(listed)
        yield f"int8 screen: {as_percent(share)} of the neurons are candidates of 128 tokens; it is {chosen}"
    for of_call in zip(*predictions):
        dense: dict[str, list[int]] = {}
        for report, each in zip(reports, of_call, strict=True):
            if each.strategy == "dense":
                dense.setdefault(each.reason, []).append(report.number)
        count = sum(map(len, dense.values()))
        staying = f"; {count} of {len(reports)} layers stay dense" if count else ""
        yield f"{of_call[0].call}: FFNs {speedup(reports, of_call):.2f}x as fast as dense{staying}"
        for reason, numbers in dense.items():
            yield f"  layer{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}: {reason}"


def _caveats(
    reports: Sequence[LayerSparsity], predictions: Sequence[Sequence[Prediction]], table: Table
) -> Iterator[str]:
    calls = [each.call for each in predictions[0]]
    yield f"Expected from times measured on {table.machine.split('; ')[0]} in 16 bits, {table.date[:10]},"
    yield f"  {holds_for(calls)}."
    yield from _far([(report.gated, report.k, report.n) for report in reports], calls, table)


def _far(shapes: Sequence[Shape], calls: Sequence[Call], table: Table) -> Iterator[str]:
    """A line for each shape and measured layer that are very different, with the calls."""
    found: dict[str, list[str]] = {}
    for gated, k, n in dict.fromkeys(shapes):
        for call in calls:
            measured, far = nearest((gated, k, n), call, table)
            if far:
                where = f"a {'gated' if gated else 'non-gated'} layer with K = {k:,}, N = {n:,}; the nearest has "
                found.setdefault(f"{where}K = {measured[0]:,}, N = {measured[1]:,}", []).append(str(call))
    for where, named in found.items():
        yield f"Far from all measured layers: {where} ({'; '.join(named)})"


def _header(loaded: saved_model.Loaded, reports: Sequence[LayerSparsity], text: saved_model.Text) -> Iterator[str]:
    parameter = next(loaded.model.parameters())
    where = f"{parameter.device}, {tuning.dtype_name(parameter.dtype)}"
    yield f"{loaded.folder.absolute().name}: {len(reports)} {_kinds(reports)} FFN layers; {where}"
    shapes: dict[tuple[bool, int, int], list[int]] = {}
    for report in reports:
        shapes.setdefault((report.gated, report.k, report.n), []).append(report.number)
    for (gated, k, n), numbers in shapes.items():
        these = f"layers {', '.join(map(str, numbers))}: " if len(shapes) > 1 else ""
        yield f"{these}{'gated' if gated else 'non-gated'}, K = {k:,}, N = {n:,}"
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


def _most_work(shapes: Sequence[Shape]) -> Shape:
    """The kind of layers with most of the work: the speed of a model is theirs."""
    return max(shapes, key=lambda shape: shapes.count(shape) * shape[1] * shape[2] * (2 + shape[0]))


def _unknown(shapes: Sequence[Shape], calls: Sequence[Call], table: Table) -> str:
    """The verdict if the layers with most of the work are too far from all measured ones for any; else ""."""
    _, k, n = shape = _most_work(shapes)
    for call in calls:
        measured, _ = nearest(shape, call, table)
        if distance((k, n), measured) > TOO_FAR:
            return (
                f"Verdict: none, as layers with K = {k:,}, N = {n:,} are too far from all measured ones, the nearest "
                f"with K = {measured[0]:,}, N = {measured[1]:,}; `twell tune --shape {k}x{n}` measures them on a GPU"
            )
    return ""


# Where a verdict begins with doubt.
_DOUBT = "by the nearest measured layer, which is far from this model's, "


def verdict(
    reports: Sequence[LayerSparsity],
    predictions: Sequence[Sequence[Prediction]],
    table: Table,
    tokens: int,
    was: str = "",
) -> str:
    """Whether twell pays, on which GPU and for which calls, from which figures. ``tokens``: of the text."""
    shapes = [(report.gated, report.k, report.n) for report in reports]
    if unknown := _unknown(shapes, [each.call for each in predictions[0]], table):
        return unknown
    speeds = {of_call[0].call: speedup(reports, of_call) for of_call in zip(*predictions)}
    paying = [f"{_in_graphs(call)} ({value:.2f}x as fast)" for call, value in speeds.items() if value >= PAYS]
    others = [str(call) for call, value in speeds.items() if value < PAYS]
    mean = sum(report.mean for report in reports) / len(reports)
    share = sum(report.mean / report.n for report in reports) / len(reports)
    source = (
        f"from {mean:,.1f} non-zeros per token ({as_percent(share)}) on {tokens:,} tokens and layer times of "
        f"{_measured(table)}"
    )
    if was:
        source = f"before any training with {_kinds(reports)} in place of {was}, {source}"
    source = f"{holds_for(list(speeds))}; {source}"
    far = _DOUBT if any(each.far for row in predictions for each in row) else ""
    gpu = gpu_of(table)
    if not paying:
        return f"Verdict: {far}twell does not pay on {gpu} for {_listed(others, 'or')}; {source}"
    rest = f", not for {_listed(others, 'or')}" if others else ""
    return f"Verdict: {far}twell pays on {gpu} for the FFNs with {_listed(paying, 'and')}{rest}; {source}"


def _in_graphs(call: Call) -> str:
    """A call in words, with the condition of one that is shorter than the host's work for it."""
    return f"{call}{' in CUDA graphs' if call.tokens <= HOST_BOUND else ''}"


def holds_for(calls: Sequence[Call]) -> str:
    """What times of these calls were measured with, in words."""
    layouts = ["by rows in inference"] if any(not call.training for call in calls) else []
    layouts += ["as nn.Linear stores them in training"] if any(call.training for call in calls) else []
    eager = f", as eager calls of up to {HOST_BOUND:,} tokens wait for the host"
    graphs = eager if any(call.tokens <= HOST_BOUND for call in calls) else ""
    return f"by times in CUDA graphs{graphs}, with down weights {' and '.join(layouts)}"


def _measured(table: Table) -> str:
    return table.date[:10]


def _listed(parts: Sequence[str], word: str) -> str:
    """Parts as "a, b and c"."""
    return f" {word} ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def without_zeros(model: saved_model.WithoutZeros, calls: Sequence[Call], table: Table) -> Iterator[str]:
    """What a model would need whose activation makes no zeros; the last line is the verdict."""
    shapes = list(dict.fromkeys(model.shapes))
    yield f"{model.folder.absolute().name}: {len(model.shapes)} FFN layers with {model.was}, which makes no zeros"
    yield "To gain, it takes FATReLU, ReLU, squared ReLU or dReLU in its place and training until tokens have at most"
    yield f"so many non-zeros. A layer is then {PAYS:.2f} times as fast as dense, if tokens fire neurons independently"
    yield "of each other; if neighbours share neurons, more may fire. More than a quarter was not measured."
    limits = {shape: [most_nonzeros(shape, call, table) for call in calls] for shape in shapes}
    lines = [["layer", *map(str, calls)]]
    for (gated, k, n), limit in limits.items():
        cells = [f"{most:,} ({as_percent(most / n)})" if most else "never" for most in limit]
        lines.append([f"{'gated' if gated else 'non-gated'}, K = {k:,}, N = {n:,}", *cells])
    yield from aligned(lines)
    yield "Published recipes: arXiv 2310.04564 (ReLU Strikes Back), 2402.13516 (ProSparse), 2406.05955 (TurboSparse)."
    yield f"{saved_model.TRAINING}."
    yield "`twell analyze --activation relu` shows the figures before any training."
    yield from _far(shapes, calls, table)
    if unknown := _unknown(model.shapes, calls, table):
        yield unknown
        return
    gated, k, n = _most_work(model.shapes)
    limit, kind = limits[gated, k, n], "gated" if gated else "non-gated"
    needs = [
        f"{most:,} ({as_percent(most / n)}) for {_in_graphs(call)}"
        for call, most in zip(calls, limit, strict=True)
        if most
    ]
    far = _DOUBT if any(nearest((gated, k, n), call, table)[1] for call in calls) else ""
    what = f"it would, trained to non-zeros per token of at most {_listed(needs, 'and')}" if needs else "at no sparsity"
    if len(limits) > 1:
        what += f", in the {kind} layers with K = {k:,}, N = {n:,}, which have most of the work"
    yield (
        f"Verdict: twell does not pay on {gpu_of(table)} as {model.was} makes no zeros; {far}{what}; "
        f"{holds_for(calls)}; from layer times of {_measured(table)}"
    )


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    saved_model.add_arguments(parser, tokens=65536)
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
        help="tokens of the inference calls to predict: decode, prefill (default: 1 64 16384)",
    )
    add(
        "--training-tokens",
        type=at_least(1),
        nargs="+",
        metavar="M",
        default=[16384],
        help="tokens of the training steps to predict (default: 16384)",
    )
    add("--csv", type=Path, metavar="FILE", help="write one row per layer, with the columns below")
    add("--plot", type=Path, metavar="FILE", help="draw a chart, PNG or SVG by suffix; needs matplotlib")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, COLUMNS))
    parser.epilog = "columns of the CSV, shares from 0 to 1:\n" + "\n".join(
        f"  {name:<{width}}  {meaning}" for name, meaning in COLUMNS.items()
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and print. Raises RequestError before the model runs if the request cannot be met."""
    saved_model.check_file("--csv", arguments.csv, (".csv",))
    saved_model.check_file("--plot", arguments.plot, (".png", ".svg"))
    if arguments.plot is not None:
        from twell.commands import analyze_plots

        analyze_plots.require()
    calls = [Call(m, False) for m in dict.fromkeys(arguments.tokens_per_call)]
    calls += [Call(m, True) for m in dict.fromkeys(arguments.training_tokens)]
    try:
        loaded = saved_model.load(arguments, arguments.compression, saved_model.ACTIVATION_OPTION)
    except saved_model.WithoutZeros as model:
        *lines, last = without_zeros(model, calls, in_use(pick_device(arguments.device)))
        wanted = {"CSV": arguments.csv, "chart": arguments.plot}
        nothing = [f"No {what}: there are no zeros" for what, path in wanted.items() if path is not None]
        print(*lines, *nothing, last, sep="\n")
        return 0
    text = saved_model.read(loaded, arguments, LEAST_TOKENS)
    with saved_model.progress(text.tokens, "analyze") as done:
        reports = sparsity.analyze(loaded.model, saved_model.batches(text.sequences, arguments.batch), None, done)
    table = in_use(next(loaded.model.parameters()).device)
    predictions = [[predict(report, call, table) for call in calls] for report in reports]
    header = list(_header(loaded, reports, text))
    print(*header, "", *_tables(reports, predictions), "", *_summary(reports, predictions, table), "", sep="\n")
    print(*_caveats(reports, predictions, table), sep="\n")
    if arguments.csv is not None:
        write_csv(arguments.csv, rows(reports, predictions))
        print(f"CSV: {arguments.csv.absolute()}")
    if arguments.plot is not None:
        analyze_plots.save(arguments.plot, reports, predictions, "\n".join(header))
        print(f"Chart: {arguments.plot.absolute()}")
    print(verdict(reports, predictions, table, text.tokens, loaded.was))
    return 0
