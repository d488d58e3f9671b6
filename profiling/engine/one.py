"""One engine in a process of its own, which ``profiling.engine`` starts: makes tokens and says how fast.

The process writes FOLDER/NAME.ready once the engine has started. Then each line of its input names a workload by its
place and what to do: "run" it, or "end" its runs by timing a step. From "end" on FOLDER/NAME.json has the workload. The
process answers with the same line in FOLDER/NAME.answer. Steps are timed while all sequences decode: at the end of a
run some have ended, and what their places in the graph's inputs hold says nothing.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from profiling.engine import inside
from twell import _files

# Tokens that each sequence has made when a step is timed, and those it may make.
_BEGUN, _MOST = 8, 1024
# The engines whose tokens others are compared with, and most sequences of a workload for which that is done.
COMPARED, MOST_COMPARED = ("stock", "stock-eager"), 64


def generate(engine: Any, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float]:
    """So many ``new`` tokens of each prompt, and the seconds that they took."""
    from vllm import SamplingParams

    rows = [{"prompt_token_ids": ids} for ids in prompts]
    each = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = engine.generate(rows, each, use_tqdm=False)
    took = time.perf_counter() - start
    return [list(output.outputs[0].token_ids) for output in outputs], took


def gaps(engine: Any, prompts: list[list[int]], new: int) -> list[list[float]]:
    """By how much the most likely token exceeds the next one, in logits, at each new token of each prompt."""
    from vllm import SamplingParams

    rows = [{"prompt_token_ids": ids} for ids in prompts]
    two = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False, logprobs=2)
    found = []
    for output in engine.generate(rows, two, use_tqdm=False):
        places = [
            sorted((entry.logprob for entry in place.values()), reverse=True) for place in output.outputs[0].logprobs
        ]
        found.append([place[0] - place[1] for place in places])
    return found


def step(engine: Any, prompts: list[list[int]], *asked: Any) -> list[Any]:
    """What the worker's functions ``asked`` return in a step in which all ``prompts`` decode."""
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
    answers = [engine.collective_rpc(what, args=(count,))[0] for what in asked]
    core.abort_request(names)
    while core.has_unfinished_requests():
        core.step()
    return answers


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
    prompts = json.loads((folder / "prompts.json").read_text())
    (folder / f"{name}.ready").touch()
    for line in sys.stdin:
        place, what, _ = line.split()
        length, count, new = spec["workloads"][int(place)]
        given = prompts[str(length)][:count]
        if int(place) == len(result["workloads"]):
            row = {"prompt": length, "sequences": count, "new": new, "seconds": [], "step_ms": None}
            result["workloads"].append(row | {"gaps": []})
        row = result["workloads"][int(place)]
        if what == "run":
            row["tokens"], took = generate(engine, given, new)
            row["seconds"].append(took)
        else:
            # the first run compiles and warms up
            del row["seconds"][0]
            row["per_s"] = (count * (length if new == 1 else new)) / statistics.median(row["seconds"])
            if new > 1 and graphs:
                times = step(engine, given, *[inside.replay] * 3)
                row["step_ms"] = None if None in times else statistics.median(times)
            if new > 1 and name in COMPARED and count <= MOST_COMPARED:
                row["gaps"] = gaps(engine, given, new)
            result["ended"] = engine.collective_rpc(inside.describe)[0]
            (folder / f"{name}.json").write_text(json.dumps(result))
        _files.write_text(folder / f"{name}.answer", line)


if __name__ == "__main__":
    main(sys.argv[1])
