"""What Muon does not run with under DeepSpeed: arguments of `initialize`, configs, and engines."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from types import SimpleNamespace

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import pytest
import torch
from torch import nn

from hf_muon import Muon, build_optimizer
from hf_muon.integrations.deepspeed.engine import attach, initialize, wrapping
from hf_muon.integrations.deepspeed.loading import Loading
from hf_muon.integrations.deepspeed.refusals import engine_complaint
from hf_muon.optimizer.partitioned import attach_partitions
from tests.refusals import Refusal, table
from tests.refusals.ranks import on


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


def second_engine():
    network = model()
    optimizer = muon(network)
    attach_partitions(optimizer, {})
    initialize(model=network, optimizer=optimizer, config={})


FUNCTION, START = lambda params: torch.optim.SGD(params, lr=1), "initialize"
ARGUMENTS = table(
    [
        ("second-engine", START, second_engine),
        ("not-muon", START, partial(started, lambda network: torch.optim.AdamW(network.parameters())), "AdamW"),
        ("not-muon", START, partial(started, lambda _: None), "missing"),
        ("not-muon", START, partial(started, lambda _: FUNCTION), "SGD"),
        ("foreign-model", START, partial(started, lambda _: muon(model())), r"0\.weight \(3, 4\)"),
        (
            "foreign-model",
            START,
            partial(started, with_another_head),
            r"1\.weight \(2, 3\), 1\.bias \(2,\), and .*build_optimizer\(model\)",
        ),
        ("not-a-mapping", START, without_config, "NoneType"),
        ("not-a-mapping", START, lambda: started(muon, 3), "int"),
        ("not-a-mapping", START, with_a_list, "list"),
    ]
)

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
    ("rule-state-on-nvme", "normalize", "rows", "nvme"),
]


def moments(option, value, device):
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {**NVME, "device": device}}}
    wrapped(config, use_muon=option != "adamw_state_dtype", **{option: value})


def two_rates():
    groups = [
        {"params": [nn.Parameter(torch.ones(4, 64))], "use_muon": rate > 1e-5, "lr": rate} for rate in (1e-3, 1e-5)
    ]
    with wrapping(Muon(groups), {"scheduler": {"type": "WarmupLR"}}):
        pass


def engine(name="DeepSpeedEngine", **attributes):
    """Return the complaint about an engine of this class."""
    return engine_complaint(type(name, (), {"optimizer": None, "seq_dp_world_size": 2, **attributes})()) or ""


def with_fault(rank: int, fault: str, stage: int) -> str:
    """Return the error of a start, or of the first step, with a fault."""
    from tests.deepspeed.runs import build_model, config_of, engine_of, loss_of, rank_of_environment, tokens_of

    try:
        if fault == "started without us":
            rank_of_environment()
            network = build_model()
            config = config_of(stage) | {"zero_allow_untested_optimizer": True}
            running, *_ = deepspeed.initialize(model=network, optimizer=build_optimizer(network), config=config)
        else:
            running, optimizer = engine_of(stage)
        wrapper = running.optimizer
        if fault == "swapped":
            kind = type("DeepSpeedCPUAdam", (torch.optim.AdamW,), {})  # the real one takes minutes to compile
            wrapper.optimizer = kind(wrapper.optimizer.param_groups[0]["params"])
        elif fault == "subclass":
            wrapper.__class__ = type("OtherZeroOptimizer", (type(wrapper),), {})
        elif fault == "renamed":
            name = "fp16_groups" if stage == 3 else "bit16_groups_flat"
            setattr(wrapper, name + "_", wrapper.__dict__.pop(name))
        elif fault == "moved" and rank == 1:
            flat = next(iter(optimizer.partitioned.partitions))
            flat.data.copy_(flat.data.roll(1))
        if fault != "started without us":
            attach(running, optimizer)
        running.backward(loss_of(running, tokens_of(0)))
        running.step()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def faults(stage, *rows):
    return table((code, f"ZeRO-{stage}", on(with_fault, fault=fault, stage=stage), says) for code, fault, says in rows)


LAYOUT = "unknown-zero-layout"
KNOWN = [(LAYOUT, "subclass", "OtherZeroOptimizer"), (LAYOUT, "renamed", ""), (LAYOUT, "moved", "weight")]
OTHERS = [("replaced-by-flat", "started without us", "initialize"), ("other-optimizer", "swapped", "DeepSpeedCPUAdam")]


def fp16_from_zero0():
    """Return the complaint about a layout, because DeepSpeed has fp16 on GPUs alone."""
    loading = Loading(None, None, {"load_dir": "run", "load_optimizer_states": True, "load_module_only": False})
    common = {"precision": "fp16", "ranks": 2, "is_swapped": False, "parameters": {}}
    loading.source, loading.target = (SimpleNamespace(stage=stage, **common) for stage in (0, 2))
    return list(loading._refusals())


# An old DeepSpeed, whose ranks average a copy of the gradients.
COPIES = SimpleNamespace(
    use_grad_accum_attribute=True,
    gradient_accumulation_dtype=torch.float32,
    get_gradient_for_reduction=lambda param: param.grad_accum.bfloat16(),
)
MEGATRON = type("Megatron", (), {"get_model_parallel_world_size": lambda self: 2})
UNFUSED = type("FP16_UnfusedOptimizer", (), {"loss_scale": 65536})
IN_BF16 = {"bfloat16_enabled": lambda self: True}

CASES = [
    *ARGUMENTS,
    *(
        Refusal(code, "DeepSpeed's config", lambda given: wrapped(given), RuntimeError, lambda c=config: c, says, says)
        for code, config, says in CONFIGS
    ),
    Refusal("scheduler-in-config", "DeepSpeed", two_rates, RuntimeError, says="0.001 and 1e-05"),
    *(
        Refusal(code, "DeepSpeed", lambda own=tuple(own): moments(*own), RuntimeError, says=own[0], name=" ".join(own))
        for code, *own in MOMENTS
    ),
    *faults(2, *OTHERS, *KNOWN),
    *faults(3, ("step-the-engine", "started without us", "initialize")),
    *(dataclasses.replace(case, marks=[pytest.mark.extended]) for case in faults(3, *KNOWN)),
    Refusal("loss-scale-of-zero0", "engine.load_checkpoint", fp16_from_zero0, says="stage to 0"),
    Refusal("unsupported-engine", "attach", lambda: engine("PipelineEngine"), says="PipelineEngine"),
    Refusal("model-parallel", "attach", lambda: engine(mpu=MEGATRON())),
    Refusal("deepspeed-moe", "attach", lambda: engine(has_moe_layers=True)),
    # Gradients that an old DeepSpeed unscales without having scaled.
    Refusal("bf16-zero0", "attach", lambda: engine(optimizer=UNFUSED(), **IN_BF16), says="65536"),
    Refusal("gradients-not-averaged", "attach", lambda: engine(optimizer=COPIES), says="grad_accum_dtype"),
]
