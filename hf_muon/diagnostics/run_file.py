"""Read the metrics file of a run."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_muon.diagnostics.measures import ADAMW_MEASURES, MEASURES
from hf_muon.diagnostics.metrics import FILE

_TRACES = ("muon_lr", "adamw_lr", "time_share")


@dataclass
class Run:
    """The metrics of a run. If a step appears twice, as after a resume, the later line wins.

    Attributes:
        model: class, name, and numbers of weights.
        options: of Muon and of AdamW.
        versions: of libraries.
        ranks: number of them.
        kinds: layer and kind of each parameter, as by `layers_and_kinds`.
        logs: numbers that the Trainer logged, by name and step.
        traces: numbers about a whole step, by name and step.
        rows: by step, parameters, and for each measure a number for each of them, NaN if the line has none.
        not_finite: steps at which the Trainer logged a loss that was not finite.
    """

    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    kinds: dict[str, tuple[int | None, str]] = field(default_factory=dict)
    logs: dict[str, dict[int, float]] = field(default_factory=dict)
    traces: dict[str, dict[int, float]] = field(default_factory=dict)
    rows: dict[int, tuple[tuple[str, ...], dict[str, array[float]]]] = field(default_factory=dict)
    not_finite: list[int] = field(default_factory=list)

    @property
    def losses(self) -> list[tuple[int, float]]:
        """The training losses that the Trainer logged, by step."""
        return sorted(self.logs.get("loss", {}).items())

    def numbers(self, measure: str) -> Iterator[tuple[int, list[tuple[str, float]]]]:
        """Yield each step that has a measure, ascending, with the parameters that have a number, and the numbers."""
        for step, (names, measures) in sorted(self.rows.items()):
            pairs = zip(names, measures.get(measure, ()), strict=False)
            if own := [(name, value) for name, value in pairs if not math.isnan(value)]:
                yield step, own


def read_run(path: Path) -> Run:
    """Read the metrics of a run.

    Args:
        path: the run's output directory, or the file, JSON lines as `metrics` writes them.

    Raises:
        ValueError: the file does not exist, has no measured step, or holds something else.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist. Name a run's output directory, or its {FILE} [no-such-run]")
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"{path} holds no {FILE}. A run writes it with HF_MUON_DIAGNOSTICS_EVERY=50 in its environment, or with "
            'optim_args: "diagnostics_every=50" [no-metrics]'
        )
    run = Run()
    names: tuple[str, ...] = ()
    for number, text in enumerate(file.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        try:
            line = json.loads(text)
        except ValueError:  # half a line, left by a killed run
            continue
        try:
            names = _add(run, line, names)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{file}, line {number}, is no line of metrics ({error!r}) [bad-metrics-line]") from error
    if not run.rows:
        raise ValueError(
            f"{file} holds no watched step yet. The first comes after as many steps as diagnostics_every says "
            "(HF_MUON_DIAGNOSTICS_EVERY): wait, or train with a smaller number [no-watched-step]"
        )
    return run


def _add(run: Run, line: dict[str, Any], names: tuple[str, ...]) -> tuple[str, ...]:
    """Add a line to a run.

    Args:
        run: is written to.
        line: a JSON object.
        names: parameters whose measures this line lists, in order.

    Returns:
        Parameters whose measures the next line lists.
    """
    event = line["event"]
    if event == "start":
        run.model = {key: int(v) if key.endswith("_weights") else str(v) for key, v in line.get("model", {}).items()}
        run.options = {side: dict(own) for side, own in line.get("options", {}).items()}
        run.versions, run.ranks = dict(line.get("versions", {})), int(line.get("ranks", 1))
        names = tuple(str(entry["name"]) for entry in line["parameters"])
        places = (
            (None if entry["layer"] is None else int(entry["layer"]), str(entry["kind"]))
            for entry in line["parameters"]
        )
        run.kinds |= dict(zip(names, places, strict=True))
        return names
    step = int(line["step"])
    if event == "log":
        numbers = {key: v for key, v in line.items() if key not in ("event", "step")}
        run.not_finite += [step] if "loss" in line and line["loss"] is None else []
        target = run.logs
    elif event == "step":
        numbers = {key: line.get(key) for key in _TRACES}
        numbers["max_logit"] = max((v for v in line.get("max_logit", {}).values() if v is not None), default=None)
        known = [measure for measure in (*MEASURES, *ADAMW_MEASURES) if measure in line]
        measures = {key: array("d", [math.nan if v is None else v for v in line[key]]) for key in known}
        if any(len(own) != len(names) for own in measures.values()):
            raise ValueError(f"not {len(names)} numbers")
        run.rows[step] = (names, measures)
        target = run.traces
    else:
        raise ValueError(f"event {event!r}")
    for key, number in numbers.items():
        if number is not None:
            target.setdefault(key, {})[step] = float(number)
    return names
