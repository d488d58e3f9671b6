"""``twell.pack`` and ``PackedTwell``."""

import pytest
import torch
from torch.utils import _pytree as pytree

import twell

BF16 = torch.bfloat16


def problem(*lead: int, n: int = 264, k: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(-2, 3, (*lead, k)).to(BF16), torch.randint(-2, 3, (n, k)).to(BF16)


def test_is_frozen_and_a_pytree() -> None:
    packed = twell.pack(*problem(5))
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


def test_compiles_as_argument_and_result() -> None:
    x, w = problem(5)

    def twice(packed: twell.PackedTwell) -> tuple[twell.PackedTwell, torch.Tensor]:
        return twell.pack(packed.unpack()[:, :16] * 0 + x, w), packed.nnz()

    packed = twell.pack(x, w)
    again, nnz = torch.compile(twice, fullgraph=True, backend="aot_eager")(packed)
    assert torch.equal(again.words, packed.words)
    assert nnz == packed.nnz()
