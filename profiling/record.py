"""Record inputs and gate weights of a model's feed-forward layers as files for ``testing.load_real``.

Layers of stacked experts become files for ``testing.load_experts``, with all of their weights.

python -m profiling.record MODEL --text FOLDER --layers 3 6 --out RECORDED
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from profiling.draw.common import markdown
from twell.commands import saved_model
from twell.commands.request import RequestError, at_least, exit_status
from twell.integrations import experts as stacked
from twell.integrations.analyze import experts
from twell.integrations.analyze.layers import WatchedExperts, WatchedLayer, found, observe

DESCRIPTION = """\
Run a model on text and write the inputs of the chosen feed-forward layers and their gate weights in bfloat16: workloads
with the pattern of a real model, for `python -m profiling.bench --workload real:FOLDER` and twell.testing.load_real.
Layers of stacked experts are written with routes and all weights, for twell.testing.load_experts.
"""
# file, mean non-zeros of a token or of a token and one of its experts, neurons, MB
Line = tuple[str, str, str, str]


def save(path: Path, tensors: dict[str, Tensor], **others: Any) -> str:
    """Write tensors as the bits of bfloat16, and other arrays as they are; return the megabytes."""
    import numpy as np

    bits: Any = {
        name: t.detach().bfloat16().cpu().contiguous().view(torch.int16).numpy() for name, t in tensors.items()
    }
    np.savez_compressed(path, **bits, **others)
    return f"{path.stat().st_size / 1e6:.1f}"


@torch.no_grad()
def write_layer(path: Path, layer: WatchedLayer, x: Tensor) -> Line:
    """Write a layer's gate projection and its input x [T, K], as ``load_real`` documents."""
    linear: Any = layer.linear
    tensors = {"x": x, "w": linear.weight} | ({} if linear.bias is None else {"b": linear.bias})
    size = save(path, tensors)
    on = linear.weight.device
    fired = sum(int((F.linear(part.to(on), linear.weight, linear.bias) > 0).sum()) for part in x.split(4096))
    return f"layer {layer.number}", f"{fired / len(x):.2f}", f"{linear.out_features:,}", size


@torch.no_grad()
def write_experts(path: Path, layer: WatchedExperts, x: Tensor, first: Tensor, ids: Tensor, weights: Tensor) -> Line:
    """Write a layer of experts, its input x [T, K] and routes [T, k], as ``load_experts`` documents."""
    import numpy as np

    module: Any = layer.module
    _, w_up = stacked.projections(module)
    # of the projection before the activation
    own = torch.stack([linear.weight for linear in layer.linears])
    tensors = {"x": x, "w_down": module.down_proj.transpose(1, 2)}
    tensors |= {"w_gate": own, "w_up": w_up} if layer.gated else {"w_up": own}
    others = {"expert_ids": ids.int(), "weights": weights.float(), "first": first}
    arrays = {name: t.cpu().numpy() for name, t in others.items()}
    size = save(path, tensors, **arrays, activation=np.array(layer.activation.name))
    fired = sum(
        int((layer.linears[expert](x[tokens].to(own.device, own.dtype)) > 0).sum())
        for expert, tokens in experts.of_experts(ids, len(layer.linears))
    )
    return f"experts {layer.number}", f"{fired / ids.numel():.2f}", f"{own.shape[0]} x {own.shape[1]:,}", size


def _readme(loaded: saved_model.Loaded, text: saved_model.Text, lines: Sequence[Line]) -> str:
    """The README.md of the folder."""
    workloads = " ".join(f"real:FOLDER/{line[0].split()[1]}" for line in lines if line[0].startswith("layer"))
    return f"""\
# Recorded activations

Inputs and weights of layers of `{loaded.folder.absolute().name}` in bfloat16, run on {text.tokens:,} tokens of text in
{len(text.sequences):,} sequences. Written by `python -m profiling.record` of twell {twell.__version__}.

`twell.testing.load_real(L, FOLDER)` reads `layer{{L}}.npz` and says what it holds; `python -m profiling.bench ffn
--workload {workloads or "real:FOLDER"}` times such layers.
`twell.sparse_experts(**twell.testing.load_experts(L, FOLDER))` runs `experts{{L}}.npz`.
`twell analyze` prints the pattern of the model.

{markdown(["file", "non-zeros per token", "neurons", "MB"], "lrrr", lines)}
"""


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    saved_model.add_arguments(parser, tokens=4096)
    add = parser.add_argument
    add("--layers", type=at_least(0), nargs="+", required=True, metavar="L", help="numbers of the layers")
    add("--out", type=Path, required=True, metavar="FOLDER", help="a new folder, or an empty one")


def _check_out(out: Path) -> None:
    if out.is_dir():
        if any(out.iterdir()):
            raise RequestError(f"--out: expected a new or an empty folder, got {str(out)!r} with files in it")
    elif out.exists():
        raise RequestError(f"--out: expected a folder, got the file {str(out)!r}")
    # a link may lead elsewhere
    around = Path(os.path.realpath(out)).parent
    if not around.is_dir() or not os.access(around, os.W_OK):
        raise RequestError(f"--out: expected an existing folder around it that can be written, got {str(around)!r}")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and print; README.md is written last.

    Raises RequestError if the request cannot be met.
    """
    out: Path = arguments.out
    _check_out(out)
    loaded = saved_model.load(arguments, remedy=saved_model.ACTIVATION_OPTION, experts=True)
    layers, routed = found(loaded.model)
    activations = [*(each.activation for each in layers), *(each.activation for each in routed)]
    if any(activation.threshold for activation in activations):
        raise RequestError("MODEL: expected layers that fire above 0, as workloads do, got FATReLU with a threshold")
    if odd := [layer.name for layer in layers if layer.linear is None]:
        raise RequestError(f"MODEL: expected gates of one projection, got others in {odd[0]}")
    known = {layer.number: i for i, layer in enumerate(layers)}
    known_experts = {layer.number: i for i, layer in enumerate(routed)}
    numbers = list(dict.fromkeys(arguments.layers))
    unknown = [number for number in numbers if number not in known and number not in known_experts]
    if unknown:
        every = sorted({*known, *known_experts})
        expected, got = (", ".join(map(str, these)) for these in (every, unknown))
        raise RequestError(f"--layers: expected some of {expected}, got {got}")
    text = saved_model.read(loaded, arguments, arguments.tokens)
    inputs: dict[int, list[Tensor]] = {known[number]: [] for number in numbers if number in known}
    # x and routes
    routes: dict[int, list[tuple[Tensor, ...]]] = {known_experts[n]: [] for n in numbers if n in known_experts}
    starts: list[Tensor] = []

    def record_input(i: int, x: Tensor, y: Tensor, first: Tensor, *given: Tensor) -> None:
        if i == 0:
            starts.append(first)
        # copies: the model may write to its own
        if i in inputs:
            inputs[i].append(x.to("cpu", copy=True))
        if i - len(layers) in routes:
            routes[i - len(layers)].append(tuple(t.to("cpu", copy=True) for t in (x, *experts.routes(given))))

    with saved_model.progress(text.tokens, "record") as done:
        batches = saved_model.batches(text.sequences, arguments.batch, done)
        observe(loaded.model, [*layers, *routed], batches, record_input, getattr(loaded.model, "base_model", None))
    lines: list[Line] = []
    Path(os.path.realpath(out)).mkdir(exist_ok=True)
    for number in numbers:
        if number in known:
            at = known[number]
            lines.append(write_layer(out / f"layer{number}.npz", layers[at], torch.cat(inputs[at])))
        if number in known_experts:
            at = known_experts[number]
            x, ids, weights = (torch.cat(parts) for parts in zip(*routes[at]))
            path = out / f"experts{number}.npz"
            lines.append(write_experts(path, routed[at], x, torch.cat(starts), ids, weights))
        name, fired, neurons, size = lines[-1]
        print(f"{name}: {fired} non-zeros per token, {neurons} neurons, {size} MB", flush=True)
    (out / "README.md").write_text(_readme(loaded, text, lines), encoding="utf-8")
    print(f"{out.absolute()}; README.md there has the statistics")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.record", description=DESCRIPTION)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    return exit_status("profiling.record", lambda: run(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
