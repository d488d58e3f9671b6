"""A wrong count of a barrier fails the compile: who arrives is recomputed from the traced code, see sm90/checks.py."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass")

import cutlass.cute as cute
import numpy as np

from cute_kernels import __main__, compile, specs
from cute_kernels.sm90 import checks, gate_pack_few, ring

# kernels with mbarriers or named barriers of their own; the others differ in what they compute
QUICK = ("gate_pack_bf16_t48", "sampled_up_bf16", "up_down_tile_bf16_k1024", "sampled_gate_bf16")
NIGHTLY = (
    "gate_screen_bf16",
    "quantize_gate_bf16_k2048",
    "up_down_token_bf16_k1024_x2",
    "gathered_bf16_0",
    "weight_grad_bf16_plain",
    "overflow_bf16_forward",
    "overflow_bf16_weights",
)


class Traced(Exception):
    """Ends a compile after the trace."""


def traces(symbol: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[checks.Trace], Any]:
    """Return the traced kernels of a symbol, and which warps are absent from which barrier."""
    found: list[Any] = []

    def stop(module: Any, absent: Any) -> None:
        kernels = checks.parse(module.operation.get_asm(print_generic_op_form=True))
        found.extend(([checks.Trace(kernel) for kernel in kernels], absent))
        raise checks.BarrierError("traced")

    monkeypatch.setattr(checks, "check", stop)
    with pytest.raises(checks.BarrierError, match="traced"):
        compile.compile_spec(specs.spec_from_symbol(symbol))
    return found[0], found[1]


def plus(values: checks.Values, more: int) -> checks.Values:
    return values._replace(data=values.data + more)


@pytest.mark.parametrize("symbol", [*QUICK, *(pytest.param(s, marks=pytest.mark.nightly) for s in NIGHTLY)])
def test_every_wrong_count_and_every_missing_role_is_found(symbol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, absent = traces(symbol, monkeypatch)
    counted = 0
    for trace in kernels:
        places = trace.places
        assert list(checks.problems(trace, absent)) == []

        def found(changed: list[checks.Place]) -> str:
            trace.places = changed
            return "; ".join(checks.problems(trace, absent))

        for i, place in enumerate(places):
            counts = place.name == "mbarrier.init" or (place.name in ("barrier", "barrier.arrive") and place.operands)
            for more in (-1, 1, 32) if counts else ():
                number = int(place.operands[1].data.flat[0])
                wrong = place._replace(operands=[place.operands[0], plus(place.operands[1], more)])
                said = found([*places[:i], wrong, *places[i + 1 :]])
                assert str(number + more) in said, (place.name, more, said)
                counted += 1
        for place in places:
            if ("arrive" in place.name or place.name == "barrier") and place.operands:
                # the role has no such barrier, or all of its lanes arrive instead of one
                same = [
                    other.name == place.name
                    and np.array_equal(other.reached, place.reached)
                    and all(np.array_equal(a.data, b.data) for a, b in zip(other.operands[:1], place.operands[:1]))
                    for other in places
                ]
                assert found([other for other, mine in zip(places, same) if not mine]), place.name
                lanes = np.arange(trace.shape[1]) % checks.WARP
                if place.name == "mbarrier.arrive" and not place.reached[:, lanes > 0].any():
                    every = place.reached[:, np.arange(trace.shape[1]) // checks.WARP * checks.WARP]
                    assert "must expect" in found([p._replace(reached=every) if p is place else p for p in places])
    assert counted
