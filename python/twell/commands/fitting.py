"""The rates of a card, fitted to measured times of each route.

``fitted`` minimises errors of logarithms of times, with less weight on slow routes, and what choices are expected to
lose, and pulls rates to those of the card in use, which decide what was not measured.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.choose import rates
from twell.choose.cards import Card, Rates
from twell.choose.rates import Figures, Problem

Row = dict[str, Any]

SIZES = ("m", "k", "n", "gated", "training")


def ms_of(row: Row) -> dict[str, float]:
    return {route: row[f"{route}_ms"] for route in rates.ROUTES if row.get(f"{route}_ms") is not None}


PARTS = ("inference", "training", "e4m3")
_STEP = tuple(name for name in Rates._fields if name.startswith("step_"))
_OTHERS = tuple(name for name in Rates._fields if name not in _STEP)
# By part, what of a card is fitted to its rows. Steps have the gate and the screen of inference.
_FITTED = {"inference": ("rates", _OTHERS), "training": ("rates", _STEP), "e4m3": ("float8", _OTHERS)}
# Errors of logarithms beyond this count less than squared. A choice is soft between times as near as the temperature.
_SCALE, _TEMPERATURE = 0.05, 0.03
# The weights of what choices lose, and of the logarithm of what a rate changes by.
_LOSS, _PULL = 0.5, 0.2
_ROUNDS = 20


class Measured(NamedTuple):
    """A problem and its times in us by route."""

    problem: Problem
    figures: Figures
    us: dict[str, float]


def part_of(problem: Problem) -> str:
    return "e4m3" if problem.float8 else "training" if problem.training else "inference"


def problem_of(row: Row) -> Problem:
    return Problem(**{name: row[name] for name in SIZES}, merged="float8" in row, float8="float8" in row)


def figures_in(row: Row) -> Figures:
    return Figures(*(row.get(name) for name in Figures._fields)).checked()  # type: ignore[arg-type]


def usable(rows: Iterable[Row]) -> list[Measured]:
    """The rows with times of two routes, the last one for each problem and pattern. ValueError for wrong ones."""
    found = {}
    for row in rows:
        problem, us = problem_of(row), {route: 1e3 * ms for route, ms in ms_of(row).items()}
        if not all(type(size) is int and size > 0 for size in problem[:3]):
            raise ValueError(f"m, k and n must be positive integers, got {list(problem[:3])}")
        if not all(0 < time < math.inf for time in us.values()):
            raise ValueError(f"times must be positive, got {us}")
        if problem.float8:
            # servers, of which the time is, keep a dense weight as products read it
            us["dense"] += rates.copies_us(problem)
        if len(us) > 1:
            found[problem, str(row["pattern"])] = Measured(problem, figures_in(row), us)
    return list(found.values())


def predicted(measured: Measured, card: Card) -> dict[str, float]:
    """us of the routes that were measured."""
    found = rates.seconds(measured.problem, measured.figures, card)
    return {route: 1e6 * found[route] for route in measured.us if route in found}


def fitted(rows: Sequence[Measured], card: Card) -> Card:
    """The card with rates fitted to the rows, for the parts that have some."""
    for part, (field, names) in _FITTED.items():
        own = [each for each in rows if part_of(each.problem) == part]
        if own:
            card = _with(card, field, _fit(own, card, field, names))
    return card


def _with(card: Card, field: str, fit: Rates) -> Card:
    changed: dict[str, Any] = {field: fit}
    return dataclasses.replace(card, **changed)


def _fit(rows: Sequence[Measured], card: Card, field: str, names: Sequence[str]) -> Rates:
    """By the method of Levenberg and Marquardt, in logarithms of the named rates."""
    start: Rates = getattr(card, field) or card.rates
    origin = _vector(math.log(getattr(start, name)) for name in names)

    def at(place: Tensor) -> Rates:
        return start._replace(**dict(zip(names, place.exp().tolist())))

    def residuals(place: Tensor) -> Tensor:
        trial = _with(card, field, at(place))
        found = itertools.chain.from_iterable(_residuals(each, trial) for each in rows)
        return torch.cat((_vector(found), _PULL * (place - origin)))

    place, damping, nudge = origin, 1e-2, 1e-4
    now = residuals(place)
    for _ in range(_ROUNDS):
        moved = place + nudge * torch.eye(len(names), dtype=torch.float64, device="cpu")
        slopes = torch.stack([(residuals(each) - now) / nudge for each in moved], 1)
        normal, down = slopes.T @ slopes, -(slopes.T @ now)
        for _ in range(8):
            step = torch.linalg.solve(normal + damping * torch.diag(torch.diag(normal)), down).clamp(-1, 1)
            after = residuals(place + step)
            if after @ after < now @ now:
                break
            damping *= 4
        else:
            break
        gain = 1 - float(after @ after) / float(now @ now)
        place, now, damping = place + step, after, damping / 3
        if gain < 1e-4:
            break
    return at(place)


def _residuals(measured: Measured, card: Card) -> Iterator[float]:
    us, found = measured.us, predicted(measured, card)
    best, least = min(us.values()), min(found.values())
    for route, guess in found.items():
        # a time that is many times slower need not be exact
        error = math.log(guess / us[route]) * best / us[route]
        yield math.copysign(_SCALE * math.sqrt(2 * (math.hypot(1, error / _SCALE) - 1)), error)
    chances = {route: (least / guess) ** (1 / _TEMPERATURE) for route, guess in found.items()}
    loss = sum(chances[route] * (us[route] / best - 1) for route in found) / sum(chances.values())
    yield _LOSS * math.sqrt(loss + 1e-12)


def _vector(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64, device="cpu")


def loss_of(measured: Measured, card: Card) -> float | None:
    """What the choice loses to the fastest measured route; None if it was not measured."""
    choice = rates.decide(measured.problem, measured.figures, None, card).strategy
    return measured.us[choice] / min(measured.us.values()) - 1 if choice in measured.us else None


def report(rows: Sequence[Measured], card: Card) -> str:
    """The errors of the card's predictions, and the loss of its choices."""
    if not rows:
        return "nothing to fit"
    errors = [abs(guess / each.us[route] - 1) for each in rows for route, guess in predicted(each, card).items()]
    losses = [loss for each in rows if (loss := loss_of(each, card)) is not None]
    counts = ", ".join(f"{sum(part_of(each.problem) == part for each in rows)} of {part}" for part in PARTS)
    times = f"{len(errors)} times are predicted within {statistics.median(errors):.1%} in the median"
    choices = f"{len(losses)} choices lose {statistics.mean(losses):.1%} on average to the fastest route"
    return f"{len(rows)} problems, {counts}: {times}\n{choices}, {max(losses):.0%} at most"
