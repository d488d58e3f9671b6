"""The table of measured costs by which "auto" decides: the shipped one, or one that ``twell tune`` wrote for the GPU.

``<cache>/tuning/<GPU>.json`` is of one GPU model and one state of the kernels. It is read once per process and GPU
model, at the first decision there. A file that cannot be used is ignored, with one warning.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import threading
from pathlib import Path
from typing import Any

import torch

from twell import _files, _tuning_table
from twell._runtime import cache, device, env, fingerprint
from twell._runtime.log import logger

# (training, gated, K, N) -> M -> strategy -> (base, per share of a union, of non-zeros, of the heaviest)
Key = tuple[bool, bool, int, int]
Terms = tuple[float, float, float, float]
Costs = dict[Key, dict[int, dict[str, Terms]]]

FOLDER = "tuning"
STRATEGIES = ("row", "union")


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """Costs of strategies in times of dense, and where they come from.

    machine: the machine line. date: ISO 8601. file: the user's file that they are from, None for the shipped table.
    ignored: why a file of the user is not used, or "".
    """

    costs: Costs
    machine: str
    date: str
    file: Path | None = None
    ignored: str = ""

    @property
    def gpu(self) -> str:
        """The GPU model that was measured."""
        return gpu_of(self.machine)


def gpu_of(machine: str) -> str:
    """The GPU model of a machine line."""
    return machine.split(" (")[0]


SHIPPED = Table(_tuning_table.TABLE, _tuning_table.MACHINE, _tuning_table.DATE)

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


@functools.cache
def _on(index: int) -> Table:
    name = device.name(index)
    with _lock:
        return _of_gpu(name)


@functools.cache
def _of_gpu(gpu: str) -> Table:
    table = read(gpu)
    if table.ignored:
        logger.warning("%s", table.ignored)
    return table


def read(gpu: str) -> Table:
    """The table for a GPU model: with the user's costs if there is a file that can be used."""
    try:
        path = path_of(gpu)
    except RuntimeError:
        # a user without a home
        return SHIPPED
    except ValueError as error:
        return dataclasses.replace(SHIPPED, ignored=f'"auto" cannot look for a table of {gpu}: {error}')
    try:
        text = path.read_text(encoding="utf-8")
        own = parse(text)
        if own.gpu != gpu:
            raise ValueError(f"it must be of {gpu}, got {own.gpu}")
    except (FileNotFoundError, NotADirectoryError):
        return SHIPPED
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return dataclasses.replace(SHIPPED, ignored=f'"auto" ignores {path}, no table of `twell tune`: {error}')
    if json.loads(text)["kernels"] != fingerprint.source_hash():
        return dataclasses.replace(SHIPPED, ignored=f'"auto" ignores {path}, of other kernels: run `twell tune` again')
    return dataclasses.replace(own, costs=completed(own), file=path)


def completed(own: Table) -> Costs:
    """The costs of a user's table with the shipped ones.

    Those of another GPU fill in kinds of calls (training, gated) that the user did not measure.
    """
    kinds = {key[:2] for key in own.costs}
    shipped = {key: value for key, value in SHIPPED.costs.items() if own.gpu == SHIPPED.gpu or key[:2] not in kinds}
    return shipped | own.costs


def path_of(gpu: str) -> Path:
    """The user's file for a GPU model. Raises RuntimeError or ValueError if there is no folder for it."""
    return env.cache_dir() / FOLDER / f"{re.sub('[^A-Za-z0-9]+', '_', gpu)}.json"


def write(own: Table) -> Path:
    """Write a user's table, whole or not at all; keep the layers of the file that it replaces if it can be used.

    Raises OSError or UnsafeCacheError if the cache cannot be written.
    """
    path = cache.open_folder(FOLDER) / path_of(own.gpu).name
    try:
        before = path.read_text(encoding="utf-8")
        if json.loads(before)["kernels"] == fingerprint.source_hash():
            own = dataclasses.replace(own, costs=parse(before).costs | own.costs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # there is no such file
        pass
    _files.write_text(path, text_of(own))
    return path


def text_of(table: Table) -> str:
    """A table as JSON."""
    layers = [
        {"training": training, "gated": gated, "k": k, "n": n, "tokens": by_tokens}
        for (training, gated, k, n), by_tokens in sorted(table.costs.items())
    ]
    written = {"machine": table.machine, "date": table.date, "kernels": fingerprint.source_hash(), "layers": layers}
    return json.dumps(written, indent=1) + "\n"


def parse(text: str) -> Table:
    """The table of ``text_of``. Raises ValueError, KeyError, TypeError or AttributeError for other text."""
    written = json.loads(text)
    costs: Costs = {}
    for layer in written["layers"]:
        k, n = _count(layer["k"]), _count(layer["n"])
        costs[bool(layer["training"]), bool(layer["gated"]), k, n] = {
            _count(int(m)): {_strategy(name): _terms(terms) for name, terms in entry.items()}
            for m, entry in sorted(layer["tokens"].items(), key=lambda item: int(item[0]))
        }
    return Table(costs, str(written["machine"]), str(written["date"]))


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"sizes must be positive integers, got {value!r}")
    return value


def _strategy(name: str) -> str:
    if name not in STRATEGIES:
        raise ValueError(f"strategies must be among {', '.join(STRATEGIES)}, got {name!r}")
    return name


def _terms(terms: Any) -> Terms:
    base, per_union, per_density, per_heaviest = map(float, terms)
    if not all(math.isfinite(term) and term >= 0 for term in (base, per_union, per_density, per_heaviest)):
        raise ValueError(f"costs must be finite and not negative, got {terms!r}")
    return base, per_union, per_density, per_heaviest
