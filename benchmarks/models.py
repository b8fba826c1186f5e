"""The models to measure, scaled down where they do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_muon.cli.model_source import known_configs


@dataclass(frozen=True)
class Model:
    """A published model.

    Attributes:
        fields: of the config of transformers.
        widths: the fields that are widths of layers.
        cpu_divisor: divisor of the widths on a CPU; a GPU keeps them.
        layers: number of layers to step on a CPU and on a GPU.
        experts: number of experts to keep on a CPU and on a GPU.
    """

    fields: dict[str, Any]
    widths: tuple[str, ...]
    cpu_divisor: int
    layers: tuple[int, int] = (1, 4)
    experts: tuple[int, int] = (0, 0)


MODELS = {
    "SmolLM2-135M": Model(
        {
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
        },
        ("hidden_size", "intermediate_size"),
        cpu_divisor=1,
        layers=(4, 30),
    ),
    "Qwen3-0.6B": Model(
        known_configs()["qwen3-0.6b"], ("hidden_size", "head_dim", "intermediate_size"), cpu_divisor=1, layers=(1, 28)
    ),
    "Qwen2.5-7B": Model(
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
        },
        ("hidden_size", "intermediate_size"),
        cpu_divisor=8,
    ),
    "Llama-3.1-8B": Model(known_configs()["llama-3.1-8b"], ("hidden_size", "intermediate_size"), cpu_divisor=8),
    "Qwen3-30B-A3B": Model(
        known_configs()["qwen3-30b-a3b"],
        ("hidden_size", "head_dim", "intermediate_size", "moe_intermediate_size"),
        cpu_divisor=4,
        layers=(1, 2),
        experts=(16, 128),
    ),
}


@dataclass(frozen=True)
class Layer:
    """Matrices of one shape in a model: `count` of `rows` by `columns`, as they are stored."""

    model: str
    name: str
    rows: int
    columns: int
    count: int = 1

    @property
    def key(self) -> str:
        return f"{self.count} of {self.rows}x{self.columns}" if self.count > 1 else f"{self.rows}x{self.columns}"

    @property
    def aspect(self) -> float:
        return max(self.rows, self.columns) / min(self.rows, self.columns)


# The number divides rows and columns on a CPU, so that a call takes at most a second. Each shape is listed once.
_LAYERS = (
    (1, Layer("SmolLM2-135M", "q_proj", 576, 576)),
    (1, Layer("SmolLM2-135M", "k_proj", 192, 576)),
    (1, Layer("SmolLM2-135M", "up_proj", 1536, 576)),
    (1, Layer("Qwen3-0.6B", "k_proj", 1024, 1024)),
    (1, Layer("Qwen3-0.6B", "q_proj", 2048, 1024)),
    (2, Layer("Qwen3-0.6B", "down_proj", 1024, 3072)),
    (4, Layer("Qwen2.5-7B", "q_proj", 3584, 3584)),
    (1, Layer("Qwen2.5-7B", "k_proj", 512, 3584)),
    (8, Layer("Qwen2.5-7B", "up_proj", 18944, 3584)),
    (8, Layer("Llama-3.1-8B", "q_proj", 4096, 4096)),
    (2, Layer("Llama-3.1-8B", "k_proj", 1024, 4096)),
    (8, Layer("Llama-3.1-8B", "down_proj", 4096, 14336)),
    (2, Layer("Qwen3-30B-A3B", "expert down_proj", 2048, 768, 128)),
    (1, Layer("Qwen3-30B-A3B", "k_proj", 512, 2048)),
)


def layers(device: str, quick: bool) -> list[tuple[int, Layer]]:
    """Return the layers to measure orthogonalization on, each with the divisor of its rows and columns."""
    by_shape: dict[str, tuple[int, Layer]] = {}
    for cpu_divisor, layer in _LAYERS:
        divisor = 32 if quick else cpu_divisor if device == "cpu" else 1
        count = layer.count
        if count > 1:
            count = 2 if quick else 8 if device == "cpu" else count
        small = Layer(layer.model, layer.name, layer.rows // divisor, layer.columns // divisor, count)
        by_shape.setdefault(small.key, (divisor, small))
    rows = list(by_shape.values())
    return [rows[0], rows[2]] if quick else rows


def scaled_config(name: str, device: str, quick: bool) -> tuple[Any, str]:
    """Return a config that fits the device, and a text that says what is smaller in it.

    The vocabulary shrinks with the layers, so that Muon and AdamW keep their shares of the parameters.

    Args:
        name: of the model.
        device: ``cpu`` or ``cuda``.
        quick: whether to make it tiny.
    """
    import transformers

    model = MODELS[name]
    on_cpu = device == "cpu"
    divisor = 32 if quick else model.cpu_divisor if on_cpu else 1
    layers = 1 if quick else model.layers[0 if on_cpu else 1]
    whole = model.fields["num_hidden_layers"]
    changed = {field: max(4, model.fields[field] // divisor) for field in model.widths}
    changed["num_hidden_layers"] = layers
    changed["vocab_size"] = max(64, model.fields["vocab_size"] * layers // (whole * divisor))
    smaller = model.fields["vocab_size"] // changed["vocab_size"]
    what = f"widths / {divisor}, {layers} of {whole} layers, vocabulary / {smaller}"
    if "num_experts" in model.fields:
        experts = 4 if quick else model.experts[0 if on_cpu else 1]
        changed |= {"num_experts": experts, "num_experts_per_tok": min(experts, 8)}
        what += f", {experts} of {model.fields['num_experts']} experts"
    return transformers.AutoConfig.for_model(**{**model.fields, **changed}), what


def build(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return the model of a config, with random weights."""
    import transformers

    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def on_meta(config: Any) -> Any:
    """Return the model of a config on the meta device, with gradients."""
    with torch.device("meta"):
        model = build(config)
    for param in model.parameters():
        param.grad = torch.empty_like(param)
    return model
