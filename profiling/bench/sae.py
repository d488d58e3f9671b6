"""``python -m profiling.bench sae``: a sparse autoencoder beside dense PyTorch, forward and in training.

Time a sparse autoencoder, y = a W_dec + b_dec of pre = (x - b_dec) W_enc + b_enc, by twell.sparse_ffn beside dense
PyTorch. "even" and "skewed" are JumpReLU: a is pre where it exceeds the threshold of its neuron. Each neuron fires
alike, or at a log-normal rate: ln(rate) has a standard deviation of 2, and no rate exceeds 0.5. "topk" is ReLU of the
largest of each token; dense PyTorch scatters torch.topk. A training step has the gradients of weights and biases, that
of b_dec through y alone, and not of x. A right result differs from dense PyTorch's, for the first of equal codes, by at
most 2 % in norm, in training by 5 %.

ms is the median of CUDA graphs, queued_ms of eager calls among many in a row. peak_bytes is of a training step, with
weights, gradients, x and dy.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from profiling.bench.layers import COMPILE, SCREENED, compiled
from profiling.harness import Bench, Case, Row, Settled, Variant, Way, agrees
from twell.choose.plan import route_of
from twell.commands.request import at_least, number_above
from twell.commands.timing import Call
from twell.testing.operands import largest

PATTERNS = ("even", "skewed", "topk")
PARAMETERS = ("w_enc", "b_enc", "w_dec", "b_dec")
# Of ln(rate), the largest rate, tokens of a chunk, and neurons that "topk" is for.
DEVIATION, MOST_RATE, CHUNK, MOST_TOPK = 2.0, 0.5, 512, 65_536
OPS = ("forward", "training")
STRATEGIES = ("row", "union", "auto", SCREENED)
GRAPH, QUEUED = Way("graph", "ms", "over_dense"), Way("queued", "queued_ms", "queued_over_dense", share=0.5, least=4)
SHOWN = (
    "pattern", "op", "n", "variant", "strategy", "nonzeros", "ms", "over_dense", "queued_ms", "queued_over_dense",
    "peak_bytes",
)  # fmt: skip
OPTIONS = {
    "--neurons": (at_least(8), [16_384, 65_536, 262_144], "of the autoencoder"),
    "--hidden": (at_least(8), 2304, "size of x"),
    "--tokens": (at_least(1), 8192, "of a call"),
    "--nonzeros": (number_above(0), 60.0, "per token"),
    "--top-k": (at_least(1), 64, 'of "topk"'),
    "--patterns": (PATTERNS, list(PATTERNS), "of the codes"),
    "--ops": (OPS, list(OPS), "operations"),
    "--strategies": (STRATEGIES, list(STRATEGIES), "of twell"),
    "--compile": (COMPILE, None, "torch.compile's mode for dense (default; none on a CPU)"),
    "--no-eager": (bool, False, "graphs alone, without eager calls"),
}
SECONDS = 2.0


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


class Measured:
    def __init__(self, o: Autoencoder, kept: Tensor, op: str, bench: Bench) -> None:
        self.o, self.kept, self.op, self.device, self.given = o, kept, op, bench.device, bench.given
        self.copies = self.device.copies_for(o.x.numel() * o.x.element_size())
        self.x, self.dy = ([t, *(t.clone() for _ in range(self.copies - 1))] for t in (o.x, o.dy))

    def by(self, layer: Callable[..., Tensor]) -> Callable[[Any], Call]:
        """The operation on the i-th copy by a strategy: y, and in training the gradients."""
        parameters = [getattr(self.o, name) for name in PARAMETERS]

        def call(strategy: Any) -> Call:
            asked = {"strategy": route_of(strategy) if strategy == SCREENED else strategy} if strategy else {}

            def forward(i: int) -> tuple[Tensor, ...]:
                return (layer(self.x[i % self.copies], o=self.o, **asked),)

            @torch.enable_grad()
            def step(i: int) -> tuple[Tensor, ...]:
                (y,) = forward(i)
                return y.detach(), *torch.autograd.grad(y, parameters, self.dy[i % self.copies])

            return forward if self.op == "forward" else step

        return call

    def variants(self) -> Iterator[Variant]:
        plain = self.o.thresholds is not None
        # torch.topk keeps whichever of equal values it likes
        answer = self.by(functools.partial(dense, kept=self.kept))("")(0)
        ours = agrees(lambda i: answer, self.op == "training")
        check = ours if plain else None
        layers = {"dense eager": dense, "dense compiled": compiled(self.given["compile"], dense)}
        for name, layer in layers.items():
            if layer is not None:
                yield Variant(name, self.by(layer), self.copies, "", check, self.note)
        # in training they are the same; TopK chooses among whole gates, without the screen
        asked = ["union" if name == "row" and self.op == "training" else name for name in self.given["strategies"]]
        for name in dict.fromkeys(name for name in asked if name != SCREENED or plain):
            yield Variant(f'"{name}"', self.by(sparse), self.copies, name, ours, self.note)

    def note(self, row: Row, settled: Settled, errors: object) -> None:
        peak = self.device.peak(settled.now) if self.op == "training" and not row["red"] else None
        if peak is not None:
            row["peak_bytes"] = peak + sum(t.nbytes for t in self.o if isinstance(t, Tensor))


def cases(bench: Bench) -> Iterator[Case]:
    given = bench.arguments
    bench.given["compile"] = given.compile or ("default" if bench.device.torch_device.type == "cuda" else "none")
    sizes = {"m": given.tokens, "k": given.hidden, "nonzeros": given.nonzeros, "top_k": given.top_k}
    ways = [GRAPH] if given.no_eager else [GRAPH, QUEUED]

    def measure(pattern: str, n: int) -> Iterator[list[Row]]:
        o = draw(pattern, n, bench.device.torch_device, **sizes)
        kept = codes(o)
        for op in given.ops:
            base = {"pattern": pattern, "op": op, "n": n, "nonzeros": float(kept.sum()) / len(kept)}
            yield bench.timed(base, Measured(o, kept, op, bench).variants(), ways)

    for n, pattern in itertools.product(given.neurons, given.patterns):
        if pattern != "topk" or n <= MOST_TOPK:
            yield {"pattern": pattern, "n": n}, functools.partial(measure, pattern, n)
