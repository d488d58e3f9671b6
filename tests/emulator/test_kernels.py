"""Compiled kernels on the emulator, in order and in random schedules, against the operators on a CPU."""

import pytest
import torch

from tests.emulator import cases, checks
from tests.emulator.launch import Emulator, Schedule
from twell.choose import tuning
from twell.runtime import fingerprint
from twell.testing.case import Case

# in order and in two random schedules; which of the latter is nightly hangs on the kernels
FIRST, LATER = (1 + (int(fingerprint.source_hash(), 16) + i) % 2 for i in range(2))


def seeds(*later: int) -> pytest.MarkDecorator:
    """All three, of which these are nightly."""
    given = [pytest.param(seed, marks=[pytest.mark.nightly] * (seed in later)) for seed in range(3)]
    return pytest.mark.parametrize("seed", given)


SEEDS = seeds(LATER)
# of whole layers: a random schedule finds what one in order does
SCHEDULED = seeds(0, LATER)
# lists of candidates or fired neurons around the sizes of chunks and units, and none
EDGES = [1, 63, 64, 65, 128, 129, 192, 200, 255, 256, 257, 300, 0]
LISTS = pytest.mark.parametrize("sizes", [EDGES, EDGES[::-1], [448, 192, 448, 0, 65], [0, 0]])


@SEEDS
@pytest.mark.parametrize("k", [8, 136, 2048, 2560])
def test_rows_are_quantised_in_several_rounds(emulator: Emulator, k: int, seed: int) -> None:
    # a multiprocessor takes 16 rows at a time
    with emulator.stands_in(2, Schedule.of(seed)):
        checks.quantize_gate(70, k, weights=seed > 0)
        # fewer than a multiprocessor takes
        checks.quantize_gate(11, k, weights=seed == 1, seed=seed)


@SEEDS
@pytest.mark.parametrize(("m", "n", "k"), [(5, 8, 8), (128, 520, 72), (129, 520, 72), (300, 264, 896)])
def test_candidates(emulator: Emulator, m: int, n: int, k: int, seed: int) -> None:
    with emulator.stands_in(2, Schedule.of(seed)):
        checks.gate_screen(m, n, k, biased=seed > 0)


@SEEDS
@LISTS
def test_the_up_projection_at_non_zeros(emulator: Emulator, sizes: list[int], seed: int) -> None:
    with emulator.stands_in(2, Schedule.of(seed)):
        checks.sampled_up(sizes, 72, training=seed > 0, biased=seed != 1, ctas=2 + seed)


@SEEDS
@LISTS
def test_the_gate_at_candidates(emulator: Emulator, sizes: list[int], seed: int) -> None:
    with emulator.stands_in(2, Schedule.of(seed)):
        checks.sampled_gate(sizes, 72, biased=seed > 0, compression=2 if seed == 1 else 8, ctas=2 + seed)
        checks.sampled_gate(sizes, 72, biased=True, compression=8, ctas=2 + seed, levels=True)


@SEEDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n"), [(1, 8), (127, 264), (129, 256), (300, 520), (600, 72)])
def test_gates_near_thresholds(emulator: Emulator, m: int, n: int, dtype: torch.dtype, seed: int) -> None:
    with emulator.stands_in(2, Schedule.of(seed)):
        checks.window(m, n, dtype, seed)


@SEEDS
@pytest.mark.parametrize(
    ("rows", "tiles", "n", "most"),
    [
        (1, 1, 8, 8),
        (17, 22, 5632, 2048),
        # more counts of a token tile than a warp loads at a time, and more of popularity than threads clear at a time
        (33, 60, 9000, 2048),
        # more than one token tile for each warp, and totals that end at 2^31 - 1
        (16 * 258 - 3, 2, 264, 1 << 19),
        # more token tiles than the threads of a CTA
        (16 * 1030 + 1, 1, 8, 2048),
    ],
)
def test_ranges_of_token_tiles(emulator: Emulator, rows: int, tiles: int, n: int, most: int, seed: int) -> None:
    with emulator.stands_in(2, Schedule.of(seed)):
        checks.locate(rows, tiles, n, most, seed)


@SEEDS
@pytest.mark.parametrize(
    ("n", "most", "ctas", "counters"),
    [
        (8, 0, 3, 0),
        # all equal, few values, and counts beyond what fp32 holds
        (264, 0, 3, 1),
        (264, 3, 3, 5000),
        (1000, 1 << 30, 1, 600),
        # the last CTA has fewer neurons, and the last slice is incomplete
        (1032, 40, 7, 600),
        # more neurons than a CTA takes
        (1096, 100, 2, 0),
    ],
)
def test_neurons_by_popularity(emulator: Emulator, n: int, most: int, ctas: int, counters: int, seed: int) -> None:
    with emulator.stands_in(2, Schedule.of(seed)):
        checks.rank(n, most, ctas, counters, seed)


@pytest.mark.nightly
def test_neurons_that_are_staged_in_two_parts(emulator: Emulator) -> None:
    with emulator.stands_in(2, Schedule()):
        checks.rank(16392, 300, 33, 8)


@SCHEDULED
@pytest.mark.parametrize("numbered", cases.read("few tokens"))
def test_whole_layers_of_few_tokens(emulator: Emulator, numbered: str, seed: int) -> None:
    clusters, line = cases.numbered(numbered)
    case = Case.of(line)
    spec = tuning.decode(case.torch_dtype, case.m, case.k, "experts" if case.kind == "experts" else "plain")
    assert spec
    with emulator.stands_in(clusters * spec.cluster, Schedule.of(seed)):
        cases.run(emulator, f"{line} seed={seed}")
