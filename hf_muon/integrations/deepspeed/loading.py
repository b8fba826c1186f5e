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

import torch.distributed as dist

from hf_muon.diagnostics.log import first_few, is_rank_zero, logger
from hf_muon.distributed.agreement import exchange_texts
from hf_muon.distributed.groups import root_group
from hf_muon.integrations.deepspeed.files import (
    BEFORE,
    SAVE,
    WEIGHTS,
    DamagedError,
    Files,
    mixture,
    stages_of,
    using,
)
from hf_muon.integrations.deepspeed.index import INDEX
from hf_muon.integrations.deepspeed.order import differing_masters, moved, options_to_set
from hf_muon.integrations.deepspeed.resharding import Resharding, resharding
from hf_muon.integrations.deepspeed.saving import binder, replaced
from hf_muon.integrations.deepspeed.swapping import (
    all_standing,
    partitions_on_nvme,
    restore_swapped,
    unfit_swap_files,
)
from hf_muon.integrations.names import OURS
from hf_muon.optimizer.consensus import together
from hf_muon.optimizer.muon import Muon
from hf_muon.optimizer.state_check import load_complaints

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
        complaints: list[str] = []
        files = Files()
        tag, other = None, None
        with _as_complaints(values["load_dir"], complaints):
            tag = _latest(values["load_dir"]) if values["tag"] is None else str(values["tag"])
            if tag:
                files = Files(engine._get_ckpt_name(str(values["load_dir"]), tag))
            if tag and _moments(values):
                other = resharding(engine, optimizer, Path(values["load_dir"], tag), files)
            if other is None:
                complaints += _complaints(engine, optimizer, values, tag, files, saved)
            else:
                complaints += _complaints_of_another_layout(other)
        exchange = functools.partial(exchange_texts, _ranks(optimizer), engine.device)
        several_saves = mixture(Path(values["load_dir"], tag or ""), exchange(files.saves))
        texts = exchange(several_saves or complaints)
        if any(texts) and not (tag is None and all(texts)):  # without a tag, DeepSpeed loads nothing and returns None
            raise ValueError(
                "This checkpoint cannot be loaded, and nothing was changed:\n  - " + "\n  - ".join(together(texts))
            )
        with _weights_of(engine, tag), other.in_place_of_files() if other else contextlib.nullcontext():
            result = load(*args, **kwargs)
        for key in (SAVE, INDEX) if isinstance(result[1], dict) else ():
            result[1].pop(key, None)
        if other is not None and is_rank_zero():
            logger().info("%s, written by %s, was loaded as %s", other.folder, other.source, other.here)
        if tag is not None:
            if swapping:
                restore_swapped(engine.optimizer, optimizer, saved["zero"])
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
def _as_complaints(folder: Any, complaints: list[str]) -> Iterator[None]:
    """Turn what goes wrong on one rank into a complaint, so that all ranks can agree."""
    try:
        yield
    except DamagedError as error:
        complaints.append(str(error))
    except Exception as error:  # noqa: BLE001  what reading raises depends on the bytes
        complaints.append(f"{folder} cannot be read ({type(error).__name__}: {error}). {BEFORE}")


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


def _ranks(optimizer: Muon) -> dist.ProcessGroup:
    if optimizer.partitioned.partitions:
        return root_group([partition.group for partition in optimizer.partitioned.partitions.values()])
    group = optimizer.replicate_group or dist.group.WORLD
    assert group is not None
    return group


def _refuse_other_masters(engine: Any, optimizer: Muon, folder: Path) -> None:
    """Raise on all ranks if master weights differ from the model's weights, as after a load in another order.

    Raises:
        RuntimeError: with the parameters.
    """
    names = first_few(differing_masters(engine))
    texts = exchange_texts(_ranks(optimizer), engine.device, [names] if names else [])
    if any(texts):
        raise RuntimeError(
            f"{folder} was loaded, and the fp32 master weights of some parameters are not the weights of the model: "
            f"{'; '.join(together(texts))}. The first step would scramble them. Start again, with the DeepSpeed config "
            f"that wrote the checkpoint, or from the weights alone ({WEIGHTS}) without the optimizer"
        )


def _complaints(
    engine: Any, optimizer: Muon, values: Mapping[str, Any], tag: str | None, files: Files, saved: dict[str, Any]
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
    yield from _complaints_of_files(engine, optimizer, str(values["load_dir"]), tag, moments, files, saved)


def _complaints_of_another_layout(other: Resharding) -> Iterator[str]:
    """Yield why files of another layout cannot be loaded; `other` reads this rank's share of them.

    Raises:
        DamagedError: a file is missing, cut off or overwritten.
    """
    lines = list(other.complaints())
    yield from lines
    if not lines:
        yield from _complaints_of_state(other.engine, other.optimizer, other.optimizer_state)


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
        f"differently. Set zero_optimization.stage to {there}, or start from the weights alone ({weights}) "
        "without the optimizer"
    )


def _complaints_of_files(
    engine: Any, optimizer: Muon, where: str, tag: str, moments: bool, files: Files, saved: dict[str, Any]
) -> Iterator[str]:
    """Yield why the content of this rank's files cannot be loaded; store it in `saved`.

    Raises:
        DamagedError: a file is missing, cut off or overwritten.
    """
    folder, partitioned = Path(where, tag), optimizer.partitioned.partitions is not None
    by_rank = engine.zero_optimization_stage() == 3  # in other stages, all ranks read one file of weights
    own = engine._get_ckpt_name(where, tag)
    has_own = by_rank and Path(own).is_file()  # false if fewer ranks have written the checkpoint
    file_of_weights = own if has_own else engine._get_ckpt_name(where, tag, pp_placeholder="0")
    weights = files.read(file_of_weights)
    with using(file_of_weights):
        ranks, here = weights["dp_world_size"], engine.seq_dp_world_size
        names = moved(engine, weights) if partitioned else []
    if partitioned and ((moments and ranks != here) or (by_rank and here > ranks)):
        yield (
            f"{folder} was written by {ranks} ranks, and this run has {here}: DeepSpeed stores each rank's "
            f"partition in files of its own. Resume on {ranks} ranks, or start from the weights alone "
            f"({WEIGHTS_OF_NVME if partitions_on_nvme(engine.optimizer) else WEIGHTS}) without the optimizer"
        )
        return
    if by_rank and not has_own:
        raise DamagedError(f"{own} is missing. {BEFORE}")
    if not moments:
        # In ZeRO-3, DeepSpeed converts the masters of all ranks to weights.
        group = _ranks(optimizer)
        every = sorted(folder.glob("*_optim_states.pt")) if by_rank else []
        for masters in every[dist.get_rank(group) :: group.size()]:
            files.read(masters)
        return
    file = engine._get_zero_ckpt_name(where, tag) if partitioned else file_of_weights
    if partitioned and (complaint := _precision_complaint(Path(file))):
        yield complaint
        return
    content = files.read(file) if partitioned else weights
    with using(file):
        state = saved["zero"] = content["optimizer_state_dict" if partitioned else "optimizer"]
        state = state.get("base_optimizer_state", state.get("optimizer_state_dict", state))
    if names:
        advice = options_to_set(engine.config, content.get("ds_config"))
        advice = advice or "Resume with the model and the DeepSpeed config that wrote it"
        yield (
            f"{folder} has {first_few(names, 3)} elsewhere in the fp32 partitions than this run. {advice}, "
            f"or start from the weights alone ({WEIGHTS}) without the optimizer"
        )
        return
    with using(file):
        yield from _complaints_of_state(engine, optimizer, state)
    yield from unfit_swap_files(engine, folder, files)


def _complaints_of_state(engine: Any, optimizer: Muon, state: Any) -> Iterator[str]:
    """Yield why a state dict is not this optimizer's."""
    with all_standing(engine.optimizer):
        lines = list(load_complaints(optimizer.param_groups, state))
    if lines:
        lines[-1] += (
            ". Resume with the model and the options that wrote it, or start from its weights without the optimizer"
        )
        yield from lines


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
