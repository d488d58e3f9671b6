"""One engine in a process of its own, which ``profiling.engine`` starts: makes tokens and says how fast.

The process writes FOLDER/NAME.ready once the engine has started, measures once FOLDER/NAME.go exists, and writes
FOLDER/NAME.json after each workload. Steps are timed while all sequences decode: at the end of a run some have ended,
and what their places in the graph's inputs hold says nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from profiling.engine import inside

# Tokens that each sequence has made when a step is timed, and those it may make.
_BEGUN, _MOST = 8, 1024


def generate(engine: Any, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float]:
    """The tokens of each prompt, and the seconds that they took."""
    from vllm import SamplingParams

    rows = [{"prompt_token_ids": ids} for ids in prompts]
    parameters = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = engine.generate(rows, parameters, use_tqdm=False)
    took = time.perf_counter() - start
    return [list(output.outputs[0].token_ids) for output in outputs], took


def step(engine: Any, prompts: list[list[int]], graphs: bool) -> dict[str, Any]:
    """Figures of a step in which all ``prompts`` decode."""
    from vllm import SamplingParams

    core, count = engine.llm_engine, len(prompts)
    parameters = SamplingParams(max_tokens=_MOST, temperature=0, ignore_eos=True, detokenize=False)
    names = [f"step-{count}-{i}" for i in range(count)]
    for name, ids in zip(names, prompts):
        core.add_request(name, {"prompt_token_ids": ids}, parameters)
    made: dict[str, int] = {}
    while len(made) < count or min(made.values()) < _BEGUN:
        for output in core.step():
            made[output.request_id] = len(output.outputs[0].token_ids)

    def ask(what: Any) -> Any:
        return engine.collective_rpc(what, args=(count,))[0]

    times = [ask(inside.replay) for _ in range(3)] if graphs else []
    row = {
        "step_ms": statistics.median(times) if times and None not in times else None,
        "kernels": ask(inside.kernels) if graphs else [],
        "patterns": [] if graphs else ask(inside.patterns),
    }
    core.abort_request(names)
    while core.has_unfinished_requests():
        core.step()
    return row


def main(argument: str) -> None:
    """Measure as the JSON ``argument`` says."""
    # vLLM reads the environment when it is imported; functions of ``inside`` are sent to the worker
    os.environ.update({"VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "HF_HUB_OFFLINE": "1"})
    from vllm import LLM
    from vllm import __version__ as version

    spec: dict[str, Any] = json.loads(argument)
    folder, name = Path(spec["folder"]), spec["name"]
    began = time.monotonic()
    engine = LLM(
        spec["model"],
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        # several engines share the GPU, so none takes a share of it
        kv_cache_memory_bytes=spec["cache_bytes"],
        gpu_memory_utilization=0.1,
        seed=0,
        **spec["options"],
    )
    graphs = "enforce_eager" not in spec["options"]
    result: dict[str, Any] = {"name": name, "vllm": version, "start_s": time.monotonic() - began, "workloads": []}
    result["started"] = engine.collective_rpc(inside.describe)[0]
    if not graphs:
        engine.collective_rpc(inside.watch)
    (folder / f"{name}.ready").touch()
    while not (folder / f"{name}.go").exists():
        time.sleep(0.05)
    prompts = json.loads((folder / "prompts.json").read_text())
    for length, count, new in spec["workloads"]:
        given = prompts[str(length)][:count]
        # the first run compiles and warms up
        runs = [generate(engine, given, new) for _ in range(1 + spec["runs"])]
        seconds = [took for _, took in runs[1:]]
        of_step: dict[str, Any] = {"step_ms": None, "kernels": [], "patterns": []}
        row = {"prompt": length, "sequences": count, "new": new, "seconds": seconds, "tokens": runs[-1][0]}
        row["per_s"] = count * (new if new > 1 else length) / statistics.median(seconds)
        result["workloads"].append(row | (step(engine, given, graphs) if new > 1 else of_step))
        result["ended"] = engine.collective_rpc(inside.describe)[0]
        (folder / f"{name}.json").write_text(json.dumps(result))
    print("MEASURED", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
