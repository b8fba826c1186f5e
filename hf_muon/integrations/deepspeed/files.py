"""Files of a DeepSpeed checkpoint: check the names that they were written under, and their bytes.

Every file holds its own name, so that no rank reads another rank's file. torch.save stores a CRC-32 of every tensor,
which torch.load does not compare.
"""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hf_muon.integrations.archives import archive_damage

LABEL = "hf_muon_file"
CHUNK = 1 << 22
BEFORE = "Resume from the checkpoint before it"
WEIGHTS = "zero_to_fp32.py, which lies beside the checkpoint"


class DamagedError(Exception):
    """A file of a checkpoint has changed since it was written. The text names it and says what to do."""


def labelled(content: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return the content of a file with the name under which it is written."""
    return {**content, LABEL: Path(file).name}


def read(file: str, *, checked: bool = True) -> dict[str, Any]:
    """Read a file of torch.save. Tensors are memory-mapped.

    Args:
        file: its path.
        checked: compare checksums, which reads the whole file.

    Raises:
        DamagedError: the file is missing, cut off, overwritten, or was written under another name.
    """
    path = Path(file)
    if not path.is_file():
        raise DamagedError(f"{path} is missing. {BEFORE}")
    try:
        with path.open("rb") as stream:
            is_zip = stream.read(2) == b"PK"  # torch's older format has no checksums
        if is_zip and checked and (damage := archive_damage(path)):
            raise DamagedError(f"{path} {damage}. {BEFORE}")
        content = torch.load(path, map_location="cpu", mmap=is_zip, weights_only=False)
        name = content.get(LABEL) or _archive_name(path, is_zip)
    except DamagedError:
        raise
    except Exception as error:  # what unpickling raises depends on the bytes
        raise DamagedError(
            f"{path} is cut off or overwritten ({type(error).__name__}: {str(error)[:300]}). {BEFORE}"
        ) from error
    if name != path.name:
        raise DamagedError(f"{path} was written as {name}: files were exchanged. Give them their names back")
    return content  # type: ignore[no-any-return]


def _archive_name(path: Path, is_zip: bool) -> str:
    """Return the name under which a file without a label was written: torch.save names a folder in it the same."""
    if is_zip:
        with zipfile.ZipFile(path) as archive:
            name = archive.namelist()[0].partition("/")[0]
        if re.search(r"mp_rank_\d+_(optim|model)_states$", name):  # "archive" if the path is not ASCII
            return f"{name}.pt"
    return path.name


def stages_of(folder: Path) -> tuple[int, ...]:
    """Return the ZeRO stages that write files with such names; () if a folder holds no checkpoint."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if any(re.fullmatch(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt", name) for name in names):
        return (3,)
    if any(re.fullmatch(r"(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt", name) for name in names):
        return (1, 2)
    return (0,) if any(re.fullmatch(r"mp_rank_\d+_model_states\.pt", name) for name in names) else ()


# --- swap files


def write_checksums(folder: Path) -> None:
    """Write the CRC-32 of each file in a folder to a JSON file beside it."""
    sums = {file.name: _checksum(file) for file in sorted(folder.iterdir()) if file.is_file()}
    _beside(folder).write_text(json.dumps(sums))


def read_checksums(folder: Path) -> dict[str, int]:
    """Return what `write_checksums` wrote; {} for a checkpoint of an older version.

    Raises:
        DamagedError: the file cannot be read.
    """
    file = _beside(folder)
    if not file.is_file():
        return {}
    try:
        return {str(name): int(value) for name, value in json.loads(file.read_text()).items()}
    except (ValueError, AttributeError, TypeError, OSError) as error:
        raise DamagedError(f"{file} was cut off or overwritten. {BEFORE}") from error


def check_file(file: Path, checksum: int | None) -> None:
    """Raise if a file has changed since it was written.

    Raises:
        DamagedError: its checksum differs.
    """
    if checksum is not None and _checksum(file) != checksum:
        raise DamagedError(f"{file} has changed since it was written (checksum). {BEFORE}")


def _beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.crc32.json")


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            value = zlib.crc32(chunk, value)
    return value
