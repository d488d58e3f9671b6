"""vLLM's own engine on a GPU, stock and with twell: the same prompts, tokens per second and the GPU's time of steps.

    python -m profiling.engine --model large --work FOLDER --out engine.json

Each engine is a process of its own. All start side by side, compile and capture; then they take runs of each workload
in turn, one at a time, since hosts wander. A step is the CUDA graph that the engine captured for so many sequences,
replayed while all of them decode, and timed by events. Graphs of "auto" know the figures that an earlier run of the
same model left in the user's cache: run twice for steps of a server that was started before. A model is drawn, with
grouped heads, or trained, with --text.
"nemotron" is drawn, too, a Nemotron-H with routed experts, and all its engines have vLLM's own class:

    python -m profiling.engine --model nemotron --engines stock auto row --work FOLDER --out engine.json
"""

import argparse
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from profiling.engine import mixture, models
from profiling.engine.one import COMPARED
from profiling.harness import write_json
from twell import testing

_EAGER = {"enforce_eager": True}
_STOCK = {"model_impl": "transformers"}


# Options of the engines of each name; those named first run without twell.
ENGINES: dict[str, dict[str, Any]] = {
    "stock": _STOCK,
    "stock-eager": _STOCK | _EAGER,
    "auto": {},
    "dense": {"hf_overrides": {"sparsity_strategy": "dense"}},
    "row": {"hf_overrides": {"sparsity_strategy": "row"}},
    "auto-eager": _EAGER,
}
WITHOUT = ("stock", "stock-eager")
SIZES = (1, 8, 32, 64, 128, 256, 512)


@dataclasses.dataclass
class Row:
    """One workload of one engine: prompts of ``prompt`` tokens for so many ``sequences``, each making ``new`` tokens.

    per_s: tokens made per second, or of prompts if one is made. step_ms: milliseconds of the GPU for a step; None
    without graphs. differ: sequences with other tokens than stock's, and gap: the most by which stock preferred its
    token to its next one where such a sequence first differs, in logits, in a run of its own; None where it was not
    compared.
    """

    engine: str
    prompt: int
    sequences: int
    new: int
    seconds: list[float]
    per_s: float
    step_ms: float | None
    differ: int | None = None
    gap: float | None = None
    red: str = ""


def compare(row: Row, tokens: list[list[int]], stock: Mapping[str, Any]) -> None:
    """Note where ``tokens`` differ from those of a workload of ``stock``."""
    firsts = []
    for ours, theirs, gaps in zip(tokens, stock["tokens"], stock["gaps"]):
        firsts += [gap for a, b, gap in zip(ours, theirs, gaps) if a != b][:1]
    if stock["gaps"]:
        row.differ, row.gap = len(firsts), max(firsts, default=0.0)


def start(name: str, spec: Mapping[str, Any], folder: Path) -> subprocess.Popen[bytes]:
    """Start the process of an engine."""
    for ending in ("ready", "answer", "json"):
        (folder / f"{name}.{ending}").unlink(missing_ok=True)
    environment = os.environ | {
        "TWELL_VLLM": "off" if name in WITHOUT else "auto",
        "VLLM_CACHE_ROOT": str(folder / "cache" / name),
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
    }
    command = [sys.executable, "-m", "profiling.engine.one", json.dumps(spec)]
    with open(folder / f"{name}.log", "wb") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """End an engine, with its workers."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, kind)
            time.sleep(1)


class Engine(NamedTuple):
    """The process of an engine, and its files."""

    name: str
    process: subprocess.Popen[bytes]
    folder: Path

    def wait(self, ending: str, wanted: str, until: float) -> bool:
        """Wait for a file with this ending and content; False if the process or the time ended before."""
        path = self.folder / f"{self.name}.{ending}"
        while not (path.exists() and path.read_text() == wanted):
            if self.process.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def ask(self, line: str, until: float) -> bool:
        """Send a line to the process, and wait for its answer."""
        assert self.process.stdin
        try:
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            return False
        return self.wait("answer", line, until)


def lines(workloads: int, runs: int) -> Iterator[str]:
    """What engines are asked, in order; each line is another one, as answers repeat them."""
    for place in range(workloads):
        for turn, what in enumerate((*["run"] * (runs + 1), "end")):
            yield f"{place} {what} {turn}\n"


def measure(engines: list[Engine], workloads: int, runs: int, until: float) -> list[Engine]:
    """Wait until all engines have started; let them take runs of each workload in turn; end all.

    Returns those that have answered everything.
    """
    began, asked = time.monotonic(), []
    for engine in engines:
        if engine.wait("ready", "", until):
            asked.append(engine)
        print(
            f"{engine.name}: {'ready' if engine in asked else 'ended'} after {time.monotonic() - began:.0f} s",
            flush=True,
        )
    for line in lines(workloads, runs):
        asked = [engine for engine in asked if engine.ask(line, until)]
    for engine in engines:
        end(engine.process)
    return asked


def main() -> int:
    """Measure the engines, print a line for each workload and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="large", metavar="M", help=f"{models.NAMES}; {', '.join(mixture.DRAWN)} (large)")
    add("--nnz", type=float, help="mean non-zeros per token of a drawn model (default: the paper's share)")
    add("--text", type=Path, nargs="+", default=[], metavar="PATH", help="text for a saved model")
    add("--work", type=Path, required=True, metavar="FOLDER", help="for models, logs and caches")
    add("--out", type=Path, required=True, metavar="JSON", help="file for the data")
    add("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="NAME", help=f"({' '.join(ENGINES)})")
    add("--sizes", type=int, nargs="+", default=list(SIZES), metavar="N", help="sequences that decode")
    add("--new", type=int, default=32, metavar="N", help="tokens that each makes (32)")
    add("--runs", type=int, default=3, metavar="N", help="timed runs (3)")
    add("--prompts", type=int, default=64, metavar="N", help="prompts of 2,048 tokens (64)")
    add("--cache-gib", type=float, default=5.0, metavar="GIB", help="of each engine (5)")
    add("--seconds", type=float, default=540, metavar="S", help="for all (540)")
    arguments = parser.parse_args()
    mixed = arguments.model in mixture.DRAWN
    if (not mixed and models.sizes(arguments.model) is None) != bool(arguments.text):
        parser.error("--text: expected with a saved model, and with no other")
    until, folder = time.monotonic() + arguments.seconds, arguments.work / arguments.model
    if arguments.nnz:
        folder = folder.with_name(f"{folder.name}-{arguments.nnz:g}")
    if arguments.text:
        # a saved model is known by its path and its text
        key = "\n".join(str(path.resolve()) for path in (Path(arguments.model), *arguments.text))
        folder = arguments.work / hashlib.sha256(key.encode()).hexdigest()[:12]
    if not (folder / "prompts.json").exists():
        # in a process of its own, which frees the GPU
        write = [
            sys.executable,
            "-m",
            f"profiling.engine.{'mixture' if mixed else 'models'}",
            str(folder),
            arguments.model,
            *([] if mixed else [str(arguments.nnz or "")]),
            *map(str, arguments.text),
        ]
        subprocess.run(write, check=True)
    workloads = [[128, size, arguments.new] for size in arguments.sizes]
    workloads += [[2048, arguments.prompts, 1]] if arguments.prompts else []
    sizes = sorted({1, 2, 4, 8, 16, 32, 64, 128, 256, 512, *arguments.sizes})
    engines = []
    for name in arguments.engines:
        options: dict[str, Any] = {"max_num_seqs": max(sizes), "max_model_len": models.LENGTH} | ENGINES[name]
        if mixed:
            options.pop("model_impl", None)
        if "enforce_eager" not in options:
            options["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        spec = {
            "name": name,
            "folder": str(folder),
            "model": str(folder / "relu"),
            "cache_bytes": int(arguments.cache_gib * 2**30),
            "workloads": workloads,
            "options": options,
        }
        engines.append(Engine(name, start(name, spec, folder), folder))
    whole = measure(engines, len(workloads), arguments.runs, until)
    rows, found, of_stock = [], [], {}
    for engine in engines:
        if engine not in whole:
            print(f"{engine.name} did not finish")
    # those that others are compared with come first
    for name in sorted(arguments.engines, key=lambda name: name not in COMPARED):
        path = folder / f"{name}.json"
        if not path.exists():
            log = (folder / f"{name}.log").read_text(errors="replace")
            print(f"{name} failed:\n{log[-3000:]}")
            continue
        result = json.loads(path.read_text())
        found.append({key: value for key, value in result.items() if key != "workloads"})
        for workload in result["workloads"]:
            made = {key: workload.pop(key) for key in ("tokens", "gaps")}
            size = workload["prompt"], workload["sequences"]
            if name in COMPARED:
                of_stock[name, size] = made
            row = Row(engine=name, **workload)
            if stock := of_stock.get(("stock-eager" if name.endswith("-eager") else "stock", size)):
                compare(row, made["tokens"], stock)
            rows.append(row)
            step = "" if row.step_ms is None else f", {row.step_ms:.3f} ms of the GPU for a step"
            other = f", {row.differ} differ, by {row.gap:.3f}" if row.differ else ""
            what = f"{row.sequences} prompts of {row.prompt}" if row.new == 1 else f"{row.sequences} sequences"
            print(f"{name:12} {what:24} {row.per_s:10,.0f} tokens/s{step}{other}")
    given = {key: value for key, value in vars(arguments).items() if key not in ("work", "out", "text")}
    found_rows = [dataclasses.asdict(row) for row in rows]
    write_json(arguments.out, found_rows, machine=testing.machine_line(), arguments=given, engines=found)
    return 0 if len(whole) == len(engines) else 1


if __name__ == "__main__":
    raise SystemExit(main())
