"""The values of ``--workload`` and their problems: named, drawn from parameters, or recorded from a model."""

import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from twell import testing
from twell.commands.request import RequestError
from twell.testing import FFN, WORKLOADS, Workload

# Parameters of a drawn workload: their names in ``testing.Workload``, the most, and what they are. With a wider spread
# some draws have more non-zeros than wanted.
EXPLAINED = {
    "nnz": ("nnz", float("inf"), "mean non-zeros per token"),
    "skew": ("neuron_sigma", 3.0, "spread of the neurons' popularity, as the sigma of its logarithm"),
    "tokens": ("token_sigma", 3.0, "the same for tokens"),
    "dead": ("dead", 1.0, "share of neurons that never fire"),
    "topic": ("rho", 1.0, "correlation of a token with the topic of its document"),
}
REAL = "real:"


@dataclass(frozen=True)
class Source:
    """A workload: its name in rows, its text on a command line, and its pattern or its folder."""

    name: str
    text: str
    pattern: Workload | None = None
    folder: Path | None = None

    def load(self, m: int, k: int, n: int, *, device: torch.device | str, dtype: torch.dtype) -> FFN:
        """Make the problem with m tokens; a recorded layer has its own sizes. Raises RequestError if that fails."""
        if self.pattern is None:
            assert self.folder is not None
            try:
                return testing.load_real(int(self.name[4:]), self.folder, m, device=device, dtype=dtype)
            except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
                raise RequestError(f"{self.text} cannot be read: {error}") from None
        if not self.possible(n):
            most = n * (1 - self.pattern.dead)
            said = f"expected at most {most:g}, the neurons of {n} that are not dead"
            raise RequestError(f"{self.name} has {self.pattern.nnz:g} non-zeros per token: {said}")
        return testing.make(self.pattern, m, k, n, device=device, dtype=dtype)

    def possible(self, n: int) -> bool:
        """Whether ``n`` neurons can have so many non-zeros; true for a recorded layer."""
        return self.pattern is None or self.pattern.nnz <= n * (1 - self.pattern.dead)


def parse(texts: list[str] | None) -> list[Source]:
    """The distinct workloads of a command line; by default all named ones. Raises RequestError for other texts."""
    by_name: dict[str, Source] = {}
    for source in (each for text in texts or WORKLOADS for each in _sources(text)):
        other = by_name.setdefault(source.name, source)
        if (other.folder and other.folder.resolve()) != (source.folder and source.folder.resolve()):
            raise RequestError(f"{other.text} and {source.text} are both {source.name}: time them in two runs")
    return list(by_name.values())


def _sources(text: str) -> list[Source]:
    if text.startswith(REAL):
        return _recorded(text)
    if "=" in text:
        return [_drawn(text)]
    if text in WORKLOADS:
        return [Source(text, text, WORKLOADS[text])]
    known = f"{', '.join(WORKLOADS)}, {REAL}FOLDER[/LAYER] or parameters ({'=, '.join(EXPLAINED)}=)"
    raise RequestError(f"--workload takes {known}, got {text!r}")


def _recorded(text: str) -> list[Source]:
    """``real:FOLDER``, all its layers, or ``real:FOLDER/3``, one of them."""
    path = Path(text.removeprefix(REAL)).expanduser()
    folder, layer = (path, "") if path.is_dir() else (path.parent, path.name)
    names = testing.real_names(folder) if folder.is_dir() else []
    wanted = [name for name in names if layer in ("", name.removeprefix("real"))]
    if not wanted:
        found = ", ".join(name.removeprefix("real") for name in names) or "none"
        said = f"expected layer0.npz, layer1.npz, ... in {folder}, or one of its layers"
        raise RequestError(f"{text}: {said}, got {found}")
    return [Source(name, f"{REAL}{folder}/{name.removeprefix('real')}", folder=folder) for name in wanted]


def _drawn(text: str) -> Source:
    """``nnz=29,skew=1``: the parameters are the name."""
    values: dict[str, float] = {}
    for item in text.split(","):
        key, _, value = item.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if key not in EXPLAINED or key in values or not 0 <= number <= EXPLAINED[key][1] or number == float("inf"):
            limits = {name: f"0 to {most:g}" if most < 9 else "N" for name, (_, most, _) in EXPLAINED.items()}
            known = ", ".join(f"{name}={limit}" for name, limit in limits.items())
            raise RequestError(f"parameters of a workload are {known}, each once, got {item!r} in {text!r}")
        values[key] = number
    if not values.get("nnz"):
        raise RequestError(f"expected nnz= above 0, the {EXPLAINED['nnz'][2]}, in {text!r}")
    # one name per workload: keys in their order, zeros left out
    name = ",".join(f"{key}={values[key]:g}" for key in EXPLAINED if values.get(key))
    return Source(name, name, Workload(**{EXPLAINED[key][0]: float(f"{value:g}") for key, value in values.items()}))
