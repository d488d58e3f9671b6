"""vLLM's own engine on a GPU, stock and with twell: the same prompts, tokens per second and the GPU's time of steps.

    python -m profiling.engine --model large --work FOLDER --out engine.json

Each engine is a process of its own. All start side by side, compile and capture; then they take runs of each workload
in turn, one at a time, since hosts wander. A step is the CUDA graph that the engine captured for so many sequences,
replayed while all of them decode, and timed by events. Models are drawn, and configurations of those without experts
have sparsity_figures. Of "nemotron", a Nemotron-H with routed experts, all engines have vLLM's own class:

    python -m profiling.engine --model nemotron --engines stock auto row --work FOLDER --out engine.json
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from profiling.engine import one
from profiling.engine.models import DRAWN, LENGTH
from profiling.harness import Row, show, write_json, written
from twell import testing

# Options of the engines of each name; "stock" runs without twell.
ENGINES: dict[str, dict[str, Any]] = {
    "stock": {"model_impl": "transformers"},
    "auto": {},
    "dense": {"hf_overrides": {"sparsity_strategy": "dense"}},
    "row": {"hf_overrides": {"sparsity_strategy": "row"}},
}
SIZES = (1, 8, 32, 64, 128, 256, 512)
CAPTURED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHOWN = ("engine", "prompt", "sequences", "new", "per_s", "step_ms", "differ")


class Engine(NamedTuple):
    name: str
    process: Any
    connection: Any

    def heard(self, until: float) -> Any:
        """What it says next; None if it or the time ended before."""
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll(max(0.0, until - time.monotonic())):
                return self.connection.recv()
        return None

    def asked(self, place: int, what: str, until: float) -> Any:
        with contextlib.suppress(OSError):
            self.connection.send((place, what))
        return self.heard(until)

    def end(self) -> None:
        self.connection.close()
        self.process.join(5)
        for kind in (signal.SIGTERM, signal.SIGKILL):
            if self.process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, kind)
                self.process.join(1)


def start(name: str, spec: Mapping[str, Any]) -> Engine:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=one.serve, args=(theirs, spec))
    process.start()
    # the end of the process is the end of the connection
    theirs.close()
    return Engine(name, process, ours)


def measure(engines: Sequence[Engine], runs: Sequence[int], until: float) -> dict[str, Row]:
    """Let engines take ``runs`` of each workload in turn, after a first one, and end them; what they found."""
    began = time.monotonic()
    found = {engine.name: engine.heard(until) for engine in engines}
    for name, facts in found.items():
        print(f"{name}: {'ended' if facts is None else 'ready'} in {time.monotonic() - began:.0f} s", flush=True)
    for place, count in enumerate(runs):
        for what in (*["run"] * (count + 1), "end"):
            for engine in engines:
                if found[engine.name] is not None:
                    found[engine.name] = engine.asked(place, what, until)
    for engine in engines:
        engine.end()
    return {name: facts for name, facts in found.items() if facts is not None}


def rows_of(found: Mapping[str, Row]) -> list[Row]:
    """A row for each engine and workload. differ: sequences with other tokens than stock's, as roundings may decide."""
    rows, of_stock = [], {}
    for name in sorted(found, key=lambda name: name != "stock"):
        for workload in found[name]["workloads"]:
            tokens, size = workload.pop("tokens"), (workload["prompt"], workload["sequences"])
            if name == "stock":
                of_stock[size] = tokens
            right = of_stock.get(size)
            differ = None if right is None else sum(ours != theirs for ours, theirs in zip(tokens, right))
            rows.append({"engine": name, **workload, "differ": differ, "red": ""})
    return rows


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m profiling.engine", description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("--model", choices=DRAWN, default="large", help="(%(default)s)")
    add("--nnz", type=float, help="mean non-zeros per token of a model without experts (the paper's share)")
    add("--work", type=Path, required=True, metavar="FOLDER", help="for models, logs and caches")
    add("--out", type=Path, required=True, metavar="JSON", help="file for the data")
    all_names, decoded = written(list(ENGINES)), f"sequences that decode ({written(list(SIZES))})"
    add("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="NAME", help=f"({all_names})")
    add("--sizes", type=int, nargs="+", default=list(SIZES), metavar="N", help=decoded)
    add("--new", type=int, default=32, metavar="N", help="tokens that each makes (%(default)s)")
    add("--runs", type=int, default=3, metavar="N", help="timed runs of prompts (%(default)s)")
    add("--prompts", type=int, default=64, metavar="N", help="prompts of 2,048 tokens (%(default)s)")
    add("--cache-gib", type=float, default=5.0, metavar="GIB", help="of each engine (%(default)s)")
    add("--seconds", type=float, default=540, metavar="S", help="for all (%(default)s)")
    arguments = parser.parse_args()
    until, name = time.monotonic() + arguments.seconds, arguments.model
    folder = (arguments.work / (f"{name}-{arguments.nnz:g}" if arguments.nnz else name)).resolve()
    if not (folder / "prompts.json").exists():
        # in a process of its own, which frees the GPU
        write = [sys.executable, "-m", "profiling.engine.models", str(folder), name, str(arguments.nnz or "")]
        subprocess.run(write, check=True)
    workloads = [[128, size, arguments.new] for size in arguments.sizes]
    workloads += [[2048, arguments.prompts, 1]] if arguments.prompts else []
    sizes, engines = sorted({*CAPTURED, *arguments.sizes}), []
    for name in arguments.engines:
        options: dict[str, Any] = {"max_num_seqs": max(sizes), "max_model_len": LENGTH} | ENGINES[name]
        if arguments.model == "nemotron":
            options.pop("model_impl", None)
        options["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        # several engines share the GPU, so none takes a share of it
        options |= {"kv_cache_memory_bytes": int(arguments.cache_gib * 2**30), "gpu_memory_utilization": 0.1}
        spec = {"name": name, "folder": str(folder), "workloads": workloads, "options": options}
        engines.append(start(name, spec))
    # of sequences that decode a step is timed instead
    found = measure(engines, [0 if new > 1 else arguments.runs for *_, new in workloads], until)
    for name in arguments.engines:
        if name not in found:
            print(f"{name} did not finish:\n{(folder / f'{name}.log').read_text(errors='replace')[-3000:]}")
    rows = rows_of(found)
    show(rows, SHOWN)
    given = {key: value for key, value in vars(arguments).items() if key not in ("work", "out")}
    facts = [{key: value for key, value in each.items() if key != "workloads"} for each in found.values()]
    write_json(arguments.out, rows, machine=testing.machine_line(), arguments=given, engines=facts)
    return 0 if len(found) == len(engines) else 1


if __name__ == "__main__":
    raise SystemExit(main())
