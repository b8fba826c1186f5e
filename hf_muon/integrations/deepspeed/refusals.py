"""Refuse DeepSpeed configs and engines with which Muon does not run, and say what to do instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from hf_muon.integrations.deepspeed.zero_layout import version
from hf_muon.optimizer.muon import Muon
from hf_muon.optimizer.state import DTYPE_OPTIONS, dtype_of
from hf_muon.rules import registry

Config = Mapping[str, Any]


def config_complaints(config: Config) -> Iterator[str]:
    """Yield what Muon does not run with in a DeepSpeed config, and what to do instead."""
    # Compared with True and with numbers: DeepSpeed drops a value "auto" that nobody has filled in.
    zero = _section(config, "zero_optimization")
    optimizer = _section(zero, "offload_optimizer")
    if "optimizer" in config:
        kind = _section(config, "optimizer").get("type", "an optimizer")
        yield (
            f'"optimizer" ({kind}), which DeepSpeed would use in place of Muon. Remove it from the config '
            "[optimizer-in-config]"
        )
    if _number(_section(config, "tensor_parallel"), "autotp_size", 0) > 1:
        yield "tensor_parallel.autotp_size (AutoTP), which cuts matrices before ZeRO does, into plain tensors [auto-tp]"
    if zero.get("zenflow"):
        yield "zero_optimization.zenflow, which steps parts of matrices at different times [zenflow]"
    if _number(zero, "mics_shard_size", -1) > 0:
        yield "zero_optimization.mics_shard_size (MiCS) [mics]"
    for name in ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"):
        if zero.get(name) is True:
            yield f"zero_optimization.{name} (ZeRO++) [quantized-zero]"
    if zero.get("elastic_checkpoint") is True:
        yield "zero_optimization.elastic_checkpoint, which cannot tell moments from steps [elastic-checkpoint]"
    if _number(optimizer, "ratio", 1.0) < 1:
        yield (
            "zero_optimization.offload_optimizer.ratio below 1, which steps a part with another optimizer "
            "[offload-ratio]"
        )
    if optimizer.get("super_offload") is True:
        yield "zero_optimization.offload_optimizer.super_offload, which brings an optimizer of its own [super-offload]"
    if optimizer.get("device") == "nvme":
        yield from _nvme_complaints(zero, optimizer)
    if _section(zero, "offload_param").get("device") == "nvme":
        yield "zero_optimization.offload_param.device nvme. Use cpu [parameters-on-nvme]"
    if "expert_parallel" in config and _section(config, "expert_parallel").get("enabled") is not False:
        yield "expert_parallel [expert-parallel]"
    for precision in ("fp16", "bf16", "bfloat16"):
        for name in (f"{precision}_master_weights_and_grads", f"{precision}_optimizer_states"):
            if _section(config, precision).get(name) is True:
                yield f"{precision}.{name}: Muon needs fp32 master weights [no-fp32-masters]"
    autocast = _section(config, "torch_autocast")
    if autocast.get("enabled") is True and str(autocast.get("dtype")).removeprefix("torch.") in ("float16", "fp16"):
        yield "torch_autocast in float16. Use fp16 or bf16 [fp16-autocast]"
    if _section(config, "checkpoint").get("load_universal") is True:
        yield (
            "checkpoint.load_universal: DeepSpeed's universal checkpoints hold Adam's moments only "
            "[universal-checkpoint]"
        )


def _nvme_complaints(zero: Config, optimizer: Config) -> Iterator[str]:
    at = "zero_optimization.offload_optimizer"
    if zero.get("stage", 0) not in (3, "auto"):
        yield (
            f"{at}.device nvme without stage 3, where DeepSpeed ignores it. Use stage 3, or device cpu "
            "[nvme-without-zero3]"
        )
    # Per partition: weights, gradient and two moments of AdamW. Pipelining also holds the next and the previous one.
    needed = 4 * (1 + sum(optimizer.get(name) is True for name in ("pipeline_read", "pipeline_write")))
    count = _number(optimizer, "buffer_count", 4)
    if count < needed:
        yield f"{at}.buffer_count {count:g}. Set it to {needed} or more, which this pipeline takes [nvme-buffers]"


def _section(config: Config, name: str) -> Config:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _number(config: Config, name: str, default: float) -> float:
    number = config.get(name, default)
    return number if isinstance(number, (int, float)) else default


def refuse_config(config: Config) -> None:
    """Raise if Muon does not run with a DeepSpeed config.

    Raises:
        RuntimeError: with all complaints.
    """
    if complaints := list(config_complaints(config)):
        raise RuntimeError("Muon does not run with this DeepSpeed config:\n  - " + "\n  - ".join(complaints))


def refuse_momentum(optimizer: Muon, config: Config) -> None:
    """Raise if DeepSpeed cannot keep moments or rates as param groups ask for.

    Raises:
        RuntimeError: with the option, and what to write instead.
    """
    rates = dict.fromkeys(f"{float(group['lr']):g}" for group in optimizer.param_groups)
    if "scheduler" in config and len(rates) > 1:
        raise RuntimeError(
            f'"scheduler" in the DeepSpeed config gives all param groups one learning rate, and they have '
            f"{' and '.join(rates)} (muon_lr, adamw_lr). Remove it, and set lr_scheduler_type or a scheduler of "
            "torch instead [scheduler-in-config]"
        )
    dtypes = dict.fromkeys((DTYPE_OPTIONS[group["use_muon"]], dtype_of(group)) for group in optimizer.param_groups)
    offload = _section(_section(config, "zero_optimization"), "offload_optimizer")
    states = [
        rule.name
        for group in optimizer.param_groups
        if group["use_muon"]
        for rule in registry.rules_of(group)
        if rule.state
    ]
    if states and offload.get("device") == "nvme":
        raise RuntimeError(
            f"{states[0]} does not run with the optimizer on NVMe, where DeepSpeed swaps momentum alone. Leave it out, "
            "or offload to the CPU [rule-state-on-nvme]"
        )
    for name, dtype in dtypes:
        if dtype == "int8":
            raise RuntimeError(
                f"{name}=int8 does not run under DeepSpeed, which cuts matrices anywhere: int8 has a scale for every "
                "64 elements of a row. Use bf16 [int8-partition]"
            )
        if dtype == "bf16" and offload.get("device") == "nvme":
            raise RuntimeError(
                f"{name}=bf16 does not run with the optimizer on NVMe, where DeepSpeed swaps fp32. Use auto, or "
                "offload to the CPU [bf16-on-nvme]"
            )


def engine_complaint(engine: Any) -> str | None:
    """Return why Muon does not run with an engine, for reasons that its config does not show; None if it runs."""
    if type(engine).__name__ != "DeepSpeedEngine":
        return f"DeepSpeed's {type(engine).__name__} [unsupported-engine]"
    if getattr(engine, "has_moe_layers", False):
        return "DeepSpeed's own layers of experts (deepspeed.moe) [deepspeed-moe]"
    scale = getattr(engine.optimizer, "loss_scale", 1)
    if type(engine.optimizer).__name__ == "FP16_UnfusedOptimizer" and engine.bfloat16_enabled() and scale != 1:
        # In 0.18.4, gradients become so small that AdamW's eps outweighs them and clipping never applies.
        return (
            f"ZeRO-0, or ZeRO-1 with grad_accum_dtype, in bf16 in {version()}, which divides gradients by a loss scale "
            f"of {scale} that the loss was not multiplied by. Use ZeRO-2, or another version of DeepSpeed [bf16-zero0]"
        )
    if engine.seq_dp_world_size > 1 and _averages_a_copy(engine.optimizer):
        return (
            f"ZeRO-1 with grad_accum_dtype in {version()}, which does not average the gradients of the ranks. Use "
            "ZeRO-2, or another version of DeepSpeed, or leave grad_accum_dtype out [gradients-not-averaged]"
        )
    if hasattr(getattr(engine, "mpu", None), "initialize_sequence_parallel"):
        return None  # Ulysses: "model parallel" ranks share sequences, and have whole parameters
    for name in ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size"):
        size = getattr(getattr(engine, "mpu", None), name, None)
        if size is not None and size() > 1:
            return (
                "model parallelism (mpu), in which each rank holds a part of a matrix before ZeRO cuts it "
                "[model-parallel]"
            )
    return None


def _averages_a_copy(zero: Any) -> bool:
    """Return whether ranks average a copy of the gradients with which ZeRO-1 steps, as in 0.18.4."""
    if not getattr(zero, "use_grad_accum_attribute", False):
        return False
    # Asked of the method, with a stand-in for a parameter: its fault is in more than one version.
    param = SimpleNamespace(grad_accum=torch.zeros(1, dtype=zero.gradient_accumulation_dtype, device="cpu"))
    return zero.get_gradient_for_reduction(param) is not param.grad_accum
