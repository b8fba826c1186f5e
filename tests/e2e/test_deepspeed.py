"""`optim: muon` under DeepSpeed as users start it, on a CPU: two processes against one without DeepSpeed."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import fixtures_text
from tests.e2e.example_files import several
from tests.e2e.harness import (
    PLAIN_LOOP,
    ROOT,
    TINY,
    YAML,
    assert_close,
    free_port,
    llamafactory,
    llamafactory_settings,
    needs,
    options,
    overrides,
    plain_loop_options,
    python,
    read_yaml,
    rounding_of_runs,
    weights,
)

pytestmark = [pytest.mark.slow, needs("deepspeed")]

JSON = ROOT / "examples" / "deepspeed"
TRAIN = ROOT / "examples" / "train.py"
ON_CPU = str(ROOT / "tests" / "e2e" / "cpu_deepspeed")  # its sitecustomize.py lets DeepSpeed run on CPU and gloo
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
EXAMPLES = ("zero2", "zero3", "zero3_offload", "zero3_nvme")
CHANGES = {
    "max_steps": 3,
    "warmup_steps": 1,
    "learning_rate": 0.001,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,  # smaller than the norms: clipping is active
    "adam_epsilon": 1e-5,  # with a smaller one AdamW turns rounding errors of gradients into steps
    "optim_args": "ns_dtype=fp32",
}


def llamafactory_config(name: str) -> dict[str, Any]:
    """Return the content of LLaMA-Factory's ds_z0, ds_z2, ds_z2_offload, ds_z3 or ds_z3_offload of August 2026."""
    stage, offload = int(name[1]), name.endswith("_offload")
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": False, "contiguous_gradients": True}
    if stage == 3:
        automatic = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
        large = ("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
        zero |= dict.fromkeys(automatic, "auto") | dict.fromkeys(large, 1e9)
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    else:
        zero |= dict.fromkeys(("allgather_partitions", "reduce_scatter", "round_robin_gradients"), True)
        zero |= dict.fromkeys(("allgather_bucket_size", "reduce_bucket_size"), 5e8)
    for what in ("optimizer", "param")[: stage - 1 if offload else 0]:
        zero[f"offload_{what}"] = {"device": "cpu", "pin_memory": True}
    scaling = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16}
    return {
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto"),
        **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping"), "auto"),
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": "auto", **scaling, "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
    }


def config_file(name: str, folder: Path) -> Path:
    """Return the file of a DeepSpeed config: an example's, or LLaMA-Factory's config of this name."""
    if name not in EXAMPLES:
        path = folder / f"ds_{name}_config.json"
        path.write_text(json.dumps(llamafactory_config(name)), encoding="utf-8")
        return path
    path = JSON / f"{name}.json"
    if name != "zero3_nvme":
        return path
    config = json.loads(path.read_text(encoding="utf-8"))
    skip_without_nvme(config)
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(folder)
    path = folder / path.name
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def configs_in(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Yield names of configs with their files, each in a new folder of its name, but those whose tests skip."""
    for name in names:
        (folder / name).mkdir()
        try:
            config = config_file(name, folder / name)
        except pytest.skip.Exception:
            continue
        yield name, config


def skip_without_nvme(config: dict[str, Any]) -> None:
    """Skip if hf_muon refuses NVMe, or if DeepSpeed's async_io is not compiled, which takes minutes."""
    from hf_muon.integrations.deepspeed.refusals import config_complaints

    if complaints := list(config_complaints(config)):
        pytest.skip(complaints[0])
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    if not any(cache.glob("**/async_io.so")):
        pytest.skip(f"DeepSpeed's async_io is not compiled in {cache}")


def on_cpu() -> dict[str, str]:
    """Return the environment variables of a run with DeepSpeed."""
    return {"PYTHONPATH": os.pathsep.join([ON_CPU, *filter(None, [os.environ.get("PYTHONPATH")])])}


def assert_same(output: Path, alone: Path, start: Path, rounding: dict[str, float]) -> None:
    """Check that two ranks under ZeRO have ended at the weights of one process.

    ZeRO-3 multiplies with its own functions (`memory_efficient_linear`), which sum in another order than torch's.
    """
    assert len(list((output / "checkpoint-3").glob("global_step3/*optim_states.pt"))) == 2, "it did not run under ZeRO"
    assert_close(weights(output), weights(alone), weights(start), rounding)


@pytest.fixture(scope="module")
def rounding(tiny_model: Path) -> dict[str, float]:
    return rounding_of_runs(tiny_model, **CHANGES)


# --- LLaMA-Factory


OF_EXAMPLE = {**{name: name for name in EXAMPLES}, "z3": "zero3", "z3_offload": "zero3_offload"}


def factory_run(name: str, inputs: tuple[Path, Path], folder: Path, config: Path | None) -> tuple[Path, dict[str, Any]]:
    """Return the file of an example's run with another DeepSpeed config, or without DeepSpeed, and its settings."""
    settings = llamafactory_settings(*inputs, folder / "out", "tiny_sft") | CHANGES | {"disable_shuffling": True}
    del settings["use_cpu"]
    everything = read_yaml(YAML / name)
    if config is None:
        del everything["deepspeed"]
        settings |= {"per_device_train_batch_size": 2, "use_cpu": True}
    else:
        settings |= {"per_device_train_batch_size": 1, "deepspeed": config}
    path = folder / name
    path.write_text(json.dumps(everything), encoding="utf-8")  # JSON is YAML
    return path, settings


@pytest.fixture(scope="module")
def factory_alone(tiny_model: Path, llamafactory_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    llamafactory(
        *factory_run("llamafactory_qwen3_zero2.yaml", (tiny_model, llamafactory_data), folder, None), cwd=folder
    )
    return folder / "out"


@needs("llamafactory")
def test_llamafactory_command(
    tiny_model: Path, llamafactory_data: Path, factory_alone: Path, rounding: dict[str, float], tmp_path: Path
) -> None:
    """Run `llamafactory-cli train` with an example and LLaMA-Factory's own config."""
    inputs, config = (tiny_model, llamafactory_data), config_file("z2", tmp_path)
    path, settings = factory_run("llamafactory_qwen3_zero2.yaml", inputs, tmp_path, config)
    launch = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "MASTER_PORT": free_port()}
    llamafactory(path, settings, cwd=tmp_path, **on_cpu(), **launch)
    assert_same(tmp_path / "out", factory_alone, tiny_model, rounding)


@pytest.fixture(scope="module")
def factory_together(tiny_model: Path, llamafactory_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the script that `llamafactory-cli train` starts, with each config that this machine can run."""
    folder, runs = tmp_path_factory.mktemp("together"), []
    package = importlib.util.find_spec("llamafactory")
    assert package is not None
    assert package.origin is not None
    inputs = (tiny_model, llamafactory_data)
    for name, config in configs_in(folder, OF_EXAMPLE):
        path, settings = factory_run(f"llamafactory_qwen3_{OF_EXAMPLE[name]}.yaml", inputs, folder / name, config)
        runs.append([Path(package.origin).with_name("launcher.py"), path, *overrides(settings)])
    python(*TORCHRUN, *several(runs, folder), cwd=folder, **on_cpu())
    return folder


@pytest.mark.extended
@needs("llamafactory")
@pytest.mark.parametrize("name", OF_EXAMPLE)
def test_llamafactory(
    name: str,
    tiny_model: Path,
    factory_alone: Path,
    rounding: dict[str, float],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """Train with the examples' configs and with LLaMA-Factory's own, as `llamafactory-cli train` does."""
    config_file(name, tmp_path)  # skips
    together: Path = request.getfixturevalue("factory_together")
    assert_same(together / name / "out", factory_alone, tiny_model, rounding)


# --- examples/train.py


def trainer_words(name: str, model: Path, data: Path, folder: Path, config: Path | None) -> list[object]:
    """Return the words that train with examples/train.py as `factory_run` does with LLaMA-Factory."""
    settings = TINY | CHANGES | {"model_name_or_path": model, "data_path": data, "output_dir": folder / "out"}
    everything = read_yaml(YAML / name)
    path = folder / name
    if config is None:
        del everything["deepspeed"]
        settings |= {"per_device_train_batch_size": 2}
    else:
        del settings["use_cpu"]
        everything["deepspeed"] = str(config)
        settings |= {"per_device_train_batch_size": 1}
    path.write_text(json.dumps(everything), encoding="utf-8")
    return [TRAIN, path, *options(settings)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "data.jsonl"
    fixtures_text.write_jsonl(path, [{"text": text} for text in fixtures_text.texts(20)])
    return path


@pytest.fixture(scope="module")
def trainer_alone(tiny_model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    python(*trainer_words("trainer_qwen3_zero2.yaml", tiny_model, texts, folder, None), cwd=folder)
    return folder / "out"


@pytest.fixture(scope="module")
def trainer_together(tiny_model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every example but that of the first tier, which has processes of its own."""
    folder, runs = tmp_path_factory.mktemp("together"), []
    for name, config in configs_in(folder, [name for name in EXAMPLES if name != "zero3"]):
        runs.append(trainer_words(f"trainer_qwen3_{name}.yaml", tiny_model, texts, folder / name, config))
    python(*TORCHRUN, *several(runs, folder), cwd=folder, **on_cpu())
    return folder


@pytest.mark.extended(but="^zero3$")
@pytest.mark.skipif(
    importlib.util.find_spec("llamafactory") is not None, reason="run with the newest versions, beside tests/deepspeed"
)
@pytest.mark.parametrize("name", EXAMPLES)
def test_trainer(
    name: str,
    tiny_model: Path,
    texts: Path,
    trainer_alone: Path,
    rounding: dict[str, float],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    config = config_file(name, tmp_path)
    if name == "zero3":
        words = trainer_words("trainer_qwen3_zero3.yaml", tiny_model, texts, tmp_path, config)
        python(*TORCHRUN, *words, cwd=tmp_path, **on_cpu())
        output = tmp_path / "out"
    else:
        output = request.getfixturevalue("trainer_together") / name / "out"
    assert_same(output, trainer_alone, tiny_model, rounding)


# --- examples/plain_loop.py


@pytest.mark.extended
@pytest.mark.skipif(
    importlib.util.find_spec("llamafactory") is not None, reason="run with the newest versions, beside tests/deepspeed"
)
def test_plain_loop(tiny_model: Path, rounding: dict[str, float], tmp_path: Path) -> None:
    """Run a plain loop of accelerate with ZeRO-2, interrupted once, and compare it with one process."""
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(JSON / "zero2.json")}
    for folder, more in (
        ("half", ("--steps", 2)),
        ("resumed", ("--steps", 3, "--resume", tmp_path / "half" / "checkpoint")),
    ):
        words = plain_loop_options(tiny_model, tmp_path, "--output", tmp_path / folder, *more)
        python(*TORCHRUN, PLAIN_LOOP, *words, cwd=tmp_path, **variables, **on_cpu())
    words = plain_loop_options(tiny_model, tmp_path, "--output", tmp_path / "one", "--steps", 3)
    python(PLAIN_LOOP, *words, cwd=tmp_path, ACCELERATE_USE_CPU="true")
    assert_close(weights(tmp_path / "resumed"), weights(tmp_path / "one"), weights(tiny_model), rounding)
