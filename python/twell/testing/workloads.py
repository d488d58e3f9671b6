"""Problems: the tensors of one feed-forward layer, drawn from a named workload or read from a recorded layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.base.arguments import require_integer, require_positive


class ModelSizes(NamedTuple):
    """Sizes of a decoder: layers, hidden size (K), intermediate size (N) and attention heads."""

    layers: int
    hidden: int
    neurons: int
    heads: int


# The models of the paper (arXiv 2603.23198), which share one layer.
PAPER_MODELS = {name: ModelSizes(n, 2048, 5632, 32) for name, n in {"0.5B": 8, "1B": 18, "1.5B": 28, "2B": 38}.items()}
PAPER_HIDDEN, PAPER_NEURONS = PAPER_MODELS["1.5B"][1:3]


class FFN(NamedTuple):
    """The tensors of one layer: x [M, K], w_gate, w_up and w_down [N, K] (one row per neuron), biases [N], [N], [K].

    The non-gated layer that shares these tensors is ``relu(x w_gate^T) w_down``: it has no ``w_up``.
    """

    x: Tensor
    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor
    b_gate: Tensor | None = None
    b_up: Tensor | None = None
    b_down: Tensor | None = None

    def to(self, device: torch.device | str) -> FFN:
        """The same problem on ``device``; tensors already there are not copied."""
        return self.map(lambda t: t.to(device))

    def map(self, function: Callable[[Tensor], Tensor]) -> FFN:
        """The layer with ``function`` applied to each of its tensors."""
        biases = (None if t is None else function(t) for t in self[4:])
        return FFN(*(function(t) for t in (self.x, self.w_gate, self.w_up, self.w_down)), *biases)

    def rows(self, start: int, stop: int) -> FFN:
        """The same layer on rows ``start`` to ``stop`` of x."""
        return self._replace(x=self.x[start:stop])

    def present(self, gated: bool) -> dict[str, Tensor]:
        """The layer's tensors by name; without gate there is neither an up projection nor its bias."""
        absent = () if gated else ("w_up", "b_up")
        return {name: t for name, t in self._asdict().items() if t is not None and name not in absent}


@dataclass(frozen=True)
class Workload:
    """A pattern of activation: mean non-zeros per token and their distribution.

    ``neuron_sigma`` is the spread of the neurons' log-popularity, ``token_sigma`` that of the tokens', ``dead`` the
    share of neurons that never fire, ``rho`` the correlation of a token with the topic of its document.
    """

    nnz: float
    neuron_sigma: float = 0.0
    token_sigma: float = 0.0
    dead: float = 0.0
    rho: float = 0.0


WORKLOADS = {
    "uniform29": Workload(29),
    "skew29": Workload(29, neuron_sigma=1.0, token_sigma=0.5, dead=0.3),
    "topic29": Workload(29, neuron_sigma=1.0, token_sigma=0.5, dead=0.3, rho=0.5),
    "topic128": Workload(128, neuron_sigma=1.0, token_sigma=0.5, dead=0.2, rho=0.5),
    "dense911": Workload(911, neuron_sigma=0.5, token_sigma=0.3),
}

# The first two input features are reserved: the first, a constant, carries the neuron's bias, the second the token's.
_CONSTANT = 4.0
_DEAD_BIAS = -50.0
_THRESHOLD_ROWS = 4096

# Rows of one float64 chunk; at N = 5632 its three intermediates take 0.5 GB.
CHUNK_ROWS = 4096

# Tokens of a recorded layer before they repeat.
_PERIOD = 4096


def make(
    name: str | Workload,
    m: int = 16384,
    k: int = PAPER_HIDDEN,
    n: int = PAPER_NEURONS,
    *,
    seed: int = 0,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    document: int = 512,
) -> FFN:
    """Draw the workload ``name``, one of one's own or a key of WORKLOADS, with m tokens, hidden size k and n neurons.

    The draw depends on the sizes, the seed and the kind of device. ``document`` is the number of consecutive tokens
    that share a topic. Raises ValueError for an unknown name.
    """
    require_sizes(m, k, n)
    require_integer("seed", seed, 0)
    if not isinstance(name, Workload) and (not isinstance(name, str) or name not in WORKLOADS):
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, got {name!r}")
    load = name if isinstance(name, Workload) else WORKLOADS[name]
    require_positive("nnz of the workload", load.nnz)
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    x = normal(m, k)
    if load.rho:
        topic = normal(math.ceil(m / document), k).repeat_interleave(document, 0)[:m]
        x = math.sqrt(load.rho) * topic + math.sqrt(1 - load.rho) * x
    w_gate = normal(n, k) / math.sqrt(k)
    popularity = load.neuron_sigma * normal(n)
    heaviness = load.token_sigma * normal(m)
    dead = torch.rand(n, generator=generator, device=device) < load.dead
    x[:, 0], x[:, 1] = _CONSTANT, heaviness
    w_gate[:, 0], w_gate[:, 1] = popularity / _CONSTANT, 1.0
    pre_activation = x[:_THRESHOLD_ROWS].to(dtype).float() @ w_gate.to(dtype).float().T
    pre_activation[:, dead] = -math.inf
    w_gate[:, 0] = (popularity - bisected(pre_activation, load.nnz, 20.0)) / _CONSTANT
    w_gate[dead, 0] = _DEAD_BIAS
    w_up, w_down = normal(n, k) / math.sqrt(k), normal(n, k) / math.sqrt(n)
    return FFN(x.to(dtype), w_gate.to(dtype), w_up.to(dtype), w_down.to(dtype))


def require_sizes(m: int, k: int, n: int) -> None:
    for letter, size in (("m", m), ("k", k), ("n", n)):
        require_integer(letter, size, 0)


def bisected(sums: Tensor, nnz: float, bound: float) -> float:
    """The value that ``nnz`` entries of a row of ``sums`` exceed on average, by bisection between -bound and bound."""
    low, high = -bound, bound
    for _ in range(50):
        middle = (low + high) / 2
        if (sums > middle).sum(1).float().mean() > nnz:
            low = middle
        else:
            high = middle
    return middle


def load_real(
    layer: int,
    folder: Path | str,
    m: int = 16384,
    *,
    seed: int = 0,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> FFN:
    """Read ``folder/layer{layer}.npz``, a recorded layer; its tokens repeat up to m, up and down weights are random.

    The file holds ``x`` [tokens, K], ``w`` [N, K], the gate weight, and ``b`` [N] if there is a bias, as the bits of
    bfloat16. An older one holds ``x`` and ``w`` in int8 with scales ``x_scale`` and ``w_scale``; ``w`` has the rows of
    the neurons ``alive`` of ``n``, and ``quiet`` [K] is a direction whose product with every token is about 1. The
    other gate rows are noise minus a multiple of it: those neurons stay silent without zero weights, which would run
    cooler and faster than real ones. Needs numpy. Raises FileNotFoundError if the layer is not in the folder,
    ValueError if its arrays do not fit.
    """
    import numpy as np

    path, generator = Path(folder) / f"layer{layer}.npz", torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu")

    with np.load(path) as arrays:
        x, w = (_stored(arrays, name) for name in "xw")
        b = _stored(arrays, "b") if "b" in arrays else None
        rows = {name: torch.from_numpy(arrays[name]) for name in ("alive", "quiet") if name in arrays}
        n, k = int(arrays["n"]) if rows else len(w), x.shape[1]
    alive = rows["alive"].long() if rows else torch.arange(n, device="cpu")
    distinct = len(set(alive.tolist()))
    if not (len(x) and distinct == len(alive) == len(w) and ((alive >= 0) & (alive < n)).all()):
        expected = f"tokens, and a row of w for each of the distinct neurons alive below n = {n}"
        got = f"{len(x)} tokens, {len(w)} rows and {distinct} distinct neurons of {len(alive)}"
        raise ValueError(f"{path}: expected {expected}, got {got}")
    w_gate = w
    if rows:
        w_gate = normal(n, k) * (0.6 / x.norm(dim=1).mean()) - 4.0 * rows["quiet"]
        w_gate[alive] = w
    w_up, w_down = normal(n, k) / math.sqrt(k), normal(n, k) / math.sqrt(n)
    x = x.repeat(math.ceil(m / x.shape[0]), 1)[:m]
    return FFN(x, w_gate, w_up, w_down, b).map(lambda t: t.to(device, dtype))


def _stored(arrays: Any, name: str) -> Tensor:
    """An array of a file in float32: of the bits of bfloat16, or of int8 with a scale."""
    array = torch.from_numpy(arrays[name])
    if f"{name}_scale" in arrays:
        return array.float() * torch.from_numpy(arrays[f"{name}_scale"])
    return array.view(torch.bfloat16).float()


def real_names(folder: Path | str) -> list[str]:
    """Names of the recorded layers in ``folder``, in order: ``["real3", "real6"]``."""
    numbers = [path.stem[5:] for path in Path(folder).glob("layer*.npz")]
    return [f"real{number}" for number in sorted((i for i in numbers if i.isdecimal()), key=int)]


def real_upstream(problem: FFN, *, seed: int = 0) -> Tensor:
    """An upstream gradient [M, K] of normal values, drawn on the problem's device.

    It repeats every 4,096 tokens, as recorded layers do: otherwise the few terms of a rare neuron, one token four
    times, may cancel, and its error says little.
    """
    m, k = problem.x.shape
    generator = torch.Generator(problem.x.device).manual_seed(seed)
    drawn = torch.randn(min(m, _PERIOD), k, generator=generator, device=problem.x.device).to(problem.x.dtype)
    return drawn.repeat(-(-m // _PERIOD), 1)[:m]
