"""A model in the form of nanochat trains as without twell in its dtypes on a GPU: masters in float32, x in bfloat16."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")

from nanochat import GPT, Linear

import twell

VOCABULARY, LENGTH, STEPS = 64, 16, 40


def train(device: torch.device, sparse: bool, strategy: str, compiled: bool, rank: int, ranks: int) -> list[str]:
    torch.manual_seed(0)
    model = GPT(VOCABULARY, 2, 32, LENGTH).to(device)
    if sparse:
        twell.sparsify_(model, names=("c_fc", "c_proj"), strategy=strategy)  # type: ignore[arg-type]
        assert {type(block.mlp.c_fc) for block in model.blocks} == {Linear}  # type: ignore[union-attr]
    run: Any = DistributedDataParallel(model) if ranks > 1 else model
    run = torch.compile(run, backend="aot_eager") if compiled else run
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    others = [*model.wte.parameters(), *model.wpe.parameters(), *model.lm_head.parameters()]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.02, betas=(0.8, 0.95))]
    draw, losses = torch.Generator().manual_seed(rank), []
    for _ in range(STEPS):
        begin, stride = (torch.randint(1, high, (4, 1), generator=draw) for high in (VOCABULARY, 4))
        loss = run(((begin + stride * torch.arange(LENGTH)) % VOCABULARY).to(device))
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
