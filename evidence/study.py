"""Studies as YAML files describe them, and the trials that they ask for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from evidence.tuning import Ladder, Point

STUDIES = Path(__file__).resolve().parent / "studies"

TUNE, FINAL, START = "tune", "final", "start"
_KEYS = {
    *("question", "corpus", "text", "other_text", "context", "points", "training", "models", "cells", "sides"),
    *("tune", "seeds", "reference", "starts"),
}
_CELL_KEYS = {"model", "tokens", "batch", "text", "training", "sides", "start", "begin", "repeats"}
_REPETITION = 100  # seeds from one repetition to the next; final trials have lower ones
_SIDE_KEYS = {"tune", "reference"}


@dataclass(frozen=True)
class Trial:
    """One training run.

    Attributes:
        id: unique in its study, `CELL/SIDE/KIND/SETTINGS/SEED`.
        kind: `tune`, `final` or `start`.
        point: of the search, for `tune`.
        spec: everything that the run depends on, but for the text.
    """

    id: str
    cell: str
    side: str
    kind: str
    seed: int
    point: Point
    spec: Mapping[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        """The settings that were tuned."""
        return dict(self.spec["values"])

    def setup(self, corpus: str) -> str:
        """Return a hash of everything that the result depends on, but for versions."""
        text = json.dumps([corpus, self.spec], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class Study:
    """A study: cells (what is trained) times sides (how), each tuned and then repeated with other seeds.

    Attributes:
        name: of the file.
        cells: by name. `begin` has other starts of the ladders, by side and setting.
        sides: by name.
        seeds: of final trials.
        least: the least number of tuning trials of a side; 0 if nothing is tuned.
        between: final trials take the rate at the vertex of the parabola through the best one and its neighbours.
        reference: the side that others are compared with, unless they name another one.
        corpus: "packages" (`evidence.corpus`), or "chat" (`evidence.chat`).
    """

    def __init__(self, name: str, content: Mapping[str, Any]) -> None:
        self.name = name
        self.content = content
        _refuse(f"{name}.yaml", content, _KEYS)
        self.question: str = content["question"]
        self.corpus: str = content.get("corpus", "packages")
        self.cells: dict[str, dict[str, Any]] = content["cells"]
        self.sides: dict[str, dict[str, Any]] = {key: side or {} for key, side in content["sides"].items()}
        self.seeds: list[int] = content["seeds"]
        self.starts: dict[str, dict[str, Any]] = content.get("starts", {})
        tune = content.get("tune", {})
        self.tuning_seed: int = tune.get("seed", 0)
        self.least: int = tune.get("least", 0)
        self._repeats: int = tune.get("repeats", 0)
        self.between: bool = tune.get("between", False)
        self.most: int = tune.get("most", 16)
        self.reference: str = content.get("reference", "")
        self.model_sizes: dict[str, dict[str, Any]] = content["models"]
        for cell in self.cells:
            _refuse(f"{name}.yaml, cell {cell}", self.cells[cell], _CELL_KEYS)
            _refuse(f"{name}.yaml, begin of cell {cell}", self.cells[cell].get("begin", {}), set(self.sides))
            if self.cells[cell]["model"] not in self.model_sizes:
                raise ValueError(f"{name}.yaml, cell {cell}: no model {self.cells[cell]['model']}")

    def sides_of(self, cell: str) -> list[str]:
        """Return the sides of a cell."""
        return list(self.cells[cell].get("sides", self.sides))

    def reference_of(self, side: str) -> str:
        """Return the side that a side is compared with; itself for a reference."""
        return str(self.sides[side].get("reference", self.reference))

    def repeats(self, cell: str) -> int:
        """Return the number of tuning trials that the side which needs most of them spends on other seeds."""
        return int(self.cells[cell].get("repeats", self._repeats))

    def ladders(self, cell: str, side: str) -> dict[str, Ladder]:
        """Return the ladders of the settings that a side tunes."""
        begin = self.cells[cell].get("begin", {}).get(side, {})
        ladders = self.sides[side].get("tune", {})
        return {name: _ladder({**value, "start": begin.get(name, value["start"])}) for name, value in ladders.items()}

    def tuning(self, cell: str, side: str, point: Point, repetition: int = 0) -> Trial:
        """Return the tuning trial of a point, or one of its repetitions, each with its own seed."""
        values = self.values(cell, side, point)
        return self._trial(cell, side, TUNE, values, self.tuning_seed + _REPETITION * repetition, point)

    def values(self, cell: str, side: str, point: Point, first: float | None = None) -> dict[str, Any]:
        """Return the settings of a point; `first` takes the place of the first ladder's value."""
        values: dict[str, Any] = {}
        for (name, ladder), rung in zip(self.ladders(cell, side).items(), point, strict=True):
            value = ladder.value(rung) if values or first is None else first
            values[name] = float(f"{value * values[ladder.times]:.3g}") if ladder.times else value
        return values

    def final(self, cell: str, side: str, values: Mapping[str, Any], seed: int) -> Trial:
        """Return a final trial with settings that were tuned."""
        return self._trial(cell, side, FINAL, values, seed)

    def start(self, name: str, seed: int) -> Trial:
        """Return the trial that trains the weights which others begin with."""
        start = self.starts[name]
        spec = self._spec(start, {"optim": start["optim"]}, START, {}, seed)
        return Trial(f"start/{name}/{START}/{seed}", "start", name, START, seed, (), spec)

    def start_of(self, trial: Trial) -> Trial | None:
        """Return the trial that trains the weights which a trial begins with. All tuning trials share one."""
        if trial.kind == START or (name := self.cells[trial.cell].get("start")) is None:
            return None
        return self.start(name, self.tuning_seed if trial.kind == TUNE else trial.seed)

    def _trial(self, cell: str, side: str, kind: str, values: Any, seed: int, point: Point = ()) -> Trial:
        settings = {key: value for key, value in self.sides[side].items() if key not in _SIDE_KEYS}
        spec = self._spec(self.cells[cell], settings, kind, values, seed)
        if start := self.cells[cell].get("start"):
            spec["start"] = self.start(start, self.tuning_seed if kind == TUNE else seed).spec
        text = ",".join(f"{key}={_number(value)}" for key, value in values.items()) or "fixed"
        return Trial(f"{cell}/{side}/{kind}/{text}/{seed}", cell, side, kind, seed, point, spec)

    def _spec(
        self, cell: Mapping[str, Any], side: Mapping[str, Any], kind: str, values: Any, seed: int
    ) -> dict[str, Any]:
        tokens_a_step = cell["batch"] * self.content["context"]
        is_start = kind == START
        return {
            "text": cell.get("text") or self.content["other_text" if is_start else "text"],
            "other_text": None if is_start else self.content.get("other_text"),
            "part": "validation" if kind == TUNE else "test",
            "context": self.content["context"],
            "points": self.content["points"],
            "model": self.model_sizes[cell["model"]],
            "batch": cell["batch"],
            "steps": max(1, round(cell["tokens"] / tokens_a_step)),
            "settings": {**self.content["training"], **cell.get("training", {}), **side, **values},
            "values": dict(values),
            "seed": seed,
        }


def read_study(path: Path) -> Study:
    """Read a study.

    Raises:
        ValueError: the file has an unknown key, or a cell names an unknown model.
    """
    return Study(path.stem, yaml.safe_load(path.read_text(encoding="utf-8")))


def _ladder(value: Mapping[str, Any]) -> Ladder:
    choices = tuple(value.get("choices", ()))
    return Ladder(value["start"], value.get("factor", 0.0), choices, value.get("times", ""))


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float | int) else str(value)


def _refuse(where: str, content: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(content) - known):
        raise ValueError(f"{where}: unknown {', '.join(unknown)}. Valid: {', '.join(sorted(known))}")
