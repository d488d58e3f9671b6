"""``ServedStrategy``: "auto" of a layer in vLLM, which learns from steps of requests alone.

Figures outlive the engine, since graphs are captured before the first request: ``Kept`` writes those that requests left
to ``<cache>/figures/<identity>.json`` and reads them in the first run of another process with the same weights.

vLLM runs its models by itself, too: to measure memory, to warm kernels up, around captures of graphs, on idle
data-parallel ranks, and again when it scales. Such runs may look like requests to a layer, down to attention metadata.
But an executor calls ``WorkerWrapperBase.execute_model`` for the steps that the scheduler planned and for nothing else;
vLLM's own runs begin inside the worker. So calls within it are of requests, if the plan has tokens.
"""

import functools
import hashlib
import json
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from twell.base import files
from twell.choose.cards import UNUSABLE
from twell.choose.rates import Figures, Problem
from twell.choose.site import AutoStrategy, Screen, enroll
from twell.integrations import layouts, vllm
from twell.runtime import cache, env

# The second one is that of Ray's executor up to vLLM 0.32, which goes around the first.
_STEPS = ("execute_model", "execute_model_ray")

# As vLLM's forward context, of the process: micro-batches run in threads of the step's.
_planned = False

FOLDER = "figures"
# Figures are written after so many steps of requests, and whenever their number has doubled.
FIRST_STEPS = 64
# Values in each dimension of a parameter by which weights are told apart.
_SAMPLED = 16
# parameters of others may refuse to be read
_FAILURES = (*UNUSABLE, RuntimeError)


class ServedStrategy(AutoStrategy):
    """ "auto" of a served layer. Until a step of requests was measured it chooses by ``figures`` of the configuration
    or, without, as for any layer not yet measured; so do the graphs, which are captured before the first request.
    """

    def __init__(self, figures: layouts.LayerFigures | None, screen: Screen = "auto") -> None:
        super().__init__(screen=screen)
        self._known = figures
        self._sizes = 0, 0, False
        self.kept: Kept | None = None

    def heeds(self, x: Tensor) -> bool:
        """Whether a call now is of requests."""
        if self.kept is not None and not self.kept.is_read:
            self.kept.read()
        return _planned

    def learn(self, first: Tensor, k: int, n: int, gated: bool, share: int) -> None:
        """Be the strategy of the layer with this first weight and these sizes, of one rank of ``share``."""
        enroll(first, self)
        self._sizes = k, n, gated
        if self._known is not None:
            # weights that are loaded again keep what was measured since
            (nonzeros, text, batch), self._known = self._known, None
            for m, union in ((vllm.BATCH, batch), (vllm.PROMPTS, text)):
                self.observe(Problem(m, k, n, gated, False), Figures(nonzeros / share, union))

    def measured(self) -> list[list[Any]]:
        """The figures of calls of each number of tokens behind that number, where requests had so many."""
        with self._lock:
            return [[each.problem.m, *each.figures] for each in self._buckets.values() if each.calls and each.figures]

    def parsed(self, entries: Any) -> list[tuple[Problem, Figures]]:
        """The figures of ``measured``; raises one of ``UNUSABLE`` for others.

        Steps that decode run graphs, which measure nothing: their tokens fire as many neurons, but not the same ones.
        """
        found = [(Problem(m, *self._sizes, False), Figures(*figures)) for m, *figures in entries]
        for problem, figures in found:
            if type(problem.m) is not int or problem.m < 1:
                raise ValueError(f"tokens must be a positive integer, got {problem.m!r:.40}")
            figures.checked()
        if found and (least := min(found))[0].m > vllm.MOST_BATCH:
            found.append((least[0]._replace(m=vllm.BATCH), Figures(least[1].nonzeros, None)))
        return found


class Kept:
    """The file of the figures of a model's layers, of one rank: ``sites`` by names.

    Ranks, models with other weights and layers of another ``form`` have other files. What cannot be read or written is
    left alone, with one line of the log.
    """

    def __init__(self, model: nn.Module, sites: Mapping[str, ServedStrategy], form: str) -> None:
        self._model, self._sites, self._form = weakref.ref(model), sites, form
        self._steps, self._written, self.is_read = 0, "", False
        for site in sites.values():
            site.kept = self
        _all.add(self)

    def _path(self) -> Path:
        """The file of the weights as they are now. Raises OSError or ValueError if there is no folder for it."""
        digest, model = hashlib.sha256(self._form.encode()), self._model()
        for name, each in () if model is None else model.named_parameters():
            sample = each.detach()[tuple(slice(None, None, max(size // _SAMPLED, 1)) for size in each.shape)]
            digest.update(f"{name} {each.dtype} {list(each.shape)}\n".encode())
            digest.update(bytes(sample.flatten().contiguous().view(torch.uint8).tolist()))
        return env.cache_dir() / FOLDER / f"{digest.hexdigest()[:32]}.json"

    def read(self) -> None:
        """Let the layers know the figures of an earlier process."""
        self.is_read, path = True, None
        try:
            path = self._path()
            written = json.loads(path.read_text(encoding="utf-8"))
            if written.keys() != self._sites.keys():
                raise ValueError(f"it must have {len(self._sites)} layers by names, got {list(written)!r:.80}")
            found = {name: site.parsed(written[name]) for name, site in self._sites.items()}
        except FileNotFoundError:
            return
        except _FAILURES as error:
            vllm.logger.warning("twell: figures of earlier requests are ignored, %s: %s", path, error)
            return
        for name, entries in found.items():
            for entry in entries:
                self._sites[name].observe(*entry)
        vllm.logger.info("twell: %d layers have figures of earlier requests, %s", len(found), path)

    def step(self) -> None:
        """Count a step of requests, and write what it and those before have measured if it is time."""
        self._steps += 1
        if self._steps < FIRST_STEPS or self._steps & (self._steps - 1) or self._model() is None:
            return
        entries = {name: site.measured() for name, site in self._sites.items()}
        text = json.dumps(entries) + "\n"
        if not any(entries.values()) or text == self._written:
            return
        try:
            files.write_text(cache.open_folder(FOLDER) / self._path().name, text)
            self._written = text
        except _FAILURES as error:
            _all.discard(self)
            vllm.logger.warning("twell: figures of requests are not kept for the next start: %s", error)


_all: weakref.WeakSet[Kept] = weakref.WeakSet()


@functools.cache
def watch() -> None:
    """From now on, know in this process of vLLM which calls are of requests."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    found = 0
    for kind in (WorkerWrapperBase, *WorkerWrapperBase.__subclasses__()):
        for name in _STEPS:
            if method := vars(kind).get(name):
                setattr(kind, name, _watched(method))
                found += 1
    if not found:
        vllm.logger.warning(
            'twell: vLLM has no %s.%s, so "auto" measures no request', WorkerWrapperBase.__name__, _STEPS[0]
        )


def _watched(step: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a worker that runs what the scheduler planned, its first argument or the first part of that."""

    @functools.wraps(step)
    def run(worker: Any, planned: Any, *arguments: Any, **named: Any) -> Any:
        global _planned
        plan = planned[0] if isinstance(planned, tuple) else planned
        # without tokens a data-parallel rank runs a token of its own
        before, _planned = _planned, plan.total_num_scheduled_tokens > 0
        try:
            done = step(worker, planned, *arguments, **named)
            if _planned:
                for kept in tuple(_all):
                    kept.step()
            return done
        finally:
            _planned = before

    return run
