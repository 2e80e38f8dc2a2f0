"""Drawings as SVG that takes its colours from the page, and so is dark or light with it."""

import io
import logging
import re
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from minitransformer.report.reading import Map

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # no word about its font cache

WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 4.6, 2.5, 0.105, 0.98, 0.1, 0.965  # inches, and fractions of them
POINTS = 2000  # of all lines of a chart together, about
COLOURS = 8  # of lines; the page gives them, and dashes tell more lines apart
# What matplotlib is told to draw with, and what the page draws with instead.
METADATA = ("Creator", "Date", "Format", "Type")  # left out
INK, GRID = "#00000a", "#00000b"
CSS = {INK: "var(--muted)", GRID: "var(--rule)"} | {f"#0000f{i}": f"var(--c{i})" for i in range(COLOURS)}
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "minitransformer",  # the same drawing is the same bytes
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.6,
    "lines.solid_joinstyle": "round",
}


@dataclass
class Line:
    """x, y: (n,). number: says its colour. points: mark each one."""

    name: str
    x: np.ndarray
    y: np.ndarray
    number: int = 0
    points: bool = False

    def thinned(self, n: int) -> "Line":
        """About n of the points, if there are more: the lowest and the highest of each stretch, and both ends."""
        if len(self.x) <= n:
            return self
        stretches = np.array_split(np.arange(len(self.x)), max(1, n // 2))
        extremes = (stretch[pick(self.y[stretch])] for stretch in stretches for pick in (np.argmin, np.argmax))
        kept = np.unique([0, *extremes, len(self.x) - 1])
        return replace(self, x=self.x[kept], y=self.y[kept])


@dataclass
class Chart:
    """An SVG, and what the page needs to name the points under the pointer."""

    title: str
    lines: list[Line]
    svg: str = ""
    hover: dict[str, Any] = field(default_factory=dict)


def chart(title: str, lines: list[Line], over: str = "step", log: bool = False) -> Chart:
    """Curves over steps or tokens. log: the y axis, where all values are above 0."""
    lines = [line.thinned(POINTS // len(lines)) for line in lines if len(line.x)]
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, HEIGHT))
        axes = figure.add_axes((LEFT, BOTTOM, RIGHT - LEFT, TOP - BOTTOM))
        for line in lines:
            style = dict(color=f"#0000f{line.number % COLOURS}", linestyle=("-", "--", ":")[line.number // COLOURS % 3])
            axes.plot(line.x, line.y, marker="o" if line.points or len(line.x) == 1 else None, markersize=3, **style)
        if log and all((line.y > 0).all() for line in lines):
            axes.set_yscale("log", subs=(2, 3, 5))
            axes.yaxis.set_minor_formatter(_short)
        else:
            axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(_short)
        axes.margins(x=0.01)
        svg, limits = to_svg(figure), axes.get_xlim()
    hover = {"left": LEFT, "right": RIGHT, "from": limits[0], "to": limits[1], "over": over}
    hover["lines"] = [
        {"name": line.name, "x": line.x.astype(int).tolist(), "y": [float(f"{y:.6g}") for y in line.y]}
        for line in lines
    ]
    return Chart(title, lines, svg, hover)


def _short(value: float, _) -> str:
    """12,000 -> 12k, and small numbers as they are."""
    return EngFormatter(sep="")(value) if abs(value) >= 1000 else f"{value:g}"


def attention_map(found: Map, names: list[str]) -> str:
    """One head's weights as squares, as strong as the root of the weight; queries from the top, keys from the left."""
    n = len(names)
    with rc_context(STYLE | {"axes.grid": False, "axes.spines.bottom": False}):
        figure = Figure(figsize=(3.4, 3.4))
        axes = figure.add_axes((0.17, 0.01, 0.82, 0.82))
        # One colour, more or less opaque: it suits a dark page and a light one.
        pixels = np.zeros((n, n, 4))
        pixels[..., :3], pixels[..., 3] = (0.26, 0.45, 0.9), found.weights.clamp(0, 1).sqrt().numpy()
        axes.imshow(pixels, interpolation="none", aspect="auto")
        labels = [name if len(name) <= 7 else name[:6] + "…" for name in names]
        text = dict(fontsize=7.5, parse_math=False)  # dollars are dollars
        axes.xaxis.tick_top()
        axes.set_xticks(range(n), labels, rotation=90, **text)
        axes.set_yticks(range(n), labels, **text)
        return to_svg(figure)


def to_svg(figure: Figure) -> str:
    """The bare element, coloured by the page's variables."""
    file = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # which its own font lacks; the browser's do not
        figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(METADATA))
    text = file.getvalue()
    text = re.sub(r"(?<=: )#0000[0-9a-f]{2}", lambda found: CSS.get(found[0], found[0]), text[text.index("<svg") :])
    text = re.sub(r"<svg [^>]*?(viewBox=\"[^\"]+\")[^>]*>", r"<svg \1 aria-hidden='true'>", text, count=1)
    return re.sub(r' id="(?!p[0-9a-f]{10}|m[0-9a-f]{10}|image)[^"]*"', "", text)
