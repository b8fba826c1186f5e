"""The file of metrics that a run has written, read back."""

from __future__ import annotations

import json
import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_muon.diagnostics.measures import ADAMW_MEASURES, MEASURES
from hf_muon.diagnostics.metrics import FILE

_TRACES = ("muon_lr", "adamw_lr", "muon_momentum", "muon_weight_decay", "time_share", "optimizer_ms", "step_ms")


class Table(NamedTuple):
    """A measure over a run.

    Attributes:
        steps: watched steps, ascending.
        names: parameters that have a number at any of these steps.
        values: ``(steps, names)``, fp64; NaN where there is none.
    """

    steps: list[int]
    names: list[str]
    values: Tensor


@dataclass
class Run:
    """The metrics of a run. If a step appears twice, as after a resume, the later line wins.

    Attributes:
        start: the last line about the run as a whole.
        logs: numbers that the Trainer logged, by name and step.
        traces: numbers about a whole step, by name and step.
        rows: parameters, and for each measure a number for each of them, NaN where the line has none; by step.
        logits: the largest logit of each attention, by its name and step, where they were measured.
        kinds: layer and kind of each parameter, as by `layers_and_kinds`.
        not_finite: steps at which the Trainer logged a loss that was no finite number.
        unread: lines that could not be read, as half a line that a killed run has left, and why.
    """

    start: dict[str, Any] = field(default_factory=dict)
    logs: dict[str, dict[int, float]] = field(default_factory=dict)
    traces: dict[str, dict[int, float]] = field(default_factory=dict)
    rows: dict[int, tuple[tuple[str, ...], dict[str, array[float]]]] = field(default_factory=dict)
    logits: dict[str, dict[int, float]] = field(default_factory=dict)
    kinds: dict[str, tuple[int | None, str]] = field(default_factory=dict)
    not_finite: list[int] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    _tables: dict[str, Table] = field(default_factory=dict)

    @property
    def steps(self) -> list[int]:
        """Watched steps, ascending."""
        return sorted(self.traces.get("muon_lr", {}))

    @property
    def losses(self) -> list[tuple[int, float]]:
        """The training losses that the Trainer logged, by step."""
        return sorted(self.logs.get("loss", {}).items())

    @property
    def measures(self) -> list[str]:
        """The measures of parameters that any step has."""
        return list(dict.fromkeys(measure for _, own in self.rows.values() for measure in own))

    def table(self, measure: str) -> Table:
        """Return a measure at all steps that have it."""
        if measure not in self._tables:
            self._tables[measure] = self._table(measure)
        return self._tables[measure]

    def _table(self, measure: str) -> Table:
        by_names: dict[tuple[str, ...], list[int]] = {}
        for step in sorted(self.rows):
            names, measures = self.rows[step]
            if measure in measures:
                by_names.setdefault(names, []).append(step)
        steps = sorted(step for own in by_names.values() for step in own)
        every = list(dict.fromkeys(name for names in by_names for name in names))
        values = torch.full((len(steps), len(every)), math.nan, dtype=torch.float64)
        row_of, column_of = {step: i for i, step in enumerate(steps)}, {name: i for i, name in enumerate(every)}
        for names, own in by_names.items():
            numbers = array("d")
            for step in own:
                numbers.extend(self.rows[step][1][measure])
            block = torch.frombuffer(numbers, dtype=torch.float64).view(len(own), len(names))
            rows, columns = [row_of[step] for step in own], [column_of[name] for name in names]
            values[torch.tensor(rows).unsqueeze(1), torch.tensor(columns)] = block
        shown = [i for i, there in enumerate((~values.isnan()).any(dim=0).tolist()) if there]
        return Table(steps, [every[i] for i in shown], values[:, shown])


def read_run(path: Path) -> Run:
    """Read the metrics of a run. Lines that cannot be read are left out, and counted.

    Args:
        path: the run's output directory, or the file, JSON lines as `metrics` writes them.

    Raises:
        ValueError: there is no such file, or none with a watched step.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist. Name a run's output directory, or its {FILE}")
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"{path} holds no {FILE}. A run writes it with HF_MUON_DIAGNOSTICS_EVERY=50 in its environment, or with "
            'optim_args: "diagnostics_every=50"'
        )
    run = Run()
    names: tuple[str, ...] = ()
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        try:
            names = _add(run, json.loads(line, parse_constant=_refuse), names) if line.strip() else names
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            run.unread.append(f"line {number}: {error!r}")
    if not run.steps:
        unread = f" {len(run.unread)} lines cannot be read, {run.unread[0]}." if run.unread else ""
        raise ValueError(
            f"{file} holds no watched step yet.{unread} The first comes after as many steps as diagnostics_every says "
            "(HF_MUON_DIAGNOSTICS_EVERY): wait, or train with a smaller number"
        )
    return run


def _refuse(word: str) -> Any:
    raise ValueError(word)  # NaN and Infinity, which JSON does not have


def _add(run: Run, line: dict[str, Any], names: tuple[str, ...]) -> tuple[str, ...]:
    """Add a line to a run, completely or not at all.

    Args:
        run: is written to.
        line: a JSON object.
        names: parameters that the lists in this line are about, in order.

    Returns:
        Parameters that the lists in the next line are about.
    """
    event = line["event"]
    if event == "start":
        layers = [(entry["layer"], str(entry["kind"])) for entry in line["parameters"]]
        kinds = {
            str(entry["name"]): (None if layer is None else int(layer), kind)
            for entry, (layer, kind) in zip(line["parameters"], layers, strict=True)
        }
        model, options = dict(line.get("model", {})), dict(line.get("options", {}))
        model = {key: (int if key.endswith("_weights") else str)(value) for key, value in model.items()}
        options = {key: dict(own) for key, own in options.items()}
        if "update_rms" in options.get("muon", {}):
            options["muon"]["update_rms"] = float(options["muon"]["update_rms"])
        facts = {
            **line,
            "model": model,
            "options": options,
            "versions": dict(line.get("versions", {})),
            "ranks": int(line["ranks"]) if "ranks" in line else 1,
        }
        run.start = {key: value for key, value in facts.items() if key not in ("event", "parameters")}
        run.kinds |= kinds
        return tuple(kinds)
    if event not in ("step", "log"):
        raise ValueError(f"event {event!r}")
    step = int(line["step"])
    if event == "log":
        numbers = {
            key: float(value) for key, value in line.items() if key not in ("event", "step") and value is not None
        }
        run.not_finite += [step] if "loss" in line and line["loss"] is None else []
        into = [(run.logs, numbers)]
    else:
        traces = {key: float(line[key]) for key in _TRACES if line.get(key) is not None}
        logits = {str(name): float(value) for name, value in line.get("max_logit", {}).items() if value is not None}
        known = [key for key in line if key in (*MEASURES, *ADAMW_MEASURES) or key.endswith("_rms")]
        measures = {key: array("d", [math.nan if v is None else float(v) for v in line[key]]) for key in known}
        if any(len(own) != len(names) for own in measures.values()):
            raise ValueError(f"not {len(names)} numbers")
        run.rows[step] = (names, measures)
        into = [(run.traces, traces), (run.logits, logits)]
    for target, own in into:
        for key, number in own.items():
            target.setdefault(key, {})[step] = number
    return names
