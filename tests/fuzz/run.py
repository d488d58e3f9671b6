"""Random layers against float64 until the time is up: sizes, patterns, layouts, strategies, and how a call is made.

    python -m tests.fuzz --budget-s 300 --seed 1 --ledger fuzz.jsonl
    python -m tests.fuzz --replay 1:357
    python -m tests.fuzz --portable --budget-s 300
    python -m tests.fuzz --summary fuzz.jsonl more.jsonl --json fuzz.json

A case is a function of the seed, its number, the kind of device and its family of kernels, and of nothing else. Half
of the cases are integers whose every sum fp32 holds in any order: each result has one right answer, float64's, rounded
once, and bits must match. The others are real numbers, and each result is held to two bounds against float64, in norm
and in every row, which ``answers`` derives from where the strategies promise to round. ``problems`` draws.

What a call returns is filled with NaN before it is called again, which must give the same bits; so must a CUDA graph.
On a GPU free memory holds NaN. The reference is plain PyTorch in float64, and shares no code with the package.

A line of the ledger is a case: its fields, verdict, seconds, and errors as shares of the bounds. A mismatch prints the
command that repeats it. Exit status 1 after mismatches, 3 after a hang.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# before CUDA starts: makes cuBLAS deterministic, for cases in which torch fills new memory with NaN
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import twell
from tests import family
from tests.fuzz.answers import (
    MAIN,
    Mismatch,
    Outputs,
    Result,
    Right,
    check,
    check_packed,
    dense,
    derive,
    dl1_of,
    same_bits,
    solve,
)
from tests.fuzz.ledger import Record, header, print_summary, read, record_of, summary
from tests.fuzz.problems import (
    DTYPES,
    SPARSE,
    WEIGHTS,
    Case,
    Layer,
    Limits,
    build,
    contiguous,
    draw,
    laid_out,
    level_of,
)
from twell import testing
from twell.strategy import costs
from twell.strategy.plan import route_of
from twell.strategy.site import AutoStrategy

MOST_MISMATCHES = 10
POISON = 0xFF


def options_of(case: Case, t: dict[str, Tensor]) -> dict[str, Any]:
    biases = {
        "b_gate" if case.gated else "b_up": t.get("b_gate"),
        "b_down": t.get("b_down"),
        **({"b_up": t.get("b_up")} if case.gated else {}),
    }
    form = case.form
    if case.by_neuron:
        form["threshold"] = level_of(case, t["x"].device)
    return {**biases, "compression": case.compression, **form}


def ffn(case: Case, t: dict[str, Tensor], **options: Any) -> Any:
    options |= options_of(case, t)
    if case.given:
        bias = options.pop("b_gate" if case.gated else "b_up", None)
        options.pop("main_grads", None)
        gate = F.linear(t["x"], t["w_gate"]) if bias is None else rounded_once(t["x"], t["w_gate"], bias)
        x, w_up = (t["x"], t["w_up"]) if case.gated else (None, None)
        return twell.sparse_up_down(x, gate, w_up, t["w_down"], **options)
    if case.gated:
        return twell.sparse_gated_ffn(t["x"], t["w_gate"], t["w_up"], t["w_down"], **options)
    return twell.sparse_ffn(t["x"], t["w_gate"], t["w_down"], **options)


def rounded_once(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A projection as the answers have it: PyTorch may round before it adds a bias."""
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.float(), weight.float(), bias.float()).to(x.dtype)


@contextlib.contextmanager
def surroundings(case: Case, device: torch.device) -> Iterator[None]:
    """Enter the case's autocast, default device and NaN-filled new memory."""
    torch.use_deterministic_algorithms(case.filled)
    default = torch.device(device if device.type == "cuda" else "meta") if case.device_set else contextlib.nullcontext()
    try:
        with torch.autocast(device.type, DTYPES[case.dtype], enabled=case.autocast), default:
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def strategy_of(case: Case) -> Any:
    """What a call of the case asks for."""
    if "+" in case.strategy:
        return route_of(case.strategy)
    return AutoStrategy() if case.strategy == "site" else case.strategy


def caller(case: Case, t: dict[str, Tensor], dy: Tensor) -> Callable[[], Outputs]:
    """What makes the call: outputs by name, gradients by that of their tensor, main gradients with ``main`` before."""
    strategy = strategy_of(case)
    dy = dy.view(t["x"].shape)

    def pack() -> Outputs:
        packed = twell.pack(
            t["x"], t["w_gate"], t.get("b_gate"), compression=case.compression, threshold=case.threshold
        )
        return {"dense": packed.unpack(), "words": packed.words, "stats": packed.stats, "nnz": packed.nnz()}

    @torch.no_grad()
    def forward() -> Outputs:
        if case.op == "forward":
            return {"y": ffn(case, t, strategy=strategy)}
        y, aux = ffn(case, t, strategy=strategy, return_aux=True)
        return {"y": y, "l1": aux.l1, "l0": aux.l0}

    def step() -> Outputs:
        leaves = {name: operand.detach().requires_grad_(name in case.wanted) for name, operand in t.items()}
        mains: dict[str, Tensor | None] = {}
        if case.mains:
            weights = [name for name in WEIGHTS if name in t]
            mains = {
                name: torch.full_like(t[name], MAIN, dtype=torch.float32) if name in case.wanted else None
                for name in weights
            }

        def layer(x: Tensor) -> Any:
            options = {"return_aux": True, "main_grads": tuple(mains.values()) or None}
            return ffn(case, {**leaves, "x": x}, strategy=strategy, **options)

        if case.checkpointed:
            y, aux = checkpoint(layer, leaves["x"], use_reentrant=False, preserve_rng_state=False)
        else:
            y, aux = layer(leaves["x"])
        upstream = [dy.to(y.dtype), torch.full_like(aux.l1, dl1_of(case) * case.m)]
        with torch.autocast(dy.device.type, enabled=False):
            found = derive([y, aux.l1], leaves, upstream)
        out = {"y": y.detach(), "l1": aux.l1.detach(), "l0": aux.l0}
        for name, gradient in found.items():
            main = mains.get(name)
            if main is not None:
                assert gradient is None, f"{name} has a main gradient and another one"
                out[f"main {name}"] = main
            elif gradient is not None:
                out[name] = gradient
        return out

    return pack if case.op == "pack" else step if case.training else forward


# Running


def poison(device: torch.device) -> None:
    """Leave NaN in the free memory that torch holds and hands out next."""
    if device.type == "cuda":
        sizes = [1 << bits for bits in range(9, 21)] * 3 + [1 << bits for bits in range(21, 27)]
        blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        for block in blocks:
            block.fill_(POISON)


def storages(outputs: Outputs, keep: list[Tensor]) -> list[Tensor]:
    """Return the bytes behind outputs, except for those shared with ``keep``."""
    kept = {t.untyped_storage().data_ptr() for t in keep}
    own = [t.untyped_storage() for t in outputs.values()]
    return [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in own if s.data_ptr() not in kept]


def spoil(outputs: Outputs, keep: list[Tensor]) -> None:
    """Fill the storage of outputs with NaN, except for the part shared with ``keep``."""
    for content in storages(outputs, keep):
        content.fill_(POISON)


def spoilt(outputs: Outputs, keep: list[Tensor]) -> bool:
    """Return whether they are as ``spoil`` left them."""
    return all(bool((content == POISON).all()) for content in storages(outputs, keep))


def run_on_side_stream(call: Callable[[], Outputs], x: Tensor) -> Outputs:
    """Make the call on its own stream, which writes ``x`` only after a delay."""
    right = x.detach().clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.fill_(math.nan)
        torch.cuda._sleep(400_000)
        x.copy_(right)
        outputs = call()
    torch.cuda.current_stream().wait_stream(stream)
    return outputs


def run(case: Case, device: torch.device, result: Result) -> None:
    """Run a case; raise Mismatch, or the call's own exception, if it fails."""
    layer = build(case, device)
    right = solve(case, layer)
    result.nonzeros = float(right.nonzeros) / max(case.m, 1)
    operands = laid_out(case, layer)
    call = caller(case, operands, layer.dy)
    keep = [layer.dy, *operands.values()]
    poison(device)
    with surroundings(case, device):
        first = run_on_side_stream(call, operands["x"]) if case.stream else call()
        outputs = {name: t.clone() for name, t in first.items()}
        spoil(first, keep)
        # in every second case the next call gets this memory; in the others it must not touch it
        held = first if case.number % 2 else {}
        del first
        again = call()
        if case.strategy != "site":
            same_bits(again, outputs, "a second call")
        if not spoilt(held, keep):
            raise Mismatch("a second call writes to what the first returned")
        del again, held
        if case.graph:
            graph, static = testing.captured(call)
            spoil(static, keep)
            graph.replay()
            # "auto" weighs the host's time in eager calls alone
            if case.strategy not in ("auto", "site"):
                same_bits(static, outputs, "a graph")
            outputs = {name: t.clone() for name, t in static.items()}
    compare(case, layer, operands, right, outputs, result)


def compare(
    case: Case, layer: Layer, operands: dict[str, Tensor], right: Right, outputs: Outputs, result: Result
) -> None:
    """Check a call's outputs against the answers, and where calls may run dense against dense PyTorch's, too."""
    if case.op == "pack":
        check_packed(case, layer, right, outputs)
        return
    baseline, plain = {}, {}
    if case.strategy not in SPARSE:
        with torch.autocast(layer.x.device.type, DTYPES[case.dtype], enabled=case.autocast):
            plain = dense(case, operands, layer.dy)
    if case.strategy != "dense" and not case.exact:
        baseline = dense(dataclasses.replace(case, autocast=False), contiguous(layer), layer.dy)
    check(case, operands["x"].shape, right, baseline, plain, outputs, result)


class Watchdog:
    """A watchdog that ends the process if a case exceeds its time limit, for example if a kernel hangs."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.replay = ""
        self.deadline = math.inf
        threading.Thread(target=self._watch, daemon=True).start()

    @contextlib.contextmanager
    def over(self, replay: str) -> Iterator[None]:
        self.replay, self.deadline = replay, time.monotonic() + self.limit_s
        try:
            yield
        finally:
            self.deadline = math.inf

    def _watch(self) -> None:
        while True:
            time.sleep(0.5)
            if time.monotonic() > self.deadline:
                print(f"HANGS for more than {self.limit_s:.0f} s: {self.replay}", flush=True)
                os._exit(3)


def attempt(case: Case, device: torch.device) -> Result:
    """Return the verdict on a case: "ok", or the error."""
    result, start = Result(), time.perf_counter()
    try:
        run(case, device, result)
        if device.type == "cuda":
            torch.cuda.synchronize()
    except Mismatch as error:
        result.verdict = str(error)
    except Exception as error:
        # any exception of a legal call is a mismatch
        result.verdict = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    result.seconds = time.perf_counter() - start
    return result


def usable(device: torch.device) -> bool:
    """Return whether the device still answers; after a kernel's fault it does not."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True


def give_back(device: torch.device) -> None:
    """Free torch's cached memory if it is half of the device's."""
    if device.type == "cuda":
        most = torch.cuda.get_device_properties(device).total_memory // 2
        if torch.cuda.memory_reserved(device) > most:
            torch.cuda.empty_cache()


def prepare(device: torch.device, portable: bool, jit: bool = False) -> Limits:
    """Set what comparisons in this process need, and return the limits of its cases."""
    # a product of integers is exact only where partial sums are not rounded to 16 bits
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    if portable:
        family.run_portable()
    return Limits.of(device.type, jit, family.is_portable(device))


def summarize(ledgers: list[Path], out: Path | None) -> int:
    """Print and write the summary of ledgers; return the exit status."""
    try:
        found = read(ledgers)
    except (OSError, EOFError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print_summary(found)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(found["mismatches"]))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=60, help="seconds after which no case begins (%(default)s)")
    parser.add_argument("--cases", type=int, help="most cases; default: as many as there is time for")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ledger", type=Path, help="file that each case is appended to, as a line of JSON")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jit", action="store_true", help="hidden sizes as well that no packaged kernel has")
    parser.add_argument("--portable", action="store_true", help=family.HELP)
    parser.add_argument("--limit-s", type=float, default=120, help="seconds after which a case hangs (%(default)s)")
    parser.add_argument("--replay", metavar="SEED:NUMBER", help="run this one case")
    parser.add_argument("--summary", nargs="+", type=Path, metavar="LEDGER", help="print what these come to, run none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="with --summary: write it as well")
    arguments = parser.parse_args(argv)
    if arguments.json and not arguments.summary:
        parser.error("--json needs --summary")
    if arguments.summary:
        return summarize(arguments.summary, arguments.json)
    for name, value in (
        ("--budget-s", arguments.budget_s),
        ("--cases", arguments.cases),
        ("--limit-s", arguments.limit_s),
    ):
        if value is not None and not value > 0:
            parser.error(f"{name} must be above 0, got {value:g}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device; --device cpu fuzzes the CPU operators")

    device = torch.device(arguments.device)
    # graphs are compared with eager calls, so both choose by the GPU's times alone
    if device.type == "cuda":
        costs.HOST_SECONDS.update({False: {}, True: {}})
    flags = f" --device {device.type}{' --jit' if arguments.jit else ''}{' --portable' if arguments.portable else ''}"
    limits = prepare(device, arguments.portable, arguments.jit)
    if arguments.replay:
        try:
            seed, number = map(int, arguments.replay.split(":"))
        except ValueError:
            parser.error(f"--replay must be SEED:NUMBER, got {arguments.replay!r}")
        case = draw(seed, number, limits, device.type == "cuda")
        print(case, flush=True)
        result = attempt(case, device)
        print(f"{result.verdict} ({result.seconds:.2f} s)", *(f"{k} {v:.3f}" for k, v in result.ratios.items()))
        return int(result.verdict != "ok")

    watchdog, records, found, start = Watchdog(arguments.limit_s), list[Record](), 0, time.monotonic()
    with open(arguments.ledger, "a") if arguments.ledger else contextlib.nullcontext() as ledger:

        def note(line: Record) -> None:
            if ledger is not None:
                print(json.dumps(line), file=ledger, flush=True)

        note(header(device, vars(arguments)))
        while len(records) != arguments.cases and time.monotonic() - start < arguments.budget_s:
            case = draw(arguments.seed, len(records), limits, device.type == "cuda")
            again = f"python -m tests.fuzz --replay {case.seed}:{case.number}{flags}"
            with watchdog.over(again):
                result = attempt(case, device)
            records.append(record_of(case, result))
            note(records[-1])
            if result.verdict != "ok":
                found += 1
                print(f"WRONG {case}\n  {result.verdict}\n  {again}", flush=True)
                if found >= MOST_MISMATCHES or not usable(device):
                    print("stopping here", flush=True)
                    break
            give_back(device)
        seconds = round(time.monotonic() - start, 3)
        note({"ended_after": seconds})
    print_summary({"seconds": seconds, **summary(records)})
    return int(found > 0)
