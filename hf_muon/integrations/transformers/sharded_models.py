"""Checkpoints of models that transformers has sharded while loading them, which Trainer refuses to write and to read.

`optimizer.pt` holds the whole state, gathered on rank 0, so that every layout loads it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from hf_muon._autoload import Change
from hf_muon.integrations.names import is_muon

if TYPE_CHECKING:
    from torch import nn

# Trainer's names.
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def is_sharded(model: Any) -> bool:
    """Return whether transformers has sharded the model while loading it, and every rank stores a part of each layer.

    False for pipeline stages, whose ranks store different layers.
    """
    if not getattr(model, "is_distributed_loading_by_transformers", False):
        return False
    return (getattr(getattr(model.config, "distributed_config", None), "pp_size", None) or 1) == 1


def patch_checkpoints(module: ModuleType) -> Iterator[Change]:
    """Patch Trainer to save and to resume runs of Muon on sharded models, which it refuses."""
    trainer = module.Trainer
    init, save_state = trainer.__init__, trainer._save_optimizer_and_scheduler
    load_state, load_weights = trainer._load_optimizer_and_scheduler, trainer._load_from_checkpoint
    load_best_model = trainer._load_best_model

    @functools.wraps(init)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        model, arguments = (
            kwargs.get(name, args[i] if len(args) > i else None) for i, name in enumerate(("model", "args"))
        )
        if not is_muon(getattr(arguments, "optim", None)) or not is_sharded(model):
            init(self, *args, **kwargs)
            return
        only_model = arguments.save_only_model  # type: ignore[union-attr]
        # Trainer refuses any optimizer's checkpoints here, and reads this argument for nothing else.
        arguments.save_only_model = True  # type: ignore[union-attr]
        try:
            init(self, *args, **kwargs)
        finally:
            arguments.save_only_model = only_model  # type: ignore[union-attr]

    @functools.wraps(save_state)
    def save(self: Any, *args: Any, **kwargs: Any) -> None:
        if not keeps_shards(self):
            save_state(self, *args, **kwargs)
            return
        (folder,) = (*args, *kwargs.values())
        state = whole_state(self.model, self.optimizer)
        if self.args.should_save:
            torch.save(state, Path(folder, OPTIMIZER))
            torch.save(self.lr_scheduler.state_dict(), Path(folder, SCHEDULER))

    @functools.wraps(load_state)
    def load(self: Any, *args: Any, **kwargs: Any) -> None:
        if not keeps_shards(self):
            load_state(self, *args, **kwargs)
            return
        (checkpoint,) = (*args, *kwargs.values())
        files = [] if checkpoint is None else [Path(checkpoint, OPTIMIZER), Path(checkpoint, SCHEDULER)]
        if files and all(file.is_file() for file in files):
            # Mapped, not read: a rank takes its part of each tensor.
            self.optimizer.load_state_dict(torch.load(files[0], map_location="cpu", weights_only=True, mmap=True))
            self.lr_scheduler.load_state_dict(torch.load(files[1], weights_only=True))

    @functools.wraps(load_weights)
    def load_shards(self: Any, *args: Any, **kwargs: Any) -> None:
        checkpoint: Any = kwargs.get("resume_from_checkpoint", args[0] if args else None)
        if keeps_shards(self) and has_whole_model(checkpoint):
            load_weights_(self.model, checkpoint)
        else:
            load_weights(self, *args, **kwargs)

    @functools.wraps(load_best_model)
    def load_best(self: Any) -> None:
        if keeps_shards(self) and has_whole_model(self.state.best_model_checkpoint):
            load_weights_(self.model, self.state.best_model_checkpoint)
        else:
            load_best_model(self)

    yield trainer, "__init__", initialize
    yield trainer, "_save_optimizer_and_scheduler", save
    yield trainer, "_load_optimizer_and_scheduler", load
    yield trainer, "_load_from_checkpoint", load_shards
    yield trainer, "_load_best_model", load_best


def keeps_shards(trainer: Any) -> bool:
    """Return whether a Trainer trains a sharded model with Muon."""
    return is_muon(trainer.args.optim) and is_sharded(trainer.model)


def has_whole_model(checkpoint: str) -> bool:
    """Return whether a checkpoint holds a model; Trainer itself loads an adapter, and refuses an empty folder."""
    return any(Path(checkpoint, name).is_file() for name in WEIGHTS)


def whole_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's whole state with names of parameters as keys, on rank 0; every rank takes part."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_optimizer_state_dict(model, getattr(optimizer, "optimizer", optimizer), options=options)


def load_weights_(model: Any, checkpoint: str) -> None:
    """Load a checkpoint's weights into a sharded model; every rank reads its part, as `from_pretrained` does.

    Raises:
        RuntimeError: the checkpoint has other parameters.
    """
    dtypes = {param.dtype for param in model.parameters()}
    source, info = type(model).from_pretrained(
        checkpoint,
        distributed_config=model.config.distributed_config,
        dtype=dtypes.pop() if len(dtypes) == 1 else torch.float32,
        output_loading_info=True,
    )
    tensors, others = dict(tensors_of(model)), dict(tensors_of(source))
    different = sorted(info["missing_keys"]) or sorted(tensors.keys() ^ others.keys())
    different = different or [name for name, tensor in tensors.items() if tensor.shape != others[name].shape]
    if different:
        raise RuntimeError(f"{checkpoint} does not fit the model: {', '.join(different[:3])} differ")
    with torch.no_grad():
        for name, tensor in tensors.items():
            local, other = (getattr(x.data, "_local_tensor", x.data) for x in (tensor, others[name]))
            local.copy_(other)


def tensors_of(model: nn.Module) -> Any:
    """Yield names and tensors of what a checkpoint holds: parameters and persistent buffers."""
    saved = model.state_dict().keys()
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
