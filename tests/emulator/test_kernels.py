"""Compiled kernels on the emulator, in order and in random schedules, against the operators on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests.emulator import checks
from tests.emulator.launch import Emulator, Schedule
from twell import tuning
from twell._runtime import fingerprint

# in order and in two random schedules, one of which is nightly: which of them hangs on the kernels
NIGHTLY = 1 + int(fingerprint.source_hash(), 16) % 2
SEEDS = pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.nightly] * (seed == NIGHTLY)) for seed in range(3)]
)
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
def test_gradients_at_non_zeros(emulator: Emulator, sizes: list[int], seed: int) -> None:
    with emulator.stands_in(2, Schedule.of(seed)):
        checks.sampled_grad(sizes, 72, gated=seed > 0, ctas=2 + seed)


@SEEDS
@LISTS
def test_the_gate_at_candidates(emulator: Emulator, sizes: list[int], seed: int) -> None:
    with emulator.stands_in(2, Schedule.of(seed)):
        checks.sampled_gate(sizes, 72, biased=seed > 0, compression=2 if seed == 1 else 8, ctas=2 + seed)
        checks.sampled_gate(sizes, 72, biased=True, compression=8, ctas=2 + seed, levels=True)


@pytest.mark.parametrize(
    ("m", "n", "k", "most"),
    [(3, 264, 5, 4), (2, 4104, 64, 3), (2, 8, 1, 2), (2, 520, 600, 9), (3, 8200, 40, 100), (1, 40000, 300, 5)],
)
def test_the_largest_gates(emulator: Emulator, m: int, n: int, k: int, most: int) -> None:
    with emulator.stands_in(2, Schedule.of(1)):
        checks.top_k(m, n, k, most)


@SEEDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n"), [(1, 8), (127, 264), (129, 256), (300, 520), (600, 72)])
def test_gates_near_thresholds(emulator: Emulator, m: int, n: int, dtype: torch.dtype, seed: int) -> None:
    with emulator.stands_in(2, Schedule.of(seed)):
        checks.window(m, n, dtype, seed)


@pytest.mark.parametrize(("m", "n"), [(1, 8), (9, 264), (20, 1288)])
def test_a_dense_gate_packed(emulator: Emulator, m: int, n: int) -> None:
    for seed in (0, 1):
        with emulator.stands_in(2, Schedule.of(seed)):
            checks.pack(m, n, levels=bool(seed), compression=2 if seed == 0 else 8, seed=seed)


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


@SEEDS
@pytest.mark.parametrize(
    ("m", "k", "n", "density", "biases"),
    [
        (130, 72, 264, 0.02, ""),
        (300, 128, 520, 0.05, "gate up down"),
        (128, 136, 264, 0.3, "gate"),
        (5, 64, 72, 1.0, ""),
        (140, 128, 520, 0.0, "down"),
    ],
)
def test_a_screened_layer(emulator: Emulator, m: int, k: int, n: int, density: float, biases: str, seed: int) -> None:
    with emulator.stands_in(3, Schedule.of(seed)):
        checks.screened_layer(m, k, n, density, biases)


@SEEDS
@pytest.mark.parametrize(
    ("m", "k", "n", "every", "gated", "cluster"),
    [
        # heavy tokens that many clusters share, beside light ones
        (43, 136, 520, 8, True, 4),
        (5, 136, 520, 3, True, 8),
        (5, 136, 520, 3, True, 1),
        # none is heavy, and all are
        (100, 136, 264, 1000, False, 2),
        (36, 72, 264, 1, True, 1),
        # threads that count several tokens
        (530, 64, 64, 300, True, 1),
    ],
)
def test_uneven_tokens_by_row(
    emulator: Emulator,
    m: int,
    k: int,
    n: int,
    every: int,
    gated: bool,
    cluster: int,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # every token with more than 8 non-zeros is heavy, unless that is less than a helper's share
    monkeypatch.setattr(tuning, "TOKEN_CLUSTERS", ((1 << 20, cluster, 8),))
    # without its cache
    monkeypatch.setattr(tuning, "up_down_token", tuning.up_down_token.__wrapped__)
    with emulator.stands_in(6, Schedule.of(seed)):
        checks.by_row(m, k, n, every, gated, seed=seed)


@pytest.mark.parametrize(
    ("t", "k", "n", "count", "top", "most", "wide_ids", "seed"),
    [
        (1, 64, 72, 5, 2, 8, False, 0),
        # several tiles and units of an expert, and ids of 64 bits
        (23, 136, 264, 4, 3, 8, True, 1),
        # more experts than threads, of which one has more pairs than a unit of another size
        pytest.param(40, 72, 136, 1024, 2, 32, False, 2, marks=pytest.mark.nightly),
        pytest.param(1, 2056, 264, 3, 2, 8, False, 0, marks=pytest.mark.nightly),
    ],
)
def test_experts(
    emulator: Emulator, t: int, k: int, n: int, count: int, top: int, most: int, wide_ids: bool, seed: int
) -> None:
    with emulator.stands_in(3, Schedule.of(seed)):
        checks.experts(t, k, n, count, top, most, wide_ids, seed)


@SEEDS
@pytest.mark.parametrize(
    ("m", "k", "n", "density", "biases", "gated"),
    [
        # lists of tokens that weight_grad cuts into three pieces
        (2300, 72, 264, 0.05, "gate", True),
        pytest.param(300, 328, 520, 0.05, "", True, marks=pytest.mark.nightly),
        (128, 136, 264, 0.3, "", False),
        (5, 64, 72, 1.0, "gate up", True),
        # a list of more neurons than the threads of `count` load at a time
        (130, 64, 5632, 0.012, "gate", True),
    ],
)
def test_a_training_step(
    emulator: Emulator, m: int, k: int, n: int, density: float, biases: str, gated: bool, seed: int
) -> None:
    with emulator.stands_in(3, Schedule.of(seed)):
        checks.training_step(m, k, n, density, biases, gated)


@pytest.mark.parametrize(("m", "gated"), [(9, True), (300, True), pytest.param(140, False, marks=pytest.mark.nightly)])
def test_a_training_step_with_thresholds_of_neurons(emulator: Emulator, m: int, gated: bool) -> None:
    with emulator.stands_in(3, Schedule.of(1)):
        checks.training_step(m, 72, 264, 0.2, "gate up down", gated, levels=True)


@SEEDS
@pytest.mark.parametrize(
    "case",
    [
        checks.OverFull(300, biases="gate up down", dl1=1.0),
        checks.OverFull(600, n=264, biases="gate up", wanted="w"),
        checks.OverFull(600, wanted="x"),
        checks.OverFull(300, gated=False, biases="gate", dl1=-1.0),
        checks.OverFull(520, k=328, accumulate=True, biases="up"),
        checks.OverFull(5, k=264, activation="relu2", biases="down"),
        checks.OverFull(257, activation="drelu", biases="gate up"),
        checks.OverFull(300, activation="fatrelu", threshold=2.0, gated=False, accumulate=True, wanted="w"),
        checks.OverFull(300, activation="fatrelu", biases="gate up", levels=True),
        checks.OverFull(300, biases="up", dl1=1.0, given=True),
        checks.OverFull(129, gated=False, dl1=-1.0, given=True, wanted="w", activation="relu2"),
    ],
)
def test_too_many_non_zeros(emulator: Emulator, case: checks.OverFull, seed: int) -> None:
    """In one to three slices, by several CTAs."""
    with emulator.stands_in(6, Schedule.of(seed)):
        checks.overfull(case, ctas=6, seed=seed)


def test_as_many_non_zeros_as_there_is_room_for(emulator: Emulator) -> None:
    with emulator.stands_in(6, Schedule()):
        assert checks.overfull(checks.OverFull(300), ctas=6, excess=0) == 0


def test_who_begins_late_computes_nothing(emulator: Emulator) -> None:
    """A schedule says how many CTAs run at a time: the others begin when these have ended."""
    teams = []
    for seed in range(8):
        with emulator.stands_in(8, Schedule.of(seed)):
            teams.append(checks.overfull(checks.OverFull(300, k=16, n=40), ctas=8, seed=seed))
    assert min(teams) == 1
    assert max(teams) == 4
