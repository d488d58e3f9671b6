"""``AutoStrategy``: the strategy of a call site, chosen from figures that earlier calls left.

A call at the site asks ``begin`` for its ``Route``. On a schedule the route has a ``Measurement``: counts that the
kernels write anyway are summed on the device and copied to pinned memory. The first call that finds them arrived
decides again. The host never waits. ``rates.decide`` holds the rules, this file the memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import weakref
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from twell.base.arguments import require_integer
from twell.choose import cards, rates
from twell.choose.explanation import Choice
from twell.choose.measurement import Expected, Measurement
from twell.choose.plan import Route, route_of
from twell.runtime import geometry, modes
from twell.runtime.log import logger

# Compiled graphs of training, whose number of tokens may be symbolic, are dense for at most so many. For more they run
# what the latest step did, and before any they are dense.
FEW = 256

Screen = Literal["auto", "off"]


# Measurements whose largest decides how many non-zeros training keeps room for.
_RECENT = 8
# Calls that wait for the host are measured so much more seldom: one that measures takes 540 us of it, another 35 (H200,
# 64 tokens at 2,048 / 5,632), and a worse choice costs little.
_SELDOM = 8


def require_screen(screen: object) -> None:
    """Raise ValueError unless this is a value of ``AutoStrategy.screen``."""
    if screen not in ("auto", "off"):
        raise ValueError(f'screen must be "auto" or "off", got {screen!r}')


@dataclasses.dataclass
class Bucket:
    """The memory of a site for calls of one kind and about the same number of tokens."""

    problem: rates.Problem
    decision: rates.Decision | None = None
    calls: int = 0
    late: bool = False  # whether the next call that may decides, on schedule or not
    figures: rates.Figures | None = None
    measured: int | None = None
    recent: tuple[float, ...] = ()  # non-zeros per token of the latest measurements
    held: int = 0
    version: int = 0  # changes whenever a route that calls remember may no longer hold


@dataclasses.dataclass
class _Graph:
    """The strategy of compiled graphs that train. Fixed once ``traced``; tracing reads ``strategy`` alone."""

    strategy: str
    reason: str
    traced: bool = False


class _Pass:
    """A forward pass whose backward pass has not run yet."""


class AutoStrategy:
    """The strategy of a call site, chosen from measurements: pass one object as ``strategy`` at every call of the site.

    Modules with ``strategy="auto"`` have their own. On a GPU of compute capability 9.0, or one that ``twell tune`` has
    measured, it picks "row", "union" or "dense", separately for inference and training, from figures of each power of
    two of tokens. It is the cheapest by ``twell.choose.rates.decide``, from measured times and from the non-zeros of
    earlier calls. These reach the host asynchronously; no call waits. Calls 0, 1, 2, 4, 8, ... and then each
    ``period``-th decide again and measure; to learn the unions, such a call runs "union" in place of "row". The first
    call that finds the figures arrived decides, too. Before the first figures, inference takes a sparse strategy and
    training the dense one. A change must promise to save 2 %, and is logged at INFO; ``twell.explain`` shows choices,
    reasons and figures. Calls that take the GPU less time than the host have eight times that period.

    ``screen`` says whether "union" may compute a gate only where an int8 product and its bound say that it may fire:
    "auto", where measured figures say that it pays, or "off", never. It may be set at any time. ``explain`` calls such
    calls "union+screen".

    If the down weight is not stored by rows (``twell.nn.set_down_layout``), the prediction includes the copy that
    sparse strategies make of it. On other GPUs "auto" is "dense", after a warning, and on the CPU, too, where the
    sparse operators are slower than that; nothing is measured there.

    The same figures arriving at the same calls give the same choices. Strategies differ in the last bits, and arrival
    is a matter of timing: name a strategy for bitwise repeatable runs. A CUDA graph keeps the strategy that the figures
    before its capture choose, by the GPU's time alone; without figures one of up to 512 tokens that are not one pass is
    dense. A compiled graph that trains keeps its strategy, too. Neither measures, so make them after some calls, or
    name the strategy. A compiled, traced or exported graph without gradients has the choice inside if it was made on a
    GPU, since on a CPU it is dense: it calls ``torch.ops.twell.ffn``, which finds the site by the memory of the layer's
    first weight, counts, measures and chooses each time it runs. Where there is no site, as in a program loaded by
    another process, it gets a new one. Under activation checkpointing, training keeps its choice until the backward
    pass is through: the recomputation, which neither counts nor measures, runs the strategy of the forward pass.

    Copies and pickles have no figures.
    """

    def __init__(self, *, period: int = 64, screen: Screen = "auto") -> None:
        require_integer("period", period, 1)
        require_screen(screen)
        self.period, self._screen = period, screen
        self._layer: tuple[int, int, bool] | None = None
        self._buckets: dict[tuple[bool, int], Bucket] = {}
        # by kind and tokens
        self._captures: dict[tuple[bool, int], rates.Decision] = {}
        self._graph = _Graph(*rates.UNTRAINED[:2])
        self._lock = threading.Lock()
        # one per bucket: with one for all, a forward pass under a reentrant checkpoint would keep training from any
        self._pending: dict[tuple[bool, int], Expected] = {}
        self._open: weakref.WeakSet[_Pass] = weakref.WeakSet()
        # what computes calls whose route holds while their bucket has its version, ``ops.calls``
        self.made: dict[tuple[Any, ...], Any] = {}
        # of the GPU of the latest call
        self._card = cards.SHIPPED

    def _forget_routes(self, bucket: Bucket | None = None) -> None:
        """Let the calls of a bucket, by default of all, ask for their routes again."""
        for each in self._buckets.values() if bucket is None else (bucket,):
            each.version += 1

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(AutoStrategy, period=self.period, screen=self._screen), ()

    def __repr__(self) -> str:
        screen = "" if self.screens else f", screen={self._screen!r}"
        return f"AutoStrategy(period={self.period}{screen})"

    @property
    def screens(self) -> bool:
        return self._screen == "auto"

    @property
    def screen(self) -> Screen:
        """ "auto" or "off": whether it may screen."""
        return self._screen

    @screen.setter
    def screen(self, value: Screen) -> None:
        require_screen(value)
        with self._lock:
            if value == self._screen:
                return
            self._screen = value
            for bucket in self._buckets.values():
                bucket.decision = None
            self._forget_routes()
            if self._graph.strategy == rates.SCREENED:
                # it is traced again
                self._graph.strategy, self._graph.reason = "union", "the screen was switched off"

    def begin(
        self,
        x: Tensor,
        n: int,
        gated: bool,
        training: bool,
        down_copied: bool,
        merged: bool = False,
        one_pass: bool = True,
        float8: bool = False,
    ) -> Route:
        """Choose the route of a call on x [..., K] with n neurons; the call is not being traced."""
        # fake tensors have no figures, and a captured graph would leave them at each replay
        real = type(x) is Tensor or type(x) is torch.nn.Parameter
        capturing = real and modes.capturing(x)
        sizes = (tokens_of(x), x.shape[-1], n, gated, training, down_copied, merged)
        problem = rates.Problem(*sizes, not capturing, float8, one_pass)
        holder = self if training and modes.checkpointed() else None
        if real:
            self._card = cards.in_use(x.device)
        # in the backward pass of an earlier call, as under a checkpoint; a reentrant one has none, it was inference
        recomputes = training and modes.in_backward() and len(self._open) > 0
        if not real or capturing or not self.heeds(x) or recomputes:
            strategy, held = self._peek(problem, record=capturing)
            return route_of(strategy, None, holder, held)
        with self._lock:
            call, decision, due = self._count(problem)
            key, strategy = _key(problem), decision.strategy
            bucket, waits = self._buckets[key], key in self._pending
            if not due or waits or not problem.m:
                route = route_of(strategy, None, holder, bucket.held)
                asks = due or waits or bucket.late
                if asks or holder is not None or (training and modes.in_backward()):
                    return route
                return route._replace(until=(bucket, bucket.version))
            figures = bucket.figures or self._nearest(key)
            screen = self.screens and not float8 and rates.worth_screening(problem, figures, self._card)
        fits = geometry.neuron_slices(n)[0][1] <= self._card.union_neurons
        if strategy == "row" and problem.m >= geometry.TOKEN_TILE and fits:
            strategy = "union"
        return route_of(strategy, Measurement(self, problem, call, screen), holder, bucket.held)

    def calls(self) -> int:
        """Calls so far, of all kinds."""
        with self._lock:
            return sum(bucket.calls for bucket in self._buckets.values())

    def counted(self, bucket: Bucket) -> bool:
        """Count a call whose route still holds; False, and nothing is counted, where the call must ``begin``."""
        with self._lock:
            if self._is_due(bucket):
                return False
            bucket.calls += 1
            return True

    def heeds(self, x: Tensor) -> bool:
        """Whether a call on ``x`` counts and may be measured: always, except where a subclass knows better."""
        return True

    def choose(self, problem: rates.Problem) -> rates.Decision:
        """Count a call and return its decision."""
        with self._lock:
            return self._count(problem)[1]

    def observe(self, problem: rates.Problem, figures: rates.Figures, call: int | None = None) -> None:
        """Take the figures of a call, by default the latest; the next call on the schedule decides by them."""
        with self._lock:
            self._observe(problem, figures, call)

    def expect(self, figures: Expected) -> None:
        """Take the figures of a call once they arrive, for which its bucket asks; ignore them behind earlier ones."""
        problem = figures.problem
        with self._lock:
            if self._layer == (problem.k, problem.n, problem.gated):
                key = _key(problem)
                self._pending.setdefault(key, figures)
                self._forget_routes(self._buckets.get(key))

    def hold(self, y: Tensor) -> None:
        """Keep the choices for training until no backward pass through ``y`` can follow."""
        node = y.grad_fn
        if node is None:
            return
        waiting, waiting_for = self._open, _Pass()
        waiting.add(waiting_for)

        # the hook, and with it the pass, lives as long as the graph
        def passed(*_: Any) -> None:
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                # the layer's last node is known only when all have run
                torch.autograd.Variable._execution_engine.queue_callback(lambda: waiting.discard(waiting_for))

        node.register_hook(passed)

    def explain(self, layer: str = "") -> list[Choice]:
        """The choices so far, for calls and for graphs."""
        with self._lock:
            rows = []
            for key, bucket in sorted(self._buckets.items(), key=lambda item: item[0]):
                if bucket.decision is None:
                    continue
                figures, measured = bucket.figures, bucket.measured
                pending = self._pending.get(key)
                if pending is not None and pending.transfer.arrived():
                    figures, measured = pending.figures(), pending.call
                about = (layer, _kind(key[0]), _range((1 << key[1] >> 1) + 1, 1 << key[1]), "", *bucket.decision[:2])
                rows.append(Choice(*about, bucket.calls, figures, measured, bucket.decision.costs))
            # neighbours with one strategy share a row, which has the reason of the most tokens
            captured = sorted(self._captures.items(), key=lambda item: item[0])
            for (training, _), alike in itertools.groupby(captured, lambda item: (item[0][0], item[1].strategy)):
                captures = list(alike)
                (_, low), ((_, high), decision) = captures[0][0], captures[-1]
                about = (layer, _kind(training), _range(low, high), "captured", *decision[:2])
                rows.append(Choice(*about, costs=decision.costs))
            if self._graph.traced:
                about = (layer, _kind(True), f"more than {FEW}", "compiled", self._graph.strategy, self._graph.reason)
                rows.append(Choice(*about))
            return rows

    def trace(self, m: Any) -> str:
        """The choice of compiled graphs that train on ``m`` tokens, which may be symbolic.

        Dynamo guards on values read here; none changes after its first read.
        """
        if m <= FEW:
            return "dense"
        self._graph.traced = True
        return self._graph.strategy

    def _peek(self, problem: rates.Problem, record: bool) -> tuple[str, int]:
        """The current choice and room, for a call that is neither counted nor measured."""
        with self._lock:
            self._forget_other_layers(problem)
            if record:
                # a graph has no later call that could
                self._collect()
            key = _key(problem)
            bucket = self._buckets.get(key)
            if bucket is not None and bucket.decision is not None and _is_laid_alike(bucket.problem, problem):
                decision = bucket.decision
            else:
                decision = self._best(problem, self._nearest(key))
            if record:
                self._captures[problem.training, problem.m] = decision
            # later data of a captured graph may be denser
            return decision.strategy, 0 if record or bucket is None else bucket.held

    def _count(self, problem: rates.Problem) -> tuple[int, rates.Decision, bool]:
        """Count a call: its index in its bucket, its decision, and whether it is on the schedule."""
        self._forget_other_layers(problem)
        key = _key(problem)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket(problem)
        call, due, bucket.calls = bucket.calls, self._is_due(bucket), bucket.calls + 1
        self._collect()
        if due or bucket.late or bucket.decision is None or not _is_laid_alike(bucket.problem, problem):
            decision = self._decide(problem, bucket)
            return call, decision, due and not decision.final
        return call, bucket.decision, due

    def _is_due(self, bucket: Bucket) -> bool:
        """Whether the next call decides and measures."""
        if bucket.decision is not None and bucket.decision.final:
            return False
        period = self.period * (_SELDOM if rates.waits_for_host(bucket.problem) else 1)
        calls = bucket.calls
        return calls & (calls - 1) == 0 if calls < period else calls % period == 0

    def _best(
        self, problem: rates.Problem, figures: rates.Figures | None, current: str | None = None
    ) -> rates.Decision:
        """``rates.decide`` by the card in use, among the strategies that the site may choose."""
        return rates.decide(problem, figures, current, self._card, self.screens)

    def _forget_other_layers(self, problem: rates.Problem) -> None:
        """Forget the figures of a layer of another size: removing neurons changes a module's layer."""
        layer = (problem.k, problem.n, problem.gated)
        if self._layer != layer:
            self._layer = layer
            self._forget_routes()
            self._pending.clear()
            self._buckets.clear()
            self._captures.clear()

    def _collect(self) -> None:
        for key, pending in list(self._pending.items()):
            if pending.transfer.arrived():
                del self._pending[key]
                self._observe(pending.problem, pending.figures(), pending.call)
                self._buckets[key].late = True

    def _observe(self, problem: rates.Problem, figures: rates.Figures, call: int | None) -> None:
        self._forget_other_layers(problem)
        bucket = self._buckets.setdefault(_key(problem), Bucket(problem))
        bucket.figures, bucket.measured = figures, max(bucket.calls - 1, 0) if call is None else call
        bucket.recent = (*bucket.recent, figures.nonzeros)[-_RECENT:]

    def _decide(self, problem: rates.Problem, bucket: Bucket) -> rates.Decision:
        before = bucket.decision
        bucket.late = before is not None and problem.training and len(self._open) > 0
        if before is not None and bucket.late:
            # each call asks until it can be decided
            self._forget_routes(bucket)
            return before
        figures = bucket.figures or self._nearest(_key(problem))
        decision = self._best(problem, figures, None if before is None else before.strategy)
        held = rates.held(problem, bucket.recent)
        same = before is not None and (before.strategy, bucket.held) == (decision.strategy, held)
        if not same or not _is_laid_alike(bucket.problem, problem):
            self._forget_routes(bucket)
        bucket.problem, bucket.decision, bucket.held = problem, decision, held
        if before is None or decision.strategy != before.strategy:
            m, k, n, gated, training = problem[:5]
            layer = f"{'gated' if gated else 'non-gated'} layer, K = {k}, N = {n}, {_kind(training)}, {m} tokens"
            change = decision.strategy if before is None else f"{before.strategy} -> {decision.strategy}"
            logger.info("%s: strategy %s, %s%s", layer, change, decision.reason, _measured(figures))
        if not self._graph.traced and problem.training and problem.m > FEW:
            # of graphs compiled from now on, by the GPU's time
            self._graph.strategy, self._graph.reason = self._best(problem._replace(eager=False), figures)[:2]
        return decision

    def _nearest(self, key: tuple[bool, int]) -> rates.Figures | None:
        """The figures of the bucket nearest in number of tokens; of two, the one of the same kind."""
        known = {other: b.figures for other, b in self._buckets.items() if b.figures is not None}
        if not known:
            return None
        return known[min(known, key=lambda other: (abs(other[1] - key[1]), other[0] != key[0], -other[1]))]


def without_site(
    x: Tensor, n: int, gated: bool, training: bool, down_copied: bool, one_pass: bool = True, float8: bool = False
) -> Route:
    """The route of a call on x [..., K] that "auto" chooses and that has no site to remember figures."""
    eager = not (type(x) is Tensor and modes.capturing(x))
    sizes = tokens_of(x), x.shape[-1], n, gated, training, down_copied
    return route_of(rates.decide_once(rates.Problem(*sizes, False, eager, float8, one_pass), cards.in_use(x.device)))


# The sites of layers by the memory of their first weights, with what tells that a weight is gone: how the operators
# ``ffn`` find them. Graphs pass the weight on, so graphs of equal layers stay equal.
_SITES: dict[tuple[int, int], tuple[StorageWeakRef, AutoStrategy]] = {}
_sites_lock = threading.Lock()


def place(weight: Tensor) -> tuple[int, int]:
    """What tells the memory of a weight from any other."""
    # while a weak reference exists, no other storage gets this address
    return weight.untyped_storage()._cdata, int(weight.storage_offset())


def enroll(weight: Tensor, site: AutoStrategy) -> None:
    """Let the operators find ``site`` by the first weight of its layer, until that memory is freed."""
    with _sites_lock:
        for gone in [at for at, (storage, _) in _SITES.items() if storage.expired()]:  # type: ignore[no-untyped-call]
            del _SITES[gone]
        _SITES[place(weight)] = StorageWeakRef(weight.untyped_storage()), site  # type: ignore[no-untyped-call]


def found(weight: Tensor) -> AutoStrategy | None:
    """The site of the layer with this first weight, if the operators know one."""
    known = None if weight.is_meta else _SITES.get(place(weight))
    return None if known is None or known[0].expired() else known[1]  # type: ignore[no-untyped-call]


def site_of(weight: Tensor, screen: bool) -> AutoStrategy:
    """The site of the layer with this first weight; where none is known, a new one that may ``screen``."""
    site = found(weight)
    if site is None:
        site = AutoStrategy(screen="auto" if screen else "off")
        enroll(weight, site)
    return site


def tokens_of(x: Tensor) -> int:
    """Tokens of x [..., K], which may be symbolic."""
    m = 1
    for size in x.shape[:-1]:
        # torch.Size.numel would turn a symbol into an integer
        m = m * size
    return m


def _key(problem: rates.Problem) -> tuple[bool, int]:
    """The kind, and the logarithm of the smallest power of two that is at least the number of tokens."""
    return problem.training, max(problem.m - 1, 0).bit_length()


def _is_laid_alike(one: rates.Problem, other: rates.Problem) -> bool:
    return (one.down_copied, one.merged, *one[7:]) == (other.down_copied, other.merged, *other[7:])


def _kind(training: bool) -> str:
    return "training" if training else "inference"


def _range(low: int, high: int) -> str:
    return f"{low} to {high}" if low < high else str(high)


def _measured(figures: rates.Figures | None) -> str:
    if figures is None:
        return ""
    union = "" if figures.union is None else f", a union of {figures.union:.1%}"
    listed = "" if figures.candidates is None else f", candidates {figures.candidates:.1%}"
    return f"; measured {figures.nonzeros:.1f} non-zeros per token{union}{listed}"
