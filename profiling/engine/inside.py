"""Functions that run in the process of vLLM's worker; ``collective_rpc`` sends them by name."""

import sys
from typing import Any

import torch

# Replays of a graph before it is timed, and timed ones; cycles for which the GPU waits meanwhile, since a slow host
# takes longer to launch a graph than the GPU to run it.
_BEFORE, _TIMED, _WAITED = 5, 30, 400_000_000


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
    from twell.choose.site import found as site_of

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
