"""Run `llamafactory-cli train` on YAML files of this repository: reuse, resume, show progress, and read the results."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from prepare import ROOT

PACKAGES = ("hf-muon", "llamafactory", "torch", "transformers")
SETTINGS = "demo_settings.json"
LOG = "output.log"
LAST_LINES = 20  # of the log of a run that has failed
POLL = 0.5  # seconds
THREADS = 2

_lock = -1  # inherited by training processes, which hold it even if this process is killed


@contextlib.contextmanager
def session(build: Path, command: str) -> Iterator[None]:
    """Lock a folder for runs, so that two do not write into the same ones, and end without a traceback on Ctrl-C."""
    global _lock
    signal.signal(signal.SIGTERM, _interrupt)
    if versions()["hf-muon"] == "missing":
        sys.exit(f"hf-muon is not installed for {sys.executable}: `{command}` installs what is needed.")
    build.mkdir(parents=True, exist_ok=True)
    _lock = os.open(build / "lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"another run is at work in {build.relative_to(ROOT)}/: wait for it, or end it, and run this again")
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; run it again, and it goes on from its last checkpoint", file=sys.stderr)
        sys.exit(130)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


class Result(NamedTuple):
    """A finished run: its YAML, its held-out loss at the end, its seconds of training, and its logs."""

    config: dict[str, Any]
    loss: float
    seconds: float
    history: list[dict[str, float]]


class Run(NamedTuple):
    """A YAML file that is trained.

    Attributes:
        label: what the line of progress begins with.
        file: the YAML.
        build: the folder in which its `output_dir` must lie.
    """

    label: str
    file: Path
    build: Path

    def read(self) -> dict[str, Any]:
        config: dict[str, Any] = yaml.safe_load(self.file.read_text(encoding="utf-8"))
        config["learning_rate"] = float(config["learning_rate"])  # to PyYAML 1e-4 is text, to LLaMA-Factory a number
        return config

    def command(self) -> list[str]:
        cli = Path(sys.executable).with_name("llamafactory-cli")
        return [str(cli), "train", str(self.file.relative_to(ROOT))]

    def result(self, content: str) -> Result:
        """Train, unless a finished run with this content of its data exists, and return the result."""
        config = self.read()
        folder = ROOT / config["output_dir"]
        if not folder.is_relative_to(self.build):
            sys.exit(f"{self.file.relative_to(ROOT)}: output_dir must lie in {self.build.relative_to(ROOT)}/")
        settings = json.dumps({"content": content, "config": config, "versions": versions()}, indent=2) + "\n"

        start = open_folder(folder, settings, config["max_steps"])
        log = folder / LOG
        progress = Progress(self.label, folder, config["max_steps"], f"messages in {log.relative_to(ROOT)}")
        progress.show(start)
        if held_out_loss(folder) is None:
            command = self.command()
            if code := call(command, environment(self.build), log, progress):
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


def environment(build: Path) -> dict[str, str]:
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",  # with more devices, a step would have more tokens
        "DISABLE_VERSION_CHECK": "1",
        "HF_HOME": str(build / "cache"),
        "HF_HUB_OFFLINE": "1",
        "LLAMAFACTORY_VERBOSITY": "WARN",
        "OMP_NUM_THREADS": str(THREADS),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads are several times slower beside other programs
        "PYTHONUTF8": "1",  # of the log, in any locale
        "PYTHONWARNINGS": "ignore:'pin_memory' argument:UserWarning",
    }


def open_folder(folder: Path, settings: str, max_steps: int) -> str:
    """Remove from `folder` what a run with these settings cannot use, and return in words how the run starts.

    Raises:
        SystemExit: the folder has files of another program.
    """
    written = folder / SETTINGS
    start = "starting"
    if folder.exists():
        if not written.is_file() and any(folder.iterdir()):
            sys.exit(f"{folder} has files that another program has written: delete it or move it, and run this again")
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


def call(command: list[str], variables: dict[str, str], log: Path, progress: Progress) -> int:
    """Run a command that writes into a log, and return its exit status; Ctrl-C ends it without a traceback."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited, so only this process gets Ctrl-C
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, pass_fds=[_lock], stdout=out, stderr=subprocess.STDOUT
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


# --- what a run has written


def tokens_per_step(config: dict[str, Any]) -> int:
    return int(config["per_device_train_batch_size"] * config["gradient_accumulation_steps"] * config["cutoff_len"])


def versions() -> dict[str, str]:
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = "missing"
    return installed


def held_out_loss(folder: Path) -> float | None:
    """Return the final evaluation loss of a run; None if the run has not finished."""
    try:
        results: dict[str, float] = json.loads((folder / "all_results.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):  # not written yet, or incomplete
        return None
    return results.get("eval_loss")


def log_history(folder: Path) -> list[dict[str, float]]:
    state: dict[str, list[dict[str, float]]] = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    return state["log_history"]


def last_log(folder: Path) -> dict[str, Any]:
    """Return the last value of each key in LLaMA-Factory's trainer_log.jsonl; empty before the first line."""
    entry: dict[str, Any] = {}
    for line in log_entries(folder):
        entry |= line
    return entry


def log_entries(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of LLaMA-Factory's trainer_log.jsonl, without any that is being written or was cut short."""
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / "trainer_log.jsonl").read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)


def train_seconds(folder: Path) -> float:
    """Return the wall seconds of the training loop, summed over the parts of an interrupted run."""
    total = last = 0.0
    for entry in log_entries(folder):
        hours, minutes, seconds = entry["elapsed_time"].split(":")
        elapsed = 3600 * int(hours) + 60 * int(minutes) + int(seconds)
        if elapsed < last:
            total += last
        last = elapsed
    return total + last
