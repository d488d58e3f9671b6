"""Record inputs and gate weights of a model's feed-forward layers as files for ``testing.load_real``.

python -m profiling.record MODEL --text FOLDER --layers 3 6 --out RECORDED
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import twell
from twell import _files, testing, tuning
from twell.commands import saved_model, sparsity
from twell.commands.request import RequestError, at_least, exit_status
from twell.commands.saved_model import WatchedLayer
from twell.commands.sparsity import LayerSparsity, Tally

DESCRIPTION = """\
Run a model on text and write the inputs of the chosen feed-forward layers and their gate weights as int8: workloads
with the pattern of a real model, for `python -m profiling.bench --workload real:FOLDER` and twell.testing.load_real.
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
    as shares of the model's. stored: neurons with a gate row in the file. size: bytes.
    """

    number: int
    tokens: int
    before: float
    after: float
    lost: float
    added: float
    stored: int
    size: int

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
            f"layer {self.number}: {self.before:.2f} non-zeros per token in the model, {self.after:.2f} in the file; "
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
    fired = torch.cat([pattern for _, pattern in sparsity.patterns(x, layer.linear)])
    weight, bias = layer.linear.weight.float(), layer.linear.bias
    x_int, x_scale = min(
        (_round(x.float(), dim) for dim in (0, 1)), key=lambda rounded: _count_changed(rounded, layer, fired)
    )
    tokens = _read_back(x_int, x_scale)
    one = _solve(tokens.double(), torch.ones(len(tokens), dtype=torch.float64, device=x.device)).float()
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


def _round(values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Integers up to 127 as floats, and their scales along ``dim``."""
    largest = values.abs().amax(dim, keepdim=True) if values.numel() else values.new_ones(values.shape[0], 1)
    scale = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    return (values / scale).round().clamp(-127, 127), scale


def _count_changed(rounded: tuple[Tensor, Tensor], layer: WatchedLayer, fired: Tensor) -> int:
    """Count the gates that change if x is rounded and the weight is the model's."""
    x = _read_back(*rounded).to(layer.linear.weight.dtype)
    return sum(int((pattern != fired[rows]).sum()) for rows, pattern in sparsity.patterns(x, layer.linear))


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
def check(path: Path, recording: Recording, first: Tensor, layer: WatchedLayer) -> tuple[Agreement, LayerSparsity]:
    """Read a file back as ``load_real`` does, in bfloat16; compare its pattern with the model's and report it.

    ``first``, bool [tokens], marks first tokens of sequences. Raises ValueError if the difference exceeds a limit, or
    if a neuron fires that is silent in the model.
    """
    fired, where = recording.fired, recording.fired.device
    problem = testing.load_real(layer.number, path.parent, len(fired), device=where)
    gate = torch.nn.Linear(problem.w_gate.shape[1], recording.n, bias=False, device="meta")
    # exact products of bfloat16: the counts must not depend on the device
    gate.weight = torch.nn.Parameter(problem.w_gate.float())
    tally = Tally(recording.n, layer.compression, where)
    silent = torch.ones(recording.n, dtype=torch.bool, device=where)
    silent[recording.alive.long()] = False
    lost = added = loud = 0
    for rows, pattern in sparsity.patterns(problem.x.float(), gate):
        tally.add(pattern, first[rows])
        lost += int((fired[rows] & ~pattern).sum())
        added += int((pattern & ~fired[rows]).sum())
        loud += int((pattern & silent).any(0).sum())
    report = tally.report(layer)
    nonzeros = int(fired.sum())
    agreement = Agreement(
        number=layer.number,
        tokens=len(fired),
        before=nonzeros / len(fired),
        after=report.mean,
        lost=lost / max(nonzeros, 1),
        added=added / max(nonzeros, 1),
        stored=len(recording.alive),
        size=path.stat().st_size,
    )
    complaint = f"{loud} neurons fire that should be silent" if loud else agreement.problem
    if complaint:
        bias = "" if layer.linear.bias is None else "; its bias is part of the weight, as the file has none"
        raise ValueError(f"{layer.name}: int8 does not keep its pattern: {complaint}{bias}")
    return agreement, report


def _readme(
    loaded: saved_model.Loaded,
    text: saved_model.Text,
    results: Sequence[tuple[Agreement, LayerSparsity]],
    reports: Sequence[LayerSparsity],
) -> str:
    """The README.md of the folder."""
    dtype = tuning.dtype_name(next(loaded.model.parameters()).dtype)
    header = sparsity.figures_header(reports[0].compression)
    k, n = (", ".join(sorted({f"{getattr(r, size):,}" for r in reports})) for size in ("k", "n"))
    kinds = " and ".join(sorted({"gated" if r.gated else "non-gated" for r in reports}))
    weights = "gate weights"
    if not all(r.gated for r in reports):
        weights += ", or the weights of the up projections that ReLU follows"
    agreements = [
        [
            *(str(a.number), f"{a.before:.2f}", f"{a.after:.2f}", f"{1 - a.lost:.2%}", f"{a.added:.2%}"),
            *(f"{a.stored:,}", f"{a.size / 1e6:.1f}"),
        ]
        for a, _ in results
    ]
    workloads = " ".join(f"real:FOLDER/{agreement.number}" for agreement, _ in results)
    return f"""\
# Recorded gate activations

Inputs of {len(results)} of the {len(reports)} ReLU feed-forward layers ({kinds}, K = {k}, N = {n}) of
`{loaded.folder.absolute().name}`, run in {dtype} on {text.tokens:,} tokens of text in
{len(text.sequences):,} sequences, and their {weights}.
Written by `python -m profiling.record` of twell {twell.__version__}.

`layer{{L}}.npz` holds the input `x` (int8 [tokens, K] times `x_scale` [1, K] or [tokens, 1]); the weight's rows `w`
(int8 [rows, K] times `w_scale` [rows, 1]) of the neurons `alive`, those that fire at least once, or all; `quiet` [K],
the direction in which `twell.testing.load_real` shifts the rows that it draws for the others, to keep them silent; and
`n`, the number of neurons. A bias is part of its row. `twell.testing.load_real(L, FOLDER)` loads a file as a problem,
and `python -m profiling.bench ffn --workload {workloads}` times it.

The files, as `load_real` reads them in bfloat16:

{_markdown([header, *(sparsity.figures_cells(report) for _, report in results)])}

Changes by int8: mean non-zeros per token, and shares of the model's non-zeros.

{_markdown([["layer", "in the model", "in the file", "kept", "added", "rows", "MB"], *agreements])}

The model itself, on the same tokens:

{_markdown([header, *map(sparsity.figures_cells, reports)])}

non-zeros, p50, p99 and max are per token; > {sparsity.HEAVY} and > N/{sparsity.HEAVY_SHARE}: share of tokens with
more; tiles: share of tiles (256 neurons of a token) that overflow; dead: share of neurons that never fire; union: share
of neurons that this many consecutive tokens fire; hottest: share of the non-zeros in this many neurons.
"""


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    header, *rest = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *rest))


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
    loaded = saved_model.load(arguments, remedy=saved_model.ACTIVATION_OPTION)
    if any(layer.activation.threshold for layer in saved_model.layers(loaded.model)):
        raise RequestError("MODEL: expected layers that fire above 0, as workloads do, got FATReLU with a threshold")
    layers = saved_model.layers(loaded.model)
    known = {layer.number: i for i, layer in enumerate(layers)}
    numbers = list(dict.fromkeys(arguments.layers))
    unknown = [number for number in numbers if number not in known]
    if unknown:
        expected, got = (", ".join(map(str, these)) for these in (known, unknown))
        raise RequestError(f"--layers: expected some of {expected}, got {got}")
    text = saved_model.read(loaded, arguments, arguments.tokens)
    inputs: dict[int, list[Tensor]] = {known[number]: [] for number in numbers}
    starts: list[Tensor] = []
    tallies = [Tally(layer.linear.out_features, layer.compression, layer.linear.weight.device) for layer in layers]

    def record_input(i: int, x: Tensor, first: Tensor) -> None:
        for rows, pattern in sparsity.patterns(x, layers[i].linear):
            tallies[i].add(pattern, first[rows])
        if i in inputs:
            # a copy: the model may write to its own
            inputs[i].append(x.to("cpu", copy=True))
        if i == 0:
            starts.append(first)

    batches = saved_model.batches(text.sequences, arguments.batch)
    with saved_model.progress(text.tokens, "record") as done:
        saved_model.observe(loaded.model, layers, batches, record_input, done)
    reports = [tally.report(layer) for tally, layer in zip(tallies, layers, strict=True)]
    results = []
    with _files.replacing(out) as folder:
        folder.mkdir()
        for number in numbers:
            layer = layers[known[number]]
            path = folder / f"layer{number}.npz"
            recording = quantize(torch.cat(inputs[known[number]]).to(layer.linear.weight.device), layer)
            recording.save(path)
            agreement, report = check(path, recording, torch.cat(starts), layer)
            print(agreement, flush=True)
            results.append((agreement, report))
        (folder / "README.md").write_text(_readme(loaded, text, results, reports), encoding="utf-8")
    print(f"{sum(a.size for a, _ in results) / 1e6:.1f} MB in {out.absolute()}; README.md there has the statistics")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.record", description=DESCRIPTION)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    return exit_status("profiling.record", lambda: run(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
