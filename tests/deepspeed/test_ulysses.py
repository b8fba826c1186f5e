"""Ulysses sequence parallel over two ranks against one process: losses, gradients, weights; and its script."""

from __future__ import annotations

import contextlib
import functools
import json
import sys

import pytest
import torch

from hf_muon import build_optimizer
from tests import fixtures_text
from tests.bounds import TIMES, beyond_rounding, move
from tests.deepspeed.runs import assert_weights
from tests.deepspeed.test_trainer import arguments, complaint, config_of, results_of
from tests.e2e.harness import MARK, ROOT, YAML, interrupt, options, run, weights
from tests.integrations.plain_script import InOrder, model, sentences

pytestmark = pytest.mark.usefixtures("quiet")

LENGTH = 16
OPTIONS = {"lr_scheduler_type": "constant", "warmup_steps": 0, "learning_rate": 5e-3, "per_device_train_batch_size": 2}
STAGES = ["zero0", "zero1", "zero2", "zero3"]
EXACT = {"optim_args": "ns_dtype=fp32", "max_grad_norm": 1e3}


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


class NoCall(InOrder):
    """Computes its own loss."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs["labels"] = inputs["shift_labels"]
        return model(**inputs).loss


def train(rank, folder, config, kind="plain", steps=3, size=2, own_loss=False, compute_loss_func=None, **options):
    """Train with sequence parallel; return whole weights, losses, and norms of gradients.

    Args:
        rank: of this process.
        folder: of the Trainer.
        config: of DeepSpeed.
        kind: kind of `rows`.
        steps: number of steps.
        size: ranks that share a sequence.
        own_loss: whether the Trainer computes the loss itself.
        compute_loss_func: of the Trainer.
        options: of TrainingArguments.
    """
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    parallel = ParallelismConfig(sp_size=size, sp_backend="deepspeed", sp_handler=handler)
    with fresh_groups():
        args = arguments(folder, config, parallelism_config=parallel, max_steps=steps, **{**OPTIONS, **options})
        about = {"train_dataset": rows(kind), "compute_loss_func": compute_loss_func}
        trainer = (NoCall if own_loss else InOrder)(model(attn_implementation="sdpa"), args, **about)
        trainer.train()
        return results_of(trainer)


@functools.cache
def by_hand(kind="plain", steps=3, dtype=torch.float32, max_grad_norm=None, ns_dtype="fp32", moved=None):
    """Train as `train` in one process, without sequence parallel and DeepSpeed."""
    network, masters = model(dtype, attn_implementation="sdpa"), model(attn_implementation="sdpa")
    for each in (network, masters):
        move(each, moved)
    optimizer = build_optimizer(masters, lr=OPTIONS["learning_rate"], weight_decay=0.1, ns_dtype=ns_dtype)
    results = {"losses": [], "norms": []}
    data = rows(kind)
    network.train()
    for step in range(steps):
        batch = {name: torch.stack([row[name] for row in data[2 * step : 2 * step + 2]]) for name in data[0]}
        loss = network(**batch, use_cache=False).loss
        loss.backward()
        results["losses"].append(loss.item())
        for param, master in zip(network.parameters(), masters.parameters(), strict=True):
            master.grad, param.grad = param.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), max_grad_norm or 1e9)
        results["norms"].append(norm.item())
        optimizer.step()
        for param, master in zip(network.parameters(), masters.parameters(), strict=True):
            param.data.copy_(master.data)
    return {**results, "weights": {name: param.detach().clone() for name, param in masters.named_parameters()}}


def tensors(result, parts):
    """Return the parts of a result by name: of losses, gradient norms and weights."""
    lists = {part: torch.tensor(result[part]) for part in parts if part != "weights"}
    return {**lists, **(result["weights"] if "weights" in parts else {})}


def assert_as_one_process(results, parts, times=TIMES, **options):
    """Compare ranks bit for bit, and the first with one process, up to rounding of sums in another order."""
    one, other = results
    assert one["losses"] == other["losses"]
    assert_weights(one["weights"], other["weights"])
    expected, *controls = (tensors(by_hand(**options, moved=seed), parts) for seed in (None, 0, 1))
    assert not beyond_rounding(tensors(one, parts), expected, controls, times)


ALL = ("losses", "weights", "norms")
CLIPPED = {"optim_args": "ns_dtype=fp32", "max_grad_norm": 0.05}
# An example config and changes, kind of rows, options of the Trainer, what is compared, and options of `by_hand`.
RUNS = {
    "zero0": ("zero0", {}, "plain", EXACT, ("losses", "weights"), {}),  # which logs no norms in fp32
    **{name: (name, {}, "plain", EXACT, ALL, {}) for name in (*STAGES[1:], "zero2_offload", "zero3_offload")},
    **{f"{name}-padded": (name, {}, "padded", EXACT, ALL, {"kind": "padded"}) for name in ("zero2", "zero3")},
    **{
        # The controls move weights, which changes all of a gradient, and not only the order of its sum.
        f"{name}-bf16": (
            name,
            {},
            "plain",
            {"bf16": True, **EXACT},
            ("norms",),
            {"dtype": torch.bfloat16, "times": 2},
        )
        for name in ("zero0", "zero1", "zero3")
    },
    "ns-bf16": ("zero2", {}, "plain", {**EXACT, "optim_args": "ns_dtype=bf16"}, ("weights",), {"ns_dtype": "bf16"}),
    **{f"{name}-clipped": (name, {}, "plain", CLIPPED, ("weights",), {"max_grad_norm": 0.05}) for name in STAGES},
    **{
        f"{name}-reduced": (name, {"reduce_scatter": False}, "plain", {"steps": 1, **EXACT}, ALL, {"steps": 1})
        for name in ("zero2", "zero3")
    },
}


@pytest.mark.promise("ulysses")
@pytest.mark.first_tier("^zero\\d(_offload)?$|zero1-bf16|zero2-clipped|zero3-reduced")
@pytest.mark.parametrize("name", RUNS)
def test_equals_one_process(ranks, name, tmp_path):
    example, zero, kind, own, parts, options = RUNS[name]
    results = ranks.run(train, folder=str(tmp_path), config=config_of(example, **zero), kind=kind, **own)
    assert_as_one_process(results, parts, **options)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"label_smoothing_factor": 0.1}, "[label-smoothing]"),
        ({"compute_loss_func": max}, "[ignored-loss-func]"),
        ({"own_loss": True}, "[loss-not-gathered]"),
        ({"kind": "packed"}, "[packed-texts]"),
        ({"size": 1}, None),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused(ranks, options, code, tmp_path):
    options = {"folder": str(tmp_path), "config": config_of("zero2"), "steps": 1, **options}
    for error in ranks.run(complaint, training=train, **options):
        assert (error is None) if code is None else (code in error)


# --- scripts/run_ulysses.sh with the example as it is but for a tiny model, little text, few steps and the CPU


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """Return settings that make the example small: 10 pairs to learn, an epoch of 10 steps, and one pair held out."""
    folder = tmp_path_factory.mktemp("small")
    pairs = [{"prompt": f"What is {name}?\n", "text": text[:160]} for name, text in fixtures_text.documents()[:11]]
    fixtures_text.write_jsonl(folder / "pairs.jsonl", pairs)
    return {
        "model_name_or_path": fixtures_text.build_model_folder(folder / "model"),
        "data_path": folder / "pairs.jsonl",
        "attn_implementation": "sdpa",
        "block_size": 64,
        "deepspeed": ROOT / "examples" / "deepspeed" / "zero2.json",
        "use_cpu": True,
        "bf16": False,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "max_steps": 15,
        "save_steps": 13,  # in the second epoch, and between the two ranks' batches
        "logging_steps": 1,
        "learning_rate": 1e-3,
    }


def launch(settings, output, cwd, *flags, **variables):
    script, config = ROOT / "scripts" / "run_ulysses.sh", YAML / "trainer_qwen3_ulysses.yaml"
    words = ["bash", script, "--config", config, *flags, "--", *options({**settings, "output_dir": output})]
    variables = {"TORCHDYNAMO_DISABLE": "1", "PYTHON": sys.executable, **variables}
    run(words, cwd=cwd, **variables)


@pytest.fixture(scope="module")
def straight(example, tmp_path_factory):
    """Return the folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("straight")
    launch(example, folder / "straight", folder, NPROC="2")
    return folder / "straight"


def logs_of(folder):
    return json.loads((folder / "checkpoint-15/trainer_state.json").read_text())["log_history"]


def losses(folder):
    return [entry for entry in logs_of(folder) if "loss" in entry]


@pytest.mark.promise("ulysses")
@pytest.mark.slow
def test_trains_by_the_script(straight):
    logged = losses(straight)
    assert logged[-1]["loss"] < logged[0]["loss"]


@pytest.mark.slow
@pytest.mark.extended
def test_stops_and_resumes_to_the_same_weights(example, straight, tmp_path):
    interrupt(straight, after=13, destination=tmp_path / "resumed")
    launch(example, tmp_path / "resumed", tmp_path, "--nproc", "2", "--sp-size", "2")
    assert any(MARK in entry for entry in logs_of(tmp_path / "resumed"))
    assert losses(tmp_path / "resumed") == losses(straight)
    assert_weights(weights(tmp_path / "resumed"), weights(straight))
