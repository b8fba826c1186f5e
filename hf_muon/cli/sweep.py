"""`hf-muon sweep`: run the user's command for a few steps at several learning rates."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from filelock import FileLock, Timeout
from rich.table import Table

from hf_muon.cli.console import console, fail

_FILE = "{file}"
_RESULT, _LOG = "result.json", "output.log"
# The names in the logs of Trainer, LLaMA-Factory and its v1.
_STEPS, _RATES = ("step", "current_steps", "global_step"), ("learning_rate", "lr")


@dataclass
class Trial:
    """A short run and its result.

    Attributes:
        rate: the learning rate.
        losses: the training loss by step.
        rates: the learning rates that the program has logged.
        eval_loss: the loss of the last evaluation; None without one.
        failure: why it has no losses; empty if it has some.
        setup: the settings and the command, on which the result depends.
    """

    rate: float
    losses: dict[int, float] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    eval_loss: float | None = None
    failure: str = ""
    setup: Mapping[str, Any] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The mean loss of the last tenth of the steps; NaN if the trial failed."""
        last = list(self.losses.values())[-max(1, len(self.losses) // 10) :]
        return statistics.fmean(last) if last else math.nan


def sweep(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A training file: YAML or JSON of transformers, TRL or LLaMA-Factory."),
    ],
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND", help="The command that trains, with {file} for the training file."),
    ],
    rates: Annotated[str, typer.Option(help="Learning rates, as in 1e-5,3e-5,1e-4.")],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of a trial.")] = 100,
    out: Annotated[Path | None, typer.Option(help="Folder of results. Default: FILE's name with _sweep.")] = None,
) -> None:
    """Train some steps at each of a few learning rates, and compare their losses.

    Each trial runs your own command with a copy of FILE. If interrupted, run the same command again to continue.
    """
    ladder = _read_rates(rates)
    if not any(_FILE in word for word in command):
        raise typer.BadParameter(
            "the command after -- has no {file}, which stands for the training file [no-file-placeholder]"
        )
    # A signal becomes a KeyboardInterrupt, so that the command of a trial ends, too, also when the terminal is closed.
    before = {end: signal.signal(end, signal.default_int_handler) for end in (signal.SIGTERM, signal.SIGHUP)}
    try:
        from hf_muon.integrations.transformers.training_file import read_training_file

        settings = read_training_file(file)
        folder = out or Path(f"{file.stem}_sweep")
        _refuse(file, settings, command, steps, [folder / rate_text(rate) for rate in ladder])
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=0):
            trials: list[Trial] = []
            for rate in ladder:
                target = folder / rate_text(rate)
                trial = _run(target, file.suffix, settings, command, rate, steps)
                if trial.failure and not trials:
                    raise RuntimeError(
                        f"the command fails at the lowest rate, {trial.failure}: see {target / _LOG} [command-fails]"
                    )
                # Losses differ in equal runs, too, if GPUs add in another order: rates first.
                numbers = trial.rates or trial.losses
                if numbers and any(numbers == (other.rates or other.losses) for other in trials):
                    raise RuntimeError(
                        f"the trial at {rate_text(rate)} was the same run as one before: the command does not take "
                        "learning_rate from its file, or something overrides it, such as DeepSpeed's scheduler "
                        "[equal-trials]"
                    )
                trials.append(trial)
        text, best = _result(trials)
    except KeyboardInterrupt:
        fail("interrupted. Run the same command again to continue: trials that have ended are kept [interrupted]")
    except Timeout as error:
        fail(f"another sweep holds {error.lock_file}. Wait for it, or name another folder with --out [folder-in-use]")
    except (ValueError, RuntimeError, OSError) as error:
        fail(error)
    finally:
        for end, handler in before.items():
            signal.signal(end, handler)
    _show(trials, best, text, steps)
    if best is None:
        raise typer.Exit(1)


def _read_rates(text: str) -> list[float]:
    """Return the rates of `--rates`, ascending, each once."""
    try:
        numbers = {float(word) for word in text.split(",")}
    except ValueError:
        numbers = {math.nan}
    if not all(0 < number < math.inf for number in numbers):
        raise typer.BadParameter(
            f"--rates {text}: expected positive numbers with commas between, as in 1e-5,3e-5,1e-4 [invalid-value]"
        )
    return sorted(numbers)


def rate_text(rate: float) -> str:
    """Return a rate as people write it: 0.002, 1e-4, 2.5e-5."""
    mantissa, exponent = f"{rate:.5e}".split("e")
    return f"{rate:g}" if rate >= 1e-3 else f"{float(mantissa):g}e{int(exponent)}"


def trial_settings(
    settings: Mapping[str, Any], rate: float, steps: int, output: Path, command: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the settings of a trial: the user's, with another rate, few steps, and no output but the losses.

    Trainer writes its losses (trainer_state.json) into a checkpoint, so there is one at the end, with only weights;
    with FSDP also the optimizer's state, because Trainer refuses shards of only the weights.
    """
    from hf_muon.integrations.transformers.training_file import is_llamafactory_v1

    trial = {**settings, "learning_rate": rate, "max_steps": steps, "output_dir": str(output), "logging_steps": 1}
    for key in ("resume_from_checkpoint", "save_steps", "save_epochs"):
        trial.pop(key, None)
    if is_llamafactory_v1(settings):
        section = trial.get("optim_config") or {}
        section = json.loads(section) if isinstance(section, str) else section
        return {**trial, "optim_config": {**section, "lr": rate}} if section else trial
    trial |= {
        "logging_strategy": "steps",
        "logging_nan_inf_filter": False,  # otherwise Trainer logs the mean of earlier losses in place of NaN
        "save_strategy": "steps",
        "save_steps": steps,
        "save_only_model": not any("fsdp" in word.lower() for word in (*settings, *command)),
        "load_best_model_at_end": False,
        "report_to": "none",
        "push_to_hub": False,
    }
    if str(trial.get("eval_strategy", "no")).lower() not in ("no", "false"):
        trial |= {"eval_strategy": "steps", "eval_steps": steps}
    return trial


def _refuse(path: Path, settings: Mapping[str, Any], command: Sequence[str], steps: int, folders: list[Path]) -> None:
    """Raise if trials of a file cannot be compared, would delete what no sweep has made, or if Muon refuses the run.

    Raises:
        ValueError: the folder, or the setting.
    """
    from hf_muon.integrations.transformers.training_file import asks_for_muon, options_of, refusals

    for folder in folders:
        held = {entry.name for entry in folder.glob("*")}
        if held - {f"run{path.suffix}", "output", _LOG, _RESULT} or (held and not _is_of_sweep(folder, path.suffix)):
            raise ValueError(
                f"{folder} exists, no sweep has made all that it holds, and a trial would delete it. Name another "
                "folder with --out, or move this one away [folder-exists]"
            )
    method = next((word for word in (*command, settings.get("stage")) if word in ("grpo", "rloo", "ppo")), None)
    if method:
        raise ValueError(
            f"{method} maximizes a reward, and its loss says nothing about a learning rate: compare the rewards of a "
            "few short runs [loss-of-reward]"
        )
    warmup = settings.get("warmup_steps")
    if isinstance(warmup, (int, float)) and warmup >= steps:
        raise ValueError(
            f"{path}: warmup_steps: {warmup:g} leaves no step at the full rate in trials of {steps} steps. Take more "
            "(--steps), or a share of all steps, as in warmup_steps: 0.03 (warmup_ratio: 0.03 before transformers 5) "
            "[warmup-too-long]"
        )
    if not asks_for_muon(settings):
        return
    low, high = (trial_settings(settings, rate, steps, Path("unused")) for rate in (1e-5, 1e-4))
    if complaints := refusals(low):
        raise ValueError(f"{path}: optim: muon would be refused: {complaints[0]}")
    if (options := options_of(low)).muon_lr is not None or options == options_of(high):
        raise ValueError(
            f"{path}: lr or muon_lr among the options of Muon is its rate whatever learning_rate is, so that all "
            "trials would be alike. Remove it from them [fixed-muon-rate]"
        )


def _is_of_sweep(folder: Path, suffix: str) -> bool:
    """Return whether the training file in a folder is that of a trial, which writes into this folder."""
    import yaml

    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        settings = yaml.safe_load((folder / f"run{suffix}").read_text(encoding="utf-8"))
        return isinstance(settings, Mapping) and settings.get("output_dir") == str((folder / "output").absolute())
    return False


def _run(
    folder: Path, suffix: str, settings: Mapping[str, Any], command: Sequence[str], rate: float, steps: int
) -> Trial:
    """Return the result in the folder of a trial; run the trial if there is none."""
    import yaml

    from hf_muon.integrations.archives import complete_or_absent

    output, file = folder / "output", folder / f"run{suffix}"
    changed = trial_settings(settings, rate, steps, output.absolute(), command)
    setup = json.loads(json.dumps({"command": list(command), "settings": changed}, default=str))
    say = functools.partial(console(stderr=True).print, style="dim")
    if (folder / _RESULT).is_file():
        before = Trial(**json.loads((folder / _RESULT).read_text(encoding="utf-8")))
        if before.setup == setup:
            say(f"{rate_text(rate)}: ended before, in {folder}")
            return replace(before, losses={int(step): loss for step, loss in before.losses.items()})
    say(f"{rate_text(rate)}: runs, and writes into {folder / _LOG}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = json.dumps(changed, indent=2) if suffix == ".json" else yaml.safe_dump(changed, sort_keys=False)
    file.write_text(text, encoding="utf-8")
    output.mkdir()
    words = [word.replace(_FILE, str(file.absolute())) for word in command]
    popen = functools.partial(subprocess.Popen, start_new_session=True)
    with (folder / _LOG).open("wb") as log, popen(words, stdout=log, stderr=log) as process:
        try:
            code = process.wait()
        finally:  # end all processes that the command has started, as ranks
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
    losses, rates, evaluation = read_losses(output)
    trial = Trial(rate, losses, rates, evaluation, setup=setup)
    if code or not losses:
        trial.failure = f"exit status {code}" if code else "without a loss in a trainer_state.json or trainer_log.jsonl"
        trial.losses = {}
    else:
        with complete_or_absent(folder / _RESULT) as target:
            target.write_text(json.dumps(asdict(trial)), encoding="utf-8")
    say(f"{rate_text(rate)}: {trial.failure or f'loss {trial.loss:.4g}'}")
    # Only losses are compared; the weights of each trial would fill a disk.
    for weights in output.rglob("*"):
        if weights.suffix in (".safetensors", ".bin", ".pt", ".pth", ".distcp"):
            weights.unlink()
    return trial


def read_losses(output: Path) -> tuple[dict[int, float], list[float], float | None]:
    """Return the training loss by step, the rates, and the last evaluation loss that a run has written below a folder.

    The files are Trainer's trainer_state.json, or LLaMA-Factory's trainer_log.jsonl. With several data sets, the
    evaluation loss is their mean.
    """
    lines: list[dict[str, Any]] = []
    if states := sorted(output.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime):
        lines = json.loads(states[-1].read_text(encoding="utf-8"))["log_history"]
    elif (log := output / "trainer_log.jsonl").is_file():
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    numbered = [(next((line[key] for key in _STEPS if key in line), 0), line) for line in lines]
    losses = {step: float(line["loss"]) for step, line in numbered if line.get("loss") is not None}
    rates = [line[key] for line in lines for key in _RATES if line.get(key) is not None]
    evaluations = [
        (step, value)
        for step, line in numbered
        for key, value in line.items()
        if key.startswith("eval_") and key.endswith("loss") and value is not None
    ]
    last = [value for step, value in evaluations if step == evaluations[-1][0]]
    return losses, rates, statistics.fmean(last) if last else None


def _scores(trials: Sequence[Trial]) -> tuple[str, dict[float, float]]:
    """Return what scores are, the evaluation loss if all trials have one, else the loss; and the scores by rate."""
    ended = [trial for trial in trials if not trial.failure]
    evaluated = all(trial.eval_loss is not None for trial in ended)
    scores = {trial.rate: trial.eval_loss if evaluated else trial.loss for trial in ended}
    finite = {rate: score for rate, score in scores.items() if score is not None and math.isfinite(score)}
    return "evaluation loss" if evaluated else "loss", finite


def _result(trials: Sequence[Trial]) -> tuple[str, float | None]:
    """Return the sentence about the rate with the lowest score, and that rate; None without one."""
    what, scores = _scores(trials)
    if not scores:
        return "No trial ended with a finite loss.", None
    best = min(scores, key=lambda rate: scores[rate])
    edge = {trials[0].rate: "no lower rate was tried, ", trials[-1].rate: "no higher rate was tried, "}.get(best, "")
    return (
        f"Lowest {what}: {scores[best]:.4g} at learning_rate {rate_text(best)}; but {edge}short runs favour higher "
        "rates than long ones, and this is one seed."
    ), best


def _show(trials: Sequence[Trial], best: float | None, text: str, steps: int) -> None:
    columns = ("rate", "loss", "evaluation")[: 3 if any(trial.eval_loss is not None for trial in trials) else 2]
    table = Table(*columns, title=f"{steps} steps; loss: mean of the last tenth of them")
    for trial in trials:
        evaluation = "" if trial.eval_loss is None else f"{trial.eval_loss:.4f}"
        cells = [rate_text(trial.rate), trial.failure or f"{trial.loss:.4f}", evaluation]
        table.add_row(*cells[: len(columns)], style="bold" if trial.rate == best else "")
    screen = console()
    screen.print(table)
    screen.print(text)
