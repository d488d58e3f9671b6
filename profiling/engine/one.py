"""One engine in a process of its own, which ``profiling.engine`` starts: makes tokens and says how fast.

It sends its figures so far once it has started, and after each request: a workload by its place, and "run" it, or "end"
its runs by timing a step. Steps are timed while all sequences decode: at the end of a run some have ended, and what
their places in the graph's inputs hold says nothing.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

# Tokens that each sequence has made when a step is timed, and those it may make.
_BEGUN, _MOST = 8, 1024
# Replays of a graph before it is timed, and timed ones; cycles for which the GPU waits meanwhile, since a slow host
# takes longer to launch a graph than the GPU to run it.
_BEFORE, _TIMED, _WAITED = 5, 30, 400_000_000


def serve(connection: Any, spec: Mapping[str, Any]) -> None:
    """Measure by requests of the connection, until that ends."""
    folder, name = Path(spec["folder"]), spec["name"]
    os.setsid()
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # vLLM reads the environment when it is imported; functions below are sent to the worker
    os.environ |= {
        "TWELL_VLLM": "off" if name == "stock" else "auto",
        "VLLM_CACHE_ROOT": str(folder / "cache" / name),
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM
    from vllm import __version__ as version

    began, fixed = time.monotonic(), {"skip_tokenizer_init": True, "enable_prefix_caching": False, "seed": 0}
    engine = LLM(str(folder / "relu"), **fixed, **spec["options"])
    found: dict[str, Any] = {"name": name, "vllm": version, "start_s": time.monotonic() - began, "workloads": []}
    found["started"] = engine.collective_rpc(describe)[0]
    prompts = json.loads((folder / "prompts.json").read_text())
    connection.send(found)
    while True:
        try:
            place, what = connection.recv()
        except EOFError:
            return
        length, count, new = spec["workloads"][place]
        given = prompts[str(length)][:count]
        if place == len(found["workloads"]):
            row = {"prompt": length, "sequences": count, "new": new, "seconds": [], "per_s": None, "step_ms": None}
            found["workloads"].append(row)
        row = found["workloads"][place]
        if what == "run":
            start = time.perf_counter()
            made = engine.generate([{"prompt_token_ids": ids} for ids in given], likeliest(new), use_tqdm=False)
            row["tokens"] = [list(each.outputs[0].token_ids) for each in made]
            row["seconds"].append(time.perf_counter() - start)
        else:
            if new == 1:
                row["per_s"] = count * length / statistics.median(row["seconds"][1:])
            else:
                times = step(engine, given, *[replay] * 3)
                row["step_ms"] = None if None in times else statistics.median(times)
            found["ended"] = engine.collective_rpc(describe)[0]
        connection.send(found)


def likeliest(most: int) -> Any:
    """How tokens are chosen."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=most, temperature=0, ignore_eos=True, detokenize=False)


def step(engine: Any, prompts: list[list[int]], *asked: Any) -> list[Any]:
    """What the worker's functions ``asked`` return in a step in which all ``prompts`` decode."""
    core, count, parameters = engine.llm_engine, len(prompts), likeliest(_MOST)
    names = [f"step-{count}-{i}" for i in range(count)]
    for name, ids in zip(names, prompts):
        core.add_request(name, {"prompt_token_ids": ids}, parameters)
    made: dict[str, int] = {}
    while len(made) < count or min(made.values()) < _BEGUN:
        for output in core.step():
            made[output.request_id] = len(output.outputs[0].token_ids)
    answers = [engine.collective_rpc(what, args=(count,))[0] for what in asked]
    core.abort_request(names)
    while core.has_unfinished_requests():
        core.step()
    return answers


# In the process of vLLM's worker


def _layers(worker: Any) -> list[Any]:
    """The FFNs of a model, or the layers of routed experts, with their shared ones, of a Nemotron-H."""
    layers = worker.get_model().model.layers
    if hasattr(layers[0], "mixer"):
        return [layer.mixer for layer in layers if hasattr(layer.mixer, "experts")]
    return [layer.mlp for layer in layers]


def describe(worker: Any) -> dict[str, Any]:
    """Classes of the model, GiB of its memory, and what "auto" chose: layers by strategy, tokens and kind of call."""
    layers = _layers(worker)
    methods = [{type(getattr(each, "quant_method", None)).__name__ for each in layer.modules()} for layer in layers]
    found: dict[str, Any] = {
        "model": type(worker.get_model()).__name__,
        "layers": sorted({type(layer).__name__ for layer in layers}),
        "allocated_gib": torch.cuda.memory_allocated() / 2**30,
        "most_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        # of routed experts that twell runs; their shared ones choose
        "experts": sum("RunsExperts" in each for each in methods),
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


def replay(worker: Any, tokens: int) -> float | None:
    """Milliseconds of the graph of a step that decodes ``tokens`` sequences, with its last inputs, if there is one."""
    from vllm.config import CUDAGraphMode

    graphs = worker.model_runner.cudagraph_manager.graphs
    own = [g for d, g in graphs.items() if d.cg_mode == CUDAGraphMode.FULL and d.num_tokens == tokens]
    if not own:
        return None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_WAITED)
    for _ in range(_BEFORE):
        own[0].replay()
    start.record()
    for _ in range(_TIMED):
        own[0].replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / _TIMED
