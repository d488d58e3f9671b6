"""What ``sparsify_`` promises of the model around its layers: trials leave it alone, and references to it hold."""

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ffns import NAMES, Block, Gated, K, Literal, N, Pair, Plain, take, tokens
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import twell
from twell.integrations.sparsify import known, layers, sparsify_
from twell.nn.layers import SparseGatedMLP
from twell.nn.pairs import SparseDown


class ActNorm(nn.Module):
    """Initialises itself from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.ready = nn.Parameter(torch.ones(K)), False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.ready:
            with torch.no_grad():
                self.scale.copy_(1 / x.reshape(-1, K).std(0))
            self.ready = True
        return x * self.scale


class Stateful(Block):
    """A block with a cache, a counter, statistics, first-batch initialisation, a shared child and random numbers."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.first, self.stats, self.mask, self.calls = ActNorm(), nn.BatchNorm1d(7), torch.empty(0), 0
        self.final, self.wrong = self.norm, wrong

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if len(self.mask) < x.shape[-2]:
            self.mask = torch.ones(x.shape[-2], x.shape[-2], device=x.device).tril()
        noise = random.random() + torch.rand(())
        x = F.dropout(self.first(self.mask[: x.shape[-2], : x.shape[-2]] @ x) + noise, 0.1, self.training)
        h = self.activation_fn(self.fc1(self.norm(x)))
        if self.wrong:
            h = h - 0.1
        return self.final(x + self.fc2(h))


def everything(m: nn.Module) -> list[Any]:
    """All tensors of a model by identity and value, its attributes and the states of random numbers."""
    tensors = [
        (name, id(t), t.device, t._version, t.clone()) for name, t in [*m.named_parameters(), *m.named_buffers()]
    ]
    attributes = [(name, key, id(value)) for name, inner in m.named_modules() for key, value in vars(inner).items()]
    return [tensors, attributes, [type(inner) for inner in m.modules()], random.getstate(), torch.get_rng_state()]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta"), None])
def test_a_refusal_changes_nothing(around: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    m = nn.Sequential(Plain(), Stateful(), Stateful(wrong=True)).train()
    before = everything(m)
    # it would seed GPUs
    monkeypatch.setattr(torch, "manual_seed", lambda _: pytest.fail("torch.manual_seed"))
    with (around or (lambda: torch.autocast("cpu", torch.bfloat16)))():
        with pytest.raises(ValueError, match=r"2 \(Stateful\) cannot be run sparse"):
            take(m)
    assert same(before, everything(m))


def test_trials_leave_the_state_of_a_block_alone() -> None:
    m = nn.Sequential(Stateful()).train()
    dense = copy.deepcopy(m)
    assert list(layers(take(m))) == ["0.fc2"]
    assert (m[0].calls, m[0].first.ready, len(m[0].mask)) == (0, False, 0)
    for _ in range(2):
        results = []
        for each in (m, dense):
            torch.manual_seed(0)
            random.seed(0)
            results.append(each(tokens()))
        torch.testing.assert_close(*results)
    assert not any(p.is_meta for p in m.parameters())


class Largest(TorchDispatchMode):
    """The largest tensor that operators return."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.device.type == "cpu":
            self.numbers = max(self.numbers, made.numel())
        return made


@pytest.mark.parametrize("form", [Gated, lambda **sizes: Pair(nn.SiLU(), **sizes)])
def test_trials_need_no_memory_for_the_neurons_of_a_layer(form: Any) -> None:
    with torch.device("meta"):
        m = nn.ModuleList(form(k=64, n=65536) for _ in range(2))
    with Largest() as largest:  # type: ignore[no-untyped-call]
        take(m, activation="relu")
    assert 64 * 256 < largest.numbers < 64 * 1024


class Walking(nn.Module):
    """Calls parts of its own nn.Sequential."""

    def __init__(self, walk: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.walk = nn.Sequential(nn.Linear(K, N), nn.SiLU(), nn.Linear(N, K)), walk

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.walk(self.net, x).mean()


WALKS: dict[str, Callable[[Any, Tensor], Any]] = {
    "index": lambda net, x: net[0](x),
    "children": lambda net, x: nn.Sequential(*list(net.children())[:-1])(x),
    "old forward": lambda net, x: nn.Sequential.forward(net, x),
    "whole": lambda net, x: net(x),
}


@pytest.mark.parametrize(("walk", "activation"), zip(WALKS, itertools.cycle(("relu", "relu2"))))
def test_parts_of_a_sequence_are_right_or_an_error(walk: str, activation: Any) -> None:
    m: Any = Walking(WALKS[walk])
    dense = copy.deepcopy(m)
    dense.net[1] = nn.ReLU() if activation == "relu" else type("Squared", (nn.Module,), {"forward": _squared})()
    assert list(layers(take(m, activation=activation))) == ["net"]
    if walk in ("children", "whole"):
        torch.testing.assert_close(m(tokens()), dense(tokens()))
        return
    with pytest.raises(TypeError, match="NamedMLP"):
        m(tokens())


def _squared(self: nn.Module, x: Tensor) -> Tensor:
    return x.relu().square()


def test_a_layer_stays_the_object_that_it_was() -> None:
    """So whatever refers to it, as a compiled call does, has the new one."""
    torch._dynamo.reset()
    m: Any = nn.Sequential(Gated(nn.SiLU()))
    held, dense = [torch.compile(m[0], backend="eager"), m[0].compile(backend="eager") or m[0]], Gated()
    m[0].note, m[0].layer_idx = {"a": 1}, 3
    for call in held:
        call(tokens())
    dense.load_state_dict(m[0].state_dict())
    take(m, activation="relu")
    for call in (m[0], *held):
        torch.testing.assert_close(call(tokens()), dense(tokens()))
    assert m[0] is held[1]
    assert type(m[0]) is SparseGatedMLP
    assert (m[0].note, m[0].layer_idx) == ({"a": 1}, 3)


class Projector(nn.Module):
    """The names of a layer between other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(96, 64), nn.Linear(64, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.relu(self.up_proj(x)))


def test_a_projector_and_containers_with_the_names_are_left_alone() -> None:
    m = nn.Sequential(Projector(), nn.LayerNorm(K), Plain(), nn.ModuleList([nn.ReLU(), Projector(), nn.ReLU()]))
    assert list(layers(take(m))) == ["2"]
    assert type(m[0]) is Projector


def test_an_unknown_class_is_left_alone() -> None:
    class Same(nn.TransformerEncoderLayer):
        def __init__(self) -> None:
            super().__init__(K, 4, N, dropout=0.0, batch_first=True)

    class Other(Same):
        def _ff_block(self, x: Tensor) -> Tensor:
            return super()._ff_block(x) + self.linear1(x).mean()

    m = nn.ModuleList([Same(), Other()])
    assert known.known_class(m[0]) is not None
    assert known.known_class(m[1]) is None
    assert list(layers(sparsify_(m))) == ["0.linear2"]
    assert type(m[1].linear2) is nn.Linear


@pytest.mark.parametrize("name", ["forward", "_ff_block"])
def test_a_method_put_into_a_known_class_makes_it_unknown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m = nn.Sequential(nn.TransformerEncoderLayer(K, 4, N, dropout=0.0))
    monkeypatch.setattr(nn.TransformerEncoderLayer, name, lambda self, x: self.linear1(x))
    with pytest.raises(ValueError, match=r"1, the first 0 \(TransformerEncoderLayer\)"):
        sparsify_(m)
    monkeypatch.undo()
    setattr(m[0], name, lambda x: x)
    with pytest.raises(ValueError, match=f"{name} set on the instance"):
        sparsify_(m)


def test_layers_of_fsdp1_are_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        m = FullyShardedDataParallel(nn.Sequential(Gated()), use_orig_params=True, device_id=torch.device("cpu"))
        with pytest.raises(ValueError, match="has its parameters in one buffer: call sparsify_ before"):
            take(m)
    finally:
        dist.destroy_process_group()


def test_methods_that_were_kept_are_right_or_an_error() -> None:
    m: Any = nn.ModuleList([Gated(), Literal(), type("Silu", (Literal,), {"forward": _silu})()])
    kept, expected = [m[0].forward, m[1].forward], m[1](tokens())
    take(m[:2])
    # as tiled MLPs of others do
    for tiled in (kept[0], lambda x: m[0].down_proj(m[0].act_fn(m[0].gate_proj(x)) * m[0].up_proj(x))):
        with pytest.raises(AttributeError, match="has no attribute"):
            tiled(tokens())
    torch.testing.assert_close(kept[1](tokens()), expected)
    kept.append(m[2].forward)
    with pytest.raises(ValueError, match="its method _silu is kept elsewhere, and would still apply SiLU"):
        take(m[2:], activation="relu")
    kept.pop()
    assert list(layers(take(m[2:], activation="relu"))) == ["0"]


def _silu(self: Any, x: Tensor) -> Tensor:
    return self.fc2(F.silu(self.fc1(x)))  # type: ignore[no-any-return]


def test_a_down_weight_of_anothers_memory_is_refused() -> None:
    m: Any = nn.ModuleDict({"mlp": Gated()})
    m.also = nn.Parameter(m["mlp"].down_proj.weight.data.view(-1)[8:])
    with pytest.raises(ValueError, match="shares memory with also"):
        take(m)


def spread(m: nn.Module, **options: Any) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    device_map = {name: "cpu" for name, _ in m.named_children()}
    accelerate.dispatch_model(m, device_map, main_device="cpu", force_hooks=True, **options)
    return m


@pytest.mark.parametrize(
    ("form", "before"),
    [(Gated, True), (Block, False), (lambda: nn.TransformerEncoderLayer(K, 4, N, 0.0, batch_first=True), True)],
)
def test_hooks_that_move_tensors_work_on(form: Callable[[], nn.Module], before: bool) -> None:
    m = nn.Sequential(form(), nn.LayerNorm(K)).eval().to(torch.bfloat16)
    expected = m(tokens(torch.bfloat16))
    if before:
        spread(m)
    names: Any = [*NAMES, ("linear1", "linear2")]
    sparsify_(m, names=names, strategy="union")
    if not before:
        spread(m)
    torch.testing.assert_close(m(tokens(torch.bfloat16)), expected, rtol=2**-6, atol=2**-6)
    (layer,) = layers(m).values()
    assert layer._is_plain()
    hooks = [inner._hf_hook for inner in m.modules() if "_hf_hook" in vars(inner)]
    assert layer._hf_hook in hooks
    moved: list[Any] = []
    layer._hf_hook.pre_forward = lambda module, *args, **kwargs: (moved.append(module), (args, kwargs))[1]
    m(tokens(torch.bfloat16))
    assert moved == [layer]
    assert {row.strategy for row in twell.explain(m)} != {"dense"}


@pytest.mark.parametrize("form", [Gated, Block])
def test_offloaded_weights_are_refused_or_run(form: Callable[[], nn.Module]) -> None:
    accelerate = pytest.importorskip("accelerate")
    m = nn.Sequential(form()).eval()
    expected = m(tokens())
    offloaded = copy.deepcopy(m)
    accelerate.cpu_offload(offloaded, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"hook of accelerate that does more .*device_map"):
        take(offloaded)
    take(m, strategy="union")
    accelerate.cpu_offload(m, torch.device("cpu"))
    torch.testing.assert_close(m(tokens()), expected)


@pytest.mark.parametrize("target", [["fc1"], ["fc2"], "all-linear"])
def test_lora_on_either_layer_of_a_pair_has_one_answer(target: Any) -> None:
    peft = pytest.importorskip("peft")
    m = nn.Sequential(Block()).eval()
    config = peft.LoraConfig(target_modules=target, r=4, init_lora_weights=False)
    answers = []
    for of in (copy.deepcopy(m), take(copy.deepcopy(m))):
        torch.manual_seed(0)
        answers.append(peft.get_peft_model(of, config)(tokens()))
    torch.testing.assert_close(*answers)
    # what is refused before, runs sparse by the advice
    with pytest.raises(ValueError, match=r"must have plain projections, .*merge adapters first"):
        take(peft.get_peft_model(copy.deepcopy(m), config))
    merged = peft.get_peft_model(m, config).merge_and_unload()
    expected = merged(tokens())
    assert list(layers(take(merged))) == ["0.fc2"]
    assert isinstance(merged[0].fc2, SparseDown)
    torch.testing.assert_close(merged(tokens()), expected)
