"""Files that are written completely or not at all, and archives of `torch.save` that have changed since."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_CHUNK = 1 << 22


def archive_damage(file: Path | IO[bytes]) -> str | None:
    """Read an archive to its end, and return what is wrong with it; None for an intact one.

    torch.load itself compares no checksums.
    """
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


@contextlib.contextmanager
def complete_or_absent(target: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a temporary file beside `target` to write to; it replaces `target` when it is complete and on disk.

    After an error, `target` is as it was, and the temporary file is gone.
    """
    temporary = temporary or target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
