"""Partitions of ZeRO-3 that stand outside of its param groups, or lie on NVMe, while a checkpoint is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_muon.integrations.deepspeed.files import Files
from hf_muon.integrations.deepspeed.partitions import is_swapped
from hf_muon.integrations.deepspeed.saving import swap_folder
from hf_muon.optimizer.muon import Muon


@contextlib.contextmanager
def all_standing(zero: Any) -> Iterator[None]:
    """Put all partitions into the param groups, as ZeRO-3 does while it saves and loads."""
    if not hasattr(zero, "_set_fp32_optimizer_param_groups"):
        yield
        return
    zero._set_fp32_optimizer_param_groups()
    try:
        yield
    finally:
        zero._clear_fp32_optimizer_param_groups()


def partitions_on_nvme(zero: Any) -> list[Tensor]:
    """Return the partitions on NVMe."""
    flats = enumerate(getattr(zero, "fp32_partitioned_groups_flat", ()))
    return [flat for i, flat in flats if is_swapped(zero, i)]


def unfit_swap_files(engine: Any, folder: Path, files: Files) -> Iterator[str]:
    """Yield the swap files that the checkpoint lacks. DeepSpeed numbers them in the order of parameters' creation."""
    saved = swap_folder(engine, folder)
    if getattr(engine.optimizer, "swap_optimizer", False):
        files.read_mark(saved)
    for flat in partitions_on_nvme(engine.optimizer):
        for path in engine.optimizer.optimizer_swapper.swap_params_info[flat.ds_id].get_swap_paths():  # type: ignore[attr-defined]
            own, other = Path(path), saved / Path(path).name
            if not other.is_file() or other.stat().st_size != own.stat().st_size:
                yield (
                    f"{other} is missing, or has another size than {own}. DeepSpeed names swap files after the order "
                    "in which a process makes parameters: make the same models as the run that wrote it, in the same "
                    "order, with the same sub_group_size, and with the optimizer on NVMe"
                )
                return


def restore_swapped(zero: Any, optimizer: Muon, saved: dict[str, Any]) -> None:
    """Load what DeepSpeed skips with NVMe: steps, options, and the partitions that stay in memory.

    DeepSpeed has read the moments of swapped partitions together with their master weights.
    """
    swapped = {flat: dict(optimizer.state[flat]) for flat in partitions_on_nvme(zero)}
    zero.checkpoint_event_prologue()
    with all_standing(zero):
        optimizer.load_state_dict(saved["optimizer_state_dict"])
    for flat, state in swapped.items():
        for name, moment in state.items():
            if hasattr(moment, "ds_id"):  # DeepSpeed swaps this tensor
                optimizer.state[flat][name] = moment
    for i, (flat, master) in enumerate(zip(zero.fp32_partitioned_groups_flat, saved["fp32_flat_groups"], strict=True)):
        if flat not in swapped:
            flat.data.copy_(master.data)
            zero._reassign_or_swap_out_partitioned_parameters(i)
    zero.loss_scaler, zero.dynamic_loss_scale = saved["loss_scaler"], saved["dynamic_loss_scale"]
    zero.overflow = saved["overflow"]
    zero.checkpoint_event_epilogue()
