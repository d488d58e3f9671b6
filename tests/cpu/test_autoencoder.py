"""``twell.nn.SparseAutoencoder``: its formula, gradients, figures, files and errors, beside plain PyTorch."""

import copy
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import twell
from twell.nn.autoencoder import SparseAutoencoder

K, N, M = 24, 96, 40
KINDS: dict[str, dict[str, Any]] = {
    "relu": {},
    "jumprelu": {"bandwidth": 0.5, "threshold": 0.3},
    "topk": {"k": 5},
    "batchtopk": {"k": 4.5},
}
KIND = pytest.mark.parametrize("kind", KINDS)


def made(kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> SparseAutoencoder:
    sae = SparseAutoencoder(K, N, activation=kind, dtype=dtype, **(KINDS[kind] | options))  # type: ignore[arg-type]
    with torch.no_grad():
        for bias in (sae.b_enc, sae.b_dec, sae.W_skip):
            if bias is not None:
                bias.normal_(std=0.3)
    return sae


def tokens(dtype: torch.dtype = torch.float32, size: int = K) -> Tensor:
    return torch.randn(2, M // 2, size, dtype=dtype)


@pytest.mark.parametrize("strategy", ["union", "row", "dense"])
def test_the_moving_threshold_of_batchtopk(strategy: Any) -> None:
    """Calls without tokens leave it as it is."""
    sae, x = made("batchtopk", strategy=strategy, threshold_rate=0.02), tokens()
    pre = (x - sae.b_dec) @ sae.W_enc + sae.b_enc
    least = pre[pre > 0].topk(int((sae.k or 0) * M)).values[-1]
    for _ in range(3):
        sae(x)
        for empty in (x[:0], x[:, :0]):
            # what freed memory may hold
            del [torch.full((), 1e6) for _ in range(64)][:]
            sae(empty)
    assert float(sae.threshold) == pytest.approx(float(least.detach()) * (1 - 0.98**3), rel=1e-4)  # type: ignore[arg-type]
    sae.eval()
    torch.testing.assert_close(sae.encode(x), pre * (pre > sae.threshold))
    kept = sae.threshold.clone()  # type: ignore[union-attr]
    sae(x)
    assert torch.equal(sae.threshold, kept)  # type: ignore[arg-type]


def test_decoder_rows_of_norm_1() -> None:
    sae = made("relu", torch.float64)
    one = torch.ones(N, dtype=torch.float64)
    torch.testing.assert_close(sae.W_dec.norm(dim=1), one)
    rows = sae.W_dec
    with torch.no_grad():
        rows.mul_(3)
        rows[4] = 0
    sae.normalize_decoder_()
    one[4] = 0
    torch.testing.assert_close(sae.W_dec.norm(dim=1), one)


def test_dead_neurons_and_their_loss() -> None:
    sae, x = made("topk", k=1), tokens()
    for _ in range(2):
        y = sae(x)
    dead = sae.dead(2 * M)
    assert K // 2 < dead.sum() < N
    assert not sae.dead(2 * M + 1).any()
    error = (x - y).detach()
    few = dead & (dead.cumsum(0) <= 5)
    for mask in (few, dead):
        pre, count = ((x - sae.b_dec) @ sae.W_enc + sae.b_enc)[..., mask], int(mask.sum())
        values, which = pre.topk(min(K // 2, count))
        z = torch.zeros_like(pre).scatter(-1, which, values)
        right = (error - z @ sae.W_dec[mask]).square().sum(-1).mean() * min(1, count / (K // 2))
        found = sae.auxiliary_loss(x, y, mask)
        torch.testing.assert_close(found, right)
    # what y lacks is no part of y's training
    assert torch.autograd.grad(found, y, allow_unused=True)[0] is None
    assert float(sae.auxiliary_loss(x, y, torch.zeros(N, dtype=torch.bool))) == 0
    assert float(sae.auxiliary_loss(x[:0], y[:0], dead)) == 0
    sae.eval()(x)
    assert torch.equal(sae.dead(2 * M), dead)


def test_infinite_and_negative_thresholds() -> None:
    """An infinite one never fires; one below 0 is 0 and keeps its gradient."""
    sae = twell.nn.SparseAutoencoder(16, 32, activation="jumprelu", bandwidth=1.0)
    with torch.no_grad():
        sae.threshold.copy_(torch.tensor([torch.inf] * 8 + [-1.0] * 24))  # type: ignore[union-attr]
    x = torch.randn(9, 16)
    _, aux = sae(x, return_aux=True)
    pre = x @ sae.W_enc
    assert float(aux.l0.detach()) == pytest.approx(float((pre[:, 8:] > 0).sum()) / 9)
    assert torch.equal(sae.encode(x) != 0, (pre > 0) & (torch.arange(32) >= 8))
    (grad,) = torch.autograd.grad(aux.l0, sae.threshold)
    torch.testing.assert_close(grad[8:], -(pre[:, 8:].abs() < 0.5).float().sum(0) / 9)


def test_explain_says_what_raises() -> None:
    sae = twell.nn.SparseAutoencoder(64, 512, activation="topk", k=100, strategy="row", dtype=torch.bfloat16)
    _, training = sae.explain()
    assert training.reason == "calls raise: k is above 64"
    with pytest.raises(NotImplementedError, match="k must be at most 64 of 512 neurons in training, got 100"):
        sae(torch.randn(8, 64, dtype=torch.bfloat16))


@KIND
@pytest.mark.parametrize("strategy", ["union", "dense"])
def test_training_by_kernels_and_compiled_is_that_by_pytorch(kind: str, strategy: Any) -> None:
    torch.compiler.reset()
    sae, x = made(kind, skip=True), tokens()
    others = [copy.deepcopy(sae) for _ in range(2)]
    for other in others:
        other.strategy = strategy
    compiled = torch.compile(others[1], backend="aot_eager", fullgraph=True)
    for _ in range(2):
        for each in (sae, others[0], compiled):
            y, aux = each(x, return_aux=True)
            (y.square().sum() + 5 * (aux.l0 if kind == "jumprelu" else aux.l1)).backward()
    for other in others:
        for (name, ours), theirs in zip(other.named_parameters(), sae.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=name)
        for (name, ours), theirs in zip(other.named_buffers(), sae.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, msg=name)


def test_codes_and_strategies() -> None:
    sae, x = made("topk"), tokens()[0]
    codes = sae.encode(x)
    assert codes.count_nonzero() <= 5 * len(x)
    torch.testing.assert_close(sae.decode(codes), sae(x))
    model = torch.nn.Sequential(sae, twell.nn.SparseMLP(K, 64))
    assert [row.layer for row in twell.explain(model)][:2] == ["0", "0"]
    twell.nn.set_strategy(model, "row", screen="off")
    assert (sae.strategy, sae.screen, model[1].strategy) == ("row", "off", "row")
    assert [row.strategy for row in twell.explain(sae)] == ["dense", "dense"]
    with pytest.raises(NotImplementedError, match="invariant must be False for a SparseAutoencoder"):
        twell.nn.set_strategy(model, "auto", invariant=True)
    assert model[1].strategy == "row"
