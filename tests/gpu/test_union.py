"""Strategy "union" alone: its lists, how units are dealt, the hidden state's range, slices of many tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from tests import programs
from tests.gpu.strategies import (
    BIASES,
    BOTH,
    CUDA,
    FP16,
    Outputs,
    assert_nothing_waits,
    assert_right,
    check,
    output,
    right,
    run,
    sums,
)
from twell import ops, testing
from twell._runtime import device, geometry, program
from twell.testing import FFN


@pytest.fixture(autouse=True)
def own_programs() -> Iterator[None]:
    """Programs that are made for other sizes of slices or other devices are no one else's."""
    yield
    program.forget()


def assert_same_outputs(found: Outputs, expected: Outputs, what: str = "") -> None:
    for name, ours, theirs in zip(Outputs._fields, found, expected, strict=True):
        testing.assert_same(ours, theirs, f"{name} {what}")


@pytest.mark.parametrize("ctas", [2, 3, 20, 100])
def test_bits_do_not_depend_on_how_units_are_dealt(ctas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rounds or in a part of one, whole or cut. In sums of |h| neither."""
    for name, m in (("topic29", 3000), ("skew29", 700), ("uniform29", 300)):
        problem = testing.make(name, m, 256, 2816)
        expected = run(problem, "union")
        with monkeypatch.context() as patched:
            patched.setattr(device, "sm_count", lambda index: ctas)
            program.forget()
            assert_same_outputs(run(problem, "union"), expected, f"of {name}")


def test_hidden_state_beyond_fp16_is_infinite() -> None:
    """As in dense PyTorch, and only for its tokens."""
    problem = testing.integer_problem(130, 264, 776, density=0.1, device=CUDA, dtype=FP16)
    clean = right(problem, "union").y
    scale = torch.ones(776, 1, dtype=FP16, device=CUDA)
    scale[5] = 2.0**14
    scaled = problem._replace(w_up=problem.w_up * scale)
    y = run(scaled, "union").y
    testing.assert_same(y, right(scaled, "union").y)
    silent = testing.float64_gate(problem)[:, 5] == 0
    assert bool(silent.any())
    assert not bool(y.isfinite().all())
    testing.assert_same(y[silent], clean[silent])


@pytest.mark.parametrize("size", [1, 63, 64, 65, 255, 256, 257, 511, 512, 513])
def test_union_sizes_around_tiles(size: int) -> None:
    """Lists that end just before, at and behind a chunk of 64 and 256 neurons; each token fires few of them."""
    generator = torch.Generator().manual_seed(size)
    neurons = torch.randperm(1544, generator=generator)[:size]
    gates = torch.full((256, 1544), -1)
    place = torch.arange(max(size, 128)) % size
    gates[torch.arange(len(place)) % 128, neurons[place]] = 3
    problem = testing.pattern_problem(gates, 264, device=CUDA)
    assert right(problem, "union").union.tolist() == [size, 0]
    check(problem, "union")


def test_neighbours_differ() -> None:
    """An empty tile, a full one, one with a single neuron in its last token, and a partial one are independent."""
    gates = torch.full((400, 776), -2)
    gates[128:256] = 1
    gates[383, 775] = 5
    gates[384:, ::3] = 2
    problem = testing.pattern_problem(gates, 400, biases="down", device=CUDA)
    assert right(problem, "union").union.tolist() == [0, 776, 1, 259]
    check(problem, "union")


# Slices: as many tokens at a time as entries have room


@BOTH
@pytest.mark.parametrize("density", [0, 0.08, 1])
@pytest.mark.parametrize("compression", [2, 8])
@pytest.mark.parametrize(("m", "tiles"), [(1, 1), (128, 1), (300, 1), (1000, 3), (897, 7), (1000, 8)])
def test_slices_do_not_change_a_bit(
    m: int, tiles: int, compression: int, density: float, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for ``tiles`` token tiles at a time, which are packed one by one, the last by another kernel."""
    p = testing.integer_problem(m, 136, 264, density=density, biases=BIASES, device=CUDA)
    layer = p if gated else p._replace(w_up=None, b_up=None)
    y, l1, stats, union = programs.union_layer(layer, compression)
    whole = Outputs(y, l1, union)
    assert_right(whole, right(p, "union", gated))
    testing.assert_same(stats, ops.gate_pack(p.x, p.w_gate, p.b_gate, compression)[2], "stats")
    monkeypatch.setattr(geometry, "UNION_ENTRIES", tiles * geometry.TOKEN_TILE * 264)
    program.forget()
    assert len(geometry.union_slices(m, 264)) == math.ceil(math.ceil(m / 128) / tiles)
    y, l1, found_stats, union = programs.union_layer(layer, compression)
    assert_same_outputs(Outputs(y, l1, union), whole)
    testing.assert_same(found_stats, stats, "stats")


def test_many_tokens_take_the_memory_of_a_slice() -> None:
    """Beside y, the packed gate and the lists of one slice: less than dense PyTorch's gate alone."""
    m, n, k = 1 << 18, 5632, 64
    p = testing.integer_problem(512, k, n, density=0.005, device=CUDA)
    p = p._replace(x=p.x.repeat(m // 512, 1))
    expected = right(p.rows(0, 512), "union").y
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = output(p, "union")
    assert torch.cuda.max_memory_allocated() - before < m * n * 2 / 2
    assert all(bool((part == expected).all()) for part in y.view(-1, 512, k).split(64))


def sliced(monkeypatch: pytest.MonkeyPatch, tokens: int, problem: FFN) -> None:
    monkeypatch.setattr(geometry, "UNION_ENTRIES", tokens * len(problem.w_gate))
    program.forget()
    assert len(geometry.union_slices(len(problem.x), len(problem.w_gate))) > 1


def test_slices_of_real_numbers_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In calls, which never wait for the GPU, and in replays of a graph."""
    problem = testing.make("topic29", 3000)
    whole = output(problem, "union")
    sliced(monkeypatch, 1024, problem)
    testing.assert_same(output(problem, "union"), whole)
    assert_nothing_waits(lambda: testing.sparse_layer(problem, strategy="union"))
    graph, y = testing.captured(lambda: output(problem, "union"))
    for _ in range(100):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, whole)


def test_two_slices() -> None:
    """N = 65,536 and more tokens than have room at a time, unchanged."""
    m = geometry.UNION_ENTRIES // 65536 + 130
    assert len(geometry.union_slices(m, 65536)) == 2
    block = testing.integer_problem(512, 64, 65536, density=0.04, device=CUDA)
    x = block.x.repeat(math.ceil(m / 512), 1)[:m].contiguous()
    for gated in (True, False):
        expected, found = right(block, "union", gated), run(block._replace(x=x), "union", gated)
        for start in range(0, m, 512):
            part = found.y[start : start + 512]
            testing.assert_same(part, expected.y[: len(part)], f"y from token {start}")
        whole = m // 512 * 4
        testing.assert_same(found.union[:whole], expected.union.repeat(m // 512), "union")
        testing.assert_same(sums(found)[:whole], expected.l1.repeat(m // 512), "l1")
