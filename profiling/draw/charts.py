"""Draw profiling/charts/ from profiling/results/: ``python -m profiling.draw``.

    python -m profiling.draw                      # all charts whose data is there
    python -m profiling.draw nnz                  # this one; an error if its data is missing
    python -m profiling.draw --check              # exit status 1 if a chart would be drawn otherwise now
    python -m profiling.draw --results build/results --out build/charts

Each chart is an SVG, light and dark. ``--check`` compares those that this version of matplotlib drew, byte by byte.

Charts:
{charts}
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from profiling.draw import style
from profiling.draw.common import ResultError, Results
from profiling.draw.layers import Chart, nnz, speedup

RESULTS = Path(__file__).resolve().parents[1] / "results"
CHARTS = Path(__file__).resolve().parents[1] / "charts"
ALL: dict[str, Callable[[Results], Chart | None]] = {
    "speedup": speedup,
    "nnz": nnz,
}


def check(chart: Chart | None, stem: Path) -> list[str]:
    """Compare a chart with its files; one line for each difference."""
    files = style.outputs(stem)
    if chart is None:
        return [f"{path.name}: there is no data for it" for path in files if path.exists()]
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for drawn, path in zip(chart.save(Path(folder) / stem.name), files, strict=True):
            if not path.exists():
                wrong.append(f"{path.name}: missing")
            elif style.is_comparable(path) and drawn.read_bytes() != path.read_bytes():
                wrong.append(f"{path.name}: is drawn otherwise now")
    return wrong


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    described = "\n".join(f"  {name:<10} {(make.__doc__ or '').splitlines()[0]}" for name, make in ALL.items())
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        "python -m profiling.draw",
        description=__doc__.format(charts=described),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("charts", nargs="*", metavar="CHART", help="default: all whose data is there")
    add("--results", type=Path, default=RESULTS, metavar="FOLDER", help="default: profiling/results")
    add("--out", type=Path, default=CHARTS, metavar="FOLDER", help="default: profiling/charts")
    add("--check", action="store_true", help="compare, write nothing")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.charts if name not in ALL]
    if unknown:
        parser.error(f"expected charts out of {', '.join(ALL)}, got {', '.join(unknown)}")
    if not arguments.results.is_dir():
        parser.error(f"expected a folder of results, got {arguments.results}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    results = Results(arguments.results)
    wrong: list[str] = []
    drawn = 0
    try:
        for name in arguments.charts or ALL:
            chart = ALL[name](results)
            if chart is None and arguments.charts:
                raise ResultError(f"{arguments.results} has no data for {name}: {ALL[name].__doc__}")
            if arguments.check:
                wrong += check(chart, arguments.out / name)
            elif chart is not None:
                chart.save(arguments.out / name)
                print(f"{name}: {chart.title}")
            drawn += chart is not None
        if not drawn and not wrong:
            raise ResultError(f"expected results of some chart in {arguments.results}, got none")
    except (ResultError, ImportError) as error:
        print(f"charts: error: {error}", file=sys.stderr)
        return 2
    if wrong:
        print("\n".join(wrong), "python -m profiling.draw draws them again", sep="\n", file=sys.stderr)
    return int(bool(wrong))
