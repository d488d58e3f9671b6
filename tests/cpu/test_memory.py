"""Which tensors share memory."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from twell.base import memory

BUFFER = torch.zeros(1024, dtype=torch.uint8)


def test_tensors_are_named_and_only_what_is_written_counts() -> None:
    a, b, c = BUFFER[:8], BUFFER[8:16], BUFFER[4:12]
    assert memory.shared({"a": a, "b": b}, {}) is None
    assert memory.shared({"a": a}, {"b": b, "c": c}) == ("a", "c")
    assert memory.shared({"b": b, "c": c}, {"a": a}) == ("b", "c")
    assert memory.shared({"d": BUFFER[512:]}, {"a": a, "c": c}) is None
    assert memory.shared({"a": a[:0]}, {"a again": a}) is None


def test_lines_that_begin_within_another_are_folded() -> None:
    for shape, strides, expected in (
        ((3, 4), (4, 1), False),
        ((4, 3), (1, 4), False),
        ((3, 4), (8, 2), False),
        ((3, 4), (3, 1), True),
        ((3, 4), (0, 1), True),
        ((4, 3), (1, 0), True),
        ((1, 4), (0, 1), False),
        ((4, 1), (1, 0), False),
    ):
        assert memory.folded(BUFFER.as_strided(shape, strides)) == expected, (shape, strides)


def test_a_tensor_without_memory_shares_with_itself_alone() -> None:
    with FakeTensorMode():
        fake = torch.empty(4, 4, device="cuda")
        other = torch.empty(4, 4, device="cuda")
    meta = torch.empty(4, 4, device="meta")
    for tensor, second in ((fake, other), (meta, torch.empty_like(meta))):
        assert memory.shared({"a": tensor}, {"b": second}) is None
        assert memory.shared({"a": tensor}, {"b": tensor}) == ("a", "b")
        assert not memory.folded(tensor)
