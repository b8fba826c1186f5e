"""Muon as the optimizer that DeepSpeed ZeRO wraps. All that is relied on inside DeepSpeed stands in this file.

ZeRO calls its optimizer once per optimizer step, after it has unscaled and clipped the raw gradients, on flat fp32
partitions that it has put into the param groups. Which slices of which matrices a partition holds is read from ZeRO's
own optimizers when they have been made, and proven by comparing values before the first step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_muon.distributed.zero import Partition, Slice, partition_bounds
from hf_muon.optimizer import Muon
from hf_muon.views import WHOLE, View, parse, views_of

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
        yield "zero_optimization.offload_optimizer.device nvme. Use cpu"
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


def refuse_arguments(args: Any) -> None:
    """Raise if the DeepSpeed config of some TrainingArguments holds what Muon does not go with.

    Raises:
        RuntimeError: every complaint.
    """
    plugin = getattr(args, "deepspeed_plugin", None)
    if plugin is not None and isinstance(plugin.deepspeed_config, Mapping):
        refuse_config(plugin.deepspeed_config)


# --- how DeepSpeed is started


def initialize(*args: Any, optimizer: Muon, config: Any = None, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize` with a `Muon`, for scripts without accelerate and Trainer.

    Args:
        *args, **kwargs: as of `deepspeed.initialize`.
        optimizer: over the model's parameters, as `build_optimizer` makes it.
        config: DeepSpeed's config, as a mapping or the path of a JSON file.

    Returns:
        Engine, optimizer, data loader and scheduler, as `deepspeed.initialize` does.

    Raises:
        RuntimeError: something in the config, or in this DeepSpeed, that Muon does not go with.
    """
    import deepspeed

    config = kwargs.pop("config_params", config)
    if not isinstance(config, Mapping):
        import json
        from pathlib import Path

        config = json.loads(Path(config).read_text(encoding="utf-8"))
    config = dict(config)
    with wrapping(optimizer, config):
        made: tuple[Any, Any, Any, Any] = deepspeed.initialize(*args, optimizer=optimizer, config=config, **kwargs)
        attach(made[0], optimizer)
    return made


@contextlib.contextmanager
def wrapping(optimizer: Muon, config: MutableMapping[str, Any]) -> Iterator[None]:
    """Let DeepSpeed wrap the optimizer in here, and have it attached before the end.

    Raises:
        RuntimeError: something in the config that Muon does not go with.
    """
    refuse_config(config)
    # Without the first, ZeRO refuses any optimizer but its own; with the second one true, as it is by default,
    # accelerate puts DeepSpeedCPUAdam in the place of an offloaded optimizer without a word.
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    optimizer.wrapped_views = {
        param: parse(view)
        for group in optimizer.param_groups
        for param, view in zip(group["params"], views_of(group), strict=True)
    }
    optimizer.being_wrapped = True
    yield
    optimizer.being_wrapped = False


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
    if complaint := _engine_complaint(engine):
        raise RuntimeError(f"Muon does not run with {complaint}")
    device = torch.device(get_accelerator().current_device_name())
    reader = _reader(wrapper)
    if reader is None:
        # ZeRO-0: whole parameters, or their fp32 copies, on every rank.
        optimizer.replicate_group, optimizer.partitions = _group_of(engine), None
    else:
        names = {param: (name, optimizer.wrapped_views.get(param)) for name, param in engine.module.named_parameters()}
        try:
            found = [(flat, Partition(**about, device=device), proof) for flat, about, proof in reader(wrapper, names)]
        except (_UnlikeError, AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise RuntimeError(f"{_unknown(wrapper)}: {type(error).__name__}: {error}") from error
        _prove(wrapper, found)
        optimizer.partitions = {flat: partition for flat, partition, _ in found}
    optimizer.reset_layouts()


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
            f"ZeRO-0 in bf16 in {_version()}, which divides gradients by a loss scale of {scale} that the loss was not "
            "multiplied by. Use ZeRO-1, or another version of DeepSpeed"
        )
    for name in ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size"):
        size = getattr(getattr(engine, "mpu", None), name, None)
        if size is not None and size() > 1:
            return "model parallelism (mpu), in which each rank holds a part of a matrix before ZeRO cuts it"
    return None


class _UnlikeError(Exception):
    """DeepSpeed does not store things as this file says."""


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _UnlikeError(otherwise)


Truth = tuple[str, Slice, Tensor]
"""A parameter's name, its slice, and what the parameter itself says that the slice holds."""

Names = Mapping[Tensor, tuple[str, View | None]]
"""For each parameter of the model its name, and how the optimizer that was wrapped sees it."""

Found = tuple[Tensor, dict[str, Any], Sequence[Truth]]
"""A partition: the flat tensor, what `Partition` says of it, and what proves it."""


def _reader(wrapper: Any) -> Callable[[Any, Names], Iterator[Found]] | None:
    """What reads the layout of a DeepSpeed optimizer; None where parameters are whole.

    Raises:
        RuntimeError: an optimizer that is not known. A subclass may store things otherwise.
    """
    if isinstance(wrapper, Muon):
        return None
    home = f"{type(wrapper).__module__}.{type(wrapper).__name__}".removeprefix("deepspeed.runtime.")
    readers: dict[str, Callable[[Any, Names], Iterator[Found]] | None] = {
        "fp16.unfused_optimizer.FP16_UnfusedOptimizer": None,
        "zero.stage_1_and_2.DeepSpeedZeroOptimizer": _read_stage_1_and_2,
        "bf16_optimizer.BF16_Optimizer": _read_bf16,
        "zero.stage3.DeepSpeedZeroOptimizer_Stage3": _read_stage_3,
    }
    if home not in readers:
        raise RuntimeError(f"Muon does not know how {type(wrapper).__name__} of {_version()} stores parameters")
    return readers[home]


def _read_stage_1_and_2(zero: Any, names: Names) -> Iterator[Found]:
    yield from _contiguous(zero, names, zero.bit16_groups, zero.bit16_groups_flat, zero.single_partition_of_fp32_groups)


def _read_bf16(zero: Any, names: Names) -> Iterator[Found]:
    yield from _contiguous(zero, names, zero.bf16_groups, zero.bf16_groups_flat, zero.fp32_groups_flat_partition)


def _contiguous(
    zero: Any, names: Names, groups: Sequence[Sequence[Tensor]], wholes: Sequence[Tensor], partitions: Sequence[Tensor]
) -> Iterator[Found]:
    """A param group is one flat tensor, of which its parameters are views, and which is cut into equal partitions.

    Where a parameter lies in it is read from its memory address, whatever order and padding the group has.
    """
    import torch.distributed as dist

    for i, (params, whole, flat) in enumerate(zip(groups, wholes, partitions, strict=True)):
        param_group = zero.optimizer.param_groups[i]
        process_group = zero.real_dp_process_group[i]
        rank, ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        standing = param_group["params"]
        _expect(len(standing) == 1 and standing[0] is flat, "a partition is not what stands in its param group")
        _expect(flat.numel() * ranks == whole.numel(), f"{ranks} partitions of {flat.numel()} make no {whole.numel()}")
        truths: list[Truth] = []
        for param in params:
            if param_group["use_muon"]:
                offset, odd = divmod(param.data_ptr() - whole.data_ptr(), whole.element_size())
                fits = not odd and 0 <= offset <= whole.numel() - param.numel()
                _expect(fits, "a parameter is no view of its group")
                bounds = partition_bounds(param.numel(), flat.numel(), ranks, offset)
                first, last = bounds[rank]
                name, view = names[param]
                _expect(view is not None, f"{name} was not among the optimizer's parameters when it was wrapped")
                part = Slice(tuple(param.shape), bounds, max(offset - rank * flat.numel(), 0), view or WHOLE)
                truths.append((name, part, param.detach().reshape(-1)[first:last]))
        slices = [part for _, part, _ in truths]
        yield flat, {"group": process_group, "rank": rank, "slices": slices}, truths


def _read_stage_3(zero: Any, names: Names) -> Iterator[Found]:
    """Parameters are cut into equal parts each; a rank's parts of a sub-group's parameters stand end to end."""
    import deepspeed
    import torch.distributed as dist

    home = [zero.sub_group_to_group_id[i] for i in range(len(zero.fp16_groups))]
    for i, (params, flat) in enumerate(zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)):
        param_group = zero.optimizer.param_groups[home[i]]
        groups = {id(group): group for group in (getattr(p, "ds_process_group", zero.dp_process_group) for p in params)}
        _expect(len(groups) == 1, "a sub-group's parameters are partitioned over different ranks")
        (process_group,) = groups.values()
        rank, ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        truths: list[Truth] = []
        start = 0
        for param in params:
            size = param.partition_numel()
            if param_group["use_muon"]:
                bounds = partition_bounds(param.ds_numel, size, ranks)
                first, last = bounds[rank]
                with deepspeed.zero.GatheredParameters([param]):
                    truth = param.detach().reshape(-1)[first:last].clone()
                name, view = names[param]
                _expect(view is not None, f"{name} was not among the optimizer's parameters when it was wrapped")
                truths.append((name, Slice(tuple(param.ds_shape), bounds, start, view or WHOLE), truth))
            start += size
        _expect(start == flat.numel(), f"the parts of a sub-group make {start} of {flat.numel()} elements")
        slices = [part for _, part, _ in truths]
        last_one = home[i] not in home[i + 1 :]
        yield flat, {"group": process_group, "rank": rank, "slices": slices, "last": last_one}, truths


def _prove(wrapper: Any, found: Sequence[tuple[Tensor, Partition, Sequence[Truth]]]) -> None:
    """Compare the slices of all partitions with the parameters themselves, on all ranks.

    Raises:
        RuntimeError: on all ranks, where any slice holds something else.
    """
    from hf_muon.distributed.agreement import exchange_texts, root_group

    wrong = []
    for flat, partition, truths in found:
        if flat.dtype != torch.float32:
            wrong.append(f"a partition has dtype {flat.dtype}: Muon needs fp32 master weights")
        for name, part, truth in truths:
            held = flat.detach()[part.elements(partition.rank)]
            # A master weight is rounded to become the parameter.
            if held.shape != truth.shape or not torch.equal(held.to(truth), truth):
                wrong.append(f"{name} is not where it was read to be")
    heard = [line for lines in exchange_texts(root_group([p.group for _, p, _ in found]), wrong) for line in lines]
    if heard:
        raise RuntimeError(f"{_unknown(wrapper)}: {'; '.join(dict.fromkeys(heard[:5]))}")


def _group_of(engine: Any) -> ProcessGroup | None:
    group: ProcessGroup | None = engine.seq_data_parallel_group
    return group


def _unknown(wrapper: Any) -> str:
    return (
        f"{_version()} stores parameters in its {type(wrapper).__name__} in a way that this version of hf_muon does "
        "not know, so that Muon does not step them"
    )


def _version() -> str:
    import deepspeed

    return f"DeepSpeed {deepspeed.__version__}"
