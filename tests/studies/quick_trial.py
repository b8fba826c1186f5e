"""A stand-in for training: a loss that follows from the spec, at once and without torch.

python tests/studies/quick_trial.py SPEC.json RESULT.json

KILL is "signal count folder": as its trial number `count`, which files in the folder count, the signal goes to this
process and, but for SIGUSR1, to the runner first. SIGUSR1 stands for a trial that SIGKILL ends alone.
"""

import json
import math
import os
import signal
import sys
from pathlib import Path

BEST = {"muon": 0.1, "adamw": 0.002}
"""The rates with the lowest loss: Muon's lies far beyond the start of its ladder."""


def loss_of(spec):
    """Return a loss that has one minimum, with a little noise from the seed."""
    settings = spec["settings"]
    return 3 + (math.log2(settings["learning_rate"] / BEST[settings["optim"]])) ** 2 + spec["seed"] % 100 / 1000


def kill():
    name, count, folder = os.environ["KILL"].split()
    number = len(list(Path(folder).iterdir()))
    Path(folder, str(os.getpid())).touch()
    if number == int(count):
        if name != "SIGUSR1":
            os.kill(os.getppid(), signal.Signals[name])
        os.kill(os.getpid(), signal.SIGKILL)


def main(spec_file, result_file):
    spec = json.loads(Path(spec_file).read_text())["spec"]
    if "KILL" in os.environ:
        kill()
    if spec["settings"]["learning_rate"] > 1:
        sys.exit("Traceback: no such rate")
    loss = loss_of(spec)
    losses = {step: loss + 1 / step for step in (spec["steps"] // 2, spec["steps"])}
    result = {"loss": losses[spec["steps"]], "losses": losses, "parameters": 10, "cpu_seconds": 1.0, "seconds": 2.0}
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
