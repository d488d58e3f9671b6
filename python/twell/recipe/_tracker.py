"""``SparsityTracker``: sparsity of each layer and its dead neurons, without a wait in the step."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twell.base.arguments import require_integer
from twell.nn import compaction
from twell.nn.layers import explain
from twell.recipe import _aux
from twell.runtime.log import warn_once


class LayerStats(NamedTuple):
    """Figures of one layer, over all ranks; None if unknown.

    layer: its qualified name. neurons: N. l0, l1: means over all calls since the last read, per token, as ``Aux``.

    tokens, dead: how many were observed in the last observed step, and the neurons that fired for none of these.

    strategy: of most training calls so far; ``twell.explain`` gives the reasons.
    """

    layer: str
    neurons: int
    l0: float | None
    l1: float | None
    tokens: int
    dead: int | None
    strategy: str


@dataclass(frozen=True)
class SparsityStats:
    """``LayerStats`` of all layers, in the model's order."""

    layers: tuple[LayerStats, ...]

    def summary(self) -> dict[str, float]:
        """Means over the layers: l0, l1, dead (as a share of the neurons), without unknown ones."""
        shares = [None if row.dead is None else row.dead / row.neurons for row in self.layers]
        columns = {"l0": [r.l0 for r in self.layers], "l1": [r.l1 for r in self.layers], "dead": shares}
        known = {name: [v for v in values if v is not None] for name, values in columns.items()}
        return {name: sum(values) / len(values) for name, values in known.items() if values}


class SparsityTracker:
    """Tracks L0, L1 and dead neurons per layer, on all ranks.

    ::

        tracker = recipe.SparsityTracker(model, every=100)
        for step, ids in enumerate(batches):
            with tracker.watch(step):
                logits = model(ids)
            ...  # loss, backward, optimizer
            if step % 10 == 0:
                stats = tracker.read()

    L0 and L1 come from each forward pass in ``watch`` and cost nothing: the kernels count anyway. Dead neurons come
    from observed steps: the first step watched, also of a run that goes on from a checkpoint, and the multiples of
    ``every``. An observed step costs one more product with each layer's gate weight, as ``twell.count_firing`` does. A
    projection that is more than its weight, as an adapter is, is called for that, and its dropout draws another mask.
    Figures are those of the last observed step that has ended; "dead" means silent in all of its tokens. Padding
    counts.

    Only ``read`` waits for the device. Only calls in training mode count, without the recomputation of activation
    checkpointing. Make the tracker after pre-hooks that change the inputs of layers, on original modules, before
    torch.compile or at least before a compiled model's first step: in observed steps a compiled graph runs in a second
    variant that outputs its layers' inputs, and ``watch`` counts them as it ends.

    Args:
        model: with twell layers, wrapped or not.
        every: the distance of observed steps; 0: no step is observed.

    If torch.distributed is initialised all ranks must watch the same steps and read at the same time. Ranks that see
    the same tokens, as in tensor parallelism, each add them to ``tokens``; no other figure changes.
    """

    def __init__(self, model: nn.Module, *, every: int = 100) -> None:
        require_integer("every", every, 0)
        self.model, self.every = model, every
        self._layers = _aux.layers(model)
        for name, layer in self._layers.items():
            if getattr(getattr(layer, "_recorder", None), "tracked", False):
                raise ValueError(f"model has a SparsityTracker already, on {name or 'itself'}: call its close() first")
        self._recorders = {name: _aux.recorder_of(layer) for name, layer in self._layers.items()}
        self._neurons = {name: layer.intermediate for name, layer in self._layers.items()}
        for name, layer in self._layers.items():
            layer.record_aux = self._recorders[name].tracked = True
        self._sums: Tensor | None = None  # float64 [L, 2]: l1 and l0
        self._calls = [0] * len(self._layers)
        self._open: dict[str, Tensor] = {}
        self._step: int | None = None
        self._ended: int | None = None
        self._observing = False
        self._called = False  # a layer has been called in a watch
        self._watched = False  # a watch of the open step has ended
        self._fresh = True  # nothing has been observed yet
        self._closed: Tensor | None = None
        self._reduced = False  # whether ``_closed`` is of all ranks
        self._dead: dict[str, Tensor] | None = None

    def close(self) -> None:
        """Remove the hooks from the model. Layers with ``record_aux`` still record L1."""
        for name, layer in self._layers.items():
            recorder = self._recorders[name]
            recorder.tracked = recorder.observing = False
            recorder.observe = None
            recorder.figures.clear()
            recorder.inputs.clear()
            if not recorder.term:
                layer.record_aux, layer.aux = False, None
            _aux.release(layer)

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Track the model inside the ``with``: the forward pass of one micro-batch of ``step``. Backward is outside."""
        self.begin(step)
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        self.end()

    def begin(self, step: int) -> None:
        """Begin to watch, for code that cannot use ``with``; ``end`` or ``abandon`` must follow."""
        require_integer("step", step, 0)
        if step != self._step:
            if self._step is None and step == self._ended:
                warn_once(
                    "SparsityTracker: read() or dead() between two micro-batches of a step ends it: what follows "
                    "counts as another step; call them after the last micro-batch of a step"
                )
            self._close_step()
            self._step = step
            self._observing = self.every > 0 and (self._fresh or step % self.every == 0)
        for name, recorder in self._recorders.items():
            recorder.inputs.clear()
            # left by compiled layers in a checkpoint that backward ran again
            recorder.figures.clear()
            recorder.called = False
            recorder.observing = self._observing
            if self._observing:
                recorder.observe = functools.partial(self._observe, name)

    def abandon(self) -> None:
        """End ``begin`` without counting the calls that are left to count, nor what was observed of its step."""
        if not self._watched:
            self._open.clear()
        for recorder in self._recorders.values():
            recorder.observe = None
            recorder.inputs.clear()
            recorder.figures.clear()

    def end(self) -> None:
        """End ``begin`` and count its calls."""
        for recorder in self._recorders.values():
            observe, recorder.observe = recorder.observe, None
            for x in recorder.inputs:
                assert observe is not None
                observe(x)
            recorder.inputs.clear()
        # a pass may skip all layers, and a rank may have no token for them
        self._called |= any(recorder.called for recorder in self._recorders.values())
        self._watched = True
        if not self._called or not any(layer.training for layer in self._layers.values()):
            raise RuntimeError(
                "SparsityTracker: no layer was called in training mode in watch, or a model that was compiled before "
                "skipped the tracker's hooks (torch.compiler.reset() helps)"
            )
        device, totals = self._device(), list[Tensor]()
        for i, recorder in enumerate(self._recorders.values()):
            figures = [tuple(map(_aux.whole, aux)) for aux in recorder.figures]
            recorder.figures.clear()
            self._calls[i] += len(figures)
            columns = zip(*figures) if figures else ((torch.zeros((), device=device),),) * 2
            totals += [sum(c[1:], c[0]).to(device, torch.float64, non_blocking=True) for c in columns]
        with torch.inference_mode(False):
            added = torch.stack(totals).view(-1, 2)
            if self._sums is None:
                self._sums = torch.zeros_like(added)
            self._sums += added

    def read(self) -> SparsityStats:
        """Return the figures of all ranks and reset L0 and L1. Every rank must call it: it takes part in an all-reduce.

        Waits for the device.
        """
        self._close_step()
        sums = torch.zeros(len(self._calls), 2, dtype=torch.float64, device=self._device())
        if self._sums is not None:
            sums.copy_(self._sums)
        parts = [sums.flatten(), torch.tensor(self._calls, dtype=torch.float64, device=sums.device)]
        if self._closed is not None and not self._reduced:
            parts.append(self._closed.double())
        packed = self._all_reduce(torch.cat(parts))
        self._sums, self._calls = None, [0] * len(self._calls)
        if len(parts) == 3:
            self._closed, self._reduced = packed[len(sums) * 3 :].long(), True
        values = packed[: len(sums) * 3].tolist()
        means, calls = values[: len(sums) * 2], values[len(sums) * 2 :]
        counts = self._counts(None if self._closed is None else self._closed.cpu())
        rows = []
        for i, name in enumerate(self._neurons):
            l1, l0 = (means[2 * i + j] / calls[i] if calls[i] else None for j in (0, 1))
            rows.append(self._row(name, l0, l1, counts[name]))
        return SparsityStats(tuple(rows))

    def dead(self) -> dict[str, Tensor]:
        """bool [N] for each layer, on its device: the neurons silent in the last observed step; none without one.

        Every rank must call it; it does not wait. The first call after an observed step takes part in an all-reduce;
        others cost nothing and return the same tensors.
        """
        self._close_step()
        if self._closed is not None and not self._reduced:
            self._closed, self._reduced = self._all_reduce(self._closed), True
        if self._dead is not None:
            return dict(self._dead)
        masks = {}
        for name, counts in self._counts(self._closed).items():
            weight = compaction.gate_of(self._layers[name]).weight
            if counts is None:
                masks[name] = torch.zeros(self._neurons[name], dtype=torch.bool, device=weight.device)
            else:
                firings, tokens = counts
                masks[name] = ((firings == 0) & (tokens > 0)).to(weight.device, non_blocking=True)
        self._dead = masks
        return dict(masks)

    def _device(self) -> torch.device:
        return next(iter(self._layers.values())).down_proj.weight.device

    def _close_step(self) -> None:
        """Close the open step."""
        # not only where a layer was called: all ranks must have observed the same steps
        if self._step is not None and self._observing and self._watched:
            device = self._device()
            flats = [
                self._open[name].to(device)
                if name in self._open
                else torch.zeros(neurons + 1, dtype=torch.int64, device=device)
                for name, neurons in self._neurons.items()
            ]
            self._closed, self._reduced, self._dead, self._fresh = torch.cat(flats), False, None, False
            self._open.clear()
        if self._step is not None:
            self._ended = self._step
        self._step, self._watched = None, False

    def _all_reduce(self, packed: Tensor) -> Tensor:
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(packed)
        return packed

    def _counts(self, closed: Tensor | None) -> dict[str, tuple[Tensor, ...] | None]:
        if closed is None:
            return dict.fromkeys(self._neurons)
        parts = torch.split(closed, [size for neurons in self._neurons.values() for size in (neurons, 1)])
        return dict(zip(self._neurons, zip(parts[::2], parts[1::2])))

    def _row(self, name: str, l0: float | None, l1: float | None, counts: tuple[Tensor, ...] | None) -> LayerStats:
        neurons, strategy = self._neurons[name], strategy_of(self._layers[name])
        if counts is None:
            return LayerStats(name, neurons, l0, l1, 0, None, strategy)
        firings, tokens = counts
        dead = int((firings == 0).sum()) if tokens else None
        return LayerStats(name, neurons, l0, l1, int(tokens), dead, strategy)

    def _observe(self, name: str, x: Tensor) -> None:
        """Count one call of a layer on x [..., K]."""
        layer, neurons = self._layers[name], self._neurons[name]
        if layer.intermediate != neurons:
            raise ValueError(
                f"a tracked layer must keep its {neurons} neurons, got {layer.intermediate}: make a new tracker"
            )
        # the counts outlive an inference mode in which x may have been made
        with torch.inference_mode(False), torch.no_grad():
            x = _aux.whole(x)
            if name not in self._open:
                self._open[name] = torch.zeros(neurons + 1, dtype=torch.int64, device=x.device)
            compaction.count_call(layer, x, self._open[name])


def strategy_of(layer: Any, kind: str = "training") -> str:
    """The strategy of most such calls of a layer so far, or of others; "auto" before any. Does not wait."""
    rows = explain(layer).rows
    own = [row for row in rows if row.kind == kind] or list(rows)
    # a graph does not count its calls, and a compiled model runs little else
    return max(own, key=lambda row: (bool(row.graph), row.calls)).strategy
