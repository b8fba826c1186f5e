"""Train the same small model with AdamW and with Muon through LLaMA-Factory, and compare the two.

    python examples/demo/run.py

It reuses finished runs in build/demo/, and resumes interrupted ones from their last checkpoint. The terminal shows a
line of progress for each run, and all messages of a run are in its output.log.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from prepare import BUILD, ROOT, prepare
from training import (
    CONFIGS,
    held_out_loss,
    last_log,
    log_history,
    read_config,
    tokens_per_step,
    train_command,
    train_environment,
    train_seconds,
    versions,
)

PICTURE = BUILD / "curves.png"
SETTINGS = "demo_settings.json"
LOG = "output.log"
LAST_LINES = 20  # of the log of a run that has failed
POLL = 0.5  # seconds
THREADS = 2
LABELS = {"adamw": "AdamW", "muon": "Muon"}
COLORS = {"adamw": "tab:blue", "muon": "tab:orange"}


class Result(NamedTuple):
    config: dict[str, Any]
    loss: float
    seconds: float
    history: list[dict[str, float]]


def main() -> None:
    signal.signal(signal.SIGTERM, interrupt)
    if versions()["hf-muon"] == "missing":
        sys.exit(f"hf-muon is not installed for {sys.executable}: `make demo` installs what is needed.")
    try:
        lock = lock_build()
        manifest = prepare()
        results = {name: train(name, str(manifest["content"]), lock) for name in CONFIGS}
    except KeyboardInterrupt:
        print("interrupted; run it again and it resumes from here", file=sys.stderr)
        sys.exit(130)
    draw(results, int(str(manifest["parameters"])))
    report(results, int(str(manifest["parameters"])))


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def lock_build() -> int:
    """Lock build/demo/, so that two demos do not write into the same runs.

    Training processes inherit the lock, and hold it even if this process is killed.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    lock = os.open(BUILD / "lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"another demo is at work in {BUILD.relative_to(ROOT)}/: wait for it, or end it, and run this again")
    return lock


def train(name: str, content: str, lock: int) -> Result:
    """Train the model with one optimizer, unless a finished run exists, and return the result."""
    config = read_config(name)
    folder = ROOT / config["output_dir"]
    if not folder.is_relative_to(BUILD):
        sys.exit(f"{CONFIGS[name].relative_to(ROOT)}: output_dir must lie in {BUILD.relative_to(ROOT)}/")
    settings = json.dumps({"content": content, "config": config, "versions": versions()}, indent=2) + "\n"

    start = open_folder(folder, settings, config["max_steps"])
    log = folder / LOG
    progress = Progress(LABELS[name], folder, config["max_steps"], f"messages in {log.relative_to(ROOT)}")
    progress.show(start)
    if held_out_loss(folder) is None:
        command = train_command(name)
        if code := call(command, lock, log, progress):
            progress.end("failed")
            sys.exit(
                f"\n`{' '.join(command)}` failed with exit status {code}. The end of {log.relative_to(ROOT)}:\n\n"
                + last_lines(log)
            )
    loss = held_out_loss(folder)
    if loss is None:
        progress.end("failed")
        sys.exit(f"{folder.relative_to(ROOT)}/all_results.json has no eval_loss: is `do_eval: true` set?")
    progress.end("reused" if start.startswith("reusing") else "done")
    return Result(config, loss, train_seconds(folder), log_history(folder))


def open_folder(folder: Path, settings: str, max_steps: int) -> str:
    """Remove from `folder` what a run with these settings cannot use, and return in words how the run starts."""
    written = folder / SETTINGS
    start = "starting"
    if folder.exists():
        if not written.is_file() or written.read_text(encoding="utf-8") != settings:
            start = "the settings, the data or a library changed, starting over"
        elif held_out_loss(folder) is not None:
            return f"reusing {folder.relative_to(ROOT)}"
        elif steps := usable_checkpoints(folder, max_steps):
            (folder / "all_results.json").unlink(missing_ok=True)  # may be incomplete
            return f"going on from step {steps[-1]}"
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    written.write_text(settings, encoding="utf-8")
    return start


def usable_checkpoints(folder: Path, max_steps: int) -> list[int]:
    """Return the steps of the checkpoints from which a run can resume, and delete the other checkpoints."""
    sys.path.append(str(Path(__file__).parents[1]))
    from train import complete_checkpoints  # here, because it imports torch for seconds

    # From a checkpoint of the last step, Trainer would take one more.
    steps = sorted(step for step in complete_checkpoints(folder) if step < max_steps)
    for checkpoint in folder.glob("checkpoint-*"):
        if checkpoint.name not in {f"checkpoint-{step}" for step in steps}:
            shutil.rmtree(checkpoint)
    return steps


class Progress:
    """A line on the terminal about a run, written over again while it runs; without a terminal only where it ends.

    Args:
        label: the run's name.
        folder: where the run writes trainer_log.jsonl.
        steps: number of steps of the run.
        where: what else the line says.
    """

    def __init__(self, label: str, folder: Path, steps: int, where: str) -> None:
        self.label = label
        self.folder = folder
        self.steps = steps
        self.where = where
        self.width = 0

    def line(self, state: str = "") -> str:
        """Return the line: steps, the last loss of training, and the state, or the remaining time."""
        entry = last_log(self.folder)
        steps = int(entry.get("current_steps", 0))
        loss = f"loss {entry['loss']:.3f}" if "loss" in entry else ""
        bar = ("#" * round(20 * steps / self.steps)).ljust(20, ".")
        left = f"{entry['remaining_time']} left" if "remaining_time" in entry else "starting"
        return f"{self.label:<6} [{bar}] {steps:>4}/{self.steps} {loss:<11} {state or left}"

    def show(self, state: str = "") -> None:
        if sys.stdout.isatty():
            line = self.line(state)
            print("\r" + line.ljust(self.width), end="", flush=True)
            self.width = len(line)

    def end(self, state: str) -> None:
        start = "\r" if self.width else ""
        print(f"{start}{self.line(state)}, {self.where}".ljust(self.width), flush=True)
        self.width = 0


def call(command: list[str], lock: int, log: Path, progress: Progress) -> int:
    """Run a command that writes into a log, and return its exit status; Ctrl-C ends it without a traceback."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited, so only this process gets Ctrl-C
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=train_environment(THREADS), pass_fds=[lock], stdout=out, stderr=subprocess.STDOUT
        )
    signal.signal(signal.SIGINT, previous)
    try:
        while True:
            try:
                return process.wait(POLL)
            except subprocess.TimeoutExpired:
                progress.show()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        progress.end("interrupted")
        raise


def last_lines(log: Path) -> str:
    """Return the end of a log; of a line that was written over, as a progress bar is, its last state."""
    lines = log.read_bytes().decode(errors="replace").rstrip().split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines[-LAST_LINES:])


def draw(results: dict[str, Result], parameters: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name, result in results.items():
        train = [(entry["step"], entry["loss"]) for entry in result.history if "loss" in entry]
        held_out = [(entry["step"], entry["eval_loss"]) for entry in result.history if "eval_loss" in entry]
        label = f"{LABELS[name]}, learning rate {result.config['learning_rate']:g}"
        axes.plot(*zip(*train, strict=True), color=COLORS[name], alpha=0.45, linewidth=1, label=f"{label}: training")
        axes.plot(
            *zip(*held_out, strict=True),
            color=COLORS[name],
            marker="o",
            label=f"{label}: held out, {result.loss:.3f} at the end",
        )
    config = next(iter(results.values())).config
    axes.set_title(f"Qwen3 with {parameters / 1e6:.1f} million parameters on Python's documentation, one seed")
    axes.set_xlabel(f"step ({tokens_per_step(config):,} tokens each)")
    axes.set_ylabel("cross-entropy per token (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(PICTURE, dpi=150)


def report(results: dict[str, Result], parameters: int) -> None:
    row = "{:<10}{:>14}{:>15}{:>12}{:>18}"
    print("\n" + row.format("optimizer", "learning rate", "held-out loss", "perplexity", "training seconds"))
    for name, (config, loss, seconds, _) in results.items():
        rate = f"{config['learning_rate']:g}"
        print(row.format(LABELS[name], rate, f"{loss:.4f}", f"{math.exp(loss):.1f}", f"{seconds:.0f}"))
    config = next(iter(results.values())).config
    print(
        f"\nEqual steps, not equal seconds: {config['max_steps']} steps of {tokens_per_step(config):,} tokens. One "
        f"seed and {parameters / 1e6:.1f} million\nparameters say little about a large model. Each learning rate is "
        "the best of examples/demo/sweep.csv.\nAdamW has one rate for all parameters here. In similar models another "
        "one for embeddings closes most of\nthe gap: docs/learning-rate.md. Larger studies: evidence/README.md\n"
        f"Both curves: {PICTURE.relative_to(ROOT)}"
    )


if __name__ == "__main__":
    main()
