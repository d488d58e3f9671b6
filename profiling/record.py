"""Record inputs and gate weights of a model's feed-forward layers as files for ``testing.load_real``.

    python -m profiling.record MODEL --text FOLDER --layers 3 6 --out RECORDED

Run a model on text and write the inputs of the chosen feed-forward layers and their gate weights in bfloat16: workloads
with the pattern of a real model, for `python -m profiling.bench --workload real:FOLDER` and twell.testing.load_real.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.commands import saved_model
from twell.commands.request import RequestError, at_least, exit_status
from twell.integrations.analyze.layers import WatchedLayer, found, observe


@torch.no_grad()
def write_layer(path: Path, layer: WatchedLayer, x: Tensor) -> str:
    """Write a layer's gate projection and its input x [T, K], as ``load_real`` documents; what it is, in words."""
    import numpy as np

    linear: Any = layer.linear
    tensors = {"x": x, "w": linear.weight} | ({} if linear.bias is None else {"b": linear.bias})
    bits = {name: t.detach().bfloat16().cpu().contiguous().view(torch.int16) for name, t in tensors.items()}
    np.savez_compressed(path, **{name: t.numpy() for name, t in bits.items()})
    on = linear.weight.device
    fired = sum(int((F.linear(part.to(on), linear.weight, linear.bias) > 0).sum()) for part in x.split(4096))
    size = path.stat().st_size / 1e6
    return f"{fired / len(x):.2f} non-zeros per token, {linear.out_features:,} neurons, {size:.1f} MB"


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
    out: Path = arguments.out
    _check_out(out)
    loaded = saved_model.load(arguments, remedy=saved_model.ACTIVATION_OPTION)
    layers, _ = found(loaded.model)
    if any(layer.activation.threshold for layer in layers):
        raise RequestError("MODEL: expected layers that fire above 0, as workloads do, got FATReLU with a threshold")
    if odd := [layer.name for layer in layers if layer.linear is None]:
        raise RequestError(f"MODEL: expected gates of one projection, got others in {odd[0]}")
    known = {layer.number: i for i, layer in enumerate(layers)}
    numbers = list(dict.fromkeys(arguments.layers))
    if unknown := [number for number in numbers if number not in known]:
        expected, got = (", ".join(map(str, these)) for these in (sorted(known), unknown))
        raise RequestError(f"--layers: expected some of {expected}, got {got}")
    text = saved_model.read(loaded, arguments, arguments.tokens)
    inputs: dict[int, list[Tensor]] = {known[number]: [] for number in numbers}

    def record_input(i: int, x: Tensor, *_: Tensor) -> None:
        # a copy: the model may write to its own
        if i in inputs:
            inputs[i].append(x.to("cpu", copy=True))

    with saved_model.progress(text.tokens, "record") as done:
        batches = saved_model.batches(text.sequences, arguments.batch, done)
        observe(loaded.model, layers, batches, record_input, getattr(loaded.model, "base_model", None))
    Path(os.path.realpath(out)).mkdir(exist_ok=True)
    for number in numbers:
        at = known[number]
        said = write_layer(out / f"layer{number}.npz", layers[at], torch.cat(inputs[at]))
        print(f"layer {number}: {said}", flush=True)
    print(out.absolute())
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    saved_model.add_arguments(parser, tokens=4096)
    add = parser.add_argument
    add("--layers", type=at_least(0), nargs="+", required=True, metavar="L", help="numbers of the layers")
    add("--out", type=Path, required=True, metavar="FOLDER", help="a new folder, or an empty one")


def main(argv: Sequence[str] | None = None) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m profiling.record", description=__doc__, formatter_class=formatter)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    return exit_status("profiling.record", lambda: run(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
