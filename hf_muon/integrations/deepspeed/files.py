"""Files of a DeepSpeed checkpoint: which save wrote them, and errors that name the file.

Every file holds the random id of its save, so that a tag of which only some files were written again is not loaded.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from hf_muon.diagnostics.log import first_few

SAVE = "hf_muon_save"
BEFORE = "Resume from the checkpoint before it"
WEIGHTS = "zero_to_fp32.py, which lies beside the checkpoint"


class DamagedError(Exception):
    """A file of a checkpoint cannot be used. The text names it and says what to do."""


@contextlib.contextmanager
def using(file: Path | str) -> Iterator[None]:
    """Name the file in whatever error its content leads to.

    Raises:
        DamagedError: in place of any error.
    """
    try:
        yield
    except DamagedError:
        raise
    except Exception as error:  # what unpickling and unexpected content raise depends on the bytes
        if unsafe := re.search(r"\bGLOBAL (\S+)", str(error)):
            raise DamagedError(
                f"{file} holds an object of {unsafe[1]}, and hf_muon does not unpickle objects of any class from files "
                f"that DeepSpeed would not read itself. If you trust it: torch.serialization.add_safe_globals([...])"
            ) from error
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        raise DamagedError(f"{file} is cut off, overwritten, or no file of this rank's ({what}). {BEFORE}") from error


class Files:
    """The files of a checkpoint that this rank reads.

    Args:
        own: path of this rank's file of weights, which DeepSpeed reads first of all; it unpickles objects of any class.
            Users put what they like into it, and only classes of torch and DeepSpeed are in the files of optimizers.

    Attributes:
        saves: the id of the save that wrote each file ("" for none), a space, and the file's name.
    """

    def __init__(self, own: str = "") -> None:
        self._own = own
        self.saves: list[str] = []

    def read(self, file: Path | str) -> dict[str, Any]:
        """Read a file of torch.save. Tensors are memory-mapped.

        Raises:
            DamagedError: the file is missing, cut off or overwritten.
        """
        path = Path(file)
        if not path.is_file():
            raise DamagedError(f"{path} is missing. {BEFORE}")
        with using(path), torch.serialization.safe_globals(_classes_of_deepspeed()):
            with path.open("rb") as stream:
                is_zip = stream.read(2) == b"PK"  # torch's older format cannot be mapped
            weights_only = str(path) != self._own
            content = torch.load(path, map_location="cpu", mmap=is_zip, weights_only=weights_only)
            content["ds_version"]  # which is in every file of DeepSpeed
            self.saves.append(f"{content.get(SAVE, '')} {path.name}")
        return content  # type: ignore[no-any-return]

    def read_mark(self, folder: Path) -> None:
        """Read which save wrote the swap files in a folder."""
        file = _mark(folder)
        with using(file):
            self.saves.append(f"{file.read_text() if file.is_file() else ''} {file.name}")


def mark(folder: Path, save: str) -> None:
    """Write beside a folder of swap files which save wrote them."""
    _mark(folder).write_text(save)


def _mark(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.{SAVE}")


def mixture(folder: Path, of_ranks: Sequence[Sequence[str]]) -> list[str]:
    """Return the complaint that a folder holds files of several saves; none if all are of one.

    Args:
        folder: of the checkpoint.
        of_ranks: the saves of the files that each rank has read.
    """
    files: dict[str, dict[str, None]] = {}
    for line in chain(*of_ranks):
        save, _, name = line.partition(" ")
        files.setdefault(save, {})[name] = None
    sides = [first_few(names) for names in sorted(files.values(), key=len)]
    return [f"{folder} holds files of several saves: {'; '.join(sides)}. {BEFORE}"] if len(sides) > 1 else []


def _classes_of_deepspeed() -> list[Any]:
    """Return the classes of which DeepSpeed stores objects beside tensors."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


def stages_of(folder: Path) -> tuple[int, ...]:
    """Return the ZeRO stages that write files with such names; () if a folder holds no checkpoint."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if any(re.fullmatch(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt", name) for name in names):
        return (3,)
    if any(re.fullmatch(r"(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt", name) for name in names):
        return (1, 2)
    return (0,) if any(re.fullmatch(r"mp_rank_\d+_model_states\.pt", name) for name in names) else ()
