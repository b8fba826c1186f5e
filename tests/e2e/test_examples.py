"""What example files say, and what `examples/train.py` refuses, without training; the files beside this one train."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest
import yaml

from hf_muon import MuonConfig
from hf_muon.integrations.llamafactory.v1 import config_from
from hf_muon.optim_args import parse_optim_args
from tests.e2e.harness import (
    ACCELERATE_FSDP2,
    ACCELERATE_HSDP,
    DEEPSPEED,
    FINETUNE,
    LLAMAFACTORY_FSDP2,
    LLAMAFACTORY_PRETRAIN,
    LLAMAFACTORY_SFT,
    LLAMAFACTORY_V1,
    LLAMAFACTORY_V1_FSDP2,
    LLAMAFACTORY_V1_ULYSSES,
    ROOT,
    TRAIN,
    TRAINER,
    TRAINER_FSDP2,
    TRL,
    ULYSSES,
    YAML,
    read_yaml,
)
from tests.support import fixtures_text

PROGRAMS = ROOT / "examples" / "programs"
PAGES = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))


def test_no_example_is_left_out():
    here = {*LLAMAFACTORY_SFT, LLAMAFACTORY_PRETRAIN, LLAMAFACTORY_FSDP2, *TRL.values()}
    here |= {TRAINER, TRAINER_FSDP2, ACCELERATE_FSDP2, ACCELERATE_HSDP}
    here |= {LLAMAFACTORY_V1, LLAMAFACTORY_V1_FSDP2, *LLAMAFACTORY_V1_ULYSSES}
    here |= DEEPSPEED | {ULYSSES, FINETUNE}
    assert here == {path.name for path in YAML.glob("*.yaml") if "_demo_" not in path.name}


@pytest.mark.parametrize("framework", ["llamafactory", "trainer"])
def test_deepspeed_examples_differ_in_their_config_alone(framework):
    alike = []
    for name in sorted(name for name in DEEPSPEED if name.startswith(framework)):
        settings = read_yaml(YAML / name)
        stage = name.removeprefix(f"{framework}_qwen3_").removesuffix(".yaml")
        assert settings.pop("deepspeed") == f"examples/deepspeed/{stage}.json"
        assert (ROOT / "examples" / "deepspeed" / f"{stage}.json").exists()
        assert settings.pop("output_dir").endswith(f"{stage}_muon")
        alike.append(settings)
    assert alike == alike[:1] * 4
    assert alike[0]["optim"] == "muon"


@pytest.mark.parametrize("path", sorted(YAML.glob("*.yaml")), ids=lambda path: path.stem)
def test_file_explains_itself(path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert path.name in text.split("\n\n")[0], "the comment at the top says how to run it"
    # Suggestions in comments must be right, too.
    for arguments in re.findall(r'^(?:# )?optim_args: "(.*)"', text, re.MULTILINE):
        MuonConfig.from_mapping(parse_optim_args(arguments))
    if path.name.startswith("llamafactory_v1"):
        config_from(yaml.safe_load(re.sub(r"^  # ", "  ", text, flags=re.MULTILINE))["optim_config"])


def test_trainer_script_does_not_know_muon():
    assert not re.search(r"^\s*(import|from)\s+hf_muon", TRAIN.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("path", sorted(PROGRAMS.iterdir()), ids=lambda path: path.stem)
def test_program_can_be_read_and_has_options_that_exist(path):
    text = path.read_text(encoding="utf-8")
    assert path.name in PAGES, "a page names it"
    assert path.name in text.split("\n\n")[0] + text.split("\n\n")[1], "the beginning says how to run it"
    if path.suffix == ".py":
        compile(text, str(path), "exec")
    elif path.suffix == ".yaml":
        suggested = re.sub(r"^# (\w+: \S|fsdp_config:|  )", r"\1", text.partition("\n\n")[2], flags=re.MULTILINE)
        settings = yaml.safe_load(suggested)
        assert settings["optimizer"] == "hf_muon"
        assert settings["fsdp_version"] == 2
    else:
        subprocess.run(["bash", "-n", path], check=True)
    for words in re.findall(r'optim_args[:=] ?"(.*?)"', text):
        MuonConfig.from_mapping(parse_optim_args(words))


# --- what examples/train.py refuses


@pytest.fixture(scope="module")
def train_script():
    spec = importlib.util.spec_from_file_location("example_train", TRAIN)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("content", "message", "words"),
    [
        (None, "settings.yaml is not a file", []),
        ("just text", "does not hold keys and values", []),
        ("data_path: x", "model_name_or_path is missing", []),
        ("model_name_or_path: x", "data_path is missing", []),
        ("optimm: muon\noptim: muon", "unknown keys optimm", []),
        ("{model_name_or_path: x, data_path: x, eval_fraction: 1}", "eval_fraction between 0 and 1", []),
        ("{model_name_or_path: x, data_path: x}", "block_size must be at least 2", ["--block_size", "1"]),
    ],
)
def test_trainer_script_refuses_settings(content, message, words, train_script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # TrainingArguments may create its output folder
    if content is not None:
        (tmp_path / "settings.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit, match=message):
        train_script.parse_arguments([str(tmp_path / "settings.yaml"), *words])
    with pytest.raises(SystemExit, match="usage"):
        train_script.parse_arguments(["--optim", "muon"])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "does not exist"),
        ({}, "0 texts with 0 tokens"),
        ({"a.txt": " \n"}, "0 texts with 0 tokens"),
        ({"a.txt": "short"}, "1 texts with . tokens; two examples"),
        ({"a.jsonl": '{"content": "x"}\n'}, "a.jsonl has no 'text'; see text_column"),
        ({"a.json": '{"text": "x"}'}, "a.json has no 'text'"),
    ],
)
def test_trainer_script_refuses_data(files, message, train_script, tmp_path):
    data = tmp_path / "data"
    if files is not None:
        data.mkdir()
        for name, content in files.items():
            (data / name).write_text(content, encoding="utf-8")
    script = train_script.ScriptArguments(data_path=str(data), block_size=64)
    with pytest.raises(SystemExit, match=message):
        train_script.make_examples(script, fixtures_text.build_tokenizer())
