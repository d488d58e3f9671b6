"""The program that nsys.sh and ncu.sh profile: a few warmed-up calls of operators on a named workload.

    python -m profiling.nsight.profile_target union --workload topic29
    python -m profiling.nsight.profile_target gate_pack,union,train_backward --m 4096 --trace trace.json

Profilers record between cudaProfilerStart and cudaProfilerStop: --calls calls of each operator, in a range "profile OP"
of domain "twell". The name of a kernel stands for the operator that launches it. "auto" has settled by then.

--trace makes torch.profiler record the calls: operators with their shapes, kernels with their names.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import twell
from profiling.bench import workloads
from profiling.harness import SETTLING
from twell import ops, testing
from twell._runtime import geometry, nvtx
from twell.choose import plan
from twell.commands.request import RequestError, at_least, exit_status, pick_device
from twell.testing import FFN

Call = Callable[[], object]

# The operator that launches each kernel without an operator of its own.
KERNELS = {
    "compact": "union",
    "sampled_up": "union",
    "gathered": "union",
    "sampled_grad": "train_backward",
    "rank": "train_backward",
    "transpose": "train_backward",
    "weight_grad": "train_backward",
}

TOKENS = 16384


def gate_pack(p: FFN, compression: int, strategy: Any) -> Call:
    return lambda: ops.gate_pack(p.x, p.w_gate, p.b_gate, compression)


def unpack(p: FFN, compression: int, strategy: Any) -> Call:
    words, spill, _ = ops.gate_pack(p.x, p.w_gate, p.b_gate, compression)
    return lambda: ops.unpack(words, spill, p.w_gate.shape[0], compression)


def layer(gated: bool) -> Callable[[FFN, int, Any], Call]:
    """Calls of a whole layer."""
    return lambda p, compression, strategy: (
        lambda: testing.sparse_output(p, gated=gated, compression=compression, strategy=strategy)
    )


def step(gated: bool) -> Callable[[FFN, int, Any], Call]:
    """Training steps of a layer: forward and backward."""

    def build(p: FFN, compression: int, strategy: Any) -> Call:
        dy = testing.real_upstream(p)
        return lambda: testing.sparse_gradients(p, dy, gated=gated, compression=compression, strategy=strategy)

    return build


def train_backward(p: FFN, compression: int, strategy: Any) -> Call:
    """Calls of the operator of backward, after one forward pass."""
    dy, layer_ = testing.real_upstream(p), p[1:]
    *_, kept = ops.hybrid_forward(p.x, *layer_, compression)
    dl1 = p.x.new_zeros((), dtype=torch.float32)
    return lambda: ops.hybrid_backward(dy, dl1, p.x, *layer_[:5], kept, True, True)


def reglu(p: FFN, compression: int, strategy: Any) -> Call:
    gate, up = F.linear(p.x, p.w_gate, p.b_gate), F.linear(p.x, p.w_up, p.b_up)
    return lambda: (ops.reglu(gate, up), ops.reglu_backward(gate, gate, up))


OPS: dict[str, Callable[[FFN, int, Any], Call]] = {
    "gate_pack": gate_pack,
    "union": lambda p, compression, strategy: layer(gated=True)(p, compression, "union"),
    "unpack": unpack,
    "ffn": layer(gated=True),
    "sparse_ffn": layer(gated=False),
    "train": step(gated=True),
    "train_backward": train_backward,
    "sparse_train": step(gated=False),
    "reglu": reglu,
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("op", help=f"comma-separated, out of {', '.join(OPS)}, or kernels: {', '.join(KERNELS)}")
    add("--workload", default="topic29", help="one workload of profiling.bench (default: %(default)s)")
    add("--m", type=at_least(1), default=TOKENS, help="tokens (default: %(default)s)")
    own = "recorded layers have their own (default: %(default)s)"
    add("--k", type=at_least(8), default=testing.PAPER_HIDDEN, help=f"hidden size; {own}")
    add("--n", type=at_least(8), default=testing.PAPER_NEURONS, help=f"neurons; {own}")
    add("--compression", type=int, choices=geometry.COMPRESSIONS, default=8)
    add("--strategy", choices=plan.STRATEGIES, default="union", help="strategy of whole layers (default: %(default)s)")
    add("--calls", type=at_least(1), default=3, help="recorded calls of each operator (default: %(default)s)")
    add("--warm-up", type=at_least(1), default=3, help="calls before them (default: %(default)s)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the program out")
    add("--trace", type=Path, metavar="FILE", help="record the calls with torch.profiler, as a Chrome trace")
    arguments = parser.parse_args(argv)
    arguments.op = list(dict.fromkeys(arguments.op.split(",")))
    unknown = [op for op in arguments.op if op not in OPS and op not in KERNELS]
    if unknown:
        parser.error(f"unknown operator {', '.join(unknown)}; expected some of {', '.join((*OPS, *KERNELS))}")
    return arguments


def load(arguments: argparse.Namespace) -> FFN:
    """The requested problem. RequestError if it does not exist."""
    sources = workloads.parse([arguments.workload])
    if len(sources) != 1:
        raise RequestError(f"expected one workload, got {', '.join(source.text for source in sources)}")
    sizes = arguments.m, arguments.k, arguments.n
    return sources[0].load(*sizes, device=arguments.device, dtype=torch.bfloat16)


def record(calls: dict[str, Call], times: int, on_gpu: bool) -> None:
    """Run each call ``times`` times in a range, inside one profiler section: some profilers end at the first stop."""
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    for name, call in calls.items():
        with nvtx.range(f"profile {name}"):
            for _ in range(times):
                call()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    return exit_status("profile_target", lambda: run(arguments))


@torch.no_grad()
def run(arguments: argparse.Namespace) -> int:
    """Record the calls; return 0. Operators raise the same errors as for users."""
    on_gpu, auto = pick_device(arguments.device).type == "cuda", arguments.strategy == "auto"
    problem = load(arguments)
    calls = {}
    for name in arguments.op:
        strategy = twell.AutoStrategy() if auto else arguments.strategy
        calls[name] = OPS[KERNELS.get(name, name)](problem, arguments.compression, strategy)
        for _ in range(max(arguments.warm_up, SETTLING if auto else 0)):
            calls[name]()
            # "auto" reads its figures between calls
            if on_gpu:
                torch.cuda.synchronize()
    if arguments.trace:
        with torch.profiler.profile(record_shapes=True) as profiler:
            record(calls, arguments.calls, on_gpu)
        arguments.trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(arguments.trace))
        averages = profiler.key_averages(group_by_input_shape=True)
        print(averages.table(sort_by="device_time_total" if on_gpu else "cpu_time_total", row_limit=20))
    else:
        record(calls, arguments.calls, on_gpu)
    counted = f"{arguments.calls} call{'' if arguments.calls == 1 else 's'}"
    done = f"{counted} of {', '.join(calls)}: {arguments.workload}, {arguments.m} tokens"
    print(f"profile_target: {done}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
