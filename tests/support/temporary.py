"""One folder for all temporary files of a run of the tests, those of its processes too; the end of the run deletes it.

`pytest --basetemp=FOLDER` keeps the files of tests elsewhere, to look at.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

_PREFIX = "hf_muon_tests_"


def use_own_folder() -> None:
    """Make the folder, and delete those of runs that were killed. A worker of pytest-xdist uses that of its run."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    outer = Path(tempfile.gettempdir())
    for other in outer.glob(f"{_PREFIX}*"):
        if not _runs(int(other.name.removeprefix(_PREFIX))):
            shutil.rmtree(other, ignore_errors=True)
    folder = outer / f"{_PREFIX}{os.getpid()}"
    folder.mkdir(exist_ok=True)
    # After multiprocessing has deleted its own files, which has the priority -100.
    Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-200)
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None  # look at TMPDIR again


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
