"""DDP, FSDP1 and FSDP2: ranks with different tokens take the step of one process with all tokens."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Run, full, in_turn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import twell

COEFFICIENT, STEPS = 0.3, 2


class Block(nn.Module):
    def __init__(self, mlp: nn.Module, hidden: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(hidden), mlp

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x))
        return y


def make(device: torch.device, seed: int = 0, where: str | None = None) -> nn.Module:
    """Float64 on the CPU, bfloat16 and the sizes of kernels on a GPU."""
    torch.manual_seed(seed)
    hidden, neurons, dtype = (16, 32, torch.float64) if device.type == "cpu" else (256, 1024, torch.bfloat16)
    with torch.device(where or device):
        model = nn.Sequential(
            Block(twell.nn.SparseGatedMLP(hidden, neurons, bias=True, dtype=dtype, strategy="union"), hidden).to(dtype),
            Block(twell.nn.SparseMLP(hidden, neurons, dtype=dtype, strategy="union"), hidden).to(dtype),
        )
    for block in model:
        block.mlp.record_aux = True
    return model


def tokens(device: torch.device, step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    hidden, dtype = (16, torch.float64) if device.type == "cpu" else (256, torch.bfloat16)
    return torch.randn(2, 24, hidden, generator=generator, dtype=torch.float64).to(device, dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
    l1 = torch.stack([block.mlp.aux.l1 for block in inner]).mean()
    for block in inner:
        block.mlp.aux = None
    return y.double().square().mean() + COEFFICIENT * l1


def train(model: nn.Module, device: torch.device, ranks: list[int]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    for step in range(STEPS):
        for micro in range(2):
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = micro == 1
            elif isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(micro == 1)
            loss = torch.stack([loss_of(model, tokens(device, step, micro, rank)) for rank in ranks]).mean()
            (loss / 2).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def same(ours: nn.Module, expected: nn.Module) -> None:
    pairs = list(zip(ours.parameters(), expected.parameters(), strict=True))
    for p, q in pairs:
        got = full(p.detach())
        if got.dtype == torch.float64:
            torch.testing.assert_close(got, q.detach())
        else:
            # AdamW's first steps are lr * sign of the gradient, and bf16 rounds some gradients over zero
            assert (got.float() - q.detach().float()).norm() < 0.05 * q.detach().float().norm()


def same_losses(losses: list[float], expected: list[float], device: torch.device) -> None:
    total, right = (torch.tensor(each, dtype=torch.float64, device=device) for each in (losses, expected))
    dist.all_reduce(total)
    torch.testing.assert_close(
        total / dist.get_world_size(), right, rtol=1e-9 if device.type == "cpu" else 2e-2, atol=0
    )


def ddp(device: torch.device, bucket_view: bool, rows: bool) -> None:
    whole = make(device)
    expected = train(whole, device, [0, 1])
    # rank 0's values overwrite those of other ranks
    model = make(device, seed=dist.get_rank())
    if rows:
        twell.nn.set_down_layout(model, "rows")
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    losses = train(wrapped, device, [dist.get_rank()])
    same(model, whole)
    same_losses(losses, expected, device)
    for block in model:
        weight = block.mlp.down_proj.weight
        assert (weight.t() if rows else weight).is_contiguous()


@pytest.mark.parametrize(("bucket_view", "rows"), [(False, False), (True, True)])
def test_ddp(two: Run, bucket_view: bool, rows: bool) -> None:
    two(ddp, bucket_view, rows)


def fsdp(device: torch.device, reshard: bool, every_layer: bool) -> None:
    mesh = init_device_mesh(device.type, (2,))
    whole = make(device)
    model = copy.deepcopy(whole)
    expected = train(whole, device, [0, 1])
    for block in model:
        if every_layer:
            fully_shard(block.mlp, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    losses = train(model, device, [dist.get_rank()])
    same(model, whole)
    same_losses(losses, expected, device)
    assert isinstance(model[0].mlp.down_proj.weight, DTensor)
    assert "compression=8" in repr(model)
    assert {row.layer for row in twell.explain(model)} == {"0.mlp", "1.mlp"}
    # sharded values, in and out
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    same(model, whole)


@pytest.mark.parametrize(("reshard", "every_layer"), [(False, False), (True, True)])
def test_fsdp(two: Run, reshard: bool, every_layer: bool) -> None:
    two(fsdp, reshard, every_layer)


def fsdp_from_meta(device: torch.device) -> None:
    whole = make(device)
    model = make(device, where="meta")
    for block in model:
        fully_shard(block)
    fully_shard(model)
    assert model[0].mlp.down_proj.weight.is_meta
    model.to_empty(device=device)
    with torch.no_grad():
        for p, q in zip(model.parameters(), whole.parameters()):
            begin = p.shape[0] // 2 * dist.get_rank()
            p.to_local().copy_(q[begin : begin + p.shape[0] // 2])
    x = tokens(device, 0, 0, 0)
    torch.testing.assert_close(model(x), whole(x))


def fsdp_in_mixed_precision(device: torch.device) -> None:
    whole = make(device).float()
    model = copy.deepcopy(whole)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    x = tokens(device, 0, 0, 0).float()
    y = model(x)
    assert y.dtype == torch.bfloat16
    (y.float().square().mean() + COEFFICIENT * model[0].mlp.aux.l1).backward()
    with torch.autocast(device.type, torch.bfloat16):
        answer = whole(x)
        (answer.float().square().mean() + COEFFICIENT * whole[0].mlp.aux.l1).backward()
    for p, q in zip(model.parameters(), whole.parameters()):
        assert p.dtype == p.grad.dtype == torch.float32
        assert (p.grad.full_tensor() - q.grad).norm() < 0.05 * q.grad.norm()


def figures_alone(device: torch.device) -> None:
    """A loss of figures alone is right if the sharded module returns them."""
    whole = make(device)[0].mlp
    layer = copy.deepcopy(whole)
    fully_shard(layer)
    x = tokens(device, 0, 0, 0)
    for each in (whole, layer):
        each(x, return_aux=True)[1].l1.backward()
    for p, q in zip(layer.parameters(), whole.parameters()):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def fsdp1(device: torch.device) -> None:
    """FSDP1 keeps one flat parameter per module, for any layout of down weights."""
    whole = make(device)
    for each in (0, 1):
        (whole(tokens(device, 0, 0, each)).square().mean() / 2).backward()
    for original, layout in itertools.product((True, False), ("linear", "rows")):
        own = make(device)
        twell.nn.set_down_layout(own, layout)
        model = FullyShardedDataParallel(own, use_orig_params=original, device_id=device)
        model(tokens(device, 0, 0, dist.get_rank())).square().mean().backward()
        torch.optim.SGD(model.parameters(), 1.0).step()
        with FullyShardedDataParallel.summon_full_params(model):
            for p, q in zip(model.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(p.detach(), (q - q.grad).detach(), rtol=2e-2, atol=2e-2)
                if device.type == "cpu":
                    torch.testing.assert_close(p.detach(), (q - q.grad).detach())


def figures_of_ranks(device: torch.device, broadcast: bool, compiled: bool) -> None:
    """Neurons that fire on one rank are alive on all, and a rank without tokens changes no threshold."""
    torch.manual_seed(0)
    sae = twell.nn.SparseAutoencoder(64, 128, activation="batchtopk", k=2.5, device=device)
    with torch.no_grad():
        sae.b_enc.fill_(-0.5)
    own: nn.Module = torch.compile(sae, backend="aot_eager", fullgraph=True) if compiled else sae  # type: ignore[assignment]
    wrapped = DistributedDataParallel(own, broadcast_buffers=broadcast)
    alive, threshold, tokens = torch.zeros(128, dtype=torch.bool, device=device), torch.zeros(()), 0
    for sizes in ((24, 24), (9, 0), (0, 17), (0, 0)):
        every = [
            torch.randn(size, 64, generator=torch.Generator().manual_seed(size + r)).to(device)
            for r, size in enumerate(sizes)
        ]
        wrapped(every[dist.get_rank()]).sum().backward()
        codes = [sae.encode(x) for x in every]
        least = [each[each > 0].min() for each in codes if len(each)]
        alive |= torch.cat(codes).any(0)
        if least:
            threshold = threshold.lerp(torch.stack(least).mean().cpu(), sae.threshold_rate)
        tokens += sum(sizes)
    assert 0 < alive.sum() < 128
    assert torch.equal(sae.dead(tokens), ~alive)
    torch.testing.assert_close(sae.threshold.cpu(), threshold)
    # outside DDP a rank counts its own tokens, and waits for no other
    if dist.get_rank() == 0:
        sae(every[0].new_zeros(3, 64))
        assert int(sae.tokens_since_fired.max()) == tokens + 3
    # nor in the forward pass of a model that runs it by a hook
    before, size = int(sae.tokens_since_fired.max()), 2 + dist.get_rank()
    other = nn.Linear(64, 64, device=device)
    other.register_forward_hook(lambda module, given, y: (sae(given[0]), y)[1])
    DistributedDataParallel(other)(torch.zeros(size, 64, device=device))
    assert int(sae.tokens_since_fired.max()) == before + size


@pytest.mark.filterwarnings("ignore:`broadcast_buffers`")
@pytest.mark.parametrize(("broadcast", "compiled"), [(True, False), (False, False), (True, True)])
def test_figures_of_an_autoencoder(two: Run, broadcast: bool, compiled: bool) -> None:
    two(figures_of_ranks, broadcast, compiled)


def test_fsdp_from_meta_in_mixed_precision_with_figures(two: Run) -> None:
    two(in_turn, fsdp1, fsdp_from_meta, fsdp_in_mixed_precision, figures_alone)
