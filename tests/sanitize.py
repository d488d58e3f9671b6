"""Every kernel on tiny problems, checked against the CPU operators: what to run under compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py --op up_down

The GPU runs nothing but copies and the kernels themselves. Exit status 1 if a result is wrong.
"""

import argparse
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from twell import ops, testing
from twell.testing import FFN

OPS = ("gate_pack", "up_down", "down", "unpack")


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
    Case("overflow", 65, 72, 264, 1, biases="gate up down"),
    Case("partial tiles", 130, 264, 520, 0.1, compression=2, biases="gate up down", dtype=torch.float16),
    Case("one token", 1, 136, 264, 0.3, compression=4),
    Case("heavy rows", 9, 520, 2056, 0.6),
    Case("long rows", 17, 2056, 520, 0.1, biases="down"),
)


def on_gpu(*arguments: Tensor | int | None) -> list[Tensor | int | None]:
    return [a.cuda() if isinstance(a, Tensor) else a for a in arguments]


def on_cpu(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(output.cpu() for output in outputs)


def check(op: str, case: Case, problem: FFN) -> None:
    """Run one kernel; AssertionError if it differs from the CPU operator."""
    x, w_gate, w_up, w_down, gate_bias, up_bias, down_bias = problem
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
            print(f"{op:10} {case.name:14} {verdict}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
