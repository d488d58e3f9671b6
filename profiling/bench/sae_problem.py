"""The sparse autoencoders that ``profiling.bench sae`` draws, and what their outputs and gradients must be."""

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from profiling.harness import Verdict, verdict
from twell import testing
from twell.runtime import geometry
from twell.testing.comparison import compare_errors, gradient_errors
from twell.testing.operands import halfway, largest, sums, undecided

PATTERNS = ("even", "skewed", "topk")
PARAMETERS = ("w_enc", "b_enc", "w_dec", "b_dec")
# of ln(rate), and the largest rate
DEVIATION, MOST_RATE = 2.0, 0.5
# Tokens and neurons that are checked, and tokens of a chunk: 1 GB of float64 at 262,144 neurons.
TOKENS, NEURONS, CHUNK = 256, 1024, 512
# The share of them that must be left without those that rounding decides.
LEAST_LEFT = 0.4


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


def dense(x: Tensor, o: Autoencoder) -> Tensor:
    """y [M, K] by PyTorch's operators."""
    pre = F.linear(x - o.b_dec.detach(), o.w_enc, o.b_enc)
    if o.thresholds is not None:
        hidden = torch.where(pre > o.thresholds, pre, 0)
    else:
        values, chosen = pre.relu().topk(o.k)
        hidden = torch.zeros_like(pre).scatter(-1, chosen, values)
    return F.linear(hidden, o.w_dec.t(), o.b_dec)


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


def gradients(o: Autoencoder, x: Tensor, fires: Tensor, square: bool = False) -> dict[str, Tensor]:
    """Those of ``o``'s neurons, of whose pre-activations ``fires`` [M, N] are kept, in the dtype of ``o``.

    square: the sums of the terms' squares instead.
    """
    hidden = torch.where(fires, F.linear(x, o.w_enc, o.b_enc), 0)
    d_pre, dy = torch.where(fires, o.dy @ o.w_dec.t(), 0), o.dy
    if square:
        hidden, d_pre, dy, x = (t.square() for t in (hidden, d_pre, dy, x))
    return {"w_enc": d_pre.t() @ x, "b_enc": d_pre.sum(0), "w_dec": hidden.t() @ dy, "b_dec": dy.sum(0)}


class Answer:
    """y of drawn tokens and gradients of drawn neurons in float64, and the errors of dense PyTorch."""

    @torch.no_grad()
    def __init__(self, o: Autoencoder) -> None:
        x, self.sliced = o.x - o.b_dec, len(o.w_enc) > geometry.MAX_NEURONS
        wide = o._replace(**{name: getattr(o, name).double() for name in ("dy", *PARAMETERS)})
        generator = torch.Generator(x.device).manual_seed(0)
        tokens, neurons = (
            torch.randperm(size, generator=generator, device=x.device)[:most]
            for size, most in ((len(x), TOKENS), (len(o.w_enc), NEURONS))
        )
        kept, unsure, self.nonzeros = [], [], 0.0
        for part in x.double().split(CHUNK):
            _, fires, near = _decided(o, wide, part)
            self.nonzeros += float(fires.sum()) / len(x)
            kept.append(fires[:, neurons])
            unsure.append(near[:, neurons].any(0))
        pre, fires, near = _decided(o, wide, x[tokens].double())
        sure = ~near.any(1)
        _require_most(sure, "tokens")
        self.tokens, pre, fires = tokens[sure], pre[sure], fires[sure]
        hidden = torch.where(fires, pre, 0)
        self.y = hidden @ wide.w_dec + wide.b_dec
        squares = hidden.square()
        self.roundings = float(squares.sum() ** 2 / squares.square().sum().clamp(min=1e-30))
        rounded = torch.where(fires, F.linear(x[self.tokens], o.w_enc, o.b_enc), 0)
        self.bar = testing.errors(F.linear(rounded, o.w_dec.t(), o.b_dec), self.y)

        sure = ~torch.stack(unsure).any(0)
        _require_most(sure, "neurons")
        self.neurons, fires = neurons[sure], torch.cat(kept)[:, sure]
        names = ("w_enc", "b_enc", "w_dec")
        few, wide = (each._replace(**{name: getattr(each, name)[self.neurons] for name in names}) for each in (o, wide))
        self.right = gradients(wide, x.double(), fires)
        squares_of = gradients(wide, x.double(), fires, square=True)
        self.terms = {name: t.view(-1, t.shape[-1]).sum(1).sqrt() for name, t in squares_of.items()}
        self.bars = gradient_errors(gradients(few, x, fires), self.right, self.terms)

    def check(self, strategy: str, call: object, outputs: tuple[Tensor, ...]) -> Verdict:
        """Check y, and in training the gradients of ``PARAMETERS``."""
        y, *found = outputs
        of_y = testing.Comparison(testing.errors(y[self.tokens], self.y), self.bar, self.roundings)
        if self.sliced:
            # the outputs of slices of neurons are rounded, too: two errors of one size
            of_y = dataclasses.replace(of_y, budget=of_y.budget * 2**0.5, row_budget=of_y.row_budget * 2**0.5)
        compared = {"y": of_y}
        if found:
            ours = {name: t if name == "b_dec" else t[self.neurons] for name, t in zip(PARAMETERS, found, strict=True)}
            compared |= compare_errors(gradient_errors(ours, self.right, self.terms), self.bars, self.roundings)
        return verdict(compared)


def _require_most(sure: Tensor, what: str) -> None:
    """RuntimeError if a check would be of few."""
    if not float(sure.float().mean()) >= LEAST_LEFT:
        raise RuntimeError(f"rounding decides too many {what}: {int(sure.sum())} of {len(sure)} are left")


def _decided(o: Autoencoder, wide: Autoencoder, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float64 pre-activations [M, N], which are kept after rounding, and where the sum of fp32 decides that."""
    pre, reach = sums(x, wide.w_enc, wide.b_enc)
    gate = pre.bfloat16()
    if o.thresholds is not None:
        return pre, gate > o.thresholds, (pre - halfway(o.thresholds, 1)).abs() < reach
    return pre, largest(gate, o.k), undecided(pre, reach, o.k, torch.bfloat16)
