"""The texts of the example files. `test_examples_*.py`, `test_deepspeed.py` and `test_run_ulysses.py` run them.

`test_installed_programs.py` runs those of programs that no environment of `make` has.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from hf_muon import MuonConfig
from hf_muon.integrations.llamafactory.v1 import config_from
from hf_muon.optim_args import parse_optim_args
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
from tests.e2e.harness import ROOT, YAML

pytestmark = pytest.mark.newest

PROGRAMS = ROOT / "examples" / "programs"
PAGES = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "recipes").glob("*.md"))


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
        MuonConfig.from_mapping(parse_optim_args(arguments))
    if path.name.startswith("llamafactory_v1"):
        config_from(yaml.safe_load(re.sub(r"^  # ", "  ", text, flags=re.MULTILINE))["optim_config"])


def test_trainer_script_does_not_know_muon() -> None:
    assert not re.search(r"^\s*(import|from)\s+hf_muon", TRAIN.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("path", sorted(PROGRAMS.iterdir()), ids=lambda path: path.stem)
def test_program_can_be_read_and_has_options_that_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert path.name in PAGES, "a recipe names it"
    assert path.name in text.split("\n\n")[0] + text.split("\n\n")[1], "the beginning says how to run it"
    if path.suffix == ".py":
        compile(ast.parse(text), str(path), "exec")
    elif path.suffix == ".yaml":
        suggested = re.sub(r"^# (\w+: \S|fsdp_config:|  )", r"\1", text.partition("\n\n")[2], flags=re.MULTILINE)
        settings = yaml.safe_load(suggested)
        assert settings["optimizer"] == "hf_muon"
        assert settings["fsdp_version"] == 2
    else:
        subprocess.run(["bash", "-n", path], check=True)
    for words in re.findall(r'optim_args[:=] ?"(.*?)"', text):
        MuonConfig.from_mapping(parse_optim_args(words))
