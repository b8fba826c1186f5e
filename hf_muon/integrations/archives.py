"""Write files completely or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def complete_or_absent(target: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a temporary file in the folder of `target`; it replaces `target` when it is complete and on disk.

    After an error, `target` is as it was, and the temporary file is gone.
    """
    target = target.absolute()  # "." has no name
    temporary = temporary or target.with_name(f".{target.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.touch(exist_ok=False)  # or it might be another user's link to a file of yours
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
