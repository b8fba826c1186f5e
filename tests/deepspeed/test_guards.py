"""Set-ups that do not work raise an error; nothing is replaced silently."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_muon import Muon
from hf_muon.integrations.deepspeed.engine import wrapping
from hf_muon.integrations.deepspeed.refusals import config_complaints, engine_complaint, refuse_config
from tests.deepspeed.cases import complaint

NVME = {"device": "nvme", "nvme_path": "/disk"}
REFUSED = {
    "optimizer": {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
    "AutoTP": {"tensor_parallel": {"autotp_size": 2}},
    "zenflow": {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
    "MiCS": {"zero_optimization": {"mics_shard_size": 2}},
    "quantized_weights": {"zero_optimization": {"zero_quantized_weights": True}},
    "quantized_gradients": {"zero_optimization": {"zero_quantized_gradients": True}},
    "elastic": {"zero_optimization": {"elastic_checkpoint": True}},
    "ratio": {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
    "super_offload": {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
    "nvme without stage 3": {"zero_optimization": {"stage": 2, "offload_optimizer": NVME}},
    "buffer_count 8. Set it to 12": {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {**NVME, "pipeline_read": True, "pipeline_write": True, "buffer_count": 8},
        }
    },
    "offload_param": {"zero_optimization": {"offload_param": {"device": "nvme"}}},
    "master": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "float16": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    "universal": {"checkpoint": {"load_universal": True}},
    "expert_parallel": {"expert_parallel": {"enabled": True}},
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_was_not_shown_to_work_is_refused_by_name(word):
    with pytest.raises(RuntimeError, match=word):
        refuse_config(REFUSED[word])


@pytest.mark.parametrize(
    ("option", "dtype", "device"),
    [
        ("momentum_dtype", "int8", "none"),
        ("momentum_dtype", "int8", "cpu"),
        ("momentum_dtype", "bf16", "nvme"),
        ("adamw_state_dtype", "bf16", "nvme"),
        ("adamw_state_dtype", "int8", "cpu"),
        ("momentum_offload", "cpu", "cpu"),
        ("momentum_offload", "cpu", "none"),
    ],
)
def test_moments_that_are_not_kept_there(option, dtype, device):
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {**NVME, "device": device, "buffer_count": 4}}}
    group = {"params": [nn.Parameter(torch.ones(4, 64))], "use_muon": option == "momentum_dtype"}
    optimizer = Muon([group], **{option: dtype})
    with pytest.raises(RuntimeError, match=f"{option}={dtype} does not run"), wrapping(optimizer, config):
        pass


def test_what_is_said_by_default_is_not_refused():
    zero = {
        "stage": 3,
        "mics_shard_size": -1,
        "zero_hpz_partition_size": 2,
        "zero_quantized_weights": False,
        "reduce_bucket_size": "auto",
        "offload_optimizer": {"device": "cpu", "ratio": 1.0, "pin_memory": True},
    }
    config = {"zero_optimization": zero, "bf16": {"enabled": "auto"}, "train_batch_size": "auto"}
    assert list(config_complaints(config)) == []
    assert list(config_complaints({})) == []
    assert list(config_complaints({"zero_optimization": {"stage": 3, "offload_optimizer": NVME}})) == []


def test_an_offloaded_optimizer_that_is_not_ours(ranks):
    assert all(
        "steps with DeepSpeedCPUAdam, and not with the Muon" in error for error in ranks.run(complaint, fault="swapped")
    )


@pytest.mark.extended(but="2$|^2")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("subclass", "does not know how OtherZeroOptimizer of DeepSpeed"),
        ("renamed", "in a way that this version of hf_muon does not know"),
        ("moved", "weight does not lie where"),
    ],
)
def test_a_layout_that_is_not_known(ranks, fault, words, stage):
    for error in ranks.run(complaint, fault=fault, stage=stage):
        assert words in error


def test_deepspeed_started_without_us(ranks):
    for error in ranks.run(complaint, fault="started without us"):
        assert "start it with hf_muon.integrations.deepspeed.initialize" in error


def test_gradients_that_an_old_deepspeed_unscales_without_having_scaled():
    wrapper = type("FP16_UnfusedOptimizer", (), {"loss_scale": 65536})()
    engine = type("DeepSpeedEngine", (), {"optimizer": wrapper, "bfloat16_enabled": lambda self: True})()
    assert "loss scale of 65536 that the loss was not multiplied by" in engine_complaint(engine)
    wrapper.loss_scale = 1
    assert engine_complaint(engine) is None


def test_model_parallelism_and_other_engines():
    mpu = type("Megatron", (), {"get_model_parallel_world_size": lambda self: 2})()
    engine = type("DeepSpeedEngine", (), {"optimizer": None, "mpu": mpu})()
    assert "model parallelism" in engine_complaint(engine)
    assert "PipelineEngine" in engine_complaint(type("PipelineEngine", (), {})())


@pytest.mark.extended(but="2")
@pytest.mark.parametrize("stage", [2, 3])
def test_partitions_without_a_matrix(ranks, stage):
    """Route one small matrix to Muon: the second rank stores none of it, or a part of one row."""
    options = {"adamw_patterns": r"blocks|experts"}
    assert ranks.run(complaint, fault=None, stage=stage, **options) == [None, None]
