"""``twell.analyze`` and its record: figures of layers, predicted calls, a verdict."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from twell.base.arguments import require, require_integer
from twell.base.text import aligned, as_percent, counted, listed
from twell.choose import cards, rates
from twell.choose.cards import Card
from twell.choose.plan import Route
from twell.integrations import sparsify
from twell.integrations.analyze import experts, layers
from twell.integrations.analyze.calls import MOST_SHARE, PAYS, Call, Prediction, Shape, apart, most_nonzeros, predict
from twell.integrations.analyze.experts import ExpertsSparsity, ExpertsTally
from twell.integrations.analyze.figures import LayerSparsity, Tally, labels
from twell.runtime.log import logger

DECODE, PREFILL, TRAINING = (1, 64), (16384,), (16384,)
# Figures of fewer tokens are said to be uncertain.
FEW_TOKENS = 2048
# An eager call of up to so many tokens may take as long as the host's work for it (`host.json`).
HOST_BOUND = 2048
# Layers are far from what was measured beyond the first factor, and there is no verdict beyond the second.
FAR, TOO_FAR = 4.0, 8.0


def calls_of(
    prefill: Iterable[int] = PREFILL,
    decode: Iterable[int] = DECODE,
    training: Iterable[int] = TRAINING,
    served: bool = False,
) -> list[Call]:
    """Calls on so many tokens, or of so many sequences that decode."""
    kinds = (("decoding", decode), ("prefill", prefill), ("training", training))
    return [Call(kind, tokens, served) for kind, sizes in kinds for tokens in dict.fromkeys(sizes)]


@dataclass(frozen=True)
class Analysis:
    """The sparsity of a model's layers, and predictions of calls; ``str`` of it is a report with a verdict.

    layers, experts: figures of layers, and of layers of stacked experts. calls: what is predicted. predictions: of each
    layer one for each call. card: the rates behind them. title: lines about the model and its figures. ranks: of tensor
    parallelism, which divide the neurons.
    """

    layers: list[LayerSparsity]
    experts: list[ExpertsSparsity]
    calls: list[Call]
    predictions: list[list[Prediction]]
    card: Card
    title: tuple[str, ...] = ()
    ranks: int = 1

    @property
    def ratios(self) -> dict[Call, float | None]:
        """The time of all layers over that of dense ones, by call; None if it is not known."""
        times = {call: _totals(of) for call, of in zip(self.calls, zip(*self.predictions))}
        return {call: None if taken is None else taken / dense for call, (dense, taken) in times.items()}

    def __str__(self) -> str:
        lines = list(self.title)
        if self.layers:
            lines += ["", *self._figures(), "", *self._times()]
        if self.experts:
            lines += ["", *experts.tables(self.experts, self.card)]
        return "\n".join([*lines, "", self.verdict])

    def _figures(self) -> Iterator[str]:
        rows = [
            {
                "layer": label,
                "non-zeros": f"{each.mean:,.1f}",
                "share": as_percent(each.mean / each.n),
                "union": as_percent(each.union),
                "mixed": as_percent(each.mixed),
                "max": "-" if each.most is None else f"{each.most:,}",
                "dead": as_percent(None if each.dead is None else each.dead / each.n),
                "candidates": as_percent(each.candidates),
            }
            for label, each in zip(labels(self.layers), self.layers)
        ]
        names = [name for name in rows[0] if any(row[name] != "-" for row in rows)]
        yield from aligned([names, *([row[name] for name in names] for row in rows)])
        if {"union", "mixed"} & {*names}:
            yield "union, mixed: neurons that 128 tokens fire, which follow each other, or come from many places"
        if 0 < (counted := min(each.tokens for each in self.layers)) < FEW_TOKENS:
            yield f"Only {counted:,} tokens were counted: figures of more may differ"

    def _times(self) -> Iterator[str]:
        lines = [["call", "dense us", "route", "us", "ratio"]]
        stay: dict[str, list[str]] = {}
        for call, of in zip(self.calls, zip(*self.predictions)):
            dense, taken = _totals(of)
            routes = [each.route for each in of]
            named = [f"{routes.count(route)} {route}" for route in dict.fromkeys(routes)]
            shown = ", ".join(named) if len(named) > 1 else routes[0]
            times = ["-", "-"] if taken is None else [f"{taken * 1e6:,.1f}", f"{taken / dense:.2f}"]
            lines.append([str(call), f"{dense * 1e6:,.1f}", shown, *times])
            whys = (each.reason for each in of if each.route == "dense" and not each.reason.endswith("of dense's time"))
            if reason := next(whys, ""):
                # those of other layers have other numbers in it
                stay.setdefault(reason, []).append(f"{call} ({routes.count('dense')} of {len(of)} layers)")
        yield from aligned(lines)
        known = f"{self.card.gpu} of {self.card.date[:10]}"
        yield f"All FFNs in CUDA graphs, by rates of {known}, with down weights by rows in inference."
        yield f"Eager calls of up to {HOST_BOUND:,} tokens may wait for the host. The rest of the model is not counted."
        yield from (f"dense in {listed(calls, 'and')}: {reason}" for reason, calls in stay.items())

    @property
    def verdict(self) -> str:
        """Whether twell pays, on which GPU and for which calls; the last line of the report."""
        parts = []
        if self.layers:
            shares = [each.mean / each.n for each in self.layers]
            source = f"{as_percent(sum(shares) / len(shares))} of the neurons fire"
            parts.append(_said("FFNs", self.card.gpu, self.ratios, apart(self.layers, self.ranks), source))
        if self.experts:
            known = experts.speeds(self.experts, self.card)
            ratios = {Call("decoding", size): taken / dense for size, (_, taken, dense) in known.items()}
            measured = rates.MEASURED["experts"]
            far = max(measured.apart(each.k, each.n, 1 - each.zeros) for each in self.experts)
            zeros = sum(each.zeros for each in self.experts) / len(self.experts)
            source = f"{as_percent(1 - zeros)} of their neurons fire"
            parts.append(_said("experts", measured.gpu or self.card.gpu, ratios, far, source))
        return "\n".join(f"Verdict: {part}" for part in parts)

    def as_json(self) -> dict[str, Any]:
        """All of it as numbers and words: figures of each layer, and a row for each layer and call."""
        return {
            "title": list(self.title),
            "machine": self.card.machine,
            "ranks": self.ranks,
            "layers": [dataclasses.asdict(each) | {"activation": each.form} for each in self.layers],
            "rows": [each.as_json() for row in self.predictions for each in row],
            "experts": [each.as_json(self.card) for each in self.experts],
            "verdict": self.verdict,
        }


def _totals(predictions: Sequence[Prediction]) -> tuple[float, float | None]:
    """Seconds of all layers in a call by dense, and by the routes that they would take, None if one is not known."""
    known = [each.seconds[each.route] for each in predictions if each.route in each.seconds]
    return sum(each.seconds["dense"] for each in predictions), sum(known) if len(known) == len(predictions) else None


def _too_far(far: float) -> str:
    return (
        "too far from what was measured: the hidden size, the number of weights or the share of neurons that fire is "
        f"{far:.0f} times outside of its range"
    )


def _said(what: str, gpu: str, ratios: Mapping[Call, float | None], far: float, source: str) -> str:
    """A verdict, from the times over dense's, and from how far layers are from what was measured."""
    if far > TOO_FAR:
        return f"none: {what} are {_too_far(far)}"
    pays = [f"{call} ({of:.2f})" for call, of in ratios.items() if of is not None and of * PAYS <= 1]
    others = [str(call) for call, of in ratios.items() if of is not None and of * PAYS > 1]
    unknown = [str(call) for call, of in ratios.items() if of is None]
    said = f"twell pays on {gpu} for {what} in {listed(pays, 'and')} of dense's time" if pays else ""
    said = said or f"twell does not pay on {gpu} for {what} in {listed(others or ['any call'], 'or')}"
    said += f", not in {listed(others, 'or')}" if pays and others else ""
    said += f"; not known: {', '.join(unknown)}" if unknown else ""
    doubt = f"far from what was measured ({far:.0f} times beyond), " if far > FAR else ""
    return f"{doubt}{said}; predicted for CUDA graphs, where {source}"


def analyze(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    names: sparsify.Names | None = None,
    prefill: Iterable[int] = PREFILL,
    decode: Iterable[int] = DECODE,
    training: Iterable[int] = TRAINING,
) -> Analysis:
    """Run ``model`` on ``batches``, count the neurons that its feed-forward layers fire, and predict what twell saves.

    ``print`` the result for tables and a verdict. The model stays as it is. It may have layers of twell; else those
    that ``sparsify_(model, names=names)`` would replace are counted, and stacked experts of transformers.

    Args:
        model: any module on any device; it is called as it is, in evaluation mode and without gradients.
        batches: of what it is called with: tensors, tuples of arguments, or dicts of named ones. Tokens of padding by
            an ``attention_mask`` [sequences, tokens] among them, or a ``decoder_attention_mask``, are left out.
        names: of projections, as in ``sparsify_``; then classes that are not known count, beside layers of twell.
        prefill, training: tokens of calls and of training steps to predict, which follow each other in a text.
        decode: numbers of sequences that decode a token each.

    Times are of CUDA graphs on the GPU model of the first parameter, or on an H200 by rates that ship; e4m3 layers have
    none of training. Raises ValueError or TypeError as ``sparsify_`` if there are no layers, and ValueError if a layer
    gets only a part of a batch or tokens that are not finite, or none gets any; those without tokens are left out.
    """
    require("model", model, nn.Module, "an nn.Module")
    if isinstance(batches, (torch.Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise TypeError(f"batches must be a list or another iterable of batches, got {type(batches).__name__}")
    card = cards.to_predict(next((p.device for p in model.parameters()), torch.device("cpu")))
    for name, sizes in (("prefill", prefill), ("decode", decode), ("training", training)):
        if isinstance(sizes, str) or not isinstance(sizes, Iterable):
            raise TypeError(f"{name} must be a list of positive integers, got {sizes!r}")
    calls = calls_of(prefill, decode, training)
    for call in calls:
        require_integer(f"each number of {call.kind}", call.tokens, 1)
    found, of_experts = count(model, batches, *layers.found(model, names))
    title = [f"{type(model).__name__}: {line}" for line in kinds(found)]
    if next((p.dtype for p in model.parameters()), None) is torch.float32:
        title.append("Times are of 16 bits: the kernels take no torch.float32")
    return predicted(found, of_experts, calls, card, tuple(title))


def count(
    model: nn.Module,
    batches: Iterable[Any],
    watched: Sequence[layers.WatchedLayer],
    routed: Sequence[layers.WatchedExperts] = (),
    run: Callable[..., object] | None = None,
    whole: bool = False,
) -> tuple[list[LayerSparsity], list[ExpertsSparsity]]:
    """Count the layers and experts of ``model`` on batches, as ``layers.observe``.

    Layers without tokens are left out with a warning; ValueError if ``whole``, or if there are no others.
    """
    # parts of a model may be on different devices
    tallies = [Tally(at.n, next(at.module.parameters()).device) for at in watched]
    of_experts = [ExpertsTally(at) for at in routed]

    def on_call(i: int, x: torch.Tensor, y: torch.Tensor, *others: torch.Tensor) -> None:
        if i < len(watched):
            tallies[i].watch(watched[i], x, y)
        else:
            of_experts[i - len(watched)].watch(x, *others)

    layers.observe(model, [*watched, *routed], batches, on_call, run)
    made = [tally.report(at) for tally, at in zip(tallies, watched, strict=True)]
    routes = [tally.report() for tally in of_experts]
    silent = [at.name for at, each in zip([*watched, *routed], [*made, *routes], strict=True) if each is None]
    if silent and (whole or len(silent) == len(watched) + len(routed)):
        raise ValueError(f"analyze: {silent[0] or 'the model'} must be called with tokens, got none")
    if silent:
        logger.warning("analyze: %s got no tokens, the first %s: left out", counted(len(silent), "layer"), silent[0])
    return [each for each in made if each is not None], [each for each in routes if each is not None]


def predicted(
    found: Sequence[LayerSparsity],
    of_experts: Sequence[ExpertsSparsity],
    calls: Sequence[Call],
    card: Card,
    title: tuple[str, ...] = (),
    ranks: int = 1,
    requested: Route | None = None,
) -> Analysis:
    """The analysis of figures, with the predictions of calls."""
    if any(each.float8 for each in found):
        calls = [call for call in calls if call.kind != "training"]
    predictions = [[predict(each, call, card, ranks, requested) for call in calls] for each in found]
    return Analysis(list(found), list(of_experts), list(calls), predictions, card, title, ranks)


def kinds(found: Sequence[LayerSparsity]) -> Iterator[str]:
    """Lines about activations and sizes."""
    by_kind: dict[tuple[str, str], list[str]] = {}
    for label, each in zip(labels(found), found):
        name = f"{each.form} " * bool(each.tokens)
        what = f"{'gated' if each.gated else 'non-gated'} {name}layer"
        sizes = f", K = {each.k:,}, N = {each.n:,}{', e4m3' * each.float8}"
        by_kind.setdefault((what, sizes), []).append(label)
    for (what, sizes), own in by_kind.items():
        yield counted(len(own), what) + sizes + (f" ({', '.join(own)})" if len(by_kind) > 1 else "")


def requirement(was: str, shapes: Sequence[Shape], calls: Sequence[Call], card: Card) -> Iterator[str]:
    """What layers, one or more, with an activation that makes no zeros would need to pay, and a verdict."""

    def upto(most: int, n: int) -> str:
        # nothing beyond a share of the neurons was tried
        return f"{most:,}{' or more' if most * 1.02 + 1 > n * MOST_SHARE else ''}"

    limits = {shape: [most_nonzeros(shape, call, card) for call in calls] for shape in dict.fromkeys(shapes)}
    most_work = max(limits, key=lambda shape: shapes.count(shape) * shape[1] * shape[2] * (2 + shape[0]))
    yield f"{len(shapes)} FFN layers with {was}, which makes no zeros. To gain, the model takes ReLU in its place and"
    yield "training (docs/training.md, arXiv 2310.04564), until its tokens have so many non-zeros at most:"
    lines = [["layer", *map(str, calls)]]
    for (gated, k, n), limit in limits.items():
        cells = [f"{upto(most, n)} ({as_percent(most / n)})" if most else "never" for most in limit]
        lines.append([f"{'gated' if gated else 'non-gated'}, K = {k:,}, N = {n:,}", *cells])
    yield from aligned(lines)
    if (far := rates.MEASURED["16 bits"].apart(*most_work[1:])) > TOO_FAR:
        yield f"Verdict: none: layers are {_too_far(far)}"
        return
    found, n = zip(calls, limits[most_work], strict=True), most_work[2]
    needs = [f"{upto(most, n)} (for {call})" for call, most in found if most]
    what = f"with at most {listed(needs, 'and')} non-zeros per token" if needs else "at no sparsity"
    yield f"Verdict: twell does not pay on {card.gpu} as {was} makes no zeros; it would {what}, in CUDA graphs"
