"""A run's diagnostics as one HTML page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_muon.diagnostics.charts import Line, colour_table, line_chart, page
from hf_muon.diagnostics.metrics import ADAMW_MEASURE, FILE, MEASURES

_TRACES = ("muon_lr", "adamw_lr", "time_share", "optimizer_ms", "step_ms")


@dataclass
class Run:
    """What a run has written, by step; of a step that was taken again, the later one.

    Attributes:
        start: the last line about the run as a whole.
        logs: what the Trainer has logged.
        traces: numbers of a step as a whole, by name.
        measures: by measure, parameter and step.
        places: layer and kind of each parameter.
    """

    start: dict[str, Any] = field(default_factory=dict)
    logs: dict[str, dict[int, float]] = field(default_factory=dict)
    traces: dict[str, dict[int, float]] = field(default_factory=dict)
    measures: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    places: dict[str, tuple[int | None, str]] = field(default_factory=dict)

    @property
    def steps(self) -> list[int]:
        """The steps that were watched."""
        return sorted(self.traces.get("muon_lr", {}))


def diagnostics_of(run: Path) -> Path:
    """The file of a run, given by its folder or by itself.

    Raises:
        ValueError: there is none.
    """
    if not run.exists():
        raise ValueError(f"{run} does not exist. Name a run's output directory, or its {FILE}")
    if run.is_file():
        return run
    file = run / FILE
    if not file.is_file():
        raise ValueError(
            f"{run} holds no {FILE}. A run writes it with HF_MUON_DIAGNOSTICS_EVERY=50 in its environment, or with "
            'optim_args: "diagnostics_every=50"'
        )
    return file


def read_run(file: Path, *, skip_broken: bool = False) -> Run:
    """The lines of a file.

    Args:
        file: as `hf_muon.diagnostics.metrics` writes it.
        skip_broken: leave out lines that cannot be read.

    Raises:
        ValueError: a line that cannot be read, with its number; or no step at all.
    """
    run = Run()
    names: list[str] = []
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            names = _take(run, _object(line), names)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            if skip_broken:
                continue
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f"{file}, line {number} cannot be read: {reason}. A run that was killed can leave half a line; "
                "--skip-broken leaves such lines out"
            ) from None
    if not run.steps:
        raise ValueError(f"{file} holds no watched step yet")
    return run


def _object(line: str) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        ValueError: it is none, or holds NaN or infinity, which JSON does not have and `metrics` does not write.
    """

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not a number of JSON; hf_muon writes null in its place")

    def finite(word: str) -> float:
        return number if math.isfinite(number := float(word)) else refuse(word)

    value = json.loads(line, parse_constant=refuse, parse_float=finite)
    if not isinstance(value, dict):
        raise ValueError(f"it is no object, but a {type(value).__name__}")
    return value


def _take(run: Run, line: dict[str, Any], names: list[str]) -> list[str]:
    """Add a line to a run, whole or not at all; the names that lists in later lines are about."""
    event = line["event"]
    if event == "start":
        places = {str(entry["name"]): _place(entry) for entry in line["parameters"]}
        run.start = {key: value for key, value in line.items() if key not in ("event", "parameters")}
        run.places |= places
        return list(places)
    if event not in ("step", "log"):
        raise ValueError(f"event {event!r} is not known")
    step = int(line["step"])
    if event == "log":
        logs = {key: float(value) for key, value in line.items() if key not in ("event", "step") and value is not None}
        for key, number in logs.items():
            run.logs.setdefault(key, {})[step] = number
        return names
    lists = {measure: line[measure] for measure in (*MEASURES, ADAMW_MEASURE) if measure in line}
    for values in lists.values():
        if len(values) != len(names):
            raise ValueError(f"step {step} has numbers for {len(values)} parameters of {len(names)}")
    traces = {key: float(line[key]) for key in _TRACES if line.get(key) is not None}
    measures = {
        (measure, name): float(value)
        for measure, values in lists.items()
        for name, value in zip(names, values, strict=True)
        if value is not None
    }
    for key, number in traces.items():
        run.traces.setdefault(key, {})[step] = number
    for (measure, name), number in measures.items():
        run.measures.setdefault(measure, {}).setdefault(name, {})[step] = number
    return names


def _place(entry: Mapping[str, Any]) -> tuple[int | None, str]:
    """Return layer and kind of a parameter."""
    layer = entry["layer"]
    return None if layer is None else int(layer), str(entry["kind"])


# --- what is shown


def _line(points: Mapping[int, float]) -> Line:
    return sorted(points.items())


def _means(run: Run, measure: str, group: Callable[[str], Any]) -> dict[Any, Line]:
    """The mean over parameters of a group, by step."""
    sums: dict[Any, dict[int, list[float]]] = {}
    for name, points in run.measures.get(measure, {}).items():
        by_step = sums.setdefault(group(name), {})
        for step, value in points.items():
            by_step.setdefault(step, []).append(value)
    return {
        key: _line({step: math.fsum(some) / len(some) for step, some in by_step.items()})
        for key, by_step in sums.items()
    }


def _by_kind(run: Run, measure: str) -> dict[str, Line]:
    return _means(run, measure, lambda name: run.places[name][1])


def _by_layer(run: Run, measure: str) -> dict[str, Line]:
    found = _means(run, measure, lambda name: run.places[name][0])
    layers = sorted(layer for layer in found if layer is not None)
    chosen = layers if len(layers) <= 8 else [layers[round(i * (len(layers) - 1) / 7)] for i in range(8)]
    return {f"layer {layer}": found[layer] for layer in chosen}


def _last(run: Run, measure: str) -> tuple[list[str], list[str], dict[tuple[str, str], float]]:
    """Layers, kinds, and the values of the step that was watched last."""
    step = run.steps[-1]
    values = {
        (str(run.places[name][0]), run.places[name][1]): points[step]
        for name, points in run.measures.get(measure, {}).items()
        if step in points and run.places[name][0] is not None
    }
    rows = sorted({layer for layer, _ in values}, key=int)
    return rows, list(dict.fromkeys(kind for _, kind in values)), values


def render(run: Run, title: str) -> str:
    """The page, as HTML text."""
    steps = run.steps
    ranks = run.start.get("ranks", 1)
    mine = f"rank 0 of {ranks}: " if isinstance(ranks, int) and ranks > 1 else ""
    stored, owned = (f"{mine}what it stores" if mine else ""), (f"{mine}what it orthogonalizes" if mine else "")
    share = {step: 100 * value for step, value in run.traces.get("time_share", {}).items()}
    facts = {
        "watched steps": f"{len(steps)}, from {steps[0]} to {steps[-1]}",
        "versions": f"hf_muon {run.start.get('hf_muon')}, torch {run.start.get('torch')}",
        "ranks": str(ranks),
        "matrices by Muon": str(len(run.measures.get("update_rms", {}))),
    }
    losses = {key: _line(points) for key, points in run.logs.items() if key in ("loss", "eval_loss")}
    gradients = {key: _line(points) for key, points in run.logs.items() if key == "grad_norm"}
    rates = {half: _line(run.traces.get(f"{half}_lr", {})) for half in ("muon", "adamw")}
    last = f"{stored} · " if stored else ""
    figures = [
        line_chart("Loss", losses),
        line_chart("Learning rates", rates, note="of the Muon half and of the AdamW half"),
        line_chart("Update RMS by kind", _by_kind(run, "update_rms"), note=_joined("before the learning rate", stored)),
        line_chart(
            "Update RMS by layer", _by_layer(run, "update_rms"), note=_joined("before the learning rate", stored)
        ),
        line_chart(
            "Update RMS of the AdamW half",
            _by_kind(run, ADAMW_MEASURE),
            note=_joined("before the learning rate", stored),
        ),
        line_chart(
            "Orthogonality error by kind",
            _by_kind(run, "orthogonality_error"),
            note=_joined("RMS of squared singular values less one", owned),
        ),
        line_chart("Momentum by kind", _by_kind(run, "momentum_rms"), unit="RMS", note=stored, log=True),
        line_chart(
            "Stable rank by kind", _by_kind(run, "stable_rank"), note=_joined("of what is orthogonalized", owned)
        ),
        line_chart("Time share of the optimizer", {"optimizer step": _line(share)}, unit="% of a training step"),
        line_chart("Gradient norm", gradients, log=True),
        colour_table("Update RMS by layer and kind", *_last(run, "update_rms"), note=f"{last}step {steps[-1]}"),
    ]
    return page(title, facts, figures)


def _joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


def summary(run: Run) -> dict[str, Any]:
    """The last number of everything: means over matrices of measures."""

    def last(points: Iterable[tuple[float, float]]) -> float | None:
        values = list(points)
        return values[-1][1] if values else None

    return {
        "steps": run.steps,
        "start": run.start,
        "logs": {key: last(_line(points)) for key, points in run.logs.items()},
        **{key: last(_line(points)) for key, points in run.traces.items()},
        **{measure: last(_means(run, measure, lambda name: "")[""]) for measure in run.measures},
    }
