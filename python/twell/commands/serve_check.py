"""``twell serve-check``: what a server would run in each layer of a checkpoint, and what to expect of it."""

import argparse
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twell import _configuration, _files
from twell._activation import NAMES_OF_FAMILY, activation_of
from twell._runtime import geometry
from twell.choose.plan import PACKED_DTYPES, Facts, Route, unpackable
from twell.choose.rates import (
    ASSUMED_DENSITY,
    FLOAT8,
    FLOAT8_DENSITY,
    SHIPPED,
    Figures,
    Problem,
    Table,
    decide,
    in_use,
    nearest,
)
from twell.commands import prediction, saved_model, sparsity
from twell.commands.request import RequestError, aligned, as_percent, at_least, check_file, number_above, pick_device
from twell.integrations import float8_layouts, layouts, vllm
from twell.tuning import MERGED_TOKENS

DESCRIPTION = """\
Say what "auto" would run in each layer of a checkpoint on chunks of prompts and on batches that decode, and the
predicted share of dense's time. With --text the model runs, and its sparsity is measured; else config.json has it, or
it is assumed. Needs no GPU and no server.
"""

PREFILL, DECODE = (2048, 8192), (1, 8, 32, 64, 128, 256, 512)
# A batch is of tokens from many places: many short sequences.
TOKENS, SEQUENCE, BATCH = 32768, 256, 128

# Names in headers of safetensors files; vLLM turns weights of 32 bits to 16.
_DTYPES = ("BF16", "F16", "F32")
_E4M3 = "F8_E4M3"
# where ModelOpt says how weights are quantised, if config.json does not
_MODELOPT = "hf_quant_config.json"

_AUTO = Route("auto")
_UP = re.compile(r"(?P<layer>(?:^|.*\.)(?P<number>\d+)\..*)up_proj\.weight$")
_PROJECTION = re.compile(r"((?:^|.*\.)\d+\..*(?:gate|up|down)_proj)\.")


@dataclass(frozen=True)
class Layer:
    """A layer of a checkpoint with N neurons of hidden size K.

    beside: weights of attention per weight of FFN. dtype: that of its weights in the header of their file. reason: why
    it runs as without twell, whatever its sizes; "" if it need not.
    """

    name: str
    number: int
    k: int
    n: int
    beside: float
    dtype: str = "BF16"
    reason: str = ""

    @property
    def float8(self) -> bool:
        """Whether its weights are in e4m3."""
        return self.dtype == _E4M3


@dataclass(frozen=True)
class Row:
    """What a layer would run on ``tokens`` tokens: of prompts or, with ``decode``, of as many sequences.

    share: predicted time over dense's, None if it is not known. costs: that of each strategy.
    """

    layer: int
    tokens: int
    decode: bool
    strategy: str
    share: float | None
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
        help="write the measured figures into the model's config.json, which servers read",
    )
    add("--json", type=Path, metavar="FILE", help="write the table as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and print. Raises RequestError before the model runs if the request cannot be met."""
    folder = saved_model.local(arguments.model)
    check_file("--json", arguments.json, (".json",))
    if arguments.json is not None and arguments.json.is_file() and folder.resolve() in arguments.json.resolve().parents:
        raise RequestError(f"--json: expected a new file or one outside of the model, got {str(arguments.json)!r}")
    if arguments.save and arguments.text is None:
        raise RequestError("--save: expected --text, whose figures it writes, got none")
    if arguments.save and folder != arguments.model:
        raise RequestError("--save: expected MODEL to be a folder, got the name of one on the Hub")
    if arguments.save and (config := folder / layouts.CONFIG).is_symlink():
        # of a download cache, where revisions share files
        raise RequestError(
            f"--save: expected a {layouts.CONFIG} of the folder's own, got a link to {os.readlink(config)!r}, which "
            "others may read; copy the model first, as by cp -rL"
        )
    if arguments.nnz is not None and arguments.text is not None:
        raise RequestError("--nnz: expected no --text, which measures it, got both")
    content = saved_model.configuration(folder)
    served = _require_served(content)
    requested = _requested(content)
    found = layers_of(folder, content)
    _require_stated(found, content)
    _require_divided(found, content, arguments.ranks)
    refused = _refusal(found, arguments.ranks)
    without = refused or all(layer.reason for layer in found)
    remarks = [served if without else f"{served}, through twell", refused, *_remarks(found, requested, refused)]
    figures, source = _figures(arguments, content, found)
    table = in_use(pick_device(arguments.device))
    rows = [
        predict(layer, of_layer, m, decode, arguments.ranks, refused, table, requested)
        for layer, of_layer in zip(found, figures, strict=True)
        for decode, sizes in ((False, arguments.prefill), (True, arguments.decode))
        for m in dict.fromkeys(sizes)
    ]
    print(*_report(folder, found, figures, rows, [*remarks, source], arguments.ranks, table), sep="\n")
    if arguments.save:
        entries = [[round(of.nonzeros, 2), round(of.text, 5), round(of.batch, 5)] for of in figures]
        written = json.dumps(content | {layouts.FIGURES_KEY: entries}, indent=2) + "\n"
        _files.write_text(folder / layouts.CONFIG, written)
        print(f"Figures written: {layouts.FIGURES_KEY} in {folder / layouts.CONFIG}")
    if arguments.json is not None:
        data = {
            "source": source,
            "strategy": requested.name,
            "ranks": arguments.ranks,
            "figures": [of._asdict() for of in figures],
            "rows": [vars(row) for row in rows],
        }
        _files.write_text(arguments.json, json.dumps(data, indent=1) + "\n")
        print(f"JSON: {arguments.json.absolute()}")
    return 0


def _require_served(content: dict[str, Any]) -> str:
    """How vLLM serves a model of this configuration through twell, in words.

    Raises RequestError if it does not.
    """
    named = content.get("architectures") or []
    if not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise RequestError(f"MODEL: architectures must be a list of names, got {named!r}")
    activation = layouts.activation(content)
    if activation == "fatrelu":
        _require_threshold(content)
    if sparse := [name for name in named if name in vllm.SPARSE]:
        if not content.get("sparsity_gated_mlp", True):
            raise RequestError("MODEL: expected layers with a gate, which vLLM serves through twell, got none")
        if activation in _configuration.OF_SPARSE:
            return f"vLLM serves {sparse[0]} with {NAMES_OF_FAMILY[activation]}"
        lie = "" if activation == "relu" else f" (its configuration says {activation!r}, which is ignored)"
        return f"vLLM serves {sparse[0]} with ReLU{lie}"
    alike = [name for name in named if name in vllm.LLAMA_LIKE]
    if alike and activation in vllm.ACTIVATIONS:
        return f"vLLM serves {alike[0]} with {NAMES_OF_FAMILY[activation]}"
    if activation in vllm.ACTIVATIONS:
        said = "vLLM may serve it through twell, but only layers with a gate of these models are predicted"
    else:
        said = f"vLLM serves it without twell{f'; {saved_model.TRAINING}' if alike else ''}"
    raise RequestError(
        f"MODEL: expected {', '.join(vllm.SPARSE)} or a Llama-like model with {', '.join(vllm.ACTIVATIONS)}, got "
        f"{', '.join(named) or 'no architectures'} with {activation!r}: {said}"
    )


def _require_threshold(content: dict[str, Any]) -> None:
    """Raise RequestError unless the threshold of FATReLU in a configuration is one that layers of 16 bits take."""
    threshold = content.get(_configuration.THRESHOLD_KEY)
    if threshold is None:
        raise RequestError(
            f'MODEL: a configuration with "fatrelu" must have its threshold, {_configuration.THRESHOLD_KEY}'
        )
    try:
        activation = activation_of("fatrelu", threshold)
        for dtype in PACKED_DTYPES:
            activation.level(dtype)
    except (TypeError, ValueError) as error:
        raise RequestError(f"MODEL: {_configuration.THRESHOLD_KEY}: {error}") from error


def _requested(content: dict[str, Any]) -> Route:
    """What the configuration asks for. Raises RequestError if that does not exist."""
    try:
        requested = layouts.route_of(content)
    except (TypeError, ValueError) as error:
        raise RequestError(f"MODEL: {error}") from error
    # predictions know no candidates, and so no screen
    return requested._replace(screen=False)


def layers_of(folder: Path, content: dict[str, Any]) -> list[Layer]:
    """The gated layers of a checkpoint with this configuration, from the headers of its files.

    Raises RequestError if they are not sound, or if vLLM would not load them.
    """
    try:
        headers = [layouts.read_header(path) for path in layouts.weight_files(folder)]
        tensors = {name: stored for header in headers for name, stored in header.tensors.items()}
        # files of other formats have other names and shapes
        schemes = _schemes(folder, content, tensors)
        by_weight = layouts.folder_layouts(folder)
    except (FileNotFoundError, NotImplementedError, ValueError) as error:
        raise RequestError(f"MODEL: {error}") from error
    if not set(content.get("architectures") or ()) & set(vllm.SPARSE):
        for name, layout in by_weight.items():
            if layout == "rows":
                raise RequestError(
                    f"MODEL: {name}: vLLM reads down weights [hidden, intermediate], as nn.Linear stores them, except "
                    f"for {' and '.join(vllm.SPARSE)}, got [intermediate, hidden]; load and "
                    "save_pretrained of twell.integrations.transformers turn them"
                )
    dtype = content.get("dtype", content.get("torch_dtype"))
    found = []
    for name, up in tensors.items():
        match = _UP.match(name)
        if match is None:
            continue
        weights = [tensors.get(f"{match['layer']}{which}_proj.weight") for which in ("gate", "up", "down")]
        form = None
        for which, weight in zip(("gate", "up", "down"), weights, strict=True):
            projection = f"{match['layer']}{which}_proj"
            if weight is None or len(weight.shape) != 2 or 0 in weight.shape:
                got = "none" if weight is None else str(list(weight.shape))
                raise RequestError(
                    f"MODEL: {projection}.weight must be a matrix of at least one row and column, got {got}"
                )
            scheme = schemes[projection]
            kind, dtypes = (scheme.granularity, (_E4M3,)) if scheme else ("", _DTYPES)
            if weight.dtype not in dtypes:
                raise RequestError(
                    f"MODEL: {projection}.weight must be {' or '.join(dtypes)} for vLLM to serve it through twell, got "
                    f"{weight.dtype}"
                )
            if form not in (None, kind):
                raise RequestError(
                    f"MODEL: {projection} must be quantised as the projections beside it, which vLLM merges, got "
                    f"scales by {kind or 'none'} and by {form or 'none'}"
                )
            form = kind
        n, k = up.shape
        block = match["layer"].removesuffix("mlp.")
        attention = [other.shape for key, other in tensors.items() if key.startswith(f"{block}self_attn.")]
        beside = sum(shape[0] * shape[1] for shape in attention if len(shape) == 2) / (3 * k * n)
        reason = ""
        if form == "block":
            reason = "weights in e4m3 must have a scale for each row, or one in all, got scales of blocks"
        elif form and dtype == "float16":
            reason = "the model must be in bfloat16 with weights in e4m3, got float16"
        found.append(Layer(match["layer"].rstrip("."), int(match["number"]), k, n, beside, up.dtype, reason))
    if not found:
        raise RequestError(f"MODEL: expected layers with gate_proj and up_proj in {str(folder)!r}, got none")
    found.sort(key=lambda layer: layer.number)
    for one, other in itertools.pairwise(found):
        if one.number == other.number:
            raise RequestError(f"MODEL: each layer must have a number of its own, got {one.name} and {other.name}")
    return found


def _schemes(folder: Path, content: dict[str, Any], names: Iterable[str]) -> dict[str, float8_layouts.Scheme | None]:
    """How the weight of each projection of an FFN among these tensors is stored.

    Raises NotImplementedError, which says what to do, for formats besides 16 bits and e4m3, and ValueError.
    """
    quantised = content.get("quantization_config") or content.get("compression_config")
    beside = folder / _MODELOPT
    settings = layouts.read_json(beside) if not quantised and beside.is_file() else content
    found = dict.fromkeys(match[1] for name in names if (match := _PROJECTION.match(name)))
    return {projection: float8_layouts.how(settings, projection) for projection in found}


def _require_stated(found: Sequence[Layer], content: dict[str, Any]) -> None:
    """Raise RequestError unless the layers are those that the configuration states."""
    count = content.get("num_hidden_layers", len(found))
    numbers = [layer.number for layer in found]
    if count != len(found) or numbers != list(range(len(found))):
        raise RequestError(
            f"MODEL: files must have the layers of the configuration, num_hidden_layers = {count!r}, got "
            f"{len(found)} layers from {numbers[0]} to {numbers[-1]}"
        )
    width = layouts.intermediate_size(content)
    for layer in found:
        for key, stated, got in (
            ("hidden_size", content.get("hidden_size"), layer.k),
            ("intermediate_size", width, layer.n),
        ):
            if stated not in (None, got):
                raise RequestError(f"MODEL: {layer.name} must have the configuration's {key}, {stated!r}, got {got}")


def _require_divided(found: Sequence[Layer], content: dict[str, Any], ranks: int) -> None:
    """Raise RequestError unless vLLM can divide neurons and heads by the ranks."""
    parts = {layer.n: f"{layer.n} neurons" for layer in found}
    heads = content.get("num_attention_heads")
    if isinstance(heads, int):
        parts[heads] = f"{heads} attention heads"
    for number, what in parts.items():
        if number % ranks:
            raise RequestError(f"--ranks: expected a divisor of the {what}, got {ranks}")


def _remarks(found: Sequence[Layer], requested: Route, refused: str) -> Iterator[str]:
    """What else a server makes of the layers."""
    for reason, count in Counter(layer.reason for layer in found if layer.reason and not refused).items():
        yield f"{count} of {len(found)} layers run as without twell: {reason}"
    if count := sum(layer.float8 for layer in found):
        yield f"{count} of {len(found)} layers have weights in e4m3: their dense is in e4m3, too, and copies no weight"
    if not refused and any(layer.dtype == "F32" for layer in found):
        yield "Its weights are 32-bit: vLLM turns them to 16 bits; with --dtype float32 they run as without twell"
    if requested.invariant:
        yield 'Strategy: "row" with sparsity_invariant of the configuration'
        yield 'No time of that was measured: its shares are those of "row", which may be faster'
    elif requested.strategy != "auto":
        yield f'Strategy: "{requested.strategy}", sparsity_strategy of the configuration'


def _refusal(found: Sequence[Layer], ranks: int) -> str:
    """Why the kernels cannot take the layers of a rank; "" if they can."""
    for layer in found:
        facts = Facts("sizes of a rank", n=layer.n // ranks, k=layer.k, float8=layer.float8)
        refusal = unpackable(facts, instead="")
        if refusal:
            return f"All layers run as without twell: {refusal.message}"
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
    least = min(layer.n for layer in found)
    if (arguments.nnz or 0) > least:
        raise RequestError(f"--nnz: expected at most {least:,}, the neurons of a layer, got {arguments.nnz:g}")
    assumed = []
    for layer in found:
        nonzeros = arguments.nnz or ASSUMED_DENSITY * layer.n
        union = 1 - (1 - nonzeros / layer.n) ** geometry.TOKEN_TILE
        assumed.append(layouts.LayerFigures(nonzeros, union, union))
    nonzeros = f"{assumed[0].nonzeros:,.1f} non-zeros per token"
    if arguments.nnz is None:
        nonzeros += f", one of {1 / ASSUMED_DENSITY:.0f} neurons, whatever the model's weights"
    return assumed, f"Figures: assumed, {nonzeros}, tokens independent of each other; --text measures them"


def _measured(arguments: argparse.Namespace, found: Sequence[Layer]) -> tuple[list[layouts.LayerFigures], str]:
    """Run the model on the text."""
    loaded = saved_model.load(arguments)
    watched = saved_model.layers(loaded.model)
    if [layer.number for layer in watched] != [layer.number for layer in found]:
        raise RequestError(f"MODEL: expected the {len(found)} layers of its files, got {len(watched)} of twell")
    text = saved_model.read(loaded, arguments, sparsity.LEAST_TOKENS)
    device = next(loaded.model.parameters()).device
    # tokens in the order of the text, and in none
    both = [[sparsity.Tally(at.linear.out_features, at.compression, device) for at in watched] for _ in range(2)]

    def tally(i: int, x: Tensor, first: Tensor) -> None:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0), device="cpu").to(x.device)
        for tallies, tokens in zip(both, (x, x[order])):
            for rows, pattern in sparsity.patterns(tokens, watched[i].linear, watched[i].activation, watched[i].gate):
                tallies[i].add(pattern, first[rows])

    with saved_model.progress(text.tokens, "serve-check") as done:
        saved_model.observe(loaded.model, watched, saved_model.batches(text.sequences, arguments.batch), tally, done)
    figures = []
    for at, consecutive, mixed in zip(watched, *both, strict=True):
        report = consecutive.report(at)
        unions = report.unions[geometry.TOKEN_TILE], mixed.report(at).unions[geometry.TOKEN_TILE]
        figures.append(layouts.LayerFigures(report.mean, *unions))
    return figures, f"Figures: measured on {text}"


def predict(
    layer: Layer,
    figures: layouts.LayerFigures,
    m: int,
    decode: bool,
    ranks: int,
    refused: str = "",
    table: Table = SHIPPED,
    requested: Route = _AUTO,
) -> Row:
    """What a server would run in a rank's part of a layer, of the ``requested`` route, once it knows the figures."""
    problem = Problem(m, layer.k, layer.n // ranks, True, False, merged=m <= MERGED_TOKENS, float8=layer.float8)
    if refused or layer.reason:
        return Row(layer.number, m, decode, "dense", 1.0, refused or layer.reason, {})
    known = Figures(figures.nonzeros / ranks, vllm.union(figures, m))
    strategy, reason, costs, _ = decide(problem, known, None, table)
    if requested.strategy != "auto":
        strategy, reason = requested.strategy, "named by the configuration"
    share = costs.get(strategy, 1.0 if strategy == "dense" else None)
    return Row(layer.number, m, decode, strategy, share, reason, costs)


def _report(
    folder: Path,
    found: Sequence[Layer],
    figures: Sequence[layouts.LayerFigures],
    rows: Sequence[Row],
    remarks: Sequence[str],
    ranks: int,
    table: Table,
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
        cells = [f"{row.strategy} {_as_share(row.share)}" for row in rows if row.layer == layer.number]
        lines.append([str(layer.number), f"{of.nonzeros:,.1f}", as_percent(of.text), as_percent(of.batch), *cells])
    ffns, whole = (
        [share(found, [row for row in rows if (row.decode, row.tokens) == call], beside) for call in calls]
        for beside in (False, True)
    )
    for name, shares in (("FFNs", ffns), ("layers", whole)):
        lines.append([name, "", "", "", *map(_as_share, shares)])
    yield from aligned(lines)
    yield "non-zeros: mean per token. union: share of the neurons that 128 tokens fire, which follow each other in a"
    yield "  text as in a prompt, or come from many places as in a batch. layers: with the products for query, key,"
    yield "  value and output, by numbers of weights, without attention itself, which reads the cache of sequences."
    yield "A server without figures runs batches of 33 to 512 sequences dense."
    yield "Calls of up to 1,024 tokens count as batches, others as text, as in a server that has measured none."
    yield f"Dense in 16 bits computes gate and up in one product for up to {MERGED_TOKENS} tokens, as in servers;"
    yield "  `twell analyze` takes it for two, and all calls for tokens that follow each other in a text."
    of_weights = {FLOAT8 if layer.float8 else table: "e4m3" if layer.float8 else "16 bits" for layer in found}
    for source, weights in of_weights.items():
        yield f"Predicted from times measured on {source.machine.split('; ')[0]} in {weights}, {source.date[:10]}."
    yield "  They are of CUDA graphs with down weights by rows, as vLLM lays them out after loading."
    apart, closest = max(_apart(layer, of, ranks, table) for layer, of in zip(found, figures, strict=True))
    if apart > prediction.TOO_FAR:
        yield f"Verdict: none, too far from all measured layers, the nearest of which has {closest}"
        return
    if apart > prediction.FAR:
        yield f"Far from all measured layers: the nearest has {closest}"
    yield _verdict(dict(zip(names, ffns, strict=True)), calls, " and ".join(source.gpu for source in of_weights))


def _apart(layer: Layer, figures: layouts.LayerFigures, ranks: int, table: Table) -> tuple[float, str]:
    """The factor between a rank's part of a layer and the nearest measured layer, and what that one has."""
    size = layer.k, layer.n // ranks
    _, _, k, n = nearest(Problem(1, *size, True, False, float8=layer.float8), table)
    apart, closest = prediction.distance(size, (k, n)), f"K = {k:,}, N = {n:,}"
    if layer.float8:
        apart = max(apart, figures.nonzeros / layer.n / FLOAT8_DENSITY)
        closest += f" and up to {as_percent(FLOAT8_DENSITY)} non-zeros"
    return apart, closest


def _verdict(shares: dict[str, float | None], calls: Sequence[tuple[bool, int]], gpus: str) -> str:
    """For which calls the FFNs gain on these GPUs, and what that holds for."""
    gains = [f"{name} ({_as_share(of)})" for name, of in shares.items() if of is not None and of * prediction.PAYS <= 1]
    few = f", as eager calls of up to {prediction.HOST_BOUND:,} tokens wait for the host" * any(
        m <= prediction.HOST_BOUND for _, m in calls
    )
    holds = f"by times in CUDA graphs{few}, with down weights by rows"
    unknown = [name for name, of in shares.items() if of is None]
    if unknown:
        holds += f"; {', '.join(unknown)} not known"
    if not gains:
        return f"Verdict: no gain of the FFNs on {gpus}; {holds}"
    return f"Verdict: FFNs gain on {gpus} for {', '.join(gains)} of dense's time; {holds}"


def _as_share(share: float | None) -> str:
    return "-" if share is None else f"{share:.2f}"


def share(found: Sequence[Layer], rows: Sequence[Row], beside: bool) -> float | None:
    """The share of dense's time of all layers, whose dense times are as their weights; None if one is not known."""
    weights = [layer.k * layer.n for layer in found]
    more = [layer.beside * beside for layer in found]
    total = sum(weight * (1 + extra) for weight, extra in zip(weights, more))
    shares = [row.share for row in rows if row.share is not None]
    if len(shares) < len(rows):
        return None
    return sum(weight * (each + extra) for weight, extra, each in zip(weights, more, shares, strict=True)) / total
