"""int8 copies of gate weights that modules keep: made once, again after a change, and none where nothing screens."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from auto_layers import BF16, K, N, layer
from torch import Tensor, nn
from torch.optim.adamw import adamw

import twell
from twell import _gate_copies, ops
from twell.nn import SparseGatedMLP, SparseMLP, keep_gate_copies

FFN: Any = __import__("importlib").import_module("twell.ops.ffn")
MODULES = pytest.mark.parametrize("cls", [SparseGatedMLP, SparseMLP])
BYTES = N * K + 3 * 4 * N


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights of which a call made an int8 copy."""
    weights: list[Tensor] = []

    def spy(rows: Tensor, *last: Any) -> Any:
        weights.append(rows)
        return ops.quantize_gate(rows, *last)

    monkeypatch.setattr(FFN, "quantize_gate", spy)
    return weights


def module(cls: Any = SparseGatedMLP, strategy: Any = "screened", keep: bool = True) -> Any:
    torch.manual_seed(0)
    mlp = layer(cls)
    with torch.no_grad():
        first_of(mlp).weight.normal_()
    mlp.strategy = strategy
    if keep:
        keep_gate_copies(mlp)
    return mlp


def first_of(mlp: Any) -> Any:
    return mlp.gate_proj if isinstance(mlp, SparseGatedMLP) else mlp.up_proj


@torch.no_grad()
def call(mlp: Any, m: int = 130) -> Tensor:
    """y of a call, which must be that of a module that keeps no copy."""
    x = torch.randn(m, K, generator=torch.Generator().manual_seed(1)).to(first_of(mlp).weight.dtype)
    y: Tensor = mlp(x)
    assert torch.equal(y, fresh(mlp)(x))
    return y


def fresh(mlp: Any) -> Any:
    """The same layer, with its parameters, that keeps no copy."""
    other = copy.deepcopy(mlp)
    keep_gate_copies(other, False)
    other.strategy = "union"
    return other


@MODULES
def test_a_copy_is_made_once(cls: Any, made: list[Tensor]) -> None:
    mlp = module(cls)
    for m in (130, 65, 300, 0):
        call(mlp, m)
    assert len(made) == 1
    plain = module(cls, keep=False)
    for _ in range(3):
        call(plain)
    assert len(made) == 4


def written(mlp: Any) -> None:
    first_of(mlp).weight.mul_(-1)


def written_by_an_optimizer(mlp: Any) -> None:
    weight = first_of(mlp).weight
    weight.grad = torch.randn_like(weight)
    torch.optim.SGD([weight], lr=0.5).step()


def loaded(mlp: Any) -> None:
    mlp.load_state_dict({name: -value for name, value in mlp.state_dict().items()})


def assigned(mlp: Any) -> None:
    mlp.load_state_dict({name: -value for name, value in mlp.state_dict().items()}, assign=True)


def replaced(mlp: Any) -> None:
    first_of(mlp).weight = nn.Parameter(-first_of(mlp).weight)


def given_other_data(mlp: Any) -> None:
    first_of(mlp).weight.data = -first_of(mlp).weight.data


def cast(mlp: Any) -> None:
    mlp.half()


def written_in_inference_mode(mlp: Any) -> None:
    with torch.inference_mode():
        first_of(mlp).weight.mul_(-1)


def written_in_part(mlp: Any) -> None:
    first_of(mlp).weight[3].mul_(-1)


def written_detached(mlp: Any) -> None:
    first_of(mlp).weight.detach().mul_(-1)


CHANGES = (
    *(written, written_by_an_optimizer, loaded, assigned, replaced, given_other_data, cast),
    *(written_in_inference_mode, written_in_part, written_detached),
)


@MODULES
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_copy_follows_its_weight(cls: Any, change: Callable[[Any], None], made: list[Tensor]) -> None:
    mlp = module(cls)
    before = call(mlp)
    with torch.no_grad():
        change(mlp)
    after = call(mlp)
    assert len(made) == 2
    if change is not cast:
        assert not torch.equal(before, after)
    call(mlp)
    assert len(made) == 2


def fused_without_its_class(weight: Tensor) -> None:
    options = {"lr": 0.5, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    state = [[torch.zeros_like(weight)], [torch.zeros_like(weight)], [], [torch.zeros(())]]
    gradients = [torch.randn_like(weight)]
    adamw([weight], gradients, *state, fused=True, amsgrad=False, maximize=False, **options)  # type: ignore[arg-type]


def with_the_version_preserved(weight: Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(weight):
        weight.mul_(-1)


UNSEEN: dict[str, Callable[[Tensor], object]] = {
    "data": lambda weight: weight.data.mul_(-1),
    "storage": lambda weight: weight.untyped_storage().copy_((-weight).untyped_storage()),
    "DLPack": lambda weight: torch.from_dlpack(weight.detach()).mul_(-1),
    "fused": fused_without_its_class,
    "preserved": with_the_version_preserved,
}


@pytest.mark.parametrize("write", UNSEEN)
def test_what_no_version_counts_is_not_seen(made: list[Tensor], write: str) -> None:
    """As the docstring says."""
    mlp, x = module(), torch.randn(130, K).to(BF16)
    with torch.no_grad():
        before = mlp(x)
        UNSEEN[write](mlp.gate_proj.weight)
        stale = mlp(x)
        assert len(made) == 1
        keep_gate_copies(mlp)
        right = mlp(x)
    assert torch.equal(right, fresh(mlp)(x))
    assert not torch.equal(stale, right)
    assert not torch.equal(before, right)


def test_weights_of_inference_mode_are_copied_at_each_call(made: list[Tensor]) -> None:
    with torch.inference_mode():
        mlp = module()
        for _ in range(2):
            call(mlp)
        mlp.gate_proj.weight.mul_(-1)
        call(mlp)
    assert len(made) == 3
    assert twell.explain(mlp).rows[0].copy_bytes == 0


def test_one_call_in_inference_mode_makes_it_for_all(made: list[Tensor]) -> None:
    mlp = module()
    with torch.inference_mode():
        call(mlp)
    call(mlp)
    assert len(made) == 1


@pytest.mark.parametrize("strategy", ["union", "row", "dense", twell.AutoStrategy(screen="off")])
def test_nothing_is_kept_where_nothing_screens(strategy: Any, made: list[Tensor]) -> None:
    mlp = module(strategy=strategy)
    with torch.no_grad():
        mlp(torch.randn(130, K).to(BF16))
    assert not made
    assert mlp._gate_copy.nbytes == 0


def test_training_makes_its_own(made: list[Tensor]) -> None:
    mlp = module()
    y = mlp(torch.randn(130, K).to(BF16))
    assert y.requires_grad
    assert not made
    assert mlp._gate_copy.nbytes == 0


def test_autocast_casts_another_weight_each_time(made: list[Tensor]) -> None:
    mlp = module().float()
    x = torch.randn(130, K)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        first = mlp(x)
        assert torch.equal(first, mlp(x))
        mlp.gate_proj.weight.data.mul_(-1)
        assert not torch.equal(first, mlp(x))
    assert len(made) == 3
    assert mlp._gate_copy.nbytes == 0


def test_explain_shows_the_memory() -> None:
    model = nn.Sequential(module(), module(keep=False), module())
    call(model[0])
    call(model[1])
    assert [row.copy_bytes for row in twell.explain(model)] == [BYTES, 0, 0]
    header, first, *others = str(twell.explain(model)).splitlines()
    assert "int8 copy" in header
    assert "0.0 MB" in first
    assert not any("MB" in line for line in others)
    keep_gate_copies(model, False)
    assert "int8 copy" not in str(twell.explain(model))
    # by default a layer keeps none
    assert SparseGatedMLP(K, N)._gate_copy is None


@pytest.mark.parametrize("through", [copy.deepcopy, lambda mlp: pickle.loads(pickle.dumps(mlp))])
def test_copies_of_a_module_keep_the_choice(through: Callable[[Any], Any], made: list[Tensor]) -> None:
    mlp = module()
    call(mlp)
    other = through(mlp)
    assert other._gate_copy is not None
    assert other._gate_copy is not mlp._gate_copy
    assert (mlp._gate_copy.nbytes > 0, other._gate_copy.nbytes) == (True, 0)
    call(other)
    assert len(made) == 2
    with torch.no_grad():
        other.gate_proj.weight.mul_(-1)
    call(mlp)
    call(other)
    assert len(made) == 3
    # a pickle of an earlier version keeps none
    state = {name: value for name, value in mlp.__getstate__().items() if name != "_gate_copy"}
    old = SparseGatedMLP.__new__(SparseGatedMLP)
    old.__setstate__(state)
    assert old._gate_copy is None


def test_memory_goes_with_the_module_and_with_the_choice() -> None:
    mlp = module()
    call(mlp)
    kept = weakref.ref(mlp._gate_copy)
    keep_gate_copies(mlp, False)
    gc.collect()
    assert kept() is None
    keep_gate_copies(mlp)
    call(mlp)
    kept = weakref.ref(mlp._gate_copy)
    del mlp
    gc.collect()
    assert kept() is None
    assert not any(copy is None for copy in _gate_copies._COPIES.values())


def test_weights_at_the_address_of_another_have_their_own(made: list[Tensor]) -> None:
    """Memory that was given back may hold the next weight, of the same version."""
    mlp = module()
    for i in range(20):
        with torch.no_grad():
            mlp.gate_proj.weight = nn.Parameter(torch.randn(N, K, generator=torch.Generator().manual_seed(i)).to(BF16))
        call(mlp)
    assert len(made) == 20
    assert len([copy for copy in _gate_copies._COPIES.values() if copy is mlp._gate_copy]) == 1


def test_two_modules_of_one_weight_both_compute_right(made: list[Tensor]) -> None:
    one, two = module(), module()
    two.gate_proj.weight = one.gate_proj.weight
    for _ in range(2):
        call(one)
        call(two)
    with torch.no_grad():
        one.gate_proj.weight.mul_(-1)
    call(two)
    call(one)
    assert len(made) == 4


def fused() -> Any:
    from twell._sparsify.modules import FusedGatedMLP

    torch.manual_seed(0)
    linears = nn.Linear(K, 2 * N, dtype=BF16), nn.Linear(N, K, dtype=BF16)
    options: Any = {"compression": 8, "strategy": "screened"}
    return FusedGatedMLP(("gate_up", "down"), linears, up_first=True, **options)


def test_halves_of_a_fused_weight() -> None:
    mlp, other = fused(), fused()
    keep_gate_copies(mlp)
    x = torch.randn(130, K).to(BF16)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(mlp(x), other(x))
        before = mlp._gate_copy._made
        mlp(x)
        assert mlp._gate_copy._made is before
        for each in (mlp, other):
            each.gate_up.weight.mul_(-1)
        assert torch.equal(mlp(x), other(x))
        assert mlp._gate_copy._made is not before


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("strategy", ["screened", "proven"])
def test_a_graph_may_write_the_weight_after_its_call(strategy: Any, backend: str | None, fresh_dynamo: None) -> None:
    """A compiled graph counts its writes before it runs, so the copy that it made was taken for one of after them."""
    mlp = module(strategy=strategy)

    def step(x: Tensor) -> Tensor:
        y: Tensor = mlp(x)
        first_of(mlp).weight.mul_(-1)
        return y

    run: Any = torch.compile(step, backend=backend) if backend else step
    x = torch.randn(130, K).to(BF16)
    with torch.no_grad():
        for _ in range(3):
            right = fresh(mlp)(x)
            assert torch.equal(run(x), right)
            assert torch.equal(mlp(x), fresh(mlp)(x))


def test_compiled_graphs_read_the_copy(made: list[Tensor], fresh_dynamo: None) -> None:
    mlp, x = module(), torch.randn(130, K).to(BF16)
    call(mlp)
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(x), mlp(x))
        assert len(made) == 1
        mlp.gate_proj.weight.mul_(-1)
        assert torch.equal(compiled(x), fresh(mlp)(x))
    assert len(made) == 2


@MODULES
def test_a_graph_that_runs_before_any_call_reads_the_copy(cls: Any, made: list[Tensor], fresh_dynamo: None) -> None:
    mlp, x = module(cls), torch.randn(130, K).to(BF16)
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for change in (None, written, replaced):
            if change is not None:
                change(mlp)
            if change is replaced:
                # elsewhere in memory
                keep_gate_copies(mlp)
            made.clear()
            for count in (1, 2, 2):
                assert torch.equal(compiled(x), fresh(mlp)(x))
                # the graph may have written the weight after the first one
                assert len(made) == count
                assert mlp._gate_copy.nbytes == BYTES


def test_a_fused_graph_that_runs_before_any_call_reads_the_copy(made: list[Tensor], fresh_dynamo: None) -> None:
    mlp, x = fused(), torch.randn(130, K).to(BF16)
    keep_gate_copies(mlp)
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for count in (1, 2, 2):
            assert torch.equal(compiled(x), fresh(mlp)(x))
            assert len(made) == count


def test_layers_without_memory_wait_for_a_call(made: list[Tensor]) -> None:
    mlp = SparseGatedMLP(K, N, strategy="screened", device="meta", dtype=BF16)
    keep_gate_copies(mlp)
    assert not any(copy is mlp._gate_copy for copy in _gate_copies._COPIES.values())
    mlp.to_empty(device="cpu").reset_parameters()
    for _ in range(2):
        call(mlp)
    assert len(made) == 1


def test_few_tokens_are_screened_as_the_strategy_says() -> None:
    """Without a call in between, too."""
    mlp = module()
    for strategy, few in (
        ("proven", "proven"),
        ("row", "screened"),
        (twell.AutoStrategy(screen="off"), ""),
        (twell.AutoStrategy(screen="proven"), "proven"),
        ("auto", "screened"),
    ):
        mlp.strategy = strategy
        assert mlp._gate_copy.few == few


def test_each_screen_has_its_own() -> None:
    copied, weight = _gate_copies.GateCopy(), torch.randn(N, K).to(BF16)
    first = copied.of(weight, "screened", lambda: ops.quantize_gate(weight, True))
    assert copied.of(weight, "screened", lambda: pytest.fail("made twice")) is first
    assert copied.of(weight, "proven", lambda: ops.quantize_gate(weight, True)) is not first


def test_refuses() -> None:
    with pytest.raises(ValueError, match=r"module must have layers of twell\.nn, got none in Linear"):
        keep_gate_copies(nn.Linear(8, 8))
    with pytest.raises(TypeError, match="keep must be"):
        keep_gate_copies(module(), 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_an_optimizer_is_seen(made: list[Tensor], fused: bool) -> None:
    """Fused ones write parameters without raising their version."""
    mlp = module()
    call(mlp)
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=0.01, fused=fused)
    for _ in range(3):
        mlp(torch.randn(130, K).to(BF16)).float().square().mean().backward()
        optimizer.step()
        # equals a module without a copy
        call(mlp)
    other = weakref.ref(mlp._gate_copy)
    del mlp, optimizer
    gc.collect()
    assert other() is None, "no hook of an optimizer holds it"


def test_what_a_graph_reads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when copies are switched off, on, and on again."""
    mlp = module()
    call(mlp)
    read = weakref.ref(mlp._gate_copy._made.quantized[0])
    with monkeypatch.context() as patched:
        patched.setattr(_gate_copies, "_captures", lambda weight: True)
        call(mlp)
    first_of(mlp).weight.data.neg_()
    keep_gate_copies(mlp)
    assert mlp._gate_copy.nbytes == 0, "a call drops the copies"
    call(mlp)
    for keep in (False, True, True, False, False):
        keep_gate_copies(mlp, keep)
        gc.collect()
        assert read() is not None
        assert not copy.deepcopy(mlp).__dict__.get("_retired_copies", [_gate_copies.GateCopy()])[0]._captured
