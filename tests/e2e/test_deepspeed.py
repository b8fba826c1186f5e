"""`examples/train.py` and `examples/plain_loop.py` under DeepSpeed as users start them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.e2e.deepspeed_runs import CHANGES, JSON, TORCHRUN, assert_same, example_run
from tests.e2e.harness import (
    PLAIN_LOOP,
    ROOT,
    TINY,
    assert_close,
    needs,
    options,
    plain_loop_options,
    python,
    rounding_of_runs,
    weights,
)
from tests.support import fixtures_text

pytestmark = [pytest.mark.slow, needs("deepspeed")]

EXAMPLES = ("zero2", "zero3_offload", "zero3_nvme", "zero3")
# It takes minutes to compile.
HAS_ASYNC_IO = any(Path(os.environ.get("TORCH_EXTENSIONS_DIR", "/nowhere")).glob("**/async_io.so"))


@pytest.fixture(scope="module")
def rounding(tiny_model):
    return rounding_of_runs(tiny_model, **CHANGES)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "data.jsonl"
    fixtures_text.write_jsonl(path, [{"text": text} for text in fixtures_text.texts(20)])
    return path


def words(name, model, data, folder):
    """Return the words that train as an example does, or as "alone", without DeepSpeed."""
    config = None if name == "alone" else JSON / f"{name}.json"
    if name == "zero3_nvme":
        content = json.loads(config.read_text(encoding="utf-8"))
        content["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(folder)
        config = folder.with_suffix(".json")
        config.write_text(json.dumps(content), encoding="utf-8")
    example = "zero2" if name == "alone" else name
    path, changes = example_run(f"trainer_qwen3_{example}.yaml", folder, config)
    tiny = {key: value for key, value in TINY.items() if key != "use_cpu"}
    return [
        ROOT / "examples" / "train.py",
        path,
        *options(tiny | changes | {"model_name_or_path": model, "data_path": data}),
    ]


@pytest.fixture(scope="module")
def alone(tiny_model, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    python(*words("alone", tiny_model, texts, folder), cwd=folder)
    return folder / "out"


@pytest.mark.extended
@pytest.mark.second_tier("^zero3(_nvme)?$")
@pytest.mark.parametrize("name", EXAMPLES)
def test_trainer(name, tiny_model, texts, alone, rounding, tmp_path):
    if name == "zero3_nvme" and not HAS_ASYNC_IO:
        pytest.skip("DeepSpeed's async_io is not compiled")
    python(*TORCHRUN, *words(name, tiny_model, texts, tmp_path / name), cwd=tmp_path)
    assert_same(tmp_path / name / "out", alone, tiny_model, rounding)


@pytest.mark.extended
def test_plain_loop(tiny_model, rounding, tmp_path):
    """Run a plain loop of accelerate with ZeRO-2, interrupted once, and compare it with one process."""
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(JSON / "zero2.json")}
    for folder, more in (
        ("half", ("--steps", 2)),
        ("resumed", ("--steps", 3, "--resume", tmp_path / "half" / "checkpoint")),
    ):
        words = plain_loop_options(tiny_model, tmp_path, "--output", tmp_path / folder, *more)
        python(*TORCHRUN, PLAIN_LOOP, *words, cwd=tmp_path, **variables)
    words = plain_loop_options(tiny_model, tmp_path, "--output", tmp_path / "one", "--steps", 3)
    python(PLAIN_LOOP, *words, cwd=tmp_path, ACCELERATE_USE_CPU="true")
    assert_close(weights(tmp_path / "resumed"), weights(tmp_path / "one"), weights(tiny_model), rounding)
