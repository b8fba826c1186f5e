"""Quantized checkpoints: how they are quantized, and what a run can train of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# What LLaMA-Factory v0 dequantizes when it loads a checkpoint.
DEQUANTIZED_BY_LLAMAFACTORY = ("fp8", "mxfp4")


@dataclass(frozen=True)
class Quantization:
    """How weights are quantized once a model is loaded.

    Attributes:
        method: as transformers calls it, such as bitsandbytes, gptq, awq or fp8.
        bits: of a weight, 0 where that is not said.
        setting: the setting of a training file that asks for it; empty for a quantized checkpoint.
    """

    method: str
    bits: int = 0
    setting: str = ""

    def __str__(self) -> str:
        how = f"({self.method}, {self.bits} bits)" if self.bits else f"({self.method})"
        return f"by {self.setting} {how}" if self.setting else how


def quantization_of_checkpoint(config: Any) -> Quantization | None:
    """Return how a checkpoint is quantized; None where its weights are not, or are dequantized when they are loaded.

    Args:
        config: of the model, as transformers' AutoConfig reads it.
    """
    for part in (config, config.get_text_config()):
        section = getattr(part, "quantization_config", None)
        if section is None:
            continue
        section = section if isinstance(section, Mapping) else section.to_dict()
        if section.get("dequantize") is True:
            return None
        method = str(section.get("quant_method") or "a method that its configuration does not name")
        bits = section.get("bits") or next((n for n in (4, 8) if section.get(f"load_in_{n}bit")), 0)
        return Quantization(method.rpartition(".")[2].lower(), bits if isinstance(bits, int) else 0)
    return None


def quantization_of_run(settings: Mapping[str, Any]) -> Quantization | None:
    """Return how a training file has weights quantized while they are loaded; None where it does not."""
    section = settings.get("quant_config")  # LLaMA-Factory v1, which knows bitsandbytes alone
    if isinstance(section, Mapping):
        return Quantization("bitsandbytes", _bits(section.get("quantization_bit") or 4), "quant_config")
    for key, bits in (("quantization_bit", None), ("load_in_4bit", 4), ("load_in_8bit", 8)):
        if settings.get(key):
            method = str(settings.get("quantization_method", "bitsandbytes") if bits is None else "bitsandbytes")
            return Quantization(method, _bits(settings[key]) if bits is None else bits, f"{key}: {settings[key]}")
    return None


def _bits(value: Any) -> int:
    return int(value) if str(value).isdigit() else 0
