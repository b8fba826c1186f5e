"""The file of metrics that a run has written, read back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_muon.diagnostics.measures import ADAMW_MEASURES, MEASURES
from hf_muon.diagnostics.metrics import FILE

_TRACES = ("muon_lr", "adamw_lr", "time_share", "optimizer_ms", "step_ms")


@dataclass
class Run:
    """The metrics of a run. If a step appears twice, as after a resume, the later line wins.

    Attributes:
        start: the last line about the run as a whole.
        logs: numbers that the Trainer logged, by name and step.
        traces: numbers about a whole step, by name and step.
        measures: numbers about a parameter, by measure, parameter and step.
        kinds: layer and kind of each parameter, as by `layers_and_kinds`.
    """

    start: dict[str, Any] = field(default_factory=dict)
    logs: dict[str, dict[int, float]] = field(default_factory=dict)
    traces: dict[str, dict[int, float]] = field(default_factory=dict)
    measures: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    kinds: dict[str, tuple[int | None, str]] = field(default_factory=dict)

    @property
    def steps(self) -> list[int]:
        """Watched steps, ascending."""
        return sorted(self.traces.get("muon_lr", {}))


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
    """Read a file of metrics.

    Args:
        file: JSON lines, as `metrics` writes them.
        skip_broken: leave out lines that cannot be read.

    Raises:
        ValueError: a line that cannot be read, with its number; or a file without a watched step.
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
            names = _add(run, _parsed(line), names)
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


def _parsed(line: str) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        ValueError: something else, or NaN or infinity, which JSON does not have and `metrics` does not write.
    """

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not a number of JSON; hf_muon writes null in its place")

    def finite(word: str) -> float:
        return number if math.isfinite(number := float(word)) else refuse(word)

    value = json.loads(line, parse_constant=refuse, parse_float=finite)
    if not isinstance(value, dict):
        raise ValueError(f"it is no object, but a {type(value).__name__}")
    return value


def _add(run: Run, line: dict[str, Any], names: list[str]) -> list[str]:
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
        kinds = {str(entry["name"]): _layer_and_kind(entry) for entry in line["parameters"]}
        run.start = {key: value for key, value in line.items() if key not in ("event", "parameters")}
        run.kinds |= kinds
        return list(kinds)
    if event not in ("step", "log"):
        raise ValueError(f"event {event!r} is not known")
    step = int(line["step"])
    if event == "log":
        logs = {key: float(value) for key, value in line.items() if key not in ("event", "step") and value is not None}
        for key, number in logs.items():
            run.logs.setdefault(key, {})[step] = number
        return names
    lists = {measure: line[measure] for measure in (*MEASURES, *ADAMW_MEASURES) if measure in line}
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


def _layer_and_kind(entry: Mapping[str, Any]) -> tuple[int | None, str]:
    """Return the layer and the kind of a parameter."""
    layer = entry["layer"]
    return None if layer is None else int(layer), str(entry["kind"])
