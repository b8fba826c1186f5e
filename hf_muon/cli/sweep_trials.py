"""Run a sweep's trials, one process after another, and keep their results, so that a sweep can be continued."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from hf_muon.cli.sweep_files import ADAMW, FILE, MUON, trial_settings, write_settings
from hf_muon.cli.sweep_scores import Trial, best_of, judge, rate_text, read_losses
from hf_muon.integrations.archives import complete_or_absent
from hf_muon.integrations.names import TRAINER_LOG

RESULTS = "trials.jsonl"
_SET_UP = "sweep.json"
_LOG, _LOSSES = "output.log", "losses.jsonl"
_MOST_EXTRA = 2  # rates that are added for an optimizer
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_LARGE = 1_000_000  # bytes
_SHOWN = 12  # lines of a log
# torchrun (accelerate's and LLaMA-Factory's, too) and DeepSpeed's launcher. accelerate alone ends with a traceback.
_LAUNCHER = re.compile(
    r"torch/distributed/elastic/multiprocessing/api\.py.*(failed \(|closing signal)|sigkill_handler\]"
)
_TRACEBACK = "Traceback (most recent call last):"
_GRACE = 30.0  # seconds; launchers end their ranks when they are asked to end


@dataclass(frozen=True)
class Sweep:
    """What all trials of a sweep share.

    Attributes:
        folder: where trials and results are.
        settings: of the user's training file.
        suffix: of that file.
        command: the words of the user's command, with `{file}` for the training file.
        steps: the number of optimizer steps of a trial.
    """

    folder: Path
    settings: Mapping[str, Any]
    suffix: str
    command: Sequence[str]
    steps: int

    def of_trial(self, optimizer: str, rate: float) -> Path:
        """Return the folder of a trial."""
        return self.folder / f"{optimizer}_{rate_text(rate)}"

    def set_up(self) -> dict[str, Any]:
        """Return what must be the same for results to be comparable, as JSON holds it."""
        trials = {name: trial_settings(self.settings, name, 0.0, self.steps, Path()) for name in (MUON, ADAMW)}
        text = json.dumps({"command": list(self.command), "steps": self.steps, **trials}, default=str)
        content: dict[str, Any] = json.loads(text)
        return content


# --- results


def read_results(sweep: Sweep) -> list[Trial]:
    """Return the trials that have ended, and write down what the sweep is about.

    Raises:
        ValueError: the folder holds another sweep, or something else.
    """
    file, set_up = sweep.folder / _SET_UP, sweep.set_up()
    if not file.exists():
        if sweep.folder.exists() and any(path.name != ".lock" for path in sweep.folder.iterdir()):
            raise ValueError(f"{sweep.folder} is not empty, and holds no sweep. Name another folder: --out")
        with complete_or_absent(file) as target:
            target.write_text(json.dumps(set_up, indent=2), encoding="utf-8")
        return []
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
        text = (sweep.folder / RESULTS).read_text(encoding="utf-8") if (sweep.folder / RESULTS).exists() else ""
        trials = [Trial.from_json(json.loads(line)) for line in text.splitlines()]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{sweep.folder} cannot be read as a sweep ({error}). Name another folder: --out") from error
    if changes := _changes(before, set_up):
        raise ValueError(
            f"{sweep.folder} holds trials that are not comparable with these: {'; '.join(changes)}. Name another "
            f"folder (--out), or remove {sweep.folder}"
        )
    return trials


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs, with both values."""
    pairs = {key: (before.get(key), now[key]) for key in ("steps", "command")}
    for optimizer in (ADAMW, MUON):  # Muon's options, which AdamW's side does not have, come last
        old, new = before.get(optimizer, {}), now[optimizer]
        pairs |= {key: (old.get(key), new.get(key)) for key in {**old, **new} if key not in ("max_steps", "optim")}
    return [f"{key} was {old}, and is {new}" for key, (old, new) in pairs.items() if old != new]


def write_results(sweep: Sweep, trials: Sequence[Trial]) -> None:
    """Write all results, one trial a line."""
    with complete_or_absent(sweep.folder / RESULTS) as target:
        lines = (json.dumps(trial.as_json(), allow_nan=False) for trial in trials)
        target.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


# --- which rates


def next_rate(trials: Sequence[Trial], rates: Sequence[float], *, extend: bool) -> tuple[float, str] | None:
    """Return the next rate of an optimizer and why it was added; None if there is none.

    Args:
        trials: of this optimizer, run or read.
        rates: that the user named, ascending.
        extend: add a rate beyond the best one, at most two, while that is the lowest or the highest.
    """
    tried = {trial.rate for trial in trials}
    for rate in rates:
        if rate not in tried:
            return rate, ""
    best, ladder = best_of(trials), sorted(tried)
    if not extend or best is None or sum(trial.added for trial in trials) >= _MOST_EXTRA:
        return None
    if best.rate == ladder[-1]:
        factor, side = (ladder[-1] / ladder[-2] if len(ladder) > 1 else 3.0), "highest"
    elif best.rate == ladder[0]:
        factor, side = ladder[0] / ladder[1], "lowest"
    else:
        return None
    digits = 0 if max(factor, 1 / factor) >= 2 else 2
    rate = float(f"{best.rate * factor:.{digits}e}")
    return (rate, f"{rate_text(best.rate)} is the best rate and the {side}") if rate not in tried else None


def rates_around(rate: float) -> list[float]:
    """Return a rate with one of about a third and one of three times it."""
    return [float(f"{rate / 3:.0e}"), rate, float(f"{rate * 3:.1e}")]


# --- running


def run_trial(sweep: Sweep, optimizer: str, rate: float, lock: IO[str], tick: Callable[[int], None]) -> Trial:
    """Run a trial from its beginning and return its result.

    Args:
        sweep: what it belongs to.
        optimizer: `muon` or `adamw`.
        rate: the learning rate.
        lock: inherited by the command, so that no other sweep writes to this folder while it runs.
        tick: called several times a second with the number of steps that were logged.

    Raises:
        ValueError: the command does not exist.
    """
    folder = sweep.of_trial(optimizer, rate)
    shutil.rmtree(folder, ignore_errors=True)
    output = folder / "output"
    output.mkdir(parents=True)
    file = folder / f"run{sweep.suffix}"
    write_settings(file, trial_settings(sweep.settings, optimizer, rate, sweep.steps, output.absolute()))
    words = [word.replace(FILE, str(file.absolute())) for word in sweep.command]
    sources = (folder / _LOSSES, output / "trainer_log.jsonl", output / "trainer_state.json")
    began = time.monotonic()
    with (folder / _LOG).open("wb") as log:
        environment = {**os.environ, TRAINER_LOG: str(sources[0].absolute())}
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )
        except OSError as error:
            raise ValueError(f"{words[0]} cannot be run: {error.strerror}. Name the command after --") from error
        try:
            while process.poll() is None:
                tick(max(read_losses(*sources[:2])[0], default=0))
                time.sleep(0.05 if time.monotonic() - began < 5 else 0.5)
        except BaseException:
            _end(process)
            raise
    losses, evaluation = read_losses(*sources)
    trial = Trial(optimizer, rate, losses=dict(sorted(losses.items())), eval_loss=evaluation, steps=sweep.steps)
    trial.seconds = round(time.monotonic() - began, 1)
    judge(trial, process.returncode, last_lines(folder / _LOG))
    _remove_weights(output)
    return trial


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _remove_weights(output: Path) -> None:
    """Remove checkpoints, weights and large files; logs, metrics and configurations stay."""
    for path in sorted(output.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink() and path.name.startswith("checkpoint-"):
            shutil.rmtree(path, ignore_errors=True)
        elif path.suffix in _WEIGHTS or (path.is_file() and path.suffix != ".jsonl" and path.lstat().st_size > _LARGE):
            path.unlink()


def log_of(sweep: Sweep, trial: Trial) -> Path:
    """Return the file with what the command of a trial printed."""
    return sweep.of_trial(trial.optimizer, trial.rate) / _LOG


def last_lines(log: Path, count: int = _SHOWN) -> list[str]:
    """Return the last lines of a log that are not empty; of a progress bar, what it showed last.

    What a launcher says of ranks that have failed is left out: the reason stands above it.
    """
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 50_000))
        lines = file.read().decode("utf-8", errors="replace").split("\n")
    lines = [line.split("\r")[-1] for line in map(str.rstrip, lines) if line.split("\r")[-1]]
    return lines[: _without_launcher(lines)][-count:]


def _without_launcher(lines: Sequence[str]) -> int:
    """Return the number of lines before those in which a launcher reports that its processes have failed."""
    first = next((i for i, line in enumerate(lines) if _LAUNCHER.search(line)), len(lines))
    last = max((i for i, line in enumerate(lines[:first]) if line == _TRACEBACK), default=first)
    if any("accelerate/commands/" in line for line in lines[last:first]):
        first = last
    return first or len(lines)


def fail_alike(a: Trial, b: Trial) -> bool:
    """Return whether two trials failed for the same reason, whatever numbers and paths it names."""

    def without_numbers(trial: Trial) -> str:
        return re.sub(r"\S*/\S*|[\d.]+(e-?\d+)?", "", trial.reason)

    return a.status == b.status == "failed" and without_numbers(a) == without_numbers(b)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[IO[str]]:
    """Make a folder and hold its lock.

    Raises:
        RuntimeError: another sweep, or a command that one started, uses the folder.
    """
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RuntimeError(
                f"{folder} is in use: another sweep, or a command that one has started, is still running there"
            ) from error
        yield lock


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that the command of a trial ends with the sweep."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
