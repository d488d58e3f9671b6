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
from twell.call.execution import Aux
from twell.nn import compaction
from twell.nn.models import explain
from twell.recipe import _aux


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

    The example of ``twell.recipe`` has one. L0 and L1 come from each forward pass in ``watch`` and cost nothing: the
    kernels count anyway. Dead neurons, silent in all tokens, come from the last observed step that has ended: the first
    step watched, also of a run that goes on from a checkpoint, and the multiples of ``every`` are observed, which costs
    one more product with each layer's gate weight, as in ``twell.count_firing``. A projection that is more than its
    weight, as an adapter is, is called for that, and its dropout draws another mask. Padding counts.

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
        self._sums: Tensor | None = None  # float64 [L, 3]: l1, l0 and their calls
        self._open: dict[str, Tensor] = {}
        self._step: int | None = None
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
            recorder.forget()
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
            self._close_step()
            self._step = step
            self._observing = self.every > 0 and (self._fresh or step % self.every == 0)
        for name, recorder in self._recorders.items():
            # what compiled layers left in a checkpoint that backward ran again
            recorder.forget()
            recorder.called = False
            recorder.observing = self._observing
            if self._observing:
                recorder.observe = functools.partial(self._observe, name)

    def abandon(self) -> None:
        """End ``begin`` without counting the calls that are left to count, nor what was observed of its step."""
        if not self._watched:
            self._open.clear()
        for recorder in self._recorders.values():
            recorder.forget()

    def end(self) -> None:
        """End ``begin`` and count its calls."""
        for recorder in self._recorders.values():
            for x in recorder.inputs:
                assert recorder.observe is not None
                recorder.observe(x)
        with torch.inference_mode(False):
            added = torch.stack([self._added(recorder.figures) for recorder in self._recorders.values()])
        # a pass may skip all layers, and a rank may have no token for them
        self._called |= any(recorder.called for recorder in self._recorders.values())
        self._watched = True
        for recorder in self._recorders.values():
            recorder.forget()
        if not self._called or not any(layer.training for layer in self._layers.values()):
            other = "a model that was compiled before skipped the tracker's hooks (torch.compiler.reset() helps)"
            raise RuntimeError(f"SparsityTracker: no layer was called in training mode in watch, or {other}")
        with torch.inference_mode(False):
            self._sums = added if self._sums is None else self._sums + added

    def _added(self, figures: list[Aux]) -> Tensor:
        """The sums of the figures of a layer, and how many there are, float64 [3]."""
        total = torch.zeros(3, dtype=torch.float64, device=self._device())
        for aux in figures:
            values = (compaction.whole(value).to(total.device, total.dtype, non_blocking=True) for value in aux)
            total += torch.stack([*values, torch.ones_like(total[0])])
        return total

    def read(self) -> SparsityStats:
        """Return the figures of all ranks and reset L0 and L1. Every rank must call it: it takes part in an all-reduce.

        Waits for the device. Call it after the last micro-batch of a step, as ``dead``: it ends the step.
        """
        self._close_step()
        sums = self._added([]).expand(len(self._layers), 3).contiguous() if self._sums is None else self._sums
        self._sums, values, counts = None, self._all_reduce(sums).tolist(), self._counts("cpu")
        rows = []
        for (name, neurons), (l1, l0, calls) in zip(self._neurons.items(), values):
            tokens = int(counts[name][-1])
            dead = int((counts[name][:-1] == 0).sum()) if tokens else None
            means = (l0 / calls, l1 / calls) if calls else (None, None)
            rows.append(LayerStats(name, neurons, means[0], means[1], tokens, dead, strategy_of(self._layers[name])))
        return SparsityStats(tuple(rows))

    def dead(self) -> dict[str, Tensor]:
        """bool [N] for each layer, on its device: the neurons silent in the last observed step; none without one.

        Every rank must call it; it does not wait. The first call after an observed step takes part in an all-reduce;
        others cost nothing and return the same tensors.
        """
        self._close_step()
        counts = self._counts()
        if self._dead is None:
            self._dead = {}
            for name, of in counts.items():
                device = compaction.gate_of(self._layers[name]).weight.device
                # without tokens nothing is dead
                self._dead[name] = ((of[:-1] == 0) & (of[-1] > 0)).to(device, non_blocking=True)
        return dict(self._dead)

    def _device(self) -> torch.device:
        return next(iter(self._layers.values())).down_proj.weight.device

    def _close_step(self) -> None:
        # not only where a layer was called: all ranks must have observed the same steps
        if self._step is not None and self._observing and self._watched:
            flats = [self._open.get(name, none).to(none.device) for name, none in self._zeros().items()]
            self._closed, self._reduced, self._dead, self._fresh = torch.cat(flats), False, None, False
            self._open.clear()
        self._step, self._watched = None, False

    def _all_reduce(self, packed: Tensor) -> Tensor:
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(packed)
        return packed

    def _zeros(self) -> dict[str, Tensor]:
        device = self._device()
        return {name: torch.zeros(n + 1, dtype=torch.int64, device=device) for name, n in self._neurons.items()}

    def _counts(self, device: str | None = None) -> dict[str, Tensor]:
        """The counts of each layer [N + 1] in the last observed step, over all ranks; moved together to ``device``."""
        if self._closed is None:
            return self._zeros()
        if not self._reduced:
            self._closed, self._reduced = self._all_reduce(self._closed), True
        sizes = [neurons + 1 for neurons in self._neurons.values()]
        return dict(zip(self._neurons, torch.split(self._closed.to(device=device), sizes)))

    def _observe(self, name: str, x: Tensor) -> None:
        layer, neurons = self._layers[name], self._neurons[name]
        if layer.intermediate != neurons:
            got = f"{layer.intermediate}: make a new tracker"
            raise ValueError(f"a tracked layer must keep its {neurons} neurons, got {got}")
        # the counts outlive an inference mode in which x may have been made
        with torch.inference_mode(False), torch.no_grad():
            x = compaction.whole(x)
            if name not in self._open:
                self._open[name] = torch.zeros(neurons + 1, dtype=torch.int64, device=x.device)
            compaction.count_call(layer, x, self._open[name])


def strategy_of(layer: Any, kind: str = "training") -> str:
    """The strategy of most such calls of a layer so far, or of others; "auto" before any. Does not wait."""
    rows = explain(layer).rows
    own = [row for row in rows if row.kind == kind] or list(rows)
    # a graph does not count its calls, and a compiled model runs little else
    return max(own, key=lambda row: (bool(row.graph), row.calls)).strategy
