"""The texts of the example files. `test_examples_*.py`, `test_deepspeed.py` and `test_run_ulysses.py` run them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from hf_muon import MuonConfig
from hf_muon.integrations.llamafactory.v1 import config_from
from tests.e2e.example_files import (
    ACCELERATE,
    DEEPSPEED,
    LLAMAFACTORY_FSDP2,
    LLAMAFACTORY_PRETRAIN,
    LLAMAFACTORY_SFT,
    LLAMAFACTORY_V1,
    LLAMAFACTORY_V1_FSDP2,
    LLAMAFACTORY_V1_ULYSSES,
    TRAIN,
    TRAINER,
    TRAINER_FSDP2,
    TRL,
    ULYSSES,
)
from tests.e2e.harness import YAML


def test_no_example_is_left_out() -> None:
    here = {*LLAMAFACTORY_SFT, LLAMAFACTORY_PRETRAIN, LLAMAFACTORY_FSDP2, *TRL.values(), *ACCELERATE}
    here |= {TRAINER, TRAINER_FSDP2}
    here |= {LLAMAFACTORY_V1, LLAMAFACTORY_V1_FSDP2, *LLAMAFACTORY_V1_ULYSSES}
    here |= DEEPSPEED | {ULYSSES}
    assert here == {path.name for path in YAML.glob("*.yaml") if "_demo_" not in path.name}


@pytest.mark.parametrize("path", sorted(YAML.glob("*.yaml")), ids=lambda path: path.stem)
def test_file_explains_itself(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert path.name in text.split("\n\n")[0], "the comment at the top says how to run it"
    # Suggestions in comments must be right, too.
    for arguments in re.findall(r'^(?:# )?optim_args: "(.*)"', text, re.MULTILINE):
        MuonConfig.from_mapping(dict(item.split("=") for item in arguments.split(",")))
    if path.name.startswith("llamafactory_v1"):
        config_from(yaml.safe_load(re.sub(r"^  # ", "  ", text, flags=re.MULTILINE))["optim_config"])


def test_trainer_script_does_not_know_muon() -> None:
    assert not re.search(r"^\s*(import|from)\s+hf_muon", TRAIN.read_text(encoding="utf-8"), re.MULTILINE)
