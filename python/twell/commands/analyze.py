"""``twell analyze``: load a model and text for ``twell.analyze``, and write figures for servers."""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from twell.base import files
from twell.choose.cards import to_predict
from twell.commands import saved_model
from twell.commands.request import RequestError, at_least, check_json, pick_device
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
model must become. --save also writes the figures into config.json, for servers. Needs no GPU.
"""

# --tokens, --sequence and --batch. A server's batch is of tokens from many places: many short sequences.
_READ, _SAVED_READ = (65536, None, 4), (32768, 256, 128)
# A union needs 128 tokens, here at least two.
LEAST_TOKENS = 2 * geometry.TOKEN_TILE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    saved_model.add_arguments(parser, *_READ, defaults=False)
    add = parser.add_argument
    for option, what, usual in (
        ("--prefill", "tokens of prompts or other calls", PREFILL),
        ("--decode", "sequences that decode", DECODE),
        ("--training", "tokens of training steps", TRAINING),
    ):
        said = f"{what} (default: {' '.join(map(str, usual))})"
        add(option, type=at_least(1), nargs="*", metavar="M", default=usual, help=said)
    saved = "write the figures into config.json, for servers; of 32768 tokens in 128 sequences of 256 at a time"
    add("--save", action="store_true", help=saved)
    add("--json", type=Path, metavar="FILE", help="write figures and predictions as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and print. Raises RequestError before the model runs if the request cannot be met."""
    check_json("--json", arguments.json)
    folder = saved_model.local(arguments.model)
    _check(arguments, folder)
    for name, usual in zip(("tokens", "sequence", "batch"), _SAVED_READ if arguments.save else _READ):
        if getattr(arguments, name) is None:
            setattr(arguments, name, usual)
    try:
        analysis = _analysis(arguments, folder)
    except saved_model.WithoutZeros as model:
        print(*_without_zeros(model, arguments), sep="\n")
        return 0
    # the verdict is the last line
    print(str(analysis).removesuffix(analysis.verdict).rstrip(), end="\n\n")
    if arguments.save:
        _save(folder, analysis.layers)
    if arguments.json is not None:
        files.write_text(arguments.json, json.dumps(analysis.as_json(), indent=1) + "\n")
        print(f"JSON: {arguments.json.absolute()}")
    print(analysis.verdict)
    return 0


def _check(arguments: argparse.Namespace, folder: Path) -> None:
    """Raise RequestError for options that do not go together or with the folder."""
    save, into, config = arguments.save, arguments.json, folder / layouts.CONFIG
    link = os.readlink(config) if save and config.is_symlink() else ""
    wrong = {
        f"--json: expected a new file or one outside of the model, got {str(into)!r}": (
            into is not None and into.is_file() and folder.resolve() in into.resolve().parents
        ),
        "--save: expected no --activation, as a server takes the model as it is, got both": save
        and arguments.activation,
        "--save: expected MODEL to be a folder, got the name of one on the Hub": save and folder != arguments.model,
        # of a download cache, where revisions share files
        f"--save: expected a {layouts.CONFIG} of the folder's own, got a link to {link!r}, which others may read; copy "
        "the model first, as by cp -rL": bool(link),
    }
    for said, is_so in wrong.items():
        if is_so:
            raise RequestError(said)


def _calls(arguments: argparse.Namespace) -> list[Call]:
    return calls_of(arguments.prefill, arguments.decode, arguments.training)


def _analysis(arguments: argparse.Namespace, folder: Path) -> Analysis:
    loaded = saved_model.load(arguments, saved_model.ACTIVATION_OPTION, True)
    watched, routed = found(loaded.model)
    count = saved_model.configuration(folder).get("num_hidden_layers")
    if arguments.save and count != len(watched):
        raise RequestError(
            f"--save: expected as many layers as num_hidden_layers, {count!r}, got {len(watched)} of twell"
        )
    text = saved_model.read(loaded, arguments, LEAST_TOKENS)
    with saved_model.progress(text.tokens, "analyze") as done:
        batches = saved_model.batches(text.sequences, arguments.batch, done)
        # logits of all tokens would be the largest tensor by far
        body = getattr(loaded.model, "base_model", None)
        layers, experts = report.count(loaded.model, batches, watched, routed, body)
    parameter = next(loaded.model.parameters())
    lines = [f"{folder.absolute().name}: {kind}" for kind in report.kinds(layers)] or [folder.absolute().name]
    if loaded.left:
        lines.append(f"{loaded.left[0].upper()}{loaded.left[1:]}")
    if loaded.stored:
        lines.append(f"Files by {loaded.stored}, whose weights were dequantised: figures and times are of 16 bits")
        lines.append("Of quantised files load takes those in e4m3 alone, in 16 bits (docs/float8.md)")
    if loaded.was:
        lines.append(f"{arguments.activation} in place of {loaded.was}: figures before any training with it")
    lines.append(f"Text: {text}; {parameter.device}, {str(parameter.dtype).removeprefix('torch.')}")
    if parameter.dtype.itemsize > 2:
        lines.append(f"Times are of 16 bits: the kernels take no {parameter.dtype}")
    return report.predicted(layers, experts, _calls(arguments), to_predict(parameter.device), tuple(lines))


def _save(folder: Path, layers: Sequence[LayerSparsity]) -> None:
    """Write the figures into the configuration."""
    if any(each.union is None or each.mixed is None for each in layers):
        raise RequestError("--save: expected batches of 128 tokens or more, got smaller ones")
    entries = [[round(each.mean, 2), round(each.union or 0, 5), round(each.mixed or 0, 5)] for each in layers]
    content = saved_model.configuration(folder) | {layouts.FIGURES_KEY: entries}
    files.write_text(folder / layouts.CONFIG, json.dumps(content, indent=2) + "\n")
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
