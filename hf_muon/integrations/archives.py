"""Archives that `torch.save` has written: which are truncated, and which have changed since."""

from __future__ import annotations

import zipfile
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
