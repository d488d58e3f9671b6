"""``plan``: every route and every refusal by facts alone, in a world where torch traces and transforms nothing."""

import inspect
import itertools
from typing import Any

import pytest
import torch

from tests.habits.refusals import sections
from twell.choose import plan as module
from twell.choose.plan import PACKED_DTYPES, STRATEGIES, Facts, Refusal, Route, plan, route_of, routed, unpackable
from twell.runtime import geometry

FP32, FP64 = torch.float32, torch.float64
TRANSFORM = "x of a transform of torch.func"
TAKES = '; strategy="dense" takes it'
MOVES = "the threshold is a tensor, which changes during training"
CALLED = "a projection is more than a weight and a bias"
WIDE = "values wider than 16 bits run dense"

# facts that differ from the defaults, strategy, reason
ROUTES: list[tuple[dict[str, Any], str, str]] = [
    ({}, "auto", ""),
    ({"training": True}, "auto", ""),
    ({"training": True, "tracing": True, "site": True}, "auto", ""),
    ({"tracing": True}, "auto", ""),
    ({"training": True, "tracing": True}, "union", "a graph that trains keeps one strategy, and nothing is known"),
    ({"imposed": "no kernels"}, "dense", "no kernels"),
    ({"imposed": "no kernels", "dtype": FP32, "device": "cpu", "training": True}, "dense", "no kernels"),
    ({"imposed": "no kernels", "strategy": "row"}, "row", "it was named"),
    ({"strategy": "row"}, "row", "it was named"),
    ({"strategy": "row", "training": True}, "union", 'training is the same by "row" and by "union"'),
    ({"strategy": "union"}, "union", "it was named"),
    ({"strategy": "union", "training": True}, "union", "it was named"),
    ({"strategy": "union", "tracing": True, "exporting": True}, "union", "it was named"),
    ({"invariant": True}, "row", "invariant=True"),
    ({"invariant": True, "strategy": "row"}, "row", "invariant=True"),
    ({"invariant": True, "imposed": "no kernels", "site": True}, "row", "invariant=True"),
    *(
        ({"dtype": dtype, "device": "cpu", "strategy": strategy, "training": training}, "dense", WIDE)
        for dtype in (FP32, FP64)
        for strategy, training in (("auto", True), ("row", False), ("union", True))
    ),
    ({"dtype": FP32, "device": "cpu", "invariant": True}, "dense", WIDE),
    # nothing limits "dense"
    (
        {"strategy": "dense", "n": 3, "k": 0, "dtype": torch.float8_e4m3fn, "device": "xpu"},
        "dense",
        "it was named",
    ),
    ({"strategy": "dense", "transformed": TRANSFORM, "onnx": True, "training": True}, "dense", "it was named"),
    ({"transformed": TRANSFORM}, "dense", "transforms of torch.func and exports of this kind"),
    ({"onnx": True}, "dense", "transforms of torch.func and exports of this kind"),
    ({"exporting": True, "training": True}, "dense", "transforms of torch.func and exports of this kind"),
    ({"exporting": True}, "auto", ""),
    ({"overridden": "x, a Noisy,", "strategy": "union"}, "dense", "x, a Noisy,"),
    ({"overridden": "x, a Noisy,", "dtype": torch.int8}, "dense", "x, a Noisy,"),
    *(({"moving": True, "strategy": strategy, "n": 3, "k": 3}, "dense", MOVES) for strategy in STRATEGIES),
    *(({"called": True, "strategy": strategy, "onnx": True}, "dense", CALLED) for strategy in STRATEGIES),
    ({"n": 65536, "k": 16384}, "auto", ""),
    *(({"compression": compression}, "auto", "") for compression in geometry.COMPRESSIONS),
    *(({"n": 8, "k": 8, "device": device}, "auto", "") for device in ("cpu", "cuda", "meta")),
]


@pytest.mark.parametrize(("facts", "strategy", "reason"), ROUTES)
def test_routes(facts: dict[str, Any], strategy: str, reason: str) -> None:
    answer = plan(Facts(**facts))
    assert isinstance(answer, Route)
    assert answer == routed(Facts(**facts))
    assert answer.strategy == strategy
    assert answer.reason.startswith(reason)
    assert bool(answer.reason) == (strategy != "auto")
    assert answer[1:4] == (None, None, 0)
    assert answer.invariant == (facts.get("invariant", False) and strategy == "row")


def test_explanations_of_refusals() -> None:
    """As ``explain`` shows them: without the name of a function, in short where calls say more."""
    shown = {
        (): f"calls raise: K must be a positive multiple of 8 for the sparse kernels, got 20{TAKES}",
        ("invariant", "training"): "calls raise: invariant=True computes inference alone",
        ("invariant", "moving"): f"calls raise with invariant=True: {MOVES}",
        ("invariant", "called"): f"calls raise with invariant=True: {CALLED}",
    }
    for flags, said in shown.items():
        answer = plan(Facts(**(dict.fromkeys(flags, True) or {"n": 264, "k": 20})))
        assert isinstance(answer, Refusal)
        assert answer.shown == said


def test_the_screen_stays_where_it_may_run() -> None:
    for strategy, training in itertools.product(("auto", "union"), (False, True)):
        assert routed(Facts(strategy=strategy, screen=True, training=training)).screen
    assert not routed(Facts(screen=True, imposed="no kernels")).screen
    assert not routed(Facts(screen=True, strategy="union", dtype=FP32, device="cpu", training=True)).screen


def test_every_fact_changes_an_answer() -> None:
    """Alone, or with others: no fact is gathered for nothing. The name is that of errors."""
    names = {"torch": torch, "geometry": geometry}
    refused = [eval(f"dict({row.change})", names) for row in sections()["plan"]]
    for fact in Facts._fields[1:]:
        default = {"n": 8, "k": 8}.get(fact, Facts._field_defaults[fact])
        changed = (
            plan(Facts(**facts)) != plan(Facts(**facts)._replace(**{fact: default}))
            for facts in (*(facts for facts, *_ in ROUTES), *refused, {"screen": True})
            if facts.get(fact, default) != default
        )
        assert any(changed), fact


def test_sizes_can_be_asked_alone() -> None:
    facts = Facts("sizes", n=264, k=20)
    refusal = unpackable(facts, instead="")
    assert refusal
    assert refusal.message == "sizes: K must be a positive multiple of 8 for the sparse kernels, got 20"
    assert unpackable(facts) == plan(facts)
    assert unpackable(facts._replace(k=32)) is None


def test_it_is_pure() -> None:
    """No function asks torch, a device or a table: of torch the module has dtypes alone."""
    used = {name for _, each in inspect.getmembers(module, inspect.isfunction) for name in each.__code__.co_names}
    assert {name for name, thing in vars(module).items() if inspect.ismodule(thing)} == {"torch", "geometry", "specs"}
    assert "torch" not in used
    assert set(PACKED_DTYPES) == {torch.bfloat16, torch.float16}


@pytest.mark.parametrize("name", ["dense", "row", "union", "union+screen", "row+invariant"])
def test_routes_by_name(name: str) -> None:
    assert route_of(name).name == name
