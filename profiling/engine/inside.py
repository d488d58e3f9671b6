"""Functions that run in the process of vLLM's worker; ``collective_rpc`` sends them by name."""

from __future__ import annotations

import statistics
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# Replays of a graph before it is timed, and timed ones; cycles for which the GPU waits meanwhile, since a slow host
# takes longer to launch a graph than the GPU to run it.
_BEFORE, _TIMED, _WAITED = 5, 30, 400_000_000
# Kernels of a step that a table names; the rest is one more row.
_KERNELS = 25


def _layers(worker: Any) -> list[Any]:
    """The FFNs of a model, or the layers of routed experts, with their shared ones, of a Nemotron-H."""
    layers = worker.get_model().model.layers
    if hasattr(layers[0], "mixer"):
        return [layer.mixer for layer in layers if hasattr(layer.mixer, "experts")]
    return [layer.mlp for layer in layers]


def describe(worker: Any) -> dict[str, Any]:
    """Classes of the model, GiB of its memory, and what "auto" chose: layers by strategy, tokens and kind of call.

    "experts": layers of routed experts that twell runs; their shared ones choose.
    """
    layers = _layers(worker)
    found: dict[str, Any] = {
        "model": type(worker.get_model()).__name__,
        "layers": sorted({type(layer).__name__ for layer in layers}),
        "allocated_gib": torch.cuda.memory_allocated() / 2**30,
        "most_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "experts": sum(map(_runs_experts, layers)),
        "choices": {},
    }
    if "twell" not in sys.modules:
        return found
    from twell.strategy.site import found as site_of

    for layer in layers:
        sites = [site for site in map(site_of, layer.parameters()) if site is not None]
        for row in sites[0].explain() if sites else []:
            at = found["choices"].setdefault(f"{row.tokens} {row.graph}".strip(), {})
            at[row.strategy] = at.get(row.strategy, 0) + 1
    return found


def _runs_experts(layer: Any) -> bool:
    methods = (getattr(module, "quant_method", None) for module in layer.modules())
    return any(type(method).__name__ == "RunsExperts" for method in methods)


def _graph(worker: Any, tokens: int) -> Any:
    """The CUDA graph of a whole step that decodes ``tokens`` sequences; None if there is none."""
    from vllm.config import CUDAGraphMode

    graphs = worker.model_runner.cudagraph_manager.graphs
    return next((g for d, g in graphs.items() if d.cg_mode == CUDAGraphMode.FULL and d.num_tokens == tokens), None)


def replay(worker: Any, tokens: int) -> float | None:
    """Milliseconds of the GPU for the graph of a step that decodes ``tokens`` sequences; None without such a graph.

    Its inputs are those of the last step.
    """
    graph = _graph(worker, tokens)
    if graph is None:
        return None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_WAITED)
    for _ in range(_BEFORE):
        graph.replay()
    start.record()
    for _ in range(_TIMED):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / _TIMED


def kernels(worker: Any, tokens: int) -> list[tuple[str, int, float]]:
    """The kernels of one such step that take most time: name, launches, microseconds of all; then all others."""
    graph = _graph(worker, tokens)
    if graph is None:
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    rows = [(e.key[:120], e.count, e.self_device_time_total) for e in profile.key_averages()]
    rows = sorted((row for row in rows if row[2]), key=lambda row: -row[2])
    rest = rows[_KERNELS:]
    return [*rows[:_KERNELS], ("all others", sum(row[1] for row in rest), sum(row[2] for row in rest))]


def watch(worker: Any) -> None:
    """Keep what reaches each FFN of an engine without graphs, by its number of tokens, for ``patterns``."""

    def keep(seen: dict[int, Tensor], _: nn.Module, given: tuple[Tensor, ...]) -> None:
        x = given[0].reshape(-1, given[0].shape[-1])
        seen[len(x)] = x.detach().clone()

    for layer in _layers(worker):
        layer._seen = {}
        layer._watch = layer.register_forward_pre_hook(partial(keep, layer._seen))


def patterns(worker: Any, tokens: int) -> list[dict[str, float]]:
    """Non-zeros of each layer in the latest step of so many ``tokens`` since ``watch``, which ends here.

    "mean", "most": of a token. "union": neurons that any fires. Of routed experts: of a token in one of its experts,
    the mean union of an expert's tokens, and "experts" with a token.
    """
    found = []
    for layer in _layers(worker):
        layer._watch.remove()
        x = layer._seen[tokens]
        if hasattr(layer, "experts"):
            found.append(_of_experts(layer, x, worker.get_model().config.num_experts_per_tok))
            continue
        weight = next(p for p in layer.parameters() if p.shape[-1] == x.shape[-1])
        fired = (x @ weight[: weight.shape[0] // 2].t()) > 0
        each = fired.sum(1).float()
        found.append({"mean": each.mean().item(), "most": each.max().item(), "union": float(fired.any(0).sum())})
    return found


def _of_experts(layer: Any, x: Tensor, top: int) -> dict[str, float]:
    """Non-zeros of routed experts, of which each token has the ``top`` ones of one group."""
    weight = next(module.w13_weight for module in layer.modules() if hasattr(module, "w13_weight"))
    scores = (x.float() @ layer.gate.weight.float().t()).sigmoid() + layer.gate.e_score_correction_bias
    ids = scores.topk(top).indices
    each, unions = [], []
    for expert in ids.unique().tolist():
        fired = (x[(ids == expert).any(1)] @ weight[expert].t()) > 0
        each.append(fired.sum(1).float())
        unions.append(float(fired.any(0).sum()))
    pairs = torch.cat(each)
    union = statistics.mean(unions)
    return {"mean": pairs.mean().item(), "most": pairs.max().item(), "union": union, "experts": float(len(unions))}
