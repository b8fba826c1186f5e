"""Trainer's checkpoints: which files are damaged, and whether the moments were loaded."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_muon.diagnostics.log import is_rank_zero, logger
from hf_muon.integrations.archives import archive_damage

# Trainer's names for what it saves beside the weights; FSDP2 writes a file, or a folder of shards.
_FILES = ("optimizer.pt", "optimizer.bin", "scheduler.pt")
_FOLDERS = "optimizer_*"


def explain_damage(checkpoint: Path, error: BaseException) -> None:
    """Raise a better error than `error`, with which a load has failed, if files of the checkpoint are damaged.

    Raises:
        RuntimeError: the damaged files, and the checkpoint to resume from instead.
    """
    if damage := damaged_files(checkpoint):
        earlier = earlier_checkpoint(checkpoint)
        raise RuntimeError(
            f"This checkpoint is damaged: {'; '.join(damage)}. Resume from "
            f"{f'the one before it, {earlier}' if earlier else 'another one'}, and remove this one."
        ) from error


def damaged_files(checkpoint: Path) -> list[str]:
    """Return the damaged files of a checkpoint's optimizer and scheduler, each with what is wrong with it.

    Reads every byte: call it to explain a load that has failed.
    """
    checks = [(path, archive_damage(path)) for name in _FILES if (path := checkpoint / name).is_file()]
    for folder in sorted(checkpoint.glob(_FOLDERS)):
        if folder.is_dir():
            checks += _check_shards(folder)
    return [f"{path} {damage}" for path, damage in checks if damage]


def earlier_checkpoint(checkpoint: Path) -> Path | None:
    """Return the newest of Trainer's checkpoints before this one."""
    steps = {}
    for path in checkpoint.absolute().parent.glob("checkpoint-*"):
        if match := re.fullmatch(r"checkpoint-(\d+)", path.name):
            steps[int(match[1])] = path
    own = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    before = [step for step in steps if own and step < int(own[1])]
    return steps[max(before)] if before else None


def _check_shards(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield each file of a torch.distributed.checkpoint, which is a row of archives, and what is wrong with it."""
    metadata = folder / ".metadata"
    try:
        with metadata.open("rb") as file:
            pieces: list[Any] = list(pickle.load(file).storage_data.values())  # torch has unpickled it before us
    except Exception as error:  # noqa: BLE001  what unpickling raises depends on the bytes
        yield metadata, f"cannot be read ({type(error).__name__})"
        return
    for name in sorted({piece.relative_path for piece in pieces}):
        path = folder / name
        if not path.is_file():
            yield path, "is missing"
            continue
        damage = None
        with path.open("rb") as file:
            for piece in sorted((p for p in pieces if p.relative_path == name), key=lambda piece: int(piece.offset)):
                file.seek(piece.offset)
                content = file.read(piece.length)
                damage = damage or (
                    "is cut off" if len(content) < piece.length else archive_damage(io.BytesIO(content))
                )
        yield path, damage


def warn_of_fresh_moments(optimizer: Any, checkpoint: Any) -> None:
    """Log on rank 0 that a run was resumed without its moments, which Trainer does not mention."""
    muon = muon_inside(optimizer)
    if muon is None or any(group["step"] for group in muon.param_groups) or not is_rank_zero():
        return
    logger().warning(
        "the moments start from zero: Trainer has loaded no optimizer state from %s (it needs optimizer.pt, or "
        "FSDP's optimizer.bin or optimizer_0, and scheduler.pt). The run differs from one that was not interrupted",
        checkpoint,
    )


def muon_inside(optimizer: Any) -> Any:
    """Return the `Muon` inside the wrappers of accelerate and of ZeRO; None where there is none."""
    from hf_muon.optimizer.muon import Muon

    while optimizer is not None and not isinstance(optimizer, Muon):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer
