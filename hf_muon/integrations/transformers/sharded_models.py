"""Checkpoints of models that transformers has sharded while loading them, which Trainer refuses to write and to read.

`optimizer.pt` holds the whole state, gathered on rank 0, so that every layout loads it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_muon.integrations.names import is_muon, mark

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


def patch_checkpoints(trainer: Any) -> Callable[[], None]:
    """Patch Trainer to save and to resume runs of Muon on sharded models; return a function that undoes this.

    Args:
        trainer: the class.
    """
    methods = {
        name: getattr(trainer, name)
        for name in ("__init__", "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler")
    }
    methods |= {name: getattr(trainer, name) for name in ("_load_from_checkpoint", "_load_best_model")}
    signature = inspect.signature(trainer.__init__)

    @functools.wraps(methods["__init__"])
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            values = signature.bind(self, *args, **kwargs).arguments
        except TypeError:
            values = {}  # Trainer raises it below
        arguments: Any = values.get("args")
        if not is_muon(getattr(arguments, "optim", None)) or not is_sharded(values.get("model")):
            methods["__init__"](self, *args, **kwargs)
            return
        only_model = arguments.save_only_model
        # Trainer refuses any optimizer's checkpoints here, and reads this argument for nothing else.
        arguments.save_only_model = True
        try:
            methods["__init__"](self, *args, **kwargs)
        finally:
            arguments.save_only_model = only_model

    @functools.wraps(methods["_save_optimizer_and_scheduler"])
    def save(self: Any, output_dir: str) -> None:
        if not keeps_shards(self):
            methods["_save_optimizer_and_scheduler"](self, output_dir)
            return
        state = whole_state(self.model, self.optimizer)
        if self.args.should_save:
            torch.save(state, Path(output_dir, OPTIMIZER))
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER))

    @functools.wraps(methods["_load_optimizer_and_scheduler"])
    def load(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None or not keeps_shards(self):
            methods["_load_optimizer_and_scheduler"](self, checkpoint)
            return
        files = Path(checkpoint, OPTIMIZER), Path(checkpoint, SCHEDULER)
        if all(file.is_file() for file in files):
            # Mapped, not read: a rank takes its part of each tensor.
            self.optimizer.load_state_dict(torch.load(files[0], map_location="cpu", weights_only=True, mmap=True))
            self.lr_scheduler.load_state_dict(torch.load(files[1], weights_only=True))

    @functools.wraps(methods["_load_from_checkpoint"])
    def load_weights(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        if keeps_shards(self) and has_whole_model(resume_from_checkpoint):
            load_weights_(self.model, resume_from_checkpoint)
        else:
            methods["_load_from_checkpoint"](self, resume_from_checkpoint, model)

    @functools.wraps(methods["_load_best_model"])
    def load_best(self: Any) -> None:
        if keeps_shards(self) and has_whole_model(self.state.best_model_checkpoint):
            load_weights_(self.model, self.state.best_model_checkpoint)
        else:
            methods["_load_best_model"](self)

    trainer.__init__ = initialize
    trainer._save_optimizer_and_scheduler = save
    trainer._load_optimizer_and_scheduler = mark(load)
    trainer._load_from_checkpoint = load_weights
    trainer._load_best_model = load_best

    def undo() -> None:
        for name, method in methods.items():
            setattr(trainer, name, method)

    return undo


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
