"""Every pinned case, and drawn ones, on a GPU: in memory of NaN, twice, in graphs with other tokens, on streams."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests import family
from tests.cases.drawn import PACKAGED_K, Limits, draw
from tests.cases.judged import Result
from tests.cases.layouts import laid_out
from tests.cases.pinned import ON_GPUS, PINNED
from tests.cases.verdicts import asks_nothing, attempt, judge, spoil, tensors
from tests.fuzz import usable
from twell import testing
from twell.runtime import device, geometry, host, program
from twell.testing.calls import caller
from twell.testing.case import KINDS, Case
from twell.testing.operands import build

CUDA = torch.device("cuda")
PARTS = 32
# float32 and float64 are for CPUs
EVERY = [case for case in (*PINNED, *ON_GPUS) if case.dtype in ("bf16", "fp16")]


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of integers is exact only where partial sums are not rounded to 16 bits."""
    matmul = torch.backends.cuda.matmul
    monkeypatch.setattr(matmul, "allow_bf16_reduced_precision_reduction", False)
    monkeypatch.setattr(matmul, "allow_fp16_reduced_precision_reduction", False)


def wrong(cases: list[Case], pinned: bool = False) -> dict[str, str]:
    """The cases that are not as they should be, and what is wrong; some may be absent from the portable family."""
    found: dict[str, str] = {}
    for case in cases:
        # one needs a compiler, the other has adapters
        absent = ("cutlass", case.k > PACKAGED_K[-1]), ("peft", case.rank)
        if any(needed and importlib.util.find_spec(package) is None for package, needed in absent):
            continue
        result = attempt(case, CUDA)
        # of few gates, other devices draw none that fires
        many = pinned and case.m * case.n >= 1024
        said = "no gate fires" if many and asks_nothing(case, result) else result.verdict
        if torch.cuda.memory_reserved() > 8 << 30:
            # other processes want some
            torch.cuda.empty_cache()
        if said != "ok" and not family.is_absent(NotImplementedError(said)):
            found[str(case)] = said
            if not usable(CUDA):
                break
    return found


@pytest.mark.parametrize("call", ["graph", "stream"])
@pytest.mark.parametrize("part", range(PARTS), ids="part{:02}".format)
def test_pinned(part: int, call: str) -> None:
    """A graph follows two eager calls; an x without memory of its own cannot be written."""
    cases = [case if case.x_layout == "expanded" else case.replace(call=call) for case in EVERY[part::PARTS]]
    assert wrong(cases, pinned=True) == {}


def test_pinned_by_the_runner_in_python(patched: Callable[[Any, str, Any], None]) -> None:
    patched(host, "maker", lambda: None)
    assert wrong(EVERY[:: PARTS // 2]) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_drawn(kind: str) -> None:
    limits = Limits.of("cuda", portable=family.is_portable(CUDA))
    assert wrong([draw(71, number, limits, (kind,)) for number in range(40)]) == {}


# one shape, whose non-zeros are few, none, too many for the hybrid format, and few again
FOLLOWED: list[dict[str, Any]] = [
    {"density": 0.1},
    {"pattern": "none"},
    {"pattern": "all"},
    {"density": 0.02},
    {"density": 0.1},
]


@pytest.mark.parametrize("m", [1, 8, 17, 64, 130, 600])
@pytest.mark.parametrize(
    "line",
    [
        "layer aux=True",
        "layer strategy=union aux=True",
        "layer strategy=union gated=False wants=all aux=True l1=True",
        "layer strategy=union wants=all aux=True l1=True mains=True",
    ],
)
def test_a_graph_follows_all_its_operands(line: str, m: int) -> None:
    cases = [Case.of(f"{line} m={m} k=264 n=776 seed={i}").replace(**how) for i, how in enumerate(FOLLOWED)]
    own = laid_out(cases[0], build(cases[0], CUDA))
    graph, outputs = testing.captured(caller(cases[0], own))
    for case in cases:
        o = build(case, CUDA)
        for name, t in laid_out(case, o).items():
            own[name].copy_(t)
        spoil(outputs, tensors(own))
        graph.replay()
        judge(case, o, own, {name: t.clone() for name, t in outputs.items()}, Result())


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any, str, Any], None]]:
    def change(where: Any, name: str, value: Any) -> None:
        monkeypatch.setattr(where, name, value)
        program.forget()

    yield change
    monkeypatch.undo()
    program.forget()


@pytest.mark.parametrize("ctas", [2, 20, 100])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("m", "density"), [(1000, 0.0005), (1000, 0.002), (700, 0.01), (3000, 0.004)])
def test_any_number_of_ctas_computes_every_unit(m: int, density: float, gated: bool, ctas: int, patched: Any) -> None:
    """Lists of all lengths, in rounds or in a part of one, whole or cut."""
    case = Case("layer", m=m, k=72, n=1032, density=density, gated=gated, strategy="union", wants="all", aux=True)
    patched(device, "sm_count", lambda index: ctas)
    assert wrong([case, case.replace(mains=True)]) == {}


@pytest.mark.parametrize("strategy", ["union", "union+screen"])
@pytest.mark.parametrize("pattern", ["uniform", "topics", "heavy-neurons"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("m", [300, 700, 1300, 3000])
def test_bits_do_not_depend_on_how_units_are_dealt(
    m: int, gated: bool, pattern: str, strategy: str, patched: Any
) -> None:
    """To how many CTAs; in sums of |h| neither. Slices of tokens may have sums of other parts, in a graph, too."""
    how: Any = {"pattern": pattern, "strategy": strategy, "gated": gated, "density": 0.01, "aux": True}
    case = Case("layer", m=m, k=256, n=2816, exact=False, **how)
    call = caller(case, laid_out(case, build(case, CUDA)))
    expected = call()

    def check(what: str) -> None:
        for name, t in call().items():
            testing.assert_same(t, expected[name], f"{name}, {what}")

    for ctas in (2, 3, 20, 100):
        patched(device, "sm_count", lambda index, ctas=ctas: ctas)
        check(f"{ctas} CTAs")
    for tiles in (1, 3, 7):
        patched(geometry, "UNION_ENTRIES", tiles * geometry.TOKEN_TILE * case.n)
        in_graphs = case.replace(call="graph")
        assert wrong([in_graphs, in_graphs.replace(exact=True)]) == {}
