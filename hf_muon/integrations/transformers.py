"""`optim: muon` in transformers' TrainingArguments and Trainer."""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_muon.integrations import ulysses

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup
    from transformers import TrainingArguments
    from transformers.trainer_optimizer import OptimizerContext

    from hf_muon.config import MuonConfig
    from hf_muon.optimizer import Muon

# The rest of the package is imported where it is used: processes that never say `optim: muon` do not load it.

NAME = "muon"
MEMBER = "MUON"
OURS = "_from_hf_muon"


def patch_training_args(module: ModuleType) -> Callable[[], None] | str | None:
    """Add the member `OptimizerNames.MUON`, and check muon's options when TrainingArguments are made."""
    names = module.OptimizerNames
    if getattr(names._value2member_map_.get(NAME), OURS, False):
        return None
    if NAME in names._value2member_map_:
        from hf_muon import diagnostics

        diagnostics.logger().info("transformers has its own optim: muon; hf_muon steps aside")
        return "stepped aside: transformers has its own optim: muon"
    member = str.__new__(names, NAME)
    member._name_, member._value_ = MEMBER, NAME
    member.__objclass__ = names
    setattr(member, OURS, True)
    member._sort_order_ = len(names._member_names_)
    names._member_names_.append(MEMBER)
    names._member_map_[MEMBER] = member
    names._value2member_map_[NAME] = member
    type.__setattr__(names, MEMBER, member)

    arguments = module.TrainingArguments
    post_init = arguments.__post_init__

    @functools.wraps(post_init)
    def checked_post_init(self: TrainingArguments, *args: Any, **kwargs: Any) -> None:
        post_init(self, *args, **kwargs)
        if self.optim is member:
            config_from_arguments(self)
            # An "optimizer" in a DeepSpeed config is used without asking for ours.
            refuse_deepspeed(self)

    arguments.__post_init__ = checked_post_init

    def undo() -> None:
        arguments.__post_init__ = post_init
        type.__delattr__(names, MEMBER)
        names._member_names_.remove(MEMBER)
        del names._member_map_[MEMBER], names._value2member_map_[NAME]

    return undo


def patch_trainer_optimizer(module: ModuleType) -> Callable[[], None] | str | None:
    """Register the handler that `Trainer.get_optimizer_cls_and_kwargs` calls for `optim: muon`."""
    handlers = getattr(module, "_OPTIMIZER_HANDLERS", None)
    if handlers is None:
        return "failed: this transformers has no registry of optimizers; hf_muon needs transformers 5.2 or newer"
    if handlers.get(NAME) is handle:
        return None
    if NAME in handlers:
        return "stepped aside: transformers has its own optim: muon"
    handlers[NAME] = handle

    def undo() -> None:
        handlers.pop(NAME, None)

    return undo


def patch_trainer(module: ModuleType) -> Callable[[], None] | str | None:
    """Have damaged checkpoints named when they cannot be loaded, metrics logged, and sequence parallel be right."""
    trainer = module.Trainer
    load = getattr(trainer, "_load_optimizer_and_scheduler", None)
    if load is None:
        return "failed: this transformers loads optimizers elsewhere; errors of damaged checkpoints do not name files"
    if getattr(load, OURS, False):
        return None

    @functools.wraps(load)
    def load_or_explain(self: Any, checkpoint: Any) -> None:
        try:
            load(self, checkpoint)
        except BaseException as error:  # the CheckpointException of torch.distributed.checkpoint is no Exception
            ours = checkpoint is not None and self.args.optim == NAME
            if ours and not isinstance(error, (KeyboardInterrupt, SystemExit)):
                _explain_damage(Path(checkpoint), error)
            raise

    setattr(load_or_explain, OURS, True)
    trainer._load_optimizer_and_scheduler = load_or_explain
    log = trainer.log

    @functools.wraps(log)
    def log_with_metrics(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.args.optim == NAME:
            add_metrics(self, logs)
        log(self, logs, *args, **kwargs)

    trainer.log = log_with_metrics

    undo_ulysses = ulysses.patch_trainer(module)

    def undo() -> None:
        trainer._load_optimizer_and_scheduler = load
        trainer.log = log
        if undo_ulysses:
            undo_ulysses()

    return undo


def add_metrics(trainer: Any, logs: dict[str, float]) -> None:
    """Put what was measured since the last time beside a loss that is about to be logged, and the loss into its file.

    Callbacks (TensorBoard, W&B, MLflow) and trainer_state.json then have it. Nothing happens where metrics are off.
    """
    optimizer = trainer.optimizer
    while optimizer is not None and not hasattr(optimizer, "metrics"):  # accelerate's wrapper, ZeRO's
        optimizer = getattr(optimizer, "optimizer", None)
    metrics = getattr(optimizer, "metrics", None)
    if metrics is None:
        return
    news = metrics.news() if "loss" in logs else {}
    metrics.heard(trainer.state.global_step, logs)
    logs.update(news)


def _explain_damage(checkpoint: Path, error: BaseException) -> None:
    """Raise another error if files of the checkpoint are damaged.

    Raises:
        RuntimeError: which ones, and which checkpoint there is besides.
    """
    from hf_muon.damage import damaged_files, earlier_checkpoint

    if damaged := damaged_files(checkpoint):
        before = earlier_checkpoint(checkpoint)
        raise RuntimeError(
            f"This checkpoint is damaged: {'; '.join(damaged)}. Resume from "
            f"{f'the one before it, {before}' if before else 'another one'}, and remove this one."
        ) from error


def handle(context: OptimizerContext) -> tuple[Any, dict[str, Any]]:
    """What transformers calls for `optim: muon`.

    With a model, a factory that transformers calls as ``factory()(model, **kwargs)``; without one, a class for
    ready-made param groups.
    """
    from hf_muon.metrics import FILE

    config = config_from_arguments(context.args, context.optim_args)
    if config.diagnostics_file is None:
        file = os.path.join(context.args.output_dir or "", FILE)
        config = config.replace({"diagnostics_file": file})
    refuse_unsupported(context.args)
    refuse_plain_shards(context.model)
    warn_of_fsdp(context.args)
    options = {"config": config, "replicate_group": replicate_group(context.model)}
    if context.model is None:
        from hf_muon.ready_groups import MuonOfGroups

        return MuonOfGroups, options

    return lambda: _build, options


def _build(model: nn.Module, **options: Any) -> Muon:
    from hf_muon.build import build_optimizer

    optimizer = build_optimizer(model, **options)
    ulysses.CORRECTED.add(optimizer)
    return optimizer


def config_from_arguments(args: TrainingArguments, optim_args: Mapping[str, str] | None = None) -> MuonConfig:
    """The options of a run: TrainingArguments' own fields, replaced by what `optim_args` says.

    Raises:
        ValueError: an option in `optim_args` that is unknown, cannot be read or is out of range.
    """
    from hf_muon.config import MuonConfig, parse_optim_args

    config = MuonConfig.from_mapping(
        {
            # PyYAML reads 1e-5 as text, and transformers passes that on.
            "lr": args.learning_rate,
            "weight_decay": args.weight_decay,
            "adamw_betas": (float(args.adam_beta1), float(args.adam_beta2)),
            "adamw_eps": args.adam_epsilon,
            "optim_target_modules": args.optim_target_modules or None,
        }
    )
    return config.replace(parse_optim_args(args.optim_args) if optim_args is None else optim_args)


def refuse_unsupported(args: TrainingArguments) -> None:
    """Raise where this version would train something that is not Muon.

    Raises:
        RuntimeError: what was asked for, and what to do instead.
    """
    asked, instead = None, "Train on one process, with DDP or with FSDP2, or choose another optimizer."
    state = _accelerator_state()
    kind = state.distributed_type.value if state else None
    sequence = [axis for axis in ("cp", "sp") if _size(args, axis) > 1]
    if getattr(args, "deepspeed", None) or _truthy("ACCELERATE_USE_DEEPSPEED") or kind == "DEEPSPEED":
        refuse_deepspeed(args)
        if sequence == ["sp"]:
            ulysses.refuse_arguments(args)
            sequence = []
    if _truthy("ACCELERATE_USE_MEGATRON_LM") or kind == "MEGATRON_LM":
        asked = "Megatron-LM, which brings an optimizer of its own"
    elif getattr(getattr(args, "parallel_mode", None), "value", None) == "sagemaker_model_parallel":
        asked = "SageMaker's model parallelism"
    elif sequence:
        asked = f"ParallelismConfig({', '.join(f'{axis}_size' for axis in sequence)}) in this version of hf_muon"
        if sequence == ["sp"]:
            asked += " without DeepSpeed"
            instead = "Give TrainingArguments a DeepSpeed config (deepspeed:); see scripts/run_ulysses.sh."
    elif getattr(args, "fsdp", None) and isinstance(args.fsdp_config, dict) and args.fsdp_config.get("xla"):
        asked = "FSDP on XLA, which cuts matrices into slices"
    elif _asks_for_fsdp(args) and _fsdp_version(args) == 1:
        asked = "FSDP version 1, which keeps flat slices in which matrices have lost their shape"
        instead = (
            'Say version 2: fsdp_config={"version": 2} in TrainingArguments, fsdp_version: 2 in the fsdp_config of an '
            "accelerate config file, or accelerate launch --fsdp_version 2."
        )
    elif _offloads(getattr(state, "fsdp_plugin", None)):
        asked = "FSDP2 with its parameters on the CPU (offload) in this version of hf_muon"
        instead = "Leave cpu_offload and fsdp_offload_params out, or choose another optimizer."
    if asked:
        raise RuntimeError(f"optim: muon does not run under {asked}. {instead}")


def refuse_plain_shards(model: nn.Module | None) -> None:
    """Raise for tensor parallelism in plain tensors, as transformers had it before it took DTensors.

    Raises:
        RuntimeError: a part of a matrix would be orthogonalized as if it were the matrix.
    """
    ranks = getattr(model, "_tp_size", None) or 1
    if model is None or ranks == 1:
        return
    from hf_muon.distributed import is_dtensor

    if not any(is_dtensor(param) for param in model.parameters()):
        raise RuntimeError(
            f"optim: muon does not run under the tensor parallelism of this transformers: it cuts matrices for {ranks} "
            "ranks into plain tensors, which do not say what they are part of. Take a transformers that cuts into "
            "DTensors (5.23 does), or train with FSDP2."
        )


def warn_of_fsdp(args: TrainingArguments) -> None:
    """Tell on rank 0 where FSDP was asked for and does not run, or saves what it cannot load again."""
    from hf_muon import diagnostics

    state = _accelerator_state()
    if state is None or not diagnostics.is_rank_zero():
        return
    kind = state.distributed_type.value
    if kind != "FSDP" and _asks_for_fsdp(args):
        diagnostics.logger().warning(
            "FSDP was asked for, and accelerate runs %s: nothing is sharded, each process holds the whole model. "
            "accelerate has FSDP on GPUs and other accelerators only, in processes of their own (torchrun, "
            "accelerate launch)",
            "one process" if kind == "NO" else f"DDP ({kind})",
        )
    sharded = "SHARDED" in str(getattr(getattr(state, "fsdp_plugin", None), "state_dict_type", ""))
    version = importlib.metadata.version("accelerate")
    if sharded and tuple(int(part) for part in version.split(".")[:2]) < (1, 13):
        diagnostics.logger().warning(
            "accelerate %s saves the sharded moments of any optimizer and cannot load them again: a resumed run will "
            "be refused. Set FSDP_STATE_DICT_TYPE=FULL_STATE_DICT in the environment (fsdp_state_dict_type in an "
            "accelerate config file), or take accelerate 1.13 or newer",
            version,
        )


def replicate_group(model: nn.Module | None) -> ProcessGroup | None:
    """The processes that hold copies of every parameter: all, where Trainer wraps the model in DDP; None elsewhere.

    That follows accelerate's decision, because an initialized process group alone does not say so.

    Args:
        model: the model before it is wrapped, or None where transformers does not hand it over.
    """
    state = _accelerator_state()
    if state is None or not state.distributed_type.value.startswith("MULTI_"):
        return None  # one process, or FSDP2, whose tensors know their own groups
    parallelism = getattr(state, "parallelism_config", None)
    if any((getattr(parallelism, f"{axis}_size", None) or 1) > 1 for axis in ("tp", "cp", "sp")):
        return None  # accelerate does not wrap these
    if (
        getattr(model, "is_distributed_loading_by_transformers", False)  # cut as it was loaded, and not wrapped either
        or getattr(model, "_ddp_params_and_buffers_to_ignore", None)  # some parameters may differ between the ranks
        or len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1  # several devices in one process
    ):
        return None
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _accelerator_state() -> Any:
    """What accelerate has decided for this process; None before a Trainer has made its Accelerator."""
    from accelerate.state import AcceleratorState, is_initialized  # type: ignore[import-untyped]

    return AcceleratorState() if is_initialized() else None


def _size(args: TrainingArguments, axis: str) -> int:
    """An axis of ParallelismConfig, from the arguments or from `accelerate launch`."""
    configs = (getattr(args, "parallelism_config", None), getattr(_accelerator_state(), "parallelism_config", None))
    return max(getattr(config, f"{axis}_size", None) or 1 for config in configs)


def _asks_for_fsdp(args: TrainingArguments) -> bool:
    return bool(getattr(args, "fsdp", None)) or _truthy("ACCELERATE_USE_FSDP")


def _fsdp_version(args: TrainingArguments) -> int:
    """The version that runs, or would run on a GPU."""
    plugin = getattr(_accelerator_state(), "fsdp_plugin", None)
    if plugin is not None:
        return int(plugin.fsdp_version)
    if getattr(args, "fsdp", None):
        return int((args.fsdp_plugin_args or {}).get("fsdp_version", 1))
    return int(os.environ.get("FSDP_VERSION", "1"))


def _offloads(fsdp_plugin: Any) -> bool:
    """Newton-Schulz would run on the CPU, and pieces travel over a backend that the process group may not have."""
    return type(getattr(fsdp_plugin, "cpu_offload", None)).__name__ == "CPUOffloadPolicy"


def refuse_deepspeed(args: TrainingArguments) -> None:
    """Raise where a DeepSpeed config, if there is one, holds something that Muon does not go with.

    Raises:
        RuntimeError: every complaint.
    """
    if getattr(args, "deepspeed_plugin", None) is not None:
        from hf_muon.integrations.deepspeed import refuse_arguments

        refuse_arguments(args)


def _truthy(variable: str) -> bool:
    return os.environ.get(variable, "false").strip().lower() in ("1", "true", "yes", "on")
