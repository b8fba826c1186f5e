"""Trainer in every layout: starts of `layouts_worker`, which run when a test first asks for a result; comparisons."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.e2e import layouts_worker as worker
from tests.e2e.harness import ACCELERATE_FSDP2, ACCELERATE_HSDP, ROOT, accelerate_variables, server
from tests.support.bounds import beyond_rounding

Result = dict[str, Any]

ACCELERATE = tuple(int(part) for part in importlib.metadata.version("accelerate").split(".")[:2])
TRANSFORMERS = tuple(int(part) for part in importlib.metadata.version("transformers").split(".")[:2])
PARALLELISM = ACCELERATE >= (1, 12)  # Trainer takes a ParallelismConfig
LOADS_SHARDS = ACCELERATE >= (1, 13)  # older versions lose the moments of any optimizer
DDP_RESUMES = TRANSFORMERS >= (5, 20)  # older versions load the optimizer to cpu:0, a device that torch does not know
NATIVE = TRANSFORMERS >= (5, 20)  # from_pretrained(distributed_config=...)

# Not all versions of `make test-versions` have these.
needs_parallelism = pytest.mark.skipif(not PARALLELISM, reason="accelerate 1.12 has a ParallelismConfig")
loads_shards = pytest.mark.skipif(not LOADS_SHARDS, reason="accelerate 1.13 loads sharded moments")
ddp_resumes = pytest.mark.skipif(not DDP_RESUMES, reason="this Trainer cannot resume DDP on a CPU")
needs_native = pytest.mark.skipif(not NATIVE, reason="transformers has no DistributedConfig for training")


@dataclass(frozen=True)
class Start:
    """A start of ranks: a run of `layouts_worker`, and what the same ranks run after it.

    `resumes`: the run saves, and is resumed as NAME_resumed by a model that starts from other random weights.
    `controls`: it runs as NAME_moved_0 and _1 from weights moved by one unit in the last place.
    `source`: the start from whose checkpoint it resumes; `drop`: without moments.
    `config`: the example from whose content `accelerate launch` sets the environment.
    """

    ranks: int = 2
    layout: str = "plain"
    model: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    resumes: bool = False
    controls: bool = False
    source: str = ""
    drop: bool = False
    load: dict[str, Any] | None = None
    config: str = ""

    def cases(self, name: str) -> list[dict[str, Any]]:
        saves = {"save_strategy": "steps", "save_steps": worker.SAVE_STEP} if self.resumes else {}
        base = {"name": name, "layout": self.layout, "model": self.model, "arguments": self.arguments | saves}
        base |= {"load": self.load} if self.load else {}
        # An adapter's checkpoint is the adapter alone.
        other = base | {"model": self.model | {"lora_seed" if self.model.get("lora") else "seed": 3}}
        if self.source:
            return [other | {"resume": f"{self.source}/checkpoint-{worker.SAVE_STEP}", "drop": self.drop}]
        cases = [base]
        if self.resumes:
            resumed = other | {"resume": f"{name}/checkpoint-{worker.SAVE_STEP}"}
            cases += [resumed | {"name": f"{name}_resumed"}]
        if self.controls:
            moved = [base | {"model": self.model | {"moved": seed}, "arguments": self.arguments} for seed in (0, 1)]
            cases += [case | {"name": f"{name}_moved_{seed}"} for seed, case in enumerate(moved)]
        return cases


EVEN = {"even": True}
SHARDED = {"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
SETTINGS = {"cpu_ram_efficient_loading": True, "reshard_after_forward": False, "activation_checkpointing": True}
# What wraps modules or parameters, or changes when they step, all at once: `fused` is a Phi-3.
TOGETHER: dict[str, Any] = {"model": {"tied": True, "fused": True, "frozen": True}}
ACCUMULATED = {"gradient_accumulation_steps": 2}
WRAPPED = {"torch_compile": True, "torch_compile_backend": "aot_eager", "gradient_checkpointing": True}
LORA: dict[str, Any] = {
    "model": {"lora": True},
    "arguments": {"optim_args": "ns_dtype=fp32,lora=muon", "max_grad_norm": 0.05},
}
BF16 = {"bf16": True}
# Layouts round gradients differently, and weights that are rounded at random then draw other bits.
BF16_WEIGHTS: dict[str, Any] = {
    "model": {"bf16": "stored"},
    "arguments": BF16 | {"optim_args": "ns_dtype=fp32,weight_rounding=nearest"},
}

STARTS = {
    "one": Start(1, resumes=True, controls=True),
    "one_even": Start(1, model=EVEN, controls=True),
    "one_together": Start(1, **TOGETHER, arguments=ACCUMULATED, controls=True),
    "one_lora": Start(1, **LORA, controls=True),
    "one_bf16": Start(1, arguments=BF16),
    "one_bf16_rounded": Start(1, model={"bf16": "rounded"}, arguments=BF16),
    "one_bf16_weights": Start(1, **BF16_WEIGHTS),
    "ddp": Start(resumes=DDP_RESUMES),
    "ddp_together": Start(**TOGETHER, arguments=ACCUMULATED),
    "ddp_lora": Start(**LORA),
    "ddp_bf16": Start(arguments=BF16),
    "ddp_bf16_weights": Start(**BF16_WEIGHTS),
    "fsdp": Start(2, "fsdp2", resumes=True),
    "fsdp_sharded": Start(2, "fsdp2", arguments=SHARDED, resumes=LOADS_SHARDS),
    "fsdp_forgotten": Start(2, "fsdp2", arguments=SHARDED, resumes=True),
    "fsdp_together": Start(2, "fsdp2", **TOGETHER, arguments=ACCUMULATED | WRAPPED),
    "fsdp_lora": Start(2, "fsdp2", LORA["model"], LORA["arguments"] | SHARDED, resumes=LOADS_SHARDS),
    "fsdp_settings": Start(2, "fsdp2", arguments={"fsdp_config": SETTINGS}),
    "fsdp_bf16": Start(2, "fsdp2", arguments=BF16, resumes=True),
    "fsdp_bf16_weights": Start(2, "fsdp2", **BF16_WEIGHTS),
    "fp16": Start(2, "fp16"),
    "offload": Start(
        2, "fsdp2", arguments={"fsdp": "full_shard offload", "fsdp_config": {"cpu_offload": True}}, resumes=True
    ),
    "launched": Start(resumes=True, config=ACCELERATE_FSDP2),
    "tp": Start(model=EVEN, arguments={"parallelism": {"tp_size": 2}}, load={"tp_plan": "auto"}),
    "native_fsdp": Start(load={"fsdp_size": 2}),
    "native_tp": Start(model=EVEN, load={"tp_size": 2}),
    "native_hsdp": Start(4, load={"fsdp_size": 2, "dp_replicate_size": 2}),
    "native_fsdp_tp": Start(4, model=EVEN, load={"fsdp_size": 2, "tp_size": 2}),
    "hsdp": Start(4, resumes=True, config=ACCELERATE_HSDP),
    "hsdp_sharded": Start(4, "fsdp2", arguments=SHARDED, resumes=True, config=ACCELERATE_HSDP),
    "ddp_dropped": Start(source="ddp", drop=True),
    "fsdp_dropped": Start(2, "fsdp2", source="fsdp", drop=True),
    "two_to_one": Start(1, source="fsdp"),
    "two_to_four": Start(4, "fsdp2", source="fsdp"),
    "two_to_four_sharded": Start(4, "fsdp2", arguments=SHARDED, source="fsdp_sharded"),
    "two_to_hsdp_sharded": Start(4, "fsdp2", arguments=SHARDED, source="fsdp_sharded", config=ACCELERATE_HSDP),
    "hsdp_to_two_sharded": Start(2, "fsdp2", arguments=SHARDED, source="hsdp_sharded"),
}


class Runs:
    """Results by name of a run; its start, and the one from whose checkpoint it resumes, run when they are needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str) -> Result:
        path = self.folder / f"{name}.pt"
        if not path.exists():
            self.start(next(start for start in (name, name.rpartition("_")[0], name[:-8]) if start in STARTS))
        result: Result = torch.load(path, weights_only=False, map_location="cpu")
        return result

    def start(self, name: str, *, fails: bool = False) -> str:
        """Start ranks and return what they print."""
        start = STARTS[name]
        if start.source:
            self(start.source)
        if name == "two_to_one":  # in one process Trainer reads model.safetensors, which FSDP2 has written too
            copy = self.folder / "one_of_two" / f"checkpoint-{worker.SAVE_STEP}"
            shutil.copytree(self.folder / start.source / copy.name, copy, dirs_exist_ok=True)
            (copy / "pytorch_model_fsdp.bin").unlink()
            (copy / "optimizer.bin").rename(copy / "optimizer.pt")
        variables = accelerate_variables(start.config, start.ranks, self.folder) if start.config else {}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        words = [worker.__file__, self.folder, self.write(name)]
        variables = variables | {"PYTHONPATH": path}
        return server.run(words, cwd=self.folder, ranks=start.ranks, fails=fails, **variables)

    def write(self, name: str, **arguments: Any) -> Path:
        """Write the cases of a start, with further arguments."""
        cases = STARTS[name].cases(name)
        if name == "two_to_one":
            cases[0]["resume"] = cases[0]["resume"].replace("fsdp", "one_of_two")
        cases = [case | {"arguments": case["arguments"] | arguments} for case in cases]
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(cases), encoding="utf-8")
        return path


def start_of(**options: Any) -> dict[str, Tensor]:
    """Return the weights from which a run starts."""
    return {worker.clean(name): p.detach().clone() for name, p in worker.network(**options).named_parameters()}


def distance(result: Result, expected: Result, start: Mapping[str, Tensor]) -> float:
    """Return the distance of two runs' weights relative to the distance from the start, the largest of all weights."""
    a, b = result["weights"], expected["weights"]
    trained = {name.partition(":")[0] for name in expected["state"]}
    assert all(not torch.equal(b[name], start[name]) for name in trained), "a parameter did not move"
    assert all(torch.equal(a[name], start[name]) for name in start.keys() - trained), "a frozen parameter moved"
    return max(float((a[name] - b[name]).norm() / (b[name] - start[name]).norm()) for name in trained)


def groups(result: Result) -> list[dict[str, Any]]:
    """Return the param groups with tuples as lists, which a full state dict makes of them."""
    return [{k: list(v) if isinstance(v, tuple) else v for k, v in group.items()} for group in result["groups"]]


def numbers(result: Result) -> dict[str, Tensor]:
    """Return losses, gradient norms, weights and moments by name."""
    logs = {f"{key} {list(result[key])}": torch.tensor(list(result[key].values())) for key in ("losses", "grad_norms")}
    return {**logs, **result["weights"], **result["state"]}


def assert_same_run(name: str, reference: str, runs: Runs) -> None:
    """Compare weights, moments, losses, gradient norms and groups, up to the rounding of another order of sums."""
    result, expected = runs(name), runs(reference)
    assert result["agree"], "ranks hold different weights or moments"
    assert min(expected["grad_norms"].values()) > expected["max_grad_norm"], "clipping was not active"
    start = start_of(**STARTS[reference].model)
    assert distance(result, expected, start) < torch.inf, "a frozen parameter moved, or a trained one did not"
    controls = [numbers(runs(f"{reference}_moved_{seed}")) for seed in (0, 1)]
    assert not beyond_rounding(numbers(result), numbers(expected), controls)
    assert groups(result) == groups(expected)


def assert_identical(result: Result, expected: Result) -> None:
    """Compare weights, moments and losses of all steps bit for bit; the log of a checkpoint has those before it."""
    assert result["agree"]
    for key in ("weights", "state"):
        torch.testing.assert_close(result[key], expected[key], rtol=0, atol=0)
    assert result["losses"] == expected["losses"]
    assert groups(result) == groups(expected)
