"""Save DeepSpeed checkpoints with an index in each file, and write `latest` after the files of all ranks.

DeepSpeed stores flat partitions, but not how they divide the parameters. That follows from the stage, the number of
ranks and options (`round_robin_gradients`, `parameter_alignment`, `sub_group_size`). So each file gets an index of
what each rank stores, with which any other layout can read it, and the random id of its save.

DeepSpeed writes `latest` as soon as the first rank has written its files, and an error on one rank leaves the others
waiting in a barrier. If a tag is used again, its files are overwritten one by one; meanwhile `latest` does not name it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from hf_muon.distributed.ranks import Ranks, merged_texts
from hf_muon.integrations.archives import complete_or_absent
from hf_muon.optimizer.checkpoint_format import from_text, to_text
from hf_muon.optimizer.muon import Muon
from hf_muon.routing.parameters import unwrapped
from hf_muon.storage.partitions import Division

SAVE = "hf_muon_save"
INDEX = "hf_muon_index"


class StoredParameter(NamedTuple):
    """A parameter in a partition: its shape, and how ranks divide it."""

    shape: tuple[int, ...]
    division: Division


@dataclass(frozen=True)
class StoredPartition:
    """One flat tensor of every rank, whose elements differ from rank to rank.

    Attributes:
        group: number of the param group.
        numel: elements on each rank.
        parameters: by name.
    """

    group: int
    numel: int
    parameters: dict[str, StoredParameter]


@dataclass(frozen=True)
class Index:
    """The place of the master weights and moments of all parameters on all ranks.

    Attributes:
        stage: the stage of ZeRO. In ZeRO-0 each parameter is a partition, and there is one file.
        ranks: the number of files.
        precision: "fp32", "bf16" or "fp16".
        is_swapped: whether partitions are on NVMe, and not in these files.
        partitions: in the order of the master weights; none on NVMe.
    """

    stage: int
    ranks: int
    precision: str
    is_swapped: bool
    partitions: tuple[StoredPartition, ...]

    @functools.cached_property
    def parameters(self) -> dict[str, tuple[int, StoredParameter]]:
        """By name, the number of the partition and the parameter in it."""
        items = ((k, item) for k, partition in enumerate(self.partitions) for item in partition.parameters.items())
        return {name: (k, parameter) for k, (name, parameter) in items}

    def __str__(self) -> str:
        """Return the layout in words."""
        return f"ZeRO-{self.stage}" + (f" on {self.ranks} ranks" if self.stage else "")

    @staticmethod
    def read(text: str) -> Index:
        """Return the index that a file holds.

        Raises:
            ValueError: a later version has written it.
        """
        fields = from_text(text)
        partitions = []
        for partition in fields["partitions"]:
            parameters = {
                name: StoredParameter(tuple(shape), Division(*division))
                for name, (shape, division) in partition["parameters"].items()
            }
            partitions.append(StoredPartition(partition["group"], partition["numel"], parameters))
        return Index(fields["stage"], fields["ranks"], fields["precision"], fields["is_swapped"], tuple(partitions))


def index_of(engine: Any, optimizer: Muon) -> Index:
    """Return where this run stores its parameters."""
    zero, stage = engine.optimizer, int(engine.zero_optimization_stage())
    precision = "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
    partitions = optimizer.partitioned.partitions
    if partitions is None:
        names = {param: unwrapped(name) for name, param in engine.module.named_parameters()}
        groups = [group["params"] for group in zero.param_groups] if isinstance(zero, Muon) else zero.fp16_groups
        stored = []
        for group, params in enumerate(groups):
            for param in params:
                parameter = StoredParameter(tuple(param.shape), Division(param.numel(), param.numel()))
                stored.append(StoredPartition(group, param.numel(), {names[param]: parameter}))
        return Index(0, 1, precision, False, tuple(stored))
    ranks = dist.get_world_size(zero.dp_process_group)
    if getattr(zero, "swap_optimizer", False):
        return Index(stage, ranks, precision, True, ())
    group_of = getattr(zero, "sub_group_to_group_id", {})
    stored = []
    for i, (flat, partition) in enumerate(partitions.items()):
        parameters = {
            unwrapped(slice_.name): StoredParameter(tuple(slice_.shape), slice_.division) for slice_ in partition.slices
        }
        stored.append(StoredPartition(group_of.get(i, i), flat.numel(), parameters))
    return Index(stage, ranks, precision, False, tuple(stored))


def write_latest_last(engine: Any, optimizer: Muon) -> None:
    """Wrap `engine.save_checkpoint` to extend its files, and to write `latest` after the files of all ranks."""
    save, writer = engine.save_checkpoint, engine.checkpoint_engine
    signature = inspect.signature(save)

    @functools.wraps(save)
    def ordered(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        values = call.arguments
        tag = f"global_step{engine.global_steps}" if values["tag"] is None else str(values["tag"])
        folder, latest = Path(values["save_dir"], tag), Path(values["save_dir"], "latest")
        with_latest = values["save_latest"] and not writer.is_decoupled()
        values["save_latest"] &= writer.is_decoupled()  # such a writer continues after the save, and names it then
        errors: list[str] = []
        # Every rank draws an id, and all take the smallest one.
        additions: dict[str, Any] = {SAVE: min(all_ranks(engine).texts([uuid.uuid4().hex]).values())[0]}
        with _noting(errors):
            additions[INDEX] = to_text(dataclasses.asdict(index_of(engine, optimizer)))
            if engine.global_rank == 0:
                # DeepSpeed makes the folder while the others are in a barrier, where an error would leave them.
                os.makedirs(folder, exist_ok=True)
                if latest.is_file() and latest.read_text().strip() == tag:
                    # Named again after the save, without save_latest, too: it was named before.
                    with_latest = True
                    latest.unlink()
        _raise_together(engine, folder, errors)
        # DeepSpeed would refuse an existing folder, but only at the end; files of this save must not mix with old ones.
        shutil.rmtree(swap_folder(engine, folder), ignore_errors=True)
        with contextlib.ExitStack() as context:
            context.enter_context(replaced(writer, "save", functools.partial(_extended, additions)))
            # Each writes files of this rank between two barriers; copytree copies those on NVMe.
            for owner, name in (engine, "_save_checkpoint"), (engine, "_save_zero_checkpoint"), (shutil, "copytree"):
                context.enter_context(replaced(owner, name, _noting(errors)))
            result = save(*call.args, **call.kwargs)
        _raise_together(engine, folder, errors)
        with _noting(errors):
            if with_latest and engine.global_rank == 0:
                with complete_or_absent(latest) as file:
                    file.write_text(tag)
        _raise_together(engine, folder, errors)
        return result

    engine.save_checkpoint = ordered


def _extended(additions: Mapping[str, Any], save: Callable[..., Any]) -> Callable[..., Any]:
    # DeepSpeed passes `state_dict` by name in one place, and by position in others.
    return lambda state_dict, *args, **kwargs: save({**state_dict, **additions}, *args, **kwargs)


def swap_folder(engine: Any, folder: Path) -> Path:
    """Return the folder of a checkpoint to which DeepSpeed copies this rank's files on NVMe."""
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    return folder / "offloaded_tensors" / f"rank{rank:02d}"


def all_ranks(engine: Any) -> Ranks:
    """Return the group of all ranks, which save and load together."""
    return Ranks(dist.group.WORLD, engine.device)


def _raise_together(engine: Any, folder: Path, errors: list[str]) -> None:
    """Wait for all ranks; raise on all of them if one has an error.

    Raises:
        RuntimeError: on all ranks.
    """
    texts = all_ranks(engine).texts(errors)
    if any(texts.values()):
        has_latest = folder.with_name("latest").is_file()
        remedy = "`latest` names the one before it" if has_latest else "there is none that `latest` names"
        raise RuntimeError(
            f"{folder} was not written whole, and {remedy} [checkpoint-not-whole]:\n  - "
            + "\n  - ".join(merged_texts(texts))
        )


@contextlib.contextmanager
def _noting(errors: list[str]) -> Iterator[None]:
    """Collect an error instead of raising it, so that this rank takes part in the collectives that follow."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  whatever a file system or a writer raises; all ranks raise it together
        errors.append(f"{type(error).__name__}: {str(error)[:500]}")


@contextlib.contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Wrap a function of an object or a module within the context."""
    method, is_own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, wrap(method))
    try:
        yield
    finally:
        # In 0.18.4 a method of the class that stays on its object changes what a later engine of the process loads.
        if is_own:
            setattr(owner, name, method)
        else:
            delattr(owner, name)
