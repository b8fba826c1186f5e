"""A Trainer under DeepSpeed, on the ranks of a pool."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from hf_muon import Muon
from tests.deepspeed.cases import rank_of_environment  # first: it sets DeepSpeed up for the CPU
from tests.integrations.plain_script import OPTIONS, InOrder, dataset, model

ROOT = Path(__file__).parents[2]


def config_of(name, **zero):
    """Return one of the example configs."""
    config = json.loads((ROOT / "examples" / "deepspeed" / f"{name}.json").read_text())
    config["zero_optimization"].update(zero)
    if "offload_optimizer" in config["zero_optimization"]:
        # torch cannot pin memory without a GPU.
        for kind in ("offload_optimizer", "offload_param"):
            config["zero_optimization"].get(kind, {}).pop("pin_memory", None)
    if config["zero_optimization"]["stage"] == 3:
        config["zero_optimization"]["memory_efficient_linear"] = False
    return config


def forget():
    """Reset accelerate's state and the DeepSpeed config, of which a process has one each."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    unset_hf_deepspeed_config()


def arguments(folder, config, **options):
    from transformers import TrainingArguments

    rank_of_environment()
    forget()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    args = TrainingArguments(str(folder), **{**OPTIONS, "deepspeed": copy.deepcopy(config), **options})
    deepspeed.init_distributed(dist_backend="gloo")
    return args


def train(rank, folder, config, resume=None, lora=False, dtype="float32", extra=None, **options):
    """Train and return whole weights, losses, and the class of the engine's optimizer."""
    args = arguments(folder, config, **{"per_device_train_batch_size": 2, **options})
    network = model(getattr(torch, dtype))
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(5)
        network = get_peft_model(
            network, LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        )
    trainer = InOrder(network, args, train_dataset=dataset())
    trainer.train(resume_from_checkpoint=resume)
    engine = trainer.model_wrapped
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    weights = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            weights[name] = param.detach().clone()
    kind = "Muon" if isinstance(optimizer, Muon) else type(optimizer).__name__
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    engine.destroy()
    dist.barrier()
    return {"weights": weights, "losses": losses, "optimizer": kind}


def complaint(rank, folder, config, **options):
    """Train and return the error, or None."""
    try:
        train(rank, folder, config, **options)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None
