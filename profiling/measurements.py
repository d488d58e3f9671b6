"""The results of profiling/results/, as ``measurements.txt`` lists them: what is in each, and what makes it.

``profiling.everything`` runs them; ``profiling.readme`` fills profiling/results/README.md from them.
"""

import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).with_suffix(".txt")


class Measurement(NamedTuple):
    """A file of results, whose machine line names its GPU. ``seconds``: predicted for each command.

    ``host``: its times depend on all of the package, not on the kernels alone, so that it is of one version. ``dated``:
    the file stays as an earlier version measured it.
    """

    name: str
    content: str
    shown: str
    commands: tuple[str, ...] = ()
    seconds: tuple[int, ...] = ()
    host: bool = False
    dated: bool = False


def parsed(text: str) -> Iterator[tuple[str, Measurement]]:
    """Each measurement with its kind, in words. ValueError for a line that is none."""
    named: dict[str, str] = {}
    for block in re.split(r"\n(?=\w)", re.sub(r"(?m)^#.*\n|\n(?=\n)", "", text).strip()):
        first, *commands = block.split("\n")
        if match := re.fullmatch(r"([A-Z_0-9]+) = (.*)", first):
            named[match[1]] = string.Template(match[2]).safe_substitute(named)
            continue
        match = re.fullmatch(r"(\w+)(?: \((host|dated|frozen)\))?: (.*) \| (.*)", first)
        parts = [re.fullmatch(r"  (\d+) (.*)", line) for line in commands]
        if match is None or None in parts:
            raise ValueError(f"{LIST.name}: expected a name, content and commands, got {block!r}")
        name, kind, content, shown = match.groups("")
        words = tuple(string.Template(part[2]).safe_substitute(named) for part in parts if part)
        seconds = tuple(int(part[1]) for part in parts if part)
        yield kind, Measurement(name, content, shown, words, seconds, kind == "host", kind == "dated")


_FOUND = [*parsed(LIST.read_text(encoding="utf-8"))]
ALL = tuple(each for kind, each in _FOUND if kind != "frozen")
# of studies that ended
FROZEN = tuple(each for kind, each in _FOUND if kind == "frozen")


def shown_command(command: str) -> str:
    """A command as a page shows it: words in capitals for what the reader chooses."""
    words = command.replace(" --budget-s $BUDGET", "")
    return string.Template(words).substitute(OUT="FILE", FOLDER="OUT", REAL="REAL")
