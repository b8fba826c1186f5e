"""FLOPs of the forward and backward pass, and for decoders an estimate of the memory of activations.

Per token, with hidden size h, query and key-value widths q and v, MLP width f, and c bytes per element (2 for bf16), a
layer of transformers' Llama family saves ``2 (4 + c) h`` for its norms, which compute in fp32, ``2 c h`` for the inputs
of its projections, ``c (2 q + 2 v)`` for flash or memory-efficient attention, which saves no scores, and ``4 c f`` for
a gated MLP; ``(4 + c) (q + v)`` more if queries and keys have norms. Under autocast the residual stream is fp32, and
each projection saves its own copy of the input and one of its weight. With gradient checkpointing a layer saves only
its input, and one layer at a time is recomputed. transformers computes the loss from fp32 logits: for a vocabulary of
size V the backward pass holds the log-probabilities and two gradients at once, ``12 V``, the peak for large
vocabularies.

Source: Korthikanti et al., https://arxiv.org/abs/2205.05198, section 4, whose count for GPT (34 s b h and scores) is
repeated here for the operations of these models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from hf_muon.routing.model_facts import expert_counts, text_config_of

_BYTES_PER_LOGIT = 12
_BYTES_OF_NORM = 14  # per element, in the backward pass of an RMSNorm
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")


@dataclass(frozen=True)
class Activations:
    """Bytes of the activations of one micro-batch on a rank.

    Attributes:
        saved: at the end of the forward pass, without the logits.
        loss: the most that the loss needs in the forward pass: the logits, the same in fp32, and log-probabilities.
        logits: the most that the loss needs in the backward pass.
        layer: what recomputing a layer needs, and its largest gradients.
        copies: autocast's copies of weights, which live until the end of the forward pass.
        saved_copies: those of them that the backward pass needs.
    """

    saved: int
    loss: int
    logits: int
    layer: int
    copies: int = 0
    saved_copies: int = 0

    @property
    def peak(self) -> int:
        """The most bytes at once: in the forward pass, at the loss, or in the backward pass of a layer."""
        return self.saved + max(self.copies + self.loss, self.saved_copies + max(self.logits, self.layer))


@dataclass(frozen=True)
class _Layer:
    """Bytes per token: what a layer saves, its input, and the largest gradients inside."""

    saved: int
    hidden: int
    gradients: int


class _UnknownModelError(Exception):
    """The model has a module that the estimate does not support."""


def estimate_activations(
    model: nn.Module, tokens: int, dtype: torch.dtype, *, autocast: bool = False, checkpointing: bool = False
) -> Activations | None:
    """Estimate the bytes of activations; None for a model other than the supported decoders.

    Args:
        model: a decoder as in transformers' Llama, Mistral, Qwen2, Qwen3 or Qwen3-MoE, adapters included.
        tokens: tokens of a micro-batch on a rank: batch size times sequence length.
        dtype: the dtype in which the model computes.
        autocast: whether the weights are fp32 and autocast computes in `dtype`.
        checkpointing: whether every layer is recomputed in the backward pass.
    """
    compute = dtype.itemsize
    residual = 4 if autocast else compute
    try:
        layer_modules = [module for module in model.modules() if _is_layer(module)]
        layers = [_layer(model, module, compute, residual) for module in layer_modules]
        hidden, vocabulary = _outside(model, layer_modules)
    except _UnknownModelError:
        return None
    if not layers:
        return None
    # The last norm, and the input of the head.
    saved = _norm(hidden, 1, residual) + compute * hidden
    saved += sum(layer.hidden if checkpointing else layer.saved for layer in layers)
    if checkpointing:
        largest = max(layer.saved + layer.gradients for layer in layers)
    else:
        largest = max(_BYTES_OF_NORM * hidden, *(layer.gradients for layer in layers))
    copies = autocast_copies(model, dtype) if autocast else 0
    of_layers = sum(autocast_copies(layer, dtype) for layer in layer_modules) if copies and checkpointing else 0
    of_layer = max(autocast_copies(layer, dtype) for layer in layer_modules) if of_layers else 0
    return Activations(
        saved=saved * tokens,
        # Logits in the dtype of the model, and if that is not fp32 a copy in fp32; then the log-probabilities in fp32.
        loss=(compute % 4 + 8) * vocabulary * tokens,
        logits=_BYTES_PER_LOGIT * vocabulary * tokens,
        layer=largest * tokens + of_layer,
        copies=copies,
        saved_copies=copies - of_layers,
    )


def autocast_copies(module: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of the copies that autocast makes of linear layers' weights."""
    weights = {id(m.weight): m.weight for m in module.modules() if isinstance(m, nn.Linear)}
    return sum(weight.numel() * dtype.itemsize for weight in weights.values())


def _is_layer(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in ("self_attn", "mlp"))


def _layer(model: nn.Module, layer: nn.Module, compute: int, residual: int) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(attention, nn.Module)
    assert isinstance(mlp, nn.Module)
    _expect(attention, {*_ATTENTION, "q_norm", "k_norm"})
    hidden, queries = _features(attention, "q_proj")
    _, keys = _features(attention, "k_proj")
    norms = [m for name, m in layer.named_children() if name not in ("self_attn", "mlp") and _numel(m)]
    if any(_numel(norm) != hidden for norm in norms):
        raise _UnknownModelError
    copies = (3, 1 if hasattr(mlp, "experts") else 2) if residual > compute else (1, 1)  # inputs of attention and MLP
    saved = len(norms) * _norm(hidden, 1, residual) + sum(copies) * compute * hidden
    head_size = getattr(attention, "head_dim", 0) or queries
    saved += compute * (2 * queries + 2 * keys) + 4 * queries // head_size  # and the log-sum-exp of each head
    for norm, width in (("q_norm", queries), ("k_norm", keys)):
        if isinstance(getattr(attention, norm, None), nn.Module):
            saved += _norm(width, width // head_size, compute)
    inner, gradients = _mlp(model, mlp, hidden, compute, residual)
    # peft casts the input of each LoRA layer to the dtype of the factors, fp32.
    adapted = sum(4 * m.in_features for m in layer.modules() if hasattr(m, "lora_A"))  # type: ignore[misc, operator]
    return _Layer(saved + inner + adapted, residual * hidden, gradients + 2 * residual * hidden)


def _norm(width: int, rows: int, itemsize: int) -> int:
    """Return the bytes that RMSNorm saves: the fp32 input, the normalized one, and a factor for each row."""
    return (4 + itemsize) * width + 4 * rows


def _mlp(model: nn.Module, mlp: nn.Module, hidden: int, compute: int, residual: int) -> tuple[int, int]:
    """Return the bytes per token that an MLP or a mixture of experts saves, and those of its largest gradients."""
    if not hasattr(mlp, "experts"):
        _expect(mlp, set(_MLP))
        width = _features(mlp, "gate_proj")[1]
        return 4 * compute * width, compute * width
    experts = mlp.experts
    assert isinstance(experts, nn.Module)
    _expect(mlp, {"experts", "gate"})
    stack = getattr(experts, "gate_up_proj", None)
    routed = experts_per_token(model)
    if not isinstance(stack, torch.Tensor) or stack.ndim != 3 or not routed:
        raise _UnknownModelError
    width = math.prod(stack.shape[1:]) // hidden // 2
    # autocast does not affect grouped_mm: it computes in the dtype of the weights. Its input and output, gate and
    # up, the activation and the product; then indices of tokens, and fp32 probabilities of all experts.
    saved = routed * residual * (2 * hidden + 4 * width) + routed * (4 * 8 + compute) + 4 * stack.shape[0]
    return saved, routed * residual * (hidden + width)


def _outside(model: nn.Module, layers: list[nn.Module]) -> tuple[int, int]:
    """Return hidden size and vocabulary of a model of layers, embeddings, a norm and a head, and no other modules."""
    inside = {id(p) for layer in layers for p in layer.parameters()}
    embeddings = {id(m.weight): m for m in model.modules() if isinstance(m, (nn.Embedding, nn.Linear))}
    matrices = []
    for name, parameter in model.named_parameters():
        if id(parameter) in inside or parameter.ndim < 2 or "lora_" in name:
            continue
        if id(parameter) not in embeddings:
            raise _UnknownModelError
        matrices.append(parameter)
    if not 1 <= len(matrices) <= 2 or len({matrix.shape for matrix in matrices}) > 1:
        raise _UnknownModelError
    return matrices[0].shape[1], matrices[0].shape[0]


def _expect(module: nn.Module, names: set[str]) -> None:
    """Raise an error if a module has weights under other names."""
    if any(name not in names and _numel(child) for name, child in module.named_children()):
        raise _UnknownModelError


def _features(module: nn.Module, name: str) -> tuple[int, int]:
    linear = getattr(module, name, None)
    try:
        return int(linear.in_features), int(linear.out_features)  # type: ignore[union-attr]
    except AttributeError:
        raise _UnknownModelError from None


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for name, parameter in module.named_parameters() if "lora_" not in name)


def model_flops(model: nn.Module) -> int:
    """Return the FLOPs of a model's products with weights, for one token, forward and backward.

    Per weight: 2 forward, 2 for the input's gradient, and, if it is trained, 2 for its own gradient. Only the experts
    to which a token is routed count. An input embedding is looked up, not multiplied.
    """
    config = text_config_of(getattr(model, "config", None))
    experts = next(iter(expert_counts(config)), 0)
    routed = experts_per_token(model) or experts
    tied = bool(getattr(config, "tie_word_embeddings", False))
    looked_up = (
        {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} if not tied else set()
    )
    total = 0
    for name, param in model.named_parameters():
        if param.ndim < 2 or id(param) in looked_up:
            continue
        numel = param.numel()
        if experts and "experts." in name and "shared" not in name:
            numel = numel * routed // experts
        total += numel * (6 if param.requires_grad else 4)
    return total


def experts_per_token(model: nn.Module) -> int:
    """Return the number of experts per token; 0 if it is not in the model's configuration."""
    config = text_config_of(getattr(model, "config", None))
    return next((n for name in _EXPERTS_PER_TOKEN if isinstance(n := getattr(config, name, None), int)), 0)
