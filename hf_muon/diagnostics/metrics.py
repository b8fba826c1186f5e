"""What Muon did: every N steps a line of JSON from rank 0, about the matrices that it stores or owns.

Measured are update RMS and momentum RMS of what this rank stores of each matrix, and, of the whole matrices that it
orthogonalizes, how orthogonal directions are and the stable rank of what they are made from. Nothing is sent, and
nothing that the step goes on with is written to.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_muon.diagnostics import log as diagnostics

FILE = "muon_diagnostics.jsonl"
MEASURES = ("update_rms", "momentum_rms", "orthogonality_error", "stable_rank")
ADAMW_MEASURE = "adamw_update_rms"
MOST_PARTS = 8  # of one weight that have numbers of their own; of more, as with per_head, the mean stands for all
_POWER_STEPS = 12
_CHUNK = 2**22  # elements of AdamW's moments that are looked at together


# --- measures


def orthogonality_error(directions: Tensor) -> Tensor:
    """How far directions are from orthogonal: ``||X X^T - I||_F / sqrt(s)`` over the short side `s`.

    Args:
        directions: ``(B, m, n)``, whole; not written to.

    Returns:
        ``(B,)``, fp32: the root mean square of singular values squared less one. Zero for a zero matrix would be one.
    """
    x = directions.float()
    x = x.mT if x.size(-2) > x.size(-1) else x
    with torch.autocast(x.device.type, enabled=False):
        gram = x @ x.mT
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    error: Tensor = torch.linalg.vector_norm(gram, dim=(-2, -1)) / math.sqrt(gram.size(-1))
    return error


def stable_rank(updates: Tensor) -> Tensor:
    """``||A||_F^2 / ||A||_2^2``, between one and the rank; the spectral norm by power iteration, from below.

    Args:
        updates: ``(B, m, n)``, whole; not written to.

    Returns:
        ``(B,)``, fp32; zero for a zero matrix.
    """
    a = updates.float()
    a = a.mT if a.size(-2) < a.size(-1) else a  # (B, l, s)
    largest = a.abs().amax(dim=(-2, -1), keepdim=True)
    a = a / torch.where(largest > 0, largest, 1.0)  # squares neither overflow nor vanish
    # The run's own random numbers are not touched.
    start = torch.randn(a.size(-1), generator=torch.Generator().manual_seed(0)).to(a.device)
    v = start.expand(len(a), -1).unsqueeze(-1)  # (B, s, 1)
    top = torch.zeros(len(a), device=a.device)
    with torch.autocast(a.device.type, enabled=False):
        for _ in range(_POWER_STEPS):
            v = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True).clamp_min(1e-30)
            u = a @ v
            top = u.square().sum(dim=(-2, -1))
            v = a.mT @ u
    whole = torch.linalg.vector_norm(a, dim=(-2, -1)).square()
    return torch.where(top > 0, whole / top.clamp_min(1e-30), 0.0)


def _squares(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm.float().square()


def _adamw_squares(exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, betas: Sequence[float], eps: float) -> Tensor:
    """Sum of the squares of AdamW's update, that which its learning rate multiplies."""
    count = step.to(exp_avg.device)
    first, second = 1 - betas[0] ** count, 1 - betas[1] ** count
    total = torch.zeros((), device=exp_avg.device)
    chunks = [torch.split(moment.reshape(-1), _CHUNK) for moment in (exp_avg, exp_avg_sq)]
    for m, v in zip(*chunks, strict=True):
        total += _squares((m.float() / first) / ((v.float() / second).sqrt() + eps))
    return total


# --- one observed step


class Watch:
    """What is seen of one step; values stay on their devices until `read`."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.rates: dict[str, float] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._keys: list[tuple[str, str, int]] = []
        self._values: list[Tensor] = []

    def _add(self, measure: str, name: str, value: Tensor, weight: int) -> None:
        if weight:
            self._keys.append((measure, name, weight))
            self._values.append(value)

    def muon(self, names: Mapping[int, str], shapes: Mapping[int, tuple[int, ...]], lr: float) -> None:
        """The matrices of a group, by their positions."""
        self.rates["muon_lr"] = lr
        self.shapes.update({name: shapes[k] for k, name in names.items()})

    def momentum(self, name: str, buffer: Tensor) -> None:
        """What this rank stores of a momentum, after it has moved."""
        self._add("momentum_rms", name, _squares(buffer), buffer.numel())

    def direction(self, name: str, piece: Tensor, scale: float) -> None:
        """A piece of a direction, which its learning rate and its scale will multiply."""
        self._add("update_rms", name, _squares(piece) * scale**2, piece.numel())

    def orthogonalized(self, runs: Sequence[tuple[str, int]], updates: Tensor, directions: Tensor) -> None:
        """Whole matrices and their directions.

        Args:
            runs: names and numbers of matrices, in the order of the batch.
            updates: ``(B, m, n)``.
            directions: ``(B, m, n)``.
        """
        counts = [count for _, count in runs]
        for measure, values in (
            ("orthogonality_error", orthogonality_error(directions)),
            ("stable_rank", stable_rank(updates)),
        ):
            for (name, count), part in zip(runs, torch.split(values, counts), strict=True):
                self._add(measure, name, part.sum(), count)

    def adamw(self, name: str, state: Mapping[str, Tensor], betas: Sequence[float], eps: float, lr: float) -> None:
        """What this rank stores of a parameter's moments, after they have moved."""
        self.rates["adamw_lr"] = lr
        self.shapes.setdefault(name, ())
        moments = state["exp_avg"], state["exp_avg_sq"]
        self._add(ADAMW_MEASURE, name, _adamw_squares(*moments, state["step"], betas, eps), moments[0].numel())

    def read(self) -> dict[str, dict[str, float]]:
        """Each measure by name; one read of each device."""
        numbers: list[float] = [0.0] * len(self._values)
        by_device: dict[torch.device, list[int]] = {}
        for i, value in enumerate(self._values):
            by_device.setdefault(value.device, []).append(i)
        for indices in by_device.values():
            for i, number in zip(indices, torch.stack([self._values[i] for i in indices]).tolist(), strict=True):
                numbers[i] = number
        sums: dict[tuple[str, str], tuple[float, int]] = {}
        for (measure, name, weight), number in zip(self._keys, numbers, strict=True):
            total, weights = sums.get((measure, name), (0.0, 0))
            sums[measure, name] = total + number, weights + weight
        found: dict[str, dict[str, float]] = {}
        for (measure, name), (total, weight) in sums.items():
            mean = total / weight
            found.setdefault(measure, {})[name] = math.sqrt(mean) if measure.endswith("_rms") else mean
        return found


class _Clock:
    """When optimizer steps begin and end: on CUDA by events, which nobody waits for, else by the wall."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"

    def now(self) -> Any:
        """This moment."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two moments that have passed."""
        return float(begin.elapsed_time(end)) / 1e3 if self._on_cuda else float(end - begin)


# --- from step to step


class Metrics:
    """Watches every N-th step and writes what it sees. Exists on rank 0, where metrics are on, and nowhere else.

    Args:
        every: steps from one line to the next.
        file: where lines are appended; None for `muon_diagnostics.jsonl` in the working directory.
    """

    def __init__(self, every: int, file: str | os.PathLike[str] | None = None) -> None:
        self.every = every
        self.file = Path(file or FILE)
        self._watch: Watch | None = None
        self._clock: _Clock | None = None
        self._began: dict[int, Any] = {}
        self._ended: dict[int, Any] = {}
        self._names: list[str] = []
        self._news: dict[str, float] = {}
        self._writes = True
        self._started = False

    def begin(self, step: int, device: torch.device) -> Watch | None:
        """Before a step; what is to watch it, where it is to be watched.

        Args:
            step: its number, from one.
            device: on which it is timed.
        """
        if self._watch is not None and self._watch.step != step:
            self.flush()
        due = step % self.every == 0
        # The step before is timed, which is not made slower by being watched.
        if due or (step + 1) % self.every == 0:
            self._clock = self._clock or _Clock(device)
            self._began.setdefault(step, self._clock.now())
        if due and self._watch is None:
            self._watch = Watch(step)
        return self._watch if due else None

    def end(self, step: int, *, whole: bool) -> None:
        """After a step.

        Args:
            step: its number.
            whole: whether it is over; otherwise more of it follows.
        """
        if step in self._began and self._clock is not None:
            self._ended[step] = self._clock.now()
        if whole and self._watch is not None:
            self.flush()

    def flush(self) -> None:
        """Write what was seen last."""
        watch, self._watch = self._watch, None
        if watch is None or not watch.shapes:  # a step that was refused, or that had no gradients
            return
        found = watch.read()
        times = self._times(watch.step)
        if not self._started or list(watch.shapes) != self._names:
            self._start(watch)
        line: dict[str, Any] = {"event": "step", "step": watch.step, **watch.rates, **times}
        for measure in (*MEASURES, ADAMW_MEASURE):
            if values := found.get(measure):
                line[measure] = [_short(values.get(name)) for name in self._names]
        self._write(line)
        self._news = {**_summary(found), **{f"muon/{key.removeprefix('muon_')}": v for key, v in watch.rates.items()}}
        self._news |= {f"muon/{key}": value for key, value in times.items()}

    def _times(self, step: int) -> dict[str, float]:
        before, clock = step - 1, self._clock
        times = {}
        if clock is not None and before in self._ended and step in self._began:
            whole = clock.seconds(self._began[before], self._began[step])
            own = clock.seconds(self._began[before], self._ended[before])
            times = {"step_ms": whole * 1e3, "optimizer_ms": own * 1e3, "time_share": own / whole if whole else 0.0}
        self._began = {k: moment for k, moment in self._began.items() if k >= step}
        self._ended = {k: moment for k, moment in self._ended.items() if k >= step}
        return times

    def _start(self, watch: Watch) -> None:
        """What the lists of later lines are about, once, and again where that changes."""
        self._started, self._names = True, list(watch.shapes)
        self._write(
            {
                "event": "start",
                "time": time.time(),
                "hf_muon": sys.modules["hf_muon"].__version__,
                "torch": torch.__version__,
                "ranks": torch.distributed.get_world_size() if diagnostics.has_process_group() else 1,
                "every": self.every,
                "parameters": [
                    {"name": name, "layer": layer, "kind": kind, "shape": list(watch.shapes[name])}
                    for name, (layer, kind) in zip(self._names, parameters_of(self._names), strict=True)
                ],
            }
        )
        diagnostics.logger().info("diagnostics every %d steps: %s", self.every, self.file)

    def news(self) -> dict[str, float]:
        """Means over matrices, named `muon/...`, of the step seen last; empty where they were asked for before."""
        self.flush()
        news, self._news = self._news, {}
        return news

    def heard(self, step: int, logs: Mapping[str, Any]) -> None:
        """Write down what a Trainer logs: the loss, the gradient's norm."""
        numbers = {key: value for key, value in logs.items() if isinstance(value, (int, float)) and "/" not in key}
        self._write({"event": "log", "step": step, **{key: _short(value) for key, value in numbers.items()}})

    def _write(self, line: Mapping[str, Any]) -> None:
        if not self._writes:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("ab+") as out:
                # A run that was killed may have left half a line.
                if out.seek(0, os.SEEK_END) and not (out.seek(-1, os.SEEK_END), out.read(1) == b"\n")[1]:
                    out.write(b"\n")
                out.write(json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        except OSError as error:  # a full disk is no reason to end a run
            self._writes = False
            diagnostics.logger().warning("diagnostics end here, %s cannot be written: %s", self.file, error)


def _short(value: float | None) -> float | None:
    """Six digits; None for what is not known or not a number."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _summary(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Means over matrices, and of update RMS also by kind."""
    means = {f"muon/{measure}": math.fsum(values.values()) / len(values) for measure, values in found.items()}
    by_kind: dict[str, list[float]] = {}
    updates = found.get("update_rms", {})
    for (_, kind), value in zip(parameters_of(list(updates)), updates.values(), strict=True):
        by_kind.setdefault(kind, []).append(value)
    return means | {f"muon/update_rms/{kind}": math.fsum(some) / len(some) for kind, some in by_kind.items()}


def parameters_of(names: Sequence[str]) -> list[tuple[int | None, str]]:
    """Layer and kind of each parameter: `model.layers.3.mlp.up_proj.weight` is `mlp.up_proj` in layer 3.

    Where a model has several stacks of layers, the kind begins with the stack.
    """
    found: list[tuple[int | None, str, str]] = []
    for name in names:
        name = re.sub(r"(\.default)?\.weight(?=$|\[)", "", name)
        match = re.match(r"(?:(.*?)\.)?(\d+)\.(.+)$", name)
        if match is None:
            found.append((None, "", name))
        else:
            found.append((int(match[2]), match[1] or "", re.sub(r"(?<=\.)\d+(?=\.|$)", "*", match[3])))
    stacks = {stack for layer, stack, _ in found if layer is not None}
    return [
        (layer, f"{stack.rpartition('model.')[2]} {kind}" if layer is not None and len(stacks) > 1 else kind)
        for layer, stack, kind in found
    ]
