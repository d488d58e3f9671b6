"""Every kernel on tiny problems, checked by their Cases, by itself or under compute-sanitizer.

    python tests/sanitize.py --op row --case light "heavy rows"
    python tests/sanitize.py --tool memcheck --portable
    python tests/sanitize.py --tool racecheck --op training mains

With ``--tool`` this program runs itself under compute-sanitizer: the reports before a line are of it.

Problems are made and results judged on the CPU: the GPU runs only copies, the kernels themselves and, in training, the
sums and fills of torch between them. Layers run gated and not. Up to 256 tokens have kernels of their own. Exit status
1 if a result is wrong or the sanitizer reports something.
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.cases.judged import Mismatch, Result
from tests.cases.layouts import laid_out
from tests.cases.verdicts import judge, same_bits
from tests.fuzz import usable
from twell import ops, testing
from twell.choose import tuning
from twell.ops.float8 import Float8
from twell.runtime import geometry, specs
from twell.testing.calls import Outputs, caller
from twell.testing.case import KINDS, Case
from twell.testing.operands import build


def _table(text: str) -> dict[str, str]:
    """The rows of a table by their names."""
    rows = (line.partition(":") for line in text.splitlines() if line[:1] not in ("", "#"))
    return {name: fields.strip() for name, _, fields in rows}


# what is run, and its cases
OPS, SIZES = map(_table, Path(__file__).with_suffix(".txt").read_text().split("\n\n"))

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


def fields(size: str) -> dict[str, str]:
    return dict(word.split("=") for word in SIZES[size].split())


def cases(op: str, size: str) -> Iterator[Case]:
    kind, *own = OPS[op].split()
    words = {
        name: value
        for name, value in fields(size).items()
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


def run_here(names: list[str], sizes: list[str]) -> int:
    """Run the checks in this process; return the exit status. None runs after a fault that ends the GPU's."""
    wrong = 0
    for op, size in itertools.product(names, sizes):
        said = "ok"
        try:
            check(op, size)
        except Exception as error:
            absent = any(each in str(error) for each in ("needs compute capability 9.0", "for sm_90a alone"))
            said = "the portable family has none"
            if not (isinstance(error, NotImplementedError) and absent):
                wrong += 1
                kind = "" if isinstance(error, Mismatch) else f"{type(error).__name__}: "
                said = f"WRONG {kind}{' '.join(str(error).split())}"
        print(f"{op:26} {size:15} {said}", flush=True)
        if said.startswith("WRONG") and not usable(torch.device("cuda")):
            print("Error: the GPU no longer answers; the other checks did not run", flush=True)
            return 1
    return min(wrong, 1)


# Under the sanitizer


def run_under(tool: str, arguments: argparse.Namespace) -> int:
    # on PATH or in the toolkit's usual place
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        print("compute-sanitizer is not on the path; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    options, variables = TOOLS[tool]
    child = [sys.executable, str(Path(__file__).resolve()), "--op", *arguments.op, "--case", *arguments.case]
    command = [program, "--tool", tool, *options, *child, *(["--portable"] if arguments.portable else [])]
    print(" ".join(command), flush=True)
    # the runner in Python gives each scratch memory of its own, at whose end the tool finds what goes beyond
    status = subprocess.run(command, env=os.environ | {"TWELL_DEBUG": "1"} | variables, check=False).returncode
    print(f"{tool}: exit status {status}")
    return min(abs(status), 1)


def has_gpu() -> bool:
    return torch.cuda.is_available()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", choices=OPS, default=list(OPS), metavar="NAME", help="default: all")
    parser.add_argument("--case", nargs="+", choices=SIZES, default=list(SIZES), metavar="NAME", help="default: all")
    parser.add_argument("--tool", choices=TOOLS, help="run under compute-sanitizer")
    parser.add_argument("--portable", action="store_true", help="run the kernels of the portable family on this GPU")
    arguments = parser.parse_args(argv)
    if not has_gpu():
        print("sanitize: error: needs a CUDA device", file=sys.stderr)
        return 2
    if arguments.tool:
        return run_under(arguments.tool, arguments)
    if arguments.portable:
        tuning.family = lambda index: specs.PORTABLE
    return run_here(arguments.op, arguments.case)


if __name__ == "__main__":
    sys.exit(main())
