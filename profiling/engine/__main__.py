"""vLLM's own engine on a GPU: stock and with twell, the same prompts, tokens per second and the GPU's time of steps.

    python -m profiling.engine --model 1.5B --work FOLDER --out engine.json

Each engine is a process of its own. All start side by side, compile and capture; then each is measured alone, in turn,
while the others wait.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STOCK = {"model_impl": "transformers"}
ENGINES: dict[str, dict[str, Any]] = {
    "silu": {"kind": "silu", "plugin": False},
    "stock": {"plugin": False, "options": STOCK},
    "stock-eager": {"plugin": False, "options": STOCK | {"enforce_eager": True}},
    "auto": {},
    "dense": {"options": {"hf_overrides": {"sparsity_strategy": "dense"}}},
    "row": {"options": {"hf_overrides": {"sparsity_strategy": "row"}}},
    "union": {"options": {"hf_overrides": {"sparsity_strategy": "union"}}},
    "auto-eager": {"options": {"enforce_eager": True}},
}
SIZES = (1, 8, 32, 64, 128, 256, 512)


def start(name: str, spec: dict[str, Any], folder: Path) -> subprocess.Popen[bytes]:
    for end in ("ready", "go", "json"):
        (folder / f"{name}.{end}").unlink(missing_ok=True)
    environment = os.environ | {
        "TWELL_VLLM": "auto" if spec["plugin"] else "off",
        "VLLM_CACHE_ROOT": str(folder / "cache" / name),
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
    }
    command = [sys.executable, "-m", "profiling.engine.one", json.dumps(spec)]
    with open(folder / f"{name}.log", "wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def end(process: subprocess.Popen[bytes]) -> None:
    for kind in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, kind)
            time.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="1.5B")
    add("--work", type=Path, required=True)
    add("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    add("--sizes", type=int, nargs="+", default=list(SIZES))
    add("--new", type=int, default=32)
    add("--runs", type=int, default=2)
    add("--prompts", type=int, default=64)
    add("--cache-gib", type=float, default=5.0)
    add("--until", type=float, default=480)
    arguments = parser.parse_args()
    from profiling.engine import models

    work: Path = arguments.work
    until = time.monotonic() + arguments.until
    folder = work / arguments.model
    if not (folder / "prompts.json").exists():
        began = time.monotonic()
        subprocess.run(
            [
                sys.executable,
                "-c",
                f"from pathlib import Path; from profiling.engine import models; models.write(Path({str(folder)!r}), models.DRAWN[{arguments.model!r}])",
            ],
            check=True,
        )
        print(f"model: {time.monotonic() - began:.0f} s", flush=True)
    del models
    workloads = [[128, size, arguments.new] for size in arguments.sizes]
    if arguments.prompts:
        workloads.append([2048, arguments.prompts, 1])
    processes = {}
    for name in arguments.engines:
        given = ENGINES[name]
        spec = {
            "name": name,
            "folder": str(work),
            "model": str(folder / given.get("kind", "relu")),
            "prompts": str(folder / "prompts.json"),
            "plugin": given.get("plugin", True),
            "cache_bytes": int(arguments.cache_gib * 2**30),
            "runs": arguments.runs,
            "workloads": workloads,
            "options": {"max_num_seqs": 512, "max_model_len": 2304} | given.get("options", {}),
        }
        if not spec["options"].get("enforce_eager"):
            sizes = sorted({1, 2, 4, 8, 16, 32, 64, 128, 256, 512, *arguments.sizes})
            spec["options"]["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        processes[name] = start(name, spec, work)
        time.sleep(1)
    waiting, began = set(processes), time.monotonic()
    while waiting and time.monotonic() < until - 30:
        for name in list(waiting):
            ready, dead = (work / f"{name}.ready").exists(), processes[name].poll() is not None
            if ready or dead:
                waiting.discard(name)
                print(f"{name}: {'ready' if ready else 'ended'} after {time.monotonic() - began:.0f} s", flush=True)
        time.sleep(0.2)
    for name, process in processes.items():
        if process.poll() is None and (work / f"{name}.ready").exists() and time.monotonic() < until - 15:
            (work / f"{name}.go").touch()
            since, log = time.monotonic(), work / f"{name}.log"
            while process.poll() is None and time.monotonic() < until:
                if "MEASURED" in log.read_text(errors="replace")[-4000:]:
                    break
                time.sleep(0.2)
            print(f"{name}: measured for {time.monotonic() - since:.0f} s", flush=True)
        end(process)
    for name in processes:
        path = work / f"{name}.json"
        if not path.exists():
            print(f"==== {name} failed\n{(work / f'{name}.log').read_text(errors='replace')[-2500:]}")
            continue
        result = json.loads(path.read_text())
        print(
            f"== {name}: start {result['start_s']:.0f} s, {result['started']['model']} {result['started']['layers']}, {result['ended']['most_gib']:.2f} GiB; {result['started']['choices']} -> {result['ended']['choices']}"
        )
        for key, row in result["workloads"].items():
            graph = row.get("graph_ms") or [None]
            print(f"   {key:12} {row['per_s']:10,.0f} tokens/s {row['seconds']} graph {graph}")


if __name__ == "__main__":
    main()
