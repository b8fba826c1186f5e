"""Write a checkpoint of DeepSpeed's own Muon at stage 0, and its moments by name.

Run in the environment of DeepSpeed: ``RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
DS_ACCELERATOR=cpu .venv/bin/python -m tests.convert.deepspeed_state.write``.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
STEPS = 3


def main() -> None:
    """Train a few steps with the optimizer that the config asks for, and save as the engine does."""
    import deepspeed
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "head_dim": 4}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1))
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.to_json_file(HERE / "config.json")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.95}},
        "zero_optimization": {"stage": 0},
    }
    engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(STEPS):
        tokens = torch.randint(0, 20, (2, 12))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    names = {param: name for name, param in model.named_parameters()}
    torch.save({names[param]: dict(state) for param, state in optimizer.state.items()}, HERE / "by_name.pt")
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, tag="tag")
        shutil.copy(Path(folder) / "tag" / "mp_rank_00_model_states.pt", HERE)


if __name__ == "__main__":
    main()
