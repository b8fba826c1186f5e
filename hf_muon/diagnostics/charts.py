"""Line charts and tables of colours as SVG and HTML text, with nothing from outside the page."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence

Line = Sequence[tuple[float, float]]
"""Points ``(x, y)`` with x ascending."""

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 12, 30
_MOST_POINTS = 500
# Okabe and Ito's, told apart with any colour vision, then the same dashed.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")


def line_chart(title: str, lines: Mapping[str, Line], *, unit: str = "", note: str = "", log: bool = False) -> str:
    """A figure with a legend; values are shown where the pointer is.

    Args:
        title: above it.
        lines: by name; empty ones are left out.
        unit: of y.
        note: below the title.
        log: whether y is logarithmic; values that are not positive are left out.
    """
    kept = {name: _thinned([p for p in line if not log or p[1] > 0]) for name, line in lines.items()}
    kept = {name: line for name, line in kept.items() if line}
    if not kept:
        return ""
    xs = [x for line in kept.values() for x, _ in line]
    ys = [y for line in kept.values() for _, y in line]
    x_low, x_high = min(xs), max(xs)
    ticks = _log_ticks(min(ys), max(ys)) if log else _ticks(min(ys), max(ys))
    y_low, y_high = min(ticks[0], min(ys)), max(ticks[-1], max(ys))

    def across(x: float) -> float:
        return _LEFT + (x - x_low) / ((x_high - x_low) or 1) * (_WIDTH - _LEFT - _RIGHT)

    def up(y: float) -> float:
        low, high, at = (math.log(y_low), math.log(y_high), math.log(y)) if log else (y_low, y_high, y)
        return _HEIGHT - _BOTTOM - (at - low) / ((high - low) or 1) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    for tick in ticks:
        y = up(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_label(tick)}</text>')
    for tick in _ticks(x_low, x_high, 6):
        if x_low <= tick <= x_high:
            x = across(tick)
            parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{_label(tick)}</text>')
    legend, data = [], []
    for i, (name, line) in enumerate(kept.items()):
        colour, dash = _COLOURS[i % len(_COLOURS)], "5 3" if i >= len(_COLOURS) else "none"
        style = f'stroke="{colour}" stroke-dasharray="{dash}"'
        points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line)
        if len(line) == 1:
            x, y = line[0]
            parts.append(f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{colour}"/>')
        else:
            parts.append(f'<polyline class="line" points="{points}" {style}/>')
        legend.append(f'<li><svg viewBox="0 0 20 8"><line x1="0" x2="20" y1="4" y2="4" {style}/></svg>')
        legend.append(f"{html.escape(name)}</li>")
        data.append({"name": name, "points": [[round(across(x), 1), _round(x), _round(y)] for x, y in line]})
    parts.append(f'<line class="cursor" x1="0" x2="0" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" visibility="hidden"/></svg>')
    about = " · ".join(text for text in (unit, note) if text)
    return (
        f'<figure><h2>{html.escape(title)}</h2><p class="note">{html.escape(about)}</p>'
        f'<div class="plot">{"".join(parts)}<div class="tip" hidden></div></div>'
        f'<ul class="legend">{"".join(legend)}</ul>{_data(data)}</figure>'
    )


def colour_table(
    title: str, rows: Sequence[str], columns: Sequence[str], values: Mapping[tuple[str, str], float], *, note: str = ""
) -> str:
    """A table whose cells are the darker the larger their value is.

    Args:
        title: above it.
        rows, columns: their names.
        values: by row and column; where there is none the cell is empty.
        note: below the title.
    """
    if not values:
        return ""
    low, high = min(values.values()), max(values.values())
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = []
    for row in rows:
        cells = []
        for column in columns:
            value = values.get((row, column))
            if value is None:
                cells.append("<td></td>")
                continue
            strength = (value - low) / ((high - low) or 1)
            cells.append(f'<td style="--strength:{strength:.2f}">{_label(float(f"{value:.3g}"))}</td>')
        body.append(f"<tr><th>{html.escape(row)}</th>{''.join(cells)}</tr>")
    return (
        f'<figure class="wide"><h2>{html.escape(title)}</h2><p class="note">{html.escape(note)}</p>'
        f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div></figure>"
    )


def page(title: str, facts: Mapping[str, str], figures: Sequence[str]) -> str:
    """A whole HTML document that needs nothing else."""
    rows = "".join(f"<dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd>" for key, value in facts.items())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{html.escape(title)}</h1><dl>{rows}</dl><main>{''.join(filter(None, figures))}</main>"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _data(data: Sequence[object]) -> str:
    safe = json.dumps(data).replace("<", "\\u003c")  # nothing in a name may end the element
    return f'<script type="application/json">{safe}</script>'


def _thinned(line: Line) -> list[tuple[float, float]]:
    """At most so many points: each the mean of its neighbours, the last one at the end."""
    size = -(-len(line) // _MOST_POINTS)
    if size <= 1:
        return list(line)
    groups = [line[i : i + size] for i in range(0, len(line), size)]
    return [(group[-1][0], math.fsum(y for _, y in group) / len(group)) for group in groups]


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover a range."""
    if low == high:
        low, high = (low - abs(low) / 10, high + abs(high) / 10) if low else (0.0, 1.0)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    step = max(1, (last - first) // 6)
    return [10.0**i for i in range(first, max(last, first + 1) + 1, step)]


def _label(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:g}"
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def _round(value: float) -> float:
    return float(f"{value:.5g}")


_STYLE = """
:root{--ink:#1d2129;--soft:#667080;--paper:#fff;--rule:#e3e6eb;--warm:213,94,0;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ec;--soft:#98a1b0;--paper:#16181d;--rule:#2c3039}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1400px;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.4rem;margin:0 0 .6rem}h2{font-size:1rem;margin:0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem;margin:0 0 1.5rem}dt{color:var(--soft)}dd{margin:0}
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));gap:2rem}
figure{margin:0;min-width:0}figure.wide{grid-column:1/-1}
.note{color:var(--soft);margin:0 0 .3rem;min-height:1.4em;font-size:.87rem}
.plot{position:relative}svg{display:block;width:100%}text{font-size:11px;fill:var(--soft)}
.grid{stroke:var(--rule)}.line{fill:none;stroke-width:1.7;stroke-linejoin:round}.cursor{stroke:var(--soft)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.1rem 1rem;margin:.2rem 0;padding:0;font-size:.85rem}
.legend svg{display:inline-block;width:20px;height:8px;margin-right:.35rem;stroke-width:2}
.tip{position:absolute;top:0;pointer-events:none;background:var(--paper);border:1px solid var(--rule);
padding:.3rem .5rem;font-size:.8rem;white-space:pre;border-radius:4px;z-index:1}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.82rem;font-variant-numeric:tabular-nums}
th{font-weight:500;text-align:right;padding:.15rem .5rem;color:var(--soft);white-space:nowrap}
td{text-align:right;padding:.15rem .5rem;background:rgba(var(--warm),calc(var(--strength,0)*.55))}
"""

_SCRIPT = """
for (const figure of document.querySelectorAll("figure")) {
  const source = figure.querySelector("script"), plot = figure.querySelector(".plot");
  if (!source || !plot) continue;
  const lines = JSON.parse(source.textContent), svg = plot.querySelector("svg");
  const tip = plot.querySelector(".tip"), cursor = plot.querySelector(".cursor");
  plot.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const near = lines.map(line => line.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
    const best = near.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
    const shown = lines.map((line, i) => [line.name, near[i]]).filter(([, point]) => point[1] === best[1]);
    tip.textContent = ["step " + best[1], ...shown.map(([name, point]) => name + "  " + point[2])].join("\\n");
    tip.hidden = false;
    const right = best[0] > svg.viewBox.baseVal.width / 2, at = best[0] / svg.viewBox.baseVal.width * box.width;
    tip.style.left = right ? "" : at + 10 + "px";
    tip.style.right = right ? box.width - at + 10 + "px" : "";
    cursor.setAttribute("x1", best[0]); cursor.setAttribute("x2", best[0]);
    cursor.setAttribute("visibility", "visible");
  });
  plot.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); });
}
"""
