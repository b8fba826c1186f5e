"""`hf-muon sweep`: short runs of the user's own command, over a few learning rates."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hf_muon.cli.console import console, fail, print_json

if TYPE_CHECKING:
    from hf_muon.cli.sweep_scores import Trial
    from hf_muon.cli.sweep_trials import Sweep

_PAGE = "sweep.html"


def sweep(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A training file: YAML or JSON of transformers, TRL or LLaMA-Factory."),
    ],
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND]",
            help="After --, the command that trains, with {file} for the training file. Default for LLaMA-Factory: "
            "llamafactory-cli train {file}; for TRL's sft: trl sft --config {file}.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of a trial.")] = 100,
    rates: Annotated[
        str | None,
        typer.Option(
            help="Learning rates, as in 1e-5,3e-5,1e-4. Default: a third of FILE's, FILE's, and three times that.",
            show_default=False,
        ),
    ] = None,
    adamw: Annotated[bool, typer.Option("--adamw", help="Also try each rate with AdamW (adamw_torch).")] = False,
    extend: Annotated[
        bool,
        typer.Option(
            "--extend/--no-extend", help="While the best rate is the lowest or highest, try the next (at most two)."
        ),
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of trials and results. Default: FILE's name with _sweep.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train some steps at each of a few learning rates, and compare their losses.

    Each trial runs your own command with a copy of FILE. If interrupted, run the same command again to continue.
    """
    ladder = _read_rates(rates)
    words = list(command or ())
    if words and not any("{file}" in word for word in words):
        raise typer.BadParameter("the command after -- has no {file}, which stands for the training file")
    try:
        import plotly  # noqa: F401  before anything is trained

        from hf_muon.cli.sweep_files import ADAMW, MUON, default_command, file_rate, refuse_sweep
        from hf_muon.cli.sweep_scores import evaluates, recommendation
        from hf_muon.cli.sweep_trials import Sweep, locked, rates_around, read_results, terminated_as_interrupted
        from hf_muon.integrations.transformers.training_file import read_training_file

        settings = read_training_file(file)
        words = words or default_command(file, settings)
        notes = refuse_sweep(file, settings, words, steps)
        if not ladder:
            rate = file_rate(settings)
            if rate is None:
                raise ValueError(f"{file} has no learning_rate to begin with. Name some: --rates 1e-5,3e-5,1e-4")
            ladder = rates_around(rate)
        folder = out or Path(f"{file.stem}_sweep")
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--out {folder} is not a directory")
        shared = Sweep(folder, settings, file.suffix, words, steps)
        optimizers = [MUON, *([ADAMW] if adamw else [])]
        with terminated_as_interrupted(), locked(folder) as lock:
            trials = _Runner(shared, read_results(shared), lock).run(optimizers, ladder, extend=extend)
        advice = recommendation(trials)
        picture = _draw(shared, file, trials, advice)
    except KeyboardInterrupt:
        fail("interrupted. Run the same command again to continue: trials that have ended are kept")
    except (ValueError, RuntimeError, OSError) as error:
        fail(error)
    if as_json:
        rows = [trial.as_json() for trial in trials]
        print_json(
            {
                "file": str(file),
                "command": words,
                "steps": steps,
                "folder": str(folder),
                "score": "eval_loss" if evaluates(trials) else "loss",
                "trials": rows,
                "recommendation": advice,
                "picture": str(picture),
                "notes": notes,
            }
        )
    else:
        _show(shared, trials, advice, picture, notes)
    if advice["rate"] is None:
        raise typer.Exit(1)


def _read_rates(text: str | None) -> list[float]:
    """Return the rates of `--rates`, ascending, each once; empty if there are none."""
    try:
        numbers = {float(word) for word in text.split(",")} if text is not None else set()
    except ValueError:
        numbers = {math.nan}
    if not all(0 < number < math.inf for number in numbers):
        raise typer.BadParameter(f"--rates {text}: expected positive numbers with commas between, as in 1e-5,3e-5,1e-4")
    return sorted(numbers)


class _Runner:
    """Run the trials that a sweep lacks, show progress on stderr, and write every result as soon as it is there."""

    def __init__(self, shared: Sweep, results: Sequence[Trial], lock: IO[str]) -> None:
        self.shared = shared
        self.lock = lock
        self.trials = [trial for trial in results if trial.status != "failed"]
        self.screen = Console(stderr=True, soft_wrap=True)
        self._last_failure: Trial | None = None
        ended = ", ".join(f"{trial.name}" for trial in self.trials)
        again = ", ".join(f"{trial.name}" for trial in results if trial.status == "failed")
        self._say(f"trials in {shared.folder}" + (f": continued, without {ended}, which ended before" if ended else ""))
        if again:
            self._say(f"run again, because they failed before: {again}")

    def run(self, optimizers: Sequence[str], rates: Sequence[float], *, extend: bool) -> list[Trial]:
        """Return the results of all trials of these optimizers, those that were there before included.

        Raises:
            RuntimeError: the first two commands that were run failed alike.
        """
        from hf_muon.cli.sweep_scores import rate_text
        from hf_muon.cli.sweep_trials import next_rate

        for k, optimizer in enumerate(optimizers):
            while True:
                own = [trial for trial in self.trials if trial.optimizer == optimizer]
                due = next_rate(own, rates, extend=extend)
                if due is None:
                    break
                rate, reason = due
                if reason:
                    self._say(f"{reason} of these: {rate_text(rate)} is tried, too")
                tried = {trial.rate for trial in own}
                ahead = sum(other not in tried for other in rates) + len(rates) * (len(optimizers) - k - 1)
                self._run(optimizer, rate, max(ahead, 1), added=bool(reason))
        return sorted((t for t in self.trials if t.optimizer in optimizers), key=_order)

    def _run(self, optimizer: str, rate: float, ahead: int, *, added: bool) -> None:
        from hf_muon.cli.sweep_scores import NAMES, rate_text
        from hf_muon.cli.sweep_trials import fail_alike, last_lines, log_of, run_trial, write_results

        name = f"{NAMES[optimizer]} at {rate_text(rate)}"
        columns = (
            TextColumn("{task.description}"),
            BarColumn(20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        with Progress(*columns, console=self.screen, transient=True, disable=not self.screen.is_terminal) as progress:
            task = progress.add_task(name, total=self.shared.steps, left="")
            began = time.monotonic()

            def tick(step: int) -> None:
                left = self._left(step, time.monotonic() - began, ahead)
                description = f"trial {len(self.trials) + 1}, {name}, step {step} of {self.shared.steps}"
                progress.update(task, completed=step, description=description, left=left)

            trial = run_trial(self.shared, optimizer, rate, self.lock, tick)
        trial.added = added
        self.trials.append(trial)
        write_results(self.shared, sorted(self.trials, key=_order))
        self._say(f"{name}: {_outcome(trial)} in {_time(trial.seconds)}")
        alone = all(other.status == "failed" for other in self.trials)
        if alone and self._last_failure and fail_alike(self._last_failure, trial):
            log = log_of(self.shared, trial)
            lines = "\n".join(f"  {line}" for line in last_lines(log))
            raise RuntimeError(
                f"the command fails at once, with {self._last_failure.name} and with {trial.name}: {trial.reason}. "
                f"The end of {log}:\n{lines}"
            )
        self._last_failure = trial if trial.status == "failed" else None

    def _left(self, step: int, elapsed: float, ahead: int) -> str:
        """Say how long the rest takes, without rates that may be added."""
        known = [trial.seconds for trial in self.trials if trial.status == "finished"]
        if not known and step < 2:
            return ""
        whole = sum(known) / len(known) if known else elapsed * self.shared.steps / step
        return f"about {_time(max(whole - elapsed, 0) + whole * (ahead - 1))} left"

    def _say(self, text: str) -> None:
        self.screen.print(text, style="dim", markup=False, highlight=False)


def _order(trial: Trial) -> tuple[bool, float]:
    return trial.optimizer != "muon", trial.rate


def _outcome(trial: Trial) -> str:
    if trial.loss is None:
        return f"{trial.status}, {trial.reason}"
    evaluation = "" if trial.eval_loss is None else f", evaluation loss {trial.eval_loss:.4f}"
    return f"loss {trial.loss:.4f}{evaluation}{f', {trial.reason}' if trial.reason else ''}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _draw(shared: Sweep, file: Path, trials: Sequence[Trial], advice: dict[str, Any]) -> Path:
    """Write the picture."""
    from hf_muon.cli.sweep_page import sweep_page
    from hf_muon.integrations.archives import complete_or_absent

    facts = {
        "result": advice["text"],
        "trials": f"{len(trials)}, of {shared.steps} steps each",
        "command": " ".join(shared.command),
    }
    text = sweep_page(f"Learning rates for {file.name}", trials, facts)
    with complete_or_absent(shared.folder / _PAGE) as target:
        target.write_text(text, encoding="utf-8")
    return shared.folder / _PAGE


def _show(shared: Sweep, trials: Sequence[Trial], advice: dict[str, Any], picture: Path, notes: Sequence[str]) -> None:
    from hf_muon.cli.sweep_scores import NAMES, rate_text

    evaluated = any(trial.eval_loss is not None for trial in trials)
    table = Table(title=f"{shared.steps} steps; loss: mean of the last tenth of them", title_justify="left")
    table.add_column("")
    table.add_column("rate", justify="right")
    table.add_column("loss", justify="right")
    if evaluated:
        table.add_column("evaluation", justify="right")
    table.add_column("time", justify="right")
    table.add_column("")
    for trial in trials:
        best = trial.optimizer == "muon" and trial.rate == advice["rate"]
        remark = trial.reason if trial.status == "finished" else f"{trial.status}: {trial.reason}"
        cells = [NAMES[trial.optimizer], rate_text(trial.rate), "" if trial.loss is None else f"{trial.loss:.4f}"]
        if evaluated:
            cells.append("" if trial.eval_loss is None else f"{trial.eval_loss:.4f}")
        table.add_row(*cells, _time(trial.seconds), escape(remark), style="bold" if best else "")
    screen = console()
    screen.print(table)
    screen.print(advice["text"], markup=False, highlight=False)
    screen.print(f"picture: {picture}", markup=False, highlight=False)
    for note in notes:
        screen.print(note, style="yellow", markup=False, highlight=False)
