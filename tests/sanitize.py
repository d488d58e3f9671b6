"""Every kernel on tiny problems, checked against the CPU operators: what to run under compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py --op up_down
    compute-sanitizer --tool synccheck python tests/sanitize.py --op hybrid_forward hybrid_backward

The GPU runs nothing but copies, the kernels themselves and, in the operators of training, the sums and fills of torch
between them. Those operators and ``up_down_union`` run gated and not, ``reglu`` with its gradient. Up to 256 tokens
have kernels of their own. Exit status 1 if a result is wrong.
"""

import argparse
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from twell import ops, testing
from twell.testing import FFN

TRAINING = ("hybrid_forward", "hybrid_backward", "hybrid_backward_accumulate")
OPS = ("gate_pack", "up_down", "down", "up_down_union", "unpack", "reglu", *TRAINING)


@dataclass(frozen=True)
class Case:
    """Sizes, share of positive gates, compression, biases and dtype of one problem."""

    name: str
    m: int
    k: int
    n: int
    density: float
    compression: int = 8
    biases: str = ""
    dtype: torch.dtype = torch.bfloat16


CASES = (
    Case("light", 64, 64, 256, 0.03),
    Case("empty", 64, 64, 256, 0, compression=4),
    # the spill of every row-tile; of the hybrid format the bitmap
    Case("overflow", 65, 72, 264, 1, biases="gate up down"),
    Case("overflow plain", 130, 136, 136, 0.8, compression=4, dtype=torch.float16),
    Case("partial tiles", 130, 264, 520, 0.1, compression=2, biases="gate up down", dtype=torch.float16),
    Case("one token", 1, 136, 264, 0.3, compression=4),
    Case("heavy rows", 9, 520, 2056, 0.6),
    Case("long rows", 17, 2056, 520, 0.1, biases="down"),
    Case("token tiles", 390, 72, 776, 0.05, biases="gate up down"),
    # more tokens than the kernels for few of them take
    Case("many, heavy", 270, 136, 264, 0.7, compression=4),
    Case("many, overflow", 257, 72, 264, 1, biases="gate up down", dtype=torch.float16),
    Case("many, long", 257, 1032, 264, 0.1, compression=2, biases="up"),
    Case("few, long", 3, 2056, 520, 0.2, biases="gate up down"),
    Case("few, overflow", 7, 264, 776, 1, compression=4),
    Case("few, empty", 8, 72, 264, 0, biases="gate down", dtype=torch.float16),
    Case("few, partial", 33, 264, 776, 0.1, compression=2, biases="gate up down", dtype=torch.float16),
    Case("most of few", 256, 136, 264, 0.1, compression=4, biases="down"),
)


def on_gpu(*arguments: Tensor | int | None) -> list[Tensor | int | None]:
    return [a.cuda() if isinstance(a, Tensor) else a for a in arguments]


def check_training(op: str, case: Case, problem: FFN, gated: bool) -> None:
    """Run one operator of training; AssertionError if it differs from the CPU operator."""
    layer = tuple(problem if gated else problem._replace(w_up=None, up_bias=None))
    y, l1, nonzeros, *kept = ops.hybrid_forward(*layer, case.compression)
    if op == "hybrid_forward":
        outputs = on_cpu(ops.hybrid_forward(*on_gpu(*layer, case.compression)))
        for name, actual, expected in zip(("y", "l1", "nonzeros"), outputs, (y, l1, nonzeros)):
            testing.assert_same(actual, expected, name)
        testing.assert_hybrid_same(outputs[3:], kept, case.m, case.n, gated)
        return
    arguments = [testing.integer_upstream(problem), torch.tensor(1.0), *layer[:6], *kept]
    if op == "hybrid_backward":
        actual, expected = (ops.hybrid_backward(*a, True, True) for a in (on_gpu(*arguments), arguments))
    else:
        arguments += [None if t is None else torch.ones(t.shape) for t in layer[1:4]]
        actual, expected = (
            (*ops.hybrid_backward_accumulate(*a, True), *(t for t in a[-3:] if t is not None))
            for a in (on_gpu(*arguments), arguments)
        )
    for i, (ours, theirs) in enumerate(zip(on_cpu(actual), expected)):
        testing.assert_same(ours, theirs, f"output {i}")


def on_cpu(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(output.cpu() for output in outputs)


def check(op: str, case: Case, problem: FFN) -> None:
    """Run one operator; AssertionError if it differs from the CPU's."""
    if op in TRAINING:
        for gated in (True, False):
            check_training(op, case, problem, gated)
        return
    x, w_gate, w_up, w_down, gate_bias, up_bias, down_bias = problem
    if op == "reglu":
        # what is left of a vector of eight has code of its own
        gate, up = (torch.nn.functional.linear(x, w).flatten()[: case.m * case.n - 3] for w in (w_gate, w_up))
        outputs = (ops.reglu(*on_gpu(gate, up)), *ops.reglu_backward(*on_gpu(up, gate, up)))
        for i, expected in enumerate((ops.reglu(gate, up), *ops.reglu_backward(up, gate, up))):
            testing.assert_same(outputs[i].cpu(), expected, f"output {i}")
        return
    gate = (x, w_gate, gate_bias, case.compression)
    packed = ops.gate_pack(*gate)
    if op == "gate_pack":
        testing.assert_packed_same(on_cpu(ops.gate_pack(*on_gpu(*gate))), packed, case.n, case.compression)
        return
    words, spill, _ = packed
    if op == "unpack":
        arguments = (words, spill, case.n, case.compression)
        testing.assert_same(ops.unpack(*on_gpu(*arguments)).cpu(), ops.unpack(*arguments), "values")
        return
    if op == "up_down_union":
        for gated in (True, False):
            weights = (w_up, w_down, up_bias) if gated else (None, w_down, None)
            arguments = (x, words, spill, *weights, down_bias, case.compression)
            y, l1, union = on_cpu(ops.up_down_union(*on_gpu(*arguments)))
            expected_y, expected_l1, expected_union = ops.up_down_union(*arguments)
            testing.assert_same(y, expected_y, "y")
            testing.assert_same(union, expected_union, "union")
            # how the sum of a tile is split is the kernel's business
            testing.assert_same(l1.sum(1), expected_l1.sum(1), "l1")
        return
    if op == "up_down":
        operator, arguments = ops.up_down, (x, words, spill, w_up, w_down, up_bias, down_bias, case.compression)
    else:
        operator, arguments = ops.down, (words, spill, w_down, down_bias, case.compression)
    for name, actual, expected in zip(("y", "l1"), on_cpu(operator(*on_gpu(*arguments))), operator(*arguments)):
        testing.assert_same(actual, expected, name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--case", nargs="+", choices=[case.name for case in CASES], help="default: all")
    arguments = parser.parse_args()
    wrong = 0
    for case in CASES:
        if arguments.case and case.name not in arguments.case:
            continue
        problem = testing.integer_problem(
            case.m, case.k, case.n, density=case.density, biases=case.biases, dtype=case.dtype
        )
        for op in arguments.op:
            try:
                check(op, case, problem)
                verdict = "ok"
            except AssertionError as error:
                wrong += 1
                verdict = f"WRONG {' '.join(str(error).split())}"
            print(f"{op:26} {case.name:15} {verdict}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
