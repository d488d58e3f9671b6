"""``twell serve-check``: what a server would run in each layer of a checkpoint, and what to expect of it."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twell import _admission, _files, _tables, tuning
from twell._runtime import geometry
from twell.commands import saved_model, sparsity
from twell.commands.request import RequestError, at_least, number_above, pick_device
from twell.commands.sparsity import aligned, as_percent
from twell.integrations import engines, layouts
from twell.integrations.vllm import LLAMA_LIKE

DESCRIPTION = """\
Say for each layer of a checkpoint what "auto" would run on chunks of prompts and on batches that decode, and its
predicted share of dense's time. With --text the sparsity is measured by running the model; else it is taken from the
configuration or, without any there, assumed. Needs no GPU and no server.
"""

PREFILL, DECODE = (2048, 8192), (1, 8, 32, 64, 128, 256, 512)
# A batch is of tokens from many places: many short sequences.
TOKENS, SEQUENCE, BATCH = 32768, 256, 128

_UP = re.compile(r"(?P<layer>(?:^|.*\.)(?P<number>\d+)\..*)up_proj\.weight$")


@dataclass(frozen=True)
class Layer:
    """A layer of a checkpoint with N neurons of hidden size K; ``beside``: weights of attention per weight of FFN."""

    name: str
    number: int
    k: int
    n: int
    beside: float


@dataclass(frozen=True)
class Row:
    """What a layer would run on ``tokens`` tokens: of prompts or, with ``decode``, of as many sequences.

    share: predicted time over dense's. costs: that of each strategy.
    """

    layer: int
    tokens: int
    decode: bool
    strategy: str
    share: float
    reason: str
    costs: dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    saved_model.add_arguments(parser, TOKENS, sequence=SEQUENCE, batch=BATCH, served=True)
    add = parser.add_argument
    add("--nnz", type=number_above(0), metavar="X", help="non-zeros per token to assume in place of all other figures")
    add(
        "--prefill",
        type=at_least(1),
        nargs="*",
        metavar="M",
        default=list(PREFILL),
        help="tokens of chunks of prompts (default: 2048 8192)",
    )
    add(
        "--decode",
        type=at_least(1),
        nargs="*",
        metavar="M",
        default=list(DECODE),
        help="sequences of batches that decode (default: 1 8 32 64 128 256 512)",
    )
    add("--ranks", type=at_least(1), metavar="N", default=1, help="tensor-parallel ranks, which divide the neurons (1)")
    add(
        "--save",
        action="store_true",
        help="write measured figures into the model's config.json, for servers to start with",
    )
    add("--json", type=Path, metavar="FILE", help="write the table as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and print. Raises RequestError before the model runs if the request cannot be met."""
    folder: Path = arguments.model
    saved_model.check_file("--json", arguments.json, (".json",))
    if arguments.save and arguments.text is None:
        raise RequestError("--save: expected --text, whose figures it writes, got none")
    if arguments.nnz is not None and arguments.text is not None:
        raise RequestError("--nnz: expected no --text, which measures it, got both")
    content = saved_model.configuration(folder)
    served = _require_served(content)
    found = layers_of(folder)
    refused = _refusal(found, arguments.ranks)
    figures, source = _figures(arguments, content, found)
    table = _tables.in_use(pick_device(arguments.device))
    rows = [
        predict(layer, of_layer, m, decode, arguments.ranks, refused, table)
        for layer, of_layer in zip(found, figures, strict=True)
        for decode, sizes in ((False, arguments.prefill), (True, arguments.decode))
        for m in dict.fromkeys(sizes)
    ]
    print(*_report(folder, found, figures, rows, [served, source, refused], arguments.ranks, table), sep="\n")
    if arguments.save:
        entries = [[round(of.nonzeros, 2), round(of.text, 5), round(of.batch, 5)] for of in figures]
        written = json.dumps(content | {layouts.FIGURES_KEY: entries}, indent=2) + "\n"
        _files.write_text(folder / layouts.CONFIG, written)
        print(f"Figures written: {layouts.FIGURES_KEY} in {folder / layouts.CONFIG}")
    if arguments.json is not None:
        data = {
            "source": source,
            "ranks": arguments.ranks,
            "figures": [of._asdict() for of in figures],
            "rows": [vars(row) for row in rows],
        }
        _files.write_text(arguments.json, json.dumps(data, indent=1) + "\n")
        print(f"JSON: {arguments.json.absolute()}")
    return 0


def _require_served(content: dict[str, Any]) -> str:
    """How vLLM serves a model of this configuration through twell. Raises RequestError if it does not."""
    architectures = [str(name) for name in content.get("architectures") or ()]
    activation = layouts.activation(content)
    if set(architectures) & set(engines.SPARSE):
        if not content.get("sparsity_gated_mlp", True):
            raise RequestError("MODEL: expected layers with a gate, which vLLM serves through twell, got none")
        lie = "" if activation == "relu" else f"; its configuration says {activation!r}, which is ignored"
        return f"vLLM serves {architectures[0]} through twell, with ReLU{lie}"
    if set(architectures) & set(LLAMA_LIKE) and activation == "relu":
        return f"vLLM serves {architectures[0]} with ReLU through twell"
    raise RequestError(
        f"MODEL: expected {', '.join(engines.SPARSE)} or a Llama-like model with ReLU, got "
        f"{', '.join(architectures) or 'no architectures'} with {activation!r}: vLLM serves it without twell"
    )


def layers_of(folder: Path) -> list[Layer]:
    """The gated layers of a checkpoint, from the headers of its files. Raises RequestError if they are not sound."""
    try:
        headers = [layouts.read_header(path) for path in layouts.weight_files(folder)]
        layouts.folder_layouts(folder)
    except (FileNotFoundError, ValueError) as error:
        raise RequestError(f"MODEL: {error}") from error
    shapes = {name: stored.shape for header in headers for name, stored in header.tensors.items()}
    found = []
    for name, (n, k) in ((name, shape) for name, shape in shapes.items() if len(shape) == 2):
        match = _UP.match(name)
        if match is None or f"{match['layer']}gate_proj.weight" not in shapes:
            continue
        block = match["layer"].removesuffix("mlp.")
        attention = [shape for other, shape in shapes.items() if other.startswith(f"{block}self_attn.")]
        weights = sum(shape[0] * shape[1] for shape in attention if len(shape) == 2)
        found.append(Layer(match["layer"].rstrip("."), int(match["number"]), k, n, weights / (3 * k * n)))
    if not found:
        raise RequestError(f"MODEL: expected layers with gate_proj and up_proj in {str(folder)!r}, got none")
    return sorted(found, key=lambda layer: layer.number)


def _refusal(found: Sequence[Layer], ranks: int) -> str:
    """Why the kernels cannot take the layers of a rank; "" if they can."""
    for layer in found:
        if layer.n % ranks:
            raise RequestError(f"--ranks: expected a divisor of the {layer.n} neurons, got {ranks}")
        try:
            _admission.require_sizes("sizes of a rank", layer.n // ranks, layer.k)
        except (ValueError, NotImplementedError) as error:
            return f"All layers run as without twell: {error}"
    return ""


def _figures(
    arguments: argparse.Namespace, content: dict[str, Any], found: Sequence[Layer]
) -> tuple[list[layouts.LayerFigures], str]:
    """The figures of each layer, and where they come from."""
    if arguments.text is not None:
        return _measured(arguments, found)
    try:
        known = None if arguments.nnz is not None else layouts.measured(content, len(found))
    except ValueError as error:
        raise RequestError(f"MODEL: {error}") from error
    if known is not None:
        return known, f"Figures: measured earlier, {layouts.FIGURES_KEY} of the configuration"
    assumed = []
    for layer in found:
        nonzeros = min(arguments.nnz or tuning.ASSUMED_DENSITY * layer.n, layer.n)
        union = 1 - (1 - nonzeros / layer.n) ** geometry.TOKEN_TILE
        assumed.append(layouts.LayerFigures(nonzeros, union, union))
    nonzeros = f"{assumed[0].nonzeros:,.1f} non-zeros per token"
    return assumed, f"Figures: assumed, {nonzeros}, tokens independent of each other; --text measures them"


def _measured(arguments: argparse.Namespace, found: Sequence[Layer]) -> tuple[list[layouts.LayerFigures], str]:
    """Run the model on the text."""
    loaded = saved_model.load(arguments)
    watched = saved_model.layers(loaded.model)
    if [layer.number for layer in watched] != [layer.number for layer in found]:
        raise RequestError(f"MODEL: expected the {len(found)} layers of its files, got {len(watched)} with ReLU")
    text = saved_model.read(loaded, arguments, sparsity.LEAST_TOKENS)
    device = next(loaded.model.parameters()).device
    # tokens in the order of the text, and in none
    both = [[sparsity.Tally(at.linear.out_features, at.compression, device) for at in watched] for _ in range(2)]

    def tally(i: int, x: Tensor, first: Tensor) -> None:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0), device="cpu").to(x.device)
        for tallies, tokens in zip(both, (x, x[order])):
            for rows, pattern in sparsity.patterns(tokens, watched[i].linear):
                tallies[i].add(pattern, first[rows])

    with saved_model.progress(text.tokens, "serve-check") as done:
        try:
            batches = saved_model.batches(text.sequences, arguments.batch)
            saved_model.observe(loaded.model, watched, batches, tally, done)
        except ValueError as error:
            raise RequestError(str(error)) from error
    figures = []
    for at, consecutive, mixed in zip(watched, *both, strict=True):
        report = consecutive.report(at)
        unions = report.unions[geometry.TOKEN_TILE], mixed.report(at).unions[geometry.TOKEN_TILE]
        figures.append(layouts.LayerFigures(report.mean, *unions))
    sequences = f"{len(text.sequences):,} sequences of up to {max(map(len, text.sequences)):,}"
    return figures, f"Figures: measured on {text.tokens:,} tokens of {text.files:,} files, {sequences}"


def predict(
    layer: Layer,
    figures: layouts.LayerFigures,
    m: int,
    decode: bool,
    ranks: int,
    refused: str = "",
    table: _tables.Table = _tables.SHIPPED,
) -> Row:
    """What "auto" would run in a rank's part of a layer, once it knows the figures."""
    problem = tuning.Problem(m, layer.k, layer.n // ranks, True, False)
    if refused:
        return Row(layer.number, m, decode, "dense", 1.0, refused, {})
    known = tuning.Figures(figures.nonzeros / ranks, figures.batch if decode else figures.text)
    strategy, reason, costs = tuning.decide(problem, known, None, table)
    return Row(layer.number, m, decode, strategy, costs.get(strategy, 1.0), reason, costs)


def _report(
    folder: Path,
    found: Sequence[Layer],
    figures: Sequence[layouts.LayerFigures],
    rows: Sequence[Row],
    remarks: Sequence[str],
    ranks: int,
    table: _tables.Table,
) -> Iterator[str]:
    sizes = ", ".join(dict.fromkeys(f"K = {layer.k:,}, N = {layer.n:,}" for layer in found))
    divided = f", neurons of {ranks} ranks" if ranks > 1 else ""
    yield f"{folder.absolute().name}: {len(found)} gated layers, {sizes}{divided}"
    yield from filter(None, remarks)
    yield ""
    calls = list(dict.fromkeys((row.decode, row.tokens) for row in rows))
    yield "Strategy of each layer and its predicted share of dense's time"
    names = [f"{'decode' if decode else 'prefill'} {tokens:,}" for decode, tokens in calls]
    lines = [["layer", "non-zeros", "union, text", "union, batch", *names]]
    for layer, of in zip(found, figures, strict=True):
        cells = [f"{row.strategy} {row.share:.2f}" for row in rows if row.layer == layer.number]
        lines.append([str(layer.number), f"{of.nonzeros:,.1f}", as_percent(of.text), as_percent(of.batch), *cells])
    for name, beside in (("FFNs", False), ("layers", True)):
        shares = [share(found, [row for row in rows if (row.decode, row.tokens) == call], beside) for call in calls]
        lines.append([name, "", "", "", *(f"{share:.2f}" for share in shares)])
    yield from aligned(lines)
    yield "non-zeros: mean per token. union: share of the neurons that 128 tokens fire, which follow each other in a"
    yield "  text as in a prompt, or come from many places as in a batch. layers: with the products for query, key,"
    yield "  value and output, by numbers of weights, without attention itself, which reads the cache of sequences."
    yield f"Predicted from times measured on {table.machine.split('; ')[0]} in 16 bits, {table.date[:10]}."
    _, _, k, n = tuning.nearest(tuning.Problem(1, found[0].k, found[0].n // ranks, True, False), table)
    if max(sparsity.apart(found[0].k, k), sparsity.apart(found[0].k * found[0].n // ranks, k * n)) > sparsity.FAR:
        yield f"Far from all measured layers: the nearest has K = {k:,}, N = {n:,}"


def share(found: Sequence[Layer], rows: Sequence[Row], beside: bool) -> float:
    """The share of dense's time of all layers, whose dense times are as their weights."""
    weights = [layer.k * layer.n for layer in found]
    more = [layer.beside * beside for layer in found]
    total = sum(weight * (1 + extra) for weight, extra in zip(weights, more))
    return sum(weight * (row.share + extra) for weight, extra, row in zip(weights, more, rows, strict=True)) / total
