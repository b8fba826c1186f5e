"""Trainer's checkpoints: which files are damaged. Their checksums are compared, and nothing of them is unpickled."""

from __future__ import annotations

import re
from pathlib import Path

from hf_muon.integrations.archives import archive_damage

# Trainer's names for what it saves beside the weights.
_FILES = ("optimizer.pt", "optimizer.bin", "scheduler.pt")


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
