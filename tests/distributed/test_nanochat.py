"""A model in the form of nanochat trains as without twell in its dtypes on a GPU: masters in float32, x in bfloat16."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import twell

VOCABULARY, WIDTH, LENGTH, STEPS = 64, 32, 16, 40


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(dtype=x.dtype))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Linear(WIDTH, 4 * WIDTH, False), Linear(4 * WIDTH, WIDTH, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.mlp = Linear(WIDTH, 3 * WIDTH, False), Linear(WIDTH, WIDTH, False), MLP()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(F.rms_norm(x, (WIDTH,))).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(F.rms_norm(x, (WIDTH,)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.lm_head = Linear(WIDTH, VOCABULARY, False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = F.rms_norm(self.wte(ids), (WIDTH,))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(F.rms_norm(x, (WIDTH,))).float()
        return F.cross_entropy(15 * torch.tanh(logits / 15).flatten(0, 1), targets.flatten())


def train(device: torch.device, sparse: bool, strategy: str, compiled: bool, rank: int, ranks: int) -> list[str]:
    torch.manual_seed(0)
    model = GPT().to(device)
    if sparse:
        twell.sparsify_(model, names=("c_fc", "c_proj"), strategy=strategy)  # type: ignore[arg-type]
        assert {type(block.mlp.c_fc) for block in model.blocks} == {Linear}  # type: ignore[union-attr]
    run: Any = DistributedDataParallel(model) if ranks > 1 else model
    run = torch.compile(run, backend="aot_eager") if compiled else run
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    others = [*model.wte.parameters(), *model.lm_head.parameters()]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.02, betas=(0.8, 0.95))]
    draw, losses = torch.Generator().manual_seed(rank), []
    for _ in range(STEPS):
        begin, stride = (torch.randint(1, high, (4, 1), generator=draw) for high in (VOCABULARY, 4))
        ids = ((begin + stride * torch.arange(LENGTH + 1)) % VOCABULARY).to(device)
        loss = run(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(f"{loss.item():.6f}")
    assert all(p.dtype == torch.float32 for p in matrices)
    return losses


def both(device: torch.device, compiled: bool, ranks: int) -> list[list[str]]:
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    return [train(device, sparse, "auto", compiled, rank, ranks) for sparse in (False, True)]


@pytest.mark.parametrize(
    ("ranks", "compiled"),
    [(2, True), *(pytest.param(*how, marks=pytest.mark.nightly) for how in ((1, False), (1, True), (2, False)))],
)
def test_losses_are_those_of_the_stock_model(cpu_ranks: Callable[..., list[Any]], ranks: int, compiled: bool) -> None:
    for dense, sparse in cpu_ranks(ranks, both, compiled, ranks):
        assert sparse == dense
        assert float(dense[-1]) < 0.7 * float(dense[0])


def test_the_sparse_path_trains_alike() -> None:
    how: Any = (torch.device("cpu"), True)
    dense, sparse = ([float(loss) for loss in train(*how, strategy, False, 0, 1)] for strategy in ("dense", "union"))
    assert abs(dense[0] - sparse[0]) < 1e-3
    assert abs(sum(dense[-5:]) - sum(sparse[-5:])) < 0.1 * sum(dense[-5:])
