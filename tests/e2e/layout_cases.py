"""Cases of `layouts_worker`, by the start of processes (the stage) that runs them.

A stage is a function here and a method of `layout_stages.Stages`.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from tests.e2e import layouts_worker as worker

Case = dict[str, Any]

ACCELERATE = tuple(int(part) for part in importlib.metadata.version("accelerate").split(".")[:2])
TRANSFORMERS = tuple(int(part) for part in importlib.metadata.version("transformers").split(".")[:2])
PARALLELISM = ACCELERATE >= (1, 12)  # Trainer takes a ParallelismConfig
LOADS_SHARDS = ACCELERATE >= (1, 13)  # older versions lose the moments of any optimizer
DDP_RESUMES = TRANSFORMERS >= (5, 20)  # older versions load the optimizer to cpu:0, a device that torch does not know
NATIVE = TRANSFORMERS >= (5, 20)  # from_pretrained(distributed_config=...)

# LLaMA-Factory's stack has none of these; `make test-versions` runs with other versions, too.
newest = pytest.mark.newest
needs_parallelism = (newest, pytest.mark.skipif(not PARALLELISM, reason="accelerate 1.12 has a ParallelismConfig"))
loads_shards = (newest, pytest.mark.skipif(not LOADS_SHARDS, reason="accelerate 1.13 loads sharded moments"))
ddp_resumes = (newest, pytest.mark.skipif(not DDP_RESUMES, reason="this Trainer cannot resume DDP on a CPU"))
needs_native = (newest, pytest.mark.skipif(not NATIVE, reason="transformers has no DistributedConfig for training"))

SAVE = {"save_strategy": "steps", "save_steps": worker.SAVE_STEP}
SHARDED = {"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
HSDP = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}
COMPILE = {"torch_compile": True, "torch_compile_backend": "aot_eager"}

OPTIONS: dict[str, Case] = {
    "accumulation": {"arguments": {"gradient_accumulation_steps": 2}},
    "frozen": {"model": {"frozen": True}},
    "tied": {"model": {"tied": True}},
    "fused": {"model": {"fused": True}},
    "lora": {"model": {"lora": True}, "arguments": {"optim_args": "ns_dtype=fp32,lora=muon", "max_grad_norm": 0.05}},
    "compile": {"arguments": COMPILE},
    "checkpointing": {"arguments": {"gradient_checkpointing": True}},
    "bf16": {"arguments": {"bf16": True}},
    # Layouts round gradients differently, and weights that are rounded at random then draw other bits.
    "bf16_weights": {
        "model": {"bf16": "stored"},
        "arguments": {"bf16": True, "optim_args": "ns_dtype=fp32,weight_rounding=nearest"},
    },
}


SETTINGS = {"cpu_ram_efficient_loading": True, "reshard_after_forward": False, "activation_checkpointing": True}
WITH_DDP = ("accumulation", "tied", "fused", "lora", "bf16", "bf16_weights")


def case(name: str, layout: str = "plain", **keys: Any) -> Case:
    """Return a case of the worker."""
    return {"name": name, "layout": layout, **keys}


def resumed(original: Case, *, name: str | None = None, source: str | None = None, **changes: Any) -> Case:
    """Return the case resumed from its checkpoint, with a model that starts from other random weights."""
    checkpoint = f"{source or original['name']}/checkpoint-{worker.SAVE_STEP}"
    model = original.get("model", {})
    model = model | ({"lora_seed": 3} if model.get("lora") else {"seed": 3})  # an adapter's checkpoint is the adapter
    return original | {"name": name or f"{original['name']}_resumed", "resume": checkpoint, "model": model} | changes


def moved(original: Case, seed: int) -> Case:
    """Return the case with weights moved by one unit in the last place: a control for the effect of rounding."""
    name, model = f"{original['name']}_moved_{seed}", original.get("model", {}) | {"moved": seed}
    arguments = original.get("arguments", {}) | {"save_strategy": "no"}
    return original | {"name": name, "model": model, "arguments": arguments}


def one() -> list[Case]:
    """Return the references, in one process."""
    base = case("one", arguments=SAVE)
    even = case("one_even", model={"even": True})
    options = [
        case(f"one_{name}", **keys) for name, keys in OPTIONS.items() if name not in ("compile", "checkpointing")
    ]
    exact = [base, even, *(item for item in options if "bf16" not in item["name"])]
    rounded = case("one_bf16_rounded", model={"bf16": "rounded"}, arguments={"bf16": True})
    return [base, resumed(base), even, *options, rounded, *(moved(item, seed) for item in exact for seed in (0, 1))]


def two() -> list[Case]:
    ddp, fsdp = case("ddp", arguments=SAVE), case("fsdp", "fsdp2", arguments=SAVE)
    sharded = case("fsdp_sharded", "fsdp2", arguments=SAVE | SHARDED)
    lora = case("fsdp_lora", "fsdp2", **OPTIONS["lora"])
    lora["arguments"] = lora["arguments"] | SAVE | SHARDED
    cases = [ddp, fsdp, sharded, lora]
    cases += [resumed(straight) for straight in (ddp, fsdp, sharded, lora)]
    cases += [resumed(x, name=f"{x['name']}_dropped", fault="drop_moments") for x in (ddp, fsdp)]
    cases += [case(f"ddp_{name}", **keys) for name, keys in OPTIONS.items() if name in WITH_DDP]
    cases += [case(f"fsdp_{name}", "fsdp2", **keys) for name, keys in OPTIONS.items() if name != "lora"]
    cases += [case("fsdp_settings", "fsdp2", arguments={"fsdp_config": SETTINGS})]
    offload = {"fsdp": "full_shard offload", "fsdp_config": {"cpu_offload": True}}
    offloaded = case("offload", "fsdp2", arguments=SAVE | offload)
    cases += [case("fp16", "fp16"), offloaded, resumed(offloaded)]
    poisoned: Case = {"fault": "poison_one_rank", "arguments": {"max_grad_norm": 0.0}}
    cases += [case("ddp_poisoned", **poisoned), case("fsdp_poisoned", "fsdp2", **poisoned)]
    if PARALLELISM:
        tensor_parallel = {"arguments": {"parallelism": {"tp_size": 2}}, "load": {"tp_plan": "auto"}}
        cases += [case("tp", model={"even": True}, **tensor_parallel)]
    if NATIVE:
        cases += [case("native_fsdp", load={"fsdp_size": 2})]
        cases += [case("native_tp", model={"even": True}, load={"tp_size": 2})]
    return cases


def four() -> list[Case]:
    hsdp = case("hsdp", "fsdp2", arguments=SAVE, environment=HSDP)
    hsdp_sharded = case("hsdp_sharded", "fsdp2", arguments=SAVE | SHARDED, environment=HSDP)
    fsdp = case("four_fsdp", "fsdp2", arguments=SAVE)
    sharded = case("four_fsdp_sharded", "fsdp2", arguments=SAVE | SHARDED)
    cases = [case("four_ddp"), fsdp, sharded]
    cases += [
        resumed(fsdp, name="two_to_four", source="fsdp"),
        resumed(sharded, name="two_to_four_sharded", source="fsdp_sharded"),
    ]
    if PARALLELISM:
        sizes = {"dp_replicate_size": 2, "dp_shard_size": 2}
        cases += [hsdp, hsdp_sharded, resumed(hsdp), case("hsdp_arguments", "fsdp2", arguments={"parallelism": sizes})]
        cases += [resumed(hsdp_sharded, name="two_to_hsdp_sharded", source="fsdp_sharded")]
    if NATIVE:
        cases += [
            case("native_hsdp", load={"fsdp_size": 2, "dp_replicate_size": 2}),
            case("native_fsdp_tp", model={"even": True}, load={"fsdp_size": 2, "tp_size": 2}),
        ]
    return cases


def launched() -> list[Case]:
    """Return the cases of `accelerate launch`: its config file sets FSDP2, the training arguments do not."""
    sharded = {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    base = case("launched", arguments=SAVE)
    return [
        base,
        resumed(base),
        resumed(base, name="four_to_two", source="four_fsdp"),
        resumed(base, name="four_to_two_sharded", source="four_fsdp_sharded", environment=sharded),
        *(
            [resumed(base, name="hsdp_to_two_sharded", source="hsdp_sharded", environment=sharded)]
            if PARALLELISM
            else []
        ),
    ]


def alone() -> list[Case]:
    """Return a run of one process that resumes from a checkpoint of FSDP2."""
    return [resumed(case("one"), name="two_to_one", source="fsdp_for_one")]


STAGE_OF = {
    case["name"]: stage
    for stage, cases in {
        "one": one,
        "two": two,
        "four": four,
        "launched": launched,
        "alone": alone,
    }.items()
    for case in cases()
}

# The cases that tests of the first tier need; there the processes of a stage run no other case.
FIRST = {
    *("one", "one_resumed", "one_moved_0", "one_moved_1", "one_even", "one_even_moved_0", "one_even_moved_1"),
    *("ddp", "ddp_resumed", "fsdp", "fsdp_resumed", "fsdp_sharded", "fsdp_sharded_resumed", "fsdp_poisoned"),
    *("fp16", "offload", "offload_resumed", "tp", "native_tp"),
    *("hsdp", "hsdp_resumed", "two_to_four_sharded", "launched", "launched_resumed"),
}
