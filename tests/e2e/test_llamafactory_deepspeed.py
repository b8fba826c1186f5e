"""LLaMA-Factory with DeepSpeed as users start it, with the examples' configs and LLaMA-Factory's own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.e2e.deepspeed_runs import CHANGES, JSON, assert_same, example_run, on_cpu, run_together
from tests.e2e.harness import free_port, llamafactory, llamafactory_settings, overrides, rounding_of_runs

pytestmark = [pytest.mark.slow, pytest.mark.llamafactory]

# The example that a config goes with; configs z3 and z3_offload are LLaMA-Factory's.
OF_EXAMPLE = {
    **{name: name for name in ("zero2", "zero3", "zero3_offload")},
    "z3": "zero3",
    "z3_offload": "zero3_offload",
}


def llamafactory_config(name):
    """Return the content of LLaMA-Factory's ds_z2, ds_z3 or ds_z3_offload of August 2026."""
    stage, offload = int(name[1]), name.endswith("_offload")
    zero = {"stage": stage, "overlap_comm": False, "contiguous_gradients": True}
    if stage == 3:
        automatic = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
        large = ("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
        zero |= dict.fromkeys(automatic, "auto") | dict.fromkeys(large, 1e9)
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    else:
        zero |= dict.fromkeys(("allgather_partitions", "reduce_scatter", "round_robin_gradients"), True)
        zero |= dict.fromkeys(("allgather_bucket_size", "reduce_bucket_size"), 5e8)
    for what in ("optimizer", "param") if offload else ():
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


@pytest.fixture(scope="module")
def inputs(tiny_model, llamafactory_data):
    return tiny_model, llamafactory_data


@pytest.fixture(scope="module")
def rounding(tiny_model):
    return rounding_of_runs(tiny_model, **CHANGES)


def prepare(name, example, inputs, folder):
    """Return the file and the settings of an example's run with a config of this name; without DeepSpeed for None."""
    config = None
    if name in OF_EXAMPLE.values():
        config = JSON / f"{name}.json"
    elif name is not None:
        config = folder.with_name(f"ds_{name}_config.json")
        config.write_text(json.dumps(llamafactory_config(name)), encoding="utf-8")
    path, changes = example_run(f"llamafactory_qwen3_{example}.yaml", folder, config)
    tiny = llamafactory_settings(*inputs, folder / "out", "tiny_sft") | {"disable_shuffling": True}
    del tiny["use_cpu"]
    return path, tiny | changes


@pytest.fixture(scope="module")
def alone(inputs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    llamafactory(*prepare(None, "zero2", inputs, folder), cwd=folder)
    return folder / "out"


def test_command(inputs, alone, rounding, tmp_path):
    """Run `llamafactory-cli train` with an example and LLaMA-Factory's own config."""
    path, settings = prepare("z2", "zero2", inputs, tmp_path / "z2")
    launch = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "MASTER_PORT": free_port()}
    llamafactory(path, settings, cwd=tmp_path, **on_cpu(), **launch)
    assert_same(tmp_path / "z2" / "out", alone, inputs[0], rounding)


@pytest.fixture(scope="module")
def together(inputs, tmp_path_factory):
    """Run the script that `llamafactory-cli train` starts, with each config."""
    folder, runs = tmp_path_factory.mktemp("together"), []
    package = importlib.util.find_spec("llamafactory")
    assert package is not None
    assert package.origin is not None
    for name, example in OF_EXAMPLE.items():
        path, settings = prepare(name, example, inputs, folder / name)
        runs.append([Path(package.origin).with_name("launcher.py"), path, *overrides(settings)])
    return run_together(runs, folder)


@pytest.mark.extended
@pytest.mark.parametrize("name", OF_EXAMPLE)
def test_configs(name, inputs, alone, together, rounding):
    """Train with the examples' configs and with LLaMA-Factory's own, as `llamafactory-cli train` does."""
    assert_same(together / name / "out", alone, inputs[0], rounding)
