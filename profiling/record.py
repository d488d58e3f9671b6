"""Record inputs and gate weights of a model's feed-forward layers as files for ``testing.load_real``.

Layers of stacked experts become files for ``testing.load_experts``, with all of their weights.

python -m profiling.record MODEL --text FOLDER --layers 3 6 --out RECORDED
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from profiling.draw.common import markdown
from twell import _files, testing
from twell._activation import RELU
from twell._analyze import experts
from twell._analyze.layers import WatchedExperts, WatchedLayer, found, linear_of, observe, patterns
from twell.commands import saved_model
from twell.commands.request import RequestError, at_least, exit_status
from twell.integrations import experts as stacked

DESCRIPTION = """\
Run a model on text and write the inputs of the chosen feed-forward layers and their gate weights as int8: workloads
with the pattern of a real model, for `python -m profiling.bench --workload real:FOLDER` and twell.testing.load_real.
Layers of stacked experts are written with routes and all weights, for twell.testing.load_experts.
"""

# A file must keep the pattern: at most these shares of the non-zeros may be lost or new, or more or fewer in all. With
# 14 and 33 non-zeros per token in 5,632 neurons 0.4 % are lost and as many new. FEW changes are always allowed.
MOST_CHANGED = 0.05
MOST_BIASED = 0.01
FEW = 16

# ``load_real`` draws a row that is not stored as noise minus 4 times ``quiet``. The product of the noise with a token
# has a standard deviation of about 0.6, so 4 times the product of ``quiet`` must be 7 deviations: of 2e7 products, 1 in
# 40,000 draws has one above 0.
_QUIET_LEAST = 7 * 0.6 / 4
# Before scaling, products of at least the first are good enough; below the second the direction is not used.
_QUIET_GOOD, _QUIET_POOR = 0.9, 0.5
_QUIET_ROUNDS = 12

_RIDGE = 1e-6

# Neurons per sort of products.
_SORTED = 512


@dataclass(frozen=True)
class Agreement:
    """Comparison of the pattern of a file, as ``load_real`` reads it, with the model's.

    before, after: mean non-zeros per token. lost, added: non-zeros that only the model has, and that only the file has,
    as shares of the model's. stored: neurons with a gate row in the file. size: bytes. Of experts, tokens are pairs of
    a token and one of its experts.
    """

    number: int
    tokens: int
    before: float
    after: float
    lost: float
    added: float
    stored: int
    size: int
    what: str = "layer"

    @property
    def problem(self) -> str:
        """The difference that exceeds its limit, or ""."""
        nonzeros = self.before * self.tokens

        def above(share: float, limit: float) -> bool:
            return share * nonzeros > max(limit * nonzeros, FEW)

        if above(self.lost, MOST_CHANGED) or above(self.added, MOST_CHANGED):
            return (
                f"{self.lost:.1%} of the non-zeros are lost, {self.added:.1%} are new, at most {MOST_CHANGED:.0%} may"
            )
        if above(abs(self.lost - self.added), MOST_BIASED):
            return f"{self.after:.2f} non-zeros per token in place of {self.before:.2f}, {MOST_BIASED:.0%} may differ"
        return ""

    def __str__(self) -> str:
        return (
            f"{self.what} {self.number}: {self.before:.2f} non-zeros per token in the model, {self.after:.2f} in the "
            f"file; "
            f"{1 - self.lost:.2%} kept, {self.added:.2%} added; {self.stored:,} rows, {self.size / 1e6:.1f} MB"
        )


@dataclass(frozen=True, eq=False)
class Recording:
    """The content of a file, documented in ``load_real``, and ``fired``, bool [tokens, N]: the model's pattern."""

    x: Tensor
    x_scale: Tensor
    w: Tensor
    w_scale: Tensor
    alive: Tensor
    quiet: Tensor
    n: int
    fired: Tensor

    def save(self, path: Path) -> None:
        """Write all but ``fired``; the same bytes for the same values."""
        import numpy as np

        kept = ("x", "x_scale", "w", "w_scale", "alive", "quiet")
        np.savez_compressed(path, n=np.int64(self.n), **{name: getattr(self, name).cpu().numpy() for name in kept})


@torch.no_grad()
def quantize(x: Tensor, layer: WatchedLayer) -> Recording:
    """Quantize x [tokens, K] and the gate weight to int8, keeping the pattern of the model's dtype.

    x has a scale per feature or per token, whichever changes fewer gates: some models have very large features, others
    very large tokens. A bias is added to the weight along a direction whose product with every token is about 1. Then
    each row that fires for a wrong number of tokens is moved along it and rounded again.
    """
    linear: Any = layer.linear
    fired = torch.cat([pattern for _, pattern in _patterns(x, linear)])
    weight, bias = linear.weight.float(), linear.bias
    x_int, x_scale, tokens, one = _round_input(x, [(linear, torch.arange(len(x), device=x.device), fired)])
    if bias is not None:
        weight = weight + bias.float()[:, None] * one
    quiet = _quiet_direction(tokens)
    # without a direction that keeps drawn rows silent, the rows of all neurons are stored
    alive = fired.any(0) if quiet is not None else torch.ones_like(fired[0])
    w_int, w_scale = _fit_rows(tokens, weight[alive], fired[:, alive], one)
    return Recording(
        x=x_int.to(torch.int8),
        x_scale=x_scale,
        w=w_int.to(torch.int8),
        w_scale=w_scale,
        alive=alive.nonzero().flatten().int(),
        quiet=torch.zeros_like(one) if quiet is None else quiet,
        n=weight.shape[0],
        fired=fired,
    )


def _patterns(x: Tensor, linear: torch.nn.Linear) -> Iterator[tuple[slice, Tensor]]:
    """The neurons that tokens x [M, K] fire: rows, and bool [rows, N]."""
    return patterns(RELU, lambda rows: F.linear(x[rows], linear.weight, linear.bias), len(x), linear.out_features)


# A projection, the indices of its tokens, and the neurons that they fire.
Fired = tuple[torch.nn.Linear, Tensor, Tensor]


def _round_input(x: Tensor, projections: Sequence[Fired]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x as integers and scales, as it will be read, and a direction [K] whose product with each token is about 1."""
    x_int, x_scale = min(
        (_round(x.float(), dim) for dim in (0, 1)), key=lambda rounded: _count_changed(rounded, projections)
    )
    tokens = _read_back(x_int, x_scale)
    one = _solve(tokens.double(), torch.ones(len(tokens), dtype=torch.float64, device=x.device)).float()
    return x_int, x_scale, tokens, one


def _round(values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Integers up to 127 as floats, and their scales along ``dim``."""
    largest = values.abs().amax(dim, keepdim=True) if values.numel() else values.new_ones(values.shape[0], 1)
    scale = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    return (values / scale).round().clamp(-127, 127), scale


def _count_changed(rounded: tuple[Tensor, Tensor], projections: Sequence[Fired]) -> int:
    """Count the gates that change if x is rounded and the weights are the model's."""
    x = _read_back(*rounded)
    return sum(
        int((pattern != fired[rows]).sum())
        for linear, tokens, fired in projections
        for rows, pattern in _patterns(x[tokens].to(linear.weight.dtype), linear)
    )


def _read_back(integers: Tensor, scale: Tensor) -> Tensor:
    """The values that ``load_real`` returns by default, as float32."""
    return (integers * scale).bfloat16().float()


def _solve(rows: Tensor, weights: Tensor) -> Tensor:
    """The direction [K] whose product with ``rows`` [tokens, K] is nearest to 1, by least weighted squares."""
    weighted = rows * weights[:, None]
    normal = weighted.T @ rows
    ridge = _RIDGE * normal.diagonal().mean().clamp_min(torch.finfo(normal.dtype).tiny)
    normal.diagonal().add_(ridge)
    direction: Tensor = torch.linalg.solve(normal, weighted.sum(0))
    return direction


def _quiet_direction(x: Tensor) -> Tensor | None:
    """A direction [K] whose product with every token of x is about 1 and keeps drawn rows silent; None without one."""
    length = x.norm(dim=1)
    # a token of zeros silences every neuron
    unit = (x * (length.mean() / length)[:, None])[length > 0].double()
    if not len(unit):
        return None
    weights = torch.ones(len(unit), dtype=torch.float64, device=x.device)
    for _ in range(_QUIET_ROUNDS):
        direction = _solve(unit, weights)
        products = unit @ direction
        if products.min() >= _QUIET_GOOD:
            break
        weights = torch.where(products < _QUIET_GOOD, 4 * weights, weights)
    least = float(products.min())
    return None if least < _QUIET_POOR else (direction * max(1.0, _QUIET_LEAST / least)).float()


def _fit_rows(x: Tensor, weight: Tensor, fired: Tensor, one: Tensor) -> tuple[Tensor, Tensor]:
    """Round ``weight`` [neurons, K] to integers and scales so that each row fires for about its number of tokens."""
    w_int, w_scale = _round(weight, 1)
    for start in range(0, len(weight), _SORTED):
        rows = slice(start, start + _SORTED)
        wanted = fired[:, rows]
        counts = wanted.sum(0)
        products = x @ _read_back(w_int[rows], w_scale[rows]).T
        off, changed = _differences(products, wanted)
        # the threshold goes between the products of the last token that should fire and of the next
        order = products.sort(dim=0, descending=True).values
        last = order.gather(0, (counts - 1).clamp_min(0)[None])
        following = order.gather(0, counts.clamp_max(len(x) - 1)[None])
        shift = torch.where(off > 0, -(last + following)[0] / 2, 0)
        again, scale = _round(weight[rows] + shift[:, None] * one, 1)
        off_again, changed_again = _differences(x @ _read_back(again, scale).T, wanted)
        better = (off_again < off) | ((off_again == off) & (changed_again < changed))
        w_int[rows] = torch.where(better[:, None], again, w_int[rows])
        w_scale[rows] = torch.where(better[:, None], scale, w_scale[rows])
    return w_int, w_scale


def _differences(products: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """By neuron: the error in the number of tokens that fire, and the number of tokens that differ."""
    fires = products > 0
    return (fires.sum(0) - wanted.sum(0)).abs(), (fires != wanted).sum(0)


@torch.no_grad()
def check(path: Path, recording: Recording, layer: WatchedLayer) -> Agreement:
    """Read a file back as ``load_real`` does, in bfloat16, and compare its pattern with the model's.

    Raises ValueError if the difference exceeds a limit, or if a neuron fires that is silent in the model.
    """
    fired, where = recording.fired, recording.fired.device
    problem = testing.load_real(layer.number, path.parent, len(fired), device=where)
    gate = torch.nn.Linear(problem.w_gate.shape[1], recording.n, bias=False, device="meta")
    # exact products of bfloat16: the counts must not depend on the device
    gate.weight = torch.nn.Parameter(problem.w_gate.float())
    silent = torch.ones(recording.n, dtype=torch.bool, device=where)
    silent[recording.alive.long()] = False
    lost = added = loud = 0
    for rows, pattern in _patterns(problem.x.float(), gate):
        lost += int((fired[rows] & ~pattern).sum())
        added += int((pattern & ~fired[rows]).sum())
        loud += int((pattern & silent).any(0).sum())
    nonzeros = int(fired.sum())
    agreement = Agreement(
        number=layer.number,
        tokens=len(fired),
        before=nonzeros / len(fired),
        after=(nonzeros - lost + added) / len(fired),
        lost=lost / max(nonzeros, 1),
        added=added / max(nonzeros, 1),
        stored=len(recording.alive),
        size=path.stat().st_size,
    )
    complaint = f"{loud} neurons fire that should be silent" if loud else agreement.problem
    if complaint:
        bias = (
            ""
            if layer.linear is None or layer.linear.bias is None
            else "; its bias is part of the weight, as the file has none"
        )
        raise ValueError(f"{layer.name}: int8 does not keep its pattern: {complaint}{bias}")
    return agreement


def _readme(loaded: saved_model.Loaded, text: saved_model.Text, agreements: Sequence[Agreement]) -> str:
    """The README.md of the folder."""
    lines = [
        [
            *(f"{a.what} {a.number}", f"{a.before:.2f}", f"{a.after:.2f}", f"{1 - a.lost:.2%}", f"{a.added:.2%}"),
            *(f"{a.stored:,}", f"{a.size / 1e6:.1f}"),
        ]
        for a in agreements
    ]
    header = ["file", "in the model", "in the file", "kept", "added", "rows", "MB"]
    workloads = " ".join(f"real:FOLDER/{a.number}" for a in agreements if a.what == "layer")
    return f"""\
# Recorded activations

Inputs and weights of layers of `{loaded.folder.absolute().name}`, run on {text.tokens:,} tokens of text in
{len(text.sequences):,} sequences. Written by `python -m profiling.record` of twell {twell.__version__}.

`twell.testing.load_real(L, FOLDER)` reads `layer{{L}}.npz` and says what it holds; `python -m profiling.bench ffn
--workload {workloads or "real:FOLDER"}` times such layers.
`twell.sparse_experts(**twell.testing.load_experts(L, FOLDER))` runs `experts{{L}}.npz`.
`twell analyze` prints the pattern of the model.

Changes by int8: mean non-zeros of a token, or of a token and one of its experts, and shares of the model's non-zeros.

{markdown(header, "l" + "r" * (len(header) - 1), lines)}
"""


# Layers of experts


@torch.no_grad()
def write_experts(
    path: Path, layer: WatchedExperts, x: Tensor, first: Tensor, ids: Tensor, weights: Tensor
) -> Agreement:
    """Write a layer of experts, its input x [T, K] and routes [T, k], as ``load_experts`` documents; then check it.

    Rows of the projection before the activation are rounded as by ``quantize``. Raises ValueError as ``check``.
    """
    import numpy as np

    projections = []
    for expert, tokens in experts.of_experts(ids, len(layer.linears)):
        linear = layer.linears[expert]
        parts = [pattern for _, pattern in _patterns(x[tokens], linear)]
        projections.append((expert, (linear, tokens, torch.cat(parts))))
    x_int, x_scale, read, one = _round_input(x, [each for _, each in projections])
    fitted = {
        expert: _fit_rows(read[tokens], linear.weight.float(), fired, one)
        for expert, (linear, tokens, fired) in projections
    }
    gates = [fitted.get(i) or _round(linear.weight.float(), 1) for i, linear in enumerate(layer.linears)]
    module: Any = layer.module
    _, w_up = stacked.projections(module)
    rounded = {"w_gate" if layer.gated else "w_up": gates}
    if layer.gated:
        rounded["w_up"] = [_round(weight.float(), 1) for weight in w_up]
    rounded["w_down"] = [_round(weight.float().t(), 1) for weight in module.down_proj]
    arrays = {"x": x_int.to(torch.int8), "x_scale": x_scale, "expert_ids": ids.int(), "weights": weights.float()}
    arrays["first"] = first
    for name, pairs in rounded.items():
        arrays[name] = torch.stack([integers.to(torch.int8) for integers, _ in pairs])
        arrays[f"{name}_scale"] = torch.stack([scale for _, scale in pairs])
    kept: dict[str, Any] = {name: array.cpu().numpy() for name, array in arrays.items()}
    np.savez_compressed(path, activation=np.array(layer.activation.name), **kept)
    stored = testing.load_experts(layer.number, path.parent, device=x.device)
    lost = added = before = pairs_of_all = 0
    for expert, (_, tokens, fired) in projections:
        again = linear_of(stored["w_gate" if layer.gated else "w_up"][expert].float())
        for rows, pattern in _patterns(stored["x"][tokens].float(), again):
            lost += int((fired[rows] & ~pattern).sum())
            added += int((pattern & ~fired[rows]).sum())
        before, pairs_of_all = before + int(fired.sum()), pairs_of_all + len(tokens)
    agreement = Agreement(
        number=layer.number,
        tokens=pairs_of_all,
        before=before / pairs_of_all,
        after=(before - lost + added) / pairs_of_all,
        lost=lost / max(before, 1),
        added=added / max(before, 1),
        stored=len(layer.linears) * layer.linears[0].out_features,
        size=path.stat().st_size,
        what="experts",
    )
    if agreement.problem:
        raise ValueError(f"{layer.name}: int8 does not keep its pattern: {agreement.problem}")
    return agreement


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    saved_model.add_arguments(parser, tokens=4096)
    add = parser.add_argument
    add("--layers", type=at_least(0), nargs="+", required=True, metavar="L", help="numbers of the layers")
    add("--out", type=Path, required=True, metavar="FOLDER", help="a new folder, or an empty one")


def _check_out(out: Path) -> None:
    _files.require_apart(out)
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
    """Run the command and print; the folder appears once all files are checked.

    Raises RequestError if the request cannot be met or int8 does not keep a layer's pattern.
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
    agreements = []
    with _files.replacing(out) as folder:
        folder.mkdir()
        for number in filter(known.__contains__, numbers):
            layer = layers[known[number]]
            path = folder / f"layer{number}.npz"
            recording = quantize(torch.cat(inputs[known[number]]).to(next(layer.module.parameters()).device), layer)
            recording.save(path)
            agreements.append(check(path, recording, layer))
            print(agreements[-1], flush=True)
        for number in filter(known_experts.__contains__, numbers):
            at = routed[known_experts[number]]
            where = at.linears[0].weight.device
            x, ids, weights = (torch.cat(parts).to(where) for parts in zip(*routes[known_experts[number]]))
            agreements.append(write_experts(folder / f"experts{number}.npz", at, x, torch.cat(starts), ids, weights))
            print(agreements[-1], flush=True)
        (folder / "README.md").write_text(_readme(loaded, text, agreements), encoding="utf-8")
    size = sum(agreement.size for agreement in agreements)
    print(f"{size / 1e6:.1f} MB in {out.absolute()}; README.md there has the statistics")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.record", description=DESCRIPTION)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    return exit_status("profiling.record", lambda: run(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
