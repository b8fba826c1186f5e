"""Runs of models whose weights have other names on disk resume exactly, and end with the best weights."""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from tests.integrations.plain_script import InOrder, dataset
from tests.integrations.trainer_runs import train

pytestmark = pytest.mark.every_stack

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
IMAGES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
KINDS = {
    "Qwen3Moe": {**SIZES, **EXPERTS, "head_dim": 8},
    "Mixtral": {**SIZES, "num_local_experts": 4},
    "Qwen2_5_VL": {
        "text_config": {**SIZES, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 32,
        },
    },
    "Llava": {
        "text_config": {"model_type": "llama", **SIZES},
        "vision_config": {**IMAGES, "image_size": 16, "patch_size": 8},
    },
    "T5": {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4},
}
HEADS = {"Qwen3Moe": "ForCausalLM", "Mixtral": "ForCausalLM"}


def make(kind):
    torch.manual_seed(0)
    options = dict(KINDS[kind])
    if kind == "Llava":
        options["vision_config"] = transformers.CLIPVisionConfig(**options["vision_config"])
        options["text_config"] = transformers.LlamaConfig(**SIZES)
    config = getattr(transformers, f"{kind}Config")(**options)
    if kind == "T5":
        config.decoder_start_token_id = config.pad_token_id
    return getattr(transformers, kind + HEADS.get(kind, "ForConditionalGeneration"))(config)


def weights(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def is_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.promise("exact-resume")
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_bit_exact(kind, tmp_path):
    straight, resumed = make(kind), make(kind)
    train(straight, tmp_path, save_strategy="steps", save_steps=3, optim_args="ns_dtype=fp32")
    train(resumed, tmp_path / "on", resume=str(tmp_path / "checkpoint-3"), optim_args="ns_dtype=fp32")
    assert is_equal(weights(straight), weights(resumed))


@pytest.mark.parametrize("kind", ["Qwen3Moe", "T5"])
def test_the_best_model_has_the_weights_of_its_step(kind, tmp_path):
    kept = {}

    class Keep(TrainerCallback):
        def on_save(self, args, state, control, model=None, **kwargs):
            kept[state.global_step] = weights(model)

    class SecondIsBest(InOrder):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, eval_dataset=dataset(4), **kwargs)
            self.add_callback(Keep())

        def evaluate(self, *args, **kwargs):
            metrics = {"eval_loss": abs(self.state.global_step - 2.0)}
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    model = make(kind)
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 4}
    train(model, tmp_path, trainer_class=SecondIsBest, load_best_model_at_end=True, **options)
    assert is_equal(weights(model), kept[2])
    assert not is_equal(weights(model), kept[4])


def test_a_weight_that_is_in_no_file_is_an_error(tmp_path):
    train(make("Qwen3Moe"), tmp_path, save_strategy="steps", save_steps=3)
    file = tmp_path / "checkpoint-3" / "model.safetensors"
    stored = load_file(file)
    save_file({name: value for name, value in stored.items() if "layers.1.mlp" not in name}, file, {"format": "pt"})
    with pytest.raises(RuntimeError, match=r"it has no .*layers\.1\.mlp.*\[weights-not-loaded\]"):
        train(make("Qwen3Moe"), tmp_path / "on", resume=str(tmp_path / "checkpoint-3"))


def test_other_optimizers_load_as_transformers_does(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.Qwen3MoeForCausalLM, "from_pretrained", None)
    train(make("Qwen3Moe"), tmp_path, save_strategy="steps", save_steps=3, optim="adamw_torch")
    train(make("Qwen3Moe"), tmp_path / "on", resume=str(tmp_path / "checkpoint-3"), optim="adamw_torch")
