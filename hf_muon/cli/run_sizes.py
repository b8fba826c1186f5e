"""The sizes that decide about the memory of a run: micro-batches, checkpointing, the dtype of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_muon.integrations.transformers.training_file import (
    is_llamafactory,
    is_llamafactory_v1,
    is_trl_sft,
    read_training_file,
)
from hf_muon.routing.model_facts import text_config_of

if TYPE_CHECKING:
    from torch import nn

_LENGTHS = ("cutoff_len", "max_length", "max_seq_length", "block_size")
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Names of stored dtypes, by torch's."""


class RunSizes(NamedTuple):
    """Of the command line, else of a training file, else the defaults of `hf-muon plan`.

    Attributes:
        batch_size: sequences in a micro-batch on a rank.
        sequence_length: tokens in each of them.
        gradient_checkpointing: whether layers are recomputed.
        dtype: of the trained weights, one of `DTYPES`.
    """

    batch_size: int = 1
    sequence_length: int = 2048
    gradient_checkpointing: bool = False
    dtype: str = "fp32"


def sizes_of(source: str, model: nn.Module, layout: str, options: Mapping[str, Any]) -> RunSizes:
    """Return the sizes of a run.

    Args:
        source: of the command; a model, or a training file.
        model: that it describes.
        layout: of the run.
        options: fields of `RunSizes` from the command line; None where it does not say.
    """
    path, settings = Path(source).expanduser(), {}
    if path.suffix in (".yaml", ".yml") and path.is_file():
        settings = read_training_file(path)
    stated = {**_stated(settings), "dtype": _stored_dtype(settings, model, layout)}
    return RunSizes(**{**stated, **{name: value for name, value in options.items() if value is not None}})


def _stated(settings: Mapping[str, Any]) -> dict[str, Any]:
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
    return stated


def _stored_dtype(settings: Mapping[str, Any], model: nn.Module, layout: str) -> str:
    """Return the dtype in which a run stores the weights that it trains."""
    if hasattr(model, "peft_config"):
        return "fp32"  # peft's factors
    if is_llamafactory(settings) or is_llamafactory_v1(settings):
        return "bf16" if settings.get("pure_bf16") is True else "fp32"
    if layout in ("fsdp", "hsdp") and (settings.get("bf16") is True or settings.get("fp16") is True):
        return "fp32"  # accelerate's mixed precision under FSDP2
    keywords = settings.get("model_init_kwargs")
    for section in (settings, keywords if isinstance(keywords, Mapping) else {}):
        dtype = section.get("dtype", section.get("torch_dtype"))
        if dtype not in (None, "auto"):
            return _named(dtype)
    if is_trl_sft(settings) and "dtype" not in settings:
        return "fp32"  # the default of its command line
    config: Any = model.config
    return _named(config.dtype or text_config_of(config).dtype or "float32")


def _named(dtype: Any) -> str:
    """Return the name of a stored dtype.

    Raises:
        ValueError: a dtype in which no weights are trained.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype: {dtype} is not a dtype of trained weights. Valid: {', '.join(DTYPES)}")
    return DTYPES[name]
