"""DeepSpeed's checkpoints: checked by all ranks before anything is touched, complete with NVMe, and `latest` last.

DeepSpeed loads a checkpoint rank by rank, each its own files: an error of one leaves the others in a collective, with
weights that have been overwritten. Of an optimizer on NVMe it restores the master weights only. And its file `latest`
may name a checkpoint that other ranks have not written yet.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_muon.checkpoint import load_complaints, refuse_load
from hf_muon.distributed.agreement import exchange_texts, root_group
from hf_muon.integrations.deepspeed_layout import is_swapped
from hf_muon.optimizer import Muon
from hf_muon.preflight import together

OURS = "_from_hf_muon"
WEIGHTS = "zero_to_fp32.py, which lies beside the checkpoint"
WEIGHTS_OF_NVME = "which stage3_gather_16bit_weights_on_model_save writes whole"


def check_before_loading(engine: Any, optimizer: Muon) -> None:
    """Have `engine.load_checkpoint` check what it is to load on all ranks, and load all of it."""
    load = engine.load_checkpoint
    if getattr(load, OURS, False):
        return
    signature = inspect.signature(load)

    @functools.wraps(load)
    def checked(*args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(*args, **kwargs)
        asked.apply_defaults()
        given = asked.arguments
        moments = given["load_optimizer_states"] and not given["load_module_only"]
        swapping = bool(getattr(engine.optimizer, "swap_optimizer", False))
        found: dict[str, Any] = {}
        complaints: list[str] = []
        tag = given["tag"] or _latest(given["load_dir"])
        if swapping and not moments:
            complaints.append(
                "DeepSpeed cannot load weights without the optimizer where the optimizer is on NVMe: it reads the swap "
                "files in any case. Load the weights into the model before DeepSpeed is started"
            )
        elif moments and tag is None:
            complaints.append(f"{given['load_dir']} has no file `latest`, which DeepSpeed writes when all else is")
        elif moments:
            complaints += _complaints(engine, optimizer, Path(given["load_dir"], str(tag)), found)
        heard = exchange_texts(_ranks(optimizer), complaints)
        if any(heard) and not (tag is None and all(heard)):  # DeepSpeed then loads nothing, and says so in its answer
            refuse_load(together(heard))
        done = load(*args, **kwargs)
        if swapping and tag is not None:
            _restore_swapped(engine.optimizer, optimizer, found["zero"])
        return done

    setattr(checked, OURS, True)
    engine.load_checkpoint = checked


def write_latest_last(engine: Any) -> None:
    """Have `engine.save_checkpoint` name the checkpoint in `latest` when all ranks have written theirs."""
    save = engine.save_checkpoint
    writer = getattr(engine, "checkpoint_engine", None)
    if getattr(save, OURS, False) or getattr(writer, "is_decoupled", lambda: False)():
        return
    signature = inspect.signature(save)

    @functools.wraps(save)
    def ordered(*args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(*args, **kwargs)
        asked.apply_defaults()
        given = asked.arguments
        tag = given["tag"] or f"global_step{engine.global_steps}"
        wanted, given["save_latest"] = given["save_latest"], False
        done = save(*asked.args, **asked.kwargs)  # ends with a barrier
        if wanted and engine.global_rank == 0:
            file = Path(given["save_dir"], "latest")
            partial = file.with_name("latest.partial")
            partial.write_text(str(tag))
            partial.replace(file)
        return done

    setattr(ordered, OURS, True)
    engine.save_checkpoint = ordered


def _latest(folder: Any) -> str | None:
    file = Path(folder, "latest")
    return file.read_text().strip() if file.is_file() else None


def _ranks(optimizer: Muon) -> torch.distributed.ProcessGroup:
    if optimizer.partitions:
        return root_group([partition.group for partition in optimizer.partitions.values()])
    group = optimizer.replicate_group or torch.distributed.group.WORLD
    assert group is not None
    return group


def _complaints(engine: Any, optimizer: Muon, folder: Path, found: dict[str, Any]) -> Iterator[str]:
    """What speaks against loading this rank's files; fills in `found`."""
    where, tag = str(folder.parent), folder.name
    try:
        weights = _read(engine._get_ckpt_name(where, tag, pp_placeholder="0"))
        ranks, here = weights["dp_world_size"], engine.seq_dp_world_size
        partitioned = optimizer.partitions is not None
        if partitioned and ranks != here:
            yield (
                f"{folder} was written by {ranks} ranks, and this run has {here}: DeepSpeed stores each rank's "
                f"partition in files of its own. Resume on {ranks} ranks, or start from the weights alone "
                f"({WEIGHTS_OF_NVME if _swapped(engine.optimizer) else WEIGHTS}) without the optimizer"
            )
            return
        if partitioned:
            _read(engine._get_ckpt_name(where, tag))
            found["zero"] = _read(engine._get_zero_ckpt_name(where, tag))["optimizer_state_dict"]
            stage, own = int(found["zero"].get("zero_stage", 0)), engine.zero_optimization_stage()
            if (stage == 3) != (own == 3):
                yield f"{folder} was written by ZeRO-{stage}; ZeRO-{own} cuts otherwise. Use stage {stage}"
                return
            saved = found["zero"].get("base_optimizer_state", found["zero"].get("optimizer_state_dict"))
        else:
            saved = weights["optimizer"]
            saved = saved.get("optimizer_state_dict", saved)
    except Exception as error:  # noqa: BLE001  what unpickling raises depends on the bytes
        yield f"{folder} cannot be read ({type(error).__name__}: {error}). Resume from the checkpoint before it"
        return
    with _all_standing(engine.optimizer):
        yield from load_complaints(optimizer.param_groups, saved)
    yield from _missing_swap_files(engine, folder)


def _read(file: str) -> dict[str, Any]:
    # The archive's directory and what is small; tensors are read where they are looked at.
    read: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    return read


@contextlib.contextmanager
def _all_standing(zero: Any) -> Iterator[None]:
    """With all partitions in the param groups, as ZeRO-3 has them when it saves and loads."""
    if not hasattr(zero, "_set_fp32_optimizer_param_groups"):
        yield
        return
    zero._set_fp32_optimizer_param_groups()
    try:
        yield
    finally:
        zero._clear_fp32_optimizer_param_groups()


# --- NVMe


def _swapped(zero: Any) -> list[Tensor]:
    """The partitions on NVMe."""
    flats = enumerate(getattr(zero, "fp32_partitioned_groups_flat", ()))
    return [flat for i, flat in flats if is_swapped(zero, i)]


def _missing_swap_files(engine: Any, folder: Path) -> Iterator[str]:
    """Swap files that the checkpoint lacks. DeepSpeed names them after the order in which parameters are made."""
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    saved = folder / "offloaded_tensors" / f"rank{rank:02d}"
    for flat in _swapped(engine.optimizer):
        for path in engine.optimizer.optimizer_swapper.swap_params_info[flat.ds_id].get_swap_paths():  # type: ignore[attr-defined]
            own, other = Path(path), saved / Path(path).name
            if not other.is_file() or other.stat().st_size != own.stat().st_size:
                yield (
                    f"{other} is missing, or has another size than {own}. DeepSpeed names swap files after the order "
                    "in which a process makes parameters: make the same models as the run that wrote it, in the same "
                    "order, with the same sub_group_size, and with the optimizer on NVMe"
                )
                return


def _restore_swapped(zero: Any, optimizer: Muon, saved: dict[str, Any]) -> None:
    """Load what DeepSpeed leaves out with NVMe: steps and options, and all of the partitions that stay in memory.

    The moments of the others have been read with the master weights, because DeepSpeed knew of them.
    """
    kept = {flat: dict(optimizer.state[flat]) for flat in _swapped(zero)}
    zero.checkpoint_event_prologue()
    with _all_standing(zero):
        optimizer.load_state_dict(saved["optimizer_state_dict"])
    for flat, state in kept.items():
        for name, moment in state.items():
            if hasattr(moment, "ds_id"):  # the tensor that DeepSpeed swaps
                optimizer.state[flat][name] = moment
    for i, (flat, master) in enumerate(zip(zero.fp32_partitioned_groups_flat, saved["fp32_flat_groups"], strict=True)):
        if flat not in kept:
            flat.data.copy_(master.data)
            zero._reassign_or_swap_out_partitioned_parameters(i)
    zero.loss_scaler, zero.dynamic_loss_scale = saved["loss_scaler"], saved["dynamic_loss_scale"]
    zero.overflow = saved["overflow"]
    zero.checkpoint_event_epilogue()
