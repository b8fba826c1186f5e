"""The picture of a sweep: loss over learning rate, and the loss of each trial over steps."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from hf_muon.cli.sweep_scores import NAMES, Trial, evaluates, rate_text, scores
from hf_muon.diagnostics.charts import line_chart, page


def sweep_page(title: str, trials: Sequence[Trial], facts: Mapping[str, str]) -> str:
    """Return an HTML page that needs no network.

    Args:
        title: heading of the page.
        trials: in any order.
        facts: shown under the heading.
    """
    by_optimizer = {name: [trial for trial in trials if trial.optimizer == key] for key, name in NAMES.items()}
    evaluated = evaluates(trials)
    last = {name: _points(group, evaluated=evaluated) for name, group in by_optimizer.items()}
    missing = [trial.name for trial in trials if trial.status != "finished"]
    figure = line_chart(
        "Evaluation loss by learning rate" if evaluated else "Loss by learning rate",
        last,
        unit="loss",
        note=("" if evaluated else "mean of the last tenth of the steps")
        + (f" · not drawn: {', '.join(missing)}" if missing else ""),
    )
    if figure is not None:
        figure.update_traces(mode="lines+markers")
        rates = sorted({rate for line in last.values() for rate, _ in line})
        ticks = {"tickvals": rates, "ticktext": [rate_text(rate) for rate in rates]}
        figure.update_xaxes(type="log", title="learning rate", **ticks)
    curves = {
        trial.name: [(float(step), loss) for step, loss in trial.losses.items() if loss - loss == 0]
        for trial in sorted(trials, key=lambda trial: (trial.optimizer != "muon", trial.rate))
    }
    rows = "".join(f"<tr><th>{html.escape(key)}</th><td>{html.escape(value)}</td></tr>" for key, value in facts.items())
    steps = line_chart("Loss of each trial", curves, unit="loss", note="each step's batch")
    head = f'<section class="scroll"><table class="facts one">{rows}</table></section>'
    return page(title, head, [[figure, steps]])


def _points(trials: Sequence[Trial], *, evaluated: bool) -> list[tuple[float, float]]:
    points = []
    for rate, (_, trial) in scores(trials).items():
        value = trial.eval_loss if evaluated else trial.loss
        assert value is not None
        points.append((rate, value))
    return points
