"""A stand-in for training: a loss that follows from the spec, at once and without torch.

python tests/evidence/quick_trial.py SPEC.json RESULT.json
"""

import contextlib
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

BEST = {"muon": 0.1, "adamw": 0.002}
"""The rates with the lowest loss: Muon's lies far beyond the start of its ladder."""


def loss_of(spec):
    """Return a loss that has one minimum, with a little noise from the seed."""
    settings = spec["settings"]
    return 3 + (math.log2(settings["learning_rate"] / BEST[settings["optim"]])) ** 2 + spec["seed"] % 100 / 1000


def main(spec_file, result_file):
    spec = json.loads(Path(spec_file).read_text())["spec"]
    time.sleep(0.05)
    if marker := os.environ.get("KILLED_ONCE"):
        with contextlib.suppress(FileExistsError):  # one of two trials at once is killed, never both
            Path(marker).touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
    if spec["settings"]["learning_rate"] > 1:
        sys.exit("Traceback: no such rate")
    loss = loss_of(spec)
    losses = {step: loss + 1 / step for step in (spec["steps"] // 2, spec["steps"])}
    result = {"loss": losses[spec["steps"]], "losses": losses, "parameters": 10, "cpu_seconds": 1.0, "seconds": 2.0}
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
