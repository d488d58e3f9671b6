"""Types of tokens, by which the tracker splits its figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twell._arguments import require, require_integer

FIRST, SPECIAL = "first", "special"
_KINDS = (FIRST, SPECIAL, "digits", "space", "punctuation", "word")


class TokenTypes:
    """A map from token ids to types of tokens, the ``types`` of ``SparsityTracker.watch``.

    Args:
        names: of the types; type t is ``names[t]``. If "first" is among them, it is the type of the first token of each
            sequence, whatever its id.
        table: int64 [V], the type of each token id; ids beyond V have that of the last one. -1: tokens not to be
            counted at all, such as padding. Negative ids, as for padding in labels, are not counted either.
    """

    def __init__(self, names: Sequence[str], table: Tensor) -> None:
        require("names", names, (list, tuple), "names of types")
        require("table", table, Tensor, "a tensor of integers [V]")
        if table.dim() != 1 or not len(table) or table.is_floating_point() or table.dtype == torch.bool:
            raise ValueError(f"table must be integers [V], got {table.dtype} {list(table.shape)}")
        low, high = int(table.min()), int(table.max())
        if low < -1 or high >= len(names):
            raise ValueError(f"table must hold types from -1 to {len(names) - 1}, got {low} to {high}")
        self.names = tuple(names)
        self.table = table.long()
        self._tables: dict[torch.device, Tensor] = {}

    def __call__(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """The types, int64, shaped like ``ids`` [..., S]; ``positions`` are 0 where sequences begin, as in packing."""
        table = self._tables.get(ids.device)
        if table is None:
            table = self._tables[ids.device] = self.table.to(ids.device)
        ids = ids.long()
        types = torch.where(ids < 0, -1, table[ids.clamp(0, len(table) - 1)])
        if FIRST not in self.names:
            return types
        if positions is None:
            positions = torch.arange(ids.shape[-1], device=ids.device).expand(ids.shape)
        counted = (positions == 0) & (types >= 0)
        return torch.where(counted, self.names.index(FIRST), types)


def token_types(tokenizer: Any, *, pad: int | None = None) -> TokenTypes:
    """The types "first", "special", "digits", "space", "punctuation" and "word" of a tokenizer's vocabulary.

    "first" is the first token of a sequence, "special" a special token of the tokenizer; "digits", "space" and
    "punctuation" are tokens of nothing else (except for a space before), "word" is all the rest. ``tokenizer`` is one
    of transformers or of tokenizers. Tokens with the id ``pad`` are not counted. Decodes each token once.
    """
    if not hasattr(tokenizer, "decode"):
        expected = "a tokenizer of transformers or of tokenizers"
        raise TypeError(f"tokenizer must be {expected}, got {type(tokenizer).__name__}")
    if pad is not None:
        require_integer("pad", pad, 0)
    backend = tokenizer if hasattr(tokenizer, "get_added_tokens_decoder") else None
    if backend is not None:
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    else:
        size, special = len(tokenizer), set(tokenizer.all_special_ids)
    table = torch.empty(size + 1, dtype=torch.int64, device="cpu")
    for i in range(size):
        table[i] = _KINDS.index(SPECIAL if i in special else _kind(tokenizer.decode([i])))
    # rows of the embedding beyond the tokenizer
    table[size] = _KINDS.index(SPECIAL)
    if pad is not None:
        table[pad] = -1
    return TokenTypes(_KINDS, table)


def _kind(text: str) -> str:
    bare = text.strip()
    if not bare:
        return "space"
    if bare.isdigit():
        return "digits"
    return "word" if any(c.isalnum() or c == "\N{REPLACEMENT CHARACTER}" for c in bare) else "punctuation"
