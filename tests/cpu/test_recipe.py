"""The training recipe: the L1 term, the tracker, dead neurons, strategies and what is written, on one and two ranks."""

from __future__ import annotations

import copy
import csv
import io
import itertools
import logging
import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch._dynamo.testing
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import twell
from twell import _auto, _compaction, recipe, tuning
from twell.nn import SparseGatedMLP, SparseMLP
from twell.recipe import SparsityTracker, StatsWriter, TokenTypes, _writers

ROOT = Path(__file__).resolve().parents[2]
BF16 = torch.bfloat16
K, N, B, S = 16, 40, 2, 8


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp, self.after = nn.LayerNorm(K), mlp, nn.LayerNorm(K)

    def forward(self, x: Tensor) -> Tensor:
        # later operators save tensors, so a checkpoint recomputes the layer to its end
        y: Tensor = self.after(x + self.mlp(self.norm(x))).square()
        return y


class Model(nn.Module):
    """Blocks over [B, S, K], perhaps checkpointed one by one."""

    reentrant: bool | None = None
    blocks: Any

    def __init__(self, *mlps: nn.Module) -> None:
        super().__init__()
        # named: on a CPU "auto" is dense
        mlps = mlps or (SparseGatedMLP(K, N, strategy="union"), SparseMLP(K, 2 * N, strategy="union"))
        self.blocks = nn.ModuleList(map(Block, mlps))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def inputs(count: int = 1, **options: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(B, S, K, generator=generator).to(**options) for _ in range(count)]


def hidden(mlp: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gate after ReLU and the hidden state, computed densely."""
    if isinstance(mlp, SparseGatedMLP):
        gate = F.relu(mlp.gate_proj(x))
        return gate, gate * mlp.up_proj(x)
    gate = F.relu(mlp.up_proj(x))
    return gate, gate


def plain_pass(model: Model, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return output, gates and hidden states of the model in plain PyTorch."""
    gates, states = [], []
    for block in model.blocks:
        gate, h = hidden(block.mlp, block.norm(x))
        gates.append(gate)
        states.append(h)
        x = block.after(x + block.mlp.down_proj(h)).square()
    return x, gates, states


def plain_term(states: list[Tensor], per_neuron: bool = False) -> Tensor:
    means = [h.abs().mean(-1) if per_neuron else h.abs().sum(-1) for h in states]
    return torch.stack([mean.mean() for mean in means]).mean()


def gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad.clone())
        parameter.grad = None
    return found


def assert_close(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def step(model: nn.Module, x: Tensor, forward: Callable[[Tensor], Tensor] | None = None, **options: Any) -> Tensor:
    loss = (model if forward is None else forward)(x).square().mean() + 0.1 * recipe.l1_term(model, **options)
    loss.backward()
    return loss.detach()


def unread(model: nn.Module) -> list[Any]:
    """Return the figures that layers still hold."""
    held: list[Any] = []
    for layer in recipe.layers(model).values():
        recorder: Any = layer._recorder
        held += [*recorder.calls, *([] if layer.aux is None else [layer.aux])]
    return held


# The L1 term


@pytest.mark.parametrize("normalisation", recipe.NORMALISATIONS)
@pytest.mark.parametrize("strategy", ["auto", "dense"])
def test_l1_term_is_the_mean_over_layers(normalisation: Any, strategy: Any) -> None:
    model, (x,) = Model(SparseGatedMLP(K, N, strategy=strategy), SparseMLP(K, 2 * N, strategy=strategy)), inputs()
    y, _, states = plain_pass(model, x)
    expected = plain_term(states, normalisation == "neuron_mean")
    (y.square().mean() + 0.1 * expected).backward()
    wanted = gradients(model)

    recipe.record_aux(model)
    y = model(x)
    term = recipe.l1_term(model, normalisation)
    assert term.shape == ()
    torch.testing.assert_close(term, expected)
    (y.square().mean() + 0.1 * term).backward()
    assert_close(gradients(model), wanted)
    assert not unread(model)


def test_coefficient_of_the_paper_is_that_of_the_token_sum() -> None:
    assert recipe.convert_coefficient(2e-5, 5632, "token_sum", "neuron_mean") == pytest.approx(0.11264)
    assert recipe.convert_coefficient(0.11264, 5632, "neuron_mean", "token_sum") == pytest.approx(2e-5)
    assert recipe.convert_coefficient(0.5, 8, "token_sum", "token_sum") == 0.5
    with pytest.raises(ValueError, match="token_sum, neuron_mean"):
        recipe.convert_coefficient(0.5, 8, "token_sum", "mean")  # type: ignore[arg-type]
    # one layer of N neurons: the same term either way
    model, (x,) = Model(SparseGatedMLP(K, N)), inputs()
    recipe.record_aux(model)
    terms = []
    for normalisation in recipe.NORMALISATIONS:
        model(x)
        coefficient = recipe.convert_coefficient(2e-5, N, "token_sum", normalisation)  # type: ignore[arg-type]
        terms.append(coefficient * recipe.l1_term(model, normalisation))  # type: ignore[arg-type]
    torch.testing.assert_close(*terms)


def test_warmup_is_linear() -> None:
    assert [recipe.l1_warmup(s, 4) for s in range(6)] == [0, 0.25, 0.5, 0.75, 1, 1]
    assert [recipe.l1_warmup(s, 4, start=2) for s in range(8)] == [0, 0, 0, 0.25, 0.5, 0.75, 1, 1]
    assert [recipe.l1_warmup(s, 0) for s in range(2)] == [1, 1]
    assert [recipe.l1_warmup(s, 0, start=2) for s in range(4)] == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="warmup_steps must be an integer of at least 0, got -1"):
        recipe.l1_warmup(0, -1)


def test_l1_term_says_what_is_wrong() -> None:
    model, (x,) = Model(), inputs()
    with pytest.raises(RuntimeError, match=r"blocks\.0\.mlp records nothing: call record_aux"):
        recipe.l1_term(model)
    recipe.record_aux(model)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.mlp recorded nothing .* was not called"):
        recipe.l1_term(model)
    model.eval()(x)
    with pytest.raises(RuntimeError, match="is in eval mode"):
        recipe.l1_term(model)
    model.train()(x)
    model(x)
    with pytest.raises(RuntimeError, match=r"called 2 times .* several=True"):
        recipe.l1_term(model)
    model(x)
    recipe.clear_aux(model)
    model(x)
    with pytest.raises(ValueError, match="token_sum, neuron_mean, got 'mean'"):
        recipe.l1_term(model, "mean")  # type: ignore[arg-type]
    recipe.l1_term(model)
    with pytest.raises(ValueError, match=r"layers of twell\.nn, got none in Linear"):
        recipe.record_aux(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="got str"):
        recipe.record_aux("model")  # type: ignore[arg-type]


def test_several_calls_all_count() -> None:
    shared = SparseGatedMLP(K, N)
    model, (x, other) = Model(shared, shared), inputs(2)
    _, _, states = plain_pass(model, x)
    expected = plain_term(states)
    recipe.record_aux(model)
    model(x)
    with pytest.raises(RuntimeError, match="called 2 times"):
        recipe.l1_term(model)
    model(x)
    torch.testing.assert_close(recipe.l1_term(model, several=True), expected)
    # two passes for one loss
    model(x)
    model(other)
    both = plain_term(states + plain_pass(model, other)[2])
    torch.testing.assert_close(recipe.l1_term(model, several=True), both)
    assert not unread(model)


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


@pytest.mark.parametrize("strategy", ["auto", "dense"])
def test_checkpointing_changes_nothing(strategy: Any) -> None:
    model = Model(SparseGatedMLP(K, N, strategy=strategy), SparseMLP(K, N, strategy=strategy))
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


@pytest.mark.parametrize("how", ["model", "loss", "blocks", "layers", "breaks"])
@pytest.mark.parametrize("reentrant", [None, False], ids=["plain", "checkpoint"])
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


def test_record_aux_after_a_compiled_step() -> None:
    model, (x,) = Model(), inputs()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    recipe.record_aux(compiled)
    compiled(x)
    torch.testing.assert_close(recipe.l1_term(compiled), plain_term(plain_pass(model, x)[2]))
    assert list(recipe.layers(compiled)) == list(recipe.layers(model)) == ["blocks.0.mlp", "blocks.1.mlp"]


def test_autocast() -> None:
    model, (x,) = Model(), inputs()
    recipe.record_aux(model)
    with torch.autocast("cpu", BF16):
        model(x)
        expected = plain_term([h.float() for h in plain_pass(model, x)[2]])
    term = recipe.l1_term(model)
    assert term.dtype == torch.float32
    torch.testing.assert_close(term, expected, rtol=2e-2, atol=0)
    term.backward()
    gate = recipe.layers(model)["blocks.0.mlp"].gate_proj.weight.grad  # type: ignore[union-attr]
    assert gate is not None
    assert gate.dtype == torch.float32
    assert gate.abs().sum() > 0


def test_copies_and_pickles_record_nothing() -> None:
    model, (x,) = Model(), inputs()
    recipe.record_aux(model)
    tracker = SparsityTracker(model)
    with tracker.watch(0):
        model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(x)
        with pytest.raises(RuntimeError, match="records nothing"):
            recipe.l1_term(other)
        assert torch.equal(model.eval()(x), other.eval()(x))
        model.train()
        recipe.record_aux(other)
        other.train()(x)
        recipe.l1_term(other)
    recipe.l1_term(model)
    assert tracker.read().layers[0].calls == 1


def test_layers_that_are_not_recorded_hold_nothing() -> None:
    model, (x,) = Model(), inputs()
    recipe.record_aux(model)
    tracker = SparsityTracker(model)
    recipe.record_aux(model, False)
    with tracker.watch(0):
        model(x)
    assert tracker.read().layers[0].l0 is not None
    tracker.close()
    for layer in recipe.layers(model).values():
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks
        assert not layer.record_aux
        assert layer.aux is None
    recipe.record_aux(model)
    tracker = SparsityTracker(model)
    tracker.close()
    model(x)
    recipe.l1_term(model)


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


def test_frozen_layers_may_have_a_constant_term() -> None:
    model, (x,) = Model(), inputs()
    recipe.record_aux(model)
    for parameter in model.blocks[0].mlp.parameters():
        parameter.requires_grad_(False)
    model.blocks[0].norm.requires_grad_(False)
    step(model, x)
    pair = opt_block()
    recipe.record_aux(pair)
    y = pair(x)
    (y.sum() + recipe.l1_term(pair)).backward()
    assert pair.fc1.weight.grad is not None


def opt_block() -> nn.Module:
    class OPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.activation_fn = nn.Linear(K, N), nn.Linear(N, K), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            x = self.fc1(x)
            x = self.activation_fn(x)
            x = self.fc2(x)
            return x

    block = OPT()
    from twell._sparsify import sparsify_

    assert sparsify_(block) == ["fc2"]
    return block


# The tracker


def brute(gates: list[Tensor], kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Count firings per neuron and non-zeros per token of gates [tokens, N]."""
    fires = torch.cat([gate.reshape(-1, gate.shape[-1]) for gate in gates]) != 0
    if kept is not None:
        fires &= kept.reshape(-1, 1)
    return fires.sum(0), fires.sum(1)


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        *[(how, torch.float32) for how in ("eager", "checkpoint", "compiled", "compiled blocks")],
        *[(how, BF16) for how in ("eager", "compiled", "compiled blocks, checkpoint")],
    ],
)
def test_tracker_counts_what_fires(how: str, dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    with torch.no_grad():
        for mlp in recipe.layers(model).values():
            _compaction.gate_of(mlp).weight[5:9] = 0
    if "checkpoint" in how:
        model.reentrant = False
    recipe.record_aux(model)
    tracker = SparsityTracker(model, every=2, positions=(0, 1, 4), types=("odd", "even"))
    forward: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if how == "compiled" else model
    if "blocks" in how:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    types = torch.randint(-1, 2, (2, B, S), generator=torch.Generator().manual_seed(2))
    batches = inputs(2, dtype=dtype)
    means: list[list[tuple[float, float]]] = [[], []]
    for number in range(4):
        # two micro-batches
        for x, kinds in zip(batches, types):
            with tracker.watch(number, types=kinds):
                y = forward(x)
            (y.square().mean() + recipe.l1_term(model)).backward()
            _, gates, states = plain_pass(model, x)
            for mean, gate, h in zip(means, gates, states):
                mean.append(
                    (float((gate != 0).sum(-1).double().mean()), float(h.detach().double().abs().sum(-1).mean()))
                )
    stats = tracker.read()
    assert [row.layer for row in stats.layers] == ["blocks.0.mlp", "blocks.1.mlp"]
    kept = types >= 0
    for i, row in enumerate(stats.layers):
        gates = [plain_pass(model, x)[1][i] for x in batches]
        firings, nonzeros = brute(gates, kept)
        place = torch.arange(S).expand(2, B, S).reshape(-1)
        assert row.neurons == gates[0].shape[-1]
        assert row.l0 == pytest.approx(sum(m[0] for m in means[i]) / 8, rel=1e-6)
        assert row.l1 == pytest.approx(sum(m[1] for m in means[i]) / 8, rel=1e-5 if dtype == torch.float32 else 2e-2)
        assert row.tokens == int(kept.sum())
        assert row.calls == 2
        assert row.dead == int((firings == 0).sum()) >= 4
        assert row.observed_l0 == pytest.approx(int(nonzeros.sum()) / row.tokens)
        for name, where in (("0", place == 0), ("1-3", (place >= 1) & (place < 4)), ("4-", place >= 4)):
            mine = where & kept.reshape(-1)
            assert row.positions[name] == pytest.approx(float(nonzeros[mine].double().mean())), name
        for number, name in enumerate(("odd", "even")):
            mine = types.reshape(-1) == number
            assert row.types[name] == pytest.approx(float(nonzeros[mine].double().mean()))
        assert torch.equal(tracker.dead()[row.layer], firings == 0)
    summary = stats.summary()
    assert summary.keys() == {"l0", "l1", "dead"}
    assert summary["dead"] == pytest.approx(sum(row.dead / row.neurons for row in stats.layers) / 2)  # type: ignore[operator]
    again = tracker.read().layers[0]
    assert again.l0 is None
    assert again.dead == stats.layers[0].dead


def test_tracker_finds_unions_of_128_tokens() -> None:
    mlp = SparseGatedMLP(K, N)
    tracker = SparsityTracker(mlp)
    x = torch.randn(300, K)
    with tracker.watch(0):
        mlp(x)
    (row,) = tracker.read().layers
    fires = F.relu(mlp.gate_proj(x)) != 0
    unions = [fires[:128].any(0).sum(), fires[128:256].any(0).sum()]
    assert row.union == pytest.approx(float(sum(unions)) / 2 / N)
    # tokens without sequences have no known position
    assert set(row.positions.values()) == {None}
    assert row.layer == ""


def test_tracker_counts_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, x = SparseGatedMLP(K, N), torch.randn(3, 200, K)
    rows = []
    for gates in (1 << 24, 256 * N):
        monkeypatch.setattr(_compaction, "CHUNK_GATES", gates)
        tracker = SparsityTracker(mlp)
        with tracker.watch(0):
            mlp(x)
        rows.append(tracker.read())
        tracker.close()
    assert rows[0] == rows[1]


def test_figures_cover_the_steps_of_a_window() -> None:
    model, batches = Model(), inputs(6)
    tracker = SparsityTracker(model, every=2, window=2)
    tokens = []
    for number, x in enumerate(batches, start=1):
        with tracker.watch(number):
            model(x)
        tokens.append(tracker.read().layers[0].tokens)
    # the first, then 2, 4, 6: windows of steps 1 and 2, and of 4 and 6
    assert tokens == [0, 2 * B * S, 2 * B * S, 2 * B * S, 2 * B * S, 2 * B * S]
    gates = [plain_pass(model, x)[1][0] for x in (batches[3], batches[5])]
    assert torch.equal(tracker.dead()["blocks.0.mlp"], brute(gates)[0] == 0)
    never = SparsityTracker(Model(), every=0)
    with never.watch(0):
        never.model(batches[0])
    row = never.read().layers[0]
    assert row.l0 is not None
    assert row.dead is row.observed_l0 is row.union is None
    assert not any(mask.any() for mask in never.dead().values())


def test_a_step_that_fails_counts_nothing() -> None:
    model, (x,) = Model(), inputs()
    tracker = SparsityTracker(model)
    with pytest.raises(RuntimeError, match="shape"), tracker.watch(0):
        # past the first block
        nn.Sequential(model.blocks[0], nn.Linear(1, 1))(x)
    with tracker.watch(0):
        model(x)
    row = tracker.read().layers[0]
    assert row.l0 == pytest.approx(float((plain_pass(model, x)[1][0] != 0).sum(-1).double().mean()))


def test_only_what_is_watched_counts() -> None:
    model, (x, other) = Model(), inputs(2)
    tracker = SparsityTracker(model, every=1)
    with tracker.watch(0):
        model(x)
    model(other)
    model.eval()(other)
    row = tracker.read().layers[0]
    assert row.tokens == B * S
    assert row.l0 == pytest.approx(float((plain_pass(model, x)[1][0] != 0).sum(-1).double().mean()))
    with pytest.raises(RuntimeError, match="no layer was called in training mode"), tracker.watch(1):
        model(x)


def test_backward_in_watch_counts_no_checkpoint_twice() -> None:
    model, (x,) = Model(), inputs()
    model.reentrant = False
    tracker = SparsityTracker(model)
    with tracker.watch(0):
        model(x).sum().backward()
    assert tracker.read().layers[0].tokens == B * S


def test_shared_layers_and_pairs_are_tracked() -> None:
    shared = SparseMLP(K, N)
    model, (x,) = Model(shared, shared), inputs()
    tracker = SparsityTracker(model)
    with tracker.watch(0):
        model(x)
    (row,) = tracker.read().layers
    firings, nonzeros = brute(plain_pass(model, x)[1])
    assert (row.tokens, row.calls) == (2 * B * S, 2)
    assert row.observed_l0 == row.l0 == pytest.approx(float(nonzeros.double().mean()))
    assert row.dead == int((firings == 0).sum())
    pair: Any = opt_block()
    tracker = SparsityTracker(pair)
    with tracker.watch(0):
        pair(x)
    (row,) = tracker.read().layers
    assert row.layer == "fc2"
    assert (
        row.observed_l0 == row.l0 == pytest.approx(float((F.linear(x, pair.fc1.weight, pair.fc1.bias) > 0).sum() / 16))
    )


class Adapted(nn.Linear):
    """A projection with more than weight and bias."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - 0.3


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_adapted_layers_are_tracked(dtype: torch.dtype) -> None:
    model, (x,) = Model(SparseGatedMLP(K, N)).to(dtype), inputs(dtype=dtype)
    (mlp,) = recipe.layers(model).values()
    mlp.gate_proj = Adapted(K, N, dtype=dtype)
    recipe.record_aux(model)
    tracker = SparsityTracker(model)
    with tracker.watch(0):
        model(x)
    torch.testing.assert_close(recipe.l1_term(model), plain_term(plain_pass(model, x)[2]).float(), rtol=1e-2, atol=0)
    (row,) = tracker.read().layers
    fires = plain_pass(model, x)[1][0] != 0
    assert row.observed_l0 == row.l0 == pytest.approx(float(fires.sum(-1).double().mean()))
    assert row.dead == int((~fires.flatten(0, 1).any(0)).sum())


def test_positions_of_packed_sequences() -> None:
    mlp, x = SparseGatedMLP(K, N), torch.randn(1, 6, K)
    tracker = SparsityTracker(mlp, positions=(0, 1))
    with tracker.watch(0, positions=torch.tensor([[0, 1, 2, 0, 1, 0]])):
        mlp(x)
    nonzeros = (F.relu(mlp.gate_proj(x)) != 0).sum(-1)[0].double()
    positions = tracker.read().layers[0].positions
    assert positions["0"] == pytest.approx(float(nonzeros[[0, 3, 5]].mean()))
    assert positions["1-"] == pytest.approx(float(nonzeros[[1, 2, 4]].mean()))
    # one row of position ids serves all sequences
    with tracker.watch(100, positions=torch.zeros(1, 6, dtype=torch.int32)):
        mlp(torch.cat([x, x]))
    assert tracker.read().layers[0].positions["1-"] is None


def test_tracker_refuses_what_it_cannot_count() -> None:
    model, (x,) = Model(), inputs()
    with pytest.raises(ValueError, match="every must be an integer of at least 0, got -1"):
        SparsityTracker(model, every=-1)
    with pytest.raises(ValueError, match="ascend from 0, got"):
        SparsityTracker(model, positions=(1, 2))
    tracker = SparsityTracker(model, types=("a",))
    with pytest.raises(ValueError, match="a SparsityTracker already, on blocks"):
        SparsityTracker(model)
    with (
        pytest.raises(ValueError, match=r"one value per token \[2, 8\], got \[3\]"),
        tracker.watch(0, types=torch.zeros(3, dtype=torch.int64)),
    ):
        model(x)
    with (
        pytest.raises(TypeError, match=r"types must be integers, got torch\.float32"),
        tracker.watch(0, types=torch.zeros(B, S)),
    ):
        model(x)
    with tracker.watch(0, types=torch.ones(B, S, dtype=torch.int64)):
        model(x)
    with pytest.raises(ValueError, match="types must be -1 to 0, got 16 tokens of others"):
        tracker.read()
    tracker.close()
    nameless = SparsityTracker(model)
    with pytest.raises(ValueError, match="without names"), nameless.watch(0, types=torch.ones(B, S, dtype=torch.int64)):
        model(x)


def test_state_dict_keeps_the_dead() -> None:
    model, (x,) = Model(), inputs()
    tracker = SparsityTracker(model, every=10)
    with tracker.watch(10):
        model(x)
    state = tracker.state_dict()
    dead = tracker.dead()
    tracker.close()
    other = SparsityTracker(model, every=10)
    other.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert all(torch.equal(mask, dead[name]) for name, mask in other.dead().items())
    # there is evidence, so that the first step is not observed
    with other.watch(11):
        model(x + 1)
    assert all(torch.equal(mask, dead[name]) for name, mask in other.dead().items())
    with pytest.raises(ValueError, match="layers, positions and types"):
        SparsityTracker(Model(), types=("a",)).load_state_dict(state)


def test_compiled_models_have_two_variants() -> None:
    model, (x,) = Model(), inputs()
    recipe.record_aux(model)
    tracker = SparsityTracker(model, every=3)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for number in range(8):
        with tracker.watch(number):
            y = compiled(x)
        (y.sum() + recipe.l1_term(model)).backward()
        tracker.dead()
    assert counter.frame_count == 2


def test_inference_mode_and_autocast_are_tracked() -> None:
    model, (x,) = Model(), inputs()
    tracker = SparsityTracker(model, every=1)
    with tracker.watch(0), torch.inference_mode():
        model(x)
    with tracker.watch(1), torch.autocast("cpu", BF16):
        model(x)
    assert tracker.read().layers[0].tokens == B * S
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with tracker.watch(2):
        with torch.autocast("cpu", BF16):
            compiled(x)
        recorder: Any = recipe.layers(model)["blocks.0.mlp"]._recorder
        # counted outside autocast, as the layer saw it
        assert recorder.inputs[0].dtype == BF16
    assert tracker.read().layers[0].tokens == B * S


class Waits(TorchDispatchMode):
    """A mode that fails where the host would wait for a GPU: reading values, and tensors made from host numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "bincount", "lift_fresh")
        assert func._schema.name.removeprefix("aten::") not in waits, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("strategy", ["dense", "union"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_nothing_in_a_step_waits_for_the_device(strategy: Any, dtype: torch.dtype) -> None:
    kinds = TokenTypes(("first", "a", "b"), torch.tensor([1, 2, -1]))
    model = Model(SparseGatedMLP(K, N, strategy=strategy), SparseMLP(K, N, strategy=strategy)).to(dtype)
    ids, batches = torch.zeros(B, S, dtype=torch.int64), inputs(4, dtype=dtype)
    recipe.record_aux(model)
    tracker = SparsityTracker(model, every=2, types=kinds.names)

    def run(number: int) -> None:
        with tracker.watch(number, types=kinds(ids)):
            y = model(batches[number])
        loss = y.square().mean() + 2e-5 * recipe.l1_warmup(number, 10) * recipe.l1_term(model)
        loss.backward()
        recipe.reinitialize_dead(model, tracker.dead(), step=number)

    with Waits():
        for number in range(4):
            run(number)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), Waits():
        tracker.read()


@pytest.mark.gpu
def test_nothing_in_a_step_waits_for_a_gpu() -> None:
    kinds = TokenTypes(("first", "a", "b"), torch.tensor([1, 2, -1]))
    with torch.device("cuda"):
        model = Model(SparseGatedMLP(K, N, dtype=BF16), SparseMLP(K, N, dtype=BF16)).to(BF16)
        ids, x = torch.zeros(B, 128, dtype=torch.int64), torch.randn(B, 128, K, dtype=BF16)
    recipe.record_aux(model)
    tracker = SparsityTracker(model, every=2, types=kinds.names)
    for number in range(6):
        # the first passes load kernels
        torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
        try:
            with tracker.watch(number, types=kinds(ids)):
                y = model(x)
            (y.float().square().mean() + recipe.l1_term(model)).backward()
            recipe.reinitialize_dead(model, tracker.dead(), step=number)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [row.tokens for row in tracker.read().layers] == [B * 128] * 2


def test_token_types() -> None:
    kinds = TokenTypes(("first", "a", "b"), torch.tensor([1, 2, -1, 1]))
    ids = torch.tensor([[0, 1, 2, 3], [2, 1, 9, 0]])
    # padding at the first place is not counted, ids beyond the table count as its last one
    assert kinds(ids).tolist() == [[0, 2, -1, 1], [-1, 2, 1, 1]]
    assert kinds(ids, torch.tensor([[0, 1, 0, 0], [1, 2, 3, 0]])).tolist() == [[0, 2, -1, 0], [-1, 2, 1, 0]]
    assert TokenTypes(("a", "b", "c"), torch.tensor([1, 2]))(ids[0]).tolist() == [1, 2, 2, 2]
    with pytest.raises(ValueError, match="from -1 to 1, got 0 to 5"):
        TokenTypes(("a", "b"), torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"integers \[V\], got torch\.float32"):
        TokenTypes(("a",), torch.zeros(2))


def test_token_types_of_tokenizers() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<pad>", "<s>", "2024", " ", "!?", "tree", "x1", "3", "été"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, "<pad>"))
    tokenizer.add_special_tokens(["<pad>", "<s>"])
    expected = ["special", "special", "digits", "space", "punctuation", "word", "word", "digits", "word"]
    transformers = pytest.importorskip("transformers")
    for each in (
        tokenizer,
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>"),
    ):
        kinds = recipe.token_types(each)
        assert [kinds.names[t] for t in kinds.table.tolist()] == [*expected, "special"]
        assert recipe.token_types(each, pad=0)(torch.tensor([0, 1, 2])).tolist() == [-1, 1, 2]
        assert kinds(torch.tensor([0, 1, 99])).tolist() == [0, 1, 1]


# Dead neurons


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("cls", [SparseGatedMLP, SparseMLP])
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
    draws = [*first, *drawn(step=4), *drawn(step=3, seed=1), *drawn(generator=torch.Generator().manual_seed(0))]
    for a, b in itertools.combinations(draws, 2):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.2
    only = copy.deepcopy(model)
    recipe.reinitialize_dead(only, {"blocks.1.mlp": everything["blocks.1.mlp"]}, step=3, fraction=1.0)
    assert not only.blocks[0].mlp.gate_proj.weight.any()
    assert torch.equal(only.blocks[1].mlp.gate_proj.weight, first[1])


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


def test_reinitialize_refuses() -> None:
    mlp = SparseGatedMLP(K, N)
    dead = torch.zeros(N, dtype=torch.bool)
    with pytest.raises(ValueError, match="either generator or step"):
        recipe.reinitialize_dead(mlp, dead)
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\]"):
        recipe.reinitialize_dead(mlp, dead, 0.0, step=0)
    with pytest.raises(ValueError, match=r"must be bool \[40\], got torch\.int64 \[40\]"):
        recipe.reinitialize_dead(mlp, dead.long(), step=0)
    with pytest.raises(TypeError, match="must map names"):
        recipe.reinitialize_dead(Model(), dead, step=0)
    with pytest.raises(ValueError, match=r"must name layers of the module \(blocks\.0\.mlp, blocks\.1\.mlp\), got mlp"):
        recipe.reinitialize_dead(Model(), {"mlp": dead}, step=0)
    mlp.gate_proj.weight.data = mlp.gate_proj.weight.data.flatten()
    with pytest.raises(ValueError, match=r"must have 40 rows, got \[640\]: .* summon_full_params"):
        recipe.reinitialize_dead(mlp, dead, step=0)


# Strategies


@pytest.fixture
def chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU choose as a GPU does; few non-zeros make the sparse route cheap."""

    def free(kind: str, index: int | None) -> str:
        return ""

    free._dynamo_marked_constant = True  # type: ignore[attr-defined]
    monkeypatch.setattr(_auto, "forced", free)
    monkeypatch.setattr(tuning, "coefficients", lambda *_: {"union": (0.2, 0.6, 1.0, 0.0)})


def silence(mlp: Any, alive: int) -> None:
    """Let the first ``alive`` neurons fire for every token, and no others."""
    gate = _compaction.gate_of(mlp)
    with torch.no_grad():
        gate.weight.zero_()
        gate.bias.copy_(torch.where(torch.arange(len(gate.bias)) < alive, 1.0, -1.0))


@pytest.mark.usefixtures("chooses")
def test_settle_names_what_the_figures_call_for(monkeypatch: pytest.MonkeyPatch) -> None:
    mlps = [SparseGatedMLP(K, N, bias=True, strategy=s, dtype=BF16) for s in ("auto", "auto", "dense")]
    for mlp, alive in zip(mlps, (2, 40, 2)):
        silence(mlp, alive)
    model = Model(*mlps).to(BF16)
    twell.nn.set_down_layout(model, "rows")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 128, K, dtype=BF16)
    tracker = SparsityTracker(model, every=1)

    def run(number: int) -> recipe.SparsityStats:
        with tracker.watch(number):
            y = compiled(x)
        y.sum().backward()
        return tracker.read()

    stats = run(0)
    # a fresh graph in training
    assert [row.strategy for row in stats.layers] == ["dense"] * 3
    assert recipe.strategies(compiled) == {f"blocks.{i}.mlp": "dense" for i in range(3)}
    assert recipe.settle(compiled, stats) == {"blocks.0.mlp": ("auto", "union"), "blocks.1.mlp": ("auto", "dense")}
    assert [mlp.strategy for mlp in mlps] == ["union", "dense", "dense"]
    stats = run(1)
    assert [row.strategy for row in stats.layers] == ["union", "dense", "dense"]
    assert recipe.settle(model, stats) == {}
    # a strategy that the caller named stays; one that settle named follows the figures
    silence(mlps[0], 40)
    silence(mlps[1], 2)
    assert recipe.settle(model, run(2)) == {"blocks.0.mlp": ("union", "dense"), "blocks.1.mlp": ("dense", "union")}
    mlps[1].strategy = "row"
    silence(mlps[1], 40)
    assert recipe.settle(model, run(3)) == {}
    # where copies of the down weight cost more than the layer saves
    monkeypatch.setattr(tuning, "COPY_BYTES", 1e12)
    silence(mlps[0], 2)
    stats = run(4)
    twell.nn.set_down_layout(model, "linear")
    assert recipe.settle(model, stats) == {}
    twell.nn.set_down_layout(model, "rows")
    assert recipe.settle(model, stats) == {"blocks.0.mlp": ("dense", "union")}


def test_settle_leaves_devices_without_a_choice() -> None:
    model, (x,) = Model(SparseGatedMLP(K, N), SparseMLP(K, 2 * N)), inputs()
    tracker = SparsityTracker(model)
    with tracker.watch(0):
        model(x)
    assert recipe.settle(model, tracker.read()) == {}
    assert recipe.strategies(model) == {"blocks.0.mlp": "dense", "blocks.1.mlp": "dense"}
    assert isinstance(twell.explain(model).rows[0].strategy, str)


# Output


def stats_of(model: Model, number: int = 0) -> recipe.SparsityStats:
    tracker = SparsityTracker(model, types=("a",))
    with tracker.watch(number):
        model(inputs()[0])
    stats = tracker.read()
    tracker.close()
    return stats


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_line_per_layer(tmp_path: Path) -> None:
    path, stats = tmp_path / "new" / "sparsity.csv", stats_of(Model())
    writer = StatsWriter(path, tensorboard=False)
    writer.write(10, stats)
    writer.write(20, stats)
    writer.close()
    lines = table(path)
    assert [(line["step"], line["layer"]) for line in lines] == [
        (number, layer) for number in ("10", "20") for layer in ("blocks.0.mlp", "blocks.1.mlp")
    ]
    first = stats.layers[0]
    assert float(lines[0]["l0"]) == pytest.approx(first.l0, rel=1e-5)
    assert (lines[0]["neurons"], lines[0]["dead"], lines[0]["strategy"]) == (str(N), str(first.dead), "union")
    assert float(lines[0]["l0_at_0"]) == pytest.approx(first.positions["0"], rel=1e-5)
    # no token has such a place, and none had a type
    assert lines[0]["l0_at_1024-"] == lines[0]["l0_of_a"] == ""


def test_csv_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, stats = tmp_path / "sparsity.csv", stats_of(Model())
    writer = StatsWriter(path, tensorboard=False)
    for number in (1, 2, 3, 4):
        writer.write(number, stats)
    whole = path.read_bytes()
    # cut anywhere, even in the header or in a number of the last line
    for cut in (3, len(whole) // 2, len(whole) - 1, len(whole)):
        path.write_bytes(whole[:cut])
        before = [line for line in table(path)[:-1] if int(line["step"]) <= 2] if cut > 300 else []
        StatsWriter(path, tensorboard=False, resume_step=2)
        writer = StatsWriter(path, tensorboard=False, resume_step=2)
        writer.write(3, stats)
        lines = table(path)
        assert lines[: len(before)] == before
        assert [line["step"] for line in lines[-2:]] == ["3", "3"]
        assert len({tuple(line) for line in lines}) == 1
        assert max(int(line["step"]) for line in lines) == 3
        assert not list(tmp_path.glob(".*"))
    # a machine that lost power may leave this
    kept = path.read_bytes()
    path.write_bytes(kept + b"\0" * 40 + b"\n\xff\xfe,1\nx" + kept.splitlines()[-1][1:] + b"\n")
    StatsWriter(path, tensorboard=False, resume_step=3)
    assert path.read_bytes() == kept
    # other columns
    writer = StatsWriter(path, tensorboard=False, resume_step=3)
    tracker = SparsityTracker(model := Model())
    with tracker.watch(0):
        model(inputs()[0])
    with pytest.raises(ValueError, match="must have the columns"):
        writer.write(4, tracker.read())
    # a new run overwrites no other run's lines
    content = path.read_bytes()
    with caplog.at_level(logging.WARNING, "twell"):
        StatsWriter(path, tensorboard=False).write(1, stats)
        StatsWriter(path, tensorboard=False).write(1, stats)
    assert (tmp_path / "sparsity.csv.1").read_bytes() == content
    assert (tmp_path / "sparsity.csv.2").exists()
    assert "moved to" in caplog.text
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="must have a column step, got a, b"):
        StatsWriter(tmp_path / "other.csv", resume_step=1)


def test_a_write_that_takes_a_part_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:7])

    stats, monkey = stats_of(Model()), lambda path, mode, buffering: Slow(path, mode)
    StatsWriter(tmp_path / "whole.csv", tensorboard=False).write(1, stats)
    monkeypatch.setattr(_writers, "open", monkey, raising=False)
    StatsWriter(tmp_path / "parts.csv", tensorboard=False).write(1, stats)
    assert (tmp_path / "parts.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


@pytest.mark.parametrize("room", [0, 130])
@pytest.mark.parametrize("written", [0, 1])
def test_lines_that_do_not_fit_raise_and_leave_none(written: int, room: int, tmp_path: Path) -> None:
    """A full disk takes part of a write: the header, or lines; none may stay or join others."""
    path, stats = tmp_path / "sparsity.csv", stats_of(Model())
    writer = StatsWriter(path, tensorboard=False)
    for number in range(written):
        writer.write(number, stats)
    size, limits = path.stat().st_size if written else 0, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            writer.write(7, stats)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == size
    writer.write(8, stats)
    lines = table(path)
    assert [line["step"] for line in lines] == [str(number) for number in (*range(written), 8) for _ in range(2)]
    assert not any(None in line or None in line.values() for line in lines)


def test_a_killed_run_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "sparsity.csv"
    code = """
        import itertools, sys
        from twell.recipe import LayerStats, SparsityStats, StatsWriter
        row = LayerStats("layer", 8, 1.0, 2.0, 3, 1, 0, 1.0, 0.5, {"0-": 1.0}, {}, "row")
        stats = SparsityStats((row,) * 50)
        writer = StatsWriter(sys.argv[1], tensorboard=False)
        for step in itertools.count():
            writer.write(step, stats)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(path)], env=environment())
    try:
        deadline = time.monotonic() + 60
        while not (path.exists() and path.stat().st_size > 100_000):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    StatsWriter(path, tensorboard=False, resume_step=1 << 40)
    lines = table(path)
    assert len(lines) > 1000
    assert [int(line["step"]) for line in lines] == [i // 50 for i in range(len(lines))]


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    stats = stats_of(Model())
    writer = StatsWriter(tmp_path / "sparsity.csv")
    for number in (1, 2, 3):
        writer.write(number, stats)
    writer.close()
    writer = StatsWriter(tmp_path / "sparsity.csv", resume_step=2)
    writer.write(3, stats)
    writer.close()
    events = EventAccumulator(str(tmp_path / "sparsity.tensorboard"))
    events.Reload()
    scalars = events.Scalars("twell/l0/blocks.0.mlp")
    assert [scalar.step for scalar in scalars] == [1, 2, 3]
    assert scalars[0].value == pytest.approx(stats.layers[0].l0)
    assert events.Scalars("twell/dead/mean")[0].value == pytest.approx(stats.summary()["dead"])


def test_wandb_gets_what_a_run_that_is_active_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Run:
        logged: list[dict[str, Any]] = []  # noqa: RUF012
        metrics: list[Any] = []  # noqa: RUF012

        def log(self, values: dict[str, Any]) -> None:
            self.logged.append(values)

        def define_metric(self, *args: Any, **kwargs: Any) -> None:
            self.metrics.append((args, kwargs))

    class Wandb:
        run: Run | None = None

    monkeypatch.setitem(sys.modules, "wandb", Wandb())  # type: ignore[arg-type]
    stats = stats_of(Model())
    writer = StatsWriter(tmp_path / "sparsity.csv", tensorboard=False)
    writer.write(1, stats)
    Wandb.run = Run()
    writer.write(2, stats)
    StatsWriter(tmp_path / "other.csv", tensorboard=False, wandb=False).write(3, stats)
    (values,) = Run.logged
    assert values["twell/step"] == 2
    assert values["twell/l1/blocks.1.mlp"] == stats.layers[1].l1
    assert len(Run.metrics) == 2


# Several ranks


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "python"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def ddp(rank: int, folder: Path) -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    collectives: list[int] = []
    all_reduce = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        collectives.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    torch.manual_seed(0)
    model = Model()
    recipe.record_aux(model)
    wrapped = DistributedDataParallel(model)
    tracker = SparsityTracker(wrapped, every=1, types=("a", "b"))
    for number in range(2):
        for i, x in enumerate(inputs(4)[rank::2]):
            with nullcontext() if i else wrapped.no_sync():
                with tracker.watch(number, types=TYPES):
                    y = wrapped(x)
                (step_loss(y, wrapped) / 2).backward()
        if number == 0:
            grads = gradients(model)
    counts = [len(collectives)]
    stats = tracker.read()
    counts.append(len(collectives))
    dead = tracker.dead()
    counts.append(len(collectives))
    recipe.reinitialize_dead(wrapped, {name: ~mask for name, mask in dead.items()}, step=3)
    StatsWriter(folder / f"sparsity{rank}.csv").write(1, stats)
    weights = [p.detach() for p in model.parameters()]
    names = list(recipe.layers(wrapped))
    return {"grads": grads, "stats": stats, "dead": dead, "counts": counts, "weights": weights, "names": names}


def fsdp2(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    mesh, model = init_device_mesh("cpu", (2,)), Model()
    twell.nn.set_down_layout(model, "linear")
    recipe.record_aux(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tracker = SparsityTracker(model, every=1)
    with tracker.watch(0):
        y = model(inputs(2)[rank])
    step_loss(y, model).backward()
    grads = [p.grad.full_tensor() for p in model.parameters()]
    masks = {name: torch.arange(len(mask)) % 3 == 0 for name, mask in tracker.dead().items()}
    recipe.reinitialize_dead(model, masks, step=3)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    weights = [p.full_tensor().detach() for p in model.parameters()]
    return {"grads": grads, "weights": weights, "stats": tracker.read()}


def both_ways(device: torch.device, folder: Path) -> None:
    """Save the figures of DDP and FSDP2; the processes of ranks end with what they changed."""
    rank = dist.get_rank()
    torch.save({"ddp": ddp(rank, folder), "fsdp2": fsdp2(rank)}, folder / f"result{rank}")


TYPES = torch.arange(B * S).view(B, S) % 2


def step_loss(y: Tensor, model: nn.Module) -> Tensor:
    return y.square().mean() + 0.1 * recipe.l1_term(model)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """The results of two processes over gloo, and their folder."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks.run(2, both_ways, folder, folder=folder)
    return [torch.load(folder / f"result{rank}", weights_only=False) for rank in range(2)], folder


def assert_same_figures(got: recipe.SparsityStats, expected: recipe.SparsityStats) -> None:
    for a, b in zip(got.layers, expected.layers, strict=True):
        assert a._replace(l0=None, l1=None) == b._replace(l0=None, l1=None)
        assert (a.l0, a.l1) == pytest.approx((b.l0, b.l1))


def test_ranks_of_ddp_share_figures_and_noise(two_ranks: tuple[list[dict[str, Any]], Path]) -> None:
    first, second = (result["ddp"] for result in two_ranks[0])
    folder = two_ranks[1]
    assert first["stats"] == second["stats"]
    assert first["names"] == ["blocks.0.mlp", "blocks.1.mlp"]
    # none is in a step, one reads everything
    assert first["counts"] == [0, 1, 1]
    for key in ("grads", "weights"):
        assert all(torch.equal(a, b) for a, b in zip(first[key], second[key]))
    assert (folder / "sparsity0.csv").exists()
    assert not (folder / "sparsity1.csv").exists()

    # the same in one process
    model = Model()
    recipe.record_aux(model)
    tracker = SparsityTracker(model, every=1, types=("a", "b"))
    for x in inputs(4):
        with tracker.watch(0, types=TYPES):
            y = model(x)
        (step_loss(y, model) / 4).backward()
    assert_close(first["grads"], gradients(model))
    assert_same_figures(first["stats"], tracker.read())
    for name, mask in tracker.dead().items():
        assert torch.equal(first["dead"][name], mask)


def test_ranks_of_fsdp2_are_as_one_process(two_ranks: tuple[list[dict[str, Any]], Path]) -> None:
    model = Model()
    recipe.record_aux(model)
    tracker = SparsityTracker(model, every=1)
    for x in inputs(2):
        with tracker.watch(0):
            y = model(x)
        (step_loss(y, model) / 2).backward()
    wanted, stats = gradients(model), tracker.read()
    masks = {name: torch.arange(len(mask)) % 3 == 0 for name, mask in tracker.dead().items()}
    recipe.reinitialize_dead(model, masks, step=3)
    for result in (result["fsdp2"] for result in two_ranks[0]):
        assert_close(result["grads"], wanted)
        # the noise is that of the whole weight
        assert all(torch.equal(a, b) for a, b in zip(result["weights"], model.parameters()))
        assert_same_figures(result["stats"], stats)
