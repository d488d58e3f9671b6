"""``ServedStrategy``: "auto" of a layer in vLLM, which learns from steps of requests alone.

vLLM runs its models by itself, too: to measure memory, to warm kernels up, around captures of graphs, on idle
data-parallel ranks, and again when it scales. Such runs may look like requests to a layer, down to attention metadata.
But an executor calls ``WorkerWrapperBase.execute_model`` for the steps that the scheduler planned and for nothing else;
vLLM's own runs begin inside the worker. So calls within it are of requests, if the plan has tokens.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from twell.choose.rates import Figures, Problem
from twell.choose.site import AutoStrategy, Screen, enroll
from twell.integrations import layouts, vllm

# The second one is that of Ray's executor up to vLLM 0.32, which goes around the first.
_STEPS = ("execute_model", "execute_model_ray")

# As vLLM's forward context, of the process: micro-batches run in threads of the step's.
_planned = False


class ServedStrategy(AutoStrategy):
    """ "auto" of a served layer. Until a step of requests was measured it chooses by ``figures`` of the configuration
    or, without, as for any layer not yet measured; so do the graphs, which are captured before the first request.
    """

    def __init__(self, figures: layouts.LayerFigures | None, screen: Screen = "auto") -> None:
        super().__init__(screen=screen)
        self._known = figures

    def heeds(self, x: Tensor) -> bool:
        """Whether a call now is of requests."""
        return _planned

    def learn(self, first: Tensor, k: int, n: int, gated: bool, share: int) -> None:
        """Be the strategy of the layer with this first weight and these sizes, of one rank of ``share``."""
        enroll(first, self)
        if self._known is not None:
            # weights that are loaded again keep what was measured since
            (nonzeros, text, batch), self._known = self._known, None
            for m, union in ((vllm.BATCH, batch), (vllm.PROMPTS, text)):
                self.observe(Problem(m, k, n, gated, False), Figures(nonzeros / share, union))


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
            return step(worker, planned, *arguments, **named)
        finally:
            _planned = before

    return run
