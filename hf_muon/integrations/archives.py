"""Write files completely or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def complete_or_absent(target: Path) -> Iterator[Path]:
    """Yield a temporary file in the folder of `target`; it replaces `target` when it is complete and on disk.

    After an error, `target` is as it was, and the temporary file is gone.
    """
    target = target.absolute()  # "." has no name
    # In the same folder, because os.replace does not move between file systems.
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    # Never an existing file: in a shared folder it might be another user's link to a file of yours.
    temporary.touch(exist_ok=False)
    try:
        yield temporary
        # Else a crash of the machine may leave the new name with an empty file.
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
