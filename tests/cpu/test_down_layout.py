"""``down_layout="auto"``: by rows while the layer alone holds its down weight, as nn.Linear's wherever it is seen.

A CPU has no use for rows, so these tests say that it is a GPU.
"""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import twell
from tests.habits.entries import ENTRIES
from twell.base import memory
from twell.nn import down_layout
from twell.nn.layers import SparseFFN, SparseGatedMLP, SparseMLP
from twell.nn.models import explain, set_down_layout

BF16 = torch.bfloat16
K, N = 16, 72
# README's two lines and the ways around them
NAMES = ("SparseGatedMLP", "SparseMLP", "sparsify_, named", "sparsify_, pair", "sparsified model")
MODELS: dict[str, Callable[[], nn.Module]] = {name: lambda name=name: ENTRIES[name].call().run for name in NAMES}  # type: ignore[misc]
EACH = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def forward(model: nn.Module) -> Tensor:
    return model(torch.randn(9, K, generator=torch.Generator().manual_seed(0)).to(BF16))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(down_layout, "is_on_gpu", lambda weight: weight is not None)


def layer_of(model: nn.Module) -> Any:
    with down_layout.unlisted():
        return next(m for m in model.modules() if isinstance(m, SparseFFN))


def layout(model: nn.Module) -> str:
    stride = layer_of(model).down_proj.weight.stride()
    return {(1, K): "rows", (N, 1): "linear"}[stride]


def generate(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return forward(model)


def decoding(make: Callable[[], nn.Module]) -> nn.Module:
    model = make().eval()
    # blocks that ``sparsify_`` replaced may be in cycles
    gc.collect()
    assert layout(model) == "linear"
    generate(model)
    assert layout(model) == "rows"
    return model


@EACH
def test_the_first_inference_call_lays_by_rows(make: Callable[[], nn.Module]) -> None:
    """Without the garbage collector: nothing in ``sparsify_`` keeps the weight."""
    torch.manual_seed(0)
    gc.collect()
    gc.disable()
    try:
        model = make().eval()
        parameters = [id(p) for p in model.parameters()]
        set_down_layout(model, "linear")
        expected = generate(model)
        set_down_layout(model, "auto")
        assert torch.equal(generate(model), expected)
        assert layout(model) == "rows"
    finally:
        gc.enable()
    assert torch.equal(generate(model), expected)
    # looking at layers leaves rows
    assert explain(model).rows[0].layout == "rows"
    twell.nn.set_strategy(model, "row")
    next(model.parameters())
    with twell.count_firing(model):
        generate(model)
    assert layout(model) == "rows"
    assert [id(p) for p in model.parameters()] == parameters


LISTINGS: dict[str, Callable[[nn.Module], Any]] = {
    "parameters": lambda model: list(model.parameters()),
    "children": lambda model: fully_shard_lists(model),
    "modules": lambda model: len(list(model.modules())) < 0,
    "state_dict": lambda model: model.state_dict(),
    "state_dict of the layer": lambda model: layer_of(model).state_dict(),
    "train": lambda model: model.train(),
    "cast": lambda model: model.to(torch.float16).to(BF16),
    "deepcopy": lambda model: copy.deepcopy(model),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "zero_grad": lambda model: model.zero_grad(),
    "backward": lambda model: forward(model).float().sum().backward(),
}


def fully_shard_lists(module: nn.Module) -> list[nn.Parameter]:
    """As FSDP2 lists parameters: by children, and without recursion."""
    below = [p for child in module.children() for p in fully_shard_lists(child)]
    return [*below, *(p for _, p in module.named_parameters(recurse=False))]


@EACH
def test_whoever_lists_the_weight_gets_it_as_linear_stores_it(make: Callable[[], nn.Module]) -> None:
    model = decoding(make)
    for name, way in LISTINGS.items():
        generate(model)
        assert layout(model) == "rows", name
        found = way(model)
        assert layout(model) == "linear", name
        for module in (model, found):
            assert not isinstance(module, nn.Module) or all(p.is_contiguous() for p in module.parameters()), name
        # a list or a state dict that is kept stays true
        generate(model)
        assert layout(model) == "linear" or isinstance(found, (nn.Module, bool)) or not found, name
        model.eval()
        del found, module


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "optimizer": lambda layer: torch.optim.AdamW(layer.parameters()),
    "state dict": lambda layer: layer.state_dict(),
    "view": lambda layer: layer.down_proj.weight.detach()[0],
    "numpy": lambda layer: layer.down_proj.weight.detach().view(torch.int16).numpy(),
    "dlpack": lambda layer: layer.requires_grad_(False).down_proj.weight.__dlpack__(),
    "other module": lambda layer: SparseMLP.from_linear(layer.up_proj, layer.down_proj),
    "flat buffer": lambda layer: flatten(layer),
    "autograd graph": lambda layer: layer(torch.ones(2, K, dtype=BF16)),
    "gradient": lambda layer: setattr(layer.down_proj.weight, "grad", torch.ones_like(layer.down_proj.weight)),
    "traced": lambda layer: torch.jit.trace(layer.down_proj, torch.ones(2, N, dtype=BF16)),
}


def flatten(layer: nn.Module) -> Tensor:
    flat = nn.utils.parameters_to_vector(layer.parameters()).detach()
    begin = 0
    for p in layer.parameters():
        p.data = flat[begin : begin + p.numel()].view_as(p)
        begin += p.numel()
    return flat


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_a_weight_that_other_code_holds_stays(hold: Callable[[Any], Any]) -> None:
    layer = SparseGatedMLP(K, N, dtype=BF16, strategy="row").eval()
    held = hold(layer)
    generate(layer)
    assert layout(layer) == "linear"
    row, *_ = explain(layer).rows
    assert row.layout == "linear"
    assert 'set_down_layout(model, "rows")' in row.reason
    assert "other code holds it" in row.reason
    layer.down_proj.weight.grad = None
    del held
    if hold is not HOLDERS["flat buffer"]:
        generate(layer)
        assert layout(layer) == "rows"


def test_what_else_keeps_a_weight_linear() -> None:
    def layer_with(**arguments: Any) -> Any:
        return SparseGatedMLP(K, N, **{"strategy": "row", "dtype": BF16} | arguments).eval()

    with torch.inference_mode():
        made = layer_with()
    for layer in (made, layer_with(strategy="dense"), layer_with(strategy="auto"), layer_with(dtype=torch.float32)):
        with torch.inference_mode():
            layer(torch.randn(3, K).to(layer.up_proj.weight.dtype))
        assert layout(layer) == "linear"

    for why, change in (
        ("training mode", lambda layer: layer.train()),
        ("a CUDA graph", lambda layer: memory.note_capture(layer.down_proj.weight)),
        ("was set so", lambda layer: set_down_layout(layer, "linear")),
    ):
        layer = layer_with()
        change(layer)
        generate(layer)
        assert why in down_layout.obstacle(layer)
        assert layout(layer) == "linear"
    layer = layer_with()
    del layer.down_proj.weight
    layer.down_proj.weight = nn.Buffer(torch.zeros(K, N))
    assert "no plain parameter" in down_layout.obstacle(layer)


def test_inference_mode_and_frozen_weights() -> None:
    layer = SparseGatedMLP(K, N, strategy="row", dtype=BF16).eval()
    with torch.inference_mode():
        layer(torch.randn(3, K).to(BF16))
    assert layout(layer) == "rows"
    assert not layer.down_proj.weight.is_inference()
    layer.requires_grad_(False)
    assert layout(layer) == "linear"
    layer(torch.randn(3, K).to(BF16))
    assert layout(layer) == "rows"
    with torch.inference_mode():
        list(layer.parameters())
    assert layout(layer) == "linear"
    (layer.requires_grad_()(torch.randn(3, K).to(BF16))).sum().backward()
    assert layer.down_proj.weight.grad is not None


def test_traces_and_modes_lay_nothing() -> None:
    layer = SparseGatedMLP(K, N, strategy="row", dtype=BF16).eval().requires_grad_(False)
    x = torch.randn(3, K).to(BF16)
    with FlopCounterMode(display=False):
        layer(x)
    torch.jit.trace(layer, x, check_trace=False)
    torch.func.vmap(SparseGatedMLP(K, N, dtype=BF16).eval())(x[None])
    torch.export.export(layer, (x,), strict=False)
    assert layout(layer) == "linear"


@pytest.mark.parametrize(("fused", "mode"), [(True, True), (True, False), (False, True)])
def test_fused_optimizers_after_and_between_generation(fused: bool, mode: bool) -> None:
    """They read weights, gradients and their state in memory order."""
    weights = []
    for choice in ("auto", "linear"):
        torch.manual_seed(0)
        layer = SparseGatedMLP(K, N, strategy="row").eval()
        set_down_layout(layer, choice)  # type: ignore[arg-type]
        with torch.no_grad(), torch.autocast("cpu", BF16):
            layer(torch.randn(3, K))
        assert (layout(layer) == "rows") == (choice == "auto")
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=fused)
        for _ in range(3):
            layer.train(mode)
            optimizer.zero_grad()
            with torch.autocast("cpu", BF16):
                layer(torch.randn(5, K)).float().square().sum().backward()
            optimizer.step()
            with torch.no_grad(), torch.autocast("cpu", BF16):
                layer.eval()(torch.randn(3, K))
        weights.append(layer.down_proj.weight.detach().clone())
    assert torch.equal(*weights)


@pytest.mark.parametrize("assign", [False, True])
def test_states_load_into_rows(assign: bool) -> None:
    model, other = decoding(MODELS["SparseGatedMLP"]), MODELS["SparseGatedMLP"]().eval()
    state = {name: t.clone() for name, t in other.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    expected = generate(other)
    assert torch.equal(generate(model), expected)
    del state
    assert torch.equal(generate(model), expected)
    assert layout(model) == "rows"
    assert all(p.is_contiguous() for p in model.parameters())


def test_layers_that_share_a_child() -> None:
    """The first of them is listed with the child, the second one has laid it."""
    first, second = (SparseGatedMLP(K, N, strategy="row", dtype=BF16) for _ in range(2))
    second.down_proj = first.down_proj
    model = nn.Sequential(first, second).eval()
    with torch.no_grad():
        second(torch.randn(3, K).to(BF16))
    assert layout(model) == "rows"
    assert all(p.is_contiguous() for p in list(model.parameters()))


def test_a_weight_that_a_graph_reads_is_not_put_back(caplog: pytest.LogCaptureFixture) -> None:
    model = decoding(MODELS["SparseGatedMLP"])
    place = layer_of(model).down_proj.weight.data_ptr()
    memory.note_capture(layer_of(model).down_proj.weight)
    list(model.parameters())
    model.train()
    assert layout(model) == "rows"
    assert layer_of(model).down_proj.weight.data_ptr() == place
    assert "a CUDA graph reads it" in caplog.text
    set_down_layout(model, "linear")
    assert layout(model) == "linear"


def test_compiled_calls_follow_the_layout() -> None:
    """A graph is for one layout; what a listing changes makes another."""
    torch.compiler.reset()
    model = MODELS["SparseGatedMLP"]().eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = generate(compiled)
    # tracing lays nothing
    assert layout(model) == "linear"
    generate(model)
    assert layout(model) == "rows"
    assert torch.equal(generate(compiled), expected)
    assert layout(model) == "rows"
    assert all(p.is_contiguous() for p in compiled.parameters())
    assert torch.equal(generate(compiled), expected)


def test_memory_that_another_tensor_has_stays() -> None:
    """A view that was taken by rows still is the weight after a listing."""
    layer: Any = decoding(MODELS["SparseGatedMLP"])
    view = layer.down_proj.weight.data
    layer.state_dict()
    view.zero_()
    assert layout(layer) == "rows"
    assert not layer.down_proj.weight.any()
    del view
    layer.state_dict()
    assert layout(layer) == "linear"
