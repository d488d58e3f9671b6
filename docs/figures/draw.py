"""Draw the diagrams of docs/: ``python docs/figures/draw.py``; ``--check`` compares with the files.

Each diagram is NAME-light.svg and NAME-dark.svg, in the colours of the charts.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parents[1]))

from profiling.draw.style import THEMES, Theme  # noqa: E402

WIDTH = 860
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"


class Canvas:
    """An SVG of ``WIDTH`` pixels in the colours of a theme; y grows downwards."""

    def __init__(self, theme: Theme, height: int, title: str) -> None:
        self.theme, self.height = theme, height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img" font-family="{FONT}" font-size="12">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{theme.muted}"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height}" fill="{theme.ground}"/>',
        ]

    def box(
        self, x: float, y: float, w: float, h: float, label: str = "", *, fill: str = "", size: int = 11, rx: float = 3
    ) -> None:
        """Draw a rectangle, tinted with ``fill`` or empty, with the lines of its label in the middle."""
        inside = (
            f'fill="{fill}" fill-opacity="0.22" stroke="{fill}"' if fill else f'fill="none" stroke="{self.theme.muted}"'
        )
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{rx:g}" {inside}/>')
        lines = label.split("\n") if label else []
        for i, line in enumerate(lines):
            middle = y + h / 2 + (i - (len(lines) - 1) / 2) * (size + 3)
            self.text(x + w / 2, middle + size * 0.35, line, anchor="middle", size=size)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        size: int = 12,
        bold: bool = False,
        muted: bool = False,
        mono: bool = False,
    ) -> None:
        more = (' font-weight="600"' if bold else "") + (f' font-family="{MONO}"' if mono else "")
        colour = self.theme.muted if muted else self.theme.text
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"{more}>'
            f"{escape(text)}</text>"
        )

    def note(self, y: float, text: str) -> None:
        """Write small print below a diagram."""
        for i, line in enumerate(textwrap.wrap(text, 136)):
            self.text(10, y + 16 * i, line, size=11)

    def line(self, *points: tuple[float, float], arrow: bool = False, dashed: bool = False, colour: str = "") -> None:
        more = (' marker-end="url(#tip)"' if arrow else "") + (' stroke-dasharray="4 3"' if dashed else "")
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path d="{path}" fill="none" stroke="{colour or self.theme.muted}"{more}/>')

    def dot(self, x: float, y: float, colour: str) -> None:
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="3" fill="{colour}"/>')

    def done(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def lanes(canvas: Canvas, names: list[tuple[str, str]], top: float, step: float, left: float = 150) -> list[float]:
    """Draw the lanes of a timeline, which begins at ``left``; return the y of each lane."""
    places = [top + i * step for i in range(len(names))]
    for (name, below), y in zip(names, places):
        canvas.text(10, y + 13, name, bold=True)
        canvas.text(10, y + 27, below, size=10, muted=True)
        canvas.line((left, y + step - 8), (WIDTH - 12, y + step - 8), colour=canvas.theme.grid)
    return places


def clock(canvas: Canvas, y: float, left: float = 150) -> None:
    canvas.line((left, y), (WIDTH - 14, y), arrow=True)
    canvas.text(WIDTH - 14, y - 6, "time", anchor="end", size=10, muted=True)


def format_(theme: Theme) -> str:
    """The TwELL format above, the hybrid format below."""
    c = Canvas(theme, 560, "The TwELL format and the hybrid format")
    blue, orange, green = theme.row, theme.union, theme.extra

    c.text(10, 22, "TwELL: each token by itself", bold=True, size=14)
    c.text(578, 42, "row m of relu(x w_gate^T), N neurons", muted=True, size=11)
    fired = {0: (30, 71, 118), 1: (12,), 2: (), 3: (44, 90)}
    for tile in range(4):
        x = 10 + tile * 140
        c.box(x, 50, 136, 24, fill=blue if tile == 0 else "")
        for place in fired[tile]:
            c.dot(x + place, 62, orange)
        c.text(x, 44, f"tile {tile}: 256 neurons", size=10, muted=True)
    c.text(578, 66, "…  T = ceil(N / 256) tiles", muted=True, size=11)

    c.line((10, 74), (10, 116), dashed=True)
    c.line((146, 74), (590, 116), dashed=True)
    words = ["count\n3", "v₀ | n₀", "v₁ | n₁", "v₂ | n₂", "unused", "…", "unused"]
    for i, word in enumerate(words):
        c.box(10 + i * 83, 118, 82, 36, word, fill=green if i == 0 else blue if "|" in word else "")
        c.text(
            51 + i * 83,
            168,
            "word W-1" if i == 6 else "" if i == 5 else f"word {i}",
            anchor="middle",
            size=10,
            muted=True,
        )
    c.text(606, 132, "W = 256 / compression", mono=True, size=11)
    c.text(606, 149, "int32 words per tile:", size=11, muted=True)
    c.text(606, 166, "128, 64 or 32", size=11, muted=True)

    c.text(10, 196, "A word is ", size=11)
    c.box(70, 184, 120, 18, "value, 16 bits", fill=blue, size=10)
    c.box(190, 184, 120, 18, "neuron, 16 bits", fill=orange, size=10)
    c.text(322, 197, "the first W-1 non-zeros, ascending by neuron. The count is the true one, 0 to 256.", size=11)
    c.text(10, 226, "spill", bold=True)
    c.box(70, 212, 240, 20, "256 values, not packed", fill=green, size=10)
    c.text(322, 226, "for each row and tile whose count exceeds W-1; elsewhere neither written nor read.", size=11)

    c.line((10, 250), (850, 250), colour=theme.grid)
    c.text(10, 278, "Hybrid: a tile of 128 tokens together", bold=True, size=14)
    c.text(10, 298, "which neurons fire for which token", muted=True)
    columns = [0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0]
    pattern = {(0, 1), (0, 5), (1, 4), (1, 5), (1, 11), (2, 1), (2, 7), (3, 5), (3, 13), (4, 4), (4, 7)}
    for j, fires in enumerate(columns):
        if fires:
            c.parts.append(
                f'<rect x="{10 + j * 16}" y="308" width="16" height="100" fill="{orange}" fill-opacity="0.16"/>'
            )
    c.box(10, 308, 256, 100)
    for m, n in sorted(pattern):
        c.dot(18 + n * 16, 318 + m * 20, orange)
    c.text(138, 424, "N neurons, ascending", anchor="middle", size=10, muted=True)
    c.text(276, 321, "token 0", size=10, muted=True)
    c.text(276, 405, "token 127", size=10, muted=True)

    c.line((340, 350), (384, 350), arrow=True)
    c.text(392, 306, "neurons", bold=True)
    c.text(455, 306, "int16: the union of its tokens' neurons; the place in it is the rank", size=11, muted=True)
    used = [j for j, flag in enumerate(columns) if flag]
    for i, j in enumerate(used):
        c.box(392 + i * 34, 314, 33, 24, str(j), fill=orange)
    c.text(392 + len(used) * 34 + 6, 331, "…", muted=True)
    c.text(392, 366, "chunks", bold=True)
    c.text(455, 366, "int32: the first entry of every 64 ranks", size=11, muted=True)
    for i, at in enumerate(("0", "57", "123", "…")):
        c.box(392 + i * 60, 374, 59, 24, at, fill=green)
    c.text(392, 428, "entries", bold=True)
    c.text(455, 428, "int32: one per non-zero, by chunk, token and rank", size=11, muted=True)
    c.box(392, 436, 160, 24, "value, 16 bits", fill=blue)
    c.box(552, 436, 120, 24, "token in its tile", fill=orange)
    c.box(672, 436, 120, 24, "rank in its chunk", fill=green)
    for x, bits in ((472, "31 … 16"), (612, "12 … 6"), (732, "5 … 0")):
        c.text(x, 474, bits, anchor="middle", size=10, muted=True)
    c.note(
        504,
        "Training keeps this format for backward, with the values of the up projection behind the entries: 1.0 KB per "
        "token at N = 5,632. It has room for max(64, N / 36) non-zeros per token on average over the batch. A batch "
        "with more is computed densely, gate and up once more in backward.",
    )
    return c.done()


def gate_pack(theme: Theme) -> str:
    c = Canvas(theme, 330, "Warp roles of gate_pack over time")
    blue, orange, green = theme.row, theme.union, theme.extra
    c.text(
        10,
        22,
        "gate_pack: the tensor cores wait only for the copy from registers to shared memory",
        bold=True,
        size=14,
    )
    clock(c, 44)
    load, one, two, pack = lanes(
        c,
        [
            ("load", "warp 3"),
            ("mma 1", "4 warps, 128 neurons"),
            ("mma 2", "4 warps, 128 neurons"),
            ("pack", "warps 0 to 2"),
        ],
        58,
        58,
    )
    starts = [168, 394, 620]
    for i, x in enumerate(starts):
        c.box(x - 16, load, min(226, WIDTH - 12 - (x - 16)), 32, f"TMA of tile {i}, ring of stages", fill=green)
        for y in (one, two):
            c.box(x, y, 174, 32, f"WGMMA of tile {i}", fill=blue)
            epilogue = "ReLU,\nstmatrix"
            c.box(x + 174, y, 50, 32, epilogue, fill=orange, size=9)
    for i, x in enumerate(starts[1:]):
        c.box(x + 4, pack, 156, 32, f"tile {i}", fill=orange, size=10)
    c.text(168, pack + 20, "waits for the first tile", size=10, muted=True)
    for x in starts[1:]:
        c.line((x - 10, one + 32), (x + 10, pack), arrow=True)
        c.line((x - 4, two + 32), (x + 14, pack), arrow=True)
    c.line((240, load + 32), (240, one), arrow=True)
    c.text(246, load + 46, "stage full", size=10, muted=True)
    c.text(388, two + 56, "GATE_FULL", size=10, muted=True, anchor="end")
    c.line((558, pack), (580, two + 34), arrow=True)
    c.text(490, two + 46, "GATE_EMPTY", size=10, muted=True)
    c.note(
        312,
        "A warp packs eight tokens at a time; a row that overflows goes to the spill. All 12 warps pack the last tile.",
    )
    return c.done()


def pipeline(theme: Theme) -> str:
    """The kernels of a forward pass and of a training step, and the data between them."""
    c = Canvas(theme, 586, "Kernels of a forward pass and of a training step")
    blue, orange, green, purple = theme.row, theme.union, theme.extra, theme.paper

    c.text(10, 22, "Forward", bold=True, size=14)
    x, w, h = [10, 230, 450, 670], 160, 54
    y = 40
    c.box(x[0], y, w, h, "gate_pack\nx, w_gate: dense", fill=blue)
    c.box(x[1], y, w, h, "compact\nlists of 128 tokens", fill=orange)
    c.box(x[2], y, w, h, "sampled_up\nup at the non-zeros", fill=green)
    c.box(x[3], y, w, h, "gathered\ny = h w_down", fill=green)
    for i, label in enumerate(("TwELL", "hybrid", "h")):
        c.line((x[i] + w, y + h / 2), (x[i + 1], y + h / 2), arrow=True)
        c.text(x[i] + w + 30, y + h / 2 - 6, label, anchor="middle", size=10, muted=True)
    c.box(x[1], 112, w, 40, "up_down\nstrategy row", fill=green)
    c.line((x[0] + w / 2, y + h), (x[0] + w / 2, 132), (x[1], 132), arrow=True)
    c.text(x[1] + w + 12, 136, "y, token by token", size=11, muted=True)

    c.text(10, 178, "With the int8 screen, in place of gate_pack", bold=True)
    y = 188
    for place, label, colour in (
        (x[0], "quantize_gate\nx, w_gate: int8", orange),
        (x[1], "gate_screen\nint8 product: who may fire", blue),
        (x[2], "list_candidates\nof 128 tokens", orange),
        (x[3], "sampled_gate\nthe gate at candidates", green),
    ):
        c.box(place, y, w, h, label, fill=colour)
    for i in range(3):
        c.line((x[i] + w, y + h / 2), (x[i + 1], y + h / 2), arrow=True)
    c.line((x[3] + w / 2, y), (x[3] + w / 2, 164), (x[1] - 20, 164), (x[1] - 20, 80), (x[1], 80), arrow=True)
    c.text(x[3] + w / 2 - 8, 160, "TwELL of the candidates", anchor="end", size=10, muted=True)

    c.line((10, 258), (850, 258), colour=theme.grid)
    c.text(10, 284, "Backward", bold=True, size=14)
    c.text(110, 284, "from x, dy, the weights and the hybrid format of the forward pass", size=11, muted=True)
    y = 300
    c.box(x[0], y, w, h, "sampled_grad\nd_gate, d_up at non-zeros", fill=green)
    c.box(x[1], y, w, h, "gathered\ndx, two products", fill=green)
    c.line((x[0] + w, y + h / 2), (x[1], y + h / 2), arrow=True)
    y2 = 386
    c.box(x[1], y2, w, h, "rank, transpose\nby neuron tiles of 64", fill=orange)
    c.box(x[2], y2, w, h, "weight_grad\ndw_gate, dw_up, dw_down", fill=green)
    c.line((x[0] + w / 2, y + h), (x[0] + w / 2, y2 + h / 2), (x[1], y2 + h / 2), arrow=True)
    c.line((x[1] + w, y2 + h / 2), (x[2], y2 + h / 2), arrow=True)
    c.box(x[3], y2, w, h, "overflow\nonly above the capacity", fill=purple)
    c.line((x[2] + w, y2 + h / 2), (x[3], y2 + h / 2), arrow=True, dashed=True)

    c.line((10, 464), (850, 464), colour=theme.grid)
    for i, (colour, label) in enumerate(
        (
            (blue, "dense product, WGMMA"),
            (orange, "integers: places, counts, lists"),
            (green, "products on the pattern"),
            (purple, "fallback"),
        )
    ):
        c.box(10 + i * 205, 478, 16, 14, fill=colour)
        c.text(32 + i * 205, 490, label, size=11)
    c.note(
        522,
        "Kernels overlap by programmatic dependent launch: each starts as the one before ends, and waits for it "
        "before it reads. The device decides about counts and capacities, never the host, so a whole step can be a "
        "CUDA graph. In training overflow also follows the forward pass; it returns at once if the batch fits.",
    )
    return c.done()


def gathered(theme: Theme) -> str:
    c = Canvas(theme, 316, "Warp groups of the kernels on unions over time")
    blue, orange, green = theme.row, theme.union, theme.extra
    c.text(
        10,
        22,
        "gathered and weight_grad: fill copies rows; mma multiplies and scatters the next coefficients",
        bold=True,
        size=14,
    )
    clock(c, 44)
    fill, one, two = lanes(
        c,
        [("fill", "group 0: cp.async"), ("mma 1", "group 1: WGMMA"), ("mma 2", "group 2: WGMMA")],
        58,
        66,
    )
    for i in range(7):
        c.box(154 + i * 98, fill, 94, 32, f"64 rows\nstage {i % 4}", fill=green, size=10)
    for turn in range(3):
        x = 250 + turn * 198
        for y in (one, two):
            c.box(x, y, 190, 24, f"WGMMA of turn {turn}: 128 rows", fill=blue, size=10)
            c.box(x, y + 26, 120, 20, f"coefficients of turn {turn + 1}", fill=orange, size=9)
    c.box(154, one + 26, 90, 20, "turn 0", fill=orange, size=9)
    c.box(154, two + 26, 90, 20, "turn 0", fill=orange, size=9)
    c.line((248, fill + 32), (262, one), arrow=True)
    c.text(268, fill + 48, "FULL: the rows have arrived", size=10, muted=True)
    c.line((446, one), (456, fill + 32), arrow=True)
    c.text(462, fill + 48, "EMPTY: the stage may be refilled", size=10, muted=True)
    c.note(
        276,
        "gathered: a unit is 128 tokens by 256 columns, a turn is 128 neurons of the tile's list. weight_grad: a unit "
        "is 64 neurons by 256 columns, a turn is 128 tokens. The mma groups scatter the entries of a turn into a tile "
        "in shared memory, which WGMMA reads.",
    )
    return c.done()


FIGURES: dict[str, Callable[[Theme], str]] = {
    "format": format_,
    "gate_pack": gate_pack,
    "pipeline": pipeline,
    "gathered": gathered,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a file is out of date")
    check = parser.parse_args().check
    stale = []
    for name, draw in FIGURES.items():
        for theme in THEMES:
            path, drawn = FOLDER / f"{name}-{theme.name}.svg", draw(theme)
            if not check:
                path.write_text(drawn, encoding="utf-8")
            elif not path.exists() or path.read_text(encoding="utf-8") != drawn:
                stale.append(path.name)
    if stale:
        print(f"out of date: {', '.join(stale)}; run python docs/figures/draw.py", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
