"""Every kernel on tiny problems, checked by their Cases, by itself or under compute-sanitizer.

    python tests/sanitize.py --op row --case light "heavy rows"
    python tests/sanitize.py --tool memcheck --portable
    python tests/sanitize.py --tool racecheck --op training mains --limit-s 120

With ``--tool`` this program runs itself under compute-sanitizer: the reports before a line are of it. An operator that
has used up ``--limit-s`` seconds leaves its other cases out, and says so.

Problems are made and results judged on the CPU: the GPU runs only copies, the kernels themselves and, in training, the
sums and fills of torch between them. Layers run gated and not. Up to 256 tokens have kernels of their own. Exit status
1 if a result is wrong or the sanitizer reports something, else 3 if cases were left out for time.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.cases.judged import Mismatch, Result
from tests.cases.verdicts import judge, same_bits
from tests.fuzz import usable
from twell import ops, testing
from twell.choose import tuning
from twell.ops.float8 import Float8
from twell.runtime import geometry, specs
from twell.testing.calls import Outputs, caller
from twell.testing.case import KINDS, Case
from twell.testing.operands import build, laid_out

# What is run: fields of its cases. Three are operators alone.
OPS: dict[str, str] = {
    "pack": "pack",
    "row": "layer aux=True",
    "union": "layer strategy=union aux=True",
    "screen": "layer strategy=union+screen aux=True",
    "levels": "layer activation=fatrelu threshold=1.0 by_neuron=True strategy=union",
    "top_k": "layer gated=False activation=topk top=9",
    "training": "layer strategy=union wants=all aux=True l1=True",
    "mains": "layer strategy=union wants=all aux=True mains=True",
    "given": "given",
    "given_training": "given strategy=union wants=all aux=True l1=True",
    "kept": "kept",
    "experts": "experts experts=3 slots=3 absent=0.1",
    "experts_alone": "experts experts=3 slots=3 strategy=row+invariant",
    "float8_row": "layer scales=row tokens=e4m3",
    "float8_union": "layer scales=row tokens=static strategy=union",
    "float8_experts": "experts experts=3 slots=3 absent=0.1 scales=row tokens=e4m3 gated=False",
    "window": "",
    "reglu": "",
    "matrix_transpose": "",
}

# What a case has besides, as far as its kind has it.
SIZES = {
    "light": "m=64 k=64 n=256 density=0.03",
    "empty": "m=64 k=64 n=256 pattern=none compression=4",
    # every row-tile spills, and the non-zeros do not fit into the hybrid format
    "overflow": "m=65 k=72 n=264 pattern=all biases=gate+up+down",
    "overflow plain": "m=130 k=136 n=136 density=0.8 compression=4 dtype=fp16",
    "partial tiles": "m=130 k=264 n=520 compression=2 biases=gate+up+down dtype=fp16",
    "one token": "m=1 k=136 n=264 density=0.3 compression=4",
    "heavy rows": "m=9 k=520 n=2056 density=0.6",
    "long rows": "m=17 k=2056 n=520 biases=down",
    "token tiles": "m=390 k=72 n=776 density=0.05 biases=gate+up+down",
    # the last group has three tokens, all heavy
    "many, heavy": "m=259 k=136 n=1032 density=0.7 compression=4",
    "many, overflow": "m=257 k=72 n=264 pattern=all biases=gate+up+down dtype=fp16",
    "many, long": "m=257 k=1032 n=264 compression=2 biases=up",
    # one CTA for each token, and clusters for heavy ones
    "most, heavy": "m=2051 k=72 n=1032 density=0.7 compression=4",
    "most, long": "m=2049 k=520 n=264 compression=2 biases=up",
    "few, long": "m=3 k=2056 n=520 density=0.2 biases=gate+up+down",
    "few, overflow": "m=7 k=264 n=776 pattern=all compression=4",
    "few, empty": "m=8 k=72 n=264 pattern=none biases=gate+down dtype=fp16",
    "few, partial": "m=33 k=264 n=776 compression=2 biases=gate+up+down dtype=fp16",
    "most of few": "m=256 k=136 n=264 compression=4 biases=down",
    "few squares": "m=5 k=136 n=264 biases=gate+up+down activation=relu2",
    "many squares": "m=259 k=72 n=264 biases=gate+up+down activation=relu2",
    "most squares": "m=2050 k=72 n=264 biases=up activation=relu2",
    "squares, overflow": "m=66 k=72 n=264 density=0.5 activation=relu2",
}

# No limit on reports, as they are counted. No backtraces of the host, which say nothing.
_COMMON = ("--report-api-errors", "no", "--error-exitcode", "99", "--print-limit", "0", "--show-backtrace", "no")
# memcheck and initcheck see a buffer's end only if it has its own allocation. Such a buffer is freed when the last
# reference goes, even while a kernel reads it, and these reads count as uninitialised. So each launch waits.
_OWN = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_LAUNCH_BLOCKING": "1"}
TOOLS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "memcheck": (_COMMON, _OWN),
    "racecheck": (_COMMON, {}),
    # bytes that a kernel leaves undefined by design are copied to the host too
    "initcheck": ((*_COMMON, "--check-api-memory-access", "no"), _OWN),
    "synccheck": (_COMMON, {}),
}

# Exit status where cases were left out for time.
LEFT = 3

# Importing torch and loading the library under the sanitizer.
_START_S = 120


def fields(size: str) -> dict[str, str]:
    return dict(word.split("=") for word in SIZES[size].split())


def cases(op: str, size: str) -> Iterator[Case]:
    kind, *own = OPS[op].split()
    words = dict(word.split("=") for word in SIZES[size].split())
    words = {
        name: value
        for name, value in words.items()
        if name in ("m", "k", "n", "dtype", "density", "pattern", *KINDS[kind])
    }
    words |= dict(word.split("=") for word in own)
    if "scales" in words:
        words |= {"dtype": "bf16", "k": str(-(-int(words["k"]) // 16) * 16)}
    for gated in ("True", "False") if "gated" in KINDS[kind] and "gated" not in words else (words.get("gated"),):
        # the first projection of a layer without a gate is "up"
        first = {"gate": "gate" if kind == "pack" else "up", "up": ""} if gated != "True" else {}
        biases = "+".join(dict.fromkeys(filter(None, (first.get(b, b) for b in words.get("biases", "").split("+")))))
        biases = "gate" * ("gate" in biases) if kind == "pack" else biases
        chosen = words | {"gated": gated, "biases": biases}
        yield Case.of(" ".join([kind, *(f"{name}={value}" for name, value in chosen.items() if value)]))


def moved_to(device: str, t: Any) -> Any:
    """A copy with the strides of ``t``, which Tensor.to does not keep where rows have bytes between them."""
    if isinstance(t, Float8):
        return Float8(moved_to(device, t.values), moved_to(device, t.scale))
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t)


def calls(op: str, size: str, device: str) -> Iterator[tuple[Any, Any]]:
    """Calls with operands on ``device``, each with what judges its results on the CPU."""
    for case in cases(op, size) if OPS[op] else ():
        o = build(case)
        operands = laid_out(case, o)
        call = caller(case, {name: moved_to(device, t) for name, t in operands.items()})
        yield call, lambda found, case=case, o=o, operands=operands: judge(case, o, operands, found, Result())
    if not OPS[op]:
        words = fields(size)
        m, k, n = (int(words[name]) for name in "mkn")
        problem = testing.integer_problem(m, k, n, dtype=torch.float16 if "fp16" in words.values() else torch.bfloat16)
        up, gate = (torch.nn.functional.linear(problem.x, w) for w in problem[1:3])
        form, run = words.get("activation", "relu"), ALONE[op]
        right = run(gate, up, problem.w_down, form)
        moved = [moved_to(device, t) for t in (gate, up, problem.w_down)]
        yield lambda: run(*moved, form), lambda found: same_bits(found, right, op)


def reglu(gate: Tensor, up: Tensor, w_down: Tensor, activation: Any) -> Outputs:
    # the remainder of a vector of eight has code of its own
    gate, up = (t.flatten()[:-3] for t in (gate, up))
    d_gate, d_up = ops.reglu_backward(up, gate, up, activation)
    return {"h": ops.reglu(gate, up, activation), "d_gate": d_gate, "d_up": d_up}


def window(gate: Tensor, up: Tensor, w_down: Tensor, activation: Any) -> Outputs:
    level, gate = (torch.arange(gate.shape[1], device=gate.device) % 4).to(gate.dtype), gate.clone()
    near, counts = ops.window(gate, level, level - 2, level + 2)
    return {"gate": gate, "near": near, "counts": counts}


def matrix_transpose(gate: Tensor, up: Tensor, w_down: Tensor, activation: Any) -> Outputs:
    return {"w_down": ops.matrix_transpose(w_down)}


ALONE = {"reglu": reglu, "window": window, "matrix_transpose": matrix_transpose}


@torch.no_grad()
def check(op: str, size: str) -> None:
    """Run the calls of an operator on the GPU; raises if one is wrong."""
    # slices of two token tiles, so that there are several
    with mock.patch.object(geometry, "UNION_ENTRIES", 2 * geometry.TOKEN_TILE * int(fields(size)["n"])):
        for call, right in calls(op, size, "cuda"):
            right({name: t.cpu() for name, t in call().items()})


def run_here(names: list[str], sizes: list[str], limit_s: float) -> int:
    """Run the checks in this process; return the exit status. None runs after a fault that ends the GPU's."""
    wrong, late = 0, 0
    for op in names:
        start = time.monotonic()
        for size in sizes:
            said = "left out"
            if time.monotonic() - start > limit_s:
                late += 1
            else:
                try:
                    check(op, size)
                    said = "ok"
                except Exception as error:
                    absent = any(each in str(error) for each in ("needs compute capability 9.0", "for sm_90a alone"))
                    # the portable family has none
                    if not (isinstance(error, NotImplementedError) and absent):
                        wrong += 1
                        kind = "" if isinstance(error, Mismatch) else f"{type(error).__name__}: "
                        said = f"WRONG {kind}{' '.join(str(error).split())}"
            print(f"{op:26} {size:15} {said}", flush=True)
            if said.startswith("WRONG") and not usable(torch.device("cuda")):
                print("Error: the GPU no longer answers; the other checks did not run", flush=True)
                return 1
    return 1 if wrong else LEFT if late else 0


# Under the sanitizer


def sanitizer() -> str | None:
    """Return the path of compute-sanitizer: on PATH or in the toolkit's usual place."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def command_line(tool: str, program: str, arguments: argparse.Namespace) -> list[str]:
    """Return the sanitizer's command for this file, with the options of ``tool`` that it knows."""
    known = subprocess.run([program, "--help"], capture_output=True, text=True, check=False).stdout
    options = list(TOOLS[tool][0])
    pairs = [pair for pair in zip(options[::2], options[1::2]) if pair[0] in known]
    chosen = [option for pair in pairs for option in pair]
    child = [sys.executable, str(Path(__file__).resolve()), "--limit-s", str(arguments.limit_s), "--op", *arguments.op]
    child += ["--case", *arguments.case, *(["--portable"] if arguments.portable else [])]
    return [program, "--tool", tool, *chosen, *child]


def run_under(tool: str, arguments: argparse.Namespace) -> int:
    program = sanitizer()
    if program is None:
        print("compute-sanitizer is not on the path; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    command = command_line(tool, program, arguments)
    print(" ".join(command), flush=True)
    # the runner in Python gives each scratch memory of its own, at whose end the tool finds what goes beyond
    environment = os.environ | {"TWELL_DEBUG": "1"} | TOOLS[tool][1]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    # a case may take as long again as its operator's limit before it is noticed
    limit_s = _START_S + 2 * arguments.limit_s * len(arguments.op)
    timer = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        status = process.wait()
    finally:
        timer.cancel()
    print(f"{tool}: exit status {status}")
    return status if status in (0, LEFT) else 1


def has_gpu() -> bool:
    return torch.cuda.is_available()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", choices=OPS, default=list(OPS), metavar="NAME", help="default: all")
    parser.add_argument("--case", nargs="+", choices=SIZES, default=list(SIZES), metavar="NAME", help="default: all")
    parser.add_argument("--tool", choices=TOOLS, help="run under compute-sanitizer")
    parser.add_argument("--portable", action="store_true", help="run the kernels of the portable family on this GPU")
    parser.add_argument("--limit-s", type=float, default=60, help="seconds for each operator (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if not has_gpu():
        print("sanitize: error: needs a CUDA device", file=sys.stderr)
        return 2
    if arguments.tool:
        return run_under(arguments.tool, arguments)
    if arguments.portable:
        tuning.family = lambda index: specs.PORTABLE
    return run_here(arguments.op, arguments.case, arguments.limit_s)


if __name__ == "__main__":
    sys.exit(main())
