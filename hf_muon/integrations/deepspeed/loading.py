"""Load checkpoints with DeepSpeed: check on all ranks first, restore everything with NVMe, and compare afterwards.

In DeepSpeed, each rank loads its own files: an error on one rank leaves the others waiting in a collective, with their
weights overwritten. With the optimizer on NVMe, DeepSpeed restores master weights only. If the options that order the
partitions have changed, it loads them in the old order.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_muon.diagnostics.log import first_few
from hf_muon.distributed.agreement import exchange_texts
from hf_muon.distributed.groups import root_group
from hf_muon.integrations.deepspeed.files import (
    BEFORE,
    LABEL,
    DamagedError,
    check_file,
    read,
    read_checksums,
    stages_of,
)
from hf_muon.integrations.deepspeed.order import differing_masters, moved, options_to_set
from hf_muon.integrations.deepspeed.partitions import is_swapped
from hf_muon.integrations.deepspeed.saving import binder, replaced, swap_folder
from hf_muon.integrations.names import OURS
from hf_muon.optimizer.consensus import together
from hf_muon.optimizer.muon import Muon
from hf_muon.optimizer.state_check import load_complaints

WEIGHTS = "zero_to_fp32.py, which lies beside the checkpoint"
WEIGHTS_OF_NVME = "which stage3_gather_16bit_weights_on_model_save writes whole"


def check_before_loading(engine: Any, optimizer: Muon) -> None:
    """Wrap `engine.load_checkpoint` to check files on all ranks, load everything, and compare masters with weights."""
    load = engine.load_checkpoint
    if getattr(load, OURS, False):
        return
    bind = binder(load)

    @functools.wraps(load)
    def checked(*args: Any, **kwargs: Any) -> Any:
        values = bind(*args, **kwargs).arguments
        swapping = bool(getattr(engine.optimizer, "swap_optimizer", False))
        saved: dict[str, Any] = {}
        tag = None
        try:
            tag = _latest(values["load_dir"]) if values["tag"] is None else str(values["tag"])
            complaints = list(_complaints(engine, optimizer, values, tag, saved))
        except Exception as error:  # noqa: BLE001  of one rank, before all have agreed
            complaints = [f"{values['load_dir']} cannot be read ({type(error).__name__}: {error}). {BEFORE}"]
        texts = exchange_texts(_ranks(optimizer), complaints)
        if any(texts) and not (tag is None and all(texts)):  # without a tag, DeepSpeed loads nothing and returns None
            raise ValueError(
                "This checkpoint cannot be loaded, and nothing was changed:\n  - " + "\n  - ".join(together(texts))
            )
        with _weights_of(engine, tag):
            result = load(*args, **kwargs)
        if isinstance(result[1], dict):
            result[1].pop(LABEL, None)
        if tag is not None:
            if swapping:
                _restore_swapped(engine.optimizer, optimizer, saved["zero"])
            elif (
                optimizer.partitioned.partitions is None
                and hasattr(engine.optimizer, "refresh_fp32_params")
                and not _moments(values)
            ):
                engine.optimizer.refresh_fp32_params()  # ZeRO-0 does not load the masters
            _refuse_other_masters(engine, optimizer, Path(values["load_dir"], tag))
        return result

    setattr(checked, OURS, True)
    engine.load_checkpoint = checked


@contextlib.contextmanager
def _weights_of(engine: Any, tag: str | None) -> Iterator[None]:
    """Have ZeRO-3 convert the masters of `tag` to weights; DeepSpeed converts those of `latest`."""

    def tagged(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(function, tag=tag)

    with replaced(sys.modules[type(engine).__module__], "get_fp32_state_dict_from_zero_checkpoint", tagged):
        yield


def _moments(values: Mapping[str, Any]) -> bool:
    """Return whether a call loads the optimizer's moments."""
    return bool(values["load_optimizer_states"] and not values["load_module_only"])


def _latest(folder: Any) -> str | None:
    file = Path(folder, "latest")
    return file.read_text().strip() if file.is_file() else None


def _ranks(optimizer: Muon) -> torch.distributed.ProcessGroup:
    if optimizer.partitioned.partitions:
        return root_group([partition.group for partition in optimizer.partitioned.partitions.values()])
    group = optimizer.replicate_group or torch.distributed.group.WORLD
    assert group is not None
    return group


def _refuse_other_masters(engine: Any, optimizer: Muon, folder: Path) -> None:
    """Raise on all ranks if master weights differ from the model's weights, as after a load in another order.

    Raises:
        RuntimeError: with the parameters.
    """
    names = first_few(differing_masters(engine))
    texts = exchange_texts(_ranks(optimizer), [names] if names else [])
    if any(texts):
        raise RuntimeError(
            f"{folder} was loaded, and the fp32 master weights of some parameters are not the weights of the model: "
            f"{'; '.join(together(texts))}. The first step would scramble them. Start again, with the DeepSpeed config "
            f"that wrote the checkpoint, or from the weights alone ({WEIGHTS}) without the optimizer"
        )


def _complaints(
    engine: Any, optimizer: Muon, values: Mapping[str, Any], tag: str | None, saved: dict[str, Any]
) -> Iterator[str]:
    """Yield why this rank's files cannot be loaded; store their content in `saved`."""
    moments = _moments(values)
    if getattr(engine.optimizer, "swap_optimizer", False) and not moments:
        yield (
            "DeepSpeed cannot load weights without the optimizer where the optimizer is on NVMe: it reads the swap "
            "files in any case. Load the weights into the model before DeepSpeed is started"
        )
        return
    if engine.zero_optimization_stage() == 3 and values["load_module_only"] and values["load_optimizer_states"]:
        yield "with load_module_only DeepSpeed loads no weights in ZeRO-3. Give load_optimizer_states=False as well"
        return
    if not tag:
        words = "has no file `latest`" if tag is None else "has an empty file `latest`"
        yield f"{values['load_dir']} {words}, which is written when all else is. Give the tag of a checkpoint"
        return
    folder = Path(values["load_dir"], tag)
    if complaint := _stage_complaint(engine, folder, moments):
        yield complaint
        return
    try:
        yield from _complaints_of_files(engine, optimizer, str(values["load_dir"]), tag, moments, saved)
    except DamagedError as error:
        yield str(error)


def _stage_complaint(engine: Any, folder: Path, moments: bool) -> str | None:
    """Return why a checkpoint's file names do not fit this run's ZeRO stage; None if they fit."""
    stages, own = stages_of(folder), int(engine.zero_optimization_stage())
    if not stages:
        return f"{folder} holds no checkpoint of DeepSpeed. Give the folder in which `latest` is, and the tag"
    if own in stages or (not moments and 3 not in (own, *stages)):
        return None
    there = " or ".join(map(str, stages))
    weights = "`module` of mp_rank_00_model_states.pt" if stages == (0,) else WEIGHTS
    return (
        f"{folder} was written by ZeRO-{there}, and this run has ZeRO-{own}, which stores the optimizer "
        f"differently. Set zero_optimization.stage to {there}, or start from the weights alone ({weights}) without the "
        "optimizer"
    )


def _complaints_of_files(
    engine: Any, optimizer: Muon, where: str, tag: str, moments: bool, saved: dict[str, Any]
) -> Iterator[str]:
    """Yield why the content of this rank's files cannot be loaded; store it in `saved`.

    Raises:
        DamagedError: a file is missing, or its bytes have changed since it was written.
    """
    folder, partitioned = Path(where, tag), optimizer.partitioned.partitions is not None
    by_rank = engine.zero_optimization_stage() == 3  # in other stages, all ranks read one file of weights
    own = engine._get_ckpt_name(where, tag)
    has_own = by_rank and Path(own).is_file()  # false if fewer ranks have written the checkpoint
    first = engine._get_ckpt_name(where, tag, pp_placeholder="0")
    weights = read(own) if has_own else read(first, checked=not by_rank and _first_of_node(engine))
    ranks, here = weights["dp_world_size"], engine.seq_dp_world_size
    if partitioned and ((moments and ranks != here) or (by_rank and here > ranks)):
        yield (
            f"{folder} was written by {ranks} ranks, and this run has {here}: DeepSpeed stores each rank's "
            f"partition in files of its own. Resume on {ranks} ranks, or start from the weights alone "
            f"({WEIGHTS_OF_NVME if _swapped(engine.optimizer) else WEIGHTS}) without the optimizer"
        )
        return
    if by_rank and not has_own:
        raise DamagedError(f"{own} is missing. {BEFORE}")
    if not moments:
        # In ZeRO-3, DeepSpeed converts the masters of all ranks to weights.
        if by_rank and Path(masters := engine._get_zero_ckpt_name(where, tag)).is_file():
            read(masters)
        return
    if partitioned:
        file = engine._get_zero_ckpt_name(where, tag)
        if complaint := _precision_complaint(Path(file)):
            yield complaint
            return
        content = read(file)
        saved["zero"] = content["optimizer_state_dict"]
        if names := moved(engine, weights):
            advice = options_to_set(engine.config, content.get("ds_config"))
            advice = advice or "Resume with the model and the DeepSpeed config that wrote it"
            yield (
                f"{folder} has {first_few(names, 3)} elsewhere in the fp32 partitions than this run. {advice}, or "
                f"start from the weights alone ({WEIGHTS}) without the optimizer"
            )
            return
        state = saved["zero"].get("base_optimizer_state", saved["zero"].get("optimizer_state_dict"))
    else:
        state = weights["optimizer"]
        state = state.get("optimizer_state_dict", state)
    with _all_standing(engine.optimizer):
        lines = list(load_complaints(optimizer.param_groups, state))
    if lines:
        lines[-1] += (
            ". Resume with the model and the options that wrote it, or start from its weights without the optimizer"
        )
        yield from lines
    yield from _unfit_swap_files(engine, folder)


def _first_of_node(engine: Any) -> bool:
    return bool(engine.local_rank in (0, -1))


def _precision_complaint(file: Path) -> str | None:
    """Return why a rank's file is named for another precision than this run's; None if it is not."""
    other = file.with_name(file.name.removeprefix("bf16_") if file.name.startswith("bf16_") else f"bf16_{file.name}")
    if file.is_file() or not other.is_file():
        return None
    there, here = ("without", "with") if file.name.startswith("bf16_") else ("with", "without")
    return (
        f"{file.parent} was written {there} bf16, and this run is {here} it. Set bf16.enabled to "
        f"{str(there == 'with').lower()}, or start from the weights alone ({WEIGHTS}) without the optimizer"
    )


@contextlib.contextmanager
def _all_standing(zero: Any) -> Iterator[None]:
    """Put all partitions into the param groups, as ZeRO-3 does while it saves and loads."""
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
    """Return the partitions on NVMe."""
    flats = enumerate(getattr(zero, "fp32_partitioned_groups_flat", ()))
    return [flat for i, flat in flats if is_swapped(zero, i)]


def _unfit_swap_files(engine: Any, folder: Path) -> Iterator[str]:
    """Yield the swap files that the checkpoint lacks. DeepSpeed numbers them in the order of parameters' creation.

    Raises:
        DamagedError: a file has changed since it was written.
    """
    saved = swap_folder(engine, folder)
    sums = read_checksums(saved)
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
            check_file(other, sums.get(other.name))


def _restore_swapped(zero: Any, optimizer: Muon, saved: dict[str, Any]) -> None:
    """Load what DeepSpeed skips with NVMe: steps, options, and the partitions that stay in memory.

    DeepSpeed has read the moments of swapped partitions together with their master weights.
    """
    swapped = {flat: dict(optimizer.state[flat]) for flat in _swapped(zero)}
    zero.checkpoint_event_prologue()
    with _all_standing(zero):
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
