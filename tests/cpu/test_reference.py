"""The format and the reference, checked with cases small enough to read."""

import pytest
import torch
from torch.utils import _pytree as pytree

import twell
from twell import ops
from twell.base.activation import largest_of_each
from twell.ops import reference
from twell.runtime import geometry

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
    words, spill, stats = ops.gate_pack(*gate_problem(values), None, 8)
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
    words, spill, stats = ops.gate_pack(*gate_problem(values), None, compression)
    assert words[:, 0].tolist() == [capacity, capacity + 1]
    assert not spill[0].any()
    assert torch.equal(spill[1].float(), values[1])
    assert stats.tolist() == [[[2 * capacity + 1, 1]]]
    assert torch.equal(ops.unpack(words, spill, 256, compression).float(), values)


def test_nan_and_negative_zero() -> None:
    values = torch.zeros(2, 8)
    values[0, 1], values[0, 2], values[0, 3] = float("nan"), -0.0, float("inf")
    x, w = gate_problem(values[:1])
    x[0, 1:] = 0
    w[:, 1:] = 0
    words, _, _ = ops.gate_pack(x, w, None, 8)
    assert words[0, 0] == 2
    assert (words[0, 1:3] & 0xFFFF).tolist() == [1, 3]


def test_a_layer_by_hand() -> None:
    x, w_gate = gate_problem(torch.tensor([[2.0, 0.0, 3.0] + [-1.0] * 5]))
    w_up, w_down = torch.arange(64.0).view(8, 8).to(BF16), torch.ones(8, 8, dtype=BF16)
    # x picks column 0 of w_up: 0 for neuron 0, 16 for neuron 2; the biases make these 1 and 17
    bias = torch.ones(8, dtype=BF16)
    for biases, up, y, l1 in (((None, bias, 2 * bias), w_up, 2 + 3 * 17 + 2, 53), ((None, None, 2 * bias), None, 7, 5)):
        found = ops.ffn_aux(x, w_gate, up, w_down, *biases, 4, "row", None)
        assert [t.tolist() for t in found] == [[[y] * 8], l1, 2]


def test_thresholds_by_neuron_by_hand() -> None:
    x, w = gate_problem(torch.tensor([[2.0, 2.0, 3.0, -1.0, 0.0, 5.0, 5.0, 1.0]]))
    level = torch.tensor([1.0, 2.0, 2.999, 0, 0, 6, 4.999, 0])
    # 2.999 and 4.999 are 3 and 5 in bfloat16
    words, _, stats = ops.gate_pack(x, w, torch.cat([torch.zeros(8), level]).to(BF16), 8)
    assert (words[0, :3] & 0xFFFF).tolist() == [2, 0, 7]
    assert stats.tolist() == [[[2, 0]]]
    bias = torch.tensor([0, 1, 0, 1, 0, 2, 0, 0])
    words, _, _ = ops.gate_pack(x, w, torch.cat([bias, level]).to(BF16), 8)
    assert (words[0, :5] & 0xFFFF).tolist() == [4, 0, 1, 5, 7]


def test_largest_by_hand() -> None:
    x, w = gate_problem(torch.tensor([[3.0, 1, 3, 3, 0, -1, 2, 3], [-1.0, 4, 0, -3, 0, 0, 0, 0]]))
    # of equal gates those of the first neurons, and only positive ones
    for k, first in ((3, [3, 0, 3, 3, 0, 0, 0, 0]), (9, [3, 1, 3, 3, 0, 0, 2, 3])):
        for largest in (reference.largest, largest_of_each):
            assert largest((x @ w.t()).relu(), k).tolist() == [first, [0, 4, 0, 0, 0, 0, 0, 0]]
    three, four = (int(torch.tensor(value, dtype=BF16).view(torch.int16)) for value in (3.0, 4.0))
    gates = x @ w.t()
    assert reference.top_k(gates, 1).tolist() == [[three, 0], [four, 1]]
    assert reference.top_k(gates, 3).tolist() == [[three, 3], [0, -1]]
    gates[1, 5:] = torch.tensor([float("inf"), float("nan"), float("nan")])
    assert reference.ranked(gates[1])[:4] == [6, 7, 5, 1]
    assert reference.top_k(gates, 2).tolist() == [[three, 2], [0x7FFF, 7]]


def test_window_by_hand() -> None:
    gate = torch.tensor([[3.0, 1, torch.nan, -2], [2.0, 2, torch.inf, 0], [4.0, -1, -torch.inf, -1]])
    level, below, above = torch.tensor([2.0, 1, 0, 0]), torch.tensor([1.0, 0, -9, -2]), torch.tensor([4.0, 2, 9, 1])
    kept, *bounds = (torch.cat([t, t], -1).to(BF16) for t in (gate, level, below, above))
    near, counts = (t[..., :4] for t in ops.window(kept, *bounds))
    assert near.tolist() == [[1, 1, 0, 0], [1, 0, 0, 1], [0, 0, 0, 1]]
    assert counts.tolist() == [[2, 1, 0, 2], [1, 0, 0, 0], [2, 1, 2, 0]]
    kept = kept[:, :4].nan_to_num(nan=7)
    assert kept.tolist() == [[3, 0, 7, 0], [0, 2, torch.finfo(BF16).max, 0], [4, 0, 0, 0]]


def integers() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(-2, 3, (5, 16)).to(BF16), torch.randint(-2, 3, (264, 16)).to(BF16)


def test_a_packed_gate_is_frozen_and_a_pytree() -> None:
    packed = twell.pack(*integers())
    with pytest.raises(AttributeError):
        packed.n = 8  # type: ignore[misc]
    leaves, spec = pytree.tree_flatten(packed)
    assert [leaf.data_ptr() for leaf in leaves] == [t.data_ptr() for t in (packed.words, packed.spill, packed.stats)]
    assert isinstance(pytree.tree_unflatten(leaves, spec), twell.PackedTwell)
    keys = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(packed)[0]]
    assert keys == [".words", ".spill", ".stats"]
    moved = pytree.tree_map(lambda t: t.clone(), {"a": packed})["a"]
    assert (moved.n, moved.compression) == (264, 8)
    assert torch.equal(moved.unpack(), packed.unpack())


def test_a_packed_gate_compiles_as_argument_and_result() -> None:
    x, w = integers()

    def twice(packed: twell.PackedTwell) -> tuple[twell.PackedTwell, torch.Tensor]:
        return twell.pack(packed.unpack()[:, :16] * 0 + x, w), packed.nnz()

    packed = twell.pack(x, w)
    again, nnz = torch.compile(twice, fullgraph=True, backend="aot_eager")(packed)
    assert torch.equal(again.words, packed.words)
    assert nnz == packed.nnz()
