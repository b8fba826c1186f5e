"""`optim: muon` with `deepspeed:` in TrainingArguments, against the same training written by hand; and Ulysses.

Under Ulysses sequence parallel two ranks share each text. It runs in DeepSpeed's engines alone.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import sys

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainingArguments, get_scheduler

from hf_muon import Muon, build_optimizer
from tests.deepspeed.runs import assert_weights, rank_of_environment, weights_of
from tests.e2e.harness import MARK, ROOT, YAML, free_port, interrupt, options, run, weights
from tests.integrations.plain_script import BATCH, LR, OPTIONS, STEPS, InOrder, dataset, model, sentences
from tests.support import fixtures_text
from tests.support.bounds import TIMES, beyond_rounding, move

pytestmark = pytest.mark.usefixtures("quiet")

EXAMPLES = ROOT / "examples" / "deepspeed"
CONFIGS = ["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]
LENGTH = 16


def config_of(name, **zero):
    """Return one of the example configs."""
    config = json.loads((EXAMPLES / f"{name}.json").read_text())
    config["zero_optimization"].update(zero)
    for kind in ("offload_optimizer", "offload_param"):  # torch cannot pin memory without a GPU
        config["zero_optimization"].get(kind, {}).pop("pin_memory", None)
    if config["zero_optimization"]["stage"] == 3:
        config["zero_optimization"]["memory_efficient_linear"] = False
    return config


def rows(kind, count=16):
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


@contextlib.contextmanager
def fresh_process():
    """Have the state of a new process, and restore what DeepSpeed's sequence parallel changes."""
    from accelerate.state import AcceleratorState
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    rank_of_environment()
    AcceleratorState._reset_state(reset_partial_state=True)
    unset_hf_deepspeed_config()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = before
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
        groups.mpu = None


class OwnLoss(InOrder):
    """Computes its own loss."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs["labels"] = inputs["shift_labels"]
        return model(**inputs).loss


def with_adapters(network):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    return get_peft_model(network, LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False))


def sharing(size):
    """Return options with which so many ranks share each text."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    return {"parallelism_config": ParallelismConfig(sp_size=size, sp_backend="deepspeed", sp_handler=handler)}


def train(
    rank, folder, config, resume=None, lora=False, kind="", size=2, own_loss=False, compute_loss_func=None, **options
):
    """Train with Trainer; return whole weights, losses, and norms of gradients.

    Args:
        rank: of this process.
        folder: of the Trainer.
        config: of DeepSpeed.
        resume: a checkpoint.
        lora: whether adapters are trained.
        kind: of `rows`, which ranks share under Ulysses; "" for plain texts without it.
        size: ranks that share a text.
        own_loss: whether the Trainer computes the loss itself.
        compute_loss_func: of the Trainer.
        options: of TrainingArguments.
    """
    with fresh_process():
        options = {**OPTIONS, "per_device_train_batch_size": 2, **(sharing(size) if kind else {}), **options}
        args = TrainingArguments(str(folder), deepspeed=copy.deepcopy(config), **options)
        deepspeed.init_distributed(dist_backend="gloo")
        network = model(attn_implementation="sdpa") if kind else model()
        trainer = (OwnLoss if own_loss else InOrder)(
            with_adapters(network) if lora else network,
            args,
            train_dataset=rows(kind) if kind else dataset(),
            compute_loss_func=compute_loss_func,
        )
        trainer.train(resume_from_checkpoint=resume)
        engine, logs = trainer.model_wrapped, trainer.state.log_history
        assert isinstance(getattr(engine.optimizer, "optimizer", engine.optimizer), Muon)
        result = {
            "weights": weights_of(engine.module),
            "losses": [log["loss"] for log in logs if "loss" in log],
            "norms": [float(log["grad_norm"]) for log in logs if "grad_norm" in log],
        }
        engine.destroy()
        dist.barrier()
        return result


@functools.cache
def by_hand(
    kind="", max_steps=STEPS, accumulation=1, max_grad_norm=1e9, dtype=torch.float32, ns_dtype="fp32", moved=None
):
    """Train as `train` in one process, without Trainer, DeepSpeed and sequence parallel."""
    attention = {"attn_implementation": "sdpa"} if kind else {}
    network, masters = model(dtype, **attention), model(**attention)
    for each in (network, masters):
        move(each, moved)
    optimizer = build_optimizer(masters, lr=LR, weight_decay=0.1, ns_dtype=ns_dtype)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=max_steps)
    data, size = (rows(kind), 2) if kind else (dataset(), BATCH)
    batches = (
        {key: torch.stack([row[key] for row in data[at : at + size]]) for key in data[0]} for at in range(0, 256, size)
    )
    results = {"losses": [], "norms": []}
    network.train()
    for _ in range(max_steps):
        for _ in range(accumulation):
            loss = network(**next(batches), use_cache=False).loss / accumulation
            loss.backward()
        results["losses"].append(loss.item())
        for param, master in zip(network.parameters(), masters.parameters(), strict=True):
            master.grad, param.grad = param.grad.float(), None
        norm = nn.utils.clip_grad_norm_(masters.parameters(), max_grad_norm)
        assert max_grad_norm > 1 or norm > 2 * max_grad_norm, "clipping was not active"
        results["norms"].append(norm.item())
        optimizer.step()
        scheduler.step()
        for param, master in zip(network.parameters(), masters.parameters(), strict=True):
            param.data.copy_(master.data)
    return {**results, "weights": {name: param.detach().clone() for name, param in masters.named_parameters()}}


def tensors(result, parts):
    """Return the parts of a result by name: of losses, gradient norms and weights."""
    lists = {part: torch.tensor(result[part]) for part in parts if part != "weights"}
    return {**lists, **(result["weights"] if "weights" in parts else {})}


def assert_as_by_hand(results, parts=("weights",), times=TIMES, **options):
    """Compare ranks bit for bit, and the first with one process, up to rounding of sums in another order."""
    assert_equal(results[0], results[-1])
    expected, *controls = (tensors(by_hand(**options, moved=seed), parts) for seed in (None, 0, 1))
    assert not beyond_rounding(tensors(results[0], parts), expected, controls, times)


def assert_equal(one, other):
    assert one["losses"] == other["losses"]
    assert_weights(one["weights"], other["weights"])


FP32 = {"optim_args": "ns_dtype=fp32"}
CLIPPED = {"max_grad_norm": 0.05, **FP32}


@pytest.mark.promise("zero", "exact-resume")
@pytest.mark.first_tier("zero[03]-1|zero2-2|zero1-bf16|zero3_offload-bf16")
@pytest.mark.second_tier("-1|bf16|zero2-2")
@pytest.mark.parametrize("how", [1, 2, "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_trainer_equals_a_loop_by_hand_and_resumes_exactly(ranks, name, how, tmp_path):
    """Accumulate gradients of so many batches, or train with bf16 weights and resume."""
    own = {"folder": str(tmp_path), "config": config_of(name)}
    if how == "bf16":
        own |= {"bf16": True, "save_strategy": "steps", "save_steps": 3}
        straight = ranks.run(train, **own)
        for pair in zip(ranks.run(train, resume=str(tmp_path / "checkpoint-3"), **own), straight, strict=True):
            assert_equal(*pair)
    else:
        results = ranks.run(train, gradient_accumulation_steps=how, **own, **CLIPPED)
        assert_as_by_hand(results, accumulation=how, max_grad_norm=0.05)


@pytest.mark.promise("lora")
@pytest.mark.first_tier("zero2")
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_lora(ranks, name, tmp_path):
    own = {"config": config_of(name), "lora": True, "optim_args": "lora=muon,ns_dtype=fp32"}
    one, other = ranks.run(train, folder=str(tmp_path), **own)
    assert_equal(one, other)
    assert len([name for name in one["weights"] if "lora_" in name]) == 8


def test_a_scheduler_in_the_config(ranks, tmp_path):
    """Use DeepSpeed's own scheduler, which gives all groups one learning rate."""
    rates = {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 2}
    config = {**config_of("zero2"), "scheduler": {"type": "WarmupLR", "params": rates}}
    losses = ranks.run(train, folder=str(tmp_path), config=config)[0]["losses"]
    assert losses[-1] < losses[0]


# --- Ulysses

ALL = ("losses", "weights", "norms")
EXACT = {"max_steps": 3, "max_grad_norm": 1e3, **FP32}
# An example config and changes, kind of rows, options of the Trainer, what is compared, and options of `by_hand`.
RUNS = {
    "zero0": ("zero0", {}, "plain", EXACT, ("losses", "weights"), {}),  # which logs no norms in fp32
    **{name: (name, {}, "plain", EXACT, ALL, {}) for name in CONFIGS[1:]},
    **{f"{name}-padded": (name, {}, "padded", EXACT, ALL, {}) for name in ("zero2", "zero3")},
    # The controls move weights, which changes all of a gradient, and not only the order of its sum.
    **{
        f"{name}-bf16": (name, {}, "plain", {"bf16": True, **EXACT}, ("norms",), {"dtype": torch.bfloat16, "times": 2})
        for name in ("zero0", "zero1", "zero3")
    },
    "ns-bf16": ("zero2", {}, "plain", {**EXACT, "optim_args": "ns_dtype=bf16"}, ("weights",), {"ns_dtype": "bf16"}),
    **{
        f"{name}-clipped": (name, {}, "plain", {**EXACT, **CLIPPED}, ("weights",), {"max_grad_norm": 0.05})
        for name in ("zero0", "zero1", "zero2", "zero3")
    },
    **{
        f"{name}-reduced": (name, {"reduce_scatter": False}, "plain", {**EXACT, "max_steps": 2}, ALL, {})
        for name in ("zero2", "zero3")
    },
}


@pytest.mark.promise("ulysses")
@pytest.mark.first_tier("^zero\\d$|zero3-reduced")
@pytest.mark.second_tier("^zero\\d(_offload)?$|padded|zero1-bf16|ns-bf16|zero2-clipped|reduced")
@pytest.mark.parametrize("name", RUNS)
def test_ulysses_equals_one_process(ranks, name, tmp_path):
    example, zero, kind, own, parts, more = RUNS[name]
    results = ranks.run(train, folder=str(tmp_path), config=config_of(example, **zero), kind=kind, **own)
    assert_as_by_hand(results, parts, kind=kind, max_steps=own["max_steps"], **more)


def complaint(rank, **options):
    """Train and return the error, or an empty text."""
    try:
        train(rank, **options)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("own", "code"),
    [
        ({"config": {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}}, "[optimizer-in-config]"),
        ({"kind": "plain", "label_smoothing_factor": 0.1}, "[label-smoothing]"),
        ({"kind": "plain", "compute_loss_func": max}, "[ignored-loss-func]"),
        ({"kind": "plain", "own_loss": True}, "[loss-not-gathered]"),
        ({"kind": "packed"}, "[packed-texts]"),
        ({"kind": "plain", "size": 1}, ""),
    ],
)
def test_refused(ranks, own, code, tmp_path):
    own = {**own, "config": {**config_of("zero2"), **own.get("config", {})}}
    for error in ranks.run(complaint, folder=str(tmp_path), max_steps=1, **own):
        assert code in error
        assert bool(error) == bool(code)


# --- scripts/run_ulysses.sh with the example as it is but for a tiny model, little text, few steps and the CPU


SMALL = {
    "attn_implementation": "sdpa",
    "block_size": 64,
    "deepspeed": EXAMPLES / "zero2.json",
    "use_cpu": True,
    "bf16": False,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
    "max_steps": 15,
    "save_steps": 13,  # in the second of epochs of 10 steps, and between the two ranks' batches
    "logging_steps": 1,
    "learning_rate": 1e-3,
}


def launch(settings, output, *flags, **variables):
    script, config = ROOT / "scripts" / "run_ulysses.sh", YAML / "trainer_qwen3_ulysses.yaml"
    words = ["bash", script, "--config", config, *flags, "--", *options({**settings, "output_dir": output})]
    run(words, cwd=output.parent, TORCHDYNAMO_DISABLE="1", PYTHON=sys.executable, **variables)
    logs = json.loads((output / "checkpoint-15/trainer_state.json").read_text())["log_history"]
    return logs, [entry for entry in logs if "loss" in entry]


@pytest.mark.promise("ulysses")
@pytest.mark.slow
@pytest.mark.extended
def test_the_script_trains_stops_and_resumes_to_the_same_weights(tmp_path):
    """Learn 10 pairs, with one held out."""
    pairs = [{"prompt": f"What is {name}?\n", "text": text[:160]} for name, text in fixtures_text.documents()[:11]]
    fixtures_text.write_jsonl(tmp_path / "pairs.jsonl", pairs)
    network = fixtures_text.build_model_folder(tmp_path / "model")
    settings = {**SMALL, "model_name_or_path": network, "data_path": tmp_path / "pairs.jsonl"}
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    _, losses = launch(settings, straight, NPROC="2")
    assert losses[-1]["loss"] < losses[0]["loss"]
    interrupt(straight, after=13, destination=resumed)
    logs, others = launch(settings, resumed, "--nproc", "2", "--sp-size", "2")
    assert any(MARK in entry for entry in logs)
    assert others == losses
    assert_weights(weights(resumed), weights(straight))
