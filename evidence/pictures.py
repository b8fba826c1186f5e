"""Line charts in small panels, as SVG that reads on light and dark pages."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

# Colours of Okabe and Ito.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
_DASHES = ("none", "5 3", "1.5 2")  # the colours come round with another one
_INK = "#808894"
_WIDTH, _HEIGHT = 300, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 24, 36
_ACROSS = 3

Panels = Mapping[str, Mapping[str, Mapping[float, float]]]
"""By title: lines by name: y by x."""


def curves_picture(panels: Panels, sides: Sequence[str]) -> str:
    """Draw held-out losses by step, a panel for each cell, without the first fifth, whose losses are far higher."""
    late = {
        title: {name: {x: y for x, y in line.items() if x >= 0.2 * max(line)} for name, line in lines.items()}
        for title, lines in panels.items()
    }
    return picture(late, sides, "step", "test loss", log=False)


def rates_picture(panels: Panels, sides: Sequence[str]) -> str:
    """Draw the best validation loss at each learning rate, a panel for each cell."""
    return picture(panels, sides, "learning rate", "validation loss", log=True)


def forgetting_picture(panels: Panels, sides: Sequence[str]) -> str:
    """Draw the validation loss of new text by the change on old text, a panel for each cell, a point for each rate."""
    return picture(panels, sides, "change on old text", "validation loss", log=False)


def picture(panels: Panels, names: Sequence[str], x_title: str, y_title: str, *, log: bool) -> str:
    """Return an SVG document.

    Args:
        panels: by title.
        names: all lines, in the order of the legend.
        x_title: below each panel.
        y_title: title of the y axis of each panel.
        log: draw x on a logarithmic axis.
    """
    drawn = [name for name in names if any(name in lines for lines in panels.values())]
    strokes = {
        name: f'color="{colour}" stroke="{colour}" stroke-dasharray="{dashes}"'
        for name, (dashes, colour) in zip(drawn, itertools.cycle(itertools.product(_DASHES, _COLOURS)), strict=False)
    }
    columns = min(_ACROSS, len(panels))
    legend_columns = max(1, columns * _WIDTH // 220)
    rows, legend_rows = -(-len(panels) // columns), -(-len(drawn) // legend_columns)
    height = rows * _HEIGHT + 18 * legend_rows + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{columns * _WIDTH}" height="{height}" '
        f'viewBox="0 0 {columns * _WIDTH} {height}" font-family="sans-serif" font-size="10" fill="{_INK}">'
    ]
    for i, (title, lines) in enumerate(panels.items()):
        shift = f"translate({i % columns * _WIDTH},{i // columns * _HEIGHT})"
        parts.append(f'<g transform="{shift}">{_panel(title, lines, strokes, x_title, y_title, log)}</g>')
    for i, name in enumerate(drawn):
        x, y = 46 + i % legend_columns * 220, rows * _HEIGHT + 14 + 18 * (i // legend_columns)
        parts.append(f'<path d="M{x} {y - 4}h18" {strokes[name]} stroke-width="2"/>')
        parts.append(f'<text x="{x + 24}" y="{y}">{html.escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(
    title: str,
    lines: Mapping[str, Mapping[float, float]],
    strokes: Mapping[str, str],
    x_title: str,
    y_title: str,
    log: bool,
) -> str:
    points = [point for line in lines.values() for point in line.items()]
    scale: Callable[[float], float] = math.log10 if log else float
    x_of = _axis([scale(x) for x, _ in points], _LEFT, _WIDTH - _RIGHT)
    y_of = _axis([y for _, y in points], _HEIGHT - _BOTTOM, _TOP)
    parts = [f'<text x="{_LEFT}" y="14" font-size="11" font-weight="bold">{html.escape(title)}</text>']
    for y in _ticks([y for _, y in points]):
        parts.append(f'<path d="M{_LEFT} {y_of(y):.1f}H{_WIDTH - _RIGHT}" stroke="{_INK}" stroke-opacity=".25"/>')
        parts.append(f'<text x="{_LEFT - 4}" y="{y_of(y) + 3:.1f}" text-anchor="end">{y:g}</text>')
    shown = sorted({x for x, _ in points}) if log else _ticks([x for x, _ in points])
    for x in shown[:: -(-len(shown) // 6)]:
        parts.append(f'<text x="{x_of(scale(x)):.1f}" y="{_HEIGHT - _BOTTOM + 13}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 9}" text-anchor="middle">{x_title}</text>')
    parts.append(f'<text transform="translate(10,{_HEIGHT / 2}) rotate(-90)" text-anchor="middle">{y_title}</text>')
    for name, line in lines.items():
        places = [(x_of(scale(x)), y_of(y)) for x, y in sorted(line.items())]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" {strokes[name]} stroke-width="1.6"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="currentColor" stroke-width="0" {strokes[name]}/>'
            for x, y in places
        ]
    return "".join(parts)


def _axis(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    """Return the map from values to pixels, with a little room at both ends."""
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or 0.5
    low, high = low - room, high + room
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _ticks(values: Sequence[float]) -> list[float]:
    """Return about four round numbers within the values."""
    low, high = min(values), max(values)
    if low == high:
        return [round(low, 4)]
    raw = (high - low) / 4
    power = 10 ** math.floor(math.log10(raw))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= raw)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
