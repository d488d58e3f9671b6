"""Functions that run in the process of vLLM's worker; ``collective_rpc`` sends them by name."""

from __future__ import annotations

import sys
from typing import Any

import torch

# Replays of a graph before it is timed, and timed ones.
_BEFORE, _TIMED = 10, 50
# Kernels of a step that a table names; the rest is one more row.
_KERNELS = 25


def describe(worker: Any) -> dict[str, Any]:
    """Classes of the model, GiB of its memory, and what "auto" chose: layers by strategy, tokens and kind of call."""
    model = worker.get_model()
    layers = [layer.mlp for layer in model.model.layers]
    found: dict[str, Any] = {
        "model": type(model).__name__,
        "layers": sorted({type(layer).__name__ for layer in layers}),
        "allocated_gib": torch.cuda.memory_allocated() / 2**30,
        "most_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "choices": {},
    }
    if "twell" not in sys.modules:
        return found
    from twell.strategy.site import found as site_of

    for layer in layers:
        site = site_of(next(layer.parameters()))
        for row in site.explain() if site is not None else []:
            at = found["choices"].setdefault(f"{row.tokens} {row.graph}".strip(), {})
            at[row.strategy] = at.get(row.strategy, 0) + 1
    return found


def _graph(worker: Any, tokens: int) -> Any:
    """The CUDA graph of a whole step that decodes ``tokens`` sequences; None if there is none."""
    from vllm.config import CUDAGraphMode

    graphs = worker.model_runner.cudagraph_manager.graphs
    return next((g for d, g in graphs.items() if d.cg_mode == CUDAGraphMode.FULL and d.num_tokens == tokens), None)


def replay(worker: Any, tokens: int) -> float | None:
    """Milliseconds of the GPU for the graph of a step that decodes ``tokens`` sequences; None without such a graph.

    Its inputs are what the last step left, so call it right after requests of that number.
    """
    graph = _graph(worker, tokens)
    if graph is None:
        return None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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
    rows = [
        (e.key[:120], e.count, e.self_device_time_total) for e in profile.key_averages() if e.self_device_time_total
    ]
    rows.sort(key=lambda row: -row[2])
    rest = rows[_KERNELS:]
    return [*rows[:_KERNELS], ("all others", sum(row[1] for row in rest), sum(row[2] for row in rest))]


def watch(worker: Any) -> None:
    """Keep what reaches each FFN of an engine without graphs, by its number of tokens, for ``patterns``."""
    for layer in worker.get_model().model.layers:
        layer.mlp._seen = {}
        layer.mlp.register_forward_pre_hook(
            lambda mlp, args: mlp._seen.__setitem__(args[0].numel() // args[0].shape[-1], args[0].detach().clone())
        )


def patterns(worker: Any, tokens: int) -> list[dict[str, float]]:
    """Of each layer the pattern of the latest step of ``tokens``, where ``watch`` was called before."""
    found = []
    for layer in worker.get_model().model.layers:
        x = layer.mlp._seen[tokens]
        x = x.reshape(-1, x.shape[-1])
        weight = next(layer.mlp.parameters())
        fired = (x @ weight[: weight.shape[0] // 2].t()) > 0
        each = fired.sum(1).float()
        tiles = [fired.view(-1, t, fired.shape[1]).any(1).float().sum(1) for t in (16, 64, 128) if tokens % t == 0]
        found.append(
            {
                "mean": each.mean().item(),
                "most": each.max().item(),
                "top8": each.topk(min(8, tokens)).values.mean().item(),
                "union": fired.any(0).sum().item(),
                **{f"union{t}": u.mean().item() for t, u in zip((16, 64, 128), tiles)},
                "uniontile16most": tiles[0].max().item() if tiles else 0.0,
            }
        )
    return found
