"""Muon as the optimizer that DeepSpeed ZeRO wraps.

All that is relied on inside DeepSpeed stands in this file and in its neighbours named `deepspeed_*`.

ZeRO calls its optimizer once per optimizer step, after it has unscaled and clipped the raw gradients, on flat fp32
partitions that it has put into the param groups. Which slices of which matrices a partition holds is read from ZeRO's
own optimizers when they have been made, and proven by comparing values before the first step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from hf_muon.integrations.deepspeed.arguments import arguments_of, config_of, muon_of, without_config
from hf_muon.integrations.deepspeed.gradients import hide_name, mend_gradients
from hf_muon.integrations.deepspeed.loading import check_before_loading
from hf_muon.integrations.deepspeed.partitions import read_partitions, version
from hf_muon.integrations.deepspeed.saving import write_latest_last
from hf_muon.integrations.ulysses.refusals import refuse_uncorrected
from hf_muon.optimizer.muon import Muon
from hf_muon.optimizer.partitioned import attach_partitions, expect_partitions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Config = Mapping[str, Any]


# --- what is refused


def config_complaints(config: Config) -> Iterator[str]:
    """What of a DeepSpeed config does not go with Muon, and what to do instead."""
    zero = _section(config, "zero_optimization")
    optimizer = _section(zero, "offload_optimizer")
    if "optimizer" in config:
        kind = _section(config, "optimizer").get("type", "an optimizer")
        yield f'"optimizer" ({kind}), which would be used and Muon would not. Remove it from the config'
    if _number(_section(config, "tensor_parallel"), "autotp_size", 0) > 1:
        yield "tensor_parallel.autotp_size (AutoTP), which cuts matrices before ZeRO does"
    if zero.get("zenflow"):
        yield "zero_optimization.zenflow, which steps parts of matrices at different times"
    if _number(zero, "mics_shard_size", -1) > 0:
        yield "zero_optimization.mics_shard_size (MiCS)"
    if _number(zero, "zero_hpz_partition_size", 1) > 1:
        yield "zero_optimization.zero_hpz_partition_size (ZeRO++ hpZ)"
    for name in ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"):
        if zero.get(name) is True:
            yield f"zero_optimization.{name} (ZeRO++)"
    if zero.get("elastic_checkpoint") is True:
        yield "zero_optimization.elastic_checkpoint, which cannot tell moments from steps"
    if _number(optimizer, "ratio", 1.0) < 1:
        yield "zero_optimization.offload_optimizer.ratio below 1, which steps a part with another optimizer"
    if optimizer.get("super_offload") is True:
        yield "zero_optimization.offload_optimizer.super_offload, which brings an optimizer of its own"
    if optimizer.get("device") == "nvme":
        yield from _nvme_complaints(zero, optimizer)
    if _section(zero, "offload_param").get("device") == "nvme":
        yield "zero_optimization.offload_param.device nvme. Use cpu"
    if "expert_parallel" in config and _section(config, "expert_parallel").get("enabled") is not False:
        yield "expert_parallel"
    for precision in ("fp16", "bf16", "bfloat16"):
        for name in (f"{precision}_master_weights_and_grads", f"{precision}_optimizer_states"):
            if _section(config, precision).get(name) is True:
                yield f"{precision}.{name}: Muon needs fp32 master weights"
    autocast = _section(config, "torch_autocast")
    if autocast.get("enabled") is True and str(autocast.get("dtype")).removeprefix("torch.") in ("float16", "fp16"):
        yield "torch_autocast in float16. Use fp16 or bf16"
    if _section(config, "checkpoint").get("load_universal") is True:
        yield "checkpoint.load_universal: DeepSpeed's universal checkpoints hold Adam's moments only"


def _nvme_complaints(zero: Config, optimizer: Config) -> Iterator[str]:
    at = "zero_optimization.offload_optimizer"
    if zero.get("stage", 0) not in (3, "auto"):
        yield f"{at}.device nvme without stage 3, where DeepSpeed ignores it. Use stage 3, or device cpu"
    if not optimizer.get("nvme_path"):
        yield f"{at}.device nvme without {at}.nvme_path, a folder on the disk"
    # A partition's weights, gradient and two moments of AdamW; the next one's while it is read, the last one's while
    # it is written.
    needed = 4 * (1 + sum(optimizer.get(name) is True for name in ("pipeline_read", "pipeline_write")))
    count = _number(optimizer, "buffer_count", 4)
    if count < needed:
        yield f"{at}.buffer_count {count:g}. Set it to {needed} or more, which this pipeline takes"


def _section(config: Config, name: str) -> Config:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _number(config: Config, name: str, default: float) -> float:
    found = config.get(name, default)
    return found if isinstance(found, (int, float)) else default


def refuse_config(config: Config) -> None:
    """Raise if a DeepSpeed config holds what Muon does not go with.

    Raises:
        RuntimeError: every complaint.
    """
    if complaints := list(config_complaints(config)):
        raise RuntimeError("Muon does not run with this DeepSpeed config:\n  - " + "\n  - ".join(complaints))


def refuse_momentum(optimizer: Muon, config: Config) -> None:
    """Raise if momentum is to be kept in a way that DeepSpeed does not keep it in.

    Raises:
        RuntimeError: the group's `momentum_dtype`, and what to write instead.
    """
    kept = {group["momentum_dtype"] for group in optimizer.param_groups if group["use_muon"]}
    offload = _section(_section(config, "zero_optimization"), "offload_optimizer")
    if "int8" in kept:
        raise RuntimeError(
            "momentum_dtype=int8 does not go with DeepSpeed, which cuts matrices anywhere: a scale is kept for every "
            "64 elements of a row. Use bf16"
        )
    if "bf16" in kept and offload.get("device") == "nvme":
        raise RuntimeError(
            "momentum_dtype=bf16 does not go with the optimizer on NVMe, where DeepSpeed swaps fp32. Use auto, or "
            "offload to the CPU"
        )


def refuse_arguments(args: Any) -> None:
    """Raise if the DeepSpeed config of some TrainingArguments holds what Muon does not go with.

    Raises:
        RuntimeError: every complaint.
    """
    plugin = getattr(args, "deepspeed_plugin", None)
    if plugin is not None and isinstance(plugin.deepspeed_config, Mapping):
        refuse_config(plugin.deepspeed_config)


# --- how DeepSpeed is started


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Start DeepSpeed with a `Muon`, for scripts without accelerate and Trainer.

    Args:
        *args, **kwargs: as of `deepspeed.initialize`; `optimizer` is a Muon over the model's parameters, as
            `build_optimizer` makes it, or a function that returns one.

    Returns:
        Engine, optimizer, data loader and scheduler, as `deepspeed.initialize` does.

    Raises:
        ValueError: no Muon over this model, or no config that can be read.
        RuntimeError: something in the config, or in this DeepSpeed, that Muon does not go with.
    """
    import deepspeed

    arguments = arguments_of(deepspeed.initialize, args, kwargs)
    config, optimizer = config_of(arguments), muon_of(arguments)
    arguments |= {"config": config, "config_params": None, "optimizer": optimizer}
    with wrapping(optimizer, config), without_config(arguments.get("args")):
        made: tuple[Any, Any, Any, Any] = deepspeed.initialize(**arguments)
        attach(made[0], optimizer)
    return made


@contextlib.contextmanager
def wrapping(optimizer: Muon, config: MutableMapping[str, Any]) -> Iterator[None]:
    """Let DeepSpeed wrap the optimizer in here, and have it attached before the end.

    Raises:
        RuntimeError: something in the config that Muon does not go with.
    """
    refuse_config(config)
    refuse_momentum(optimizer, config)
    # Without the first, ZeRO refuses any optimizer but its own; with the second one true, as it is by default,
    # accelerate puts DeepSpeedCPUAdam in the place of an offloaded optimizer without a word.
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    hide_name(optimizer)
    expect_partitions(optimizer, "DeepSpeed")
    yield


# --- what DeepSpeed has made of it


def attach_one_of(made: Iterable[Any], optimizer: Muon) -> None:
    """`attach` the engine that is among some objects.

    Raises:
        RuntimeError: there is none, or more than one; and as `attach`.
    """
    import deepspeed

    engines = [one for one in made if isinstance(one, deepspeed.DeepSpeedEngine)]
    if len(engines) != 1:
        raise RuntimeError(f"{len(engines)} DeepSpeed engines were made for one Muon; give prepare a model with it")
    attach(engines[0], optimizer)


def attach(engine: Any, optimizer: Muon) -> None:
    """Tell the optimizer how DeepSpeed stores its parameters, after proving it. All ranks must call this together.

    Raises:
        RuntimeError: the engine steps with another optimizer, or stores parameters in a way that is not known.
    """
    from deepspeed.accelerator import get_accelerator

    wrapper = engine.optimizer
    held = wrapper if isinstance(wrapper, Muon) else getattr(wrapper, "optimizer", None)
    if held is not optimizer:
        raise RuntimeError(
            f"DeepSpeed steps with {type(held).__name__}, and not with the Muon that it was given. Remove "
            '"optimizer" from its config, and set "zero_force_ds_cpu_optimizer" to false'
        )
    refuse_config(engine.config)
    refuse_momentum(optimizer, engine.config)
    if complaint := _engine_complaint(engine):
        raise RuntimeError(f"Muon does not run with {complaint}")
    refuse_uncorrected(getattr(engine, "mpu", None), optimizer)
    partitions = read_partitions(engine, torch.device(get_accelerator().current_device_name()))
    if partitions is not None:
        mend_gradients(wrapper)
    hide_name(optimizer)
    # In ZeRO-0 every rank has whole parameters, or fp32 copies of them.
    attach_partitions(optimizer, partitions, replicate_group=_group_of(engine))
    check_before_loading(engine, optimizer)
    write_latest_last(engine)


def _engine_complaint(engine: Any) -> str | None:
    """What of an engine does not go with Muon, and no config says."""
    if type(engine).__name__ != "DeepSpeedEngine":
        return f"DeepSpeed's {type(engine).__name__}"
    if getattr(engine, "has_moe_layers", False):
        return "DeepSpeed's own layers of experts (deepspeed.moe)"
    scale = getattr(engine.optimizer, "loss_scale", 1)
    if type(engine.optimizer).__name__ == "FP16_UnfusedOptimizer" and engine.bfloat16_enabled() and scale != 1:
        # Seen in 0.18.4: gradients become so small that AdamW's eps outweighs them and clipping never applies.
        return (
            f"ZeRO-0 in bf16 in {version()}, which divides gradients by a loss scale of {scale} that the loss was not "
            "multiplied by. Use ZeRO-1, or another version of DeepSpeed"
        )
    if hasattr(getattr(engine, "mpu", None), "initialize_sequence_parallel"):
        return None  # its "model parallel" ranks share sequences; parameters are whole
    for name in ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size"):
        size = getattr(getattr(engine, "mpu", None), name, None)
        if size is not None and size() > 1:
            return "model parallelism (mpu), in which each rank holds a part of a matrix before ZeRO cuts it"
    return None


def _group_of(engine: Any) -> ProcessGroup | None:
    group: ProcessGroup | None = engine.seq_data_parallel_group
    return group
