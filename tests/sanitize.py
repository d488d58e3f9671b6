"""Every kernel on tiny problems, checked against the CPU operators, by itself or under compute-sanitizer.

    python tests/sanitize.py --op up_down --case light "heavy rows"
    python tests/sanitize.py --tool memcheck --portable
    python tests/sanitize.py --tool racecheck --op hybrid_forward hybrid_backward --limit-s 120
    python tests/sanitize.py --repeats 1000

With ``--tool`` this program runs itself under compute-sanitizer: the reports before an operator's line are of it. An
operator that has used up ``--limit-s`` seconds leaves its other cases out, and says so.

The GPU runs only copies, the kernels themselves and, in the operators of training, the sums and fills of torch
between them. Those operators, ``up_down`` and ``ffn`` run gated and not, ``reglu`` with its gradient, ``ffn`` by
strategy "union", screened and not. Up to 256 tokens have kernels of their own. Exit status 1 if a
result is wrong or the sanitizer reports something, else 3 if cases were left out for time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
from torch import Tensor

from twell import ops, testing, tuning
from twell._activation import ActivationName
from twell._runtime import geometry, program, specs
from twell.ops import hybrid
from twell.testing import FFN

_FORWARD = ("gate_pack", "gate_pack_few", "compact", "sampled_up", "gathered", "overflow")
_BACKWARD = ("sampled_grad", "gathered", "rank", "transpose", "weight_grad", "overflow")

# Operators, and the kernels that they launch.
OPS = {
    "gate_pack": ("gate_pack", "gate_pack_few"),
    "window": ("window",),
    "up_down": ("up_down_token",),
    "ffn_top_k": ("top_k", "pack", "up_down_token"),
    "ffn_screened": (
        *("quantize_gate", "gate_screen", "list_candidates", "sampled_gate", "compact", "sampled_up", "gathered"),
    ),
    "ffn": ("gate_pack", "gate_pack_few", "compact", "sampled_up", "gathered", "up_down_tile"),
    "ffn_row": ("gate_pack", "gate_pack_few", "up_down_token"),
    "experts": tuple(f"expert_{part}" for part in ("pairs", "pack", "down", "union", "gathered", "sum")),
    "ffn_float8": (
        *("quantize_tokens", "gate_pack", "gate_pack_few", "up_down_token", "compact", "sampled_up", "gathered"),
    ),
    "experts_float8": (
        "quantize_tokens",
        *(f"expert_{part}" for part in ("pairs", "pack", "union", "gathered", "sum")),
    ),
    "unpack": ("unpack",),
    "reglu": ("reglu",),
    "matrix_transpose": ("matrix_transpose",),
    "hybrid_forward": _FORWARD,
    "hybrid_backward": _BACKWARD,
    "hybrid_backward_accumulate": _BACKWARD,
    "sparse_up_down": ("pack", "up_down_token", "compact", "sampled_up", "gathered"),
    "sparse_up_down_forward": ("pack", *_FORWARD[2:]),
    "sparse_up_down_backward": (*_BACKWARD, "scatter"),
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

# Largest fp32 up to which sums of integers are exact in every order.
_EXACT = 2.0**24

# Exit status where cases were left out for time.
LEFT = 3

# Importing torch and loading the library under the sanitizer.
_START_S = 120


@dataclass(frozen=True)
class Case:
    """Sizes, share of positive gates, compression, biases, dtype and activation of one problem.

    levels: whether each neuron has a threshold, behind the biases of the gate; not every operator takes these.
    """

    name: str
    m: int
    k: int
    n: int
    density: float
    compression: int = 8
    biases: str = ""
    dtype: torch.dtype = torch.bfloat16
    activation: ActivationName = "relu"
    levels: bool = False

    def problem(self) -> FFN:
        how: dict[str, Any] = {"biases": self.biases, "dtype": self.dtype, "activation": self.activation}
        problem = testing.integer_problem(self.m, self.k, self.n, density=self.density, **how)
        if not self.levels:
            return problem
        levels = (torch.arange(self.n) % 4).to(self.dtype)
        return problem._replace(b_gate=torch.cat([cast(Tensor, problem.b_gate), levels]))


# take thresholds behind the biases of the gate
LEVELLED = ("gate_pack", "ffn_screened", "ffn_row", "ffn", "hybrid_forward", "hybrid_backward")


CASES = (
    Case("light", 64, 64, 256, 0.03),
    Case("empty", 64, 64, 256, 0, compression=4),
    # every row-tile spills, and the non-zeros do not fit into the hybrid format
    Case("overflow", 65, 72, 264, 1, biases="gate up down"),
    Case("overflow plain", 130, 136, 136, 0.8, compression=4, dtype=torch.float16),
    Case("partial tiles", 130, 264, 520, 0.1, compression=2, biases="gate up down", dtype=torch.float16),
    Case("one token", 1, 136, 264, 0.3, compression=4),
    Case("heavy rows", 9, 520, 2056, 0.6),
    Case("long rows", 17, 2056, 520, 0.1, biases="down"),
    Case("token tiles", 390, 72, 776, 0.05, biases="gate up down"),
    # more tokens than the kernels for few tokens take
    # the last group has three tokens, all heavy
    Case("many, heavy", 259, 136, 1032, 0.7, compression=4),
    Case("many, overflow", 257, 72, 264, 1, biases="gate up down", dtype=torch.float16),
    Case("many, long", 257, 1032, 264, 0.1, compression=2, biases="up"),
    # one CTA for each token, and clusters for heavy ones
    Case("most, heavy", 2051, 72, 1032, 0.7, compression=4),
    Case("most, long", 2049, 520, 264, 0.1, compression=2, biases="up"),
    Case("few, long", 3, 2056, 520, 0.2, biases="gate up down"),
    Case("few, overflow", 7, 264, 776, 1, compression=4),
    Case("few, empty", 8, 72, 264, 0, biases="gate down", dtype=torch.float16),
    Case("few, partial", 33, 264, 776, 0.1, compression=2, biases="gate up down", dtype=torch.float16),
    Case("most of few", 256, 136, 264, 0.1, compression=4, biases="down"),
    Case("few squares", 5, 136, 264, 0.1, biases="gate up down", activation="relu2"),
    Case("many squares", 259, 72, 264, 0.1, biases="gate up down", activation="relu2"),
    Case("most squares", 2050, 72, 264, 0.1, biases="up", activation="relu2"),
    Case("squares, overflow", 66, 72, 264, 0.9, activation="relu2"),
    Case("few levels", 9, 136, 264, 0.2, biases="gate up down", activation="fatrelu", levels=True),
    Case("levels", 259, 72, 520, 0.2, biases="gate up down", activation="fatrelu", levels=True),
    Case("levels, overflow", 130, 72, 264, 1, biases="gate", activation="fatrelu", levels=True),
)


class Call(NamedTuple):
    """A registered operator and its arguments on the CPU; it adds to ``written`` of them, which two others follow.

    changed: whether it changes the first one.
    """

    op: Any
    arguments: tuple[Any, ...]
    gated: bool = True
    written: int = 0
    changed: bool = False

    def on(self, device: str) -> Call:
        """The same with copies of all tensors there."""
        moved = [moved_to(device, a) if isinstance(a, Tensor) else a for a in self.arguments]
        return self._replace(arguments=tuple(moved))

    def run(self) -> tuple[Tensor, ...]:
        """Return the operator's results and the tensors that it changed or added to."""
        returned = self.op(*self.arguments)
        outputs = (returned,) if isinstance(returned, Tensor) else tuple(returned)
        if self.changed:
            outputs += self.arguments[:1]
        added = self.arguments[len(self.arguments) - self.written - 2 : -2] if self.written else ()
        return tuple(t for t in (*outputs, *added) if t is not None)

    def renewed(self) -> Call:
        """The same with copies of the tensors that it changes or adds to."""
        if self.changed:
            return self._replace(arguments=(self.arguments[0].clone(), *self.arguments[1:]))
        first = len(self.arguments) - self.written - 2 if self.written else len(self.arguments)
        copies = [a.clone() if isinstance(a, Tensor) else a for a in self.arguments[first:-2]]
        return self._replace(arguments=(*self.arguments[:first], *copies, *self.arguments[-2:])) if copies else self


def moved_to(device: str, t: Tensor) -> Tensor:
    """A copy with the strides of ``t``, which Tensor.to does not keep where rows have bytes between them."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t)


def calls(op: str, case: Case, problem: FFN) -> Iterator[Call]:
    """Return all calls of an operator's check."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = problem
    if case.levels and op not in LEVELLED:
        return
    if op == "reglu":
        # the remainder of a vector of eight has code of its own
        gate, up = (torch.nn.functional.linear(x, w).flatten()[: case.m * case.n - 3] for w in (w_gate, w_up))
        yield Call(ops.reglu, (gate, up, case.activation))
        yield Call(ops.reglu_backward, (up, gate, up, case.activation))
        return
    if op == "matrix_transpose":
        yield Call(ops.matrix_transpose, (w_down,))
        return
    if op.startswith("hybrid"):
        for gated in (True, False):
            yield training_call(op, case, problem, gated)
        return
    if op == "ffn_top_k":
        layer = problem._replace(w_up=None, b_up=None)
        for k in (1, 9, case.n):
            yield Call(ops.ffn_aux, (*layer, case.compression, "row", None, "topk", float(k)), False)
        return
    if op == "window":
        level = (torch.arange(case.n) % 4).to(case.dtype)
        yield Call(ops.window, (gate_of(problem), level, level - 2, level + 2), changed=True)
        return
    if op.startswith("sparse_up_down"):
        for gated in (True, False):
            yield from calls_behind_a_gate(op, case, problem, gated)
        return
    packing = Call(ops.gate_pack, (x, w_gate, b_gate, case.compression))
    if op == "gate_pack":
        yield packing
        return
    if op in ("ffn", "ffn_screened", "ffn_row"):
        for gated in (True, False):
            layer = problem if gated else problem._replace(w_up=None, b_up=None)
            strategy = "row" if op == "ffn_row" else "union"
            how = case.compression, strategy, None, case.activation, 0.0, op == "ffn_screened"
            yield Call(ops.ffn_aux, (*layer, *how), gated)
        return
    if op == "experts":
        yield from experts_calls(case, problem)
        return
    if op == "ffn_float8":
        yield from float8_calls(case, problem)
        return
    if op == "experts_float8":
        yield from experts_float8_calls(case, problem)
        return
    words, spill, _ = ops.gate_pack(*packing.arguments)
    if op == "unpack":
        yield Call(ops.unpack, (words, spill, case.n, case.compression))
    else:
        for gated in (True, False):
            weights = (w_up, w_down, b_up) if gated else (None, w_down, None)
            yield Call(getattr(ops, op), (x, words, spill, *weights, b_down, case.compression, case.activation), gated)


def experts_calls(case: Case, problem: FFN) -> Iterator[Call]:
    """Layers of three experts, one of which half of the tokens have twice; some ids are no expert's."""
    x, *layer = problem[:4]
    gate, up, down = (of_experts(w) for w in layer)
    ids, weights = routes(case)
    for gated in (True, False):
        operands = x, gate, up if gated else None, down
        # unions round squares
        for by_union in (False, True)[: 1 if gated or case.activation == "relu2" else 2]:
            wide = ids if gated else ids.int()
            yield Call(by_expert, (*operands, wide, weights, case.compression, case.activation, by_union), gated)


def of_experts(w: Tensor) -> Tensor:
    """A weight of three experts."""
    return torch.stack([w.roll(shift, 1) for shift in range(3)])


def routes(case: Case) -> tuple[Tensor, Tensor]:
    """Ids and weights of the experts of each token."""
    tokens = torch.arange(case.m)[:, None]
    ids = torch.cat((tokens % 3, tokens % 2, tokens % 5 - 1), 1)
    ids[ids == 3] = -1
    return ids, torch.tensor([0.5, 1.0, 2.0]).repeat(case.m, 1)


def experts_float8_calls(case: Case, problem: FFN) -> Iterator[Call]:
    """Experts without a gate in e4m3, with columns up to a multiple of 16; scales are powers of two."""
    x, up, _, down = (torch.nn.functional.pad(t, (0, -case.k % 16)) for t in problem[:4])
    layer = [
        operand
        for w, length, scale in ((up, case.n, 0.5), (down, x.shape[1], 2.0))
        for operand in (of_experts(w).to(torch.float8_e4m3fn), torch.full((3, length), scale))
    ]
    for wide in (True, False):
        ids, weights = routes(case)
        how = case.compression, "row", case.activation
        operands = x.bfloat16(), torch.ones(1), *layer[:2], None, None, *layer[2:], ids if wide else ids.int(), weights
        yield Call(ops.experts_float8, (*operands, *how), False)


def float8_calls(case: Case, problem: FFN) -> Iterator[Call]:
    """The layer in e4m3, with columns up to a multiple of 16; scales are powers of two."""
    x, *weights = (torch.nn.functional.pad(t, (0, -case.k % 16)) for t in problem[:4])
    gate, up, down = (weight.to(torch.float8_e4m3fn) for weight in weights)
    biases = [None if bias is None else bias.bfloat16() for bias in problem[4:]]
    if biases[2] is not None:
        biases[2] = torch.nn.functional.pad(biases[2], (0, -case.k % 16))
    by_rows, by_columns = torch.full((case.n,), 0.5), torch.full((x.shape[1],), 2.0)
    for gated in (True, False):
        of_up = (up, by_rows) if gated else (None, None)
        own = biases if gated else (biases[0], None, biases[2])
        for strategy in ("row", "union"):
            for fast in (True, False):
                layer = x.bfloat16(), torch.ones(1), gate, by_rows, *of_up, down, by_columns, *own
                how = case.compression, strategy, None, case.activation, 0.0, fast
                yield Call(ops.ffn_float8, (*layer, *how), gated)


def by_expert(*arguments: Any) -> Tensor:
    """y of experts by rows of tokens or, on a GPU, by unions of rows."""
    if arguments[0].is_cuda:
        return by_expert_on_cuda(*arguments)
    y: Tensor = ops.experts(*arguments[:7], "row", arguments[7])
    return y


def by_expert_on_cuda(*arguments: Any) -> Tensor:
    """The same on the current device."""
    program.forget()
    with mock.patch.object(tuning, "by_union_of_experts", return_value=arguments[8] and len(arguments[0]) > 1):
        own_code = sys.modules["twell.ops.experts"]._cuda
        return own_code(*arguments[:7], "row", arguments[7], 0.0, False)  # type: ignore[no-any-return]


def gate_of(problem: FFN) -> Tensor:
    """The gate before its activation, of sums that are exact."""
    wide = problem.map(Tensor.float)
    return torch.nn.functional.linear(wide.x, wide.w_gate, wide.b_gate).to(problem.x.dtype)


def calls_behind_a_gate(op: str, case: Case, problem: FFN, gated: bool) -> Iterator[Call]:
    x, _, w_up, w_down, _, b_up, b_down = problem
    up = (x, w_up, b_up) if gated else (None, None, None)
    given, how = (gate_of(problem), *up[:2], w_down, up[2], b_down), (case.compression, case.activation)
    if op == "sparse_up_down":
        for strategy in ("row", "union"):
            yield Call(ops.sparse_up_down_aux, (*given, how[0], strategy, None, how[1]), gated)
        return
    forward = (*given, how[0], 0, how[1])
    if op == "sparse_up_down_forward":
        yield Call(ops.sparse_up_down_forward, forward, gated)
        return
    kept = ops.sparse_up_down_forward(*forward)[3]
    saved = (testing.integer_upstream(problem), torch.tensor(1.0), *given[:5], kept)
    yield Call(ops.sparse_up_down_backward, (*saved, gated, True, True, case.activation), gated)


def training_call(op: str, case: Case, problem: FFN, gated: bool) -> Call:
    layer = tuple(problem if gated else problem._replace(w_up=None, b_up=None))
    if op == "hybrid_forward":
        return Call(ops.hybrid_forward, (*layer, case.compression, 0, case.activation), gated)
    *_, kept = ops.hybrid_forward(*layer, case.compression, 0, case.activation)
    saved = (testing.integer_upstream(problem), torch.tensor(1.0), *layer[:6], kept)
    if op == "hybrid_backward":
        return Call(ops.hybrid_backward, (*saved, True, True, case.activation), gated)
    mains = [None if t is None else torch.ones(t.shape) for t in layer[1:4]]
    return Call(ops.hybrid_backward_accumulate, (*saved, *mains, True, case.activation), gated, written=3)


def check(op: str, case: Case, repeats: int = 0) -> None:
    """Run one operator on the GPU, and ``repeats`` times more; AssertionError if it differs from the CPU's, or once."""
    # slices of two token tiles, so that there are several
    with mock.patch.object(geometry, "UNION_ENTRIES", 2 * geometry.TOKEN_TILE * case.n):
        for call in calls(op, case, case.problem()):
            actual, expected = (tuple(t.cpu() for t in call.on(where).run()) for where in ("cuda", "cpu"))
            compare(op, case, call.gated, actual, expected)
            repeat(op, case, call.on("cuda"), repeats)


def repeat(op: str, case: Case, call: Call, repeats: int) -> None:
    """Run a call again and again; AssertionError unless all bits of its defined results stay those of the first."""
    first = defined(op, case, call.renewed().run())
    differing = first[0].new_zeros((len(first),), dtype=torch.int64)
    for _ in range(repeats):
        again = defined(op, case, call.renewed().run())
        differing += torch.stack([(ours != theirs).any() for ours, theirs in zip(again, first, strict=True)])
    assert not differing.any(), f"runs with other bits, by output: {differing.tolist()} of {repeats}"


def defined(op: str, case: Case, outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The bytes of results, without memory that an operator leaves undefined."""
    if op == "gate_pack":
        words, spill, stats = outputs
        outputs = words, stats, ops.unpack(words, spill, case.n, case.compression)
    elif op.endswith("_forward"):
        entries, _, chunks, sizes, popularity, _ = hybrid.parts(outputs[3], case.m, case.n)
        total = int(sizes[-1])
        fits = total <= geometry.hybrid_capacity(case.m, case.n)
        outputs = (*outputs[:3], *((sizes, chunks, entries[:total]) if fits else (sizes[-1:],)), popularity)
    return [t.contiguous().view(-1).view(torch.uint8) for t in outputs]


def compare(op: str, case: Case, gated: bool, actual: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    if op == "gate_pack":
        testing.assert_packed_same(actual, expected, case.n, case.compression)
        return
    if op.endswith("_forward"):
        testing.assert_hybrid_same(actual[3], expected[3], case.m, case.n, gated)
        actual, expected = actual[:3], expected[:3]
    for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        if theirs.ndim == 0 and theirs > _EXACT:
            assert abs(ours.item() / theirs.item() - 1) <= 2.0**-22, f"output {i}: {ours.item()} for {theirs.item()}"
        else:
            testing.assert_same(ours, theirs, f"output {i}")


def run_here(names: list[str], cases: list[Case], limit_s: float, repeats: int = 0) -> int:
    """Run the checks in this process; return the exit status. None runs after a fault that ends the GPU's."""
    wrong, late = 0, 0
    for op in names:
        start = time.monotonic()
        for case in cases:
            if time.monotonic() - start > limit_s:
                late += 1
                print(f"{op:26} {case.name:15} left out", flush=True)
                continue
            try:
                check(op, case, repeats)
                verdict = "ok"
            except Exception as error:
                absent = any(said in str(error) for said in ("needs compute capability 9.0", "for sm_90a alone"))
                if isinstance(error, NotImplementedError) and absent:
                    # the portable family has none
                    print(f"{op:26} {case.name:15} left out", flush=True)
                    continue
                wrong += 1
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                verdict = f"WRONG {kind}{' '.join(str(error).split())}"
            print(f"{op:26} {case.name:15} {verdict}", flush=True)
            if verdict != "ok" and not usable():
                print("Error: the GPU no longer answers; the other checks did not run", flush=True)
                return 1
    return 1 if wrong else LEFT if late else 0


def usable() -> bool:
    """Whether the GPU still answers; after a kernel's fault it does not."""
    try:
        torch.zeros(1, device="cuda").item()
    except RuntimeError:
        return False
    return True


# Under the sanitizer


def sanitizer() -> str | None:
    """Return the path of compute-sanitizer: on PATH or in the toolkit's usual place."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def command_line(tool: str, program: str, arguments: argparse.Namespace, cases: list[Case]) -> list[str]:
    """Return the sanitizer's command for this file, with the options of ``tool`` that it knows."""
    known = subprocess.run([program, "--help"], capture_output=True, text=True, check=False).stdout
    options = list(TOOLS[tool][0])
    pairs = [pair for pair in zip(options[::2], options[1::2]) if pair[0] in known]
    chosen = [option for pair in pairs for option in pair]
    child = [sys.executable, str(Path(__file__).resolve()), "--limit-s", str(arguments.limit_s), "--op", *arguments.op]
    child += ["--case", *(case.name for case in cases), *(["--portable"] if arguments.portable else [])]
    return [program, "--tool", tool, *chosen, *child]


def run_under(tool: str, arguments: argparse.Namespace, cases: list[Case]) -> int:
    """Run the checks under the sanitizer and return the exit status."""
    program = sanitizer()
    if program is None:
        print("compute-sanitizer is not on the path; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    command = command_line(tool, program, arguments, cases)
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
    names = [case.name for case in CASES]
    parser.add_argument("--case", nargs="+", choices=names, default=names, metavar="NAME", help="default: all")
    parser.add_argument("--tool", choices=TOOLS, help="run under compute-sanitizer")
    parser.add_argument("--portable", action="store_true", help="run the kernels of the portable family on this GPU")
    parser.add_argument("--limit-s", type=float, default=60, help="seconds for each operator (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=0, metavar="N", help="more runs of each call, bit for bit alike")
    arguments = parser.parse_args(argv)
    cases = [case for case in CASES if case.name in arguments.case]
    if not has_gpu():
        print("sanitize: error: needs a CUDA device", file=sys.stderr)
        return 2
    if arguments.tool and arguments.repeats:
        parser.error("--repeats is without --tool, whose runs are slow")
    if arguments.tool:
        return run_under(arguments.tool, arguments, cases)
    if arguments.portable:
        tuning.family = lambda index: specs.PORTABLE
    return run_here(arguments.op, cases, arguments.limit_s, arguments.repeats)


if __name__ == "__main__":
    sys.exit(main())
