"""Run a small study with stand-ins for training.

python -m tests.studies.quick_study OUT JOBS
"""

import sys
from pathlib import Path
from types import SimpleNamespace

from evidence.runner import Runner
from evidence.study import Study

CONTENT = {
    "question": "Which is better?",
    "text": "docs",
    "context": 8,
    "points": 2,
    "training": {"warmup": 0.1},
    "models": {"tiny": {"hidden": 32, "layers": 1}},
    "cells": {
        "short": {"model": "tiny", "tokens": 64, "batch": 2},
        "long": {"model": "tiny", "tokens": 256, "batch": 2},
    },
    "tune": {"seed": 0, "least": 4, "repeats": 2},
    "seeds": [1, 2],
    "reference": "adamw",
    "sides": {
        "adamw": {"optim": "adamw", "tune": {"learning_rate": {"start": 0.004, "factor": 2}}},
        "muon": {"optim": "muon", "tune": {"learning_rate": {"start": 0.008, "factor": 2}}},
    },
}


def run(out, jobs, **changes):
    """Run the study into a folder, and return whether it is complete."""
    corpus = SimpleNamespace(name="text", folder=out)
    study = Study("quick", {**CONTENT, **changes})
    program = [str(Path(__file__).with_name("quick_trial.py"))]
    return Runner(study, out / "quick.csv", corpus, [None] * jobs, program=program).run()


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
