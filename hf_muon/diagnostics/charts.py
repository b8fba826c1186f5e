"""Charts of a page, drawn by plotly. The page does not use the network."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

Line = Sequence[tuple[float, float]]
"""Points ``(x, y)`` with x ascending."""
Cells = Mapping[tuple[str, str], float]
"""Values of a table, by row and column."""


class Band(NamedTuple):
    """A range of y that a chart shades, and its description for the note below the title."""

    low: float
    high: float
    name: str


# A line is about as many pixels wide, and the page stays small for long runs.
_MOST_POINTS = 500
# Okabe and Ito's palette, distinguishable with any colour vision; more lines repeat it dashed.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
# Grey on a transparent background is legible on light and dark pages. The tool bar takes the upper 28 pixels.
_LAYOUT = {
    "template": "none",
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"color": "#808894", "size": 12},
    "margin": {"l": 48, "r": 8, "t": 28, "b": 40},
    "legend": {"orientation": "h", "y": -0.3},
    "hoverlabel": {"bgcolor": "#ffffff", "font": {"color": "#1d2129"}},
}
_AXIS = {"gridcolor": "rgba(128,136,148,.25)", "zeroline": False, "automargin": True}
_BAND = "rgba(0,158,115,.16)"
# Below the middle blue, above it orange.
_SCALE = [[0, "rgba(0,114,178,.65)"], [0.5, "rgba(128,136,148,.06)"], [1, "rgba(213,94,0,.65)"]]


def _figure(title: str, note: str, panels: Sequence[str], *, below: bool) -> Figure:
    """Return an empty figure with a panel for each name, in a row or a column."""
    rows, columns = (len(panels), 1) if below else (1, len(panels))
    titles = [html.escape(name) for name in panels] if len(panels) > 1 else None
    grid = make_subplots(
        rows, columns, shared_xaxes=True, shared_yaxes=True, subplot_titles=titles, horizontal_spacing=0.05
    )
    grid.update_layout(**_LAYOUT, meta={"title": title, "note": note, "columns": columns, "wide": below or columns > 1})
    if titles:
        grid.update_layout(margin_t=54).update_annotations(font_size=12)
    return grid


def line_chart(
    title: str,
    panels: Mapping[str, Mapping[str, Line]],
    *,
    unit: str,
    note: str = "",
    log: bool = False,
    band: Band | None = None,
) -> Figure | None:
    """Draw lines over steps in a row of panels with equal axes; None if there is nothing to draw.

    Args:
        title: heading above the chart.
        panels: lines by name, of each panel by its name. Lines of one name have one colour.
        unit: title of the y axis.
        note: text below the title.
        log: draw a logarithmic y axis, without values that are not positive.
        band: range of y to shade.
    """
    drawn = {
        panel: {name: points for name, line in lines.items() if (points := _thinned(line, log))}
        for panel, lines in panels.items()
    }
    names = list(dict.fromkeys(name for lines in drawn.values() for name in lines))
    if not names:
        return None
    figure = _figure(title, " · ".join(filter(None, (note, band and band.name))), list(drawn), below=False)
    for column, lines in enumerate(drawn.values(), 1):
        for name, line in lines.items():
            i = names.index(name)
            figure.add_scatter(
                x=[x for x, _ in line],
                y=[float(f"{y:.5g}") for _, y in line],
                name=html.escape(name),
                legendgroup=name,
                showlegend=all(trace.legendgroup != name for trace in figure.data),
                mode="lines" if len(line) > 1 else "markers",
                line={"color": _COLOURS[i % len(_COLOURS)], "dash": "dash" if i >= len(_COLOURS) else "solid"},
                row=1,
                col=column,
            )
    figure.update_layout(height=320, hovermode="x unified", showlegend=True)
    figure.update_xaxes(**_AXIS, title="step")
    figure.update_yaxes(**_AXIS, type="log" if log else "linear", exponentformat="power")
    figure.update_yaxes(title=unit, col=1)
    if band is not None:
        figure.add_hrect(y0=band.low, y1=band.high, fillcolor=_BAND, line_width=0, layer="below", row=1, col="all")
    return figure


def heat_map(title: str, panels: Mapping[str, Cells], *, per: float = 1.0, note: str = "") -> Figure | None:
    """Draw tables with values below the median in blue and above it in orange; None without values.

    Colours show the ratio to the median. The scale spans at least 0.5x to 2x, so that noise stays pale.

    Args:
        title: heading above the tables.
        panels: values by row and column, of each table by its name; positive values get a colour.
        per: unit of the values.
        note: text below the title.
    """
    positive = [value for cells in panels.values() for value in cells.values() if value > 0]
    if not positive:
        return None
    middle = statistics.median(positive)
    # In powers of two: 0.5x to 2x at least, and 1/64 to 64x at most, so that one outlier does not make all others pale.
    span = min(max(1.0, *(abs(math.log2(value / middle)) for value in positive)), 6.0)
    figure = _figure(title, note, list(panels), below=True)
    height = 110
    for number, cells in enumerate(panels.values(), 1):
        rows = sorted({row for row, _ in cells}, key=int)
        columns = list(dict.fromkeys(column for _, column in cells))
        height += 40 + 24 * max(len(rows), 3)
        figure.add_heatmap(
            x=[html.escape(column) for column in columns],
            y=[f"layer {row}" for row in rows],
            z=[[math.log2(v / middle) if (v := cells.get((row, c), 0)) > 0 else None for c in columns] for row in rows],
            text=[[f"{cells[row, c] / per:.3g}" if (row, c) in cells else "" for c in columns] for row in rows],
            texttemplate="%{text}",
            hovertemplate="%{y}, %{x}: %{text}<extra></extra>",
            coloraxis="coloraxis",
            hoverongaps=False,
            name="",
            row=number,
            col=1,
        )
    colours = {"cmin": -span, "cmax": span, "colorscale": _SCALE, "showscale": False}
    figure.update_layout(height=height, coloraxis=colours)
    figure.update_xaxes(**_AXIS)
    figure.update_yaxes(**_AXIS, autorange="reversed")
    return figure


def page(title: str, head: str, figures: Sequence[Figure | None]) -> str:
    """Return a complete HTML document, about 5 MB, most of which is plotly's own script.

    Args:
        title: the heading of the document.
        head: HTML between the title and the charts.
        figures: charts; None is left out.
    """
    charts = "".join(_section(figure) for figure in figures if figure is not None)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><h1>{html.escape(title)}</h1>{head}<main>{charts}</main>"
        # Each chart is drawn before its neighbours exist, so it is too wide until the window is resized.
        '<script>addEventListener("load", () => dispatchEvent(new Event("resize")))</script></body></html>\n'
    )


def _section(figure: Figure) -> str:
    meta = figure.layout.meta
    chart = figure.to_html(full_html=False, include_plotlyjs=False, config={"responsive": True, "displaylogo": False})
    return (
        f"<figure{' class=wide' if meta['wide'] else ''}><h2>{html.escape(meta['title'])}</h2>"
        f'<p class="note">{html.escape(meta["note"])}</p>'
        f'<div class="scroll"><div style="min-width:{300 * meta["columns"]}px">{chart}</div></div></figure>'
    )


def _thinned(line: Line, log: bool) -> list[tuple[float, float]]:
    """Return at most `_MOST_POINTS` points: means of neighbours, each at the last one's x."""
    line = [point for point in line if not log or point[1] > 0]
    size = max(-(-len(line) // _MOST_POINTS), 1)
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
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));gap:2rem}
section{margin:0 0 1.6rem}figure{margin:0;min-width:0}figure.wide{grid-column:1/-1}
.note{color:var(--soft);margin:0 0 .3rem;min-height:1.4em;font-size:.87rem}
ul{list-style:none;margin:0;padding:0}li{border-left:4px solid;padding:.1rem 0 .1rem .7rem;margin:.4rem 0}
.good{border-color:var(--good)}.look{border-color:var(--look)}.bad{border-color:var(--bad)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.87rem}
td,th{text-align:left;vertical-align:top;padding:.15rem 1rem .15rem 0;border-bottom:1px solid var(--line);
font-weight:normal}
th{color:var(--soft);white-space:nowrap}
.heatmap-label text{fill:var(--ink)!important}
"""
