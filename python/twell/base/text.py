"""Numbers and tables in words."""

from collections.abc import Sequence


def as_percent(value: float | None) -> str:
    """A share of 1 in words; "-" for one that is not known."""
    if value is None:
        return "-"
    if not value:
        return "0"
    percent = 100 * value
    return "< 0.01 %" if percent < 0.01 else f"{percent:.{2 if percent < 0.995 else 1 if percent < 99.95 else 0}f} %"


def counted(number: int, what: str) -> str:
    """A number of things, as "1 file" or "2,048 tokens"."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def listed(parts: Sequence[str], word: str) -> str:
    """Parts as "a, b and c"."""
    return f" {word} ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lay lines of cells out in columns, right-aligned, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
