"""Checkpoints that are damaged or do not fit, what loading them does, and errors of one rank while it saves."""

from __future__ import annotations

import resource
import shutil
import time
import zipfile
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from tests.deepspeed.cases import engine_of, loss_of, tokens_of
from tests.distributed.kills import dying
from tests.distributed.training import batches

SAVED_AT = 2


def refused_load(rank, load, error=ValueError, arguments=None, **options):
    """The error of loading a checkpoint; None where DeepSpeed says that there is none. Nothing has changed."""
    engine, optimizer = engine_of(**options)
    engine.backward(loss_of(engine, batches(0)[:4]))
    engine.step()

    def held():
        params = [getattr(param, "ds_tensor", param) for param in engine.module.parameters()]
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return [*params, *(optimizer.partitioned.partitions or ()), *moments]

    before = [tensor.detach().clone() for tensor in held()]
    text = None
    try:
        assert engine.load_checkpoint(load, **(arguments or {})) == (None, None)
    except error as raised:
        text = str(raised)
    assert error is not ValueError or all(torch.equal(one, other) for one, other in zip(held(), before, strict=True))
    engine.destroy()
    return text


def damage(source, target, how):
    """A copy of a checkpoint in which something is wrong with the second rank's file."""
    folder = shutil.copytree(source, target, dirs_exist_ok=True)
    if how.startswith("exchanged"):
        kind = how.split()[1]
        one, other = sorted(Path(folder).glob(f"*/*zero_pp_rank_*_{kind}_states.pt"))
        partial = other.rename(other.with_suffix(".partial"))
        partial.rename(one.rename(other).with_name(one.name))
        return str(folder)
    (file,) = Path(folder).glob("global_step*/*zero_pp_rank_1_*optim_states.pt")
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    elif how == "zeroed":
        zero_bytes(file, place_of_largest(file))
    elif how == "gone":
        file.unlink()
    if how in ("cut", "zeroed", "gone"):
        return str(folder)
    content = torch.load(file, weights_only=False)
    zero = content["optimizer_state_dict"]
    state = zero.get("base_optimizer_state", zero.get("optimizer_state_dict"))
    if how == "moments":
        state["state"].clear()
    elif how == "routing":
        for group in state["param_groups"]:
            del group["use_muon"]
    else:  # masters that are not the model's, of the last group, which is AdamW's
        flats = zero["single_partition_of_fp32_groups"]
        flats[-1].data = flats[-1].data.roll(1)
    torch.save(content, file)
    return str(folder)


def zero_bytes(file, place):
    with Path(file).open("r+b") as stream:
        stream.seek(place)
        stream.write(bytes(64))


def place_of_largest(file):
    """The middle of the largest tensor in a file of torch.save."""
    with zipfile.ZipFile(file) as archive:
        record = max(archive.infolist(), key=lambda record: record.file_size)
        with archive.open(record) as data:
            content = data.read()
    return Path(file).read_bytes().index(content) + len(content) // 2


def without_labels(folder):
    """A checkpoint as older versions wrote it: files do not say under which names they were written."""
    for file in Path(folder).glob("*/*_states.pt"):
        content = torch.load(file, weights_only=False)
        del content["hf_muon_file"]
        torch.save(content, file)
    return folder


def loaded_at_once(rank, save, stage):
    """Whether a checkpoint can be loaded as soon as saving it has returned, where rank 0 has a slow disk."""
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


def failed_save(rank, stage, save, victim, how):
    """Train, save, and save again with an error of one rank; what each rank raises, and weights after a third save."""
    engine, _ = engine_of(stage=stage)

    def step(index):
        engine.backward(loss_of(engine, tokens_of(index, 0, 1, rank, dist.get_world_size())))
        engine.step()

    step(0)
    engine.save_checkpoint(save)
    step(1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = Path(save, "in the way") if how == "folder" else Path(save)
    if rank == victim and how in ("disk full", "same tag"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    elif rank == victim and how == "latest":
        Path(save, "latest.partial").mkdir()
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
    latest = Path(save, "latest").read_text()
    dist.barrier()
    if rank == victim and how == "latest":
        Path(save, "latest.partial").rmdir()
    step(2)
    engine.save_checkpoint(save)
    engine.destroy()
    return text, latest


def dies(rank, stage, path, victim, phase, part, how, whole_before=False):
    """Resume, take a step, save or load, and die on the way if this is the victim.

    Args:
        part: of the calls that a first save or load takes, after which to die.
        whole_before: whether to save whole, and take another step, before that.
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
    act = {"save": engine.save_checkpoint, "load": engine.load_checkpoint}[phase]
    scratch = f"{path} scratch"
    engine.save_checkpoint(scratch)
    with dying() as counter:
        act(scratch)
    with dying(int(counter.calls * part) if rank == victim else None, how):
        act(path)


def failed_state(rank, stage, save):
    """The error of a save in which one rank cannot make its state, and how long it takes to come."""
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


def of_a_tag(rank, save):
    """Weights of two checkpoints of ZeRO-3 at their saves, and loaded alone by their tags; the state of the user."""
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


def own_files_only(rank, load):
    """Load from a folder that holds this rank's files alone, as on a node with storage of its own."""
    engine, _ = engine_of(stage=3)
    path, _ = engine.load_checkpoint(load[rank])
    engine.destroy()
    return path is not None


def weights_alone(rank, stage, load, **arguments):
    """Whole weights after loading them without the optimizer, and one step that they take."""
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
