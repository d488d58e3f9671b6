"""Steering L1 to a number of non-zeros, of the hidden state or the gate, and FATReLU's threshold."""

import copy
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch._dynamo.testing
import torch.distributed as dist
import torch.nn.functional as F
from recipe_models import Adapted, Waits, gate_l1
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.habits.habits import default_dtype
from twell import recipe
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.recipe import TargetSparsity, TargetThreshold, _terms
from twell.recipe._terms import Input

K, N, M = 16, 64, 128

pytestmark = pytest.mark.usefixtures("seeded")


class Model(nn.Module):
    """Two residual layers over [M, K]. With biases: without, a symmetric input fires half of the neurons."""

    def __init__(self, activation: Any = "relu", layer: Any = SparseGatedMLP, **options: Any) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(layer(K, N, True, activation=activation, **options) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for mlp in self.mlps:
            x = x + mlp(F.layer_norm(x, (K,)))
        return x


def batches(seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, K, K, generator=generator) / math.sqrt(K)
    while True:
        x = torch.randn(M, K, generator=generator)
        yield x, x + torch.sin(2 * x @ a) @ b


def train(model: nn.Module, target: Any, steps: int, rate: float = 5e-3) -> float:
    """Train with a learning rate that falls to 0; the mean non-zeros afterwards."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for step, (x, y) in zip(range(steps), batches()):
        loss = (model(x) - y).square().mean() + target.term(model)
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.step()
        optimizer.zero_grad()
        target.update()
    reached: float = target.read()["non_zeros"]
    return reached


@pytest.mark.parametrize(("activation", "of", "nnz"), [("relu", "hidden", 3), ("drelu", "gate", 12)])
def test_training_reaches_the_target(activation: Any, of: Any, nnz: int) -> None:
    model = Model(activation)
    recipe.record_aux(model, inputs=of == "gate")
    reached = train(model, TargetSparsity(nnz, 240, of=of), 240)
    assert reached == pytest.approx(nnz, rel=0.2)
    # it did not begin there
    fresh = Model(activation)
    recipe.record_aux(fresh, inputs=of == "gate")
    assert train(fresh, TargetSparsity(nnz, 240, of=of), 1) > 2 * nnz


@pytest.mark.parametrize("kind", ["gate", "threshold"])
def test_a_small_learning_rate_does_not_wind_the_coefficient_up(kind: str, caplog: Any) -> None:
    """The model cannot follow; the coefficient came to 1e5 and more, and the L1 term to as many nats."""
    model = Model()
    recipe.record_aux(model, inputs=True)
    of: Any = kind
    target: Any = TargetThreshold(model, 12, 240) if kind == "threshold" else TargetSparsity(12, 240, of=of)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    for _, (x, y) in zip(range(240), batches()):
        loss = (model(x) - y).square().mean()
        term = target.term(model)
        # the coefficient is that of the batch before
        assert term < 1.25 * 3
        (loss + term).backward()
        optimizer.step()
        optimizer.zero_grad()
        target.update()
    assert not caplog.records
    target.read()
    (record,) = caplog.records
    assert "come to 3 nats" in record.getMessage()
    assert "a larger learning rate or more steps help" in record.getMessage()
    target.read()
    assert len(caplog.records) == 1


def test_the_coefficient_falls_at_once_from_its_most() -> None:
    """What it did not sum needs no unwinding."""
    layer = SparseMLP(K, N, bias=True)
    recipe.record_aux(layer)
    target, x = TargetSparsity(4, 100), torch.randn(M, K)

    def step() -> float:
        layer(x)
        target.term(layer)
        target.update()
        return target.read()["coefficient"]

    # nothing is trained, then nearly all is silent at once
    highest = max(step() for _ in range(60))
    layer.up_proj.bias.data.fill_(-1.5)
    assert step() < highest / 3
    assert step() < highest / 3


def spoiled(x: Tensor, how: str) -> Tensor:
    return x[:0] if how == "empty" else torch.full_like(x, {"nan": math.nan, "infinite": math.inf}[how])


@pytest.mark.parametrize(
    ("kind", "how", "bad"),
    [("hidden", "nan", 2), ("gates", "infinite", 0), ("threshold", "nan", 2), ("hidden", "empty", 0)],
)
def test_steps_without_a_figure_are_ignored(kind: str, how: str, bad: int) -> None:
    """A NaN stayed in the coefficient for good, and a first batch without tokens made it 4e8."""

    def run(steps: list[str]) -> dict[str, float]:
        torch.manual_seed(0)
        model = Model()
        recipe.record_aux(model, inputs=True)
        target = {"hidden": hidden, "gates": gates, "threshold": threshold}[kind](model)
        generator = batches()
        for step in steps:
            x = next(generator)[0] if step == "good" else spoiled(torch.zeros(M, K), step)
            before = target.read()
            model(x)
            target.term(model)
            target.update()
            assert step == "good" or bad == 0 or target.read() == before
        found: dict[str, float] = target.read()
        return found

    steps = ["good"] * 4
    steps[bad] = how
    found = run(steps)
    assert all(math.isfinite(value) for value in found.values())
    usual = run(["good"] * 4)
    assert found["coefficient"] == pytest.approx(usual["coefficient"], rel=0.9)


@pytest.mark.parametrize("of", ["hidden", "gate"])
def test_experts_without_tokens_are_not_part_of_the_mean(of: Any) -> None:
    experts = nn.ModuleList(SparseGatedMLP(K, N) for _ in range(4))
    recipe.record_aux(experts, inputs=True)
    target, x = TargetSparsity(5, 10, of=of), torch.randn(40, K)
    for expert, tokens in zip(experts, (40, 0, 8, 0)):
        expert(x[:tokens])
    target.term(experts).backward()
    target.update()
    right = [float((experts[i].gate_proj(x[:m]) > 0).sum()) / m for i, m in ((0, 40), (2, 8))]
    assert target.read()["non_zeros"] == pytest.approx(sum(right) / 2, rel=1e-5)


@pytest.mark.parametrize("kind", ["hidden", "gate", "threshold"])
def test_padding_is_left_out_of_a_target(kind: Any) -> None:
    x, mask, found = torch.randn(M, K), torch.arange(M) % 3 > 0, []
    for padded in (False, True):
        torch.manual_seed(0)
        model = Model(strategy="union")
        recipe.record_aux(model, inputs=True)
        target = TargetThreshold(model, 5, 10) if kind == "threshold" else TargetSparsity(5, 10, of=kind)
        for _ in range(2):
            model(x if padded else x[mask])
            term = target.term(model, attention_mask=mask if padded else None)
            term.backward()
            target.update()
        found.append([term.item(), *target.read().values(), *(p.grad for p in model.mlps[0].up_proj.parameters())])
    torch.testing.assert_close(*found)


def skipping_ranks(kind: str) -> dict[str, float]:
    """Ranks call other experts, and at last none at all."""
    torch.manual_seed(0)
    model, rank = Model(strategy="union"), dist.get_rank()
    recipe.record_aux(model, inputs=True)
    tracker = recipe.SparsityTracker(model, every=1)
    target, x = TargetSparsity(5, 10, of="hidden" if kind == "mask" else "gate"), next(batches(rank))[0]
    mask = torch.arange(M) < 100
    for step in range(3):
        calls = ({rank}, {0, 1}, {1} if rank else set())[step]
        recipe.clear_aux(model, skippable=True)
        with tracker.watch(step):
            y = sum((model.mlps[i](x) for i in calls), x)
        term = target.term(model, attention_mask=mask if kind == "mask" else None)
        if calls:
            (y.square().mean() + term).backward()
        target.update()
        tracker.dead()
    assert tracker.read().layers[1].tokens
    return target.read()


def test_the_first_term_has_its_value_and_others_their_coefficient() -> None:
    model, (x, _) = Model(), next(batches())
    recipe.record_aux(model)
    target = TargetSparsity(5, 100)
    assert math.isnan(target.read()["coefficient"])
    model(x)
    l1 = recipe.l1_term(model)
    # two micro-batches of a step have the same coefficient
    for _ in range(2):
        model(x)
        torch.testing.assert_close(target.term(model), torch.tensor(0.01))
    assert target.read()["coefficient"] == pytest.approx(0.01 / float(l1.detach()))
    target.update()
    model(x)
    torch.testing.assert_close(target.term(model), target.read()["coefficient"] * l1)
    assert target.read()["non_zeros"] == pytest.approx(float(model.mlps[0](x, True)[1].l0), rel=0.5)


def threshold(model: nn.Module) -> Any:
    return TargetThreshold(model, 5, 10)


def gates(model: nn.Module) -> Any:
    return TargetSparsity(5, 10, of="gate")


def hidden(model: nn.Module) -> Any:
    return TargetSparsity(5, 10)


@pytest.mark.parametrize("kind", [hidden, gates, threshold])
def test_no_step_waits(kind: Any) -> None:
    model = Model(strategy="dense")
    recipe.record_aux(model, inputs=True)
    target = kind(model)
    (x, y) = next(batches())
    with Waits():
        for _ in range(3):
            ((model(x) - y).square().mean() + target.term(model)).backward()
            target.update()
    with pytest.raises(AssertionError, match=r"^aten\._local_scalar_dense"), Waits():
        float(x.sum())


def ranks_share(device: torch.device, folder: Path) -> None:
    torch.manual_seed(0)
    model, rank = Model(), dist.get_rank()
    recipe.record_aux(model)
    target = TargetSparsity(5, 10)
    terms = []
    for x, _ in [next(batches(seed)) for seed in (2 + rank, 4 + rank)]:
        model(x * (1 + rank))
        terms.append(float(target.term(model)))
        target.update()
    recipe.record_aux(model, inputs=True)
    moving = TargetThreshold(model, 5, 10)
    model(next(batches(6 + rank))[0])
    moving.term(model)
    moving.update()
    # collectives of figures and windows must not wait for a layer that another rank skips
    skipping = [skipping_ranks(kind) for kind in ("gate", "mask")]
    shared = {"threshold": moving.settle(), "skipping": skipping, **target.read()}
    torch.save((terms, shared), folder / f"result{rank}")


def test_ranks_share_figures_and_coefficients(tmp_path: Path) -> None:
    ranks.run(2, ranks_share, tmp_path, folder=tmp_path)
    (first, shared), (second, other) = (torch.load(tmp_path / f"result{rank}") for rank in range(2))
    assert shared == other
    assert shared["threshold"] > 0
    # each has the term of its own tokens, and they are as large as asked for on the average
    assert first != second
    assert first[0] + second[0] == pytest.approx(0.02, rel=1e-5)


def test_a_target_says_what_is_missing() -> None:
    model = Model()
    with pytest.raises(RuntimeError, match="update needs a term since the last update"):
        TargetSparsity(5, 10, of="gate").update()
    recipe.record_aux(model.eval(), inputs=True)
    for each in (TargetSparsity(5, 10), TargetThreshold(model, 5, 10)):
        model(torch.randn(M, K))
        name = type(each).__name__
        with pytest.raises(RuntimeError, match=rf"^{name}.term: mlps\.0 recorded nothing: it is in eval mode"):
            each.term(model)
    # with dReLU a silent up projection makes the hidden state as small
    model = Model("drelu")
    recipe.record_aux(model)
    model(torch.randn(M, K))
    with pytest.raises(ValueError, match='of must be "gate" for layers with \'drelu\', got "hidden"'):
        TargetSparsity(3, 240).term(model)


# Gates of kept inputs


@pytest.mark.parametrize(
    ("layer", "strategy"), [(SparseGatedMLP(K, N, bias=True), "union"), (SparseMLP(K, N), "dense")]
)
def test_gates_are_those_of_tokens_from_begin_to_end(layer: Any, strategy: Any) -> None:
    layer.strategy = strategy
    recipe.record_aux(layer, inputs=True)
    x = torch.randn(5, 14, K, requires_grad=True)
    gates = layer.gate_proj if isinstance(layer, SparseGatedMLP) else layer.up_proj
    gate = F.relu(gates(x)).flatten(0, 1)
    # one of each fifth, then all
    for most, rows in ((5, [0, 16, 33, 50, 67]), (1000, [*range(70)])):
        layer(x)
        recipe.clear_aux(layer)
        layer(x)
        torch.testing.assert_close(gate_l1(layer, most), gate[rows].sum(1).mean())
    layer(x)
    gate_l1(layer).backward()
    assert gates.weight.grad.isfinite().all()
    assert gates.weight.grad.any()
    with pytest.raises(RuntimeError, match="kept no input since the last read"):
        gate_l1(layer)


@pytest.mark.parametrize("of", ["hidden", "gate"])
def test_terms_of_inputs_take_no_main_gradients(of: Any) -> None:
    model, x, mask = Model(strategy="union"), torch.randn(M, K), torch.arange(M) % 2
    recipe.record_aux(model, inputs=True)
    model(x)
    model.mlps[1].accumulate_main_grad = True
    with pytest.raises(NotImplementedError, match=r"no target of the gate, .* got one for mlps\.1"):
        TargetSparsity(5, 10, of=of).term(model, attention_mask=mask)


def test_autocast_and_adapted_projections_decide_the_gates() -> None:
    layer, x = SparseMLP(K, N), torch.randn(M, K)
    recipe.record_aux(layer, inputs=True)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
        wanted = F.relu(layer.up_proj(x)).float().sum(1).mean()
    term = gate_l1(layer)
    assert torch.equal(term, wanted)
    term.backward()
    assert layer.up_proj.weight.grad is not None
    assert layer.up_proj.weight.grad.dtype == torch.float32
    layer.up_proj = Adapted(K, N)
    layer(x)
    torch.testing.assert_close(gate_l1(layer), F.relu(layer.up_proj(x)).sum(1).mean())


def test_gates_are_not_at_the_same_places_of_all_sequences() -> None:
    """A model silences the places that L1 sees, and no others."""
    layer = SparseMLP(1, 8, strategy="dense")
    layer.up_proj.weight.data.fill_(1.0)
    positions = torch.arange(1024.0).expand(32, 1024)[..., None]
    gates = _terms.gates(Input(layer, positions, positions.flatten(0, 1)), 2048)
    assert gates.shape == (2048, 8)
    assert len(gates[:, 0].unique()) == 1024


@pytest.mark.parametrize("how", ["eager", "compiled", "checkpoint"])
def test_inputs_are_kept_however_a_model_runs(how: str) -> None:
    model, x = Model(strategy="dense"), next(batches())[0]
    recipe.record_aux(model, inputs=True)
    model(x)
    expected = gate_l1(model)
    recipe.clear_aux(model)
    expected.backward()
    wanted = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    forward: Any = {
        "eager": model,
        "compiled": torch.compile(model, backend="aot_eager"),
        "checkpoint": lambda x: checkpoint(model, x, use_reentrant=False),
    }[how]
    for _ in range(2):
        y = forward(x)
        term = gate_l1(model)
        recipe.l1_term(model)
        torch.testing.assert_close(term, expected)
        (term + 0 * y.sum()).backward()
        for parameter, grad in zip(model.parameters(), wanted):
            if grad is not None:
                torch.testing.assert_close(parameter.grad, grad)
        model.zero_grad()
        assert not any(layer._recorder.kept for layer in recipe.layers(model).values())  # type: ignore[union-attr]


# FATReLU's threshold in training


@pytest.mark.parametrize(("layer", "nnz"), [(SparseGatedMLP, 3), (SparseMLP, 12)])
def test_training_reaches_the_target_by_a_threshold(layer: Any, nnz: int) -> None:
    model = Model(layer=layer)
    recipe.record_aux(model, inputs=True)
    target = TargetThreshold(model, nnz, 240)
    assert train(model, target, 240) == pytest.approx(nnz, rel=0.2)
    # L1 leaves twice as many above 0
    assert target.gates.read()["non_zeros"] == pytest.approx(2 * nnz, rel=0.3)
    x, _ = next(batches(7))
    before = model(x)
    threshold = target.settle()
    assert threshold == target.read()["threshold"] > 0
    # another one may begin, whatever the default dtype
    with default_dtype(torch.bfloat16):
        TargetThreshold(model, nnz, 10).settle()
    assert {(mlp.activation, mlp.threshold) for mlp in recipe.layers(model).values()} == {("fatrelu", threshold)}
    torch.testing.assert_close(model(x), before)
    assert sum(float(mlp.aux.l0) for mlp in recipe.layers(model).values()) / 2 == pytest.approx(nnz, rel=0.3)


@pytest.mark.parametrize(("strategy", "compiled"), [("union", False), ("dense", True), ("union", True)])
def test_no_graph_is_for_one_threshold(strategy: Any, compiled: bool) -> None:
    """A threshold that moves gives what a number gives, with one graph for all of them."""
    model = Model(strategy=strategy)
    x, _ = next(batches())
    level = torch.tensor(0.0)
    for mlp in recipe.layers(model).values():
        mlp.activation, mlp.threshold = "fatrelu", level
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    forward: Any = torch.compile(model, backend=counter) if compiled else model
    for value in (0.0, 0.1, 0.4):
        level.fill_(value)
        plain = Model(strategy="dense")
        plain.load_state_dict(model.state_dict())
        for mlp in recipe.layers(plain).values():
            mlp.activation, mlp.threshold = "fatrelu", value
        results = []
        for each in (forward, plain):
            each.zero_grad() if each is plain else model.zero_grad()
            y = each(x)
            y.square().mean().backward()
            results.append([y, *(p.grad for p in (plain if each is plain else model).parameters())])
        for ours, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs)
    assert counter.frame_count == (1 if compiled else 0)


def test_thresholds_in_tensors_are_read_where_they_can_be() -> None:
    layer, x = SparseMLP(K, N, activation="fatrelu", strategy="dense"), torch.randn(M, K)
    expected = layer(x)
    layer.threshold = level = torch.tensor(0.5)
    compiled = torch.compile(layer, backend="aot_eager")
    compiled(x)
    for value in (math.nan, math.inf, -3.0):
        said = f"threshold must be a finite number of at least 0, got a tensor of {value}"
        with pytest.raises(ValueError, match=said):
            layer.threshold = torch.tensor(value)
        level.fill_(value)
        with pytest.raises(ValueError, match=said):
            layer(x)
    # a negative one is zero in a graph, as on a GPU
    torch.testing.assert_close(compiled(x), expected)
    layer.half()
    for threshold in (1e5, torch.tensor(1e5)):
        layer.threshold = threshold
        with pytest.raises(ValueError, match=r"threshold must be finite in torch\.float16, got .*100000"):
            layer(x.half())


def test_a_threshold_begins_as_that_of_the_layers() -> None:
    """It began at 0, and the sparsity of a model with FATReLU was lost."""
    x, _ = next(batches())
    model = Model("fatrelu", threshold=0.25)
    recipe.record_aux(model, inputs=True)
    before = model(x)
    recipe.clear_aux(model)
    target = TargetThreshold(model, 3, 100)
    assert target.read()["threshold"] == 0.25
    torch.testing.assert_close(model(x), before)
    first = float(target.term(model).detach())
    assert first == pytest.approx(0.01)
    target.update()
    assert target.read()["threshold"] == pytest.approx(0.25, rel=0.2)
    # before the first step, too
    other = Model("fatrelu", threshold=0.25)
    begun = TargetThreshold(other, 3, 100)
    begun.load_state_dict(begun.state_dict())
    assert begun.read()["threshold"] == 0.25


def test_targets_are_pickled_with_their_model() -> None:
    model = Model()
    recipe.record_aux(model, inputs=True)
    again, target = pickle.loads(pickle.dumps((model, TargetThreshold(model, 5, 10))))
    recipe.record_aux(again, inputs=True)
    again(next(batches())[0])
    target.term(again)
    target.update()
    assert all(float(layer.threshold) > 0 for layer in again.mlps)


@pytest.mark.parametrize("how", ["copy", "set"])
def test_a_threshold_that_layers_do_not_have_is_not_steered(how: str) -> None:
    """It rose without end, and ``settle`` returned it."""
    model: Any = Model()
    x, _ = next(batches())
    recipe.record_aux(model, inputs=True)
    target = TargetThreshold(model, 5, 10)
    model(x)
    target.term(model)
    target.update()
    other = model
    if how == "copy":
        other = copy.deepcopy(model)
    else:
        model.mlps[1].threshold = 0.5
    recipe.record_aux(other, inputs=True)
    other(x)
    with pytest.raises(RuntimeError, match=r"TargetThreshold\.term: the layers must have the threshold that it gave"):
        target.term(other)
    if how != "copy":
        with pytest.raises(RuntimeError, match=r"TargetThreshold\.settle: the layers must have the threshold"):
            target.settle()


@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_layers_round_a_threshold_that_moves(autocast: bool) -> None:
    """Gates that were equal to the rounded threshold fired: a compiler that computes in fp32 left out the rounding."""
    mlp = SparseGatedMLP(64, 256, dtype=torch.float32 if autocast else torch.bfloat16, activation="fatrelu")
    level, x = torch.tensor(0.0), torch.randn(512, 64)
    x = x if autocast else x.bfloat16()
    with torch.no_grad():
        mlp.gate_proj.weight.normal_(std=64**-0.5)
    mlp.threshold = level
    compiled = torch.compile(mlp)
    for value in (1.31, 1.028, 2.306):
        level.fill_(value)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert float(level.bfloat16()) > value
            fired = compiled(x, return_aux=True)[1].l0
            mlp.threshold = value
            assert torch.equal(fired, mlp(x, return_aux=True)[1].l0)
        mlp.threshold = level
