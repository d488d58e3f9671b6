"""The tracker of sparsity: what it counts, in one process and on two ranks."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch._dynamo.testing
import torch.distributed as dist
import torch.nn.functional as F
from ffns import Fused
from ffns import N as FUSED
from recipe_models import (
    B,
    K,
    Model,
    N,
    S,
    Waits,
    brute,
    inputs,
    pair,
    plain_pass,
    tracked,
)
from torch import Tensor, nn

import twell
from twell import recipe
from twell.nn import compaction
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.recipe import SparsityTracker

BF16 = torch.bfloat16

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        ("eager", torch.float32),
        ("checkpoint", torch.float32),
        ("compiled", BF16),
        ("compiled blocks, checkpoint", BF16),
    ],
)
def test_tracker_counts_what_fires(how: str, dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    with torch.no_grad():
        for mlp in recipe.layers(model).values():
            compaction.gate_of(mlp).weight[5:9] = 0
    if "checkpoint" in how:
        model.reentrant = False
    recipe.record_aux(model)
    tracker = SparsityTracker(model, every=2)
    forward: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if how == "compiled" else model
    if "blocks" in how:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    batches = inputs(2, dtype=dtype)
    means: list[list[tuple[float, float]]] = [[], []]
    for number in range(4):
        # two micro-batches
        for x in batches:
            with tracker.watch(number):
                y = forward(x)
            (y.square().mean() + recipe.l1_term(model)).backward()
            _, gates, states = plain_pass(model, x)
            for mean, gate, h in zip(means, gates, states):
                mean.append(
                    (float((gate != 0).sum(-1).double().mean()), float(h.detach().double().abs().sum(-1).mean()))
                )
    stats = tracker.read()
    assert [row.layer for row in stats.layers] == ["blocks.0.mlp", "blocks.1.mlp"]
    for i, row in enumerate(stats.layers):
        gates = [plain_pass(model, x)[1][i] for x in batches]
        firings = brute(gates)
        assert row.neurons == gates[0].shape[-1]
        assert row.l0 == pytest.approx(sum(m[0] for m in means[i]) / 8, rel=1e-6)
        assert row.l1 == pytest.approx(sum(m[1] for m in means[i]) / 8, rel=1e-5 if dtype == torch.float32 else 2e-2)
        assert row.tokens == 2 * B * S
        assert row.dead == int((firings == 0).sum()) >= 4
        assert torch.equal(tracker.dead()[row.layer], firings == 0)
    summary = stats.summary()
    assert summary.keys() == {"l0", "l1", "dead"}
    assert summary["dead"] == pytest.approx(sum(row.dead / row.neurons for row in stats.layers) / 2)  # type: ignore[operator]
    again = tracker.read().layers[0]
    assert again.l0 is None
    assert again.dead == stats.layers[0].dead


def test_figures_are_of_the_last_observed_step() -> None:
    model, batches = Model(), inputs(6)
    tracker = SparsityTracker(model, every=2)
    tokens, found = [], []
    for number, x in enumerate(batches, start=1):
        if number == 3:
            # dies behind an observed step
            with torch.no_grad():
                compaction.gate_of(model.blocks[0].mlp).weight[7] = 0
        with tracker.watch(number):
            model(x)
        found.append(tracker.dead()["blocks.0.mlp"])
        tokens.append(tracker.read().layers[0].tokens)
        # the first, then 2, 4, 6
        of = batches[number - 1 - (number % 2 and number > 1)]
        assert torch.equal(found[-1], brute([plain_pass(model, of)[1][0]]) == 0) or number == 3
    assert tokens == [B * S] * 6
    assert [bool(mask[7]) for mask in found] == [False] * 3 + [True] * 3

    # what a step that raises has observed does not count
    def fail() -> None:
        with tracker.watch(8):
            model(batches[0])
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    with tracker.watch(10):
        model(batches[1][:1])
    assert tracker.read().layers[0].tokens == S
    never = SparsityTracker(Model(), every=0)
    with never.watch(0):
        never.model(batches[0])
    row = never.read().layers[0]
    assert row.l0 is not None
    assert row.dead is None
    assert not any(mask.any() for mask in never.dead().values())


def test_a_step_that_fails_counts_nothing() -> None:
    model, (x, other) = Model(), inputs(2)
    tracker = SparsityTracker(model)
    with pytest.raises(RuntimeError, match="shape"), tracker.watch(0):
        # past the first block
        nn.Sequential(model.blocks[0], nn.Linear(1, 1))(other)
    with tracker.watch(0):
        model(x)
    row = tracker.read().layers[0]
    assert row.l0 == pytest.approx(float((plain_pass(model, x)[1][0] != 0).sum(-1).double().mean()))


def test_only_what_is_watched_counts() -> None:
    model, (x, other) = Model(), inputs(2)
    model.reentrant = False
    tracker = SparsityTracker(model, every=1)
    with tracker.watch(0):
        # what a checkpoint computes again counts once
        model(x).sum().backward()
    model(other)
    model.eval()(other)
    row = tracker.read().layers[0]
    assert row.tokens == B * S
    assert row.l0 == pytest.approx(float((plain_pass(model, x)[1][0] != 0).sum(-1).double().mean()))
    with pytest.raises(RuntimeError, match="no layer was called in training mode"), tracker.watch(1):
        model(x)


def test_shared_layers_and_pairs_are_tracked() -> None:
    shared = SparseMLP(K, N)
    model, (x,) = Model(shared, shared), inputs()
    (row,) = tracked(model, x)
    gates = plain_pass(model, x)[1]
    firings = brute(gates)
    assert row.tokens == 2 * B * S
    assert row.l0 == pytest.approx(float(firings.sum() / row.tokens))
    assert row.dead == int((firings == 0).sum())
    block = pair()
    (row,) = tracked(block, x)
    assert row.layer == "fc2"
    fires = F.linear(x, block.fc1.weight, block.fc1.bias) > 0
    assert row.l0 == pytest.approx(float(fires.sum() / 16))
    assert row.dead == int((~fires.flatten(0, 1).any(0)).sum())


def test_a_model_has_one_tracker() -> None:
    model = Model()
    tracker = SparsityTracker(model)
    with pytest.raises(ValueError, match="a SparsityTracker already, on blocks"):
        SparsityTracker(model)
    tracker.close()
    SparsityTracker(model)


def test_compiled_models_have_two_variants() -> None:
    model, (x,) = Model(SparseGatedMLP(K, N), SparseMLP(K, 2 * N, strategy="union")), inputs()
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
    assert [row.strategy for row in tracker.read().layers] == ["dense", "dense"]


@pytest.mark.parametrize(("strategy", "dtype"), [("dense", torch.float32), ("union", BF16)])
def test_nothing_in_a_step_waits_for_the_device(strategy: Any, dtype: torch.dtype) -> None:
    """With everything that training does with figures."""
    mlps = (SparseGatedMLP(K, N, strategy=strategy), SparseMLP(K, N, strategy=strategy))
    model, (x,) = Model(*mlps).to(dtype), inputs(dtype=dtype)
    recipe.record_aux(model)
    tracker = SparsityTracker(model, every=2)

    def run(number: int) -> None:
        with tracker.watch(number):
            y = model(x)
        loss = y.float().square().mean() + 2e-5 * recipe.l1_warmup(number, 10) * recipe.l1_term(model)
        loss.backward()
        recipe.reinitialize_dead(model, tracker.dead(), step=number)

    with Waits():
        for number in range(4):
            run(number)
    with pytest.raises(AssertionError, match=r"^aten\.(lift_fresh|_local_scalar_dense)"), Waits():
        tracker.read()


def ddp(rank: int) -> dict[str, Any]:
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
    tracker = SparsityTracker(wrapped, every=1)
    for number in range(2):
        for i, x in enumerate(inputs(4)[rank::2]):
            with nullcontext() if i else wrapped.no_sync():
                with tracker.watch(number):
                    y = wrapped(x)
                (step_loss(y, wrapped) / 2).backward()
    counts = [len(collectives)]
    stats = tracker.read()
    counts.append(len(collectives))
    dead = tracker.dead()
    counts.append(len(collectives))
    recipe.reinitialize_dead(wrapped, {name: ~mask for name, mask in dead.items()}, step=3)
    weights = [p.detach() for p in model.parameters()]
    names = list(recipe.layers(wrapped))
    return {"stats": stats, "dead": dead, "counts": counts, "weights": weights, "names": names}


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
    masks = {name: torch.arange(len(mask)) % 3 == 0 for name, mask in tracker.dead().items()}
    recipe.reinitialize_dead(model, masks, step=3)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    weights = [p.full_tensor().detach() for p in model.parameters()]
    whole: Any = fused()
    fully_shard(whole[0], mesh=mesh)
    recipe.reinitialize_dead(whole, {"0": torch.arange(FUSED) % 3 == 0}, step=3)
    together = whole[0].gate_up_proj.weight.full_tensor().detach()
    return {"weights": weights, "stats": tracker.read(), "fused": together}


def fused() -> nn.Sequential:
    torch.manual_seed(0)
    return twell.sparsify_(nn.Sequential(Fused(bias=False)), names=("gate_up_proj", "down_proj"))


def both_ways(device: torch.device, folder: Path) -> None:
    """Save the figures of DDP and FSDP2; the processes of ranks end with what they changed."""
    rank = dist.get_rank()
    torch.save({"ddp": ddp(rank), "fsdp2": fsdp2(rank)}, folder / f"result{rank}")


def step_loss(y: Tensor, model: nn.Module) -> Tensor:
    return y.square().mean() + 0.1 * recipe.l1_term(model)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    ranks.run(2, both_ways, folder, folder=folder)
    return [torch.load(folder / f"result{rank}", weights_only=False) for rank in range(2)]


def assert_same_figures(got: recipe.SparsityStats, expected: recipe.SparsityStats) -> None:
    for a, b in zip(got.layers, expected.layers, strict=True):
        assert a._replace(l0=None, l1=None) == b._replace(l0=None, l1=None)
        assert (a.l0, a.l1) == pytest.approx((b.l0, b.l1))


def test_ranks_of_ddp_share_figures_and_noise(two_ranks: list[dict[str, Any]]) -> None:
    first, second = (result["ddp"] for result in two_ranks)
    assert first["stats"] == second["stats"]
    assert first["names"] == ["blocks.0.mlp", "blocks.1.mlp"]
    # none is in a step, two read everything
    assert first["counts"] == [0, 2, 2]
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"]))

    # the same in one process
    model = Model()
    recipe.record_aux(model)
    tracker = SparsityTracker(model, every=1)
    for x in inputs(4):
        with tracker.watch(0):
            model(x)
    assert_same_figures(first["stats"], tracker.read())
    for name, mask in tracker.dead().items():
        assert torch.equal(first["dead"][name], mask)


def test_ranks_of_fsdp2_are_as_one_process(two_ranks: list[dict[str, Any]]) -> None:
    model = Model()
    recipe.record_aux(model)
    tracker = SparsityTracker(model, every=1)
    for x in inputs(2):
        with tracker.watch(0):
            model(x)
    stats = tracker.read()
    masks = {name: torch.arange(len(mask)) % 3 == 0 for name, mask in tracker.dead().items()}
    recipe.reinitialize_dead(model, masks, step=3)
    for result in (result["fsdp2"] for result in two_ranks):
        # the noise is that of the whole weight
        assert all(torch.equal(a, b) for a, b in zip(result["weights"], model.parameters()))
        assert_same_figures(result["stats"], stats)
    whole: Any = fused()
    before = whole[0].gate_up_proj.weight.detach().clone()
    recipe.reinitialize_dead(whole, {"0": torch.arange(FUSED) % 3 == 0}, step=3)
    changed = (whole[0].gate_up_proj.weight != before).any(1)
    assert torch.equal(changed.nonzero().flatten(), torch.arange(0, FUSED, 3))
    assert all(torch.equal(result["fsdp2"]["fused"], whole[0].gate_up_proj.weight) for result in two_ranks)
