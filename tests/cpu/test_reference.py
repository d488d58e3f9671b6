"""The reference, checked against the format's description with cases small enough to read."""

import pytest
import torch

from twell import reference
from twell._runtime import geometry

BF16 = torch.bfloat16


def gate_problem(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x and w_gate whose pre-activation is exactly ``values`` [M, N]: x is the identity, M <= 8."""
    x = torch.eye(values.shape[0], 8, dtype=BF16)
    w = torch.zeros(values.shape[1], 8, dtype=BF16)
    w[:, : values.shape[0]] = values.t().to(BF16)
    return x, w


def test_words_hold_count_then_ascending_value_and_neuron() -> None:
    values = torch.full((1, 264), -1.0)
    values[0, 3], values[0, 200], values[0, 256] = 2.0, 0.5, 1.0
    words, spill, stats = reference.gate_pack(*gate_problem(values), None, 8)
    bits = {2.0: 0x4000, 0.5: 0x3F00, 1.0: 0x3F80}
    assert words[0, :4].tolist() == [2, bits[2.0] << 16 | 3, bits[0.5] << 16 | 200, 0]
    assert words[0, 32:35].tolist() == [1, bits[1.0] << 16 | 256, 0]
    assert stats.tolist() == [[[2, 0], [1, 0]]]
    assert not spill.any()


@pytest.mark.parametrize("compression", geometry.COMPRESSIONS)
def test_a_row_tile_spills_exactly_above_capacity(compression: int) -> None:
    capacity = geometry.capacity(compression)
    values = torch.zeros(2, 256)
    values[0, :capacity], values[1, : capacity + 1] = 1.0, 1.0
    words, spill, stats = reference.gate_pack(*gate_problem(values), None, compression)
    assert words[:, 0].tolist() == [capacity, capacity + 1]
    assert not spill[0].any()
    assert torch.equal(spill[1].float(), values[1])
    assert stats.tolist() == [[[2 * capacity + 1, 1]]]
    assert torch.equal(reference.unpack(words, spill, 256, compression).float(), values)


def test_nan_and_negative_zero() -> None:
    values = torch.zeros(2, 8)
    values[0, 1], values[0, 2], values[0, 3] = float("nan"), -0.0, float("inf")
    x, w = gate_problem(values[:1])
    x[0, 1:] = 0
    w[:, 1:] = 0
    words, _, _ = reference.gate_pack(x, w, None, 8)
    assert words[0, 0] == 2
    assert (words[0, 1:3] & 0xFFFF).tolist() == [1, 3]


def test_up_down_by_hand() -> None:
    x, w_gate = gate_problem(torch.tensor([[2.0, 0.0, 3.0] + [-1.0] * 5]))
    w_up, w_down = torch.arange(64.0).view(8, 8).to(BF16), torch.ones(8, 8, dtype=BF16)
    words, spill, _ = reference.gate_pack(x, w_gate, None, 4)
    # x picks column 0 of w_up: 0 for neuron 0, 16 for neuron 2; the biases make these 1 and 17
    bias = torch.ones(8, dtype=BF16)
    y, l1 = reference.up_down(x, words, spill, w_up, w_down, bias, 2 * bias, 4)
    assert y.tolist() == [[2 * 1 + 3 * 17 + 2.0] * 8]
    assert l1.tolist() == [53.0]
    y, l1 = reference.up_down(None, words, spill, None, w_down, None, 2 * bias, 4)
    assert y.tolist() == [[7.0] * 8]
    assert l1.tolist() == [5.0]
