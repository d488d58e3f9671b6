"""The table of measured costs by which "auto" decides: the shipped one, or one that ``twell tune`` wrote for the GPU.

``table.json`` and ``table_float8.json`` beside this file ship; ``profiling.tune`` and ``profiling.float8`` write them.

``<cache>/tuning/<GPU>.json`` is of one GPU model and names the kernels that it is of. It is read once per process and
GPU model, at the first decision there. A file that cannot be used is ignored, with one warning. One of other kernels is
used, as the shipped table is, with one warning.
"""

import dataclasses
import functools
import json
import re
import threading
from pathlib import Path
from typing import Any

import torch

from twell import _files
from twell._modes import constant
from twell._runtime import cache, device, env, fingerprint, geometry
from twell._runtime.log import logger, warn_once

# (training, gated, K, N) -> M -> strategy -> (base, per share of a union, of non-zeros, of the heaviest);
# the last of "union+screen" is per share of candidates
Key = tuple[bool, bool, int, int]
Terms = tuple[float, float, float, float]
Costs = dict[Key, dict[int, dict[str, Terms]]]

FOLDER = "tuning"
# "union" with the int8 screen of the gate, which "auto" alone may choose: in tables, figures and explanations
SCREENED = "union+screen"
STRATEGIES = ("row", "union", SCREENED)
# names of kinds of calls, by (training, gated)
KINDS = {
    (False, True): "gated",
    (True, True): "training",
    (False, False): "non-gated",
    (True, False): "non-gated training",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """Costs of strategies in times of dense, and where they come from.

    machine: the machine line. date: ISO 8601. file: the user's file that they are from, None for the shipped table.
    ignored: why a file of the user is not used, or "". note: what to know of a file that is used, or "". measured: the
    kinds of calls (training, gated) that the user's file has. fills: whether other costs stand in for those of a kind
    of call that was not measured; where they do not, that kind is dense. union_neurons: the most that "union" and
    training take on the GPU that the table is used on. screens: whether that GPU has the kernels of the int8 screen.
    float8: whether it is of e4m3 weights, whose dense is the fastest that PyTorch has, without a copy of any weight.
    """

    costs: Costs
    machine: str
    date: str
    file: Path | None = None
    ignored: str = ""
    note: str = ""
    measured: frozenset[tuple[bool, bool]] = frozenset()
    fills: bool = True
    union_neurons: int = geometry.MAX_NEURONS
    screens: bool = True
    float8: bool = False

    @property
    def gpu(self) -> str:
        """The GPU model that was measured."""
        return gpu_of(self.machine)

    def lacks(self, training: bool, gated: bool) -> str:
        """Why calls of this kind have no costs here; "" if they have."""
        if self.fills or (training, gated) in self.measured:
            return ""
        kind = KINDS[training, gated]
        return f'no times of kind "{kind}" for {self.gpu}; `twell tune --kinds "{kind}"` measures them'


def gpu_of(machine: str) -> str:
    """The GPU model of a machine line."""
    return machine.split(" (")[0]


_lock = threading.Lock()


def in_use(on: torch.device) -> Table:
    """The table for calls on this device."""
    if on.type != "cuda":
        return SHIPPED
    try:
        return _on(on.index or 0)
    except RuntimeError:
        # no driver: these are fake tensors
        return SHIPPED


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
    has_kernels = device.architecture(index) is not None
    if has_kernels and in_use(torch.device("cuda", index)).file is not None:
        return ""
    of = f"{device.name(index)} (compute capability {'.'.join(map(str, capability))})"
    if not has_kernels:
        return f"there are no sparse kernels for {of}, only for {', '.join(f'{m}.x' for m in device.ARCHITECTURES)}"
    return f"costs of the sparse kernels are not known on {of}; `twell tune` measures them"


@constant
def imposed_on_call(kind: str, index: int | None) -> str:
    """``imposed``, with a warning on a GPU."""
    why = imposed(kind, index)
    if why and kind == "cuda":
        warn_once(f'strategy="auto" is "dense": {why}')
    return why


@functools.cache
def _on(index: int) -> Table:
    name = device.name(index)
    hopper = device.capability(index) == device.SM_90
    with _lock:
        table = _of_gpu(name, hopper)
    if hopper:
        return table
    return portable(table)


def portable(table: Table) -> Table:
    """The same costs within what the portable family can do."""
    return dataclasses.replace(table, union_neurons=geometry.PORTABLE_UNION_NEURONS, screens=False)


@functools.cache
def _of_gpu(gpu: str, fill: bool) -> Table:
    table = read(gpu, fill)
    for message in filter(None, (table.ignored, table.note)):
        logger.warning("%s", message)
    return table


def read(gpu: str, fill: bool = True) -> Table:
    """The table for a GPU model: with the user's costs if there is a file that can be used.

    ``fill``: whether the shipped costs, which are those of a Hopper GPU, fill in what the user did not measure.
    """
    try:
        path = path_of(gpu)
    except OSError:
        # a user without a home
        return SHIPPED
    except ValueError as error:
        return dataclasses.replace(SHIPPED, ignored=f'"auto" cannot look for a table of {gpu}: {error}')
    try:
        own, kernels = _load(path)
        if own.gpu != gpu:
            raise ValueError(f"it must be of {gpu}, got {own.gpu}")
    except (FileNotFoundError, NotADirectoryError):
        return SHIPPED
    except UNUSABLE as error:
        return dataclasses.replace(SHIPPED, ignored=f'"auto" ignores {path}, no table of `twell tune`: {error}')
    costs, measured = completed(own) if fill else own.costs, frozenset(key[:2] for key in own.costs)
    note = "" if kernels == fingerprint.source_hash() else f"{path} has times of other kernels: run `twell tune` again"
    return dataclasses.replace(own, costs=costs, file=path, note=note, measured=measured, fills=fill)


# what reading a damaged file may raise
UNUSABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)


def _load(path: Path) -> tuple[Table, str]:
    """The table of a file, and the hash of the kernels that it is of. Raises one of ``UNUSABLE``."""
    # a pipe would be waited for
    if path.exists() and not path.is_file():
        raise ValueError("it must be a file")
    written = json.loads(path.read_text(encoding="utf-8"))
    return _table(written), str(written["kernels"])


def completed(own: Table) -> Costs:
    """The costs of a user's table of a Hopper GPU with the shipped ones.

    Those of another GPU model fill in kinds of calls (training, gated) that the user did not measure.
    """
    kinds = {key[:2] for key in own.costs}
    shipped = {key: value for key, value in SHIPPED.costs.items() if own.gpu == SHIPPED.gpu or key[:2] not in kinds}
    return shipped | own.costs


def path_of(gpu: str) -> Path:
    """The user's file for a GPU model. Raises OSError or ValueError if there is no folder for it."""
    return env.cache_dir() / FOLDER / f"{re.sub('[^A-Za-z0-9]+', '_', gpu)}.json"


def write(own: Table) -> Path:
    """Write a user's table, whole or not at all; keep what the file that it replaces has besides, if it can be used.

    Processes that write at the same time do so one after another. Raises OSError or UnsafeCacheError if the cache
    cannot be written.
    """
    path = cache.open_folder(FOLDER) / path_of(own.gpu).name
    with cache.lock(path.with_suffix(".lock")):
        try:
            before, kernels = _load(path)
            if kernels == fingerprint.source_hash():
                both = {key: before.costs.get(key, {}) | costs for key, costs in own.costs.items()}
                own = dataclasses.replace(own, costs=before.costs | both)
        except UNUSABLE:
            # there is no such file
            pass
        _files.write_text(path, text_of(own, fingerprint.source_hash()))
    return path


def text_of(table: Table, kernels: str = "") -> str:
    """A table as JSON, with the hash of the kernels that it is of, if that is given."""
    layers = [
        {"training": training, "gated": gated, "k": k, "n": n, "tokens": by_tokens}
        for (training, gated, k, n), by_tokens in sorted(table.costs.items())
    ]
    written = {"machine": table.machine, "date": table.date} | ({"kernels": kernels} if kernels else {})
    return json.dumps(written | {"layers": layers}, indent=1) + "\n"


def parse(text: str, float8: bool = False) -> Table:
    """The table of ``text_of``. Raises one of ``UNUSABLE`` for other text."""
    return _table(json.loads(text), float8)


def _table(written: Any, float8: bool = False) -> Table:
    strategies = (*STRATEGIES, "dense") if float8 else STRATEGIES
    costs: Costs = {}
    for layer in written["layers"]:
        k, n = _count(layer["k"]), _count(layer["n"])
        by_tokens = {
            _count(int(m)): {_strategy(name, strategies): _terms(terms) for name, terms in entry.items()}
            for m, entry in sorted(layer["tokens"].items(), key=lambda item: int(item[0]))
        }
        if not by_tokens:
            raise ValueError(f"a layer must have numbers of tokens, got none for {k} x {n}")
        costs[_flag(layer["training"]), _flag(layer["gated"]), k, n] = by_tokens
    if not costs:
        raise ValueError("it must have layers, got none")
    return Table(costs, str(written["machine"]), str(written["date"]), float8=float8)


def _count(value: Any) -> int:
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise ValueError(f"sizes must be integers from 1 to 2^31 - 1, got {value!r:.40}")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"training and gated must be true or false, got {value!r:.40}")
    return value


def _strategy(name: str, known: tuple[str, ...]) -> str:
    # tables of version 0.2
    name = SCREENED if name == "screened" else name
    if name not in known:
        raise ValueError(f"strategies must be among {', '.join(known)}, got {name!r}")
    return name


def _terms(terms: Any) -> Terms:
    if type(terms) is not list:
        raise ValueError(f"costs must be a list, got {type(terms).__name__}")
    base, per_union, per_density, per_last = map(float, terms)
    # sums of larger ones may be infinite
    if not all(0 <= term <= 1e9 for term in (base, per_union, per_density, per_last)):
        raise ValueError(f"costs must be from 0 to 1e9, got {terms!r:.80}")
    return base, per_union, per_density, per_last


PATH, FLOAT8_PATH = (Path(__file__).with_name(name) for name in ("table.json", "table_float8.json"))
SHIPPED, FLOAT8 = parse(PATH.read_text(encoding="utf-8")), parse(FLOAT8_PATH.read_text(encoding="utf-8"), float8=True)
