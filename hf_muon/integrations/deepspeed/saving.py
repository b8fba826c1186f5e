"""Save checkpoints with DeepSpeed: all ranks write their files, then `latest` is written, or all ranks raise.

DeepSpeed writes `latest` as soon as the first rank has written its files, and an error on one rank leaves the others
waiting in a barrier. Files of a tag that is used again are overwritten one by one: `latest` does not name it meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_muon.distributed.agreement import exchange_texts
from hf_muon.integrations.archives import complete_or_absent
from hf_muon.integrations.deepspeed.files import SAVE, mark
from hf_muon.integrations.deepspeed.index import INDEX, index_of
from hf_muon.integrations.names import OURS
from hf_muon.optimizer.consensus import together
from hf_muon.optimizer.muon import Muon


def write_latest_last(engine: Any, optimizer: Muon) -> None:
    """Wrap `engine.save_checkpoint` to write `latest` after the files of all ranks, and to return after that.

    Each file also gets the random id of the save, and the index of where the ranks store parameters.
    """
    save = engine.save_checkpoint
    writer = getattr(engine, "checkpoint_engine", None)
    if getattr(save, OURS, False) or writer is None or getattr(writer, "is_decoupled", lambda: False)():
        return
    bind = binder(save)

    @functools.wraps(save)
    def ordered(*args: Any, **kwargs: Any) -> Any:
        call = bind(*args, **kwargs)
        values = call.arguments
        if not values["save_dir"]:
            return save(*args, **kwargs)  # DeepSpeed raises
        tag = f"global_step{engine.global_steps}" if values["tag"] is None else str(values["tag"])
        folder = Path(values["save_dir"], tag)
        with_latest, values["save_latest"] = values["save_latest"], False
        latest = folder.with_name("latest")
        errors: list[str] = []
        also: dict[str, Any] = {SAVE: exchange_texts(_world(), engine.device, [uuid.uuid4().hex])[0][0]}
        with _noting(errors):
            if (index := index_of(engine, optimizer)) is not None:
                also[INDEX] = index.plain()
        _raise_together(engine, folder, errors)
        with _noting(errors):
            if engine.global_rank == 0:
                os.makedirs(values["save_dir"], exist_ok=True)
                if latest.is_file() and latest.read_text().strip() == tag:
                    with_latest = True
                    latest.unlink()
        _raise_together(engine, folder, errors)
        with contextlib.ExitStack() as context:
            context.enter_context(_files_extended(writer, also, errors))
            context.enter_context(_swap_files_noted(folder, errors))
            for part in ("_copy_recovery_script", "_save_checkpoint", "_save_zero_checkpoint"):
                context.enter_context(replaced(engine, part, _noting(errors)))
            result = save(*call.args, **call.kwargs)
        with _noting(errors):
            if getattr(engine.optimizer, "swap_optimizer", False):
                mark(swap_folder(engine, folder), also[SAVE])
        _raise_together(engine, folder, errors)
        with _noting(errors):
            if with_latest and engine.global_rank == 0:
                with complete_or_absent(latest, latest.with_suffix(".partial")) as file:
                    file.write_text(tag)
        _raise_together(engine, folder, errors)
        return result

    setattr(ordered, OURS, True)
    engine.save_checkpoint = ordered


def binder(method: Callable[..., Any]) -> Callable[..., inspect.BoundArguments]:
    """Return a function that binds the arguments of a call to their names, with defaults."""
    signature = inspect.signature(method)

    def bound(*args: Any, **kwargs: Any) -> inspect.BoundArguments:
        arguments = signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        return arguments

    return bound


def swap_folder(engine: Any, folder: Path) -> Path:
    """Return the folder of a checkpoint to which DeepSpeed copies this rank's files on NVMe."""
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    return folder / "offloaded_tensors" / f"rank{rank:02d}"


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _raise_together(engine: Any, folder: Path, errors: list[str]) -> None:
    """Wait for all ranks; raise on all of them if one has an error.

    Raises:
        RuntimeError: on all ranks.
    """
    texts = exchange_texts(_world(), engine.device, errors)
    if any(texts):
        there = folder.with_name("latest").is_file()
        words = "`latest` names the one before it" if there else "there is none that `latest` names"
        raise RuntimeError(f"{folder} was not written whole, and {words}:\n  - " + "\n  - ".join(together(texts)))


@contextlib.contextmanager
def _noting(errors: list[str]) -> Iterator[None]:
    """Collect an error instead of raising it, so that this rank takes part in the collectives that follow."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  whatever a file system or a writer raises; all ranks raise it together
        errors.append(f"{type(error).__name__}: {str(error)[:500]}")


@contextlib.contextmanager
def _files_extended(writer: Any, also: Mapping[str, Any], errors: list[str]) -> Iterator[None]:
    """Have the writer put something else into each file, and collect its errors."""

    def wrap(save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        @_noting(errors)
        def extending(state_dict: Any, path: str, *args: Any, **kwargs: Any) -> Any:
            return save({**state_dict, **also}, path, *args, **kwargs)

        return extending

    with replaced(writer, "save", wrap):
        yield


@contextlib.contextmanager
def _swap_files_noted(folder: Path, errors: list[str]) -> Iterator[None]:
    """Collect errors of `shutil.copytree`, with which DeepSpeed copies files on NVMe into a checkpoint.

    DeepSpeed asks it to refuse a folder that exists, when the files of weights have been overwritten already.
    """

    def wrap(copytree: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(copytree)
        def noting(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if not Path(target).is_relative_to(folder):
                return copytree(source, target, *args, **kwargs)
            with _noting(errors):
                return copytree(source, target, *args, **{**kwargs, "dirs_exist_ok": True})

        return noting

    with replaced(shutil, "copytree", wrap):
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Wrap a function of an object or a module within the context."""
    method = getattr(owner, name, None)
    if method is None:
        yield
        return
    own = name in vars(owner)
    setattr(owner, name, wrap(method))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, method)
        else:
            delattr(owner, name)
