"""Loading of checkpoints that are damaged or do not fit, and errors of one rank while it saves."""

from __future__ import annotations

import functools
import os
import resource
import shutil
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from tests.deepspeed.cases import engine_of
from tests.deepspeed.models import loss_of, tokens_of
from tests.distributed.kills import dying
from tests.distributed.training import batches

SAVED_AT = 2


def load_error(rank, load, error=ValueError, arguments=None, may_load=False, **options):
    """Return the error of loading a checkpoint, or None where DeepSpeed finds none; check that nothing has changed.

    A checkpoint that `may_load` loads nevertheless: then return "loaded".
    """
    engine, optimizer = engine_of(**options)
    engine.backward(loss_of(engine, batches(0)[:4]))
    engine.step()

    def tensors():
        params = [getattr(param, "ds_tensor", param) for param in engine.module.parameters()]
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return [*params, *(optimizer.partitioned.partitions or ()), *moments]

    before = [tensor.detach().clone() for tensor in tensors()]
    text = None
    try:
        loaded = engine.load_checkpoint(load, **(arguments or {}))
        if may_load and loaded[0] is not None:
            engine.destroy()
            return "loaded"
        assert loaded == (None, None)
    except error as raised:
        text = str(raised)
    assert error is not ValueError or all(torch.equal(one, other) for one, other in zip(tensors(), before, strict=True))
    engine.destroy()
    return text


def damage(source, target, how):
    """Copy a checkpoint and damage the second rank's file."""
    folder = shutil.copytree(source, target, dirs_exist_ok=True)
    (file,) = Path(folder).glob("global_step*/*zero_pp_rank_1_*optim_states.pt")
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    elif how == "gone":
        file.unlink()
    elif how == "a list":
        torch.save([torch.zeros(2)], file)
    elif how == "other keys":
        torch.save({"weights": torch.zeros(2)}, file)
    if how in ("cut", "gone", "a list", "other keys"):
        return str(folder)
    content = torch.load(file, weights_only=False)
    zero = content["optimizer_state_dict"]
    state = zero.get("base_optimizer_state", zero.get("optimizer_state_dict"))
    if how == "no state":
        zero.clear()
    elif how == "code":
        content["ds_version"] = Planted(f"{folder} code ran")
    elif how == "moments":
        state["state"].clear()
    elif how == "routing":
        for group in state["param_groups"]:
            del group["use_muon"]
    else:  # master weights of the last group, AdamW's, are not those of the model
        flats = zero["single_partition_of_fp32_groups"]
        flats[-1].data = flats[-1].data.roll(1)
    torch.save(content, file)
    return str(folder)


class Planted:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def mix(folder, other, of):
    """Put files of another save into a checkpoint."""
    for file in Path(other).glob(of):
        target = Path(folder, file.relative_to(other))
        if file.is_dir():
            shutil.copytree(file, target, dirs_exist_ok=True)
        else:
            shutil.copy(file, target)
    return str(folder)


def without(folder, key):
    """Remove an entry of ours from the files of a checkpoint."""
    for file in Path(folder).glob("*/*_states.pt"):
        content = torch.load(file, weights_only=False)
        del content[key]
        torch.save(content, file)
    return folder


def load_at_once(rank, save, stage):
    """Return whether a checkpoint loads as soon as saving has returned, although rank 0 has a slow disk."""
    engine, _ = engine_of(stage=stage)
    replace = Path.replace

    def slow(self, target):
        time.sleep(1)
        return replace(self, target)

    Path.replace = slow
    try:
        engine.save_checkpoint(save)
    finally:
        Path.replace = replace
    try:
        return engine.load_checkpoint(save)[0] is not None
    finally:
        dist.barrier()
        engine.destroy()


def save_with_fault(rank, stage, save, victim, how):
    """Train and save three times, the second time with a fault of one rank; return its error, and `latest` after it."""
    engine, _ = engine_of(stage=stage)

    def step(index):
        engine.backward(loss_of(engine, tokens_of(index, 0, 1, rank, dist.get_world_size())))
        engine.step()

    step(0)
    engine.save_checkpoint(save)
    step(1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = Path(save, "in the way") if how == "folder" else Path(save)
    if rank == victim and how == "disk full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    elif rank == victim and how == "latest":
        Path(save, "latest.partial").mkdir()
    elif rank == victim and how == "same tag":
        engine.checkpoint_engine.save = refusing
    elif rank == victim:
        folder.write_text("a file")
    text = None
    try:
        engine.save_checkpoint(str(folder), tag="global_step1" if how == "same tag" else None)
    except RuntimeError as error:
        text = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    dist.barrier()
    latest = Path(save, "latest").read_text() if Path(save, "latest").is_file() else None
    dist.barrier()
    if rank == victim and how == "latest":
        Path(save, "latest.partial").rmdir()
    elif how == "same tag":
        engine.destroy()
        return text, latest
    step(2)
    engine.save_checkpoint(save)
    engine.destroy()
    return text, latest


def dies(rank, stage, path, victim, phase, part, how, whole_before=False, tag=None):
    """Resume, take a step, and save or load; the victim dies on the way.

    Args:
        rank: of this process.
        stage: stage of ZeRO.
        path: folder of the checkpoints.
        victim: the rank that dies.
        phase: "save" or "load".
        part: when to die, as a share of the function calls that an uninterrupted save or load takes.
        how: "killed" or "stopped".
        whole_before: whether to finish a save and take another step before the phase.
        tag: of the save.
    """
    engine, _ = engine_of(stage=stage)
    engine.load_checkpoint(path)

    def step():
        tokens = tokens_of(engine.global_steps, 0, 1, rank, dist.get_world_size())
        engine.backward(loss_of(engine, tokens))
        engine.step()

    step()
    if whole_before:
        engine.save_checkpoint(path)
        step()
    act = functools.partial({"save": engine.save_checkpoint, "load": engine.load_checkpoint}[phase], tag=tag)
    scratch = f"{path} scratch"
    engine.save_checkpoint(scratch)
    with dying() as counter:
        act(scratch)
    with dying(int(counter.calls * part) if rank == victim else None, how):
        act(path)


def refusing(*args, **kwargs):
    """Raise as a disk does that is read only."""
    raise OSError("read only")


def save_without_state(rank, stage, save):
    """Save while one rank has no memory for its state; return the error, and the seconds until it is raised."""
    engine, _ = engine_of(stage=stage)
    if rank == 1:
        engine.optimizer.state_dict = lambda *_: bytes(1 << 60)
    begin, text = time.time(), None
    try:
        engine.save_checkpoint(save)
    except RuntimeError as error:
        text = str(error)
    seconds = time.time() - begin
    if rank == 1:
        del engine.optimizer.state_dict
    engine.destroy()
    return text, seconds


def save_again(rank, stage, save):
    """Save after each of two steps under one tag; return what `latest` names, and the steps of the checkpoint."""
    engine, _ = engine_of(stage=stage)
    for last in (True, False):
        engine.backward(loss_of(engine, batches(0)[:4]))
        engine.step()
        engine.save_checkpoint(save, tag="again", save_latest=last)
    engine.destroy()
    engine, _ = engine_of(stage=stage)
    engine.load_checkpoint(save)
    steps = engine.global_steps
    engine.destroy()
    return Path(save, "latest").read_text(), steps


def load_tags(rank, save):
    """Save two checkpoints of ZeRO-3 and load the weights of each tag alone.

    Returns:
        for each tag, whether the weights are those that were saved; and the user's client state.
    """
    engine, _ = engine_of(stage=3)
    weights = {}

    def whole():
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            return [param.detach().clone() for param in engine.module.parameters()]

    for tag in ("one", "two"):
        engine.backward(loss_of(engine, batches(0)[:4]))
        engine.step()
        engine.save_checkpoint(save, tag=tag, client_state={"mine": tag})
        weights[tag] = whole()
    loaded, states = {}, {}
    for tag in ("one", "two"):
        _, states[tag] = engine.load_checkpoint(save, tag=tag, load_optimizer_states=False)
        loaded[tag] = whole()
    engine.destroy()
    same = {tag: all(torch.equal(a, b) for a, b in zip(loaded[tag], weights[tag], strict=True)) for tag in weights}
    return same, states


def load_own_files(rank, load):
    """Load from a folder that holds this rank's files alone, as on a node with storage of its own."""
    engine, _ = engine_of(stage=3)
    path, _ = engine.load_checkpoint(load[rank])
    engine.destroy()
    return path is not None


def load_weights_alone(rank, stage, load, **arguments):
    """Load weights without the optimizer and take a step; return the whole weights before the step."""
    engine, _ = engine_of(stage=stage, dtype="bfloat16")
    engine.load_checkpoint(load, **arguments)
    weights = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
            weights[name] = param.detach().clone()
    engine.backward(loss_of(engine, batches(0)[:4]))
    engine.step()
    engine.destroy()
    return weights
