"""Run a study's trials, each in a process of one thread on its own core, and enter them into the CSV file."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from evidence.agenda import all_trials, failed_rows, remaining, wanted, without_running
from evidence.corpus import Corpus
from evidence.processes import launch, locked, machine, new_folder, source, terminated_as_interrupted, versions
from evidence.results import DIVERGED, DONE, FAILED, add_row, losses_text, read_rows, refuse_other_setups, write_rows
from evidence.study import START, Study, Trial

MOST_FAILURES = 2  # in one call; then something is wrong that the next trial would repeat
TRIAL = ("-m", "evidence.trial")
_POLL = 0.05  # seconds


@dataclass
class Job:
    """A trial in its process."""

    trial: Trial
    process: subprocess.Popen[bytes]
    folder: Path
    core: int | None


class Runner:
    """Trials of a study and their processes.

    Args:
        study: what to run.
        path: of the CSV file.
        corpus: the text.
        cores: to pin processes to, one process each; None for no pinning.
        minutes: after which no more trials start; None for all.
        program: words after `python` of the process of a trial.
    """

    def __init__(
        self,
        study: Study,
        path: Path,
        corpus: Corpus,
        cores: list[int | None],
        minutes: float | None = None,
        program: Sequence[str] = TRIAL,
    ) -> None:
        self.study, self.path, self.corpus, self.cores, self.program = study, path, corpus, cores, program
        self.deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self.jobs: list[Job] = []
        self.failures = 0

    def run(self) -> bool:
        """Run trials until none is left or the time is over; return whether the study is complete.

        Raises:
            RuntimeError: trials fail one after another, or another process runs the study.
            ValueError: the file has rows of other settings or another text.
        """
        with locked(self.path), terminated_as_interrupted():
            rows = read_rows(self.path)
            refuse_other_setups(rows, all_trials(self.study, rows), self.corpus.name, self.path)
            self._report("starting")
            try:
                while self._fill() or self.jobs:
                    self._collect()
            finally:
                for job in self.jobs:
                    job.process.kill()
                    job.process.wait()
        return next(wanted(self.study, read_rows(self.path)), None) is None

    def _fill(self) -> bool:
        """Start trials on free cores; return whether one was started."""
        free = list(self.cores)
        for job in self.jobs:
            free.remove(job.core)
        started = False
        while free and self.failures < MOST_FAILURES and time.monotonic() < self.deadline:
            running = {job.trial.id for job in self.jobs}
            trial = without_running(wanted(self.study, read_rows(self.path)), running)
            if trial is None:
                break
            self.jobs.append(self._start(trial, free.pop(0)))
            started = True
        return started

    def _start(self, trial: Trial, core: int | None) -> Job:
        self._make_start(trial, core)
        spec = {**trial.spec, "save": True} if trial.kind == START else trial.spec
        folder = new_folder("trials", trial.setup(self.corpus.name))
        return Job(trial, launch(self.program, spec, self.corpus, folder, core), folder, core)

    def _make_start(self, trial: Trial, core: int | None) -> None:
        """Train the weights that a trial starts from again if another machine has made their row."""
        start = trial.spec.get("start")
        if start is None:
            return
        from evidence.trial import weights_file

        if not weights_file(start, self.corpus).is_file():
            folder = new_folder("trials", f"start-{trial.setup(self.corpus.name)}")
            process = launch(self.program, {**start, "save": True}, self.corpus, folder, core)
            try:
                status = process.wait()
            finally:
                process.kill()
            if status:
                raise RuntimeError(f"the start of {trial.id} failed: see {folder / 'output.log'}")

    def _collect(self) -> None:
        time.sleep(_POLL)
        for job in [job for job in self.jobs if job.process.poll() is not None]:
            self.jobs.remove(job)
            if job.process.returncode < 0:
                self._interrupted(job)
                continue
            row = self._row(job)
            add_row(self.path, row)
            self.failures += row["status"] == FAILED
            if row["status"] != FAILED:
                shutil.rmtree(job.folder)
            self._report(f"{job.trial.id}: {row['status']} {row['loss']}{row['reason']}")
            if row["status"] == FAILED and self.failures >= MOST_FAILURES:
                raise RuntimeError(
                    f"{len(failed_rows(read_rows(self.path)))} trials failed, the last one with {row['reason']!r} (see "
                    f"{job.folder / 'output.log'}). Repair it, and repeat them with --retry"
                )

    def _interrupted(self, job: Job) -> None:
        """Count a trial that a signal has ended: that says nothing about its settings, so that it runs again."""
        self.failures += 1
        name = signal.Signals(-job.process.returncode).name
        self._report(f"{job.trial.id}: ended by {name}, runs again")
        if self.failures >= MOST_FAILURES:
            raise RuntimeError(f"{self.failures} trials did not end, the last one because of {name}: is memory short?")

    def _row(self, job: Job) -> dict[str, str]:
        spec = job.trial.spec
        file = job.folder / "result.json"
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        loss = result.get("loss", math.nan)
        status = FAILED if not result else DONE if math.isfinite(loss) else DIVERGED
        row = {
            "id": job.trial.id,
            "cell": job.trial.cell,
            "side": job.trial.side,
            "kind": job.trial.kind,
            "settings": json.dumps(spec["values"]),
            "seed": str(job.trial.seed),
            "status": status,
            "loss": f"{loss:.5f}" if status == DONE else "",
            "part": spec["part"],
            "steps": str(spec["steps"]),
            "tokens_per_step": str(spec["batch"] * spec["context"]),
            "losses": losses_text({int(step): value for step, value in result.get("losses", {}).items()}),
            "setup": job.trial.setup(self.corpus.name),
            "corpus": self.corpus.name,
            "machine": machine(),
            "versions": versions(),
            "source": source(),
            "date": date.today().isoformat(),
            "reason": ""
            if result
            else f"exit status {job.process.returncode}: {_last_line(job.folder / 'output.log')}",
        }
        row |= {key: str(result[key]) for key in ("parameters",) if key in result}
        numbers = {"other_loss_before": 5, "other_loss": 5, "movement": 5, "cpu_seconds": 3, "seconds": 1}
        return row | {key: f"{result[key]:.{digits}f}" for key, digits in numbers.items() if key in result}

    def _report(self, text: str) -> None:
        count, seconds = remaining(self.study, read_rows(self.path))
        left = f"about {count} trials, {seconds / 3600 / len(self.cores):.1f} h left"
        print(f"{time.strftime('%H:%M:%S')} {self.study.name}: {text}; {left}", flush=True)


def drop_failed(path: Path) -> int:
    """Remove the rows of failed trials, so that they run again; return how many there were."""
    rows = read_rows(path)
    failed = failed_rows(rows)
    if failed:
        write_rows(path, [row for name, row in rows.items() if name not in failed])
    return len(failed)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "no output")
