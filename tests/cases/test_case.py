"""A case and its line, what is drawn, and that each planted error is found, of every kind."""

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import drawn, verdicts
from tests.cases.drawn import Limits, draw
from tests.cases.pinned import ON_GPUS, PINNED
from tests.cases.pinned import cases as cases_of
from tests.cases.verdicts import attempt, verdict
from twell import testing
from twell.ops import hybrid
from twell.runtime import geometry
from twell.testing import calls, comparison, formula, operands
from twell.testing import case as cases
from twell.testing.bounds import solve
from twell.testing.case import KINDS, Case

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
LIMITS = Limits.of("cpu")


# Lines


def test_lines_are_read_as_they_are_written() -> None:
    for case in [*PINNED, *ON_GPUS, *(draw(3, number, Limits.of("cuda")) for number in range(300))]:
        assert Case.of(str(case)) == case
    assert str(Case("layer")) == "layer"
    assert str(Case("layer", m=3, exact=False, threshold=2, activation="fatrelu")) == (
        "layer m=3 exact=False activation=fatrelu threshold=2.0"
    )
    assert Case.of("layer m=3  # why") == Case("layer", m=3)
    for table in (PINNED, ON_GPUS):
        assert len(set(table)) == len(table)


def test_a_line_may_be_several_cases() -> None:
    found = list(cases_of("layer m=1|9 strategy=row|union dtype=bf16/fp16 biases=/gate  # why"))
    assert [(case.m, case.strategy) for case in found] == [(1, "row"), (1, "union"), (9, "row"), (9, "union")]
    assert found == list(cases_of("layer m=1|9 strategy=row|union dtype=bf16/fp16 biases=/gate"))
    assert {case.dtype for case in ON_GPUS} == {"bf16", "fp16"}


# Draws


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_draws_stay_within_their_limits_and_reach_everything(where: str) -> None:
    limits = Limits.of(where)
    found = [draw(5, number, limits) for number in range(4000)]
    for case in found:
        # sums of very many terms are for GPUs
        assert case.n <= limits.n or (where == "cuda" and case.n in drawn.MANY_NEURONS)
        assert case.m <= limits.m or (where == "cuda" and case.m in drawn.MANY_TOKENS)
        assert case.m * case.n <= limits.gates
        assert case.m * case.n * case.k <= max(limits.work, 1025 * 16**2 * 512 * 352)
        assert case.top <= hybrid.most_of_each(case.n) or not case.wants
    own = {kind: [case for case in found if case.kind == kind] for kind in KINDS}
    usual = cases._usual()
    unreached = {
        f"{kind} {name}"
        for kind, drawn_of_kind in own.items()
        for name in KINDS[kind]
        if name not in ("wants", "threshold", "biases", "density")
        and {getattr(case, name) for case in drawn_of_kind} <= {usual[name]}
    }
    assert unreached == set()
    layers = own["layer"]
    for name in ("strategy", "pattern", "activation", "x_layout", "weight_layout", "down_layout", "bias_layout"):
        wanted = set(cases._CHOICES[name]) - ({"batchtopk", "jumprelu"} if name == "activation" else set())
        assert {getattr(case, name) for case in layers} == wanted, name
    assert {case.activation for case in own["autoencoder"]} == {"relu", "jumprelu", "topk", "batchtopk"}
    for name in ("exact", "filled", "device_set"):
        assert all({getattr(case, name) for case in of_kind} == {True, False} for of_kind in own.values()), name
    assert {next(most for most in limits.classes if case.k <= most) for case in layers} == set(limits.classes)
    choices = {(bool(case.wants), case.exact, case.is_sparse) for case in layers if case.top}
    assert choices == set(itertools.product((False, True), repeat=3))
    assert {case.m for case in layers} >= {m for m in drawn.TOKENS if m <= limits.m}
    if where == "cuda":
        assert {case.m for case in found} >= set(drawn.MANY_TOKENS)
        assert {case.n for case in found} >= set(drawn.MANY_NEURONS)
        assert {case.call for case in found} == {"eager", "graph", "stream"}


def test_a_case_is_a_function_of_seed_number_and_kinds() -> None:
    first = draw(3, 7, LIMITS)
    assert draw(3, 7, LIMITS) == first
    assert draw(4, 7, LIMITS) != first
    one, other = (operands.build(first) for _ in range(2))
    assert one.keys() == other.keys()
    for name, t in one.items():
        assert all(map(torch.equal, *(given if isinstance(given, tuple) else (given,) for given in (t, other[name]))))
    # other tokens for the same weights
    case = Case("layer", exact=False)
    again = operands.build(case, again=1)
    assert not torch.equal(again["x"], operands.build(case)["x"])
    assert torch.equal(again["w_up"], operands.build(case)["w_up"])


@pytest.mark.parametrize("kind", ["layer", "given", "pair"])
def test_both_answers_of_layers_are_one(kind: str) -> None:
    """That of all kinds, by autograd, and that with sharper bounds, by terms."""
    limits, seen = LIMITS._replace(m=130, n=520), 0
    for number in range(60):
        case = draw(8, number, limits, (kind,))
        if case.scales or case.rank or case.strategy in ("dense", "auto", "site"):
            continue
        o = operands.build(case)
        terms, whole = solve(case, o), formula.answers(case, o)
        assert float(whole["l0"].value) * max(case.m, 1) == pytest.approx(float(terms.nonzeros))
        for name, answer in terms.answers.items():
            value = answer.value.t() if name == "w_down" else answer.value
            value = value + formula.MAIN * (case.mains and name in case.weights)
            right = whole[name].value.reshape(value.shape)
            torch.testing.assert_close(value, right, rtol=1e-9, atol=1e-9, msg=f"{name} of {case}")
            seen += 1
    assert seen > 50


# Bounds are as narrow as what is promised

# so many roundings that chance averages out
MANY = "layer m=300 k=256 n=320 exact=False compression=2 density=0.2"
TRAINING = f"{MANY} strategy=union aux=True wants=w_gate+w_up+w_down mains=True"


@pytest.mark.parametrize(
    "line",
    [
        MANY,
        f"{MANY} strategy=union gated=False",
        f"{TRAINING} dtype=fp16 biases=gate l1=True".replace("0.2", "0.1"),
        f"{MANY} strategy=union aux=True wants=x+w_gate+w_up+w_down".replace("0.2", "0.5"),
        f"{MANY} strategy=union aux=True wants=all".replace("layer", "given"),
    ],
    ids=["row", "union plain", "l1", "overflow", "given"],
)
def test_errors_are_what_is_usual(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither larger nor smaller: one rounding more or fewer would show."""
    case = Case.of(line)
    monkeypatch.setattr(comparison, "LUCK", 0)
    monkeypatch.setattr(comparison, "BUDGET", 1.05)
    result = attempt(case, CPU)
    assert result.verdict == "ok"
    assert result.ratios.keys() == {"y", *(f"{'main ' if case.mains else ''}{name}" for name in case.wanted)}
    assert min(result.ratios.values()) > 0.85, result.ratios


def test_errors_that_two_products_share_are_counted() -> None:
    """The square's two gradients have the error of one gate, and weights that resemble each other add it up."""
    line = (
        "layer m=4000 k=64 n=64 exact=False activation=relu2 pattern=heavy-neurons density=0.12 coherent=True wants=x"
    )
    for seed in range(2):
        result = attempt(Case.of(f"{line} l1=True aux=True compression=2 seed={seed}"), CPU)
        assert result.verdict == "ok"
        assert 0.8 < result.ratios["x"] < 0.95


# Planted errors

Op = Callable[..., Any]
Change = Callable[[Any, tuple[Any, ...]], object]


def changes(change: Change) -> Callable[[Op], Op]:
    """A fault that changes what a function returns, in place; ``change`` gets that and the function's arguments."""

    def fault(op: Op) -> Op:
        def faulty(*arguments: Any, **options: Any) -> Any:
            out = op(*arguments, **options)
            change(out, arguments)
            return out

        return faulty

    return fault


def loses_the_last_entry(out: Any, given: tuple[Any, ...]) -> None:
    out[0].view(-1, 256 // given[3])[:, -1] = 0


def writes_no_last_row(out: Any, given: tuple[Any, ...]) -> None:
    out[0][128:] = math.nan


def ignores_overflows(out: Any, given: tuple[Any, ...]) -> None:
    """Gradients stay zero for more non-zeros than the hybrid format holds."""
    if int(hybrid.sizes(given[8], len(given[2]))[-1]) > geometry.hybrid_capacity(len(given[2]), len(given[3])):
        for gradient in out:
            gradient.zero_()


def never_the_same(op: Op) -> Op:
    calls = itertools.count()

    def projected(*arguments: Any) -> Any:
        y, l1, *rest = op(*arguments)
        return y, l1 * (1 + 1e-7 * (next(calls) % 2)), *rest

    return projected


def writes_to_one_buffer(op: Op) -> Op:
    """Results of equal shape share memory."""
    buffers: dict[Any, Tensor] = {}

    def projected(*arguments: Any) -> Any:
        y, *rest = op(*arguments)
        return buffers.setdefault((y.shape, y.dtype), y).copy_(y), *rest

    return projected


def takes_the_last(op: Op) -> Op:
    """Of equal codes those of the last tokens."""
    return lambda gate, *more: op(gate.flip(0), *more).flip(0)


def rounds_h(op: Op) -> Op:
    """The hidden state is rounded, as "union" does and "row" does not."""

    return lambda *arguments: op(*arguments[:-1], True)


def lists_one_less(out: Any, given: tuple[Any, ...]) -> None:
    """The second list of neurons is one shorter."""
    kept = hybrid.parts(given[2], *given[0].shape)
    kept.sizes[:-1].sub_(1)


OP = "twell.ops"
# of which kinds; the functions, by their modules; the error; and what is said
FAULTS: dict[str, tuple[tuple[str, ...], list[tuple[str, str]], Callable[[Op], Op], str]] = {
    "a neuron": (("layer",), [(f"{OP}.ffn", "gate_on_cpu")], changes(lambda out, given: out[:, -1:].zero_()), ""),
    "a tile of tokens": (("layer",), [(f"{OP}.ffn", "behind_on_cpu")], changes(writes_no_last_row), "y "),
    "other bits": (("layer",), [(OP, "hybrid_forward")], never_the_same, "a second call has other bits"),
    "overflow": (("layer", "pair"), [(OP, "hybrid_backward")], changes(ignores_overflows), "differs"),
    "l0": (("layer",), [(OP, "hybrid_forward")], changes(lambda out, given: out[2].add_(1)), "l0"),
    "l1": (("layer",), [(f"{OP}.ffn", "behind_on_cpu")], changes(lambda out, given: out[1][:1].add_(1)), "l1"),
    "one buffer": (("layer",), [(f"{OP}.ffn", "behind_on_cpu")], writes_to_one_buffer, "a second call writes to"),
    "mains": (("layer",), [(OP, "hybrid_backward_accumulate")],
              changes(lambda out, given: given[11].mul_(1.01)), "main w_down"),
    "the gate's gradient": (("given",), [(OP, "hybrid_backward")],
                            changes(lambda out, given: out[1].mul_(1.02)), "gate"),
    "windows": (("autoencoder",), [("twell.call.choice", "_of_thresholds")],
                changes(lambda out, given: out.mul_(1.01)), "threshold"),
    "codes": (("autoencoder",), [("twell.call.choice", "largest")], takes_the_last, ""),
    "a pair's y": (("pair",), [(OP, "hybrid_forward")], changes(lambda out, given: out[0].mul_(1.02)), "y"),
    "words": (("pack",), [(OP, "gate_pack")], changes(lambda out, given: out[0][:1, :1].add_(1)), ""),
    "spilled words": (("pack",), [(OP, "gate_pack")], changes(loses_the_last_entry), "words"),
    "statistics": (("pack",), [(OP, "gate_pack")], changes(lambda out, given: out[2][..., 1].add_(1)), "stats"),
    "lists": (("kept",), [("twell.ops.hybrid_cpu", "encode")], changes(lists_one_less), "sizes"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each within 150 cases of its kinds."""
    kinds, places, fault, text = FAULTS[name]
    for module, attribute in places:
        owner = sys.modules[module]
        monkeypatch.setattr(owner, attribute, fault(getattr(owner, attribute)))
    for number in range(150):
        said = verdict(draw(1, number, LIMITS, kinds))
        if said != "ok":
            break
    assert said != "ok"
    assert text in said, said


def is_off_in_a_rare_neuron(op: Op) -> Op:
    """The gradient of the neuron with the fewest tokens is off by 1 %; the norm of all does not show it."""

    def backward(*arguments: Any) -> Any:
        popularity = hybrid.parts(arguments[8], len(arguments[2]), len(arguments[3])).popularity
        main_up = arguments[10]
        out = op(*arguments)
        rarest = popularity.masked_fill(popularity == 0, 1 << 30).argmin()
        main_up[rarest] += 0.01 * (main_up[rarest] - formula.MAIN)
        return out

    return backward


RARE = f"{TRAINING} pattern=tokens"


def grows(place: int, factor: float) -> Callable[[Op], Op]:
    """The fourth row of one of the results, or of the only one, is larger."""
    return changes(lambda out, given: (out if isinstance(out, Tensor) else out[place])[3:4].mul_(factor))


def drops_the_largest(out: Tensor, given: tuple[Any, ...]) -> None:
    out.view(-1)[out.argmax()] = 0


def rounds_to_fewer_bits(out: Tensor, given: tuple[Any, ...]) -> None:
    out.copy_((out.view(torch.int16) & ~3).view(out.dtype))


SHORT = "layer m=128 k=64 n=256 exact=False density=0.006"


@pytest.mark.parametrize(
    ("module", "name", "fault", "line", "text"),
    [
        ("twell.ops.ffn", "behind_on_cpu", rounds_h, MANY, "y: the error is"),
        ("twell.ops.ffn", "gate_on_cpu", changes(drops_the_largest), "layer m=1 k=64 n=64 exact=False", "y: "),
        ("twell.ops.ffn", "gate_on_cpu", changes(drops_the_largest), SHORT, "y: "),
        ("twell.ops.ffn", "gate_on_cpu", changes(rounds_to_fewer_bits), SHORT, "y: "),
        (OP, "hybrid_backward_accumulate", is_off_in_a_rare_neuron, RARE, "main w_up: a row is off"),
        ("twell.ops.float8", "formula", grows(0, 1.1), "layer exact=False scales=row", "y: "),
        (f"{OP}.experts", "_sums", grows(0, 1.03), "experts exact=False experts=3", "y: "),
        (OP, "hybrid_backward", grows(1, 1.03), "given exact=False wants=gate", "gate: "),
    ],
    ids=["h", "one token", "one of few", "fewer bits", "rare neuron", "e4m3", "experts", "given"],
)
def test_a_fault_in_real_numbers_is_found(
    module: str, name: str, fault: Callable[[Op], Op], line: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.of(line)
    assert verdict(case) == "ok"
    monkeypatch.setattr(sys.modules[module], name, fault(getattr(sys.modules[module], name)))
    assert text in verdict(case)


def test_shapes_and_missing_results_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = calls.caller
    for change, says in (
        (lambda out: {name: t for name, t in out.items() if name != "w_up"}, "no w_up"),
        (lambda out: out | {"y": out["y"].float()}, "y must be [64, 48], got torch.float32 [64, 48]"),
    ):

        def changed(case: Case, t: Any, change: Any = change) -> Any:
            call = plain(case, t)
            return lambda: change(call())

        with monkeypatch.context() as patch:
            patch.setattr(verdicts, "caller", changed)
            assert verdict(Case.of("layer wants=all")) == says
    assert testing.Errors is comparison.Errors
