"""Models on the meta device, stored as frameworks store them on a rank of a fake process group, and their steps.

The meta device takes the place of an accelerator, see `tests.support.accelerated`. Nothing is computed or sent.
Offloaded tensors are on the CPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_muon import Muon, build_optimizer
from hf_muon.cli.model_source import known_configs
from hf_muon.distributed import ranks as ranks_module
from hf_muon.distributed.ranks import Ranks
from hf_muon.optimizer.partitioned import attach_partitions, expect_partitions
from hf_muon.storage import views
from hf_muon.storage.dtensor import mesh_regions
from hf_muon.storage.partitions import Division, Partition, Slice
from tests.support.accelerated import META

SUB_GROUP = 10**9  # elements; DeepSpeed's sub_group_size
ALIGNMENT = 2  # elements of a rank's partition; DeepSpeed's nccl_start_alignment_factor
_ROWWISE = ("o_proj", "down_proj")  # tensor parallel layers that are cut along their inputs


# A configuration that `hf-muon` knows, and what is changed in it.
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "Qwen3-0.6B": ("qwen3-0.6b", {}),
    "Qwen3-30B-A3B, 2 layers": ("qwen3-30b-a3b", {"num_hidden_layers": 2, "vocab_size": 1000}),
    "Llama-3.1-8B": ("llama-3.1-8b", {}),
    "Llama-3.1-8B, 4 layers": ("llama-3.1-8b", {"num_hidden_layers": 4}),
    # Its parameters fit into the host's memory.
    "Qwen3-0.6B, 2 layers": ("qwen3-0.6b", {"num_hidden_layers": 2, "vocab_size": 8192}),
    "Qwen3-0.6B, LoRA 16": ("qwen3-0.6b", {}),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def meta_model(name: str, dtype: torch.dtype) -> nn.Module:
    """Return a model on the meta device, with gradients; with LoRA, only of the adapters."""
    known, changes = MODELS[name]
    config = transformers.AutoConfig.for_model(**{**known_configs()[known], **changes})
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
        if "LoRA" in name:
            import peft

            options = peft.LoraConfig(r=int(name.split()[-1]), target_modules="all-linear", task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, options)
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.empty_like(param)
    return model


def replace_(model: nn.Module, stored: Callable[[str, Tensor], Tensor]) -> None:
    """Replace each trained parameter, and its gradient, by what a function returns for its name and value."""
    new: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is None or not param.requires_grad:
                continue
            if id(param) not in new:
                new[id(param)] = nn.Parameter(stored(f"{path}.{name}", param.detach()))
                new[id(param)].grad = stored(f"{path}.{name}", param.detach())
            module._parameters[name] = new[id(param)]


# --- a rank


@contextlib.contextmanager
def rank_of(ranks: int, rank: int, *, reads: bool = True, device: torch.device = META) -> Iterator[None]:
    """Become a rank of a fake process group, whose other ranks report the same as this one. Do nothing for one rank.

    Args:
        ranks: number of ranks.
        rank: of this process.
        reads: whether the device answers reads.
        device: of the parameters.
    """
    if ranks == 1:
        yield
        return

    def numbers(self: Ranks, own: Sequence[int], flags: Sequence[Tensor] = ()) -> list[list[int]]:
        rows = self._gathered(own, flags)
        if reads:
            rows.cpu()
        return [[*[1] * len(flags), *own]] * ranks

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        with (
            mock.patch.object(Ranks, "numbers", numbers),
            mock.patch.object(ranks_module, "report_device", return_value=device),
        ):
            yield
    finally:
        dist.destroy_process_group()


# --- layouts


def mesh_of(kind: str, ranks: int, device_type: str = "cpu") -> DeviceMesh:
    """Return the mesh of a layout: HSDP has two replicas, FSDP2 with tensor parallel as many ranks on both axes."""
    if kind == "HSDP":
        return init_device_mesh(device_type, (2, ranks // 2))
    if kind == "FSDP2 and TP":
        across = 2 ** (int(math.log2(ranks)) // 2)
        return init_device_mesh(device_type, (ranks // across, across))
    return init_device_mesh(device_type, (ranks,))


def placements_of(kind: str, mesh: DeviceMesh, name: str, ndim: int) -> list[Any]:
    """Return how a layout stores a parameter."""
    if kind == "FSDP2":
        return [Shard(0)]
    if kind == "HSDP":
        return [Replicate(), Shard(0)]
    inward = any(part in name for part in _ROWWISE)
    of_tp = Replicate() if ndim < 2 else Shard(1 if inward else 0)
    if kind == "TP":
        return [of_tp]
    return [Shard(0) if inward or ndim < 2 else _StridedShard(0, split_factor=mesh.size(1)), of_tp]


def shard_(model: nn.Module, kind: str, mesh: DeviceMesh, device: torch.device) -> None:
    """Replace parameters by DTensors, of which this rank stores a part on a device."""

    def of(name: str, param: Tensor) -> Tensor:
        placements = placements_of(kind, mesh, name, param.ndim)
        whole = DTensor.from_local(param, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())
        region = mesh_regions(whole, list(range(mesh.size())))[dist.get_rank()]
        sizes = [sum(stop - start for start, stop in ranges) for ranges in region.dims]
        local = torch.zeros(sizes, dtype=param.dtype, device=device)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())

    replace_(model, of)


def zero_step(model: nn.Module, options: dict[str, Any], stage: int, device: torch.device) -> Callable[[], None]:
    """Return hf_muon's part of a step of DeepSpeed ZeRO, on the fp32 partitions of this rank.

    DeepSpeed's engine does not run here; partitions are cut in the same way. In stages 1 and 2 a param group is one
    flat tensor, in stage 3 each parameter is cut. The engine steps one param group (sub-group) after the other.

    Args:
        model: its parameters are replaced only in the optimizer.
        options: of `build_optimizer`.
        stage: of ZeRO.
        device: on which partitions lie: the accelerator, or the CPU with `offload_optimizer`.
    """
    ranks, rank, world = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    assert world is not None
    optimizer: Muon = build_optimizer(model, options)
    expect_partitions(optimizer, "DeepSpeed")
    turns: list[tuple[dict[str, Any], Tensor]] = []
    partitions: dict[Tensor, Partition] = {}

    def add(group: dict[str, Any], size: int, slices: list[Slice], *, last: bool = True) -> None:
        flat = nn.Parameter(torch.zeros(size, device=device))
        flat.grad = torch.zeros_like(flat)
        partitions[flat] = Partition(world, rank, slices, META, last)
        turns.append((group, flat))

    for group in optimizer.param_groups:
        shapes = [tuple(param.shape) for param in group["params"]]
        parsed = [views.parse(text) for text in views.views_of(group)]
        slices: list[Slice] = []
        if stage < 3:
            starts = [sum(map(math.prod, shapes[:i])) for i in range(len(shapes) + 1)]
            size = -(-starts[-1] // (ALIGNMENT * ranks)) * ALIGNMENT
            for shape, start, view in zip(shapes, starts, parsed, strict=False):
                slices.append(Slice(shape, Division(math.prod(shape), size, start), ranks, view))
            add(group, size, slices)
            continue
        filled = 0
        for i, (shape, view) in enumerate(zip(shapes, parsed, strict=True)):
            size = -(-math.prod(shape) // ranks)
            slices.append(Slice(shape, Division(math.prod(shape), size, start=filled), ranks, view))
            filled += size
            is_last = i + 1 == len(shapes)
            if filled >= SUB_GROUP or is_last:
                add(group, filled, slices, last=is_last)
                slices, filled = [], 0
    attach_partitions(optimizer, partitions)
    groups = optimizer.param_groups
    for group in groups:
        group["params"] = []

    def step() -> None:
        for group, flat in turns:
            group["params"] = [flat]
            optimizer.param_groups = groups if stage == 3 else [group]
            optimizer.step()
            if stage == 3:
                group["params"] = []
        optimizer.param_groups = groups

    return step
