"""Quantized checkpoints: how they are quantized, and what a run can train of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_muon.routing.model_facts import text_config_of

if TYPE_CHECKING:
    from torch import nn

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
    for part in (config, text_config_of(config)):
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
    if section and isinstance(section, Mapping):
        return Quantization("bitsandbytes", _bits(section.get("quantization_bit") or 4), "quant_config")
    for key, bits in (("quantization_bit", None), ("load_in_4bit", 4), ("load_in_8bit", 8)):
        if settings.get(key):
            method = str(settings.get("quantization_method", "bitsandbytes") if bits is None else "bitsandbytes")
            return Quantization(method, _bits(settings[key]) if bits is None else bits, f"{key}: {settings[key]}")
    return None


def _bits(value: Any) -> int:
    return int(value) if str(value).isdigit() else 0


def freeze_quantized(
    name: str, model: nn.Module, quantization: Quantization | None, notes: list[str], complete: bool = True
) -> list[str]:
    """Freeze the weights of a quantized model; return why a run of it would be refused, if it has no adapters.

    Args:
        name: of the model, for people.
        model: with its adapters.
        quantization: of its weights; None where they can be trained.
        notes: gets what a reader should know.
        complete: whether the model has all adapters of the run.
    """
    from peft import PeftModel

    if quantization is None:
        return []
    adapted = isinstance(model, PeftModel)
    if not adapted:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    if adapted or not complete:  # such as oft, LLaMA-Factory's QOFT
        notes.append(f"{name} is quantized {quantization}: its own weights are frozen")
        return []
    advice = "Train LoRA factors over it (finetuning_type: lora in LLaMA-Factory; lora=muon gives them to Muon), or "
    if quantization.setting:
        advice += f"remove {quantization.setting}"
    else:
        advice += "name a checkpoint that is not; --dequantize shows what loading it with dequantize=True gives"
    return [f"{name} is quantized {quantization}: its weights cannot be trained. {advice}"]
