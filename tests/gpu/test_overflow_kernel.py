"""The kernel for more non-zeros than the hybrid format holds, against float64, bit for bit."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests import overflow
from tests.gpu.operands import padded
from twell import testing
from twell._activation import RELU
from twell._runtime import device, geometry
from twell.ops import hybrid
from twell.ops.operands import Gradients, Operands
from twell.testing import FFN

BF16, FP16 = torch.bfloat16, torch.float16
BIASES = "gate up down"


class Problem(NamedTuple):
    """A layer, the upstream gradient, and which gates are non-zeros."""

    layer: FFN
    dy: Tensor
    dl1: float
    active: Tensor
    gated: bool


def problem(
    m: int,
    k: int,
    n: int,
    *,
    density: float = 0.3,
    biases: str = "",
    gated: bool = True,
    dl1: float = 0.0,
    dtype: torch.dtype = BF16,
    seed: int = 0,
) -> Problem:
    """Small integers. A row of dy has few non-zeros, so that products of three sums stay exact."""
    layer = testing.integer_problem(m, k, n, density=density, biases=biases, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    dy = torch.zeros(m, k)
    columns = torch.randint(k, (m, 6), generator=generator)
    dy.scatter_(1, columns, torch.randint(-2, 3, (m, 6), generator=generator).float())
    layer, dy = layer.to("cuda"), dy.to("cuda", dtype)
    return Problem(layer, dy, dl1, testing.float64_gate(layer) > 0, gated)


def answers(p: Problem) -> dict[str, Tensor]:
    """Every result in float64, from coefficients rounded as the kernels round them; checks that sums are exact."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = p.layer.map(Tensor.double)
    dy, dtype = p.dy.double(), p.dy.dtype

    def rounded(values: Tensor) -> Tensor:
        return torch.where(p.active, values, 0).to(dtype).double()

    def product(*pairs: tuple[Tensor, Tensor]) -> Tensor:
        assert float(sum(a.abs() @ b.abs() for a, b in pairs).max()) < testing.EXACT_LIMIT
        return sum(a @ b for a, b in pairs)

    gate = torch.nn.functional.linear(x, w_gate, b_gate).relu()
    up = torch.nn.functional.linear(x, w_up, b_up)
    hidden = gate * up if p.gated else gate
    dh = product((dy, w_down.t())) + p.dl1 * hidden.sign()
    d_gate, d_up, h = rounded(dh * up if p.gated else dh), rounded(dh * gate), rounded(hidden)
    ups = [(d_up, w_up)] if p.gated else []
    return {
        "y": product((h, w_down)) + (0 if b_down is None else b_down),
        "l1": torch.stack([t.abs().sum() for t in torch.where(p.active, hidden, 0).split(geometry.TOKEN_TILE)]),
        "dx": product((d_gate, w_gate), *ups),
        "dw_gate": product((d_gate.t(), x)),
        "dw_up": product((d_up.t(), x)),
        "dw_down": product((h.t(), dy)),
        "db_gate": d_gate.sum(0),
        "db_up": d_up.sum(0),
    }


MODES = ("forward", "backward", "add")
OUTPUTS = {
    "forward": ("y", "l1"),
    "backward": ("dx", "dw_gate", "dw_up", "dw_down", "db_gate", "db_up"),
    "add": ("dx", "dw_gate", "dw_up", "dw_down", "db_gate", "db_up"),
}


def counters() -> Tensor:
    return torch.zeros(geometry.OVERFLOW_COUNTERS, dtype=torch.int32, device="cuda")


def run(p: Problem, mode: str, *, excess: int = 1, outputs: dict[str, Tensor], waits: bool = True) -> None:
    """Launch the pass of one mode on ``outputs``, with a capacity that the non-zeros exceed by ``excess``."""
    m, n, gated = len(p.dy), len(p.layer.w_gate), p.gated
    # the kernel only compares it, so any number does
    total = int(p.active.sum()) + 1 if waits else m
    sizes = torch.full((geometry.token_tiles(m) + 1,), -1, dtype=torch.int32, device="cuda")
    sizes[-1] = total
    layer = Operands(*p.layer) if gated else Operands(*p.layer)._replace(w_up=None, b_up=None)
    # for sums longer than tensor cores add up in one go
    aside = overflow.aside(p.layer.x, max(m, 2 * n), device.sm_count(0))
    if mode == "forward":
        overflow.forward(layer, sizes, counters(), total - excess, RELU, outputs["y"], outputs["l1"], aside)
        return
    dl1 = torch.tensor([p.dl1], device="cuda")
    out = Gradients(
        outputs["dx"],
        outputs["dw_gate"],
        outputs["dw_up"] if gated else None,
        outputs["dw_down"],
        None if p.layer.b_gate is None else outputs["db_gate"],
        outputs["db_up"] if gated and p.layer.b_up is not None else None,
    )
    given = hybrid.Backward(p.dy, dl1, layer, None, RELU)
    overflow.backward(given, sizes, total - excess, out, mode == "add", aside, counters())


def empty(p: Problem, mode: str, fill: float = math.nan) -> dict[str, Tensor]:
    """The outputs of a mode, filled."""
    (m, k), n, dtype = p.layer.x.shape, p.layer.w_gate.shape[0], p.layer.x.dtype
    sums = (geometry.token_tiles(m), geometry.training_sums(n))
    shapes = {"y": (m, k), "dx": (m, k), "l1": sums, "db_gate": (n,), "db_up": (n,)}
    out = {}
    for name in OUTPUTS[mode]:
        wide = name == "l1" or (mode == "add" and name.startswith("dw"))
        out[name] = torch.full(shapes.get(name, (n, k)), fill, dtype=torch.float32 if wide else dtype, device="cuda")
    return out


def check(p: Problem, modes: tuple[str, ...] = MODES) -> None:
    """Every mode, with the biases that the layer has."""
    right = answers(p)
    for mode in modes:
        out = empty(p, mode, fill=3.0 if mode == "add" else math.nan)
        run(p, mode, outputs=out)
        for name, result in out.items():
            if name.endswith("up") and not p.gated:
                continue
            if (name == "db_gate" and p.layer.b_gate is None) or (name == "db_up" and p.layer.b_up is None):
                continue
            expected = right[name]
            if name == "l1":
                result = result.sum(1)
            if mode == "add" and name.startswith("dw"):
                expected = expected + 3
            testing.assert_same(result, expected.float().to(result.dtype), f"{mode} {name}")


# m, k, n and density; edges of one size at a time, and at last more tokens than a slice has
DRAWN = [
    *((129, k, 264, 0.3) for k in (8, 72, 2048, 4096, 16384)),
    *((m, 72, 1000, 0.3) for m in (1, 129, 300)),
    *((300, 136, n, 0.3) for n in (8, 264, 1000)),
    *((1, 2056, 8, 0.3), (33, 1032, 1000, 0.3)),
    *((300, 520, 1000, density) for density in (0, 0.01, 0.1, 0.5, 1)),
    (geometry.OVERFLOW_FORWARD + 130, 72, 136, 0.02),
]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("m", "k", "n", "density"), DRAWN)
def test_layers(m: int, k: int, n: int, density: float, gated: bool) -> None:
    """With all biases and a gradient of the sum of |h|, or without; each in another dtype."""
    turn = (m + k // 8 + n // 8 + gated) % 2 == 0
    options: dict[str, Any] = {"biases": BIASES, "dl1": 1.0} if turn else {"dl1": -2.0 if density in (0.1, 1) else 0.0}
    p = problem(m, k, n, density=density, gated=gated, dtype=(BF16, FP16)[(turn + n // 264) % 2], **options)
    share = float(p.active.float().mean())
    # of few gates it is chance
    assert share == density if density in (0, 1) else m < 300 or n < 100 or 0.3 * density < share < 2.5 * density
    check(p)


def test_passes_in_two_streams() -> None:
    """CTAs of a pass wait for each other, and neither pass has all multiprocessors: none may wait for ever."""
    p = problem(4 * geometry.OVERFLOW_BACKWARD, 136, 520, biases=BIASES, dl1=1.0)
    right, streams = answers(p), [torch.cuda.Stream() for _ in range(2)]
    for mode in MODES[:2]:
        outputs = [[empty(p, mode) for _ in range(10)] for _ in streams]
        torch.cuda.synchronize()
        for turn in range(10):
            for stream, own in zip(streams, outputs):
                with torch.cuda.stream(stream):
                    run(p, mode, outputs=own[turn], waits=False)
        torch.cuda.synchronize()
        for name in OUTPUTS[mode]:
            for out in (out for own in outputs for out in own):
                result = out[name].sum(1) if name == "l1" else out[name]
                testing.assert_same(result, right[name].float().to(result.dtype), f"{mode} {name}")


@pytest.mark.parametrize("biases", ["gate", "up", "down", "gate down"])
def test_some_biases(biases: str) -> None:
    check(problem(130, 72, 264, biases=biases, dl1=1.0))


@pytest.mark.parametrize("wanted", ["x", "w"])
def test_only_what_is_wanted_is_computed(wanted: str) -> None:
    p = problem(130, 72, 264, biases=BIASES, dl1=1.0)
    right, out = answers(p), empty(p, "backward")
    sizes = torch.full((3,), 1 << 20, dtype=torch.int32, device="cuda")
    aside, dl1 = torch.empty(0, device="cuda"), torch.tensor([1.0], device="cuda")
    if wanted == "x":
        gradients = Gradients(out["dx"])
    else:
        gradients = Gradients(None, *(out[name] for name in OUTPUTS["backward"][1:]))
    given = hybrid.Backward(p.dy, dl1, Operands(*p.layer), None, RELU)
    overflow.backward(given, sizes, 0, gradients, False, aside, counters())
    for name, result in out.items():
        if name[1] == wanted or (wanted == "w" and name[1] == "b"):
            testing.assert_same(result, right[name].float().to(result.dtype), name)
        else:
            assert bool(result.isnan().all()), name


def test_row_strides() -> None:
    """Operands and results whose rows are wider than K."""
    p = problem(70, 72, 264, density=0.3, dl1=1.0)
    right = answers(p)
    p = p._replace(layer=FFN(*(padded(t, 8, 16) for t in p.layer[:4])), dy=padded(p.dy, 8, 16))
    for mode in MODES[:2]:
        out = {name: padded(t, 8, 16) if t.shape[-1] == 72 else t for name, t in empty(p, mode).items()}
        run(p, mode, outputs=out)
        for name, result in out.items():
            if result.shape[-1] == 72:
                testing.assert_same(result, right[name].float().to(result.dtype), name)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_do(mode: str) -> None:
    """Where the non-zeros fit, to the last, nothing is written."""
    p = problem(130, 72, 264, biases=BIASES)
    for excess in (0, -5):
        out = empty(p, mode)
        run(p, mode, excess=excess, outputs=out)
        for name, result in out.items():
            assert bool(result.isnan().all()), name
