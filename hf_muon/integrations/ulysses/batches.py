"""Complete batches for DeepSpeed's adapter, which gives each rank a part of every sequence."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def complete(batch: Any, implementation: str) -> Any:
    """Return a whole batch with the `position_ids` that DeepSpeed needs.

    Without `position_ids`, a row is one text, as the model assumes.

    Args:
        batch: a batch of whole sequences.
        implementation: the implementation of attention. Flash attention reads the ends of texts from `position_ids`,
            sdpa does not.

    Raises:
        ValueError: padding on the left, or a mask that is more than a padding mask; several texts in a row under
            sdpa.
    """
    import torch

    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        return batch
    mask = batch.get("attention_mask")
    if mask is not None:
        if mask.dim() != 2:
            raise ValueError(
                f"attention_mask of shape {tuple(mask.shape)} under sequence parallel, which drops it [dropped-mask]"
            )
        if bool((mask[:, 1:] > mask[:, :-1]).any()):
            raise ValueError(
                "padding on the left under sequence parallel, where attention masks are dropped and padding would be "
                'attended to. Set tokenizer.padding_side = "right" [left-padding]'
            )
    if "position_ids" in batch:
        if implementation == "sdpa":
            restarts = batch["position_ids"].diff(dim=-1) != 1
            if mask is not None:
                restarts = restarts & mask[:, 1:].bool()  # positions of padding have no meaning
            if bool(restarts.any()):
                raise ValueError(
                    "position_ids start again within a row: under sequence parallel sdpa has no mask that keeps the "
                    "texts of a row apart. Use flash_attention_2, which reads their ends from position_ids, or do not "
                    "pack texts [packed-texts]"
                )
        return batch
    ids = batch["input_ids"]
    positions = torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device).expand(ids.shape[0], -1).contiguous()
    return {**batch, "position_ids": positions}


def lengthened(batch: Any, length: int) -> Any:
    """Return a whole batch with longer rows, padded on the right with masked tokens without loss.

    Args:
        batch: with `input_ids` of shape (rows, tokens); its other tensors of two dims are padded alike.
        length: tokens of a row; not less than before.
    """
    import torch

    length_before = batch["input_ids"].shape[1]
    result = dict(batch)
    for name, value in batch.items():
        if torch.is_tensor(value) and value.dim() == 2 and value.shape[1] == length_before < length:
            padding = value.new_full((value.shape[0], length - length_before), -100 if name == "labels" else 0)
            if name == "position_ids":  # restarting positions would mark another text
                padding = value[:, -1:] + padding.new_ones(padding.shape).cumsum(1)
            result[name] = torch.cat([value, padding], 1)
    return result


def completed(loader: Any, device: torch.device, implementation: str, skip: int) -> Iterator[Any]:
    """Yield complete batches, whose rows are equally long on all ranks of a group, a multiple of the group's size.

    Args:
        loader: a loader of whole sequences.
        device: for the collective that agrees on a length.
        implementation: the implementation of attention.
        skip: batches to leave out at the beginning.
    """
    import torch
    import torch.distributed as dist
    from deepspeed.utils import groups

    group = groups._get_sequence_parallel_group()  # private; accelerate gives it to DeepSpeed's adapter
    size = dist.get_world_size(group)
    for batch in itertools.islice(loader, skip, None):
        completed_batch = complete(batch, implementation)
        if isinstance(completed_batch, Mapping) and "input_ids" in completed_batch:
            # Each rank loads its own batch, but all ranks process every batch together.
            longest = torch.tensor([completed_batch["input_ids"].shape[1]], dtype=torch.int64, device=device)
            dist.all_reduce(longest, dist.ReduceOp.MAX, group)
            completed_batch = lengthened(completed_batch, -(-int(longest) // size) * size)
        yield completed_batch


class ShardedLoader:
    """A loader of parts of sequences, which makes a new DeepSpeed adapter for every epoch.

    Upstream keeps one adapter, which ends its first epoch only when the second one asks for a batch. Trainer then skips
    a step of each epoch, and uses the order of the next.

    Args:
        loader: accelerate's data loader of whole sequences.
        adapt: makes DeepSpeed's adapter of a loader, skipping a number of its first batches.
        size: number of ranks that share a sequence; each batch of the loader gives as many batches.
        skip: batches to leave out of an epoch.
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
        full_batches, part_batches = divmod(self.skip, self.size)
        batches: Iterator[Any] = iter(self.adapt(self.loader, full_batches))
        for _ in range(part_batches):
            next(batches, None)
        return batches

    def skipping(self, count: int) -> ShardedLoader:
        """Return a loader for an epoch without its first batches, which are read and dropped.

        accelerate's `skip_first_batches` makes a loader that loses the epoch's order where several processes share a
        shuffled data set.
        """
        return ShardedLoader(self.loader, self.adapt, self.size, count)
