"""``PackedTwell``: a packed gate with the sizes to read it. A pytree of three tensors."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from twell import ops

_TENSORS = ("words", "spill", "stats")


@dataclass(frozen=True)
class PackedTwell:
    """Rows of ``n`` neurons in the TwELL format, T = ceil(n / 256) tiles of W = 256 / compression words each.

    words: int32 [..., T*W]. Word 0 of a tile is its true count of non-zeros, words 1 to W-1 hold the first W-1 of them,
        ascending, as ``value bits << 16 | neuron``.
    spill: bfloat16 or float16 [..., T*256]. All values of the row-tiles that hold more than W-1 non-zeros; elsewhere
        undefined.
    stats: int32 [ceil(M/8), T, 2], M the number of rows. Non-zeros, and row-tiles with more than W-1 of them, of 8
        rows each.
    """

    words: Tensor
    spill: Tensor
    stats: Tensor
    n: int
    compression: int

    @property
    def shape(self) -> torch.Size:
        """The dense shape, [..., n]."""
        return torch.Size((*self.words.shape[:-1], self.n))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values: bfloat16 or float16."""
        return self.spill.dtype

    def nnz(self) -> Tensor:
        """The number of non-zeros, a 0-d int64 tensor on the same device; no synchronisation."""
        return self.stats.select(2, 0).sum()

    def unpack(self) -> Tensor:
        """The dense values [..., n], exactly those that were packed."""
        words, spill = (t.reshape(-1, t.shape[-1]) for t in (self.words, self.spill))
        dense: Tensor = ops.unpack(words, spill, self.n, self.compression)
        return dense.reshape(self.shape)


def _flatten(packed: PackedTwell) -> tuple[list[Any], tuple[int, int]]:
    return [getattr(packed, name) for name in _TENSORS], (packed.n, packed.compression)


def _flatten_with_keys(packed: PackedTwell) -> tuple[list[Any], tuple[int, int]]:
    children, context = _flatten(packed)
    return [(pytree.GetAttrKey(name), child) for name, child in zip(_TENSORS, children, strict=True)], context


def _unflatten(children: Iterable[Any], context: tuple[int, int]) -> PackedTwell:
    words, spill, stats = children
    n, compression = context
    return PackedTwell(words, spill, stats, n, compression)


pytree.register_pytree_node(
    PackedTwell,
    _flatten,
    _unflatten,
    serialized_type_name="twell.PackedTwell",
    flatten_with_keys_fn=_flatten_with_keys,
)
