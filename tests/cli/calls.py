"""Call `hf-muon` in this process, show what it says, and write a training file for it."""

from __future__ import annotations

import json

import yaml
from typer.testing import CliRunner

from hf_muon.cli.app import app


def call(*arguments, **environment):
    env = {"HF_HUB_OFFLINE": "1", **environment}
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=env, input="y\n")


def report_of(*arguments):
    """Return the JSON of a command that succeeds."""
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def transcript(*calls):
    """Return what a terminal would show of some calls of `hf-muon`, each a list of words."""
    parts = []
    for words in calls:
        result = call(*words)
        shown = [f"$ hf-muon {' '.join(map(str, words))}", result.stdout, result.stderr and f"stderr: {result.stderr}"]
        parts += [*(part.rstrip("\n") for part in shown if part), f"exit status {result.exit_code}", ""]
    return "\n".join(parts)


def training_yaml(folder, model, name="run.yaml", **keys):
    """Write a training file of a model's folder; a key that is None is left out."""
    path = folder / name
    settings = {"model_name_or_path": str(model), "optim": "muon", **keys}
    path.write_text(yaml.safe_dump({key: value for key, value in settings.items() if value is not None}))
    return path
