"""The words of the TwELL format and the parts of the hybrid format, as their pages have them, and their comparison."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases.judged import Mismatch, Result, judge_bits, judge_elements, judge_reals
from twell.runtime import geometry
from twell.testing.bounds import Right, Value, solve
from twell.testing.case import Case
from twell.testing.exact import EXACT_LIMIT
from twell.testing.formula import Answer, answers
from twell.testing.operands import Operands

Outputs = dict[str, Tensor]


def judge_format(case: Case, o: Operands, found: Outputs, result: Result) -> None:
    """Gates within half a place, those of integers bit by bit, and then all bits of the format."""
    right: Right = solve(case, o)
    result.nonzeros = float(right.nonzeros) / max(case.m, 1)
    gate = right.gate.right.to(case.torch_dtype)
    if case.kind == "pack":
        values = found["dense"].reshape(case.m, case.n)
        if not case.exact:
            judge_elements("gate", values, Answer(right.gate.right, right.gate.off), result)
            gate = values
        names: dict[str, Any] = {"dense": gate, "nnz": right.nonzeros}
        names["words"], names["stats"] = packed_words(gate, case.compression)
        if not torch.equal(values != 0, right.gate.right > 0):
            raise Mismatch("gate: other values are zero")
    else:
        names = judge_kept(case, o, right, gate, found, result)
    for name, expected in names.items():
        ours = found[name].reshape(expected.shape)
        judge_bits(name, ours, expected.to(ours.dtype))


def judge_kept(
    case: Case, o: Operands, right: Right, gate: Tensor, found: Outputs, result: Result
) -> dict[str, Tensor]:
    """The parts of the hybrid format, of real numbers with the values that were found."""
    training = case.replace(kind="layer", wants="w_down", strategy="union", seed=case.seed)
    y = answers(training, o)["y"].value if case.exact else None
    if y is not None:
        judge_bits("y", found["y"], y.to(case.torch_dtype))
        if float(right.l1) < EXACT_LIMIT:
            judge_bits("total |h|", found["total |h|"], right.l1.float())
    else:
        trained = solve(training, o)
        judge_reals(training, "y", found["y"], trained.answers["y"], [], result)
    expected = hybrid_parts(gate, None if right.up is None else right.up.right.to(case.torch_dtype))
    expected["nonzeros"] = right.nonzeros
    if case.exact or int(right.nonzeros) > geometry.hybrid_capacity(case.m, case.n):
        return expected
    # where bits of places agree, values may be off by their rounding
    total = int(right.nonzeros)
    places = expected.pop("entries")[:total] & 0xFFFF
    judge_bits("places of entries", found["entries"][:total] & 0xFFFF, places)
    token, neuron = in_order(gate)
    value = (found["entries"][:total] >> 16).short().view(case.torch_dtype)
    judge_elements("gate", value, Answer(right.gate.right[token, neuron], right.gate.off[token, neuron]), result)
    if right.up is not None:
        up: Value = right.up.rounded(case.torch_dtype)
        of = Answer(up.right[token, neuron], up.off[token, neuron])
        judge_elements("up", found["up"][:total], of, result)
        del expected["up"]
    return expected


def packed_words(gate: Tensor, compression: int) -> tuple[Tensor, Tensor]:
    """words and stats of a gate [M, N] of 16 bits, as the page of the format has them."""
    m, n = gate.shape
    tiles, width = -(-n // 256), 256 // compression
    values = F.pad(gate, (0, 256 * tiles - n)).view(m, tiles, 256)
    nonzero = values != 0
    counts = nonzero.sum(2)
    place = torch.where(nonzero, nonzero.cumsum(2), width).clamp(max=width)
    neurons = torch.arange(256 * tiles, device=gate.device, dtype=torch.int32).view(1, tiles, 256)
    entries = values.view(torch.int16).int() << 16 | neurons
    # the last column takes the other values
    words = torch.zeros(m, tiles, width + 1, dtype=torch.int32, device=gate.device).scatter_(2, place, entries)
    words[:, :, 0] = counts
    figures = torch.stack((counts, (counts >= width).long()), 2)
    stats = F.pad(figures, (0, 0, 0, 0, 0, -m % geometry.STATS_ROWS)).view(-1, geometry.STATS_ROWS, tiles, 2).sum(1)
    return words[:, :, :width].reshape(m, tiles * width), stats.int()


def ranks_of(gate: Tensor) -> Tensor:
    """The place of each neuron in the list of its tile of 128 tokens, [tiles, N]; and -1 where it is in none."""
    m, n = gate.shape
    active = F.pad(gate != 0, (0, 0, 0, -m % 128)).view(-1, 128, n).any(1)
    return (active.cumsum(1) - 1).where(active, -1)


def in_order(gate: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and neurons of the non-zeros, by tile of tokens, chunk of 64 ranks, token, and rank."""
    token, neuron = gate.nonzero(as_tuple=True)
    rank = ranks_of(gate)[token // 128, neuron]
    key = (token // 128 * (gate.shape[1] + 64) + rank // 64) * (1 << 13) + token % 128 * 64 + rank % 64
    order = key.argsort()
    return token[order], neuron[order]


def hybrid_parts(gate: Tensor, up: Tensor | None) -> dict[str, Tensor]:
    """The parts of the hybrid format of a gate [M, N] of 16 bits, with zeros where they are undefined."""
    m, n = gate.shape
    capacity, tiles, columns = m * min(n, max(64, n // 36)), -(-m // 128), -(-n // 64)
    capacity += -capacity % 8
    ranks, (token, neuron) = ranks_of(gate), in_order(gate)
    total, lengths, device = len(token), (ranks >= 0).sum(1), gate.device

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=device)

    found = {"popularity": (gate != 0).sum(0), "entries": zeros(capacity), "chunks": zeros(tiles, columns + 1)}
    found |= {"neurons": zeros(tiles, 64 * columns), "sizes": torch.cat([lengths, lengths.new_tensor([total])])}
    if up is not None:
        found["up"] = torch.zeros(capacity, dtype=gate.dtype, device=device)
    if total > capacity:
        found["sizes"][:-1] = 0
        return {**found, "neurons": found["neurons"].short()}
    rank = ranks[token // 128, neuron]
    bits_of = gate[token, neuron].view(torch.int16).int()
    found["entries"][:total] = bits_of << 16 | (token % 128 << 6 | rank % 64).int()
    if up is not None:
        found["up"][:total] = up[token, neuron]
    for tile in range(tiles):
        own = (ranks[tile] >= 0).nonzero()[:, 0].int()
        padded = len(own) + -len(own) % 64
        found["neurons"][tile, :padded] = torch.cat([own, own[-1:].expand(padded - len(own))])
        first = int((token < 128 * tile).sum())
        in_chunk = torch.bincount(rank[token // 128 == tile] // 64, minlength=columns)
        found["chunks"][tile] = first + F.pad(in_chunk.cumsum(0), (1, 0))
    return {**found, "neurons": found["neurons"].short()}
