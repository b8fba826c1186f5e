"""What a training file says about the memory of a run: micro-batches, checkpointing, the dtype of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from hf_muon.integrations.transformers.training_file import is_llamafactory, read_training_file

_LENGTHS = ("cutoff_len", "max_length", "max_seq_length", "block_size")


class RunSizes(NamedTuple):
    """Of the command line, else of a training file, else the defaults of `hf-muon plan`.

    Attributes:
        batch_size: sequences in a micro-batch on a rank.
        sequence_length: tokens in each of them.
        gradient_checkpointing: whether layers are recomputed.
        dtype: of the trained weights, `fp32` or `bf16`.
    """

    batch_size: int = 1
    sequence_length: int = 2048
    gradient_checkpointing: bool = False
    dtype: str = "fp32"


def sizes_of(source: str, options: dict[str, Any]) -> RunSizes:
    """Return the sizes of a run.

    Args:
        source: of the command; a model, or a training file.
        options: fields of `RunSizes` from the command line; None where it does not say.
    """
    stated = {}
    path = Path(source).expanduser()
    if path.suffix in (".yaml", ".yml") and path.is_file():
        stated = _stated(read_training_file(path))
    return RunSizes(**{**stated, **{name: value for name, value in options.items() if value is not None}})


def _stated(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what a file says, and LLaMA-Factory's default of checkpointing."""
    stated: dict[str, Any] = {}
    if isinstance(batch := settings.get("per_device_train_batch_size"), int):
        stated["batch_size"] = batch
    lengths = (settings[name] for name in _LENGTHS if isinstance(settings.get(name), int))
    if (length := next(lengths, None)) is not None:
        stated["sequence_length"] = length
    if is_llamafactory(settings):
        stated["gradient_checkpointing"] = settings.get("disable_gradient_checkpointing") is not True
    elif "gradient_checkpointing" in settings:
        stated["gradient_checkpointing"] = settings["gradient_checkpointing"] is True
    if settings.get("pure_bf16") is True:
        stated["dtype"] = "bf16"
    return stated
