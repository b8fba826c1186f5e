"""Files of a checkpoint that are cut off or have changed, by the checksums that torch has written into them."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

# Trainer's names for what it saves besides the weights; FSDP2 writes a file, or a folder of shards.
_FILES = ("optimizer.pt", "optimizer.bin", "scheduler.pt")
_FOLDERS = "optimizer_*"
_CHUNK = 1 << 22


def damaged_files(checkpoint: Path) -> list[str]:
    """Damaged files of a Trainer checkpoint's optimizer and scheduler, each with what is wrong with it.

    Every byte is read: this is for explaining a load that has failed.
    """
    found = [(path, archive_damage(path)) for name in _FILES if (path := checkpoint / name).is_file()]
    for folder in sorted(checkpoint.glob(_FOLDERS)):
        if folder.is_dir():
            found += _shards(folder)
    return [f"{path} {damage}" for path, damage in found if damage]


def earlier_checkpoint(checkpoint: Path) -> Path | None:
    """The newest of Trainer's checkpoints before this one."""
    steps = {}
    for path in checkpoint.absolute().parent.glob("checkpoint-*"):
        if match := re.fullmatch(r"checkpoint-(\d+)", path.name):
            steps[int(match[1])] = path
    own = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    before = [step for step in steps if own and step < int(own[1])]
    return steps[max(before)] if before else None


def _shards(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """The shards of torch.distributed.checkpoint: files with one archive after the other."""
    metadata = folder / ".metadata"
    try:
        with metadata.open("rb") as file:
            pieces: list[Any] = list(pickle.load(file).storage_data.values())  # as torch has read it before us
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


def archive_damage(file: Path | IO[bytes]) -> str | None:
    """Say what is wrong with an archive that `torch.save` has written; all of it is read."""
    changed = None
    try:
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                if record.CRC == 0:  # none, after torch.serialization.set_crc32_options(False)
                    continue
                with archive.open(record) as data:
                    changed = record.filename
                    while data.read(_CHUNK):
                        pass
                    changed = None
    except (zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
        if changed and "CRC" in str(error):
            return f"has changed since it was written (checksum of {changed})"
        return f"is cut off or overwritten ({error})"
    return None
