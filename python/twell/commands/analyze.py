"""``twell analyze``: load a model and text for ``twell.analyze``, or a checkpoint's figures for a server."""

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from twell.base import files
from twell.choose.cards import to_predict
from twell.choose.rates import ASSUMED_DENSITY
from twell.commands import saved_model, served
from twell.commands.request import RequestError, at_least, check_json, number_above, pick_device
from twell.integrations import layouts
from twell.integrations.analyze import report
from twell.integrations.analyze.calls import Call
from twell.integrations.analyze.figures import LayerSparsity
from twell.integrations.analyze.layers import found
from twell.integrations.analyze.report import DECODE, PREFILL, TRAINING, Analysis, calls_of
from twell.runtime import geometry

DESCRIPTION = """\
Run a model on text, report the sparsity of each feed-forward layer, and predict the times of calls beside those of
dense layers. The last line is the verdict: whether twell pays. For a model with SiLU or GELU it says how sparse the
model must become. With --serve calls are those of a server, and figures may come from config.json or be assumed.
Needs no GPU.
"""

SERVED_PREFILL, SERVED_DECODE = (2048, 8192), (1, 8, 32, 64, 128, 256, 512)
# --tokens, --sequence and --batch. A server's batch is of tokens from many places: many short sequences.
_READ, _SERVED_READ = (65536, None, 4), (32768, 256, 128)
# A union needs 128 tokens, here at least two.
LEAST_TOKENS = 2 * geometry.TOKEN_TILE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    saved_model.add_arguments(parser, _READ[0], text=False)
    add = parser.add_argument
    said = "predict the calls of a server, of a model that vLLM serves through twell; text, if any, is 32768 tokens in"
    add("--serve", action="store_true", help=f"{said} batches of 128 sequences of 256")
    numbers = (
        ("--prefill", "tokens of prompts or other calls", PREFILL, SERVED_PREFILL),
        ("--decode", "sequences that decode", DECODE, SERVED_DECODE),
        ("--training", "tokens of training steps", TRAINING, ()),
    )
    for option, what, usual, of_servers in numbers:
        defaults = " ".join(map(str, usual)) + f", with --serve {' '.join(map(str, of_servers)) or 'none'}"
        add(option, type=at_least(1), nargs="*", metavar="M", help=f"{what} (default: {defaults})")
    add("--ranks", type=at_least(1), metavar="N", default=1, help="with --serve: tensor-parallel ranks (1)")
    add("--nnz", type=number_above(0), metavar="X", help="with --serve: non-zeros per token to assume")
    add("--save", action="store_true", help="with --serve: write the figures of the text into config.json, for servers")
    add("--json", type=Path, metavar="FILE", help="write figures and predictions as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and print. Raises RequestError before the model runs if the request cannot be met."""
    check_json("--json", arguments.json)
    folder = saved_model.local(arguments.model)
    _check(arguments, folder)
    for name, usual in zip(("tokens", "sequence", "batch"), _SERVED_READ if arguments.serve else _READ):
        if getattr(arguments, name) is None:
            setattr(arguments, name, usual)
    try:
        analysis = (_served if arguments.serve else _plain)(arguments, folder)
    except saved_model.WithoutZeros as model:
        print(*_without_zeros(model, arguments), sep="\n")
        return 0
    # the verdict is the last line
    print(str(analysis).removesuffix(analysis.verdict).rstrip(), end="\n\n")
    if arguments.save:
        save(folder, analysis.layers)
    if arguments.json is not None:
        files.write_text(arguments.json, json.dumps(analysis.as_json(), indent=1) + "\n")
        print(f"JSON: {arguments.json.absolute()}")
    print(analysis.verdict)
    return 0


def _check(arguments: argparse.Namespace, folder: Path) -> None:
    """Raise RequestError for options that do not go together or with the folder."""
    serve, save, text, into = arguments.serve, arguments.save, arguments.text, arguments.json
    config = folder / layouts.CONFIG
    given = {"nnz": arguments.nnz is not None, "save": save, "ranks": arguments.ranks > 1}
    link = os.readlink(config) if save and config.is_symlink() else ""
    inside = into is not None and into.is_file() and folder.resolve() in into.resolve().parents
    wrong = {
        **{f"--{name}: expected --serve, got none": not serve and there for name, there in given.items()},
        "--text: expected files or folders of text, got none; only --serve needs none": not serve and text is None,
        "--activation: expected no --serve, which takes a model as it is, got both": serve and arguments.activation,
        f"--json: expected a new file or one outside of the model, got {str(into)!r}": inside,
        "--save: expected --text, whose figures it writes, got none": save and text is None,
        "--save: expected MODEL to be a folder, got the name of one on the Hub": save and folder != arguments.model,
        # of a download cache, where revisions share files
        f"--save: expected a {layouts.CONFIG} of the folder's own, got a link to {link!r}, which others may read; copy "
        "the model first, as by cp -rL": bool(link),
        "--nnz: expected no --text, which measures it, got both": given["nnz"] and text is not None,
    }
    for said, is_so in wrong.items():
        if is_so:
            raise RequestError(said)


def _calls(arguments: argparse.Namespace) -> list[Call]:
    usual = (SERVED_PREFILL, SERVED_DECODE, ()) if arguments.serve else (PREFILL, DECODE, TRAINING)
    given = (arguments.prefill, arguments.decode, arguments.training)
    prefill, decode, training = (own if one is None else one for one, own in zip(given, usual))
    return calls_of(prefill, decode, training, arguments.serve)


def _counted(loaded: saved_model.Loaded, arguments: argparse.Namespace) -> tuple[Any, saved_model.Text]:
    """The figures of layers and experts on the text, and that."""
    watched, routed = found(loaded.model)
    text = saved_model.read(loaded, arguments, LEAST_TOKENS)
    with saved_model.progress(text.tokens, "analyze") as done:
        batches = saved_model.batches(text.sequences, arguments.batch, done)
        # logits of all tokens would be the largest tensor by far
        body, whole = getattr(loaded.model, "base_model", None), arguments.save or arguments.serve
        return report.count(loaded.model, batches, watched, routed, body, whole), text


def _plain(arguments: argparse.Namespace, folder: Path) -> Analysis:
    loaded = saved_model.load(arguments, saved_model.ACTIVATION_OPTION, True)
    (layers, experts), text = _counted(loaded, arguments)
    parameter = next(loaded.model.parameters())
    lines = [f"{folder.absolute().name}: {kind}" for kind in report.kinds(layers)] or [folder.absolute().name]
    if loaded.left:
        lines.append(f"{loaded.left[0].upper()}{loaded.left[1:]}")
    if loaded.stored:
        lines.append(f"Files by {loaded.stored}, whose weights were dequantised: figures and times are of 16 bits")
        lines.append("Of quantised files sparsify and load take those in e4m3 alone (docs/float8.md)")
    if loaded.was:
        lines.append(f"{arguments.activation} in place of {loaded.was}: figures before any training with it")
    lines.append(f"Text: {text}; {parameter.device}, {str(parameter.dtype).removeprefix('torch.')}")
    if parameter.dtype.itemsize > 2:
        lines.append(f"Times are of 16 bits: the kernels take no {parameter.dtype}")
    return report.predicted(layers, experts, _calls(arguments), to_predict(parameter.device), tuple(lines))


def _served(arguments: argparse.Namespace, folder: Path) -> Analysis:
    content = saved_model.configuration(folder)
    layers, requested, lines = served.read(folder, content, arguments.ranks)
    layers, source = _figures(arguments, content, layers)
    kinds = (f"{folder.absolute().name}: {kind}" for kind in report.kinds(layers))
    title = (*kinds, *lines, source, *[f"Neurons are divided by {arguments.ranks} ranks"] * (arguments.ranks > 1))
    card = to_predict(pick_device(arguments.device))
    return report.predicted(layers, [], _calls(arguments), card, title, arguments.ranks, requested)


def _figures(
    arguments: argparse.Namespace, content: dict[str, Any], layers: list[LayerSparsity]
) -> tuple[list[LayerSparsity], str]:
    """The layers with figures, and where these come from."""
    if arguments.text is not None:
        loaded = saved_model.load(arguments)
        if (got := len(found(loaded.model)[0])) != len(layers):
            raise RequestError(f"MODEL: expected the {len(layers)} layers of its files, got {got} of twell")
        (counted, _), text = _counted(loaded, arguments)
        counted = [dataclasses.replace(each, heaviest=None, candidates=None) for each in counted]
        kept = [dataclasses.replace(of, float8=at.float8, reason=at.reason) for of, at in zip(counted, layers)]
        return kept, f"Figures: measured on {text}"
    try:
        known = None if arguments.nnz is not None else layouts.measured(content, len(layers))
    except ValueError as error:
        raise RequestError(f"MODEL: {error}") from error
    source = f"Figures: measured earlier, {layouts.FIGURES_KEY} of the configuration"
    if known is None:
        least = min(layer.n for layer in layers)
        if (arguments.nnz or 0) > least:
            raise RequestError(f"--nnz: expected at most {least:,}, the neurons of a layer, got {arguments.nnz:g}")
        assumed = [arguments.nnz or ASSUMED_DENSITY * layer.n for layer in layers]
        unions = [1 - (1 - mean / layer.n) ** geometry.TOKEN_TILE for mean, layer in zip(assumed, layers)]
        known = [layouts.LayerFigures(mean, union, union) for mean, union in zip(assumed, unions)]
        source = f"Figures: assumed, {assumed[0]:,.1f} non-zeros per token"
        if arguments.nnz is None:
            source += f", one of {1 / ASSUMED_DENSITY:.0f} neurons, whatever the model's weights"
        source += ", tokens independent of each other; --text measures them"
    given = zip(layers, known, strict=True)
    return [dataclasses.replace(at, mean=of.nonzeros, union=of.text, mixed=of.batch) for at, of in given], source


def save(folder: Path, layers: Sequence[LayerSparsity]) -> None:
    """Write the figures of the layers into the configuration of a model's folder, for servers."""
    content = saved_model.configuration(folder)
    if any(each.union is None or each.mixed is None for each in layers):
        raise RequestError("--save: expected batches of 128 tokens or more, got smaller ones")
    entries = [[round(each.mean, 2), round(each.union or 0, 5), round(each.mixed or 0, 5)] for each in layers]
    files.write_text(folder / layouts.CONFIG, json.dumps(content | {layouts.FIGURES_KEY: entries}, indent=2) + "\n")
    print(f"Figures written: {layouts.FIGURES_KEY} in {folder / layouts.CONFIG}")


def _without_zeros(model: saved_model.WithoutZeros, arguments: argparse.Namespace) -> Iterator[str]:
    """The report on a model whose activation makes no zeros."""
    if model.left:
        yield f"{model.folder.absolute().name}: {model.left}"
    if arguments.json is not None:
        yield "No --json: there are no zeros"
    if not model.shapes:
        yield "Verdict: twell does not pay, as it computes no layer of the model"
        return
    card = to_predict(pick_device(arguments.device))
    yield from report.requirement(model.was, model.shapes, _calls(arguments), card)
