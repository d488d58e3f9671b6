"""The cards: rates of GPU models, fitted to measured times of routes, and the one in use.

``twell tune`` fits rates on any card. ``cards.json`` beside this file has those that ship, and
``<cache>/tuning/<GPU>.json`` the user's own. It is read once per process and GPU model, at the first decision there.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from twell.base import files
from twell.runtime import cache, device, env, fingerprint, geometry, specs
from twell.runtime.log import logger, warn_once
from twell.runtime.modes import constant


class Rates(NamedTuple):
    """Of layers with weights of one width; "flop" is Tflop/s of a multiprocessor, "memory" TB/s.

    Dense layers: us of a launch, products, weights, us of 10^6 values between products. One pass over few tokens: us,
    us more with a gate, us of a token and 4,096 columns. The gate GEMM: us, ns of a column of K in a wave of tiles of
    96 tokens, and of its reads where all clusters read, weights. "row": rows of neurons from L2, TB/s, and from memory,
    those of the heaviest token, 100 GB/s, us of 10^6 gates. "union": products, us of lists, us of 10^4
    entries of the heaviest group, us of 10^6 entries and 2,048 columns. Quantising, TB/s. The int8 screen: us, ns of a
    column of K in a wave, products at candidates. Training steps: as above, dense first.
    """

    launch: float
    dense_flop: float
    dense_memory: float
    dense_pass: float
    few_start: float
    few_gate: float
    few_left: float
    gate_start: float
    gate_flop: float
    gate_read: float
    gate_memory: float
    row_l2: float
    row_memory: float
    row_alone: float
    row_pass: float
    up_flop: float
    down_flop: float
    lists: float
    heavy_entry: float
    entry: float
    screen_start: float
    quantise: float
    int8_wave: float
    sampled_flop: float
    step_launch: float
    step_pass: float
    step_start: float
    step_flop: float
    step_entry: float
    step_memory: float


class ExpertRates(NamedTuple):
    """Of layers of experts: us before and between kernels, and TB/s of weights, and of the rows of "row"."""

    start: float
    memory: float
    row_memory: float
    grouped_start: float
    grouped_memory: float
    flop: float


@dataclasses.dataclass(frozen=True, eq=False)
class Card:
    """The rates of a GPU model, and where they come from.

    machine: the machine line. date: ISO 8601. kernels: the hash of those that were measured, of ``family``. float8: of
    e4m3 weights. file: the user's, None for those that ship. note: why a file is not used, or what to know of it.
    """

    machine: str
    date: str
    kernels: str
    family: str
    sms: int
    rates: Rates
    float8: Rates | None = None
    experts: ExpertRates | None = None
    file: Path | None = None
    note: str = ""

    @property
    def gpu(self) -> str:
        """The GPU model that was measured."""
        return self.machine.split(" (")[0]

    @property
    def screens(self) -> bool:
        """Whether it has the kernels of one pass and of the int8 screen."""
        return self.family == specs.SM90

    @property
    def union_neurons(self) -> int:
        """The most neurons that "union" and training take."""
        return geometry.MAX_NEURONS if self.screens else geometry.PORTABLE_UNION_NEURONS


FOLDER, PATH = "tuning", Path(__file__).with_name("cards.json")
# what reading a damaged file may raise
UNUSABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)


def card_of(written: Any) -> Card:
    """The card of what ``as_json`` wrote. Raises one of ``UNUSABLE`` for anything else."""
    machine, date, kernels, family = (str(written[name]) for name in ("machine", "date", "kernels", "family"))
    sms = written["sms"]
    if family not in (specs.SM90, specs.PORTABLE) or type(sms) is not int or not 2 <= sms <= 4096:
        raise ValueError(f"family and sms must be of a GPU, got {family!r:.40} and {sms!r:.40}")
    if written["rates"] is None:
        raise ValueError("it must have rates, got none")
    float8, experts = _rates(Rates, written.get("float8")), _rates(ExpertRates, written.get("experts"))
    return Card(machine, date, kernels, family, sms, _rates(Rates, written["rates"]), float8, experts)


def _rates(kind: Callable[..., Any], written: dict[str, Any] | None) -> Any:
    if written is None:
        return None
    rates = kind(**{name: float(value) for name, value in written.items()})
    if not all(1e-9 <= value <= 1e9 for value in rates):
        raise ValueError(f"rates must be from 1e-9 to 1e9, got {written!r:.80}")
    return rates


def as_json(card: Card) -> dict[str, Any]:
    """What a file has of a card; numbers of four digits."""

    def numbers(rates: Any) -> Any:
        return rates and {name: float(f"{value:.4g}") for name, value in rates._asdict().items()}

    own = {name: getattr(card, name) for name in ("machine", "date", "kernels", "family", "sms")}
    return own | {name: numbers(getattr(card, name)) for name in ("rates", "float8", "experts")}


CARDS = tuple(map(card_of, json.loads(PATH.read_text(encoding="utf-8"))))
SHIPPED = CARDS[0]


def path_of(gpu: str) -> Path:
    """The user's file for a GPU model. Raises OSError or ValueError if there is no folder for it."""
    return env.cache_dir() / FOLDER / f"{re.sub('[^A-Za-z0-9]+', '_', gpu)}.json"


def shipped(gpu: str, family: str = specs.SM90, sms: int | None = None) -> Card:
    """The nearest card that ships: of the GPU model, or else the first of its family."""
    cards = [card for card in CARDS if card.family == family] or [dataclasses.replace(SHIPPED, family=family)]
    best = next((card for card in cards if card.gpu == gpu), cards[0])
    return dataclasses.replace(best, sms=sms or best.sms)


def read(gpu: str, family: str = specs.SM90, sms: int | None = None) -> Card:
    """The card for a GPU model: the user's if there is a file that can be used, or else the nearest that ships."""
    best = shipped(gpu, family, sms)
    try:
        path = path_of(gpu)
    except (OSError, ValueError) as error:
        return dataclasses.replace(best, note=f'"auto" cannot look for rates of {gpu}: {error}')
    try:
        own = card_of(json.loads(path.read_text(encoding="utf-8")))
        if (own.gpu, own.family) != (gpu, family):
            raise ValueError(f"it must be of {gpu}, {family}, got {own.gpu}, {own.family}")
    except (FileNotFoundError, NotADirectoryError):
        return best
    except UNUSABLE as error:
        return dataclasses.replace(best, note=f'"auto" ignores {path}, no rates of `twell tune`: {error}')
    other = own.kernels != fingerprint.source_hash()
    note = f"{path} has times of other kernels: run `twell tune` again" if other else ""
    own = dataclasses.replace(own, sms=sms or own.sms, file=path, note=note)
    return dataclasses.replace(own, float8=own.float8 or best.float8, experts=own.experts or best.experts)


def write(card: Card) -> Path:
    """Write the user's card, whole or not at all. Raises OSError or UnsafeCacheError if the cache cannot be written."""
    path = cache.open_folder(FOLDER) / path_of(card.gpu).name
    with cache.lock(path.with_suffix(".lock")):
        files.write_text(path, json.dumps(as_json(card), indent=1) + "\n")
    return path


def in_use(on: torch.device) -> Card:
    """The card for calls on this device."""
    try:
        return _on(on.index or 0) if on.type == "cuda" else SHIPPED
    except RuntimeError:
        # no driver: these are fake tensors
        return SHIPPED


def to_predict(on: torch.device) -> Card:
    """The same, or the first that ships where "auto" does not choose."""
    return SHIPPED if imposed(on.type, on.index) else in_use(on)


@functools.cache
def _on(index: int) -> Card:
    hopper = device.capability(index) == device.SM_90
    card = read(device.name(index), specs.SM90 if hopper else specs.PORTABLE, device.sm_count(index))
    if card.note:
        logger.warning("%s", card.note)
    return card


@constant
def imposed(kind: str, index: int | None) -> str:
    """Why "auto" is dense on a device, by its type and index; "" where it chooses."""
    if kind != "cuda":
        return "the sparse kernels need a GPU; elsewhere the sparse operators are slower than dense"
    index = index or 0
    try:
        capability = device.capability(index)
    except RuntimeError:
        # no driver: these are fake tensors
        return ""
    if capability == device.SM_90:
        return ""
    of = f"{device.name(index)} (compute capability {'.'.join(map(str, capability))})"
    if device.architecture(index) is None:
        return f"there are no sparse kernels for {of}, only for {', '.join(f'{m}.x' for m in device.ARCHITECTURES)}"
    known = in_use(torch.device("cuda", index)).file is not None
    return "" if known else f"rates of the sparse kernels are not known on {of}; `twell tune` measures them"


@constant
def imposed_on_call(kind: str, index: int | None) -> str:
    """``imposed``, with a warning on a GPU."""
    why = imposed(kind, index)
    if why and kind == "cuda":
        warn_once(f'strategy="auto" is "dense": {why}')
    return why
