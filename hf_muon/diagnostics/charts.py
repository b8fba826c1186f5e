"""Charts of a page, drawn by plotly. The page needs no network."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from plotly import graph_objects as graphs
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

Line = Sequence[tuple[float, float]]
"""Points ``(x, y)`` with x ascending."""
Chart: TypeAlias = "Figure | None"
"""A chart; None where there is nothing to draw."""


class Band(NamedTuple):
    """A range of y that a chart shades.

    Attributes:
        low, high: its ends.
        name: what it is, for the note below the title.
    """

    low: float
    high: float
    name: str


class Cells(NamedTuple):
    """The values of a heat map.

    Attributes:
        rows, columns: names.
        values: by row and column; a missing one leaves its cell empty.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    values: Mapping[tuple[str, str], float]


_MOST_POINTS = 500
# Okabe and Ito's palette, distinguishable with any colour vision; more lines repeat it dashed.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
# Grey on a transparent ground reads on light and dark pages.
_LAYOUT = {
    "template": "none",
    "colorway": _COLOURS,
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"color": "#808894", "size": 12},
    "margin": {"l": 48, "r": 8, "t": 10, "b": 40},
    "legend": {"orientation": "h", "y": -0.3},
    "hovermode": "x unified",
    "hoverlabel": {"bgcolor": "#ffffff", "font": {"color": "#1d2129"}},
    "showlegend": True,
}
_AXIS = {"gridcolor": "rgba(128,136,148,.25)", "zeroline": False, "automargin": True}
_BAND = "rgba(0,158,115,.16)"
_MARK = {"symbol": "triangle-down", "size": 9, "color": "#d55e00"}
# Below the middle blue, above it orange.
_SCALE = [[0, "rgba(0,114,178,.65)"], [0.5, "rgba(128,136,148,.06)"], [1, "rgba(213,94,0,.65)"]]
_LEAST_SPAN, _MOST_SPAN = 1.0, 6.0  # of colours around the median, as powers of 2


def line_chart(
    title: str,
    lines: Mapping[str, Line],
    *,
    unit: str,
    note: str = "",
    log: bool = False,
    band: Band | None = None,
    marks: Mapping[str, Line] | None = None,
) -> Chart:
    """Draw lines over steps; None if there is nothing to draw.

    Args:
        title: heading above the chart.
        lines: by name; empty ones are left out.
        unit: title of the y axis.
        note: text below the title.
        log: draw a logarithmic y axis, without values that are not positive.
        band: range of y to shade; the axis shows it, too.
        marks: points to mark, by name.
    """
    points = {name: _thinned([p for p in line if not log or p[1] > 0]) for name, line in lines.items()}
    points = {name: line for name, line in points.items() if line}
    if not points:
        return None
    figure = Figure()
    for i, (name, line) in enumerate(points.items()):
        figure.add_scatter(
            x=[x for x, _ in line],
            y=[float(f"{y:.5g}") for _, y in line],
            name=html.escape(name),
            mode="lines" if len(line) > 1 else "markers",
            line={"dash": "dash" if i >= len(_COLOURS) else "solid"},
        )
    for name, marked in (marks or {}).items():
        if marked:
            x, y = zip(*marked, strict=True)
            figure.add_scatter(x=x, y=y, name=html.escape(name), mode="markers", marker=_MARK)
    about = " · ".join(text for text in (note, band and band.name) if text)
    figure.update_layout(**_LAYOUT, height=320, meta={"title": title, "note": about})
    figure.update_xaxes(**_AXIS, title="step")
    figure.update_yaxes(**_AXIS, title=unit, type="log" if log else "linear", exponentformat="power")
    values = [y for line in points.values() for _, y in line] + list(band[:2] if band else ())
    if log:
        is_long = max(values) > 50 * min(values)
        figure.update_yaxes(**{"dtick": 1} if is_long else {"dtick": "D2", "tickformat": ".1g"})
    if band is not None:
        figure.add_hrect(y0=band.low, y1=band.high, fillcolor=_BAND, line_width=0, layer="below")
        figure.update_yaxes(range=_range(min(values), max(values), log=log))
    return figure


def _range(low: float, high: float, *, log: bool) -> list[float]:
    """Return the ends of an axis that shows two values, a little apart from them."""
    low, high = (math.log10(low), math.log10(high)) if log else (low, high)
    room = 0.06 * (high - low)
    return [low - room, high + room]


def share_axis(figures: Sequence[Chart]) -> None:
    """Give line charts of the same title the same range of y, in place."""
    drawn = [figure for figure in figures if figure is not None and figure.data[0].type == "scatter"]
    if len(drawn) < 2:
        return
    log = drawn[0].layout.yaxis.type == "log"
    values = [y for figure in drawn for line in figure.data for y in line.y]
    values += [y for figure in drawn for band in figure.layout.shapes for y in (band.y0, band.y1)]
    for figure in drawn:
        figure.update_yaxes(range=_range(min(values), max(values), log=log))


def heat_map(title: str, cells: Cells, *, per: float = 1.0, note: str = "", others: Sequence[Cells] = ()) -> Chart:
    """Draw a table whose cells are blue below the median and orange above it; None without values.

    Colours stand for ratios to the median. Their scale reaches at least from half to twice the median, so that noise
    stays pale.

    Args:
        title: heading above the table.
        cells: rows, columns and values; positive values get a colour.
        per: unit of the numbers in the cells.
        note: text below the title.
        others: cells of all maps that have the same colours, these among them.
    """
    positive = [value for own in (others or [cells]) for value in own.values.values() if value > 0]
    if not cells.values or not positive:
        return None
    middle = statistics.median(positive)
    ratios = {key: math.log2(value / middle) for key, value in cells.values.items() if value > 0}
    span = min(max(_LEAST_SPAN, *(abs(math.log2(value / middle)) for value in positive)), _MOST_SPAN)
    keys = [[(row, column) for column in cells.columns] for row in cells.rows]
    figure = Figure(
        graphs.Heatmap(
            x=[html.escape(column) for column in cells.columns],
            y=[f"layer {row}" for row in cells.rows],
            z=[[ratios.get(key) for key in row] for row in keys],
            text=[[f"{cells.values[key] / per:.3g}" if key in cells.values else "" for key in row] for row in keys],
            texttemplate="%{text}",
            hovertemplate="%{y}, %{x}: %{text}<extra></extra>",
            zmin=-span,
            zmax=span,
            colorscale=_SCALE,
            colorbar={
                "orientation": "h",
                "thickness": 10,
                "y": -0.02,
                "yanchor": "top",
                "tickvals": [-0.96 * span, 0, 0.96 * span],
                "ticktext": [f"1/{2**span:.3g}", f"median {middle / per:.3g}", f"{2**span:.3g} times"],
                "outlinewidth": 0,
            },
            hoverongaps=False,
            name="",
        )
    )
    figure.update_layout(**{**_LAYOUT, "hovermode": "closest"}, height=170 + 24 * max(len(cells.rows), 3))
    figure.update_layout(meta={"title": title, "note": note})
    figure.update_xaxes(**_AXIS, side="top")
    figure.update_yaxes(**_AXIS, autorange="reversed")
    return figure


def page(title: str, head: str, grids: Sequence[Sequence[Chart]]) -> str:
    """Return a complete HTML document, about 5 MB, most of which is plotly's own script.

    Args:
        title: of the document.
        head: HTML between the title and the charts.
        grids: charts, each list in a grid of its own; None is left out.
    """
    sections = ["".join(_section(figure) for figure in figures if figure is not None) for figures in grids]
    charts = "".join(f"<div class=grid>{charts}</div>" for charts in sections if charts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><h1>{html.escape(title)}</h1>{head}<main>{charts}</main>"
        # Each chart is drawn before the ones beside it exist, and too wide until the window is resized.
        '<script>addEventListener("load", () => dispatchEvent(new Event("resize")))</script></body></html>\n'
    )


def _section(figure: Figure) -> str:
    about = figure.layout.meta
    wide = ' class="wide"' if figure.data[0].type == "heatmap" else ""
    chart = figure.to_html(full_html=False, include_plotlyjs=False, config={"responsive": True, "displaylogo": False})
    return (
        f'<figure{wide}><h2>{html.escape(about["title"])}</h2><p class="note">{html.escape(about["note"])}</p>'
        f"{chart}</figure>"
    )


def _thinned(line: Line) -> list[tuple[float, float]]:
    """Return at most `_MOST_POINTS` points: means of neighbours, each at the last one's x."""
    size = -(-len(line) // _MOST_POINTS)
    if size <= 1:
        return list(line)
    groups = [line[i : i + size] for i in range(0, len(line), size)]
    return [(group[-1][0], math.fsum(y for _, y in group) / len(group)) for group in groups]


_STYLE = """
:root{--ink:#1d2129;--soft:#5c6675;--line:#d9dde3;--paper:#fff;--good:#00734f;--look:#a86a00;--bad:#b5400a;
color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ec;--soft:#98a1b0;--line:#363b45;--paper:#16181d;--good:#3cc794;
--look:#e6a93a;--bad:#ff8a50}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1400px;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.4rem;margin:0 0 .6rem}h2{font-size:1rem;margin:0 0 .2rem}
.grid{display:grid;margin:0 0 2rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));gap:2rem}
section{margin:0 0 1.6rem}figure{margin:0;min-width:0;overflow:hidden}figure.wide{grid-column:1/-1}
.note{color:var(--soft);margin:0 0 .3rem;min-height:1.4em;font-size:.87rem}
ul{list-style:none;margin:0;padding:0}li{border-left:4px solid;padding:.1rem 0 .1rem .7rem;margin:.4rem 0}
.good{border-color:var(--good)}.look{border-color:var(--look)}.bad{border-color:var(--bad)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.87rem}
td,th{text-align:left;vertical-align:top;padding:.15rem 1rem .15rem 0;border-bottom:1px solid var(--line);
font-weight:normal}
th{color:var(--soft);white-space:nowrap}td.differs{font-weight:600}td{overflow-wrap:anywhere}
td.number{text-align:right;white-space:nowrap}
.heatmap-label text{fill:var(--ink)!important}
@media(max-width:600px){body{margin:1rem auto;padding:0 .7rem}.facts th,.facts.one td{display:block;border:0;
padding-bottom:0}.facts.one tr{display:block;border-bottom:1px solid var(--line);padding:.2rem 0}}
"""
