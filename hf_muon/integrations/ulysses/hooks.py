"""Ulysses sequence parallel (DeepSpeed's ALST) under transformers' Trainer: right gradients, right data, exact resume.

Each rank of a sequence parallel group holds a part of every sequence; attention swaps it for a part of the heads
(Jacobs et al. 2023, arXiv:2309.14509; Bekman et al. 2025, arXiv:2506.13996). transformers computes one loss for the
group on each of its ranks, and DeepSpeed averages gradients. Whether the two together give the gradient of that loss
depends on their versions and on the ZeRO stage, so it is measured: a model of two vectors, whose gradient is known,
goes through the same `compute_loss` and through an engine with the same config. What comes out too large is divided.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NAME = "muon"
OURS = "_from_hf_muon"

CORRECTED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers that a Trainer has made, whose gradients this file looks after."""


def size_of(parallelism: Any) -> int:
    """Ranks that share a sequence, by accelerate's ParallelismConfig or by None."""
    return int(getattr(parallelism, "sp_size", None) or 1)


def refuse_uncorrected(mpu: Any, optimizer: Any) -> None:
    """Raise where gradients under sequence parallel reach a Muon that no Trainer has made.

    Args:
        mpu: the engine's.
        optimizer: the engine's `Muon`.

    Raises:
        RuntimeError: nobody knows whether the loop scales them as it must.
    """
    if hasattr(mpu, "initialize_sequence_parallel") and optimizer not in CORRECTED:
        raise RuntimeError(
            "Muon runs with DeepSpeed's sequence parallel through transformers' Trainer only (optim: muon), which has "
            "its gradients measured and corrected; a loop of your own may get them sp_size times too large"
        )


# --- what goes with it


def model_complaints(config: Any, size: int, implementation: str | None) -> Iterator[str]:
    """What of a model's configuration does not go with sequence parallel, and what to do.

    Args:
        config: of the model, as transformers' AutoConfig reads it.
        size: ranks that share a sequence.
        implementation: of attention.
    """
    from hf_muon.routing.model_facts import text_config_of

    text = text_config_of(config)
    heads = int(getattr(text, "num_attention_heads", None) or 0)
    shared = int(getattr(text, "num_key_value_heads", None) or heads)
    if not heads:
        yield f"{type(config).__name__} has no num_attention_heads: it is not known to attend"
    elif heads % size:
        yield f"{heads} attention heads are not divisible by SP_SIZE={size}. Use one of {_divisors(heads)}"
    elif shared % size and size % shared:
        yield f"{shared} key and value heads neither divide SP_SIZE={size} nor are divisible by it"
    if not (
        implementation == "sdpa" or str(implementation).startswith("flash_attention") or "/" in str(implementation)
    ):
        yield f"attention {implementation!r} needs a mask, which is dropped. Use sdpa or flash_attention_2"
    kinds = set(getattr(text, "layer_types", None) or ())
    if not kinds and getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
        kinds = {"sliding_attention"}
    for kind in sorted(kinds - {"full_attention"}):
        if kind != "sliding_attention":
            yield f"layers of {kind}, which would start anew on every rank or see what they must not"
        elif implementation == "sdpa":
            yield "layers of sliding_attention under sdpa, whose mask is dropped. Use flash_attention_2"


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(2, number + 1) if number % n == 0)


def refuse_arguments(args: Any) -> None:
    """Raise where a Trainer would leave out, without a word, what its arguments ask for.

    Raises:
        RuntimeError: label smoothing.
    """
    if getattr(args, "label_smoothing_factor", 0):
        raise RuntimeError(
            "label_smoothing_factor is ignored under sequence parallel: transformers computes the loss of the model "
            "there. Leave it out"
        )


def before_prepare(accelerator: Any, models: list[Any]) -> None:
    """Check the model and keep packed texts apart, before DeepSpeed takes hold of attention.

    Raises:
        RuntimeError: what does not go with sequence parallel.
    """
    size = size_of(accelerator.parallelism_config)
    if size == 1:
        return
    implementation = accelerator.parallelism_config.sp_handler.sp_attn_implementation
    complaints = [c for model in models for c in model_complaints(model.config, size, implementation)]
    if complaints:
        raise RuntimeError("Muon does not run with sequence parallel here:\n  - " + "\n  - ".join(complaints))
    if implementation == "sdpa":
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        if not getattr(attend, OURS, False):
            ALL_ATTENTION_FUNCTIONS["sdpa"] = _texts_apart(attend)


def _texts_apart(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Attention that stays within a text where several stand in one row, as `position_ids` that start anew say.

    DeepSpeed drops the mask that says so; flash attention reads the positions itself, sdpa does not.
    """

    @functools.wraps(attend)
    def attend_within_texts(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        positions = kwargs.get("position_ids")
        if attention_mask is None and positions is not None and positions.shape[-1] == query.shape[2]:
            starts = positions[:, 1:] != positions[:, :-1] + 1
            if starts.any():
                import torch

                text = torch.nn.functional.pad(starts.cumsum(1), (1, 0))
                same = text[:, None, :, None] == text[:, None, None, :]
                attention_mask = same.tril()  # (batch, 1, length, length)
        return attend(module, query, key, value, attention_mask, *args, **kwargs)

    setattr(attend_within_texts, OURS, True)
    return attend_within_texts


# --- batches


def complete(batch: Any) -> Any:
    """A whole batch with what DeepSpeed needs of it.

    Without `position_ids`, a row is one text from its first token on, as it is for the model itself.

    Raises:
        ValueError: padding on the left, or a mask that says more than where the padding is.
    """
    import torch

    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        return batch
    mask = batch.get("attention_mask")
    if mask is not None:
        if mask.dim() != 2:
            raise ValueError(f"attention_mask of shape {tuple(mask.shape)} under sequence parallel, which drops it")
        if bool((mask[:, 1:] > mask[:, :-1]).any()):
            raise ValueError(
                "padding on the left under sequence parallel, where attention masks are dropped and padding would be "
                'attended to. Set tokenizer.padding_side = "right"'
            )
    if "position_ids" in batch:
        return batch
    ids = batch["input_ids"]
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1).contiguous()
    return {**batch, "position_ids": positions}


def lengthened(batch: Any, length: int) -> Any:
    """A whole batch with rows of another length, padded on the right with what no text attends to or learns.

    Args:
        batch: with `input_ids` of shape (rows, tokens); its other tensors of two dims go with them.
        length: tokens of a row; not less than before.
    """
    import torch

    before = batch["input_ids"].shape[1]
    made = dict(batch)
    for name, held in batch.items():
        if torch.is_tensor(held) and held.dim() == 2 and held.shape[1] == before < length:
            added = held.new_full((held.shape[0], length - before), -100 if name == "labels" else 0)
            if name == "position_ids":  # a position that starts anew would be another text
                added = held[:, -1:] + torch.arange(1, length - before + 1, device=held.device)
            made[name] = torch.cat([held, added], 1)
    return made


class _Completed:
    """What DeepSpeed's adapter reads: a loader of complete batches, as long on all ranks of a group, and divisible."""

    def __init__(self, loader: Any, device: torch.device, skip: int = 0) -> None:
        self.loader, self.device, self.skip = loader, device, skip

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        import torch
        import torch.distributed as dist
        from deepspeed.utils import groups

        group = groups._get_sequence_parallel_group()
        size = dist.get_world_size(group)
        for batch in itertools.islice(self.loader, self.skip, None):
            whole = complete(batch)
            if isinstance(whole, Mapping) and "input_ids" in whole:
                # Every rank reads a batch of its own, and all take part in each of them.
                longest = torch.tensor([whole["input_ids"].shape[1]], device=self.device)
                dist.all_reduce(longest, dist.ReduceOp.MAX, group)
                whole = lengthened(whole, -(-int(longest) // size) * size)
            yield whole


class ShardedLoader:
    """DeepSpeed's adapter, which hands out parts of sequences, with epochs and with batches to skip.

    Every epoch has an adapter of its own. One that is kept, as upstream does, ends its first epoch when the second one
    asks for a batch: Trainer then leaves out a step of each epoch, and takes the order of the next.

    Args:
        loader: accelerate's data loader of whole sequences.
        adapt: makes DeepSpeed's adapter around a loader, without so many of its first batches.
        size: ranks that share a sequence; each batch of the loader gives that many.
        skip: what to leave out of an epoch.
    """

    def __init__(self, loader: Any, adapt: Callable[[Any, int], Any], size: int, skip: int = 0) -> None:
        self.loader, self.adapt, self.size, self.skip = loader, adapt, size, skip

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet, as while it is copied
            raise AttributeError(name)
        return getattr(self.loader, name)  # Trainer looks for samplers and set_epoch

    def __len__(self) -> int:
        return len(self.loader) * self.size

    def __iter__(self) -> Iterator[Any]:
        whole, parts = divmod(self.skip, self.size)
        batches: Iterator[Any] = iter(self.adapt(self.loader, whole))
        for _ in range(parts):
            next(batches, None)
        return batches

    def skipping(self, count: int) -> ShardedLoader:
        """The same for an epoch without its first batches.

        They are read and dropped: accelerate's `skip_first_batches` makes a loader that loses the epoch's order where
        several processes share a shuffled data set.
        """
        return ShardedLoader(self.loader, self.adapt, self.size, count)


def patch_adapter(accelerator: Any) -> Callable[[], None] | None:
    """Have `Accelerator.deepspeed_ulysses_dl_adapter` give complete batches that can be skipped, where Muon steps."""
    adapter = getattr(accelerator, "deepspeed_ulysses_dl_adapter", None)
    if adapter is None or getattr(adapter, OURS, False):
        return None

    @functools.wraps(adapter)
    def adapted(self: Any, dl: Any, model: Any) -> Any:
        size = size_of(self.parallelism_config)
        held = getattr(getattr(model, "optimizer", None), "optimizer", getattr(model, "optimizer", None))
        if size == 1 or held not in CORRECTED:
            return adapter(self, dl, model)
        return ShardedLoader(dl, lambda loader, skip: adapter(self, _Completed(loader, self.device, skip), model), size)

    setattr(adapted, OURS, True)
    accelerator.deepspeed_ulysses_dl_adapter = adapted

    def undo() -> None:
        accelerator.deepspeed_ulysses_dl_adapter = adapter

    return undo


# --- gradients


def patch_trainer(module: ModuleType) -> Callable[[], None] | None:
    """Have `Trainer.compute_loss` give a loss whose gradient arrives as it is, where Muon steps."""
    trainer = module.Trainer
    compute_loss, training_step = trainer.compute_loss, trainer.training_step
    skip_first_batches = getattr(module, "skip_first_batches", None)
    if getattr(compute_loss, OURS, False):
        return None

    @functools.wraps(compute_loss)
    def corrected(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not _concerns(self) or not self.model.training:
            return compute_loss(self, model, inputs, *args, **kwargs)
        if self.compute_loss_func is not None:
            raise RuntimeError("compute_loss_func is ignored under sequence parallel. Override compute_loss")
        notes = vars(self)
        if "_hf_muon_factor" not in notes:
            notes["_hf_muon_factor"] = factor_of(self, compute_loss)
        factor = notes["_hf_muon_factor"]
        result = compute_loss(self, model, inputs, *args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        if factor != 1 and loss.requires_grad:
            loss.register_hook(lambda grad: grad / factor)
        notes["_hf_muon_reached"] = True
        return result

    @functools.wraps(training_step)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _concerns(self):
            return training_step(self, *args, **kwargs)
        vars(self)["_hf_muon_reached"] = False
        loss = training_step(self, *args, **kwargs)
        if not vars(self)["_hf_muon_reached"]:
            raise RuntimeError(
                f"{type(self).__name__}.compute_loss does not call Trainer.compute_loss, so that under sequence "
                "parallel nobody knows whether its gradients are right. Call it, or train without sequence parallel"
            )
        return loss

    def skip(dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, ShardedLoader):
            return dataloader.skipping(num_batches)
        return skip_first_batches(dataloader, num_batches)  # type: ignore[misc]

    setattr(corrected, OURS, True)
    trainer.compute_loss, trainer.training_step = corrected, checked
    if skip_first_batches is not None:
        vars(module)["skip_first_batches"] = skip

    def undo() -> None:
        trainer.compute_loss, trainer.training_step = compute_loss, training_step
        if skip_first_batches is not None:
            vars(module)["skip_first_batches"] = skip_first_batches

    return undo


def _concerns(trainer: Any) -> bool:
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    return size_of(parallelism) > 1 and trainer.args.optim == NAME


def factor_of(trainer: Any, compute_loss: Callable[..., Any]) -> float:
    """How many times too large gradients reach the optimizer, measured. All ranks must call this together.

    Args:
        trainer: with a prepared model.
        compute_loss: as of its class.

    Returns:
        1, the size of a sequence parallel group, or one by it.

    Raises:
        RuntimeError: it is none of these, differs between parameters, or cannot be measured.
    """
    from hf_muon.diagnostics import log as diagnostics

    size = size_of(trainer.accelerator.parallelism_config)
    versions = " and ".join(f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "deepspeed"))
    try:
        measured = _measure(trainer, compute_loss)
    except Exception as error:
        raise RuntimeError(
            f"How {versions} scale gradients under sequence parallel could not be measured: "
            f"{type(error).__name__}: {error}"
        ) from error
    for factor in (1.0, float(size), 1 / size):
        if all(abs(ratio / factor - 1) < 0.02 for ratio in measured):
            if factor != 1 and diagnostics.is_rank_zero():
                diagnostics.logger().info(
                    "%s give gradients %g times as large as they are under sequence parallel; corrected",
                    versions,
                    factor,
                )
            return factor
    raise RuntimeError(
        f"{versions} give gradients {', '.join(f'{ratio:.4g}' for ratio in measured)} times as large as they are under "
        f"sequence parallel over {size} ranks, which nothing known explains. Train without it, or with other versions"
    )


def _measure(trainer: Any, compute_loss: Callable[..., Any]) -> list[float]:
    """What one step of plain gradient descent makes of two vectors, over what it has to make of them.

    Rank r of a group has r + 1 labels and a loss with the gradient r + 1, so that the group's loss has the gradient
    sum (r+1)^2 / sum (r+1). One vector is larger than DeepSpeed's bucket and is cut by ZeRO-3, the other is neither.
    """
    import deepspeed
    import torch

    engine = trainer.accelerator.deepspeed_engine_wrapped.engine
    mpu, device = engine.mpu, trainer.accelerator.device
    rank, size = mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_world_size()

    class Probe(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = torch.nn.Parameter(torch.zeros(8))
            self.large = torch.nn.Parameter(torch.zeros(4096))

        def forward(self, **inputs: Any) -> Any:
            loss = (self.small.sum() + self.large.sum()) * (rank + 1)
            return _Output(loss=loss)

    model = Probe().to(device)
    level = deepspeed.utils.logger.level
    deepspeed.utils.logger.setLevel("WARNING")  # it would tell twice how everything is set
    try:
        probe, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            config=_probe_config(engine.config),
            mpu=mpu,
        )
        labels = torch.full((1, size + 1), -100, device=device)
        labels[0, : rank + 1] = 0
        ids = torch.zeros_like(labels)
        loss = compute_loss(trainer, probe, {"input_ids": ids, "position_ids": ids, "shift_labels": labels})
        probe.backward(loss)
        probe.step()
        truth = sum((r + 1) ** 2 for r in range(size)) / sum(r + 1 for r in range(size))
        found = []
        for param in (probe.module.small, probe.module.large):
            with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
                moved = -param.detach().float()
                found += [float(moved.min()) / truth, float(moved.max()) / truth]
        probe.destroy()
    finally:
        deepspeed.utils.logger.setLevel(level)
    return found


class _Output(dict[str, Any]):
    """A model's output: `loss` by key and by name."""

    @property
    def loss(self) -> Any:
        return self["loss"]


SIDE_EFFECTS = (
    *("optimizer", "scheduler", "train_batch_size", "checkpoint", "elasticity", "autotuning", "compression_training"),
    *("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger", "wall_clock_breakdown"),
    *("data_efficiency", "curriculum_learning", "activation_checkpointing", "nebula", "compile", "dump_state"),
)
"""Sections of a DeepSpeed config that write files, count tokens or bring a schedule, and do not touch a gradient."""


def _probe_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's config, for one step of a small model."""
    made = {name: copy.deepcopy(value) for name, value in config.items() if name not in SIDE_EFFECTS}
    zero = made.setdefault("zero_optimization", {})
    zero |= {"reduce_bucket_size": 1024, "stage3_prefetch_bucket_size": 1024, "stage3_param_persistence_threshold": 100}
    for section in ("offload_optimizer", "offload_param"):
        if (zero.get(section) or {}).get("device") == "nvme":
            zero[section] = {"device": "cpu"}
    if made.get("fp16", {}).get("enabled") is True:
        made["fp16"]["initial_scale_power"] = 0  # the step is not to be skipped
    return made | {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
