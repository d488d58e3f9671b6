"""Comparisons bit by bit, and memory full of NaN, in which an unwritten element shows."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from twell.ops import hybrid
from twell.runtime import geometry

_T = TypeVar("_T")


def assert_same(actual: Tensor, expected: Tensor, what: str = "values") -> None:
    """Raise AssertionError, naming ``what`` and the first difference, unless all elements are equal, or both NaN.

    Shapes and dtypes must agree; devices may differ. Zeros of either sign are equal.
    """
    exactly: Any = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(actual, expected.to(actual.device), **exactly, msg=lambda said: f"{what}: {said}")


Packed = tuple[Tensor, Tensor, Tensor]


def assert_packed_same(actual: Packed, expected: Packed, n: int, compression: int) -> None:
    """Raise AssertionError unless two results of ``twell.ops.gate_pack`` for n neurons agree in all defined values.

    These are every word (those past the count are 0), the statistics, and the spill of the row-tiles that overflow,
    up to neuron n. All NaN are equal.
    """
    (words, spill, stats), (expected_words, expected_spill, expected_stats) = actual, expected
    m, tiles = words.shape[0], geometry.tiles(n)
    ours, theirs = (_canonical(each, spill.dtype, compression) for each in (words, expected_words))
    assert_same(ours, theirs, "words")
    assert_same(stats, expected_stats, "stats")
    counts = words.view(m, tiles, geometry.words_per_tile(compression))[:, :, :1]
    defined = (counts > geometry.capacity(compression)).expand(m, tiles, geometry.TILE).reshape(spill.shape)[:, :n]
    ours, theirs = (each.to(spill.device)[:, :n].masked_fill(~defined, 0) for each in (spill, expected_spill))
    assert_same(ours, theirs, "spill")


def _canonical(words: Tensor, dtype: torch.dtype, compression: int) -> Tensor:
    """``words`` with the value bits of every NaN entry set to ones."""
    if not words.numel():
        return words
    table = words.view(-1, geometry.words_per_tile(compression))
    nan = (table >> 16).to(torch.int16).view(dtype).isnan()
    nan[:, 0] = False  # a count, not an entry
    return torch.where(nan, table | ~0xFFFF, table).view(words.shape)


def assert_hybrid_same(actual: Tensor, expected: Tensor, m: int, n: int, gated: bool) -> None:
    """Raise AssertionError unless two hybrid gates of ``m`` tokens and ``n`` neurons agree in all defined values.

    Each is the last output of ``twell.ops.hybrid_forward``, with 16-bit values. Defined are the lists up to a multiple
    of 64, and an entry and, if ``gated``, an up projection for each non-zero; if these do not fit, only their numbers.
    """
    assert actual.shape == expected.shape
    # values by their bits
    ours, theirs = (defined_parts(t.cpu(), m, n, torch.int16 if gated else None) for t in (actual, expected))
    for name, right in theirs.items():
        assert_same(ours[name], right, name)


def defined_parts(kept: Tensor, m: int, n: int, up: torch.dtype | None) -> dict[str, Tensor]:
    """The parts of a hybrid gate, with zeros where they are undefined; ``up``: the dtype of up projections, if any."""
    parts, capacity = hybrid.parts(kept, m, n), geometry.hybrid_capacity(m, n)
    sizes, total = parts.sizes, parts.sizes[-1]
    fits = total <= capacity
    some = (torch.arange(capacity, device=total.device) < total) & fits
    padded = -(-sizes[:-1, None] // geometry.CHUNK) * geometry.CHUNK
    listed = (torch.arange(parts.neurons.shape[1], device=total.device) < padded) & fits
    found = {
        "sizes": torch.cat([sizes[:-1].where(fits, 0), sizes[-1:]]),
        "popularity": parts.popularity,
        "chunks": parts.chunks.where(fits, 0),
        "neurons": parts.neurons.where(listed, 0),
        "entries": parts.entries[:capacity].where(some, 0),
    }
    if up is not None:
        found["up"] = hybrid.values(parts.entries, capacity, up).where(some, 0)
    return found


_POISON = 0xFF  # as bytes of bf16, fp16 and fp32 a NaN, of int32 -1


def poison_memory(device: torch.device | str = "cuda") -> None:
    """Leave NaN in the memory that torch hands out next: blocks of up to 256 MiB, twice that in all.

    Tensors from ``torch.empty`` then hold NaN (as integers: -1), so that an unwritten element shows. Frees torch's
    cached memory first, which synchronises.
    """
    torch.cuda.empty_cache()
    sizes = [1 << bits for bits in range(9, 21)] * 4 + [1 << bits for bits in range(21, 29)]
    blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    for block in blocks:
        block.fill_(_POISON)


def poisoned(call: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Call twice and fill the first call's outputs with NaN in between: the second call gets the same memory."""
    for output in call():
        output.view(-1).view(torch.uint8).fill_(_POISON)
    return call()


def captured(call: Callable[[], _T], warm: Callable[[], object] | None = None) -> tuple[torch.cuda.CUDAGraph, _T]:
    """Capture a CUDA graph of ``call``; return it with the outputs that each replay writes.

    A call, or ``warm``, comes first on a side stream, to load and allocate.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        (warm or call)()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    return graph, outputs
