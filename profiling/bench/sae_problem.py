"""The sparse autoencoders that ``profiling.bench sae`` draws, by twell and by PyTorch's operators."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from twell.testing.operands import largest

PATTERNS = ("even", "skewed", "topk")
PARAMETERS = ("w_enc", "b_enc", "w_dec", "b_dec")
# of ln(rate), and the largest rate
DEVIATION, MOST_RATE = 2.0, 0.5
# tokens of a chunk
CHUNK = 512


class Autoencoder(NamedTuple):
    """Operands in bfloat16: x and dy [M, K], weights [N, K], thresholds [N]; without these the k of TopK."""

    x: Tensor
    dy: Tensor
    w_enc: Tensor
    b_enc: Tensor
    w_dec: Tensor
    b_dec: Tensor
    thresholds: Tensor | None
    k: int


def sparse(x: Tensor, o: Autoencoder, strategy: Any) -> Tensor:
    form: Any = {"activation": "topk", "k": o.k}
    if o.thresholds is not None:
        form = {"activation": "fatrelu", "threshold": o.thresholds}
    form |= {"b_up": o.b_enc, "b_down": o.b_dec, "strategy": strategy}
    y: Tensor = twell.sparse_ffn(x - o.b_dec.detach(), o.w_enc, o.w_dec.t(), **form)
    return y


def dense(x: Tensor, o: Autoencoder, kept: Tensor | None = None) -> Tensor:
    """y [M, K] by PyTorch's operators, of the codes that are ``kept`` if these are given."""
    pre = F.linear(x - o.b_dec.detach(), o.w_enc, o.b_enc)
    if kept is not None:
        hidden = torch.where(kept, pre, 0)
    elif o.thresholds is not None:
        hidden = torch.where(pre > o.thresholds, pre, 0)
    else:
        values, chosen = pre.relu().topk(o.k)
        hidden = torch.zeros_like(pre).scatter(-1, chosen, values)
    return F.linear(hidden, o.w_dec.t(), o.b_dec)


def codes(o: Autoencoder) -> Tensor:
    """Which pre-activations are kept, bool [M, N]: of equal ones the first, where torch.topk takes any."""
    found = []
    for x in (o.x - o.b_dec).split(CHUNK):
        pre = F.linear(x, o.w_enc, o.b_enc)
        found.append(pre > o.thresholds if o.thresholds is not None else largest(pre, o.k))
    return torch.cat(found)


def draw(pattern: str, n: int, device: torch.device, *, m: int, k: int, nonzeros: float, top_k: int) -> Autoencoder:
    """x - b_dec and dy are normal, rows of the weights have norm 1: pre-activations are normal, too."""
    generator = torch.Generator(device).manual_seed(n)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    b_dec = (normal(k) / 8).bfloat16()
    x, dy = normal(m, k) + b_dec, normal(m, k)
    w_enc, w_dec = (F.normalize(normal(n, k)).bfloat16().requires_grad_() for _ in range(2))
    b_enc = torch.zeros(n, dtype=torch.bfloat16, device=device).requires_grad_()
    thresholds = None
    if pattern != "topk":
        rates = (normal(n).double() * DEVIATION * (pattern == "skewed")).exp()
        for _ in range(100):
            rates = (rates * (nonzeros / n / rates.mean())).clamp(max=MOST_RATE)
        thresholds = torch.special.ndtri(1 - rates).clamp(min=0).bfloat16()
    return Autoencoder(x.bfloat16(), dy.bfloat16(), w_enc, b_enc, w_dec, b_dec.requires_grad_(), thresholds, top_k)
