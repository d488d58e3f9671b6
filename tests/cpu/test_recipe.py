"""The training recipe: the L1 term and dead neurons."""

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from recipe_models import (
    Adapted,
    B,
    K,
    Model,
    N,
    S,
    assert_close,
    gate_l1,
    gradients,
    inputs,
    pair,
    plain_pass,
    plain_term,
)
from torch import Tensor, nn

from twell import recipe
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.recipe import SparsityTracker

BF16 = torch.bfloat16

pytestmark = pytest.mark.usefixtures("seeded")


def step(model: nn.Module, x: Tensor, forward: Callable[[Tensor], Tensor] | None = None, **options: Any) -> Tensor:
    loss = (model if forward is None else forward)(x).square().mean() + 0.1 * recipe.l1_term(model, **options)
    loss.backward()
    return loss.detach()


def unread(model: nn.Module) -> list[Any]:
    held: list[Any] = []
    for layer in recipe.layers(model).values():
        recorder: Any = layer._recorder
        held += [*recorder.calls, *([] if layer.aux is None else [layer.aux])]
    return held


# The L1 term


@pytest.mark.parametrize("strategy", ["auto", "dense"])
def test_l1_term_is_the_mean_over_layers(strategy: Any) -> None:
    model, (x,) = Model(SparseGatedMLP(K, N, strategy=strategy), SparseMLP(K, 2 * N, strategy=strategy)), inputs()
    y, _, states = plain_pass(model, x)
    expected = plain_term(states)
    (y.square().mean() + 0.1 * expected).backward()
    wanted = gradients(model)

    recipe.record_aux(model)
    y = model(x)
    term = recipe.l1_term(model)
    assert term.shape == ()
    torch.testing.assert_close(term, expected)
    (y.square().mean() + 0.1 * term).backward()
    assert_close(gradients(model), wanted)
    assert not unread(model)


def test_warmup_of_the_coefficient() -> None:
    assert [recipe.l1_warmup(s, 4, start=2) for s in range(8)] == [0, 0, 0, 0.25, 0.5, 0.75, 1, 1]
    assert [recipe.l1_warmup(s, 0) for s in range(2)] == [1, 1]


def test_l1_term_says_what_is_wrong() -> None:
    model, (x,) = Model(), inputs()
    with pytest.raises(RuntimeError, match=r"blocks\.0\.mlp records nothing: call record_aux"):
        recipe.l1_term(model)
    recipe.record_aux(model)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.mlp recorded nothing .* was not called in training mode"):
        recipe.l1_term(model)
    model.eval()(x)
    with pytest.raises(RuntimeError, match="is in eval mode"):
        recipe.l1_term(model)
    model.train()(x)
    model(x)
    with pytest.raises(RuntimeError, match=r"called 2 times .* several=True"):
        recipe.l1_term(model)
    # as the error says
    torch.testing.assert_close(recipe.l1_term(model, several=True), plain_term(plain_pass(model, x)[2]))
    assert not unread(model)
    model(x)
    recipe.clear_aux(model)
    model(x)
    recipe.l1_term(model)


def test_reentrant_checkpointing_is_refused() -> None:
    model, (x,) = Model(), inputs()
    model.reentrant = True
    recipe.record_aux(model)
    y = model(x.requires_grad_())
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        recipe.l1_term(model)
    # recomputation in backward is not recorded either
    y.sum().backward()
    assert not unread(model)
    with torch.no_grad():
        model(x)
        assert recipe.l1_term(model) > 0
    # a term of the inputs would train the gates alone
    recipe.record_aux(model, inputs=True)
    model(x)
    with pytest.raises(RuntimeError, match=r"kept an input without its gradient, .* use_reentrant=False"):
        gate_l1(model)
    with torch.no_grad():
        model(x)
        assert gate_l1(model) > 0


def test_calls_without_tokens_do_not_count() -> None:
    model, (x,) = Model(), inputs()
    recipe.record_aux(model, inputs=True)
    model(x)
    alone = recipe.l1_term(model), gate_l1(model)
    for calls in ((x, x[:0]), (x[:0], x)):
        for each in calls:
            model(each)
        assert (recipe.l1_term(model), gate_l1(model)) == alone
    # a rank without tokens has a term of 0, which it can differentiate
    model(x[:0])
    term = recipe.l1_term(model)
    assert term == gate_l1(model) == 0
    term.backward()


def test_a_layer_that_is_skipped_has_an_l1_of_zero() -> None:
    """As by LayerDrop, or an expert without tokens."""
    model, (x,) = Model(*(SparseGatedMLP(K, N, strategy="union") for _ in range(3))), inputs()
    recipe.record_aux(model, inputs=True)
    skipped = model.blocks[1]
    part = Model(model.blocks[0].mlp, model.blocks[2].mlp)
    part.blocks[0], part.blocks[1] = model.blocks[0], model.blocks[2]
    expected = plain_term(plain_pass(part, x)[2]) * 2 / 3
    for several in (False, True):
        part(x)
        term = recipe.l1_term(model, several=several)
        torch.testing.assert_close(term, expected)
        term.backward()
        assert skipped.mlp.up_proj.weight.grad is None
    part(x)
    shared = gate_l1(part)
    part(x)
    torch.testing.assert_close(gate_l1(model) * 3, shared * 2)
    # no layer at all: a forward pass that was forgotten, or one that is known
    recipe.clear_aux(model)
    for read in (recipe.l1_term, gate_l1):
        with pytest.raises(RuntimeError, match="and no other layer did"):
            read(model)
    recipe.clear_aux(model, skippable=True)
    assert recipe.l1_term(model) == gate_l1(model) == 0
    skipped.mlp.eval()
    part(x)
    with pytest.raises(RuntimeError, match=r"blocks\.1\.mlp recorded nothing: it is in eval mode"):
        recipe.l1_term(model)


def masked() -> Tensor:
    mask = torch.ones(B, S, dtype=torch.long)
    mask[1, :5] = 0
    return mask


@pytest.mark.parametrize("layers", ["named", "dense", "pair", "adapter"])
def test_padding_is_left_out_of_the_term(layers: str) -> None:
    strategy: Any = "dense" if layers == "dense" else "union"
    mlps: list[Any] = [SparseGatedMLP(K, N, True, strategy=strategy), SparseMLP(K, N, True, strategy=strategy)]
    if layers == "pair":
        mlps = [pair()]
    if layers == "adapter":
        mlps[0].up_proj = Adapted(K, N)
    model, (x,), mask = Model(*mlps).double(), inputs(dtype=torch.float64), masked()
    if layers == "pair":
        state = F.relu(F.linear(model.blocks[0].norm(x), mlps[0].fc1.weight, mlps[0].fc1.bias))
        states = [state]
    else:
        states = plain_pass(model, x)[2]
    expected = torch.stack([(h.abs().sum(-1) * mask).sum() / mask.sum() for h in states]).mean()
    weights = [p for name, p in model.named_parameters()]
    right = torch.autograd.grad(expected, weights, allow_unused=True)
    recipe.record_aux(model, inputs=True)
    for given in (mask, mask.bool()):
        model(x)
        term = recipe.l1_term(model, attention_mask=given)
        torch.testing.assert_close(term, expected)
        for got, wanted in zip(torch.autograd.grad(term, weights, allow_unused=True), right, strict=True):
            torch.testing.assert_close(*(torch.zeros(()) if g is None or not g.any() else g for g in (got, wanted)))
    assert not unread(model)
    # nothing but padding
    model(x)
    assert recipe.l1_term(model, attention_mask=mask * 0) == 0


def test_a_mask_of_other_tokens_is_refused() -> None:
    layer, x, mask = SparseGatedMLP(K, N), torch.randn(B, S, K), masked()
    recipe.record_aux(layer)
    experts = nn.ModuleDict({"experts": nn.ModuleList([layer])})
    recipe.record_aux(layer, inputs=True)
    layer(x.flatten(0, 1))
    right = recipe.l1_term(layer, attention_mask=mask)
    layer(x)
    assert torch.equal(recipe.l1_term(layer, attention_mask=mask), right)
    wrong: Any = [(layer, x[:, 1:], mask), (layer, x, mask.t()), (layer, x, mask[:, None]), (layer, x[:1], mask)]
    # the router may have changed their order
    wrong.append((experts, x.flatten(0, 1), mask))
    for model, given, tokens in wrong:
        layer(given)
        with pytest.raises(ValueError, match=r"attention_mask must be of the tokens of .* leave it out there"):
            recipe.l1_term(model, attention_mask=tokens)
        recipe.clear_aux(layer)


def test_checkpointing_changes_nothing() -> None:
    model = Model(SparseGatedMLP(K, N), SparseMLP(K, N, strategy="dense"))
    recipe.record_aux(model)
    wanted = []
    for reentrant in (None, False):
        model.reentrant = reentrant
        # two micro-batches that accumulate
        losses = [step(model, x) for x in inputs(2)]
        assert not unread(model)
        wanted.append([*losses, *gradients(model)])
    for a, b in zip(*wanted):
        assert torch.equal(a, b)


def compiled_step(model: Model, how: str) -> Callable[[Tensor], Tensor]:
    backend: Any = {"backend": "aot_eager"}
    if how == "model":
        forward = torch.compile(model, fullgraph=True, **backend)
        return lambda x: step(model, x, forward)
    if how == "loss":
        loss = torch.compile(
            lambda x: model(x).square().mean() + 0.1 * recipe.l1_term(model), fullgraph=True, **backend
        )
    elif how in ("blocks", "layers"):
        for block in model.blocks:
            (block if how == "blocks" else block.mlp).compile(fullgraph=True, **backend)
        return lambda x: step(model, x)
    else:
        forward = torch.compile(model, **backend)
        return lambda x: step(model, x, forward)

    def run(x: Tensor) -> Tensor:
        value: Tensor = loss(x)
        value.backward()
        return value.detach()

    return run


@pytest.mark.parametrize(
    ("how", "reentrant"),
    [("loss", None), ("model", False), ("blocks", False), ("layers", None), ("breaks", False)],
)
def test_compiled_models_record(how: str, reentrant: bool | None) -> None:
    option = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    inside = how in ("model", "loss") and reentrant is not None
    if inside and not hasattr(torch._dynamo.config, option):
        pytest.skip("this torch compiles no checkpoint that leaves something behind")
    model = Model()
    recipe.record_aux(model)
    batches = inputs(3)
    wanted = [[step(model, x), *gradients(model)] for x in batches]
    model.reentrant = reentrant
    run = compiled_step(model, how)
    with torch._dynamo.config.patch({option: True} if inside else {}):
        for x, expected in zip(batches, wanted):
            assert_close([run(x), *gradients(model)], expected)
            assert not unread(model)


def test_copies_and_pickles_record_nothing() -> None:
    model, (x,) = Model(), inputs()
    recipe.record_aux(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(x)
        with pytest.raises(RuntimeError, match="records nothing"):
            recipe.l1_term(other)
        recipe.record_aux(other)
        other(x)
        recipe.l1_term(other)


def test_forgetting_to_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe._aux, "_MOST_UNREAD", 4)
    model, (x,) = Model(), inputs()
    recipe.record_aux(model)
    # such as generating text
    with torch.no_grad():
        for _ in range(10):
            model(x)
    assert len(unread(model)) < 12
    recipe.clear_aux(model)
    for _ in range(4):
        model(x)
    with pytest.raises(RuntimeError, match="called 4 times in training mode without a read of"):
        model(x)


# Dead neurons


@pytest.mark.parametrize(("cls", "dtype"), [(SparseGatedMLP, BF16), (SparseMLP, torch.float32)])
def test_reinitialize_moves_dead_rows_alone(cls: Any, dtype: torch.dtype) -> None:
    mlp = cls(256, 1024, dtype=dtype)
    gate = mlp.gate_proj if cls is SparseGatedMLP else mlp.up_proj
    before = {name: p.detach().clone() for name, p in mlp.named_parameters()}
    dead = torch.arange(1024) % 3 == 0
    recipe.reinitialize_dead(mlp, dead, step=7)
    for name, parameter in mlp.named_parameters():
        if parameter is not gate.weight:
            assert torch.equal(parameter, before[name])
    old = before["gate_proj.weight" if cls is SparseGatedMLP else "up_proj.weight"]
    assert torch.equal(gate.weight[~dead], old[~dead])
    noise = (gate.weight[dead].double() - 0.9 * old[dead].double()) / 0.1
    # 87,552 draws; bf16 rounds W to 2^-9 of itself, which is 10 times as much of the noise
    assert abs(noise.mean()) < 5 * 0.02 / noise.numel() ** 0.5
    assert abs(noise.std() / 0.02 - 1) < 0.02
    assert gate.weight.requires_grad


def test_reinitialize_draws_by_step_layer_and_seed() -> None:
    model = Model(SparseGatedMLP(K, N), SparseGatedMLP(K, N))
    with torch.no_grad():
        for mlp in recipe.layers(model).values():
            mlp.gate_proj.weight.zero_()  # type: ignore[union-attr]
    everything = {name: torch.ones(N, dtype=torch.bool) for name in recipe.layers(model)}

    def drawn(**options: Any) -> list[Tensor]:
        each = copy.deepcopy(model)
        recipe.reinitialize_dead(each, everything, fraction=1.0, **options)
        return [block.mlp.gate_proj.weight.detach() for block in each.blocks]

    torch.manual_seed(5)
    first, again = drawn(step=3), drawn(step=3)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    # the global generator is left alone
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    drawn(step=3)
    assert torch.equal(torch.rand(1), expected)
    draws = [*first, *drawn(step=4), *drawn(step=3, seed=1)]
    for a, b in itertools.combinations(draws, 2):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.2
    only = copy.deepcopy(model)
    recipe.reinitialize_dead(only, {"blocks.1.mlp": everything["blocks.1.mlp"]}, step=3, fraction=1.0)
    assert not only.blocks[0].mlp.gate_proj.weight.any()
    assert torch.equal(only.blocks[1].mlp.gate_proj.weight, first[1])


def test_a_weight_of_two_layers_is_refused() -> None:
    model = nn.ModuleList(SparseMLP(K, N) for _ in range(3))
    model[1].up_proj.weight = model[0].up_proj.weight
    assert recipe.trained_layers(model) == {"2"}
    with pytest.raises(ValueError, match="the gate of 0 must have a weight of its own, got one that another"):
        recipe.reinitialize_dead(model, {"0": torch.arange(N) < 6}, step=0)


def test_frozen_gates_can_be_left_out() -> None:
    model = nn.ModuleList(SparseGatedMLP(K, N) for _ in range(2))
    model[0].gate_proj.requires_grad_(False)
    assert recipe.trained_layers(model) == {"1"}
    before: Any = model[1].gate_proj.weight.detach().clone()
    dead = torch.arange(N) < 6
    recipe.reinitialize_dead(model, {"1": dead}, step=0)
    assert torch.equal((model[1].gate_proj.weight != before).any(1), dead)


def test_reinitialize_revives_neurons() -> None:
    model, (x,) = Model(SparseGatedMLP(K, N)), inputs()
    # the same direction for all tokens, so that a row can be silent for all of them
    x = x + 10
    model.blocks[0].norm = nn.Identity()
    gate = recipe.layers(model)["blocks.0.mlp"].gate_proj.weight  # type: ignore[union-attr]
    with torch.no_grad():
        gate[:20] = -gate[:20].abs()
    tracker = SparsityTracker(model, every=1)
    dead = []
    for number in range(60):
        with tracker.watch(number):
            model(x)
        masks = tracker.dead()
        dead.append(int(masks["blocks.0.mlp"][:20].sum()))
        recipe.reinitialize_dead(model, masks, step=number)
    assert dead[0] == 20
    assert dead[-1] < 4
