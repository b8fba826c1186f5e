"""`llamafactory-cli train` in one process, and in two with DeepSpeed and LLaMA-Factory's own configs."""

from __future__ import annotations

import json

import pytest

from tests.e2e.deepspeed_runs import CHANGES, assert_same, example_run
from tests.e2e.harness import BIN, free_port, llamafactory_settings, read_yaml, rounding_of_runs, run

pytestmark = [pytest.mark.slow, pytest.mark.llamafactory]


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
def rounding(tiny_model):
    return rounding_of_runs(tiny_model, **CHANGES)


def train(name, model, data, folder, **launch):
    """Run the command with an example and a config of LLaMA-Factory's, or without DeepSpeed; return its output."""
    config = None
    if name != "alone":
        config = folder / f"ds_{name}_config.json"
        config.write_text(json.dumps(llamafactory_config(name)), encoding="utf-8")
    example = "llamafactory_qwen3_zero2.yaml"  # the others name another config, and are the same in everything else
    path, changes = example_run(example, folder, config)
    settings = llamafactory_settings(model, data, folder / "out", "tiny_sft") | {"disable_shuffling": True}
    del settings["use_cpu"]
    path.write_text(json.dumps(read_yaml(path) | settings | changes, default=str), encoding="utf-8")
    run([BIN / "llamafactory-cli", "train", path], cwd=folder, **launch)
    return folder / "out"


@pytest.fixture(scope="module")
def alone(tiny_model, llamafactory_data, tmp_path_factory):
    return train("alone", tiny_model, llamafactory_data, tmp_path_factory.mktemp("alone"))


@pytest.mark.promise("llamafactory")
@pytest.mark.extended
@pytest.mark.second_tier("offload")
@pytest.mark.parametrize("name", ["z2", "z3", "z3_offload"])
def test_command(name, tiny_model, llamafactory_data, alone, rounding, tmp_path):
    launch = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "MASTER_PORT": free_port()}
    output = train(name, tiny_model, llamafactory_data, tmp_path, **launch)
    assert_same(output, alone, tiny_model, rounding)
