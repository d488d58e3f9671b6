"""Modules in servers and other libraries: late weights, inference mode, copies, threads, whole models.

After each of these a layer must compute the result of its children (nn.Linear, ReLU, product), or raise.
"""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from ffns import BF16, Gated, K, N, Pair, Plain, pickled, saved, take
from layer_checks import MODULES, STRATEGIES, Module, agrees, close, tokens
from torch import Tensor, nn

from twell._sparsify import layers
from twell.nn import SparseGatedMLP, SparseMLP, explain, set_down_layout


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def new_state(mlp: nn.Module, seed: int = 7) -> dict[str, Tensor]:
    """Other weights, contiguous as in a file."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, Tensor] = {}
    state = {}
    for name, t in mlp.state_dict().items():
        # tied ones stay equal
        if t.data_ptr() not in made or t.is_meta:
            made[t.data_ptr()] = (torch.randn(t.shape, generator=generator) / t.shape[-1] ** 0.5).to(t.dtype)
        state[name] = made[t.data_ptr()]
    return state


def owner(mlp: nn.Module, name: str) -> tuple[nn.Module, str]:
    prefix, _, leaf = name.rpartition(".")
    return mlp.get_submodule(prefix), leaf


# weights that come after construction


def copied(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in mlp.named_parameters():
            parameter.copy_(state[name])


def in_slices(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    # as in loaders of tensor-parallel shards
    for name, parameter in mlp.named_parameters():
        half = parameter.shape[0] // 2
        parameter.data[:half].copy_(state[name][:half])
        parameter.data.narrow(0, half, parameter.shape[0] - half).copy_(state[name][half:])


def as_data(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    for name, parameter in mlp.named_parameters():
        parameter.data = state[name]


def as_parameters(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    for name in list(dict(mlp.named_parameters())):
        module, leaf = owner(mlp, name)
        setattr(module, leaf, nn.Parameter(state[name], requires_grad=False))


def as_replaced_parameters(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    # past nn.Module.__setattr__, as in accelerate
    for name in list(dict(mlp.named_parameters())):
        module, leaf = owner(mlp, name)
        module._parameters[leaf] = nn.Parameter(state[name])


def through_state_dict(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    for name, tensor in mlp.state_dict().items():
        tensor.copy_(state[name])


def loaded(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    mlp.load_state_dict(state)


def assigned(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    mlp.load_state_dict(state, assign=True)


def assigned_by_child(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    for name, child in mlp.named_children():
        prefix = f"{name}."
        part = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
        child.load_state_dict(part, assign=True)


def assigned_in_odd_layouts(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    wide = {name: torch.stack((t, -t), -1)[..., 0] if t.dim() == 2 else t for name, t in state.items()}
    mlp.load_state_dict(wide, assign=True)


def swapped(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        mlp.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


LOADERS = [
    *(copied, in_slices, as_data, as_parameters, as_replaced_parameters, through_state_dict),
    *(loaded, assigned, assigned_by_child, assigned_in_odd_layouts, swapped),
]


@pytest.mark.parametrize(
    ("cls", "load", "layout"),
    [
        (cls, load, layout)
        for i, load in enumerate(LOADERS)
        for cls, layout in zip((SparseGatedMLP, SparseMLP), (("rows", "linear"), ("linear", "rows"))[i % 2])
    ],
)
def test_weights_that_come_after_a_call(cls: Module, load: Callable[..., None], layout: Any) -> None:
    mlp = cls(K, N, bias=True, dtype=BF16)
    set_down_layout(mlp, layout)
    state = new_state(mlp)
    expected = cls(K, N, bias=True, dtype=BF16)
    expected.load_state_dict(state)
    agrees(mlp)
    load(mlp, {name: tensor.clone() for name, tensor in state.items()})
    for name, tensor in mlp.state_dict().items():
        assert torch.equal(tensor, state[name])
    with torch.no_grad():
        assert torch.equal(mlp(tokens()), expected(tokens()))
    mlp.requires_grad_()
    mlp(tokens()).float().sum().backward()
    expected(tokens()).float().sum().backward()
    for one, other in zip(mlp.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@MODULES
def test_a_weight_of_the_other_layout_is_refused(cls: Module) -> None:
    """[intermediate, hidden] is a file's layout, which must not be mistaken for the transposed view."""
    mlp = cls(K, N, dtype=BF16)
    state = mlp.state_dict()
    rows = state | {"down_proj.weight": state["down_proj.weight"].t()}
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=r"size mismatch for down_proj\.weight"):
            mlp.load_state_dict(rows, assign=assign)
    mlp.down_proj.weight = nn.Parameter(rows["down_proj.weight"])
    with pytest.raises(ValueError, match=r"w_down must be \[32, 264\] .*, got \[264, 32\]"):
        mlp(tokens())


# inference mode


@MODULES
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inference_mode_all_along(cls: Module, strategy: Any) -> None:
    with torch.inference_mode():
        mlp = cls(K, N, True, dtype=BF16, strategy=strategy)
        for load in LOADERS:
            if load is not swapped:  # torch refuses to swap there
                load(mlp, new_state(mlp))
            agrees(mlp)
        y, aux = mlp(tokens(), return_aux=True)
        assert y.is_inference()
        assert aux.l1.is_inference()
        linears = [nn.Linear(K, N, dtype=BF16) for _ in range(2 if cls is SparseGatedMLP else 1)]
        agrees(cls.from_linear(*linears, nn.Linear(N, K, dtype=BF16)))
        agrees(copy.deepcopy(mlp))
    # weights made there work anywhere for inference
    agrees(mlp)
    with torch.no_grad():
        assert torch.equal(mlp(tokens()), y)
    with pytest.raises(RuntimeError, match=r"[Ii]nference tensors"):
        mlp(tokens().requires_grad_()).float().sum().backward()


# construction without memory, devices and dtypes


@pytest.mark.parametrize(
    ("cls", "how", "copies"),
    [(SparseGatedMLP, "to_empty", True), (SparseMLP, "assign", False), (SparseGatedMLP, "parameters", True)],
)
def test_meta_construction(cls: Module, how: str, copies: bool) -> None:
    with torch.device("meta"):
        mlp = cls(K, N, True, dtype=BF16)
    if copies:
        mlp = pickle.loads(pickle.dumps(copy.deepcopy(mlp)))
    state = new_state(cls(K, N, True, dtype=BF16))
    # a call before the weights are loaded is an error and leaves nothing behind
    with pytest.raises(ValueError, match="must be on cpu as x is, got meta"):
        mlp(tokens())
    if how == "to_empty":
        mlp.to_empty(device="cpu")
        mlp.load_state_dict(state)
    elif how == "assign":
        mlp.load_state_dict(state, assign=True)
    else:
        as_replaced_parameters(mlp, state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in mlp.state_dict().items())
    agrees(mlp)
    if how != "parameters":
        assert mlp.down_proj.weight.is_contiguous()


@pytest.mark.parametrize(
    ("cls", "duplicate", "strategy"),
    [(SparseGatedMLP, copy.deepcopy, "row"), (SparseMLP, pickled, "union"), (SparseGatedMLP, saved, "auto")],
)
def test_copies_have_lives_of_their_own(cls: Module, duplicate: Callable[[Any], Any], strategy: Any) -> None:
    mlp = cls(K, N, True, dtype=BF16, strategy=strategy, compression=4)
    mlp.record_aux = mlp.accumulate_main_grad = True
    mlp.train(False).requires_grad_(False)
    set_down_layout(mlp, "linear")
    expected = mlp(tokens())
    other = duplicate(mlp)
    assert (other.strategy, other.compression, other.down_layout) == (strategy, 4, "linear")
    assert (other.record_aux, other.accumulate_main_grad, other.training) == (True, True, False)
    assert not any(parameter.requires_grad for parameter in other.parameters())
    assert torch.equal(other(tokens()), expected)
    loaded(other, new_state(other))
    set_down_layout(other, "rows")
    other.strategy, other.compression = "dense", 8
    agrees(other)
    assert mlp.down_proj.weight.is_contiguous()
    assert torch.equal(mlp(tokens()), expected)
    # hooks of the copy are the copy's
    assigned(other, new_state(other))
    assert other.down_proj.weight.t().is_contiguous()
    assert mlp.down_proj.weight.is_contiguous()


# several at a time


def test_nothing_outlives_a_model() -> None:
    mlp = SparseGatedMLP(K, N, dtype=BF16, strategy="row")
    mlp.record_aux = True
    mlp(tokens()).float().sum().backward()
    with torch.inference_mode():
        mlp(tokens())
    references = [weakref.ref(mlp), *(weakref.ref(parameter) for parameter in mlp.parameters())]
    del mlp
    gc.collect()
    assert not any(reference() is not None for reference in references)


@pytest.mark.parametrize(
    ("cls", "strategy"), [(SparseGatedMLP, "auto"), (SparseGatedMLP, "union"), (SparseMLP, "row"), (SparseMLP, "dense")]
)
def test_threads_share_a_module(cls: Module, strategy: Any) -> None:
    mlp = cls(K, N, True, dtype=BF16, strategy=strategy)
    xs = [tokens(count=3 + i, seed=i) for i in range(6)]
    with torch.no_grad():
        alone = [mlp(x) for x in xs]

    def gradient(x: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(mlp(leaf).float().sum(), leaf)[0]

    gradients = [gradient(x) for x in xs]
    start = threading.Barrier(len(xs))

    def work(i: int) -> None:
        start.wait()
        for turn in range(8):
            if (i + turn) % 2:
                with torch.inference_mode():
                    y, aux = mlp(xs[i], return_aux=True)
                    assert aux.l0.item() <= N
                assert torch.equal(y, alone[i])
            else:
                assert torch.equal(gradient(xs[i]), gradients[i])

    with ThreadPoolExecutor(len(xs)) as threads:
        list(threads.map(work, range(len(xs))))


# requires_grad


@MODULES
@pytest.mark.parametrize("strategy", ["auto", "dense"])
def test_any_part_may_be_frozen(cls: Module, strategy: Any) -> None:
    mlp, x = cls(K, N, True, dtype=BF16, strategy=strategy), tokens()
    leaf = x.clone().requires_grad_()
    mlp(leaf).float().sum().backward()
    expected = {name: parameter.grad for name, parameter in mlp.named_parameters()}
    for frozen in itertools.chain.from_iterable(itertools.combinations(expected, r) for r in range(len(expected) + 1)):
        mlp.zero_grad()
        for name, parameter in mlp.named_parameters():
            parameter.requires_grad_(name not in frozen)
        again = x.clone().requires_grad_()
        mlp(again).float().sum().backward()
        close(again.grad, leaf.grad)
        for name, parameter in mlp.named_parameters():
            if name in frozen:
                assert parameter.grad is None
            else:
                close(parameter.grad, expected[name])
    # the choice of each call, not of the first
    mlp.requires_grad_(False)
    assert not mlp(x).requires_grad
    mlp.requires_grad_()
    assert mlp(x).requires_grad


def test_accelerate_places_and_offloads() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(SparseGatedMLP(K, N, dtype=BF16, strategy="row"), SparseMLP(K, N, dtype=BF16, strategy="row"))
    with torch.no_grad():
        expected = model(tokens())
    placed = accelerate.dispatch_model(copy.deepcopy(model), {"": "cpu"}, force_hooks=True)
    with torch.no_grad():
        # if every weight is on its device nothing changes, and the layers stay sparse
        assert torch.equal(placed(tokens()), expected)
        assert not any(choice.strategy == "dense" for choice in explain(placed).rows)
        offloaded = accelerate.cpu_offload(copy.deepcopy(model), torch.device("cpu"))
        close(offloaded(tokens()), expected)
    with accelerate.init_empty_weights():
        empty = nn.Sequential(
            SparseGatedMLP(K, N, dtype=BF16, strategy="row"), SparseMLP(K, N, dtype=BF16, strategy="row")
        )
    for name, tensor in model.state_dict().items():
        accelerate.utils.set_module_tensor_to_device(empty, name, "cpu", tensor.contiguous())
    with torch.no_grad():
        assert torch.equal(empty(tokens()), expected)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Gated(), Plain(), Pair()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def torch_model() -> tuple[nn.Module, nn.Module, Tensor]:
    dense = Blocks().to(BF16)
    sparse = copy.deepcopy(dense)
    assert list(layers(take(sparse))) == ["layers.0", "layers.1", "layers.2"]
    return sparse, dense, tokens()


def hf_model(kind: str) -> tuple[nn.Module, nn.Module, Tensor]:
    transformers = pytest.importorskip("transformers")
    import twell.integrations.transformers as twell_hf

    sizes: dict[str, Any] = {"hidden_size": K, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    if kind == "opt":
        config = transformers.OPTConfig(**sizes, ffn_dim=N, word_embed_proj_dim=K, dropout=0.0)
    else:
        family = transformers.LlamaConfig if "llama" in kind else transformers.Qwen2Config
        config = family(**sizes, intermediate_size=N, num_key_value_heads=2, hidden_act="relu")
    dense = transformers.AutoModelForCausalLM.from_config(config).to(BF16).eval()
    if kind.startswith("sparse_"):
        own = {"llama": "SparseLlamaForCausalLM", "qwen2": "SparseQwen2ForCausalLM"}[kind.removeprefix("sparse_")]
        cls = getattr(twell_hf, own)
        sparse = cls(cls.config_class(**config.to_dict())).to(BF16).eval()
        sparse.load_state_dict(dense.state_dict())
    else:
        sparse = twell_hf.sparsify(copy.deepcopy(dense))
    return sparse, dense, torch.arange(12).view(2, 6)


KINDS = pytest.mark.parametrize("kind", ["torch", "llama", "opt", "sparse_qwen2"])


def model_of(kind: str) -> tuple[nn.Module, nn.Module, Tensor]:
    return torch_model() if kind == "torch" else hf_model(kind)


def out(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = model(x)
    return y if isinstance(y, Tensor) else y.logits


def matches(sparse: nn.Module, dense: nn.Module, x: Tensor) -> None:
    assert len(layers(sparse)) == (3 if isinstance(dense, Blocks) else 2)
    close(out(sparse, x), out(dense, x))


@KINDS
def test_models_take_weights_after_construction(kind: str) -> None:
    sparse, dense, x = model_of(kind)
    matches(sparse, dense, x)
    assert sparse.state_dict().keys() == dense.state_dict().keys()
    for seed, load in enumerate((loaded, assigned, copied, as_data, as_replaced_parameters, through_state_dict)):
        state = new_state(dense, seed)
        dense.load_state_dict(state)
        before = out(sparse, x)
        load(sparse, {name: tensor.clone() for name, tensor in state.items()})
        if hasattr(sparse, "tie_weights"):
            sparse.tie_weights()
        matches(sparse, dense, x)
        assert not torch.equal(out(sparse, x), before)


@KINDS
def test_models_are_copied_moved_and_cast(kind: str) -> None:
    sparse, dense, x = model_of(kind)
    for duplicate in (copy.deepcopy, pickled, saved):
        other = duplicate(sparse)
        matches(other, dense, x)
        # its own weights, all of them
        loaded(other, {name: torch.zeros_like(tensor) for name, tensor in other.state_dict().items()})
        assert not torch.equal(out(other, x), out(sparse, x))
        matches(sparse, dense, x)
    for dtype in (torch.float32, torch.float16, BF16):
        dense.to(dtype)
        sparse.to(dtype)
        x = x.to(dtype) if x.is_floating_point() else x
        matches(sparse, dense, x)
    matches(sparse.share_memory(), dense, x)
    with torch.inference_mode():
        close(out(sparse, x), out(dense, x))
        loaded(sparse, dense.state_dict())
        close(out(copy.deepcopy(sparse), x), out(dense, x))
    meta = copy.deepcopy(sparse).to("meta")
    for rebuilt in (copy.deepcopy(meta), pickle.loads(pickle.dumps(meta))):
        rebuilt.load_state_dict(sparse.state_dict(), assign=True)
        assert all(layer.down_proj.weight.is_contiguous() for layer in layers(rebuilt).values())
        if kind == "torch":
            matches(rebuilt, dense, x)
