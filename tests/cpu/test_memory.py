"""Which tensors share memory, compared with the addresses of all their bytes."""

import random

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from twell.base import memory

BUFFER = torch.zeros(1024, dtype=torch.uint8)


def draw(source: random.Random) -> Tensor:
    """A view of at most 5 x 5 elements in the first half of the buffer, of any strides."""
    floats = BUFFER.view(source.choice([torch.float32, torch.bfloat16]))
    shape, strides = ([source.randint(low, high) for _ in range(2)] for low, high in ((1, 5), (0, 9)))
    return floats.as_strided(shape, strides, source.randint(0, 60))


def places(tensor: Tensor) -> list[int]:
    (rows, columns), (down, across), size = tensor.shape, tensor.stride(), tensor.element_size()
    return [tensor.data_ptr() + (i * down + j * across) * size for i in range(rows) for j in range(columns)]


def occupied(tensor: Tensor) -> set[int]:
    return {place + byte for place in places(tensor) for byte in range(tensor.element_size())}


def test_every_pair_of_views_is_judged_correctly() -> None:
    source, found = random.Random(0), set()
    for _ in range(4000):
        a, b = draw(source), draw(source)
        shared, folded = bool(occupied(a) & occupied(b)), len(set(places(a))) < a.numel()
        assert (memory.shared({"a": a}, {"b": b}) is not None) == shared, (a.shape, a.stride(), b.shape, b.stride())
        assert memory.folded(a) == folded, (a.shape, a.stride())
        found.add((shared, folded))
    assert len(found) == 4


def test_tensors_are_named_and_only_what_is_written_counts() -> None:
    a, b, c = BUFFER[:8], BUFFER[8:16], BUFFER[4:12]
    assert memory.shared({"a": a, "b": b}, {}) is None
    assert memory.shared({"a": a}, {"b": b, "c": c}) == ("a", "c")
    assert memory.shared({"b": b, "c": c}, {"a": a}) == ("b", "c")
    assert memory.shared({"d": BUFFER[512:]}, {"a": a, "c": c}) is None
    assert memory.shared({"a": a[:0]}, {"a again": a}) is None


@pytest.mark.parametrize("n", [4096, 65536])
def test_large_neighbours_are_told_apart_at_once(n: int) -> None:
    """The buffer is never touched."""
    whole = torch.empty(2 * n, 4096)
    for a, b in (
        (whole[:n], whole[n:]),
        (whole[::2], whole[1::2]),
        (whole[:, :2048], whole[:, 2048:]),
        (whole[:, ::2], whole[:, 1::2]),
        (whole[:n], whole[n:].view(4096, n).t()),
    ):
        assert memory.shared({"a": a, "b": b}, {}) is None
    assert memory.shared({"a": whole[: n + 1]}, {"b": whole[n:, 4095:]}) == ("a", "b")
    assert not memory.folded(whole)


def test_a_tensor_without_memory_shares_with_itself_alone() -> None:
    with FakeTensorMode():
        fake = torch.empty(4, 4, device="cuda")
        other = torch.empty(4, 4, device="cuda")
    meta = torch.empty(4, 4, device="meta")
    for tensor, second in ((fake, other), (meta, torch.empty_like(meta))):
        assert memory.shared({"a": tensor}, {"b": second}) is None
        assert memory.shared({"a": tensor}, {"b": tensor}) == ("a", "b")
        assert not memory.folded(tensor)
