"""Write metrics of every N-th step: a line of JSON from rank 0, about the matrices that it stores or owns.

Update RMS and momentum RMS cover this rank's shard of each matrix. Orthogonality error and stable rank cover the whole
matrices that this rank orthogonalizes. There is no communication, and tensors of the step are not modified.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hf_muon.diagnostics import facts, log
from hf_muon.diagnostics.measures import ADAMW_MEASURES, MEASURES
from hf_muon.diagnostics.watch import Clock, Watch

FILE = "muon_diagnostics.jsonl"


class Metrics:
    """Measures every N-th step and writes a line about it. Exists only on rank 0, if metrics are on.

    Args:
        every: steps from one line to the next.
        file: file to append to; None for `muon_diagnostics.jsonl` in the working directory.
    """

    def __init__(self, every: int, file: str | os.PathLike[str] | None = None) -> None:
        self.every = every
        self.file = Path(file or FILE)
        self.model: dict[str, Any] = {}
        self._watch: Watch | None = None
        self._clock: Clock | None = None
        self._began: dict[int, Any] = {}
        self._ended: dict[int, Any] = {}
        self._names: list[str] = []
        self._summary: dict[str, float] = {}
        self._writes = True
        self._run = ""  # before its first line
        self._step = self._after = 0

    def begin(self, step: int, device: torch.device) -> Watch | None:
        """Begin a step; return its `Watch`, or None if it is not measured.

        Args:
            step: its number, from 1.
            device: the device to time.
        """
        if self._watch is not None and self._watch.step != step:
            self.flush()
        if step not in (self._step, self._step + 1):
            self._go_on_after(step - 1)
        self._step = step
        due = self._writes and step % self.every == 0
        # The step before the measured one is timed: measuring does not slow it down.
        if due or (step + 1) % self.every == 0:
            self._clock = self._clock or Clock(device)
            # Under ZeRO a step begins once for each partition: the first counts.
            self._began.setdefault(step, self._clock.now())
        if due and self._watch is None:
            self._watch = Watch(step)
        return self._watch if due else None

    def end(self, step: int, *, whole: bool) -> None:
        """End a step, or a part of one.

        Args:
            step: its number.
            whole: the step is complete; False if more parts of it follow, as with ZeRO's partitions.
        """
        if step in self._began and self._clock is not None:
            self._ended[step] = self._clock.now()
        if whole and self._watch is not None:
            self.flush()

    def flush(self) -> None:
        """Write a line about the last measured step."""
        watch, self._watch = self._watch, None
        if watch is None or not watch.shapes:  # the step was refused, or had no gradients
            return
        values = watch.read()
        times = self._times(watch.step)
        line: dict[str, Any] = {"step": watch.step, **watch.numbers, **times}
        if list(watch.shapes) != self._names:
            self._names = list(watch.shapes)
            line |= {"options": watch.options, "parameters": watch.shapes}
        for measure in (*MEASURES, *ADAMW_MEASURES):
            if by_name := values.get(measure):
                line[measure] = [_short(by_name.get(name)) for name in self._names]
        if watch.logits:
            line["max_logit"] = {name: _short(value) for name, value in watch.logits.items()}
            line["clipped_heads"] = watch.clipped
        self._write("step", line)
        self._summary = _summary(values, watch)
        if "time_share" in times:
            self._summary["muon/time_share"] = times["time_share"]

    def _times(self, step: int) -> dict[str, float]:
        before, clock = step - 1, self._clock
        times = {}
        if clock is not None and before in self._ended and step in self._began:
            total = clock.seconds(self._began[before], self._began[step])
            busy = clock.seconds(self._began[before], self._ended[before])
            times = {"step_ms": total * 1e3, "optimizer_ms": busy * 1e3, "time_share": busy / total if total else 0.0}
        self._began = {k: moment for k, moment in self._began.items() if k >= step}
        self._ended = {k: moment for k, moment in self._ended.items() if k >= step}
        return times

    def _go_on_after(self, step: int) -> None:
        """Begin another run in the file, or continue the last one, after the optimizer has made some steps."""
        self._step = self._after = step
        self._run, self._names = "", []

    def _write_start(self) -> None:
        """Write the facts about a run, before its other lines."""
        self._run = secrets.token_hex(4)
        ranks = torch.distributed.get_world_size() if log.has_process_group() else 1
        run_facts = {"time": time.time(), "versions": facts.versions(), "ranks": ranks, "every": self.every}
        self._write("start", {"after": self._after, **run_facts, "model": self.model})
        log.logger().info("metrics every %d steps: %s", self.every, self.file)

    def pop_summary(self) -> dict[str, float]:
        """Return the summary of the last measured step, to be logged as `muon/...`; empty on a second call."""
        self.flush()
        summary, self._summary = self._summary, {}
        return summary

    def record_log(self, step: int, logs: Mapping[str, Any]) -> None:
        """Write the logs of a Trainer, such as the loss, at the optimizer's step.

        Args:
            step: the optimizer's own count, which is not 0 before its first step if it was loaded.
            logs: what the Trainer logs.
        """
        if step and not self._step:
            self._go_on_after(step)
        numbers = {key: value for key, value in logs.items() if isinstance(value, (int, float)) and "/" not in key}
        self._write("log", {"step": self._step, **{key: _short(value) for key, value in numbers.items()}})

    def _write(self, event: str, values: Mapping[str, Any]) -> None:
        if not self._writes:
            return
        if not self._run:
            self._write_start()
        line = {"event": event, "run": self._run, **values}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("ab+") as out:
                # A run that was killed may have left half a line.
                if out.seek(0, os.SEEK_END) and not (out.seek(-1, os.SEEK_END), out.read(1) == b"\n")[1]:
                    out.write(b"\n")
                out.write(json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        except OSError as error:  # a full disk must not end the run
            self.stop(f"no more metrics: {self.file} cannot be written ({error}) [metrics-not-written]")

    def stop(self, reason: str) -> None:
        """Write and measure nothing more, and say why, once."""
        if self._writes:
            log.logger().warning(reason)
        self._writes, self._watch = False, None


def _short(value: float | None) -> float | None:
    """Return a number rounded to six digits; None for None, and for NaN and infinity, which JSON cannot hold."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _summary(values: Mapping[str, Mapping[str, float]], watch: Watch) -> dict[str, float]:
    """Return the median relative update (one matrix that begins at zero would dominate the mean) and other numbers."""
    summary = {}
    if updates := values.get("relative_update"):
        summary["muon/relative_update"] = statistics.median(updates.values())
    if errors := values.get("orthogonality_error"):
        summary["muon/orthogonality_error"] = math.fsum(errors.values()) / len(errors)
    if watch.logits:
        summary |= {"muon/max_logit": max(watch.logits.values()), "muon/clipped_heads": watch.clipped}
    return summary
