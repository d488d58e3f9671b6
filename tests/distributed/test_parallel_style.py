"""``SparseMLPParallel``: a divided module takes the same steps as the whole one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Run, full, in_turn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import twell
from twell.nn.distributed import SparseMLPParallel
from twell.nn.pairs import pair_up

HIDDEN, NEURONS, COEFFICIENT = 16, 32, 0.3


class Block(nn.Module):
    """fc1 and fc2 among a block's own children, as in OPT."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(HIDDEN, NEURONS)
        self.activation_fn = nn.ReLU()
        self.fc2 = nn.Linear(NEURONS, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        h = self.activation_fn(h)
        return self.fc2(h)


def modules() -> dict[str, nn.Module]:
    torch.manual_seed(dist.get_rank())
    pair = Block()
    pair_up(pair, ("fc1", "fc2"), "activation_fn", (), {"strategy": "union"})
    made = {
        "gated": twell.nn.SparseGatedMLP(HIDDEN, NEURONS, strategy="union"),
        "gated, biased": twell.nn.SparseGatedMLP(HIDDEN, NEURONS, bias=True, strategy="union"),
        "dense": twell.nn.SparseGatedMLP(HIDDEN, NEURONS, bias=True, strategy="dense"),
        "rows": twell.nn.SparseGatedMLP(HIDDEN, NEURONS, bias=True, strategy="union"),
        "not gated": twell.nn.SparseMLP(HIDDEN, NEURONS, bias=True, strategy="union"),
        "pair": pair,
    }
    twell.nn.set_down_layout(made["rows"], "rows")
    return {name: module.double() for name, module in made.items()}


def whole_of(module: nn.Module) -> nn.Module:
    whole = copy.deepcopy(module)
    for parameter in whole.parameters():
        shared = parameter.detach().contiguous()
        dist.broadcast(shared, 0)
        parameter.data.copy_(shared)
    return whole


def tokens(rows: int = 2) -> Tensor:
    return torch.randn(rows, 6, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def layer_of(module: nn.Module) -> Any:
    return module.fc2 if isinstance(module, Block) else module


def train(
    module: nn.Module, steps: int, placed: Callable[[Tensor], Tensor], gathered: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    layer_of(module).record_aux = True
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=True)
    seen = []
    for _ in range(steps):
        x = tokens().requires_grad_()
        y = gathered(module(placed(x)))
        aux, layer_of(module).aux = layer_of(module).aux, None
        loss = (y * y).mean() + COEFFICIENT * aux.l1
        loss.backward()
        seen += [y.detach(), aux.l1.detach(), aux.l0.detach(), loss.detach(), x.grad]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def as_it_is(t: Tensor) -> Tensor:
    return t


def all_modules(device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (2,))

    def my_part(t: Tensor) -> Tensor:
        return DTensor.from_local(t, mesh, [Replicate()]).redistribute(placements=[Shard(1)]).to_local()

    def all_parts(t: Tensor) -> Tensor:
        return DTensor.from_local(t, mesh, [Shard(1)]).full_tensor()

    sequence = SparseMLPParallel(input_layouts=Shard(1), output_layouts=Shard(1))
    for name, module in modules().items():
        whole = whole_of(module)
        expected = train(whole, 2, as_it_is, as_it_is)
        ways: list[tuple[SparseMLPParallel, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
            (SparseMLPParallel(), as_it_is, as_it_is),
            (sequence, my_part, all_parts),
            (SparseMLPParallel(output_layouts=Shard(1), use_local_output=False), as_it_is, full),
        ]
        for style, placed, gathered in ways:
            parts = copy.deepcopy(module)
            plan = {"fc2": style} if isinstance(module, Block) else style
            parallelize_module(parts, mesh, plan)
            layer = layer_of(parts)
            layout = layer.down_layout
            assert layout == ("rows" if name == "rows" else "auto")
            local = layer.down_proj.weight.to_local()
            assert local.shape == (HIDDEN, NEURONS // 2)
            assert (local.t() if layout == "rows" else local).is_contiguous()
            assert (layer.hidden, layer.intermediate) == (HIDDEN, NEURONS)
            ours = train(parts, 2, placed, gathered)
            for got, answer in zip(ours, expected):
                torch.testing.assert_close(full(got), answer, msg=lambda m, w=f"{name}, {style}": f"{w}: {m}")
            for (key, p), (other, q) in zip(parts.named_parameters(), whole.named_parameters()):
                assert key == other
                torch.testing.assert_close(full(p.detach()), q.detach(), msg=lambda m, k=f"{name} {key}": f"{k}: {m}")
            # common handling of modules
            assert "16, 32, compression=8" in repr(parts)
            assert len({row.layer for row in twell.explain(parts)}) == 1
            twin = copy.deepcopy(parts)
            torch.testing.assert_close(gathered(twin(placed(tokens()))), gathered(parts(placed(tokens()))))
            half = twin.to(torch.bfloat16)
            assert layer_of(half).down_proj.weight.to_local().stride() == local.stride()


def test_modules_in_parts(cpu_ranks: Run) -> None:
    cpu_ranks(2, all_modules)


def figures_on_request(device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (2,))
    module = modules()["gated, biased"]
    whole = whole_of(module)
    seen: list[type] = []

    def read(layer: Any, *_: object) -> None:
        if layer.aux is not None:
            seen.append(type(layer.aux.l1))

    module.register_forward_hook(read)
    parallelize_module(module, mesh, SparseMLPParallel())
    module.register_forward_hook(read)
    y, aux = whole(tokens(), return_aux=True)
    for ours, theirs in ((module(tokens(), return_aux=True)), (module(x=tokens(), return_aux=True))):
        torch.testing.assert_close(ours, y)
        assert type(theirs) is twell.Aux
        torch.testing.assert_close(theirs, aux)
    assert module.aux is None
    module.record_aux = True
    ours, theirs = module(tokens(), True)
    assert theirs is module.aux
    module(tokens())
    torch.testing.assert_close(module.aux, aux)
    assert seen == [Tensor] * 4


def refusals(device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (2,))
    with pytest.raises(TypeError, match="must be a SparseGatedMLP or a SparseMLP, got Linear"):
        parallelize_module(nn.Linear(8, 8), mesh, SparseMLPParallel())
    module = twell.nn.SparseMLP(HIDDEN, 24)
    with pytest.raises(ValueError, match=r"multiple of 8 .* got N = 24 over 2 ranks: \[12\] each"):
        parallelize_module(module, mesh, SparseMLPParallel())
    module.strategy = "dense"
    parallelize_module(module, mesh, SparseMLPParallel())
    x = tokens().float().requires_grad_()
    with pytest.raises(RuntimeError, match=r"no second derivative, got .* create_graph=True"):
        torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with pytest.raises(ValueError, match=r"must hold plain parameters, got .*Shard"):
        parallelize_module(module, mesh, SparseMLPParallel())
    with pytest.raises(ValueError, match=r"one dimension, as mesh..tp.. has, got"):
        parallelize_module(twell.nn.SparseMLP(16, 32), init_device_mesh(device.type, (1, 2)), SparseMLPParallel())


def on_meta(device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (2,))
    whole = whole_of(modules()["gated"])
    with torch.device("meta"):
        module = twell.nn.SparseGatedMLP(HIDDEN, NEURONS, dtype=torch.float64)
    parallelize_module(module, mesh, SparseMLPParallel())
    module.to_empty(device=device)
    assert module.down_proj.weight.to_local().is_contiguous()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            full = DTensor.from_local(whole.get_parameter(name).detach(), mesh, [Replicate()])
            parameter.copy_(full.redistribute(placements=parameter.placements))
    torch.testing.assert_close(module(tokens()), whole(tokens()))


def gradients(call: Callable[[Tensor], Tensor], module: nn.Module) -> list[Tensor]:
    module.zero_grad()
    x = tokens().requires_grad_()
    call(x).square().sum().backward()
    return [x.grad, *(full(p.grad) for p in module.parameters())]


def in_other_hands(device: torch.device) -> None:
    """The layer is compiled, checkpointed, and divided by a plan for three linear layers."""
    mesh = init_device_mesh(device.type, (2,))
    module = modules()["gated, biased"]
    whole = whole_of(module)
    expected = gradients(whole, whole)
    by_children = copy.deepcopy(module)
    columns = {name: ColwiseParallel() for name in ("gate_proj", "up_proj")}
    parallelize_module(by_children, mesh, {**columns, "down_proj": RowwiseParallel()})
    parallelize_module(module, mesh, SparseMLPParallel())
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    ways: list[tuple[Callable[[Tensor], Tensor], nn.Module]] = [
        (compiled, module),
        (lambda x: checkpoint(module, x, use_reentrant=False), module),
        (by_children, by_children),
    ]
    for call, each in ways:
        for ours, answer in zip(gradients(call, each), expected, strict=True):
            torch.testing.assert_close(ours, answer)


def test_figures_refusals_meta(cpu_ranks: Run) -> None:
    cpu_ranks(2, in_turn, in_other_hands, figures_on_request, refusals, on_meta)


def laid_out_again(device: torch.device) -> None:
    """The layout of parts follows ``set_down_layout`` and loading; optimizers keep their Parameter."""
    mesh = init_device_mesh(device.type, (2,))
    module = modules()["gated"]
    whole = whole_of(module)
    parallelize_module(module, mesh, SparseMLPParallel())
    weight = module.down_proj.weight
    module(tokens()).square().sum().backward()
    gradient = weight.grad.full_tensor()
    for layout in ("rows", "linear", "rows", "rows"):
        twell.nn.set_down_layout(module, layout)
        assert module.down_proj.weight is weight
        local = weight.to_local()
        assert (local.t() if layout == "rows" else local).is_contiguous()
        assert weight.stride() == ((1, HIDDEN) if layout == "rows" else (NEURONS, 1))
        assert weight.grad.stride() == weight.stride()
        assert weight.grad.to_local().stride() == local.stride()
        assert weight.requires_grad
        assert torch.equal(weight.detach().full_tensor(), whole.down_proj.weight)
        assert torch.equal(weight.grad.full_tensor(), gradient)
        torch.testing.assert_close(module(tokens()), whole(tokens()))
    module.load_state_dict({name: t.clone().contiguous() for name, t in module.state_dict().items()}, assign=True)
    assert module.down_proj.weight.to_local().t().is_contiguous()
    torch.testing.assert_close(module(tokens()), whole(tokens()))

    # fully_shard has its own storage
    module = copy.deepcopy(whole)
    fully_shard(module)
    twell.nn.set_down_layout(module, "rows")
    torch.testing.assert_close(module(tokens()), whole(tokens()))
    module.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(tokens()), whole(tokens()))


def test_layouts_of_parts(cpu_ranks: Run) -> None:
    cpu_ranks(2, laid_out_again)


def in_sixteen_bits(device: torch.device) -> None:
    """The kernels' dtype, with the module's own choice of strategy."""
    mesh = init_device_mesh(device.type, (2,))
    torch.manual_seed(0)
    k, n, m = (256, 1024, 512) if device.type == "cuda" else (32, 64, 64)
    whole = twell.nn.SparseGatedMLP(k, n, bias=True, device=device, dtype=torch.bfloat16)
    parts = copy.deepcopy(whole)
    parallelize_module(parts, mesh, SparseMLPParallel())
    x = torch.randn(m, k, device=device).bfloat16()
    for _ in range(3):
        with torch.no_grad():
            y, answer = parts(x), whole(x)
        assert (y - answer).float().norm() < 0.01 * answer.float().norm()
        leaves = x.clone().requires_grad_(), x.clone().requires_grad_()
        for module, leaf in zip((parts, whole), leaves):
            module.zero_grad()
            y, aux = module(leaf, return_aux=True)
            (y.float().square().mean() + COEFFICIENT * aux.l1).backward()
        mine, theirs = (leaf.grad.float() for leaf in leaves)
        assert (mine - theirs).norm() < 0.02 * theirs.norm()
        for p, q in zip(parts.parameters(), whole.parameters()):
            assert (p.grad.full_tensor() - q.grad).float().norm() < 0.02 * q.grad.float().norm()


def test_in_sixteen_bits(two: Run) -> None:
    two(in_sixteen_bits)
