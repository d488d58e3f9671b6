"""The operator ``ffn`` on a fake GPU: kinds of calls whose way is known, and what ends that."""

import itertools
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cpu import fake_gpu
from tests.cpu.fake_gpu import FakeGpu
from twell import testing
from twell.choose import rates, site
from twell.ops.ffn import direct
from twell.testing.bits import assert_same

M, K, N = 40, 64, 256
OPERATOR: Any = sys.modules["twell.ops.ffn"]


@pytest.fixture
def long(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """x of each call whose kind was not known."""
    calls: list[Tensor] = []
    check = OPERATOR.check_operands
    monkeypatch.setattr(OPERATOR, "check_operands", lambda layer: calls.append(layer.x) or check(layer))
    return calls


def operands(m: int = M, gated: bool = True, biases: str = "") -> list[Tensor | None]:
    """Those of the operator; ``biases`` has a letter for each of g(ate), u(p) and d(own) that there is."""
    x, w_gate, w_up, w_down, *given = testing.integer_problem(m, K, N, density=0.1, biases="gate up down")
    kept = [bias if letter in biases else None for letter, bias in zip("gud", given)]
    return [x, w_gate, w_up if gated else None, w_down, *kept]


def call(given: list[Tensor | None], strategy: str = "row", weight: Tensor | None = None, **options: Any) -> Tensor:
    named = {"activation": "relu", "threshold": 0.0, "screen": False, "invariant": False, **options}
    return direct(*given, 8, strategy, weight, *named.values(), *[None] * 5, True)  # type: ignore[no-any-return]


def test_kinds_differ_by_whatever_changes_what_runs(gpu: FakeGpu, long: Any) -> None:
    ways: list[tuple[Any, ...]] = [("row", {}), ("union", {}), ("row", {"invariant": True}), ("dense", {})]
    ways += [("row", {"activation": "relu2"}), ("row", {"activation": "fatrelu", "threshold": 0.5})]
    forms = [operands(biases=biases) for biases in ("", "g", "u", "d", "gd", "ud")] + [operands(m=8)]
    for given, (strategy, options) in itertools.product(forms, ways):
        call(given, strategy, **options)
    assert len(long) == len(forms) * len(ways)
    # one bias of N values is not another
    gpu.clear()
    given = operands(biases="u")
    call(given, "row")
    assert len(long) == len(forms) * len(ways)
    ((_, packed), (_, multiplied)) = gpu.launches
    assert not any(given[5] is argument for argument in packed)
    assert any(given[5] is argument for argument in multiplied)


def test_scales_without_a_down_scale_are_refused_of_known_kinds(gpu: FakeGpu, long: Any) -> None:
    given = operands()
    call(given), call(given)
    assert len(long) == 1
    for place in range(3):
        scales: list[Any] = [None] * 4
        scales[place] = torch.ones(1)
        with pytest.raises(ValueError, match="must be None without down_scale"):
            direct(*given, 8, "row", None, "relu", 0.0, False, False, None, *scales, True)


def test_operands_that_lie_otherwise_take_the_long_way(gpu: FakeGpu, long: Any) -> None:
    given = operands()
    call(given, "row"), call(given, "row")
    assert len(long) == 1
    w_gate: Any = given[1]
    wide = torch.zeros(N, K + 8, dtype=w_gate.dtype)[:, :K]
    call([given[0], wide, *given[2:]], "row")
    assert len(long) == 2
    for strategy in ("row", "dense"):
        call(given, strategy)
        with pytest.raises(ValueError, match="w_down must be"):
            call([*given[:3], given[3][:, :32], *given[4:]], strategy)  # type: ignore[index]
        with pytest.raises(TypeError, match="w_up must be"):
            call([*given[:2], given[2].half(), *given[3:]], strategy)  # type: ignore[union-attr]


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("activation", ["relu", "relu2", "drelu"])
def test_a_dense_call_has_the_bits_of_the_first(
    merged: bool, activation: str, gpu: FakeGpu, long: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w_gate, w_up, *others = operands(biases="" if merged else "gud")
    if merged:
        w_gate, w_up = torch.cat((w_gate, w_up)).chunk(2)  # type: ignore[arg-type]
    first, second = (call([x, w_gate, w_up, *others], "dense", activation=activation) for _ in range(2))
    assert len(long) == 1
    assert torch.equal(first, second)
    # weights that are apart are not read as one, and the other way round, whichever came first
    products: list[int] = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: products.append(len(w)) or linear(x, w, b))
    apart = [x, w_gate, w_up.clone(), *others]  # type: ignore[union-attr]
    for given, one in ((apart, False), ([x, w_gate, w_up, *others], merged), (apart, False)):
        products.clear()
        assert_same(call(given, "dense", activation=activation), first)
        assert products[:-1] == ([2 * N] if one else [N, N])


def test_a_captured_call_takes_the_long_way(gpu: FakeGpu, long: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands()
    call(given)
    monkeypatch.setattr("twell._modes.stream_captures", lambda: True)
    call(given), call(given)
    assert len(long) == 3


def test_auto_keeps_its_schedule_and_its_choices(gpu: FakeGpu, long: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPERATOR, "imposed_on_call", lambda kind, index: "")
    monkeypatch.setattr(site, "Transfer", fake_gpu.Arrived)
    given = operands()
    weight: Any = given[1]
    found = site.site_of(weight, True)
    for _ in range(200):
        call(given, "auto", weight)
    # calls 0, 1, 2, 4, ..., 64, 128 and 192 measure, and the next ones decide by that
    assert 10 <= len(long) <= 18
    (row,) = found.explain()
    assert row.calls == 200
    # another choice for calls of this kind ends what is known
    other = rates.Decision("dense" if row.strategy != "dense" else "row", "a test", {})
    monkeypatch.setattr(rates, "decide", lambda *_: other)
    (bucket,) = found._buckets.values()
    while not found._is_due(bucket):
        call(given, "auto", weight)
    call(given, "auto", weight)
    gpu.clear()
    before = len(long)
    call(given, "auto", weight), call(given, "auto", weight)
    assert len(long) == before + 1
    assert bool(gpu.launches) == (other.strategy != "dense")
