"""What Muon does not run with under DeepSpeed: arguments of `initialize`, configs, and engines."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from torch import nn

from hf_muon import Muon, build_optimizer
from hf_muon.integrations.deepspeed.engine import initialize, wrapping
from hf_muon.integrations.deepspeed.refusals import engine_complaint
from tests.refusals import Refusal


def model():
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def muon(network):
    return build_optimizer(network, muon_patterns="weight")


def started(make, config=None):
    """Start DeepSpeed with the optimizer that a function makes of the model."""
    network = model()
    initialize(model=network, optimizer=make(network), config={} if config is None else config)


def with_another_head(network):
    optimizer = muon(network)
    network[1] = nn.Linear(3, 5)
    return optimizer


def without_config():
    network = model()
    initialize(model=network, optimizer=muon(network))


def with_a_list(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    started(muon, tmp_path / "config.json")


ARGUMENTS = [
    Refusal("not-muon", "initialize", lambda: started(lambda m: torch.optim.AdamW(m.parameters())), says="AdamW"),
    Refusal("not-muon", "initialize", lambda: started(lambda m: None), says="missing", name="none"),
    Refusal(
        "not-muon",
        "initialize",
        lambda: started(lambda m: lambda params: torch.optim.SGD(params, lr=1)),
        says="SGD",
        name="function",
    ),
    Refusal("foreign-model", "initialize", lambda: started(lambda _: muon(model())), says=r"0\.weight \(3, 4\)"),
    Refusal(
        "foreign-model",
        "initialize",
        lambda: started(with_another_head),
        says=r"1\.weight \(2, 3\), 1\.bias \(2,\), and .*build_optimizer\(model\)",
        name="other head",
    ),
    Refusal("not-a-mapping", "initialize", without_config, says="NoneType"),
    Refusal("not-a-mapping", "initialize", lambda: started(muon, 3), says="int", name="number"),
    Refusal("not-a-mapping", "initialize", with_a_list, says="list", name="file"),
]

NVME = {"device": "nvme", "nvme_path": "/disk"}
PIPELINED = {**NVME, "pipeline_read": True, "pipeline_write": True, "buffer_count": 8}
CONFIGS = [
    ("optimizer-in-config", {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "AdamW"),
    ("auto-tp", {"tensor_parallel": {"autotp_size": 2}}, "autotp_size"),
    ("zenflow", {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zenflow"),
    ("mics", {"zero_optimization": {"mics_shard_size": 2}}, "mics_shard_size"),
    ("quantized-zero", {"zero_optimization": {"zero_quantized_weights": True}}, "quantized_weights"),
    ("quantized-zero", {"zero_optimization": {"zero_quantized_gradients": True}}, "quantized_gradients"),
    ("elastic-checkpoint", {"zero_optimization": {"elastic_checkpoint": True}}, "elastic_checkpoint"),
    ("offload-ratio", {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "ratio"),
    ("super-offload", {"zero_optimization": {"offload_optimizer": {"super_offload": True}}}, "super_offload"),
    ("nvme-without-zero3", {"zero_optimization": {"stage": 2, "offload_optimizer": NVME}}, "stage 3"),
    ("nvme-buffers", {"zero_optimization": {"stage": 3, "offload_optimizer": PIPELINED}}, "8.*12"),
    ("parameters-on-nvme", {"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param"),
    ("no-fp32-masters", {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16_master"),
    ("fp16-autocast", {"torch_autocast": {"enabled": True, "dtype": "float16"}}, "float16"),
    ("universal-checkpoint", {"checkpoint": {"load_universal": True}}, "load_universal"),
    ("expert-parallel", {"expert_parallel": {"enabled": True}}, "expert_parallel"),
]


def wrapped(config, use_muon=True, **options):
    group = {"params": [nn.Parameter(torch.ones(4, 64))], "use_muon": use_muon}
    with wrapping(Muon([group], **options), config):
        pass


# An option, its value, and where DeepSpeed has the optimizer.
MOMENTS = [
    ("int8-partition", "momentum_dtype", "int8", "none"),
    ("int8-partition", "momentum_dtype", "int8", "cpu"),
    ("int8-partition", "adamw_state_dtype", "int8", "cpu"),
    ("bf16-on-nvme", "momentum_dtype", "bf16", "nvme"),
    ("bf16-on-nvme", "adamw_state_dtype", "bf16", "nvme"),
    ("momentum-offload", "momentum_offload", "cpu", "cpu"),
    ("momentum-offload", "momentum_offload", "cpu", "none"),
    ("rule-state-on-nvme", "normalize", "rows", "nvme"),
]


def moments(option, value, device):
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {**NVME, "device": device}}}
    wrapped(config, use_muon=option != "adamw_state_dtype", **{option: value})


def engine(name="DeepSpeedEngine", **attributes):
    """Return the complaint about an engine of this class."""
    return engine_complaint(type(name, (), {"optimizer": None, **attributes})()) or ""


MEGATRON = type("Megatron", (), {"get_model_parallel_world_size": lambda self: 2})
UNFUSED = type("FP16_UnfusedOptimizer", (), {"loss_scale": 65536})
IN_BF16 = {"bfloat16_enabled": lambda self: True}

CASES = [
    *ARGUMENTS,
    *(
        Refusal(code, "DeepSpeed's config", lambda given: wrapped(given), RuntimeError, lambda c=config: c, says, says)
        for code, config, says in CONFIGS
    ),
    *(
        Refusal(code, "DeepSpeed", lambda own=tuple(own): moments(*own), RuntimeError, says=own[0], name=" ".join(own))
        for code, *own in MOMENTS
    ),
    Refusal("unsupported-engine", "attach", lambda: engine("PipelineEngine"), says="PipelineEngine"),
    Refusal("model-parallel", "attach", lambda: engine(mpu=MEGATRON())),
    Refusal("deepspeed-moe", "attach", lambda: engine(has_moe_layers=True)),
    # Gradients that an old DeepSpeed unscales without having scaled.
    Refusal("bf16-zero0", "attach", lambda: engine(optimizer=UNFUSED(), **IN_BF16), says="65536"),
]
