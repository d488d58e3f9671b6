"""A wrong count of a barrier fails the compile: who arrives is recomputed from the traced code, see sm90/checks.py."""

from typing import Any

import pytest

pytest.importorskip("cutlass")

import cutlass.cute as cute
import numpy as np

from cute_kernels import __main__, compile, specs
from cute_kernels.sm90 import checks, expert_pack

# every kernel with mbarriers or named barriers; expert_pack is compiled below
QUICK = ("gate_pack_bf16_t48", "sampled_gate_bf16")
NIGHTLY = (
    "gate_screen_bf16",
    "quantize_gate_bf16_k16384",
    "up_down_token_bf16_k2048_x4",
    "sampled_up_bf16",
    "sampled_grad_bf16_plain",
    "gathered_bf16_0",
    "weight_grad_bf16_plain",
)


def traced(symbol: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[checks.Trace], Any]:
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


def barriers(place: checks.Place) -> set[int]:
    """Return the addresses or indices of the barriers that a place uses; none of sync_threads and of a cluster's."""
    return {int(at) for values in place.operands[:1] for at in np.unique(values.data[place.reached])}


@pytest.mark.parametrize("symbol", [*QUICK, *(pytest.param(s, marks=pytest.mark.nightly) for s in NIGHTLY)])
def test_every_wrong_count_and_every_missing_role_is_found(symbol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, absent = traced(symbol, monkeypatch)
    wrong_counts = missing_roles = 0
    for trace in kernels:
        places = [place for place in trace.places if place.operands]

        def found(changed: list[checks.Place], trace: checks.Trace = trace) -> str:
            trace.places = changed
            return "; ".join(checks.problems(trace, absent))

        assert found(trace.places) == ""
        for place in places:
            others = [other for other in places if other is not place]
            if place.name in ("mbarrier.init", "barrier", "barrier.arrive"):
                at, count = place.operands[:2]
                for more in (-1, 1, 32):
                    wrong = place._replace(operands=[at, count._replace(data=count.data + more)])
                    assert f"{count.data.flat[0] + more}" in found([*others, wrong]), (place.name, barriers(place))
                wrong_counts += 1
            if "arrive" in place.name or place.name == "barrier":
                # without this role; a barrier that no place names any more is none
                shares = [bool(barriers(other) & barriers(place)) for other in others]
                mine = [np.array_equal(other.reached, place.reached) for other in others]
                if any(s and not m for s, m in zip(shares, mine)):
                    assert found([o for o, s, m in zip(others, shares, mine) if not (s and m)]), place.name
                    missing_roles += 1
            if place.name == "mbarrier.arrive":
                leaders = np.arange(trace.shape[1]) // checks.WARP * checks.WARP
                every_lane = place._replace(reached=place.reached[:, leaders])
                if not np.array_equal(every_lane.reached, place.reached):
                    assert "must expect" in found([*others, every_lane])
    assert wrong_counts
    # one role alone
    assert missing_roles or symbol.startswith("quantize_gate")


def released_by_all(ring: Any, state: Any, lane: Any) -> Any:
    cute.arch.mbarrier_arrive(ring.empty + state.index)
    state.advance()
    return state


def changed(function: Any, **change: Any) -> Any:
    return lambda *arguments, **given: function(*arguments, **given | change)


INIT, NAMED = cute.arch.mbarrier_init, cute.arch.barrier
FAULTS = [
    (
        cute.arch,
        "mbarrier_init",
        lambda at, n: INIT(at, n + 1),
        r"full\[0\] must expect 1 arrivals, got 2; .*expect_tx",
    ),
    (cute.arch, "barrier", changed(NAMED, number_of_threads=96), "named barrier 1 must be for 128 threads .*got 96"),
    (cute.arch, "mbarrier_arrive", lambda at: None, r"empty\[0\] must expect 0 arrivals, got 4; who arrives: nobody"),
    (expert_pack, "release", released_by_all, r"empty\[0\] must expect 128 arrivals, got 4"),
    (cute.arch, "sync_threads", lambda: NAMED(barrier_id=16, number_of_threads=160), "must be 1 to 15, got 16"),
]


@pytest.mark.parametrize(("where", "name", "fault", "said"), FAULTS, ids=[name for _, name, _, _ in FAULTS])
def test_a_wrong_barrier_fails_the_report(
    where: Any, name: str, fault: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, fault)
    with pytest.raises(checks.BarrierError, match=f"twell_expert_pack_bf16_m8_0: .*{said}"):
        __main__.main(["report", "expert_pack_bf16_m8"])
