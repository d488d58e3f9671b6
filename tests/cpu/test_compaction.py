"""Counting non-zeros and compacting: exact bits, torch's handling of modules."""

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ffns import Fused, Meta, UpFirst
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

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


def called(firing: dict[str, twell.Firing]) -> dict[str, twell.Firing]:
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


@pytest.mark.parametrize("how", ["plain", "reentrant", "compiled layer", "compiled block"])
def test_calls_in_a_checkpoint_count_once(how: str) -> None:
    torch._dynamo.reset()
    p = problem()
    mlp = layer_of(p, True)
    # behind it, so that recomputation does not stop before it
    block = nn.Sequential(mlp, nn.Softplus())
    with twell.count_firing(mlp) as firing:
        if how.startswith("compiled"):
            (block if how.endswith("block") else mlp).compile(backend="aot_eager")
        for _ in range(2):
            checkpoint(block, p.x.clone().requires_grad_(), use_reentrant=how == "reentrant").sum().backward()
    assert firing[""].tokens == 2 * M
    assert torch.equal(firing[""].counts, 2 * fired(p))


class Dropping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.dropout(x, 0.5), self.weight, self.bias)


@pytest.mark.parametrize("how", ["plain", "saved products"])
@pytest.mark.parametrize("own", [False, True])
def test_a_recomputation_repeats_a_counted_call(how: str, own: bool) -> None:
    """Counting draws no number and saves no product that the recomputation of a checkpoint would take for its own."""
    torch.manual_seed(0)
    mlp, x = SparseGatedMLP(64, 256, strategy="dense"), torch.randn(32, 64)
    if own:
        mlp.gate_proj = Dropping(64, 256)  # type: ignore[assignment]
    policy = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    more: dict[str, Any] = {"context_fn": policy} if how == "saved products" else {}
    found = []
    for checkpointed in (False, True):
        mlp.zero_grad()
        torch.manual_seed(1)
        tracker = twell.recipe.SparsityTracker(mlp, every=1)
        with twell.count_firing(mlp) as firing, tracker.watch(0):
            y = checkpoint(mlp, x, use_reentrant=False, **more) if checkpointed else mlp(x)
            y.square().sum().backward()
        tracker.close()
        found.append([firing[""].totals, *(p.grad for p in mlp.parameters())])
    for ours, right in zip(*found):
        torch.testing.assert_close(ours, right)


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
    """Compiled inside the counter a model is counted; compiled before it would count nothing and is refused."""
    torch.compiler.reset()
    p = problem()
    model = nn.Sequential(layer_of(p, True))
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager")
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
        halved, _ = twell.compact(mlp, half())
        testing.assert_same(halved(p.x), testing.exact_output(without(p, half()), gated=gated))


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
    linears = [child for child in compacted.children() if isinstance(child, nn.Linear)]
    assert [(c.in_features, c.out_features) for c in linears] == [(K, 264)] * 2 + [(264, K)]
    assert compacted.up_proj.weight is compacted.gate_proj.weight
    assert is_laid_out(compacted, layout)
    compacted.requires_grad_(False).down_proj.to(BF16)
    compacted(torch.zeros(3, K, dtype=BF16))
    assert seen == [3]


def test_fills_up_with_the_first() -> None:
    mask = torch.zeros(N, dtype=torch.bool)
    mask[[1, 535]] = True
    for gated, evidence in ((False, mask), (True, twell.Firing(torch.cat([3 * mask.long(), torch.tensor([1000])])))):
        compacted, report = twell.compact(layer_of(problem(), gated), evidence)
        assert compacted.compaction.neurons.tolist() == [0, 1, 2, 3, 4, 5, 6, 535]
        assert (report.layers[0].alive, report.layers[0].kept) == (2, 8)


def test_all_neurons_and_sizes_that_are_no_multiple_of_8_stay() -> None:
    p = problem()
    compacted, report = twell.compact(layer_of(p, True), torch.ones(N, dtype=torch.bool))
    assert (report.layers[0].kept, report.bytes_saved) == (N, 0)
    with torch.no_grad():
        testing.assert_same(compacted(p.x), testing.exact_output(p))
    odd = SparseMLP(8, 13, strategy="dense")
    for living, expected in ((1, 8), (8, 8), (9, 13), (13, 13)):
        compacted, _ = twell.compact(odd, torch.arange(13) < living)
        assert compacted.intermediate == expected
        assert compacted(torch.ones(2, 8)).shape == (2, 8)


def test_the_report_has_sizes_and_bytes_before_and_after() -> None:
    mlp = layer_of(problem(), True)
    _, report = twell.compact(mlp, torch.arange(N) < 250)
    (layer,) = report.layers
    assert layer[:4] == ("", N, 250, 256)
    assert layer.bytes_saved == report.bytes_saved == (N - 256) * (3 * K + 2) * 2
    assert str(report) == "module: 536 neurons, 250 alive, 256 kept, 0.1 MB saved"
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
    with torch.inference_mode():
        masks = {name: compacted.get_submodule(name).compaction.kept.clone() for name in called(firing)}
        other, _ = twell.compact(original, masks)
    assert other.load_state_dict(compacted.state_dict()) == ([], [])


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


def test_compacted_twice() -> None:
    mlp = layer_of(problem(), True)
    once, _ = twell.compact(mlp, half())
    again = torch.zeros(264, dtype=torch.bool)
    again[1::3] = True
    twice, report = twell.compact(once, again)
    neurons = half().nonzero().flatten()[1::3]
    assert torch.equal(twice.compaction.neurons, neurons)
    assert (report.layers[0].neurons, report.layers[0].kept) == (264, 88)
    assert torch.equal(twice.gate_proj.weight, mlp.gate_proj.weight[neurons])
    assert once.intermediate == 264


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
        after = after.to_empty(device="cpu")
    assert after.load_state_dict(state, assign=how == "assign") == ([], [])
    assert is_laid_out(after)
    assert torch.equal(kept_of(after), kept_of(compacted))
    with torch.no_grad():
        testing.assert_same(after(p.x), testing.exact_output(p, gated=gated))
    same_parameters(after, compacted)
