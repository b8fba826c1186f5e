"""The examples of programs that CI does not have: their syntax and options, and small runs where one is installed."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
import torch
import yaml

from hf_muon import MuonConfig
from hf_muon.optim_args import parse_optim_args
from tests import fixtures_text
from tests.e2e.example_files import ALL_MATRICES, ALL_OTHERS, TRAIN, TRAINER
from tests.e2e.harness import (
    PLAIN_LOOP,
    ROOT,
    TINY,
    YAML,
    assert_close,
    assert_routed,
    needs,
    options,
    plain_loop_options,
    python,
    weights,
)

PROGRAMS = ROOT / "examples" / "programs"
PAGES = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "recipes").glob("*.md"))


@pytest.mark.parametrize("path", sorted(PROGRAMS.iterdir()), ids=lambda path: path.stem)
def test_file_can_be_read_and_has_options_that_exist(path: Path) -> None:
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


def of_lightning(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a checkpoint of Lightning or Fabric, with the names of the model."""
    content = torch.load(path, weights_only=False)
    state = content["state_dict"] if "state_dict" in content else content["model"]
    wrappers = re.compile(r"^(_forward_module\.)?(module\.)?(model\.(?=model\.|lm_head))?")
    return {wrappers.sub("", name): value for name, value in state.items()}


@pytest.mark.extended
@pytest.mark.slow
@needs("lightning")
@pytest.mark.parametrize("name", ["lightning_fit", "fabric_loop"])
def test_lightning_equals_a_plain_loop_and_resumes(
    name: str, tiny_model: Path, rounding: dict[str, float], tmp_path: Path
) -> None:
    common = plain_loop_options(tiny_model, tmp_path)
    python(PLAIN_LOOP, *common, "--steps", 3, "--output", tmp_path / "plain", cwd=tmp_path, ACCELERATE_USE_CPU="true")
    expected = weights(tmp_path / "plain")

    def run_of(folder: str, *more: object) -> dict[str, torch.Tensor]:
        words = [*common, "--accelerator", "cpu", "--output", tmp_path / folder, *more]
        printed = python(PROGRAMS / f"{name}.py", *words, cwd=tmp_path)
        assert printed.count("which parameter goes where") == 1
        return of_lightning(checkpoint(folder))

    def checkpoint(folder: str) -> Path:
        (path,) = (tmp_path / folder).glob("*.ckpt")
        return path

    straight = run_of("straight", "--steps", 3)
    assert_close(straight, expected, weights(tiny_model), rounding)
    if name == "fabric_loop":
        shared = run_of("ddp", "--steps", 3, "--batch", 2, "--devices", 2, "--strategy", "ddp")
        assert_close(shared, expected, weights(tiny_model), rounding)
    # Lightning begins an epoch anew, so here each step is an epoch.
    batch = () if name == "fabric_loop" else ("--batch", 1000)
    straight = run_of("longer", *batch, "--steps", 4)
    run_of("half", *batch, "--steps", 2)
    resumed = run_of("resumed", *batch, "--steps", 4, "--resume", checkpoint("half"))
    assert [key for key, value in straight.items() if not torch.equal(value, resumed[key])] == []


@pytest.mark.extended
@pytest.mark.slow
@needs("sentence_transformers")
def test_sentence_transformers(tiny_model: Path, tmp_path: Path) -> None:
    pairs = [{"anchor": name, "positive": text[:80]} for name, text in fixtures_text.documents()]
    fixtures_text.write_jsonl(tmp_path / "pairs.jsonl", pairs)
    words = (tiny_model, tmp_path / "pairs.jsonl", "--cpu", "--steps", 2, "--output", tmp_path / "out")
    python(PROGRAMS / "sentence_transformers_pairs.py", *words, cwd=tmp_path)
    muon, adamw = ({f"model.0.model.{n.removeprefix('model.')}" for n in part} for part in (ALL_MATRICES, ALL_OTHERS))
    adamw -= {"model.0.model.lm_head.weight"}
    assert_routed(tmp_path / "out" / "checkpoint-2", muon=muon, adamw=adamw, steps=2)


@pytest.mark.extended
@pytest.mark.slow
@needs("ray")
def test_ray_equals_the_script_alone(tiny_model: Path, tmp_path: Path) -> None:
    fixtures_text.write_jsonl(tmp_path / "data.jsonl", [{"text": text} for text in fixtures_text.texts(20)])
    changes = TINY | {"model_name_or_path": tiny_model, "data_path": tmp_path / "data.jsonl", "from_scratch": False}
    results = {}
    on_ray = (PROGRAMS / "ray_train.py", "--cpu", "--storage", tmp_path / "storage")
    for name, words in (("alone", (TRAIN,)), ("ray", on_ray)):
        more = options(changes | {"output_dir": tmp_path / name})
        settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_AUTH_MODE": "disabled"}
        python(*words, YAML / TRAINER, *more, cwd=tmp_path, **settings)
        results[name] = weights(tmp_path / name)
    assert [key for key, value in results["ray"].items() if not torch.equal(value, results["alone"][key])] == []
