"""Draws the figures of a page, in a light and a dark rendition."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gtpo_lightning.report.statistics import Band

__all__ = ["THEMES", "Line", "Style", "Theme", "curve_png", "renditions", "style_of", "sweep_png", "sweep_style"]

# Okabe and Ito's colours, told apart by colour-blind people, without their yellow, which vanishes on white; grey
# stands in for black.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A8A")
_DASHES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")


class Style(NamedTuple):
    """How a line is told from the others: colour and dash differ between any two of the first 28."""

    colour: str
    dash: str
    marker: str


class Theme(NamedTuple):
    """Colours of paper and ink."""

    paper: str
    ink: str
    grid: str


THEMES = {"light": Theme("#ffffff", "#1f2328", "#d8dde3"), "dark": Theme("#161b22", "#d5dbe3", "#3a424d")}


class Line(NamedTuple):
    """A named line with its band; without `banded` there is one seed."""

    name: str
    style: Style
    band: Band
    banded: bool


def style_of(index: int) -> Style:
    """The style of the variant with this number, the same in all figures."""
    return Style(
        _COLOURS[index % len(_COLOURS)],
        _DASHES[index // len(_COLOURS) % len(_DASHES)],
        _MARKERS[index % len(_MARKERS)],
    )


def sweep_style(index: int, count: int) -> Style:
    """The style of a value of a sweep: from dark blue to yellow, in order and by lightness too."""
    share = 0.15 + 0.7 * index / max(count - 1, 1)
    colour = matplotlib.colors.to_hex(matplotlib.colormaps["viridis"](share))
    return Style(colour, "-", _MARKERS[index % len(_MARKERS)])


def curve_png(title: str, xlabel: str, lines: Sequence[Line], theme: Theme, *, log: bool = False) -> bytes:
    """Lines with bands over steps (or over k, on a logarithmic axis), the legend below.

    Args:
        title: What is drawn, with its unit.
        xlabel: Below the axis.
        lines: At least one.
        theme: Colours.
        log: Whether the axis is that of k.
    """
    figure, panel = _figure(title, xlabel, theme, len(lines))
    for line in lines:
        _draw(panel, line)
    if log:
        panel.set_xscale("log", base=2)
        ks = sorted({int(k) for line in lines for k in line.band.steps})
        ticks = [k for k in ks if k & (k - 1) == 0 or k == ks[-1]]
        panel.set_xticks(ticks, labels=[str(k) for k in ticks])
        panel.minorticks_off()
    _legend(figure, panel, theme, len(lines))
    return _png(figure)


def sweep_png(title: str, key: str, values: Sequence[str], seeds: Sequence[Sequence[float]], theme: Theme) -> bytes:
    """A score over the values of a sweep, evenly spaced: each seed a point, the means a line."""
    figure, panel = _figure(title, key, theme, 1)
    colour = _COLOURS[0]
    for place, points in enumerate(seeds):
        panel.plot([place] * len(points), points, "o", color=colour, alpha=0.45, markersize=5, linestyle="none")
    drawn = [(place, sum(points) / len(points)) for place, points in enumerate(seeds) if points]
    panel.plot(*zip(*drawn, strict=True), color=colour, linewidth=1.8, label="mean over seeds")
    panel.set_xticks(range(len(values)), labels=list(values))
    panel.set_xlim(-0.4, len(values) - 0.6)
    _legend(figure, panel, theme, 1)
    return _png(figure)


def _figure(title: str, xlabel: str, theme: Theme, lines: int) -> tuple[Figure, Axes]:
    rows = -(-lines // _columns(lines))
    figure = Figure(figsize=(5.6, 3.5 + 0.24 * rows), dpi=110, layout="constrained", facecolor=theme.paper)
    panel = figure.subplots()
    panel.set_facecolor(theme.paper)
    panel.set_title(title, fontsize=12, color=theme.ink, loc="left")
    panel.set_xlabel(xlabel, fontsize=11, color=theme.ink)
    panel.grid(color=theme.grid, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(colors=theme.ink, labelsize=10.5)
    for name, spine in panel.spines.items():
        spine.set_color(theme.grid)
        spine.set_visible(name in ("left", "bottom"))
    return figure, panel


def _draw(panel: Axes, line: Line) -> None:
    drawn = line.band
    few = len(drawn.steps) <= 24
    panel.plot(
        drawn.steps,
        drawn.means,
        color=line.style.colour,
        linestyle=line.style.dash,
        marker=line.style.marker if few else None,
        markersize=4.5,
        linewidth=1.8,
        label=line.name,
    )
    if line.banded and len(drawn.steps) > 1:
        panel.fill_between(drawn.steps, drawn.lows, drawn.highs, color=line.style.colour, alpha=0.15, linewidth=0)


def _columns(lines: int) -> int:
    return 3 if lines > 4 else 2


def _legend(figure: Figure, panel: Axes, theme: Theme, lines: int) -> None:
    handles, labels = panel.get_legend_handles_labels()
    legend = figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=_columns(lines),
        fontsize=9.5,
        frameon=False,
        handlelength=2.6,
    )
    for text in legend.get_texts():
        text.set_color(theme.ink)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor=figure.get_facecolor())
    return buffer.getvalue()


def renditions(draw: Callable[[Theme], bytes]) -> dict[str, bytes]:
    """A figure in every theme."""
    return {name: draw(theme) for name, theme in THEMES.items()}
