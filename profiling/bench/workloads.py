"""The values of ``--workload`` and their problems: named, drawn from parameters, or recorded from a model."""

import math
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from twell import testing
from twell.commands.request import RequestError
from twell.testing import FFN, WORKLOADS, Workload

# Parameters of a drawn workload, and their names in ``testing.Workload``.
KEYS = {"nnz": "nnz", "skew": "neuron_sigma", "tokens": "token_sigma", "dead": "dead", "topic": "rho"}
# With a wider spread some draws have more non-zeros than wanted.
_WIDEST = 3.0
_BOUNDS = {"skew": _WIDEST, "tokens": _WIDEST, "dead": 1.0, "topic": 1.0}
EXPLAINED = {
    "nnz": "mean non-zeros per token",
    "skew": f"spread of the neurons' popularity, as the sigma of its logarithm; at most {_WIDEST:g}",
    "tokens": f"the same for tokens; at most {_WIDEST:g}",
    "dead": "share of neurons that never fire",
    "topic": "correlation of a token with the topic of its document",
}

# Named workloads, fixed before ``Source.load`` adds others.
NAMED = tuple(WORKLOADS)
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
                return testing.load(self.name, m, real_layers=self.folder, device=device, dtype=dtype)
            except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
                raise RequestError(f"{self.text} cannot be read: {error}") from None
        self.check(n)
        # testing draws by name
        WORKLOADS.setdefault(self.name, self.pattern)
        return testing.make(self.name, m, k, n, device=device, dtype=dtype)

    def possible(self, n: int) -> bool:
        """Whether ``n`` neurons can have so many non-zeros; true for a recorded layer."""
        return self.pattern is None or self.pattern.nnz <= n * (1 - self.pattern.dead)

    def check(self, n: int) -> None:
        """Raise RequestError unless the workload is possible."""
        if self.pattern is not None and not self.possible(n):
            raise RequestError(
                f"{self.name} has {self.pattern.nnz:g} non-zeros per token: expected at most "
                f"{n * (1 - self.pattern.dead):g}, the neurons of {n} that are not dead"
            )


def parse(texts: list[str] | None) -> list[Source]:
    """The distinct workloads of a command line; by default all named ones. Raises RequestError for other texts."""
    found = [source for text in texts or NAMED for source in _sources(text)]
    by_name: dict[str, Source] = {}
    for source in found:
        other = by_name.setdefault(source.name, source)
        if (other.folder and other.folder.resolve()) != (source.folder and source.folder.resolve()):
            raise RequestError(
                f"{other.text} and {source.text} have the same name, {source.name}: time them in two runs"
            )
    return list(by_name.values())


def _sources(text: str) -> list[Source]:
    if text.startswith(REAL):
        return _recorded(text)
    if "=" in text:
        return [_drawn(text)]
    if text in NAMED:
        return [Source(text, text, WORKLOADS[text])]
    raise RequestError(
        f"--workload takes {', '.join(NAMED)}, {REAL}FOLDER[/LAYER] or parameters "
        f"({', '.join(f'{key}=' for key in KEYS)}), got {text!r}{_hint(text)}"
    )


def _hint(text: str) -> str:
    """A guess at the intended workload."""
    if text.startswith("real") and text[4:].isdecimal():
        return f"; a recorded layer is {REAL}FOLDER/{text[4:]}"
    if "," in text and all(part in NAMED for part in text.split(",")):
        return "; several are separated by spaces"
    if Path(text).is_dir():
        return f"; recorded layers in a folder are {REAL}{text}"
    return ""


def _recorded(text: str) -> list[Source]:
    """``real:FOLDER``, all its layers, or ``real:FOLDER/3``, ``.../layer3`` and ``.../layer3.npz``, one of them."""
    path = Path(text.removeprefix(REAL)).expanduser()
    if text == REAL:
        raise RequestError(f"expected the folder of recorded layers after {REAL}")
    folder, layer = (path, None) if path.is_dir() else (path.parent, path.name.removesuffix(".npz"))
    names = testing.real_names(folder) if folder.is_dir() else []
    if layer is not None and not names:
        missing = folder if not folder.is_dir() else path
        raise RequestError(f"{text}: there is no folder {missing}")
    if not names:
        raise RequestError(f"{text}: expected files layer0.npz, layer1.npz, ... in {folder}, got none")
    if layer is not None:
        wanted = f"real{layer.removeprefix('layer').removeprefix('real')}"
        if wanted not in names:
            layers = ", ".join(name.removeprefix("real") for name in names)
            raise RequestError(f"{text}: expected a layer of {folder}, which has {layers}")
        names = [wanted]
    return [Source(name, f"{REAL}{folder}/{name.removeprefix('real')}", folder=folder) for name in names]


def _drawn(text: str) -> Source:
    """``nnz=29,skew=1``: the parameters are the name."""
    values: dict[str, float] = {}
    for item in text.split(","):
        key, _, value = item.partition("=")
        if key not in KEYS:
            raise RequestError(f"parameters of a workload are {', '.join(KEYS)}, got {key!r} in {text!r}")
        if key in values:
            raise RequestError(f"expected {key} once, got it twice in {text!r}")
        values[key] = _value(key, value, text)
    if "nnz" not in values:
        raise RequestError(f"expected nnz=, the {EXPLAINED['nnz']}, in {text!r}")
    # one name per workload: keys in their order, zeros left out
    name = ",".join(f"{key}={values[key]:g}" for key in KEYS if values.get(key))
    return Source(name, name, Workload(**{KEYS[key]: float(f"{value:g}") for key, value in values.items()}))


def _value(key: str, text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if key == "nnz":
        if math.isfinite(value) and value > 0:
            return value
        raise RequestError(f"expected a number above 0 after nnz=, got {text!r} in {whole!r}")
    most = _BOUNDS[key]
    if not 0 <= value <= most:
        raise RequestError(f"expected a number from 0 to {most:g} after {key}=, got {text!r} in {whole!r}")
    return value
