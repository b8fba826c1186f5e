"""Small models of transformers whose heads are laid out differently, and one head of each made larger by hand."""

from __future__ import annotations

import contextlib

import torch
import transformers

VOCABULARY, LENGTH = 64, 64
_COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_COMMON |= {"num_attention_heads": 4, "max_position_embeddings": LENGTH}
_MLA = {"num_key_value_heads": 4, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8}
_MLA |= {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_MLA |= {"first_k_dense_replace": 2}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
_GPT2 |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}

MODELS = {
    "llama": ("Llama", {"num_key_value_heads": 2, "head_dim": 8}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "pad_token_id": 0}),
    "neox": ("GPTNeoX", _NO_DROPOUT),
    "gpt2": ("GPT2", _GPT2),
    "deepseek": ("DeepseekV3", {**_MLA, "q_lora_rank": 12}),
    "deepseek-whole": ("DeepseekV3", {**_MLA, "q_lora_rank": None}),
}
"""By name: transformers' class, and its options."""


def make(name, attention="eager", seed=0, **options):
    """Return a model of `MODELS` in training mode, with biases that are not zero."""
    kind, own = MODELS[name]
    settings = own if kind == "GPT2" else {**_COMMON, **own}
    config = getattr(transformers, f"{kind}Config")(**settings, attn_implementation=attention, **options)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM" if kind != "GPT2" else "GPT2LMHeadModel")(config)
    with torch.no_grad():
        for parameter_name, param in model.named_parameters():
            if "norm" not in parameter_name and "ln_" not in parameter_name:
                param.normal_(0, 0.1)
    return model.train()


def head_rows(model, name, layer, head):
    """Return the weights and biases, ``(out, ...)``, of one query head and of its key, each with its rows.

    Returns:
        Triples of a tensor whose first dim is the output, rows, and a share: the root of the factor of logits that
        these rows get.
    """
    base = model.base_model
    if name == "gpt2":
        attn = base.h[layer].attn.c_attn
        tensors = (attn.weight.T, attn.bias)
        return [(t, slice(32 * part + 8 * head, 32 * part + 8 * head + 8), 1) for t in tensors for part in (0, 1)]
    attn = base.layers[layer].attention if name == "neox" else base.layers[layer].self_attn
    if name == "neox":
        fused = attn.query_key_value
        parts = [slice(24 * head + 8 * part, 24 * head + 8 * part + 8) for part in (0, 1)]
        return [(t, rows, 1) for t in (fused.weight, fused.bias) for rows in parts]
    if name == "phi3":
        return [(attn.qkv_proj.weight, slice(8 * head, 8 * head + 8), 2)]
    if name.startswith("deepseek"):
        query = attn.q_proj if name == "deepseek-whole" else attn.q_b_proj
        return [
            (query.weight, slice(10 * head, 10 * head + 6), 1),
            (query.weight, slice(10 * head + 6, 10 * head + 10), 2),
            (attn.kv_b_proj.weight, slice(14 * head, 14 * head + 6), 1),
        ]
    tensors = [attn.q_proj.weight] + ([attn.q_proj.bias] if attn.q_proj.bias is not None else [])
    return [(t, slice(8 * head, 8 * head + 8), 2) for t in tensors]


def enlarge(model, name, layer, head, factor):
    """Multiply the logits of one head."""
    with torch.no_grad():
        for tensor, rows, share in head_rows(model, name, layer, head):
            tensor[rows] *= factor ** (share / 2)


def tokens(seed, batch=3, length=12):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def logits_before_softmax():
    """Yield a list to which each eager attention adds the largest of its logits, ``(H,)``, one by one."""
    largest = []
    softmax = torch.nn.functional.softmax

    def recording(logits, *args, **kwargs):
        if logits.ndim == 4:
            lowest = torch.finfo(logits.dtype).min / 2
            of_heads = []
            for head in logits.detach().unbind(1):
                of_heads.append(max(float(x) for x in head.flatten() if float(x) > lowest))
            largest.append(torch.tensor(of_heads))
        return softmax(logits, *args, **kwargs)

    torch.nn.functional.softmax = recording
    try:
        yield largest
    finally:
        torch.nn.functional.softmax = softmax


def backward(model, ids):
    """Compute gradients, and return the largest logits of each layer."""
    with logits_before_softmax() as largest:
        model(input_ids=ids, labels=ids).loss.backward()
    return largest
