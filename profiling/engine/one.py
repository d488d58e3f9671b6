"""One engine in a process of its own, which ``profiling.engine`` starts: makes tokens, says how fast, and waits in turn.

The process writes FOLDER/NAME.ready once the engine has started, measures once FOLDER/NAME.go exists, and writes
FOLDER/NAME.json after each workload.
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


def main(argument: str) -> None:
    # vLLM reads the environment when it is imported
    os.environ.update(
        {
            "VLLM_NO_USAGE_STATS": "1",
            # functions of ``inside`` are sent to the worker
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "HF_HUB_OFFLINE": "1",
        }
    )
    from vllm import LLM, SamplingParams

    spec: dict[str, Any] = json.loads(argument)
    folder, name = Path(spec["folder"]), spec["name"]
    result: dict[str, Any] = {"name": name, "workloads": {}}
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
    graphs = not spec["options"].get("enforce_eager")
    result["start_s"] = time.monotonic() - began
    result["started"] = engine.collective_rpc(inside.describe)[0]
    if not graphs:
        engine.collective_rpc(inside.watch)
    (folder / f"{name}.ready").touch()
    while not (folder / f"{name}.go").exists():
        time.sleep(0.05)
    prompts = json.loads(Path(spec["prompts"]).read_text())

    def generate(length: int, count: int, new: int) -> tuple[list[Any], float]:
        rows = [{"prompt_token_ids": ids} for ids in prompts[str(length)][:count]]
        parameters = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = engine.generate(rows, parameters, use_tqdm=False)
        return outputs, time.perf_counter() - start

    for length, count, new in spec["workloads"]:
        seconds = []
        for run in range(1 + spec["runs"]):
            outputs, took = generate(length, count, new)
            # the first run compiles and warms up
            seconds += [took] if run else []
        row: dict[str, Any] = {"prompt": length, "sequences": count, "new": new, "seconds": seconds}
        row["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
        if new > 1 and graphs:
            row["graph_ms"] = [engine.collective_rpc(inside.replay, args=(count,))[0] for _ in range(3)]
            row["kernels"] = engine.collective_rpc(inside.kernels, args=(count,))[0]
        elif new > 1:
            row["patterns"] = engine.collective_rpc(inside.patterns, args=(count,))[0]
        row["per_s"] = count * (new if new > 1 else length) / statistics.median(seconds)
        result["workloads"][f"{'decode' if new > 1 else 'prompts'} {count}"] = row
        result["ended"] = engine.collective_rpc(inside.describe)[0]
        (folder / f"{name}.json").write_text(json.dumps(result))
    print("MEASURED", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
