"""Problems and comparisons for tests, benchmarks and users: named workloads, exact integer problems, error budgets.

A problem is an ``FFN``: the tensors of one feed-forward layer. ``make`` draws a named workload, ``load_real`` reads a
recorded layer, ``integer_problem`` and ``pattern_problem`` build problems whose answer is the same in any order of
summation. ``compare`` and ``compare_gradients`` measure a result against float64 beside dense PyTorch, and
``machine_line`` names the machine. The activation is ReLU unless ``activation`` and ``threshold`` say otherwise.
Gradients are dictionaries by the names of ``FFN``, each of its tensor's shape.
"""

from __future__ import annotations

import math
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from twell._activation import ActivationName, activation_of
from twell._arguments import require, require_integer, require_number
from twell._auto import AutoStrategy
from twell._runtime import fingerprint, geometry, packaged
from twell.functional import Aux, Strategy

_T = TypeVar("_T")

# Sizes at the edges of a kernel's tiles, and the sizes of real layers.
UGLY_M = (0, 1, 7, 63, 64, 65, 127, 128, 129, 257)
UGLY_K = (8, 64, 72, 896, 2048, 4096, 8192)

# Largest error against float64 as a multiple of dense PyTorch's, where many roundings share the error.
BUDGET = 1.1

# The norm of n errors of one size has a deviation of half to three quarters of its size over the root of n, so a right
# result of few terms may be further away by chance. This is four to six deviations.
LUCK = 3

# The budget of a bias's gradient. It is one vector: with skewed neurons a few elements hold most of its norm, and each
# is rounded by up to half a unit. Over 20 elements the ratio of two such errors has a standard deviation of 14 %; this
# is three of them.
BIAS_BUDGET = 1.4

# The budget of a gradient's worst row, the least lucky of thousands, which another order of sums changes.
ROW_BUDGET = 1.25

# A row's error is relative to at least this share of the root mean square row norm. A sum of 2,048 products in 128 fp32
# steps is off by up to 128 * 2^-23 = 1.5e-5 of its size: more than a row that cancels to nothing, but less than the
# rounding to bf16 (2^-9 = 2e-3) at this floor. Wrong rows still show: budgets are below 1e-2.
ROW_FLOOR = 1e-2

# A sum of 2,048 products of x and w in 128 fp32 steps is off by up to 128 * 2^-23 of its size on the way, about
# |x| |w| / sqrt(2048): 3.4e-7 of |x| |w|. If it is nearer to 0 than three times that, rounding decides its sign.
KINK = 2.0**-20

# Rows of one float64 chunk; at N = 5632 its three intermediates take 0.5 GB.
CHUNK_ROWS = 4096

# Integers below this are exact in fp32, and so is any sum of them that stays below it.
EXACT_LIMIT = 1 << 24


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


# Workloads


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

# Tokens of a recorded layer before they repeat.
_PERIOD = 4096


def make(
    name: str,
    m: int = 16384,
    k: int = PAPER_HIDDEN,
    n: int = PAPER_NEURONS,
    *,
    seed: int = 0,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    document: int = 512,
) -> FFN:
    """Draw the workload ``name`` (a key of WORKLOADS) with m tokens, hidden size k and n neurons.

    The draw depends on the sizes, the seed and the kind of device. ``document`` is the number of consecutive tokens
    that share a topic. Raises ValueError for an unknown name.
    """
    _require_sizes(m, k, n)
    require_integer("seed", seed, 0)
    if not isinstance(name, str) or name not in WORKLOADS:
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, got {name!r}")
    load = WORKLOADS[name]
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
    threshold = _threshold(pre_activation, load.nnz)
    w_gate[:, 0] = (popularity - threshold) / _CONSTANT
    w_gate[dead, 0] = _DEAD_BIAS
    w_up, w_down = normal(n, k) / math.sqrt(k), normal(n, k) / math.sqrt(n)
    return FFN(x.to(dtype), w_gate.to(dtype), w_up.to(dtype), w_down.to(dtype))


def _require_sizes(m: int, k: int, n: int) -> None:
    for letter, size in (("m", m), ("k", k), ("n", n)):
        require_integer(letter, size, 0)


def _threshold(pre_activation: Tensor, nnz: float) -> float:
    """The value that ``nnz`` entries of a row exceed on average, by bisection."""
    low, high = -20.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        if (pre_activation > middle).sum(1).float().mean() > nnz:
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

    The file holds ``x`` int8 [tokens, K] and ``x_scale`` [tokens, 1] or [1, K]; ``w`` int8 [alive, K] and ``w_scale``,
    the gate rows of the neurons that fire at least once; ``alive``, their indices; ``n``, the number of neurons; and
    ``quiet`` [K], a direction whose product with every token is about 1. The other gate rows are noise minus a multiple
    of ``quiet``: those neurons stay silent without zero weights, which would run cooler and faster than real ones.
    Needs numpy. Raises FileNotFoundError if the layer is not in the folder.
    """
    import numpy as np

    path = Path(folder) / f"layer{layer}.npz"
    with np.load(path) as arrays:
        stored = {key: torch.from_numpy(arrays[key]) for key in ("x", "x_scale", "w", "w_scale", "alive", "quiet")}
        n = int(arrays["n"])
    x = stored["x"].float() * stored["x_scale"]
    k = x.shape[1]
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu")

    w_gate = normal(n, k) * (0.6 / x.norm(dim=1).mean()) - 4.0 * stored["quiet"]
    w_gate[stored["alive"].long()] = stored["w"].float() * stored["w_scale"]
    w_up, w_down = normal(n, k) / math.sqrt(k), normal(n, k) / math.sqrt(n)
    x = x.repeat(math.ceil(m / x.shape[0]), 1)[:m]
    return FFN(*(t.to(device, dtype) for t in (x, w_gate, w_up, w_down)))


def load(
    name: str,
    m: int = 16384,
    k: int = PAPER_HIDDEN,
    n: int = PAPER_NEURONS,
    *,
    real_layers: Path | str | None = None,
    seed: int = 0,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> FFN:
    """The workload ``name``: a key of WORKLOADS, or ``real3`` for layer 3 of the folder ``real_layers``.

    A recorded layer has its own k and n. Raises ValueError for an unknown name, or a recorded layer without a folder.
    """
    require("name", name, str, "the name of a workload")
    if name.startswith("real") and name[4:].isdecimal():
        if real_layers is None:
            raise ValueError(f"{name} needs real_layers, the folder that holds layer{name[4:]}.npz, got none")
        return load_real(int(name[4:]), real_layers, m, seed=seed, device=device, dtype=dtype)
    return make(name, m, k, n, seed=seed, device=device, dtype=dtype)


def real_names(folder: Path | str) -> list[str]:
    """Names of the recorded layers in ``folder``, in order: ``["real3", "real6"]``."""
    numbers = [path.stem[5:] for path in Path(folder).glob("layer*.npz")]
    return [f"real{number}" for number in sorted((i for i in numbers if i.isdecimal()), key=int)]


# Exact problems: small integers, whose sums fp32 holds exactly in any order

_FAN_IN = 16  # non-zero weights of a neuron, which bounds its sums


def integer_problem(
    m: int,
    k: int,
    n: int,
    *,
    density: float = 0.05,
    biases: str = "",
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    activation: ActivationName = "relu",
) -> FFN:
    """Draw a problem of small integers in which about the share ``density`` of the gate is positive.

    Density 0 makes every gate zero or less, density 1 every gate positive. ``biases`` names the projections that have
    one, out of "gate up down". k is at least 8. It is drawn on the CPU, so every device gets the same problem. Every
    sum is exact in fp32 and every gate in 16 bits, of a layer with ``activation``. Raises ValueError if the sizes are
    too large for that.
    """
    _require_sizes(m, k, n)
    require_number("density", density, 0, 1)
    require("biases", biases, str, 'words of "gate up down"')
    if unknown := set(biases.split()) - {"gate", "up", "down"}:
        raise ValueError(f'biases must be words of "gate up down", got {" ".join(sorted(unknown))!r}')
    require_integer("seed", seed, 0)
    problem = _draw_integers(m, k, n, density, biases, seed).map(lambda t: t.to(device, dtype))
    check_exact(problem, activation)
    return problem


def _draw_integers(m: int, k: int, n: int, density: float, biases: str, seed: int) -> FFN:
    """The int8 tensors of ``integer_problem`` on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int8, device="cpu")

    def signs(*shape: int) -> Tensor:
        return 2 * integers(0, 1, *shape) - 1

    def fan_in(count: int) -> Tensor:
        """[n, k] of zeros and, in each row, ``count`` signs in columns from 1 on."""
        start = torch.randint(k - 1, (n, 1), generator=generator, device="cpu")
        columns = (start + torch.arange(count, device="cpu") * ((k - 1) // count)) % (k - 1) + 1
        return torch.zeros(n, k, dtype=torch.int8, device="cpu").scatter_(1, columns, signs(n, count))

    count = min(_FAN_IN, k - 1)
    x = signs(m, k) * integers(1, 2, m, k)
    x[:, 0] = 2
    w_gate, w_up = fan_in(count), fan_in(count)
    w_gate[:, 0] = _gate_shift(count, density, "gate" in biases)
    return FFN(
        x,
        w_gate,
        w_up,
        w_down=integers(-1, 1, n, k),
        b_gate=integers(-2, 2, n) if "gate" in biases else None,
        b_up=integers(-3, 3, n) if "up" in biases else None,
        b_down=integers(-8, 8, k) if "down" in biases else None,
    )


def _gate_shift(count: int, density: float, bias: bool) -> int:
    """Weight of the constant feature (2) with which the share ``density`` of sums of ``count`` products is positive."""
    most = 2 * count + (2 if bias else 0)
    if density <= 0:
        return -math.ceil(most / 2)
    if density >= 1:
        return math.ceil((most + 1) / 2)
    deviation = math.sqrt(2.5 * count)  # a product is one of -2, -1, 1, 2
    quantile = math.sqrt(2) * float(torch.erfinv(torch.tensor(1 - 2 * density, device="cpu")))
    return -round(quantile * deviation / 2)


def pattern_problem(
    gates: Tensor,
    k: int,
    *,
    biases: str = "",
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> FFN:
    """Draw a problem of small integers whose gate before ReLU is exactly ``gates``, integers [M, N] with M <= k.

    Token m has a one in feature m, and neuron n has gates[m, n] there; the other features are signs that the gate
    ignores. ``biases`` as in ``integer_problem``; the gate's weights cancel its bias. Raises ValueError if k is too
    small or a sum is not exact.
    """
    m, n = gates.shape
    if m > k:
        raise ValueError(f"a pattern of M rows needs k >= M, got M = {m}, k = {k}")
    base = _draw_integers(m, k, n, 0, biases, seed)
    x = base.x.sign()
    x[:, :m] = torch.eye(m, device="cpu")
    w_gate = torch.zeros(n, k, device="cpu")
    w_gate[:, :m] = gates.T.cpu().float()
    if base.b_gate is not None:
        w_gate[:, :m] -= base.b_gate.float()[:, None]
    problem = base._replace(x=x, w_gate=w_gate).map(lambda t: t.to(device, dtype))
    check_exact(problem)
    return problem


def check_exact(problem: FFN, activation: ActivationName = "relu") -> None:
    """Raise ValueError unless every fp32 sum of the layer, gated or not, is exact in any order of summation.

    The squares of "relu2" must be finite in 16 bits, too; it has the largest hidden state, so the others pass with it.
    """
    magnitudes = problem.map(lambda t: t.detach().double().abs())
    if problem.x.shape[0] == 0:
        return
    product_sums = [F.linear(magnitudes.x, magnitudes.w_gate, magnitudes.b_gate)]
    product_sums.append(F.linear(magnitudes.x, magnitudes.w_up, magnitudes.b_up))
    gate = float64_gate(problem)
    up = F.linear(problem.x.double(), problem.w_up.double(), _double(problem.b_up))
    factor = gate.square() if activation == "relu2" else gate
    for hidden in (factor, factor * up.abs()):
        product_sums += [F.linear(hidden, magnitudes.w_down.T, magnitudes.b_down), hidden.sum(1)]
    largest = max(float(sums.max()) for sums in product_sums)
    if not largest < EXACT_LIMIT:
        raise ValueError(f"sums must stay below 2^24 to be exact in fp32, got {largest:.0f}")
    if not torch.equal(gate, gate.to(problem.x.dtype).double()):
        raise ValueError(f"gates must be exact in {problem.x.dtype}, got values up to {float(gate.max()):.0f}")
    if activation == "relu2" and not (factor * up.abs().clamp_min(1)).to(problem.x.dtype).isfinite().all():
        raise ValueError(f"hidden states must be finite in {problem.x.dtype}, got gates up to {float(gate.max()):.0f}")


def integer_upstream(problem: FFN, *, seed: int = 0) -> Tensor:
    """An upstream gradient [M, K] for an exact problem: -2 to 2 at six places of each row, so that sums stay small."""
    m, k = problem.x.shape
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(k, (m, 6), generator=generator, device="cpu")
    values = torch.randint(-2, 3, (m, 6), generator=generator, device="cpu")
    return (
        torch.zeros(m, k, dtype=torch.int64, device="cpu")
        .scatter_(1, places, values)
        .to(problem.x.device, problem.x.dtype)
    )


# References and errors


def _double(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.double()


def float64_gate(problem: FFN, threshold: float = 0.0) -> Tensor:
    """relu(x Wg^T + bg), or what is above the ``threshold``, in float64 from the stored values, [M, N]."""
    gate = F.linear(problem.x.double(), problem.w_gate.double(), _double(problem.b_gate))
    return torch.where(gate <= _rounded(threshold, problem.x.dtype), 0, gate)


def _rounded(threshold: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(threshold, dtype=dtype, device="cpu"))


class _Hidden(NamedTuple):
    """The hidden state of a float64 gate and up projection, which is 1 without one, and its derivatives by both."""

    value: Tensor
    by_gate: Tensor
    by_up: Tensor

    @classmethod
    def of(cls, gate: Tensor, up: Tensor | None, activation: ActivationName) -> _Hidden:
        activation_of(activation, gated=up is not None)
        up = torch.ones_like(gate) if up is None else up
        fires = torch.ones_like(up)
        if activation == "drelu":
            fires = (up > 0).double()
            up = up * fires
        factor, slope = (gate**2, 2 * gate) if activation == "relu2" else (gate, torch.ones_like(gate))
        return cls(factor * up, slope * up, factor * fires)


def _chunks(m: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + CHUNK_ROWS, m)) for start in range(0, m, CHUNK_ROWS))


@torch.no_grad()
def count_roundings(
    problem: FFN, *, gated: bool = True, activation: ActivationName = "relu", threshold: float = 0.0
) -> float:
    """The effective number of hidden values behind the layer's rounding error: (sum h^2)^2 / sum h^4, in float64.

    It is the number of non-zeros if all have one size, less if a few are large, and 0 if there are none.
    """
    energy = fourth = 0.0
    for start, stop in _chunks(problem.x.shape[0]):
        part = problem.rows(start, stop)
        up = F.linear(part.x.double(), part.w_up.double(), _double(part.b_up)) if gated else None
        squares = _Hidden.of(float64_gate(part, threshold), up, activation).value.square()
        energy += float(squares.sum())
        fourth += float(squares.square_().sum())
    return energy**2 / fourth if fourth else 0.0


@torch.no_grad()
def float64_output(
    problem: FFN,
    *,
    gated: bool = True,
    activation: ActivationName = "relu",
    threshold: float = 0.0,
    rounded: bool = False,
) -> Tensor:
    """(relu(x Wg^T + bg) * (x Wu^T + bu)) Wd + bd in float64 from the stored values, [M, K]; no up factor if not gated.

    If ``rounded``, the hidden state is rounded to the storage type. Computed in chunks of rows on the problem's own
    device.
    """
    weights = problem.rows(0, 0).map(Tensor.double)
    out = torch.empty_like(problem.x, dtype=torch.float64)
    for start, stop in _chunks(problem.x.shape[0]):
        part = problem.rows(start, stop)
        up = F.linear(part.x.double(), weights.w_up, weights.b_up) if gated else None
        hidden = _Hidden.of(float64_gate(part, threshold), up, activation).value
        if rounded:
            hidden = hidden.float().to(problem.x.dtype).double()
        out[start:stop] = F.linear(hidden, weights.w_down.T, weights.b_down)
    return out


def exact_output(problem: FFN, *, gated: bool = True, **options: Any) -> Tensor:
    """The only right answer to an exact problem: ``float64_output`` rounded once to the storage type, [M, K]."""
    return float64_output(problem, gated=gated, **options).float().to(problem.x.dtype)


def dense_output(
    problem: FFN, *, gated: bool = True, activation: ActivationName = "relu", threshold: float = 0.0
) -> Tensor:
    """The same layer in plain PyTorch in the storage type, [M, K]: the baseline of every error and time."""
    hidden = _dense_hidden(problem, gated, activation, threshold)
    return F.linear(hidden, problem.w_down.T, problem.b_down)


def _dense_hidden(problem: FFN, gated: bool, activation: ActivationName, threshold: float) -> Tensor:
    activation_of(activation, threshold, gated)
    gate = F.linear(problem.x, problem.w_gate, problem.b_gate)
    hidden = F.threshold(gate, threshold, 0.0) if threshold else F.relu(gate)
    if activation == "relu2":
        hidden = hidden.square()
    if not gated:
        return hidden
    up = F.linear(problem.x, problem.w_up, problem.b_up)
    return hidden * (F.relu(up) if activation == "drelu" else up)


def sparse_output(
    problem: FFN,
    *,
    gated: bool = True,
    compression: int = 8,
    strategy: Strategy | AutoStrategy = "row",
    activation: ActivationName = "relu",
    threshold: float = 0.0,
) -> Tensor:
    """The same layer through ``twell.sparse_gated_ffn`` or ``twell.sparse_ffn``, [M, K].

    The default, strategy "row", does not round the hidden state: integers have one right answer.
    """
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = problem
    if not gated:
        return twell.sparse_ffn(
            x,
            w_gate,
            w_down.t(),
            b_up=b_gate,
            b_down=b_down,
            compression=compression,
            strategy=strategy,
            activation=activation,
            threshold=threshold,
        )
    return twell.sparse_gated_ffn(
        x,
        w_gate,
        w_up,
        w_down.t(),
        b_gate=b_gate,
        b_up=b_up,
        b_down=b_down,
        compression=compression,
        strategy=strategy,
        activation=activation,
        threshold=threshold,
    )


def sparse_layer(problem: FFN, *, gated: bool = True, **options: Any) -> tuple[Tensor, Aux]:
    """``sparse_output`` with ``Aux``; ``options`` (strategy, main_grads, activation, ...) are the function's."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = problem
    options |= {"b_up": b_up if gated else b_gate, "b_down": b_down, "return_aux": True}
    if gated:
        outputs: tuple[Tensor, Aux] = twell.sparse_gated_ffn(x, w_gate, w_up, w_down.t(), b_gate=b_gate, **options)
    else:
        outputs = twell.sparse_ffn(x, w_gate, w_down.t(), **options)
    return outputs


def real_upstream(problem: FFN, *, seed: int = 0) -> Tensor:
    """An upstream gradient [M, K] of normal values, drawn on the problem's device.

    It repeats every 4,096 tokens, as recorded layers do: otherwise the few terms of a rare neuron, one token four
    times, may cancel, and its error says little.
    """
    m, k = problem.x.shape
    generator = torch.Generator(problem.x.device).manual_seed(seed)
    drawn = torch.randn(min(m, _PERIOD), k, generator=generator, device=problem.x.device).to(problem.x.dtype)
    return drawn.repeat(-(-m // _PERIOD), 1)[:m]


@torch.no_grad()
def off_kinks(problem: FFN, *, gated: bool = True, threshold: float = 0.0) -> FFN:
    """Zero the tokens whose gradients depend on rounding, and return that problem.

    ReLU has a kink at 0, or a step at ``threshold``, and so has |h| where the up projection is 0. If an fp32 sum falls
    on the other side of it than the float64 sum, whole terms of the gradients differ, in dense PyTorch, too: a few of
    uniform29's 16,384 tokens do, and their errors hide all others. A token with a sum this near becomes zero.
    """
    weights = problem.rows(0, 0).map(Tensor.double)

    # a gate is rounded before it is compared with a threshold
    level = _rounded(threshold, problem.x.dtype)
    step = level * torch.finfo(problem.x.dtype).eps

    def near(x: Tensor, weight: Tensor, bias: Tensor | None, at: float = 0.0) -> tuple[Tensor, Tensor]:
        sums = F.linear(x, weight, bias)
        scale = x.norm(dim=1)[:, None] * weight.norm(dim=1) + (0 if bias is None else bias.abs())
        return sums, (sums - at).abs() < KINK * scale + (step if at else 0)

    tokens = problem.x.clone()
    for start, stop in _chunks(len(tokens)):
        x = problem.x[start:stop].double()
        gate, kinks = near(x, weights.w_gate, weights.b_gate, level)
        if gated:
            kinks |= near(x, weights.w_up, weights.b_up)[1] & (gate > 0)
        tokens[start:stop].masked_fill_(kinks.any(1, keepdim=True), 0)
    return problem._replace(x=tokens)


def _rare_neurons(active: Tensor) -> Tensor | None:
    """Mask [N] of rare neurons: by popularity, 64 with few non-zeros together; None if the non-zeros do not fit."""
    m, n = active.shape
    counts = active.sum(0)
    if int(counts.sum()) > geometry.hybrid_capacity(m, n):
        return None
    on_cpu = counts.tolist()
    order = sorted(range(n), key=lambda neuron: (-on_cpu[neuron], neuron))
    rare = torch.zeros(n, dtype=torch.bool, device=active.device)
    for first in range(0, n, geometry.NEURON_TILE):
        tile = order[first : first + geometry.NEURON_TILE]
        rare[tile] = bool(counts[tile].sum() <= geometry.RARE_ENTRIES)
    return rare


@torch.no_grad()
def _gradients(
    problem: FFN,
    dy: Tensor,
    dl1: float,
    gated: bool,
    dtype: torch.dtype | None = None,
    each: Callable[[Tensor], Tensor] = lambda factor: factor,
    activation: ActivationName = "relu",
    threshold: float = 0.0,
) -> dict[str, Tensor]:
    """Gradients in float64. ``each`` is applied to both factors of every term.

    With ``dtype``, h, d_gate and d_up are rounded to it, except for the weights and biases of rare neurons, as
    ``twell.reference.hybrid_backward`` defines them.
    """
    chunks = [float64_gate(problem.rows(*rows), threshold) != 0 for rows in _chunks(len(dy))]
    gates = torch.cat(chunks or [dy.new_zeros(0)])
    rare = _rare_neurons(gates) if dtype is not None and len(dy) else None
    w = problem.rows(0, 0).map(Tensor.double)
    out = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in problem.present(gated).items()}

    def rounded(values: Tensor, weights: bool = False) -> Tensor:
        if dtype is not None:
            narrow = values.to(dtype).double()
            values = torch.where(rare, values, narrow) if weights and rare is not None else narrow
        return each(values)

    for start, stop in _chunks(len(dy)):
        x, upstream = problem.x[start:stop].double(), dy[start:stop].double()
        gate = float64_gate(problem.rows(start, stop), threshold)
        up = F.linear(x, w.w_up, w.b_up) if gated else None
        hidden, by_gate, by_up = _Hidden.of(gate, up, activation)
        dh = (upstream @ w.w_down.T + dl1 * hidden.sign()).masked_fill_(gate == 0, 0)
        coefficients = {"gate": (dh * by_gate, w.w_gate)}
        if gated:
            coefficients["up"] = dh * by_up, w.w_up
        for name, (d, weight) in coefficients.items():
            out["x"][start:stop] += rounded(d) @ each(weight)
            out[f"w_{name}"] += rounded(d, weights=True).T @ each(x)
            if f"b_{name}" in out:
                out[f"b_{name}"] += rounded(d, weights=True).sum(0)
        out["w_down"] += rounded(hidden, weights=True).T @ each(upstream)
        if "b_down" in out:
            out["b_down"] += each(upstream).sum(0)
    return out


def float64_gradients(
    problem: FFN, dy: Tensor, dl1: float = 0.0, *, gated: bool = True, **options: Any
) -> dict[str, Tensor]:
    """Gradients of the layer in float64 from the stored values, for ``dy`` [M, K] and ``dl1``.

    ``dy`` is the gradient with respect to y, ``dl1`` that with respect to the sum of |h| over all tokens and neurons.
    ``options``: activation and threshold. Computed in chunks of rows on the problem's own device.
    """
    return _gradients(problem, dy, dl1, gated, **options)


@torch.no_grad()
def exact_gradients(
    problem: FFN, dy: Tensor, dl1: float = 0.0, *, gated: bool = True, **options: Any
) -> dict[str, Tensor]:
    """The only right gradients of an exact problem for integers ``dy`` and ``dl1``, in float64, the last rounding left.

    h, d_gate and d_up are rounded to the storage type, as in ``twell.ops.hybrid_backward``; then every sum is exact in
    fp32. Raises ValueError if one is not. ``options``: activation and threshold.
    """
    dtype = problem.x.dtype
    magnitudes = _gradients(problem, dy, dl1, gated, dtype, torch.abs, **options)
    magnitudes["dh"] = dy.double().abs() @ problem.w_down.double().abs().T + abs(dl1)
    largest = max((float(sums.max()) for sums in magnitudes.values() if sums.numel()), default=0.0)
    if not largest < EXACT_LIMIT:
        raise ValueError(f"sums must stay below 2^24 to be exact in fp32, got {largest:.0f}")
    up = F.linear(problem.x.double(), problem.w_up.double(), _double(problem.b_up))
    if gated and not torch.equal(up, up.to(dtype).double()):
        raise ValueError(f"up projections must be exact in {dtype}, got values up to {float(up.abs().max()):.0f}")
    return _gradients(problem, dy, dl1, gated, dtype, **options)


def _derive(leaves: FFN, gated: bool, outputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> dict[str, Tensor]:
    tensors = leaves.present(gated)
    return dict(zip(tensors, torch.autograd.grad(outputs, tuple(tensors.values()), upstream), strict=True))


def _leaves(problem: FFN) -> FFN:
    return problem.map(lambda t: t.detach().requires_grad_())


@torch.enable_grad()
def dense_gradients(
    problem: FFN,
    dy: Tensor,
    dl1: float = 0.0,
    *,
    gated: bool = True,
    activation: ActivationName = "relu",
    threshold: float = 0.0,
) -> dict[str, Tensor]:
    """The same gradients by plain PyTorch in the storage type: the baseline of every error and time."""
    leaves = _leaves(problem)
    hidden = _dense_hidden(leaves, gated, activation, threshold)
    y = F.linear(hidden, leaves.w_down.T, leaves.b_down)
    if not dl1:
        return _derive(leaves, gated, [y], [dy])
    l1 = hidden.abs().sum(dtype=torch.promote_types(hidden.dtype, torch.float32))
    return _derive(leaves, gated, [y, l1], [dy, torch.full_like(l1, dl1)])


@torch.enable_grad()
def sparse_gradients(
    problem: FFN, dy: Tensor, dl1: float = 0.0, *, gated: bool = True, **options: Any
) -> dict[str, Tensor]:
    """The same gradients through ``sparse_layer(problem, **options)``."""
    leaves = _leaves(problem)
    y, aux = sparse_layer(leaves, gated=gated, **options)
    if not dl1:
        return _derive(leaves, gated, [y], [dy])
    # aux.l1 is a mean over tokens
    return _derive(leaves, gated, [y, aux.l1], [dy, torch.full_like(aux.l1, dl1 * len(dy))])


@dataclass(frozen=True)
class Errors:
    """Relative errors against float64: of the whole tensor in the Frobenius norm, and of the worst row.

    A row's error is relative to the largest of its own norm, ROW_FLOOR times the root mean square row norm and, for
    gradients, the norm of the row if its terms were orthogonal: if they cancel to little, their rounding, which dense
    PyTorch does too, is much of the rest and says nothing about a kernel.
    Both are infinite if the result is not finite although the answer is.
    """

    frobenius: float
    worst_row: float

    def within(self, other: Errors, factor: float = BUDGET, row_factor: float | None = None) -> bool:
        """Whether the errors are at most ``factor`` times those of ``other``, which must be finite.

        ``row_factor`` replaces it for the worst row.
        """
        if not (math.isfinite(other.frobenius) and math.isfinite(other.worst_row)):
            return False
        rows = factor if row_factor is None else row_factor
        return self.frobenius <= factor * other.frobenius and self.worst_row <= rows * other.worst_row

    def __str__(self) -> str:
        return f"{self.frobenius:.3e} (worst row {self.worst_row:.3e})"


@torch.no_grad()
def errors(out: Tensor, answer: Tensor, terms: Tensor | None = None) -> Errors:
    """Errors of ``out`` against the finite float64 ``answer``, both [M, K]; zero if there are no elements.

    ``terms`` [M]: the root of the sum of squares of each row's terms.
    """
    require("out", out, Tensor, "a tensor [M, K]")
    require("answer", answer, Tensor, "a tensor [M, K]")
    if out.shape != answer.shape:
        raise ValueError(f"shapes must agree, got {tuple(out.shape)} and {tuple(answer.shape)}")
    if not answer.numel():
        return Errors(0.0, 0.0)
    wrong = torch.cat([(out[i:j].double() - answer[i:j]).norm(dim=1) for i, j in _chunks(len(out))])
    right = answer.norm(dim=1)
    total = float(right.norm())
    if not math.isfinite(total):
        raise ValueError("the answer must be finite")
    if not bool(wrong.isfinite().all()):
        return Errors(math.inf, math.inf)
    if not total:
        error = math.inf if bool(wrong.any()) else 0.0
        return Errors(error, error)
    floor = ROW_FLOOR * total / math.sqrt(len(out))
    right = right.clamp_min(floor) if terms is None else right.clamp_min(floor).maximum(terms)
    return Errors(float(wrong.norm()) / total, float((wrong / right).max()))


@dataclass(frozen=True)
class Comparison:
    """The errors of a result and those of dense PyTorch on the same problem; ``roundings`` share most of these.

    Allowed are ``budget`` and ``row_budget`` times the errors of dense PyTorch, and more if the roundings are few: see
    ``allowance``.
    """

    ours: Errors
    dense: Errors
    roundings: float
    budget: float = BUDGET
    row_budget: float = BUDGET

    @property
    def factor(self) -> float:
        """The allowed error as a multiple of that of dense PyTorch."""
        return self.budget * allowance(self.roundings)

    @property
    def row_factor(self) -> float:
        """The same for the worst row."""
        return self.row_budget * allowance(self.roundings)

    @property
    def ok(self) -> bool:
        """Whether the result is as close to float64 as dense PyTorch is, times ``factor``, in norm and worst row."""
        return self.ours.within(self.dense, self.factor, self.row_factor)

    def __str__(self) -> str:
        return f"error {self.ours}, dense {self.dense}, allowed {self.factor:.3g} ({self.row_factor:.3g}) times dense"


def allowance(roundings: float) -> float:
    """The factor that widens a budget for chance: 4 for one rounding or none, towards 1 for many.

    Two right results round at different places, so the ratio of their errors is a matter of chance if few terms are
    summed. The ratio is a figure over workloads: no call promises it.
    """
    return 1 + LUCK / math.sqrt(max(roundings, 1))


def compare(problem: FFN, out: Tensor, *, gated: bool = True, **options: Any) -> Comparison:
    """Errors of ``out`` [M, K], a result for ``problem``, beside those of dense PyTorch.

    ``options``: activation and threshold.
    """
    answer = float64_output(problem, gated=gated, **options)
    dense = errors(dense_output(problem, gated=gated, **options), answer)
    return Comparison(errors(out, answer), dense, count_roundings(problem, gated=gated, **options))


def compare_gradients(
    problem: FFN, dy: Tensor, gradients: dict[str, Tensor], dl1: float = 0.0, *, gated: bool = True, **options: Any
) -> dict[str, Comparison]:
    """Errors of the ``gradients`` of ``problem`` beside those of dense PyTorch, by name.

    A row of x's gradient is a token, a row of a weight's gradient a neuron; both have ROW_BUDGET. The gradient of a
    bias is one row and has BIAS_BUDGET. ``allowance`` widens all of them. The problem should be ``off_kinks``.
    ``options``: activation and threshold.
    """
    answer = float64_gradients(problem, dy, dl1, gated=gated, **options)
    squares = _gradients(problem, dy, dl1, gated, each=torch.square, **options)
    terms = {name: s.view(-1, s.shape[-1]).sum(1).sqrt() for name, s in squares.items()}
    dense = gradient_errors(dense_gradients(problem, dy, dl1, gated=gated, **options), answer, terms)
    roundings = count_roundings(problem, gated=gated, **options)
    return compare_errors(gradient_errors(gradients, answer, terms), dense, roundings)


def gradient_errors(
    gradients: dict[str, Tensor], answer: dict[str, Tensor], terms: dict[str, Tensor]
) -> dict[str, Errors]:
    """``errors`` of each gradient; ``gradients`` must have the names of ``answer``."""
    if gradients.keys() != answer.keys():
        raise ValueError(f"gradients must be those of {', '.join(answer)}, got {', '.join(gradients)}")
    return {
        name: errors(gradients[name].view(-1, right.shape[-1]), right.view(-1, right.shape[-1]), terms[name])
        for name, right in answer.items()
    }


def compare_errors(ours: dict[str, Errors], dense: dict[str, Errors], roundings: float) -> dict[str, Comparison]:
    """The comparison of each gradient, with its tensor's budget; ``roundings`` as in ``Comparison``."""

    def budgets(name: str) -> tuple[float, float]:
        return (BIAS_BUDGET, BIAS_BUDGET) if name.startswith("b_") else (BUDGET, ROW_BUDGET)

    return {name: Comparison(error, dense[name], roundings, *budgets(name)) for name, error in ours.items()}


# Bits


def assert_same(actual: Tensor, expected: Tensor, what: str = "values") -> None:
    """Raise AssertionError, naming ``what`` and the first difference, unless all elements are equal, or both NaN.

    Shapes and dtypes must agree; devices may differ. Zeros of either sign are equal.
    """
    torch.testing.assert_close(
        actual,
        expected.to(actual.device),
        rtol=0,
        atol=0,
        equal_nan=True,
        msg=lambda message: f"{what}: {message}",
    )


Packed = tuple[Tensor, Tensor, Tensor]


def assert_packed_same(actual: Packed, expected: Packed, n: int, compression: int) -> None:
    """Raise AssertionError unless two results of ``twell.ops.gate_pack`` for n neurons agree in all defined values.

    These are every word (those past the count are 0), the statistics, and the spill of the row-tiles that overflow,
    up to neuron n. All NaN are equal.
    """
    (words, spill, stats), (expected_words, expected_spill, expected_stats) = actual, expected
    m, tiles = words.shape[0], geometry.tiles(n)
    assert_same(
        _canonical(words, spill.dtype, compression), _canonical(expected_words, spill.dtype, compression), "words"
    )
    assert_same(stats, expected_stats, "stats")
    counts = words.view(m, tiles, geometry.words_per_tile(compression))[:, :, :1]
    defined = (counts > geometry.capacity(compression)).expand(m, tiles, geometry.TILE).reshape(spill.shape)[:, :n]
    assert_same(
        spill[:, :n].masked_fill(~defined, 0), expected_spill[:, :n].to(spill.device).masked_fill(~defined, 0), "spill"
    )


def _canonical(words: Tensor, dtype: torch.dtype, compression: int) -> Tensor:
    """``words`` with the value bits of every NaN entry set to ones."""
    if not words.numel():
        return words
    table = words.view(-1, geometry.words_per_tile(compression))
    nan = (table >> 16).to(torch.int16).view(dtype).isnan()
    nan[:, 0] = False  # a count, not an entry
    return torch.where(nan, table | ~0xFFFF, table).view(words.shape)


def assert_hybrid_same(actual: Sequence[Tensor], expected: Sequence[Tensor], m: int, n: int, gated: bool) -> None:
    """Raise AssertionError unless two hybrid gates of ``m`` tokens and ``n`` neurons agree in all defined values.

    Each is entries, neurons, chunks, sizes and popularity of 16-bit values, the last outputs of
    ``twell.ops.hybrid_forward``. Defined are the lists up to a multiple of 64, and an entry and, if ``gated``, an up
    projection for each non-zero; if these do not fit, only their number.
    """
    names = ("entries", "neurons", "chunks", "sizes", "popularity")
    ours, theirs = (dict(zip(names, (t.cpu() for t in kept), strict=True)) for kept in (actual, expected))
    for name in names:
        assert ours[name].shape == theirs[name].shape, name
    assert_same(ours["sizes"][-1], theirs["sizes"][-1], "number of non-zeros")
    total, capacity = int(ours["sizes"][-1]), geometry.hybrid_capacity(m, n)
    if total > capacity:
        return
    for name in ("sizes", "chunks", "popularity"):
        assert_same(ours[name], theirs[name], name)
    listed = -(-ours["sizes"][:-1, None] // geometry.CHUNK) * geometry.CHUNK
    undefined = torch.arange(ours["neurons"].shape[1], device=listed.device) >= listed
    assert_same(ours["neurons"].masked_fill(undefined, 0), theirs["neurons"].masked_fill(undefined, 0), "neurons")
    assert_same(ours["entries"][:total], theirs["entries"][:total], "entries")
    if gated:
        up, right = (kept["entries"][capacity:].view(torch.int16)[:total] for kept in (ours, theirs))
        assert_same(up, right, "bits of up projections")


_POISON = 0xFF  # as bytes of bf16, fp16 and fp32 a NaN, of int32 -1


def poison_memory(device: torch.device | str = "cuda") -> None:
    """Leave NaN in the memory that torch hands out next: blocks of up to 256 MiB, twice that in all.

    Tensors from ``torch.empty`` then hold NaN (as integers: -1), so that an unwritten element shows. Frees torch's
    cached memory first, which synchronises.
    """
    torch.cuda.empty_cache()
    sizes = [1 << bits for bits in range(9, 21)] * 4 + [1 << bits for bits in range(21, 29)]
    blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    for block in blocks:
        block.fill_(_POISON)


def poisoned(call: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Call twice and fill the first call's outputs with NaN in between: the second call gets the same memory."""
    for output in call():
        output.view(-1).view(torch.uint8).fill_(_POISON)
    return call()


def captured(call: Callable[[], _T]) -> tuple[torch.cuda.CUDAGraph, _T]:
    """Capture a CUDA graph of ``call``; return it with the outputs that each replay writes.

    A call on a side stream comes first, to load and allocate.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    return graph, outputs


# The machine


def _output(*command: str) -> str | None:
    """First line of a command's output, None if the command is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    return lines[0].strip() if lines else ""


def _commit() -> str | None:
    """Short commit of the checkout this module is in, with "+" if files differ from it."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or not (root / "python" / "twell").is_dir():
        return None
    commit = _output("git", "-C", str(root), "rev-parse", "--short", "HEAD")
    changed = _output("git", "-C", str(root), "status", "--porcelain")
    return f"{commit}+" if commit and changed else commit


def _under_load(device: torch.device, *command: str) -> str | None:
    """``_output`` while the device multiplies matrices: clocks at rest say nothing."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(_output, *command)
        while not asked.done():
            for _ in range(8):
                a @ a
            torch.cuda.synchronize(device)
        return asked.result()


def _gpu(device: torch.device) -> list[str]:
    properties = torch.cuda.get_device_properties(device)
    parts = [f"{properties.name} ({properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB)"]
    uuid = str(getattr(properties, "uuid", ""))
    queried = _under_load(
        device,
        "nvidia-smi",
        f"--id=GPU-{uuid}" if uuid else f"--id={device.index or 0}",
        "--query-gpu=clocks.sm,clocks.max.sm,clocks.max.memory,power.limit,driver_version",
        "--format=csv,noheader,nounits",
    )
    fields = [field.strip() for field in (queried or "").split(",")]
    if len(fields) == 5:
        now, most, memory, power, driver = fields
        parts += [f"SM {now} MHz now, {most} most, memory {memory} MHz, {power} W", f"driver {driver}"]
    return parts


def machine_line(device: torch.device | str | None = None) -> str:
    """The line to print beside a measurement: processor, clocks under load, driver, torch, CuTe DSL, twell and commit.

    ``device`` is the one that ran; by default the current CUDA device, or the CPU if there is none.
    """
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda":
        parts = _gpu(chosen)
    else:
        parts = [f"CPU {platform.machine()}, {torch.get_num_threads()} threads"]
    parts += [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    manifest = packaged.read_manifest(packaged.FOLDER)
    dsl = packaged.version(fingerprint.DSL) if manifest is None else manifest.dsl_version
    parts += [f"CuTe DSL {dsl}", f"twell {twell.__version__}"]
    if manifest is not None:
        parts.append(f"kernels {manifest.source_hash[:12]}")
    commit = _commit()
    if commit is not None:
        parts.append(f"commit {commit}")
    return "; ".join(parts)
