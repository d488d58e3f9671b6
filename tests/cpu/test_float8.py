"""Weights in e4m3: the record and its checks, the quantiser by bits, and the layer's formula."""

import math

import pytest
import torch
from torch import Tensor

from twell.base.activation import RELU
from twell.ops import float8 as module
from twell.ops.e4m3 import dense, layer_of
from twell.ops.float8 import BLOCK, E4M3, NO_BIASES, Float8, Granularity, float8, formula, quantize, quantize_tokens

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
EACH = pytest.mark.parametrize("granularity", module.GRANULARITIES)
# of bytes 0 to 126, all that is finite and not negative
GRID = torch.arange(127, dtype=torch.uint8).view(E4M3).double()


def codes(t: Tensor) -> Tensor:
    return t.view(torch.uint8)


def nearest(values: Tensor) -> Tensor:
    """The bytes of values in e4m3, by their distances to all of e4m3: the nearest, of two the even one."""
    size = values.double().abs().clamp(max=448)
    above = torch.searchsorted(GRID, size).clamp(max=126)
    below = (above - 1).clamp(min=0)
    down, up = size - GRID[below], GRID[above] - size
    code = torch.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    return (code + 128 * torch.signbit(values)).to(torch.uint8)


def spread(scale: Tensor, shape: torch.Size, granularity: Granularity) -> Tensor:
    """Scales, each at all its values, by their indices."""
    rows, columns = torch.arange(shape[-2]), torch.arange(shape[-1])
    if granularity == "row":
        return scale[..., None].expand(shape)
    if granularity == "block":
        return scale[..., rows[:, None] // BLOCK, columns // BLOCK]
    return scale[..., None, None].expand(shape)


def rounded_up(scale: Tensor) -> Tensor:
    nearest = scale.bfloat16()
    up = torch.nextafter(nearest, torch.tensor(math.inf, dtype=BF16))
    return torch.where(nearest.float() < scale, up, nearest).float()


@EACH
@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32, F64])
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (300, 130), (3, 129, 40)])
def test_quantize_by_bits(granularity: Granularity, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(shape) * torch.logspace(-2, 2, shape[-2])[:, None]).to(dtype)
    found = quantize(weight, granularity)
    assert (found.granularity, found.shape, found.device) == (granularity, weight.shape, weight.device)
    assert found.scale.dtype == F32
    scale = spread(found.scale, weight.shape, granularity)
    for one in found.scale.unique():
        assert one == rounded_up(weight[scale == one].float().abs().max() / 448)
    assert torch.equal(found.scale, found.scale.bfloat16().float())
    assert torch.equal(codes(found.values), nearest(weight.float() / scale))
    assert torch.equal(codes(found.values), codes((weight.float() / scale).clamp(-448, 448).to(E4M3)))
    assert torch.equal(found.dequantize(F64), found.values.double() * scale.double())
    assert torch.equal(found.dequantize(BF16), (found.values.float() * scale).bfloat16())
    again = float8(found.values, found.scale, granularity)
    assert torch.equal(codes(again.values), codes(found.values))
    assert torch.equal(again.scale, found.scale)


@EACH
def test_weights_in_many_chunks_are_the_same(granularity: Granularity, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(2, 300, 140)
    weight[1, 280] = 50
    whole = quantize(weight, granularity)
    monkeypatch.setattr(module, "_CHUNK", 1)
    assert len(list(module._chunks(weight.shape))) == 6
    found = quantize(weight, granularity)
    assert torch.equal(codes(found.values), codes(whole.values))
    assert torch.equal(found.scale, whole.scale)
    assert torch.equal(found.dequantize(BF16), whole.dequantize(BF16))


def test_quantize_rounds_ties_to_even_and_keeps_signs() -> None:
    middle = (GRID[1:] + GRID[:-1]).float() / 2
    weight = torch.cat((middle, -middle, torch.tensor([448.0, 0.0, -0.0])))[None]
    found = quantize(weight)
    assert found.scale.tolist() == [1]
    assert torch.equal(codes(found.values), nearest(weight))
    assert codes(found.values)[0, :2].tolist() == [0, 2]
    assert codes(found.values)[0, -3:].tolist() == [0x7E, 0, 0x80]


@EACH
def test_quantize_of_odd_rows(granularity: Granularity) -> None:
    big, tiny = torch.finfo(F32).max, torch.finfo(F32).smallest_normal
    rows = {"zeros": 0.0, "big": big, "tiny": tiny, "subnormal": tiny / 4}
    for name, value in rows.items():
        weight = torch.tensor([[value, -value / 2, math.nan, -math.nan]])
        found = quantize(weight, granularity)
        assert float(found.scale) == {"zeros": 1, "big": float(rounded_up(torch.tensor(big / 448)))}.get(name, tiny)
        assert codes(found.values)[0, 2:].tolist() == [0x7F, 0x7F]
        if name in ("zeros", "big"):
            assert codes(found.values)[0, :2].tolist() == ([0, 0x80] if name == "zeros" else [0x7E, 0xF6])
        float8(*found)
    nothing = quantize(torch.full((2, 3), math.nan), granularity)
    assert bool((codes(nothing.values) == 0x7F).all())
    assert bool((nothing.scale == 1).all())


VALUES = torch.ones(200, 300).to(E4M3)
EXPERTS = torch.ones(3, 200, 300).to(E4M3)


@pytest.mark.parametrize(
    ("values", "scale", "granularity", "canonical"),
    [
        (VALUES, [], "tensor", []),
        (VALUES, [1], "tensor", []),
        (VALUES, [1, 1], "tensor", []),
        (VALUES, [200], "row", [200]),
        (VALUES, [200, 1], "row", [200]),
        (VALUES, [2, 3], "block", [2, 3]),
        (VALUES, [2, 1, 3, 1], "block", [2, 3]),
        (EXPERTS, [3], "tensor", [3]),
        (EXPERTS, [3, 1, 1], "tensor", [3]),
        (EXPERTS, [3, 200, 1], "row", [3, 200]),
        (EXPERTS, [3, 2, 3], "block", [3, 2, 3]),
        (VALUES[:1, :2], [1, 1], "tensor", []),
    ],
)
def test_shapes_of_scales(values: Tensor, scale: list[int], granularity: str, canonical: list[int]) -> None:
    given = torch.rand(scale) + 0.5
    for dtype in (F32, BF16, torch.float16):
        found = float8(values, given.to(dtype))
        assert (found.granularity, list(found.scale.shape), found.scale.dtype) == (granularity, canonical, F32)
        assert torch.equal(found.scale.flatten(), given.to(dtype).float().flatten())
    if granularity == "block":
        with pytest.raises(ValueError, match=r'must be "row" or "tensor" for scales by rows, got "block"'):
            found.by_rows()
    else:
        by_rows = found.by_rows()
        assert by_rows.is_contiguous()
        assert torch.equal(by_rows[..., None] * values.float(), found.dequantize(F32))


def test_a_single_block_is_what_the_caller_says() -> None:
    values = VALUES[:5, :7]
    for kind in module.GRANULARITIES[::2]:
        assert float8(values, torch.ones(1, 1), kind).granularity == kind
    with pytest.raises(ValueError, match=r"scale must be \[5\] by row for values \[5, 7\], got \[1, 1\]"):
        float8(values, torch.ones(1, 1), "row")


def test_scales_elsewhere_are_not_looked_at() -> None:
    found = float8(VALUES.to("meta"), torch.ones(200, 1, device="meta"))
    assert (found.device.type, found.granularity) == ("meta", "row")


def test_tokens_by_bits() -> None:
    torch.manual_seed(0)
    x = (torch.randn(64, 96) * torch.logspace(-38, 4, 64)[:, None]).bfloat16()
    x[3], x[4, 5], x[5, 6], x[6, 7] = 0, math.nan, math.inf, -math.inf
    found = quantize_tokens(x)
    broken = torch.tensor([row in (4, 5, 6) for row in range(64)])
    assert torch.equal(found.scale.isnan(), broken)
    assert bool((codes(found.values[broken]) == 0x7F).all())
    expected = (x.float().abs().amax(1) / 448).clamp(min=2.0**-126)[~broken]
    assert torch.equal(found.scale[~broken], expected)
    assert expected[0] == expected[3] == expected.min() < expected[-1]
    assert torch.equal(codes(found.values[~broken]), nearest(x[~broken].float() * (1 / expected[:, None])))
    assert found.granularity == "row"


def test_tokens_with_one_scale_for_all() -> None:
    x = torch.tensor([[3.0, -1e4, 0.1], [math.nan, 1.0, math.inf]], dtype=BF16)
    found = quantize_tokens(x, torch.tensor([0.5]))
    assert found.scale.tolist() == [0.5, 0.5]
    assert torch.equal(codes(found.values[0]), nearest(x[0].float() * 2))
    assert codes(found.values[1]).tolist() == [0x7F, 0x40, 0x7E]


# sizes whose sums of small integers are exact, and that no two tensors share
M, K, N = 5, 24, 40


def integers(*shape: int, low: int = -3, high: int = 4) -> Tensor:
    return torch.randint(low, high, shape).float()


def weight_of_integers(rows: int, columns: int, granularity: Granularity) -> Float8:
    scale = {"row": 2.0 ** integers(rows), "tensor": torch.tensor(0.5), "block": torch.tensor([[0.25]])}[granularity]
    return float8(integers(rows, columns).to(E4M3), scale, granularity)


def test_nan_reaches_the_tokens_that_fire_its_neuron() -> None:
    x, ones = float8(torch.tensor([[1.0], [-1.0]]).to(E4M3), torch.ones(2)), torch.ones(2, 1).to(E4M3)
    gate = float8(torch.tensor([[1.0], [-1.0]]).to(E4M3), torch.tensor(1.0))
    broken = float8(torch.tensor([[math.nan], [1.0]]).to(E4M3), torch.tensor(1.0))
    down = float8(ones.t().contiguous(), torch.tensor(1.0))
    assert formula(x, gate, broken, down).isnan().tolist() == [[True], [False]]
    up, down = float8(ones, torch.tensor(1.0)), float8(broken.values.t().contiguous(), torch.tensor(1.0))
    assert formula(x, gate, up, down).isnan().tolist() == [[True], [False]]
    nothing = quantize_tokens(torch.tensor([[math.nan]], dtype=BF16))
    assert bool(formula(nothing, gate, up, gate._replace(values=gate.values.t())).isnan().all())


def test_dense_rounds_up_and_quantises_h() -> None:
    """Where sums are exact: by the bits of each step."""
    torch.manual_seed(3)
    gate, up, down = (weight_of_integers(*shape, "row") for shape in ((N, K), (N, K), (K, N)))
    x = integers(M, K).bfloat16()
    tokens = quantize_tokens(x)
    value = ((tokens.values.float() @ gate.values.float().t()) * gate.scale * tokens.scale[:, None]).relu().bfloat16()
    linear = ((tokens.values.float() @ up.values.float().t()) * up.scale * tokens.scale[:, None]).bfloat16()
    hidden = quantize_tokens(value * linear)
    expected = (hidden.values.float() @ down.values.float().t()) * down.scale * hidden.scale[:, None]
    assert torch.equal(dense(layer_of(x, (gate, up, down), NO_BIASES), RELU, True)[0], expected.bfloat16())
