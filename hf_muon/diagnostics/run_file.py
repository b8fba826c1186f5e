"""Read a file of metrics, which holds a run, or several that had one output directory."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_muon.diagnostics.facts import layers_and_kinds
from hf_muon.diagnostics.measures import ADAMW_MEASURES, MEASURES
from hf_muon.diagnostics.metrics import FILE

_OF_STEPS = ("muon_lr", "adamw_lr", "time_share")


@dataclass
class Run:
    """The metrics of a run.

    Attributes:
        ids: the ids of its parts; more than one if it was resumed.
        in_file: ids of each run in its file.
        model: class, name, and numbers of weights.
        options: the options of Muon and of AdamW.
        versions: the versions of libraries.
        ranks: the number of ranks.
        names: the parameters whose measures the next line lists, in order.
        kinds: layer and kind of each parameter, as by `layers_and_kinds`.
        traces: numbers about a step, and those that Trainer logged, by name and step; `not_finite` if the loss was not.
        rows: by step, parameters, and for each measure a number for each of them, NaN if the line has none.
    """

    ids: list[str] = field(default_factory=list)
    in_file: list[list[str]] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    names: tuple[str, ...] = ()
    kinds: dict[str, tuple[int | None, str]] = field(default_factory=dict)
    traces: dict[str, dict[int, float]] = field(default_factory=dict)
    rows: dict[int, tuple[tuple[str, ...], dict[str, array[float]]]] = field(default_factory=dict)

    @property
    def losses(self) -> list[tuple[int, float]]:
        """The training losses that the Trainer logged, by step."""
        return sorted(self.traces.get("loss", {}).items())

    def forget_after(self, step: int) -> None:
        """Forget later steps, which are made again."""
        by_step: list[dict[int, Any]] = [self.rows, *self.traces.values()]
        for values in by_step:
            for later in [later for later in values if later > step]:
                del values[later]

    def numbers(self, measure: str) -> Iterator[tuple[int, list[tuple[str, float]]]]:
        """Yield each step that has a measure, ascending, with the parameters that have a number, and the numbers."""
        for step, (names, measures) in sorted(self.rows.items()):
            pairs = zip(names, measures.get(measure, ()), strict=False)
            if numbers := [(name, value) for name, value in pairs if not math.isnan(value)]:
                yield step, numbers


def read_run(path: Path) -> Run:
    """Read the metrics of the last run in a file that has a measured step.

    Args:
        path: the run's output directory, or the file, JSON lines as `metrics` writes them.

    Raises:
        ValueError: the file does not exist, no run of it has a measured step, or it holds something else.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist. Name a run's output directory, or its {FILE} [no-such-run]")
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"{path} holds no {FILE}. A run writes it with HF_MUON_DIAGNOSTICS_EVERY=50 in its environment, or with "
            'optim_args: "diagnostics_every=50" [no-metrics]'
        )
    runs: dict[str, Run] = {}
    for number, text in enumerate(file.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        try:
            line = json.loads(text)
        except ValueError:  # half a line, left by a killed run
            continue
        try:
            _add(runs, line)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{file}, line {number}, is no line of metrics ({error!r}) [bad-metrics-line]") from error
    last = next((run for run in reversed(runs.values()) if run.rows), None)
    if last is None:
        raise ValueError(
            f"{file} holds no watched step yet. The first comes after as many steps as diagnostics_every says "
            "(HF_MUON_DIAGNOSTICS_EVERY): wait, or train with a smaller number [no-watched-step]"
        )
    last.in_file = [run.ids for number, run in runs.items() if number == run.ids[0]]
    return last


def _add(runs: dict[str, Run], line: dict[str, Any]) -> None:
    """Add a line to its run, which a `start` begins unless it continues the run before it."""
    event = line["event"]
    number = str(line.get("run", len(runs) + (event == "start")))  # early files have no ids
    if event == "start":
        after = int(line.get("after", 0))
        run = runs[number] = next(reversed(runs.values()), Run()) if after else Run()
        run.ids.append(number)
        run.forget_after(after)
        run.model = {key: int(v) if key.endswith("_weights") else str(v) for key, v in line.get("model", {}).items()}
        run.versions, run.ranks = dict(line.get("versions", {})), int(line.get("ranks", 1))
    run = runs[number]
    if "parameters" in line:
        run.names = tuple(entry["name"] if isinstance(entry, dict) else entry for entry in line["parameters"])
        run.kinds |= dict(zip(run.names, layers_and_kinds(run.names), strict=True))
        run.options = {side: dict(options) for side, options in line.get("options", {}).items()}
    if event == "start":
        return
    step = int(line["step"])
    if event == "log":
        numbers = {key: v for key, v in line.items() if key not in ("event", "run", "step")}
        # The log has null for NaN and infinity, which JSON cannot hold.
        numbers["not_finite"] = 1 if numbers.get("loss", 0) is None else None
    elif event == "step":
        numbers = {key: line.get(key) for key in _OF_STEPS}
        numbers["max_logit"] = max((v for v in line.get("max_logit", {}).values() if v is not None), default=None)
        measured = [measure for measure in (*MEASURES, *ADAMW_MEASURES) if measure in line]
        measures = {key: array("d", [math.nan if v is None else v for v in line[key]]) for key in measured}
        if any(len(values) != len(run.names) for values in measures.values()):
            raise ValueError(f"not {len(run.names)} numbers")
        run.rows[step] = (run.names, measures)
    else:
        raise ValueError(f"event {event!r}")
    for key, number in numbers.items():
        if number is not None:
            run.traces.setdefault(key, {})[step] = float(number)
