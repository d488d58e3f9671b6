"""Counting non-zeros, compacting and restoring: exact bits, torch's handling of modules, refusals."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from ffns import Fused, Meta, UpFirst
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import twell
from twell import testing
from twell.nn import compaction as _compaction
from twell.nn.compaction import Compaction
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.testing import FFN

BF16, FP16 = torch.bfloat16, torch.float16
GATED = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
M, K, N = 21, 32, 536
MLP = SparseGatedMLP | SparseMLP


def problem(biases: str = "gate up down", density: float = 0.05, **options: Any) -> FFN:
    """A problem of few tokens, so most neurons never fire."""
    return testing.integer_problem(M, K, N, density=density, biases=biases, **options)


def layer_of(p: FFN, gated: bool, **options: Any) -> MLP:
    """The module with the weights and biases of a problem; without gate, w_gate is its up projection."""
    n, k = p.w_gate.shape
    bias = p.b_gate is not None
    cls = SparseGatedMLP if gated else SparseMLP
    mlp = cls(k, n, bias, dtype=p.x.dtype, device=p.x.device, **options)
    state = {"gate_proj.weight": p.w_gate, "up_proj.weight": p.w_up, "down_proj.weight": p.w_down.t()}
    if bias:
        state |= {f"{name}_proj.bias": getattr(p, f"b_{name}") for name in ("gate", "up", "down")}
    if not gated:
        state = {name.replace("gate_proj", "up_proj"): t for name, t in state.items() if "up_proj" not in name}
    mlp.load_state_dict(state)
    return mlp


def fired(p: FFN) -> Tensor:
    return (testing.float64_gate(p) != 0).sum(0)


def evidence(mlp: MLP, x: Tensor) -> twell.Firing:
    with twell.count_firing(mlp) as firing, torch.no_grad():
        mlp(x)
    return firing[""]


def without(p: FFN, kept: Tensor) -> FFN:
    """Return the problem in which neurons that are not kept add nothing."""
    return p._replace(w_down=p.w_down * kept[:, None].to(p.w_down))


def kept_of(mlp: nn.Module) -> Tensor:
    compaction = mlp.compaction
    assert isinstance(compaction, Compaction)
    return compaction.kept


def half(n: int = N) -> Tensor:
    mask = torch.zeros(n, dtype=torch.bool)
    mask[torch.randperm(n, generator=torch.Generator().manual_seed(0))[:264]] = True
    return mask


def is_laid_out(mlp: MLP, layout: str = "auto") -> bool:
    weight = mlp.down_proj.weight
    stored = weight.t() if layout == "rows" else weight
    return weight.shape == (K, mlp.intermediate) and stored.is_contiguous() and mlp.down_layout == layout


def same_parameters(a: nn.Module, b: nn.Module) -> None:
    ours, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        other = theirs[name]
        assert (parameter.dtype, parameter.shape, parameter.stride()) == (other.dtype, other.shape, other.stride()), (
            name
        )
        assert torch.equal(parameter, other), name
        assert parameter.requires_grad == other.requires_grad, name


class Residual(nn.Module):
    """Layers of both kinds: one in two places, one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(K, K, dtype=BF16)
        self.blocks = nn.ModuleList([layer_of(problem(seed=1), True), layer_of(problem(seed=2), False)])
        self.blocks.append(self.blocks[0])
        self.idle = SparseMLP(K, 16, dtype=BF16)
        self.first = [self.blocks[0]]

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for block in self.blocks:
            y = y + block(x)
        return y


def called(firing: twell.FiringCounts) -> dict[str, twell.Firing]:
    return {name: layer for name, layer in firing.items() if layer.tokens}


# Counting


@pytest.mark.parametrize(
    ("gated", "biases", "dtype", "strategy"),
    [
        (True, "gate up down", BF16, "auto"),
        (False, "", BF16, "union"),
        (True, "", FP16, "row"),
        (False, "gate up down", torch.float32, "dense"),
    ],
)
def test_counts_what_fires(
    gated: bool, biases: str, dtype: torch.dtype, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if strategy == "row":
        # in chunks of three tokens
        monkeypatch.setattr(_compaction, "CHUNK_GATES", 3 * N)
    p = problem(biases, density=0.3, dtype=dtype)
    mlp = layer_of(p, gated, strategy=strategy)
    with twell.count_firing(mlp) as firing:
        mlp(p.x)
        with torch.no_grad():
            mlp(p.x[:20].view(2, 2, 5, K))
        with torch.inference_mode():
            mlp(x=p.x[0], return_aux=True)
        mlp(p.x[:0])
        mlp(p.x.t().contiguous().t())
    counts = 2 * fired(p) + fired(p.rows(0, 20)) + fired(p.rows(0, 1))
    layer = firing[""]
    assert list(firing) == [""]
    assert layer.counts.dtype == torch.int64
    assert torch.equal(layer.counts, counts)
    assert layer.tokens == 2 * M + 20 + 1
    assert torch.equal(layer.alive(3), counts >= 3)
    assert repr(layer) == f"Firing({int((counts > 0).sum())} of 536 neurons in 63 tokens)"
    assert repr(layer) in repr(firing)


@pytest.mark.parametrize(
    ("dtype", "strategy", "autocast", "weights", "x", "expected"),
    [
        # 2^-28 is below half of the smallest float16, and an ordinary bfloat16
        (FP16, "row", False, [2.0**-14], [2.0**-14], 0),
        (BF16, "row", False, [2.0**-14], [2.0**-14], 1),
        (BF16, "row", False, [float("nan")], [1.0], 1),
        # in float32 the gate is 2^-9; in bfloat16 1 + 2^-9 is 1, and the gate 0
        *((torch.float32, s, a, [1 + 2.0**-9, -1.0], [1.0, 1.0], int(not a)) for s in ("row", "dense") for a in (0, 1)),
    ],
)
def test_rounding_decides_what_fires(
    dtype: torch.dtype, strategy: Any, autocast: bool, weights: list[float], x: list[float], expected: int
) -> None:
    mlp, given = SparseMLP(8, 8, dtype=dtype, strategy=strategy), torch.zeros(1, 8, dtype=dtype)
    nn.init.zeros_(mlp.up_proj.weight)
    with torch.no_grad():
        mlp.up_proj.weight[0, : len(weights)] = torch.tensor(weights)
    given[0, : len(x)] = torch.tensor(x)
    with torch.autocast("cpu", BF16, enabled=bool(autocast)):
        assert evidence(mlp, given).counts.tolist() == [expected, *[0] * 7]


def test_the_operator_that_counts_keeps_the_contract_of_operators() -> None:
    torch.library.opcheck(torch.ops.twell_internal.add_counts, (torch.zeros(9, dtype=torch.int64), torch.arange(8), 3))


@pytest.mark.parametrize("how", ["plain", "reentrant", "compiled layer", "compiled block"])
def test_calls_in_a_checkpoint_count_once(how: str) -> None:
    if how == "compiled block" and torch.torch_version.TorchVersion(torch.__version__) < "2.10":
        pytest.skip("Dynamo cannot trace the keys of torch's own weak dictionary")
    torch._dynamo.reset()
    p = problem()
    mlp = layer_of(p, True)
    # behind it, so that recomputation does not stop before it
    block = nn.Sequential(mlp, nn.Softplus())
    with twell.count_firing(mlp) as firing:
        if how.startswith("compiled"):
            (block if how.endswith("block") else mlp).compile(backend="aot_eager", fullgraph=True)
        for _ in range(2):
            checkpoint(block, p.x.clone().requires_grad_(), use_reentrant=how == "reentrant").sum().backward()
    assert firing[""].tokens == 2 * M
    assert torch.equal(firing[""].counts, 2 * fired(p))


def test_counts_the_layers_of_a_model() -> None:
    model, x = Residual(), problem().x
    with twell.count_firing(model) as firing:
        model(x)
        copy.deepcopy(model)(x)
    model(x)
    assert list(firing) == ["blocks.0", "blocks.1", "idle"]
    with pytest.raises(TypeError, match="must be a tensor"), twell.count_firing(model):
        model.blocks[0]("words")
    assert [layer.tokens for layer in firing.values()] == [2 * M, M, 0]
    assert not any(layer._forward_pre_hooks for layer in model.modules())
    loaded = pickle.loads(pickle.dumps(firing))
    assert torch.equal(loaded["blocks.0"].totals, firing["blocks.0"].totals)


def test_compiled_models() -> None:
    """Compiled inside the counter a model stays one graph; compiled before it would count nothing and is refused."""
    torch.compiler.reset()
    p = problem()
    model = nn.Sequential(layer_of(p, True))
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        with twell.count_firing(model) as firing:
            compiled(p.x)
            testing.assert_same(compiled(p.x), testing.exact_output(p))
        compiled(p.x)
        assert firing["0"].tokens == 2 * M
        assert torch.equal(firing["0"].counts, 2 * fired(p))
        # otherwise the compiled call above is still guarded by the hook
        torch.compiler.reset()
        compiled(p.x)
        with twell.count_firing(model) as firing:
            compiled(p.x)
    if not firing["0"].tokens:
        with pytest.raises(ValueError, match="got counts of no tokens: the layer was not called, or only within a"):
            twell.compact(model, firing)


def test_evidence_adds_up() -> None:
    model = Residual()
    with twell.count_firing(model) as first:
        model(problem(seed=3).x)
    with twell.count_firing(model) as second:
        model(problem(seed=4).x)
    merged = first + second
    assert merged["blocks.1"].tokens == 2 * M
    assert torch.equal(merged["blocks.1"].counts, first["blocks.1"].counts + second["blocks.1"].counts)
    assert first.all_reduce() is first
    with pytest.raises(ValueError, match="both must have counted the same layers, got 'idle' in one alone"):
        first + twell.FiringCounts({name: first[name] for name in ("blocks.0", "blocks.1")})
    with pytest.raises(ValueError, match="both must have counted the same neurons, got 536 and 16"):
        first["blocks.0"] + first["idle"]
    with pytest.raises(TypeError, match="unsupported operand"):
        first + 1
    with pytest.raises(TypeError, match="unsupported operand"):
        first["idle"] + 1


def added_up(device: torch.device) -> tuple[list[int], int, int]:
    rank = torch.distributed.get_rank()
    firing = twell.FiringCounts(
        {"a": twell.Firing(torch.arange(9) + rank), "b": twell.Firing(torch.full((17,), 10**rank))}
    )
    merged = firing.all_reduce()
    return merged["a"].totals.tolist(), merged["b"].tokens, firing["b"].tokens


def test_evidence_of_two_ranks(tmp_path: Path) -> None:
    assert ranks.run(2, added_up, folder=tmp_path) == [(list(range(1, 18, 2)), 11, 10**rank) for rank in range(2)]


# Compacting


@pytest.mark.parametrize(
    ("gated", "biases", "dtype", "strategy"),
    [(True, "gate up down", BF16, "auto"), (False, "gate up down", FP16, "row"), (True, "", BF16, "union")],
)
def test_same_bits_where_no_removed_neuron_fires(gated: bool, biases: str, dtype: torch.dtype, strategy: Any) -> None:
    p = problem(biases, dtype=dtype)
    mlp = layer_of(p, gated, strategy=strategy, compression=4)
    compacted, report = twell.compact(mlp, evidence(mlp, p.x))
    living = int((fired(p) > 0).sum())
    (layer,) = report.layers
    assert (layer.neurons, layer.alive, layer.kept) == (N, living, -(-living // 8) * 8)
    assert 0 < layer.kept < N - 64
    assert type(compacted) is type(mlp)
    assert (compacted.intermediate, compacted.compression, compacted.strategy) == (layer.kept, 4, strategy)
    assert is_laid_out(compacted)
    with torch.no_grad():
        y, aux = compacted(p.x, return_aux=True)
        expected, expected_aux = mlp(p.x, return_aux=True)
    testing.assert_same(y, testing.exact_output(p, gated=gated))
    testing.assert_same(y, expected)
    assert aux == expected_aux
    # neurons that fire, too
    with torch.no_grad():
        halved, report = twell.compact(mlp, half())
        testing.assert_same(halved(p.x), testing.exact_output(without(p, half()), gated=gated))
    assert report.layers[0].tokens is None


@pytest.mark.parametrize("layout", ["rows", "linear", "auto"])
def test_what_a_compacted_layer_has(layout: Any) -> None:
    """Rows in order, flags of gradients, tied weights, layouts, dtypes, hooks, and the class with its attributes."""

    class Named(SparseGatedMLP):
        label = "none"

    mlp = Named(K, N, dtype=BF16, bias=True).eval()
    mlp.up_proj.weight = mlp.gate_proj.weight
    mlp.down_proj.to(FP16).requires_grad_(False)
    mlp.label, mlp.accumulate_main_grad = "first", True
    seen: list[int] = []
    mlp.register_forward_hook(lambda module, args, y: seen.append(y.shape[0]))
    twell.nn.set_down_layout(mlp, layout)
    compacted, _ = twell.compact(mlp, half())
    neurons = half().nonzero().flatten()
    assert torch.equal(compacted.compaction.neurons, neurons)
    for name, parameter in compacted.named_parameters():
        full = mlp.get_parameter(name)
        if name != "down_proj.bias":
            assert torch.equal(parameter, full[:, neurons] if name == "down_proj.weight" else full[neurons])
        assert (parameter.dtype, parameter.requires_grad) == (full.dtype, full.requires_grad)
    assert (type(compacted), compacted.label, compacted.accumulate_main_grad) == (Named, "first", True)
    assert (mlp.intermediate, hasattr(mlp, "compaction"), compacted.training) == (N, False, False)
    assert "264, compression=8" in repr(compacted)
    assert "264 of 536 neurons" in repr(compacted)
    linears = [child for child in compacted.children() if isinstance(child, nn.Linear)]
    assert [(c.in_features, c.out_features) for c in linears] == [(K, 264)] * 2 + [(264, K)]
    restored = twell.restore(compacted)
    same_parameters(restored, mlp)
    for made in (compacted, restored):
        assert made.up_proj.weight is made.gate_proj.weight
        assert is_laid_out(made, layout)
    compacted.requires_grad_(False).down_proj.to(BF16)
    compacted(torch.zeros(3, K, dtype=BF16))
    assert seen == [3]


def test_fills_up_with_those_that_fired_most_then_the_first() -> None:
    totals = torch.zeros(N + 1, dtype=torch.int64)
    totals[-1] = 1000
    totals[[5, 100, 300]] = 50
    totals[[200, 400]] = torch.tensor([3, 9])
    compacted, report = twell.compact(layer_of(problem(), True), twell.Firing(totals), minimum=10)
    assert compacted.compaction.neurons.tolist() == [0, 1, 2, 5, 100, 200, 300, 400]
    assert (report.layers[0].alive, report.layers[0].kept) == (3, 8)
    mask = torch.zeros(N, dtype=torch.bool)
    mask[[1, 535]] = True
    compacted, report = twell.compact(layer_of(problem(), False), mask)
    assert compacted.compaction.neurons.tolist() == [0, 1, 2, 3, 4, 5, 6, 535]


def test_all_neurons_and_sizes_that_are_no_multiple_of_8_stay() -> None:
    p = problem()
    compacted, report = twell.compact(layer_of(p, True), torch.ones(N, dtype=torch.bool))
    assert (report.layers[0].kept, report.bytes_saved, report.layers[0].gate_saved) == (N, 0, 0)
    with torch.no_grad():
        testing.assert_same(compacted(p.x), testing.exact_output(p))
    same_parameters(twell.restore(compacted), layer_of(p, True))
    odd = SparseMLP(8, 13, strategy="dense")
    for living, expected in ((1, 8), (8, 8), (9, 13), (13, 13)):
        compacted, _ = twell.compact(odd, torch.arange(13) < living)
        assert compacted.intermediate == expected
        assert compacted(torch.ones(2, 8)).shape == (2, 8)


def test_the_report_has_sizes_and_bytes_before_and_after() -> None:
    mlp = layer_of(problem(), True)
    totals = torch.tensor([2] * 250 + [1] * (N - 250) + [123456])
    _, report = twell.compact(mlp, twell.Firing(totals), minimum=2)
    (layer,) = report.layers
    assert (layer.name, layer.neurons, layer.alive, layer.kept, layer.tokens) == ("", N, 250, 256, 123456)
    assert layer.bytes_saved == report.bytes_saved == (N - 256) * (3 * K + 2) * 2
    assert layer.neurons_saved == 1 - 256 / N
    # three tiles of 256 neurons became one
    assert layer.gate_saved == pytest.approx(2 / 3)
    assert str(report).startswith("module: 536 neurons, 250 alive, 256 kept; ")
    assert str(report).endswith("alive are those that fired 2 times in 123,456 tokens")
    _, report = twell.compact(Residual(), {"blocks.1": half(), "idle": torch.arange(16) < 8})
    assert str(report).splitlines()[-1] == "272 of 552 neurons kept in 2 layers, 0.0 MB saved"
    assert (report.neurons, report.kept) == (552, 272)


# Models


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K)

    def forward(self, x: Tensor) -> Tensor:
        # more than a layer, so that the block stays
        return x + self.fc2(self.act(self.fc1(x)))


def of(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: twell.sparsify_(
        nn.Sequential(kind(), nn.Identity(), kind()),
        names=[("fc1", "fc2"), ("w1", "w3", "w2"), ("gate_up_proj", "down_proj")],
    )


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("make", [Residual, of(Pair), of(Meta), of(Fused), of(UpFirst)])
def test_models_are_compacted_as_they_were_counted(make: Callable[[], nn.Module], inplace: bool) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randint(-1, 2, (3, K)).float()
    if isinstance(model, Residual):
        x = problem().x
    keys, original, layers = list(model.state_dict()), copy.deepcopy(model), list(model.modules())
    with twell.count_firing(model) as firing:
        y = model(x)
    compacted, report = twell.compact(model, called(firing), inplace=inplace)
    assert (compacted is model) == inplace
    assert [layer.name for layer in report.layers] == list(called(firing))
    assert report.kept < report.neurons
    before, after = (sum(p.numel() * p.element_size() for p in m.parameters()) for m in (original, compacted))
    assert before - after == report.bytes_saved > 0
    torch.testing.assert_close(compacted(x), y)
    # gradients of what is not a neuron's, and of x, are those of the whole
    grads = []
    for m in (original, compacted):
        given = x.clone().requires_grad_()
        m(given).float().square().sum().backward()
        grads.append([given.grad, *(p.grad for n, p in m.named_parameters() if n.endswith("embed.weight"))])
    torch.testing.assert_close(*grads)
    if not inplace:
        assert list(model.state_dict()) == keys
        assert all(map(torch.equal, model.parameters(), original.parameters()))
        assert not {*model.modules()} & {*compacted.modules()}
        assert not {*model.parameters()} & {*compacted.parameters()}
    assert list(model.modules())[: len(layers) * (not inplace)] == layers * (not inplace)
    if isinstance(compacted, Residual):
        assert compacted.first[0] is compacted.blocks[0] is compacted.blocks[2]
        assert (compacted.idle.intermediate, hasattr(compacted.idle, "compaction")) == (16, False)
    # a fresh model of the masks takes the state
    other, _ = twell.compact(original, {name: compacted.get_submodule(name).compaction.kept for name in called(firing)})
    assert other.load_state_dict(compacted.state_dict()) == ([], [])
    restored = twell.restore(compacted, inplace=inplace)
    assert (restored is compacted) == inplace
    assert list(restored.state_dict()) == keys
    same_parameters(restored, original)
    torch.testing.assert_close(restored(x), y)


def test_in_place_frees_what_it_replaces() -> None:
    model = nn.Sequential(*(layer_of(problem(), True) for _ in range(3)))
    evidence(model[1], problem().x)
    # the down bias is no neuron's, and stays
    gone = [weakref.ref(parameter) for name, parameter in model.named_parameters() if "down_proj.bias" not in name]
    gc.disable()
    try:
        twell.compact(model, dict.fromkeys("012", half()), inplace=True)
        assert not any(parameter() is not None for parameter in gone)
        gone = [weakref.ref(layer.gate_proj.weight) for layer in model]
        twell.restore(model, inplace=True)
        assert not any(parameter() is not None for parameter in gone)
    finally:
        gc.enable()


def test_names_of_a_shared_layer() -> None:
    model = Residual()
    compacted, report = twell.compact(model, {"blocks.2": half()}, inplace=True)
    assert [layer.name for layer in report.layers] == ["blocks.2"]
    assert compacted.blocks[0] is compacted.blocks[2]
    assert compacted.blocks[0].intermediate == 264
    # nothing changes where something is refused
    model = Residual()
    with pytest.raises(ValueError, match=r"alive of idle must be bool \[16\]"):
        twell.compact(model, {"blocks.0": half(), "idle": half()}, inplace=True)
    assert model.blocks[0].intermediate == N


# Undoing


@pytest.mark.parametrize("keep_removed", [True, False])
def test_compacted_twice(keep_removed: bool) -> None:
    p = problem()
    mlp = layer_of(p, True)
    once, _ = twell.compact(mlp, half(), keep_removed=keep_removed)
    with torch.no_grad():
        # trained meanwhile
        mlp.gate_proj.weight[half()] += 1
        once.gate_proj.weight += 1
    again = torch.zeros(264, dtype=torch.bool)
    again[1::3] = True
    twice, report = twell.compact(once, again)
    neurons = half().nonzero().flatten()[1::3]
    assert torch.equal(twice.compaction.neurons, neurons)
    assert (report.layers[0].neurons, report.layers[0].kept) == (264, 88)
    assert torch.equal(twice.gate_proj.weight, mlp.gate_proj.weight[neurons])
    assert once.intermediate == 264
    if keep_removed:
        same_parameters(twell.restore(twice), mlp)
        same_parameters(twell.restore(once), mlp)
    else:
        assert twice.compaction.removed is None


def test_dropped_rows_are_not_restored() -> None:
    compacted, _ = twell.compact(layer_of(problem(), True), half(), keep_removed=False)
    assert "the others dropped" in repr(compacted)
    assert "compaction.removed" not in compacted.state_dict()
    compacted, _ = twell.compact(layer_of(problem(), True), half())
    kept_of(compacted)[0] ^= True
    with pytest.raises(ValueError, match=r"restore: module must have 26[35] neurons and .* got 264 and \[272, 98\]"):
        twell.restore(compacted)


# What torch does to modules


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("how", ["copy", "assign", "meta"])
def test_a_fresh_layer_of_the_map_takes_the_state(gated: bool, how: str) -> None:
    p = problem()
    mlp = layer_of(p, gated)
    compacted, _ = twell.compact(mlp, evidence(mlp, p.x))
    file = io.BytesIO()
    torch.save(compacted.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    fresh = type(mlp)(K, N, True, dtype=BF16, device="meta" if how == "meta" else None)
    after, report = twell.compact(fresh, state["compaction.kept"], inplace=True)
    assert after is fresh
    assert report.bytes_saved > 0
    if how == "meta":
        assert "some of 536" in repr(after)
        after = after.to_empty(device="cpu")
    assert after.load_state_dict(state, assign=how == "assign") == ([], [])
    assert is_laid_out(after)
    assert torch.equal(kept_of(after), kept_of(compacted))
    with torch.no_grad():
        testing.assert_same(after(p.x), testing.exact_output(p, gated=gated))
    same_parameters(twell.restore(after), mlp)


def test_removed_rows_are_no_buffer_and_follow_the_dtype() -> None:
    compacted, _ = twell.compact(layer_of(problem(), True), half())
    assert [name for name, _ in compacted.named_buffers()] == ["compaction.kept"]
    assert compacted.state_dict()["compaction.removed"].shape == (272, 3 * K + 2)
    wide = copy.deepcopy(compacted).double()
    assert wide.compaction.removed.dtype == torch.float64
    assert wide.compaction.kept.dtype == torch.bool
    assert copy.deepcopy(compacted).to("meta").compaction.removed.is_meta
