"""Charts of a page, drawn by plotly, which is imported when a chart is drawn. The page needs no network."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Line = Sequence[tuple[float, float]]
"""Points ``(x, y)`` with x ascending."""

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
    "margin": {"l": 62, "r": 12, "t": 10, "b": 40},
    "legend": {"orientation": "h", "y": -0.3},
    "hovermode": "x unified",
    "hoverlabel": {"bgcolor": "#ffffff", "font": {"color": "#1d2129"}},
    "showlegend": True,
}
_AXIS = {"gridcolor": "rgba(128,136,148,.25)", "zeroline": False, "automargin": True}
_CONFIG = {"responsive": True, "displaylogo": False}


def plotly() -> Any:
    """Return plotly's `graph_objects`.

    Raises:
        RuntimeError: plotly is not installed.
    """
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise RuntimeError(
            "hf-muon report draws its charts with plotly, which is not installed. Run: pip install 'hf_muon[report]'. "
            "hf-muon report --json prints the last numbers without it"
        ) from error
    return graph_objects


def line_chart(
    title: str, lines: Mapping[str, Line], *, unit: str = "", note: str = "", log: bool = False
) -> Figure | None:
    """Draw lines over steps; None if there is nothing to draw.

    Args:
        title: heading above the chart.
        lines: by name; empty ones are left out.
        unit: unit of y.
        note: text below the title.
        log: draw a logarithmic y axis, without values that are not positive.
    """
    points = {name: _thinned([p for p in line if not log or p[1] > 0]) for name, line in lines.items()}
    points = {name: line for name, line in points.items() if line}
    if not points:
        return None
    graphs = plotly()
    figure = graphs.Figure()
    for i, (name, line) in enumerate(points.items()):
        figure.add_scatter(
            x=[x for x, _ in line],
            y=[float(f"{y:.5g}") for _, y in line],
            name=html.escape(name),
            mode="lines" if len(line) > 1 else "markers",
            line={"dash": "dash" if i >= len(_COLOURS) else "solid"},
        )
    about = " · ".join(text for text in (unit, note) if text)
    figure.update_layout(**_LAYOUT, height=320, meta={"title": title, "note": about})
    figure.update_xaxes(**_AXIS, title="step")
    figure.update_yaxes(**_AXIS, type="log" if log else "linear", exponentformat="power")
    return figure


def heat_map(
    title: str, rows: Sequence[str], columns: Sequence[str], values: Mapping[tuple[str, str], float], *, note: str = ""
) -> Figure | None:
    """Draw a table whose cells are darker the larger their values are; None without values.

    Args:
        title: heading above the table.
        rows, columns: their names.
        values: by row and column; a missing one leaves its cell empty.
        note: text below the title.
    """
    if not values:
        return None
    graphs = plotly()
    figure = graphs.Figure(
        graphs.Heatmap(
            x=[html.escape(column) for column in columns],
            y=[f"layer {row}" for row in rows],
            z=[[values.get((row, column)) for column in columns] for row in rows],
            texttemplate="%{z:.3g}",
            colorscale=[[0, "rgba(213,94,0,.03)"], [1, "rgba(213,94,0,.6)"]],
            hoverongaps=False,
            name="",
        )
    )
    figure.update_layout(**{**_LAYOUT, "hovermode": "closest"}, height=90 + 24 * max(len(rows), 3))
    figure.update_layout(meta={"title": title, "note": note})
    figure.update_xaxes(**_AXIS, side="top")
    figure.update_yaxes(**_AXIS, autorange="reversed")
    return figure


def page(title: str, facts: Mapping[str, str], figures: Sequence[Figure | None]) -> str:
    """Return a complete HTML document, about 5 MB, most of which is plotly's own script."""
    from plotly.offline import get_plotlyjs

    rows = "".join(f"<dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd>" for key, value in facts.items())
    charts = "".join(_section(figure) for figure in figures if figure is not None)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><h1>{html.escape(title)}</h1><dl>{rows}</dl><main>{charts}</main>"
        # Each chart is drawn before the ones beside it exist, and too wide until the window is resized.
        '<script>addEventListener("load", () => dispatchEvent(new Event("resize")))</script></body></html>\n'
    )


def _section(figure: Figure) -> str:
    about = figure.layout.meta
    wide = ' class="wide"' if figure.data[0].type == "heatmap" else ""
    chart = figure.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG)
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
:root{--ink:#1d2129;--soft:#667080;--paper:#fff;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ec;--soft:#98a1b0;--paper:#16181d}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1400px;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.4rem;margin:0 0 .6rem}h2{font-size:1rem;margin:0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem;margin:0 0 1.5rem}dt{color:var(--soft)}dd{margin:0}
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));gap:2rem}
figure{margin:0;min-width:0;overflow:hidden}figure.wide{grid-column:1/-1}
.note{color:var(--soft);margin:0 0 .3rem;min-height:1.4em;font-size:.87rem}
"""
