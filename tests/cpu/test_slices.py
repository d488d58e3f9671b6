"""Layers of more neurons than a packed index names, which run as slices."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import twell
from twell.base.activation import RELU
from twell.choose import rates
from twell.choose.measurement import Measurement
from twell.choose.plan import Route
from twell.ops import hybrid, screened, slices
from twell.ops.ffn import _run, _sparse_on_cpu
from twell.ops.operands import Layer
from twell.runtime import geometry, specs

K, N = 16, 2 * geometry.MAX_NEURONS + 1000


def layer(m: int) -> Any:
    """Integers, few of which fire, and of which every sum is exact."""
    generator = torch.Generator().manual_seed(3)

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=generator, device="cpu").bfloat16()

    x, w_up, w_down = drawn(-1, 1, m, K), drawn(-1, 1, N, K), drawn(-1, 1, N, K)
    return {"x": x, "w_up": w_up, "w_down": w_down.t(), "b_up": -6 + drawn(-1, 0, N), "b_down": drawn(-2, 2, K)}


def test_slices_cover_all_neurons() -> None:
    for n in (8, 65536, 65544, 131072, 131080, 262144, 1000000, 1 << 20):
        found = geometry.neuron_slices(n)
        assert [first for first, _ in found[1:]] == [last for _, last in found[:-1]]
        assert (found[0][0], found[-1][1]) == (0, n)
        assert all(0 < last - first <= geometry.MAX_NEURONS for first, last in found)
        assert len(found) == -(-n // geometry.MAX_NEURONS)
        assert slices.is_sliced(n) is (len(found) > 1)


def test_the_largest_of_slices_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="the k largest are of at most 65536 neurons, got 132072"):
        twell.sparse_ffn(**layer(2), strategy="row", activation="topk", k=3)


def test_what_auto_measures_of_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unions and candidates are those of the whole layer, in training and without, and a screen is in reach."""
    noted: list[dict[str, Any]] = []
    monkeypatch.setattr(
        Measurement, "counts", lambda self, nonzeros, unions, **more: noted.append({"unions": unions, **more})
    )
    t, tokens = layer(140), 140
    t["x"], t["b_up"] = t["x"].relu(), torch.full((N,), -6.0, dtype=torch.bfloat16)
    wide = Layer(t["x"], t["w_up"], None, t["w_down"], t["b_up"], None, None)
    fires = F.pad(F.linear(t["x"].double(), t["w_up"].double(), t["b_up"].double()) > 0, (0, 0, 0, -tokens % 128))
    expected = fires.view(2, 128, N).any(1).sum(1)
    problem = rates.Problem(tokens, K, N, False, False)
    measurement = Measurement(twell.AutoStrategy(), problem, 0, True)
    _run(_sparse_on_cpu, specs.PORTABLE, wide, 8, RELU, Route("union", measurement=measurement), False, True)
    candidates = noted[0]["candidates"]
    assert torch.equal(noted[0]["unions"].cpu(), expected)
    assert bool((candidates >= expected).all())
    assert bool((candidates < N).all())
    screening = Route("union", measurement=measurement, screen=True)
    _run(_sparse_on_cpu, specs.PORTABLE, wide, 8, RELU, screening, False, True)
    assert torch.equal(noted[1]["unions"].cpu(), expected)
    assert torch.equal(noted[1]["candidates"], candidates)
    operands = (t["x"], t["w_up"], None, t["w_down"].t(), t["b_up"], None, None)
    *_, kept = torch.ops.twell.hybrid_forward(*operands, 8, 0, *RELU)
    assert torch.equal(hybrid.unions(kept, t["x"], N, False).cpu(), expected)
    level = RELU._replace(name="fatrelu", threshold=torch.zeros(N, dtype=torch.bfloat16))
    assert torch.equal(screened.wanted(measurement, wide, level), candidates)
    for training in (False, True):
        large = rates.Problem(8192, 2304, 262144, False, training)
        figures = rates.Figures(60.0, 0.04)
        assert rates.worth_screening(large, figures)
        assert rates.decide(large, figures._replace(candidates=0.05), "union", None).strategy == "union+screen"


@pytest.mark.parametrize("n", [65544, 100000])
def test_few_tokens_of_a_short_last_slice(n: int) -> None:
    """The room of a slice is found again from the length of all."""
    x, w_down = torch.ones(1, 8).bfloat16(), torch.ones(n, 8).bfloat16()
    w_up = torch.zeros(n, 8).bfloat16()
    w_up[::5000] = 0.125
    w_up.requires_grad_()
    for m in (1, 2, 7, 15, 33, 40):
        y = twell.sparse_ffn(x.expand(m, 8), w_up, w_down.t(), strategy="union")
        (grad,) = torch.autograd.grad(y.sum(), w_up)
        assert y.eq(len(w_up[::5000])).all()
        assert grad[::5000].eq(8 * m).all()
        assert int(grad.count_nonzero()) == 8 * len(w_up[::5000])


def test_kept_of_another_layer_is_refused() -> None:
    x = torch.zeros(130, K, dtype=torch.bfloat16)
    for held in (0, 1, 7, 200):
        kept = torch.zeros(hybrid.words(x, N, False, held), dtype=torch.int32)
        found = hybrid.split(kept, x, N, False)
        assert [(first, last) for first, last, *_ in found] == geometry.neuron_slices(N)
        assert found[-1][2].data_ptr() + 4 * len(found[-1][2]) == kept.data_ptr() + 4 * len(kept)
        assert all(own.data_ptr() % 256 == kept.data_ptr() % 256 for _, _, own, _ in found)
    with pytest.raises(ValueError, match=r"kept must be \[\d+\] for 130 tokens"):
        hybrid.split(kept[:-1], x, N, False)
