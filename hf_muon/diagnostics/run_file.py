"""The file of metrics that a run has written, read back."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_muon.diagnostics.measures import ADAMW_MEASURES, MEASURES
from hf_muon.diagnostics.metrics import FILE

_TRACES = ("muon_lr", "adamw_lr", "muon_momentum", "muon_weight_decay", "time_share", "optimizer_ms", "step_ms")
_MAY_OVERFLOW = re.compile(r"[eE]\+?\d{3}|\d{300}")

Row = tuple[tuple[str, ...], dict[str, "array[float]"]]
"""Parameters, and for each measure a number for each of them, NaN where the line has none."""


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
        rows: numbers about each parameter, by step.
        logits: the largest logit of each attention, by its name and step, where they were measured.
        kinds: layer and kind of each parameter, as by `layers_and_kinds`.
        not_finite: steps at which the Trainer logged a loss that was no finite number.
    """

    start: dict[str, Any] = field(default_factory=dict)
    logs: dict[str, dict[int, float]] = field(default_factory=dict)
    traces: dict[str, dict[int, float]] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)
    logits: dict[str, dict[int, float]] = field(default_factory=dict)
    kinds: dict[str, tuple[int | None, str]] = field(default_factory=dict)
    not_finite: list[int] = field(default_factory=list)
    _tables: dict[str, Table] = field(default_factory=dict)

    @property
    def steps(self) -> list[int]:
        """Watched steps, ascending."""
        return sorted(self.traces.get("muon_lr", {}))

    def table(self, measure: str) -> Table:
        """Return a measure at all steps; empty where the file does not have it, as those of older versions."""
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
            if numbers:
                block = torch.frombuffer(numbers, dtype=torch.float64).view(len(own), len(names))
                rows, columns = [row_of[step] for step in own], [column_of[name] for name in names]
                values[torch.tensor(rows).unsqueeze(1), torch.tensor(columns)] = block
        present = (~values.isnan()).any(dim=0).tolist() if steps else []
        shown = [i for i, there in enumerate(present) if there]
        return Table(steps, [every[i] for i in shown], values[:, shown])


def diagnostics_of(run: Path) -> Path:
    """Return the file of metrics of a run.

    Args:
        run: its output directory, or the file.

    Raises:
        ValueError: there is no such file.
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
    """Read a file of metrics. Half a line, which a killed run has left at its end, is left out.

    Args:
        file: JSON lines, as `metrics` writes them.
        skip_broken: leave out all lines that cannot be read.

    Raises:
        ValueError: another line that cannot be read, with its number; or a file without a watched step.
    """
    run = Run()
    names: tuple[str, ...] = ()
    half: ValueError | None = None  # of a line that is no JSON, which only a new start may follow
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            content = _parsed(line)
            if half is not None and content["event"] != "start":
                raise half
            half, names = None, _add(run, content, names)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            if skip_broken:
                half = None
                continue
            if error is half:
                raise
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            refusal = ValueError(f"{file}, line {number} cannot be read: {reason}. --skip-broken leaves such lines out")
            if half is not None or not isinstance(error, json.JSONDecodeError):
                raise half or refusal from None
            half = refusal
    if half is not None and text.endswith("\n"):
        raise half
    if not run.steps:
        raise ValueError(
            f"{file} holds no watched step yet. The first comes after as many steps as diagnostics_every says "
            "(HF_MUON_DIAGNOSTICS_EVERY): wait, or train with a smaller number"
        )
    return run


def _parsed(line: str) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        ValueError: something else, or NaN or infinity, which JSON does not have and `metrics` does not write.
    """

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not a number of JSON; hf_muon writes null in its place")

    def finite(word: str) -> float:
        return number if math.isfinite(number := float(word)) else refuse(word)

    # A function of our own for every number would make long files slow.
    parse_float = finite if _MAY_OVERFLOW.search(line) else None
    value = json.loads(line, parse_constant=refuse, parse_float=parse_float)
    if not isinstance(value, dict):
        raise ValueError(f"it is no object, but a {type(value).__name__}")
    return value


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
        _check_facts(line)
        kinds = {str(entry["name"]): _layer_and_kind(entry) for entry in line["parameters"]}
        run.start = {key: value for key, value in line.items() if key not in ("event", "parameters")}
        run.kinds |= kinds
        return tuple(kinds)
    if event not in ("step", "log"):
        raise ValueError(f"event {event!r} is not known")
    step = int(line["step"])
    if event == "log":
        logs = {key: float(value) for key, value in line.items() if key not in ("event", "step") and value is not None}
        for key, number in logs.items():
            run.logs.setdefault(key, {})[step] = number
        if "loss" in line and line["loss"] is None:
            run.not_finite.append(step)
        return names
    known = (key for key in line if key in (*MEASURES, *ADAMW_MEASURES) or key.endswith("_rms"))
    measures = {key: _numbers(line[key], step, names) for key in known}
    traces = {key: float(line[key]) for key in _TRACES if line.get(key) is not None}
    logits = {str(name): float(number) for name, number in line.get("max_logit", {}).items() if number is not None}
    for name, number in logits.items():
        run.logits.setdefault(name, {})[step] = number
    for key, number in traces.items():
        run.traces.setdefault(key, {})[step] = number
    run.rows[step] = (names, measures)
    return names


_FACTS: dict[tuple[str, ...], Any] = {
    **dict.fromkeys((("model",), ("versions",), ("options",), ("options", "muon"), ("options", "adamw")), dict),
    **dict.fromkeys((("model", "class"), ("model", "name")), str),
    **dict.fromkeys((("model", "muon_weights"), ("model", "adamw_weights")), int),
    ("options", "muon", "update_rms"): (int, float),
}
"""The types of what a page reads of the first line, where the line has it; outer keys come first."""


def _check_facts(start: Mapping[str, Any]) -> None:
    for path, kind in _FACTS.items():
        value: Any = start
        for key in path:
            value = value.get(key, _ABSENT) if value is not _ABSENT else value
        if value is not _ABSENT and not isinstance(value, kind):
            raise ValueError(f"{'.'.join(path)} is {json.dumps(value)[:40]}, which hf_muon does not write")


_ABSENT = object()


def _numbers(values: Sequence[float | None], step: int, names: Sequence[str]) -> array[float]:
    """Return a number for each parameter, NaN for null."""
    if len(values) != len(names):
        raise ValueError(f"step {step} has numbers for {len(values)} parameters of {len(names)}")
    return array("d", [math.nan if value is None else float(value) for value in values])


def _layer_and_kind(entry: Mapping[str, Any]) -> tuple[int | None, str]:
    """Return the layer and the kind of a parameter."""
    layer = entry["layer"]
    return None if layer is None else int(layer), str(entry["kind"])
