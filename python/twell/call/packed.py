"""``pack``, and ``PackedTwell``: a packed gate with the sizes to read it. A pytree of three tensors."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from twell import ops
from twell.base.activation import activation_of
from twell.call.admission import admit, needing_grad, sharded
from twell.call.plain import overridden
from twell.choose.plan import PACKED_DTYPES, Facts, unpackable
from twell.runtime import geometry, modes


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
        """The dtype of the values, bfloat16 or float16."""
        return self.spill.dtype

    def nnz(self) -> Tensor:
        """The number of non-zeros, a 0-d int64 tensor on the same device; no synchronisation."""
        return self.stats.select(2, 0).sum()

    def unpack(self) -> Tensor:
        """The dense values [..., n], exactly those that were packed."""
        words, spill = (t.reshape(-1, t.shape[-1]) for t in (self.words, self.spill))
        dense: Tensor = ops.unpack(words, spill, self.n, self.compression)
        return dense.reshape(self.shape)


def pack(
    x: Tensor, w_gate: Tensor, b_gate: Tensor | None = None, *, compression: int = 8, threshold: float = 0
) -> PackedTwell:
    """``relu(x @ w_gate^T + b_gate)`` in the TwELL format: x [..., K], w_gate [N, K], b_gate [N] -> [..., N] packed.

    With a ``threshold``, that of "fatrelu", values up to it are zeros, too.

    Tensors are bfloat16 or float16, on the CPU too. Not differentiable, and not for transforms of torch.func. Sizes,
    autocast and errors are as in ``sparse_gated_ffn``, without DTensors.
    """
    name = "pack"
    if isinstance(threshold, Tensor):
        raise TypeError(f"{name}: threshold must be a number, got a tensor")
    kind = activation_of("fatrelu", threshold)
    geometry.words_per_tile(compression)
    t = admit(name, x=x, w_gate=w_gate, b_gate=b_gate)
    x, (n, k) = t["x"], t["w_gate"].shape
    if refusal := unpackable(Facts(name, n=n, k=k, device=x.device.type), instead=""):
        raise refusal.kind(refusal.message)
    if x.dtype not in PACKED_DTYPES:
        raise TypeError(f"{name}: dtype must be bfloat16 or float16, which the format stores, got {x.dtype}")
    if got := modes.transform_of(t, False) or overridden(t):
        raise NotImplementedError(f"{name}: the format takes plain tensors, got {got}")
    if needing := needing_grad(t):
        what = f"{', '.join(needing)} requires grad, but the format stores no gradient"
        raise NotImplementedError(f"{name}: {what}; call it under torch.no_grad()")
    if sharded(t):
        raise NotImplementedError(f"{name}: operands must be plain tensors, got DTensors: pack to_local() of each")
    tokens = x.reshape(-1, x.shape[-1])
    words, spill, stats = ops.gate_pack(tokens, t["w_gate"], t.get("b_gate"), compression, kind.threshold)
    words, spill = (packed.reshape(*x.shape[:-1], packed.shape[1]) for packed in (words, spill))
    return PackedTwell(words, spill, stats, n, compression)


def _flatten_with_keys(packed: PackedTwell) -> tuple[list[Any], tuple[int, int]]:
    names = ("words", "spill", "stats")
    return [(pytree.GetAttrKey(name), getattr(packed, name)) for name in names], (packed.n, packed.compression)


pytree.register_pytree_node(
    PackedTwell,
    lambda packed: ([packed.words, packed.spill, packed.stats], (packed.n, packed.compression)),
    lambda tensors, sizes: PackedTwell(*tensors, *sizes),
    serialized_type_name="twell.PackedTwell",
    flatten_with_keys_fn=_flatten_with_keys,
)
