"""Problems of small integers, whose sums fp32 holds exactly in any order, and their only right answers."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.base.activation import ActivationName
from twell.base.arguments import require, require_integer, require_number
from twell.testing.answers import double, float64_gate, float64_gradients, float64_output
from twell.testing.workloads import FFN, require_sizes

# Integers below this are exact in fp32, and so is any sum of them that stays below it.
EXACT_LIMIT = 1 << 24

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
    require_sizes(m, k, n)
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

    count, limits = min(_FAN_IN, k - 1), (("gate", 2, n), ("up", 3, n), ("down", 8, k))
    x = signs(m, k) * integers(1, 2, m, k)
    x[:, 0] = 2
    w_gate, w_up = fan_in(count), fan_in(count)
    w_gate[:, 0] = _gate_shift(count, density, "gate" in biases)
    w_down = integers(-1, 1, n, k)
    drawn = {name: integers(-most, most, size) for name, most, size in limits if name in biases}
    return FFN(x, w_gate, w_up, w_down, *map(drawn.get, ("gate", "up", "down")))


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
    up = F.linear(problem.x.double(), problem.w_up.double(), double(problem.b_up))
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
    zeros = torch.zeros(m, k, dtype=torch.int64, device="cpu")
    return zeros.scatter_(1, places, values).to(problem.x.device, problem.x.dtype)


def exact_output(problem: FFN, *, gated: bool = True, **options: Any) -> Tensor:
    """The only right answer to an exact problem: ``float64_output`` rounded once to the storage type, [M, K]."""
    return float64_output(problem, gated=gated, **options).float().to(problem.x.dtype)


@torch.no_grad()
def exact_gradients(
    problem: FFN, dy: Tensor, dl1: float = 0.0, *, gated: bool = True, **options: Any
) -> dict[str, Tensor]:
    """The only right gradients of an exact problem for integers ``dy`` and ``dl1``, in float64, the last rounding left.

    h, d_gate and d_up are rounded to the storage type, as in ``twell.ops.hybrid_backward``; then every sum is exact in
    fp32. Raises ValueError if one is not. ``options``: activation and threshold.
    """
    dtype = problem.x.dtype
    magnitudes = float64_gradients(problem, dy, dl1, gated=gated, dtype=dtype, each=torch.abs, **options)
    magnitudes["dh"] = dy.double().abs() @ problem.w_down.double().abs().T + abs(dl1)
    largest = max((float(sums.max()) for sums in magnitudes.values() if sums.numel()), default=0.0)
    if not largest < EXACT_LIMIT:
        raise ValueError(f"sums must stay below 2^24 to be exact in fp32, got {largest:.0f}")
    up = F.linear(problem.x.double(), problem.w_up.double(), double(problem.b_up))
    if gated and not torch.equal(up, up.to(dtype).double()):
        raise ValueError(f"up projections must be exact in {dtype}, got values up to {float(up.abs().max()):.0f}")
    return float64_gradients(problem, dy, dl1, gated=gated, dtype=dtype, **options)
