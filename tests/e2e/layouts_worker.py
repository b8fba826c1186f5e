"""Run Trainer one or more times in the same ranks; `layout_cases` lists the runs and tests compare their results.

Usage: layouts_worker.py FOLDER CASES.json, alone or under torchrun. Each case is a mapping:
    name: of the file `FOLDER/name.pt` with the results, and of the folder of checkpoints
    layout: plain (one process or DDP, unless the environment asks for FSDP2) | fsdp2 | fp16 (`fp16_by_hand`)
    model: options of `network`
    load: how transformers shards the model while it loads: options of DistributedConfig, or `tp_plan`
    arguments: of TrainingArguments, and `parallelism`, of ParallelismConfig; GLOBAL_BATCH sets the batch size
    resume: a checkpoint to resume from
    drop: whether to zero all moments before training
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.e2e import cpu_fsdp
from tests.integrations.accelerate_cases import shared_steps
from tests.support import fixtures_text
from tests.support.bounds import move

STEPS, SAVE_STEP, GLOBAL_BATCH, BLOCK = 8, 4, 4, 32
ARGUMENTS: dict[str, Any] = {
    "optim": "muon",
    "optim_args": "ns_dtype=fp32",  # bf16 products would drown the order of a sum in their own rounding
    "max_steps": STEPS,
    "learning_rate": 0.01,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,  # smaller than the norms: clipping is active
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "seed": 7,
}


def rows() -> list[dict[str, Tensor]]:
    """Return blocks of text. The first label is ignored: all versions of transformers then count the same tokens."""
    tokenizer = fixtures_text.build_tokenizer()
    ids = torch.tensor([i for text in fixtures_text.texts(40) for i in tokenizer(text).input_ids])
    blocks = ids[: len(ids) // BLOCK * BLOCK].view(-1, BLOCK)
    return [{"input_ids": block, "labels": torch.cat([torch.tensor([-100]), block[1:]])} for block in blocks]


def network(
    *,
    tied: bool = False,
    lora: bool = False,
    frozen: bool = False,
    fused: bool = False,
    even: bool = False,
    bf16: str = "",
    seed: int = 11,
    lora_seed: int = 12,
    moved: int | None = None,
) -> Any:
    """Return a Qwen3 whose matrices divide by neither two nor four, so that on four ranks some shards are empty.

    Args:
        even: whether all matrices divide by four.
        fused: whether the model is a Phi-3, with fused query, key and value and fused gate and up projections.
        bf16: "stored" in bf16, "rounded" to bf16 and stored in fp32, or "".
        moved: a seed of `tests.support.bounds.move`.
    """
    torch.manual_seed(seed)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = dict(zip(names, (32, 56, 4, 2, 8) if even else (30, 37, 3, 1, 6), strict=True))
    common = {"vocab_size": 321, "num_hidden_layers": 2, "tie_word_embeddings": tied, "dtype": "float32", **sizes}
    if fused:
        model: Any = Phi3ForCausalLM(Phi3Config(pad_token_id=0, **common))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common))
    if bf16:
        model.bfloat16()
    if bf16 == "rounded":
        model.float()
    if frozen:
        model.model.layers[0].requires_grad_(False)
    if lora:
        import peft

        torch.manual_seed(lora_seed)
        model = peft.get_peft_model(
            model,
            peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj", "down_proj"], init_lora_weights="gaussian"),
        )
    move(model, moved)
    return model


def sharded_while_loading(model: Any, folder: Path, options: dict[str, Any]) -> Any:
    """Return the model as transformers loads and shards it."""
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    if "tp_plan" not in options:
        from transformers.distributed import DistributedConfig

        options = {"distributed_config": DistributedConfig(**options)}
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


class InOrder(Trainer):
    """Takes the rows as they come, so that every layout takes the same ones in a step."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class DropMoments(TrainerCallback):
    """Zeros all moments before training, as if a checkpoint had none."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for moments in kwargs["optimizer"].optimizer.state.values():
            for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
                if key in moments:
                    moments[key].zero_()


def arguments_of(case: dict[str, Any], folder: Path) -> TrainingArguments:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    options = ARGUMENTS | case.get("arguments", {})
    sizes = options.pop("parallelism", None)
    copies = (sizes or {}).get("tp_size", 1) * case.get("load", {}).get("tp_size", 1)
    accumulation = options.get("gradient_accumulation_steps", 1)
    options["per_device_train_batch_size"] = GLOBAL_BATCH * copies // (world * accumulation)
    if sizes:
        from accelerate import ParallelismConfig

        options["parallelism_config"] = ParallelismConfig(**sizes)
    if case["layout"] == "fsdp2":
        layer = "Phi3DecoderLayer" if case.get("model", {}).get("fused") else "Qwen3DecoderLayer"
        config = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": [layer],
        }
        config |= options.pop("fsdp_config", {})
        # Older versions of transformers do not pass this to accelerate.
        os.environ["FSDP_STATE_DICT_TYPE"] = config.setdefault("state_dict_type", "FULL_STATE_DICT")
        options = {"fsdp": "full_shard auto_wrap"} | options | {"fsdp_config": config}
    return TrainingArguments(str(folder), **options)


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of the whole tensor; every rank takes part."""
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.clone()


def clean(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers."""
    wrappers = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def agree(tensors: dict[str, Tensor]) -> bool:
    """Return whether the tensors are bit-identical on all ranks."""
    if not dist.is_initialized():
        return True
    total = torch.cat([tensor.flatten().double() for tensor in tensors.values()])
    reference = total.clone()
    dist.broadcast(reference, 0)
    different = torch.tensor([not torch.equal(total, reference)], dtype=torch.int32)
    dist.all_reduce(different)
    return not bool(different)


def fp16_by_hand() -> dict[str, Any]:
    """Train with FSDP2 in fp16 and a GradScaler, which Trainer and accelerate allow on a GPU only.

    In the third step one rank has an infinite gradient in its shard of one matrix.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from hf_muon import build_optimizer

    dist.init_process_group("gloo")
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
    }
    model = network()
    for module in (*model.model.layers, model):
        fully_shard(module, **options)
    optimizer = build_optimizer(model, lr=0.01, ns_dtype="fp32")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1000)
    steps = []
    for step, row in enumerate(rows()[dist.get_rank() :: dist.get_world_size()][:4]):
        before = {name: whole(p) for name, p in model.named_parameters()}
        scaler.scale(model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss).backward()
        if step == 2 and dist.get_rank() == 1:
            model.model.layers[1].mlp.up_proj.weight.grad._local_tensor[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = {name: whole(p) for name, p in model.named_parameters()}
        moved = [not torch.equal(before[name], after[name]) for name in before]
        steps.append({"moved": sum(moved) / len(moved), "scale": scaler.get_scale(), "agree": agree(after)})
    return {"steps": steps}


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    if case["layout"] == "fp16":
        return fp16_by_hand()
    args = arguments_of(case, folder / case["name"])
    model = network(**case.get("model", {}))
    if "load" in case:
        model = sharded_while_loading(model, folder / "initial", case["load"])
    callbacks = [DropMoments()] if case.get("drop") else []
    trainer = InOrder(model, args, train_dataset=rows(), callbacks=callbacks)
    with shared_steps() as shared:
        trainer.train(resume_from_checkpoint=case.get("resume") and str(folder / case["resume"]))
    return {**describe(trainer), "shared": set(shared)}


def describe(trainer: Trainer) -> dict[str, Any]:
    """Return weights, moments and logs of a finished run; every rank takes part."""
    wrapped = trainer.model_wrapped
    parameters = {clean(name): p for name, p in wrapped.named_parameters()}
    names = {p: name for name, p in parameters.items()}
    optimizer = trainer.optimizer.optimizer
    state = {
        f"{names[p]}:{key}": whole(value)
        for group in optimizer.param_groups
        for p in group["params"]
        for key, value in optimizer.state[p].items()
    }
    weights = {name: whole(p) for name, p in parameters.items()}
    history = trainer.state.log_history
    return {
        "weights": weights,
        "state": state,
        "agree": agree(weights) and agree(state),
        "losses": {entry["step"]: entry["loss"] for entry in history if "loss" in entry},
        "grad_norms": {entry["step"]: entry["grad_norm"] for entry in history if "grad_norm" in entry},
        "groups": [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups],
        "stored": {f"{type(p.data).__name__} {getattr(p, 'placements', '')} {p.dtype}" for p in parameters.values()},
        "max_grad_norm": trainer.args.max_grad_norm,
        "type": str(trainer.accelerator.distributed_type.value),
        "offload": type(getattr(getattr(trainer.accelerator.state, "fsdp_plugin", None), "cpu_offload", None)).__name__,
    }


def main(folder: Path, cases: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    cpu_fsdp.open_fsdp()
    for case in cases:
        result = run(case, folder)
        if os.environ.get("RANK", "0") == "0":
            torch.save(result, folder / f"{case['name']}.pt")
        cpu_fsdp.forget_accelerator()
    cpu_fsdp.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
