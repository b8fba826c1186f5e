"""Ulysses sequence parallel on the ranks of a pool, and the same training in one process."""

from __future__ import annotations

import contextlib
import functools

import deepspeed
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_muon import build_optimizer
from tests.bounds import move
from tests.deepspeed.trainer_cases import arguments  # first: it sets DeepSpeed up for the CPU
from tests.integrations.plain_script import InOrder, model, sentences

LENGTH = 16


def rows(kind="plain", count=16):
    """Return examples of one length with labels spread unevenly: a rank may have none of a row's labels."""
    examples = []
    for i, tokens in enumerate(sentences(count, LENGTH)):
        labels, positions = tokens.clone(), torch.arange(LENGTH)
        labels[: (3 * i) % 12] = -100
        row = {"input_ids": tokens, "labels": labels, "position_ids": positions}
        if kind == "padded":
            end = LENGTH - (5 * i) % 11
            labels[end:], tokens[end:] = -100, 0
            row["attention_mask"] = (positions < end).long()
        if kind == "packed":
            cut = 3 + (5 * i) % 11
            row["position_ids"] = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)])
            labels[cut] = -100
        examples.append(row)
    return examples


class Watched(TrainerCallback):
    """Records every parameter's whole gradient as the optimizer gets it."""

    def __init__(self):
        self.grads = []

    def on_train_begin(self, args, state, control, **kwargs):
        engine = self.trainer.model_wrapped
        names = {param: name for name, param in engine.module.named_parameters()}
        flat = hasattr(engine.optimizer, "single_partition_of_fp32_groups")
        owner = engine.optimizer.optimizer if flat else engine
        step = owner.step

        def watched_step(*args, **kwargs):
            if flat:  # ZeRO-1 and 2 step one group after the other
                if len(names) in [len(grads) for grads in self.grads[-1:]] or not self.grads:
                    self.grads.append({})
                self.grads[-1].update(flat_gradients(engine.optimizer, names))
            elif engine.is_gradient_accumulation_boundary():
                whole = deepspeed.utils.safe_get_full_grad
                self.grads.append({name: whole(param).float().clone() for param, name in names.items()})
            return step(*args, **kwargs)

        owner.step = watched_step


def flat_gradients(zero, names):
    """Return the gradients of the groups that are being stepped; `safe_get_full_grad` fails in ZeRO-1."""
    grads = {}
    for i, flat in enumerate(zero.single_partition_of_fp32_groups):
        if any(flat is param for group in zero.optimizer.param_groups for param in group["params"]):
            parts = [torch.empty_like(flat.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, flat.grad)
            whole, start = torch.cat(parts), zero.bit16_groups_flat[i].data_ptr()
            for param in zero.bit16_groups[i]:
                first = (param.data_ptr() - start) // param.element_size()
                grads[names[param]] = whole[first : first + param.numel()].view_as(param)
    return grads


def parallelism(size):
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    return ParallelismConfig(
        sp_size=size, sp_backend="deepspeed", sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    )


@contextlib.contextmanager
def fresh_groups():
    """Restore what DeepSpeed changes in a process: its sequence parallel group and transformers' attention."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = before
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
        groups.mpu = None


OPTIONS = {"lr_scheduler_type": "constant", "warmup_steps": 0, "learning_rate": 5e-3}


class NoCall(InOrder):
    """Computes its own loss."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs["labels"] = inputs["shift_labels"]
        return model(**inputs).loss


def train(rank, folder, config, kind="plain", steps=3, size=2, trainer="InOrder", **options):
    """Train with sequence parallel; return the gradients of each step, whole weights, losses and norms.

    Args:
        rank: of this process.
        folder: of the Trainer.
        config: of DeepSpeed.
        kind: kind of `rows`.
        steps: number of steps.
        size: ranks that share a sequence.
        trainer: "InOrder" or "NoCall".
        options: of TrainingArguments, and `compute_loss_func`.
    """
    loss_function = options.pop("compute_loss_func", None)
    with fresh_groups():
        args = arguments(
            folder,
            config,
            parallelism_config=parallelism(size),
            per_device_train_batch_size=2,
            max_steps=steps,
            **{**OPTIONS, **options},
        )
        network = model(attn_implementation="sdpa")
        watched = Watched()
        kinds = {"InOrder": InOrder, "NoCall": NoCall}
        run = kinds[trainer](
            network, args, train_dataset=rows(kind), callbacks=[watched], compute_loss_func=loss_function
        )
        watched.trainer = run
        run.train()
        engine = run.model_wrapped
        weights = {}
        for name, param in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
                weights[name] = param.detach().clone()
        logs = run.state.log_history
        engine.destroy()
        dist.barrier()
    return {
        "grads": watched.grads,
        "weights": weights,
        "losses": [log["loss"] for log in logs if "loss" in log],
        "norms": [float(log["grad_norm"]) for log in logs if "grad_norm" in log],
    }


def complaint(rank, **options):
    """Train and return the error, or None."""
    try:
        train(rank, **options)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@functools.cache
def by_hand(kind="plain", steps=3, dtype=torch.float32, max_grad_norm=None, ns_dtype="fp32", moved=None):
    """Train as `train` in one process, without sequence parallel and DeepSpeed."""
    network, masters = model(dtype, attn_implementation="sdpa"), model(attn_implementation="sdpa")
    for each in (network, masters):
        move(each, moved)
    optimizer = build_optimizer(masters, lr=OPTIONS["learning_rate"], weight_decay=0.1, ns_dtype=ns_dtype)
    results = {"grads": [], "losses": [], "norms": []}
    data = rows(kind)
    network.train()
    for step in range(steps):
        batch = {name: torch.stack([row[name] for row in data[2 * step : 2 * step + 2]]) for name in data[0]}
        loss = network(**batch, use_cache=False).loss
        loss.backward()
        results["losses"].append(loss.item())
        results["grads"].append({name: param.grad.float().clone() for name, param in network.named_parameters()})
        for param, master in zip(network.parameters(), masters.parameters(), strict=True):
            master.grad, param.grad = param.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), max_grad_norm or 1e9)
        results["norms"].append(norm.item())
        optimizer.step()
        for param, master in zip(network.parameters(), masters.parameters(), strict=True):
            param.data.copy_(master.data)
    return {**results, "weights": {name: param.detach().clone() for name, param in masters.named_parameters()}}
