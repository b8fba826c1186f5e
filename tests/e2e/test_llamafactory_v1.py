"""`optim_config: {name: muon}` in the real LLaMA-Factory v1: in one process, and in two with DDP, FSDP2 and Ulysses.

The runs are those of the examples, with a tiny model, tiny data and few steps.
"""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_muon import build_optimizer
from hf_muon.rules.normalize import SECOND_MOMENT
from tests.e2e.harness import (
    ALL_MATRICES,
    BIN,
    LLAMAFACTORY_V1,
    LLAMAFACTORY_V1_FSDP2,
    LLAMAFACTORY_V1_ULYSSES,
    ROOT,
    YAML,
    assert_close,
    distance,
    free_port,
    llamafactory_server,
    read_yaml,
    run,
    v1_has_top_level_keys,
    weights,
)
from tests.integrations.llamafactory_v1_stand_ins import ARGUMENTS, NEW, OLD, Net
from tests.support import fixtures_text

pytestmark = [pytest.mark.slow, pytest.mark.llamafactory]

WORKER = ROOT / "tests" / "e2e" / "v1_worker.py"
DDP, FSDP2 = "ddp", "fsdp2"


class Runs:
    """Folders of finished runs, their common settings, and what the ranks of each start printed."""

    def __init__(self, folder: Path, model: Path, data: Path) -> None:
        self.folder, self.model = folder, model
        self.printed: dict[int, str] = {}
        self.shared: dict[str, Any] = {
            "model": str(model),
            "train_dataset": str(fixtures_text.write_v1_data(folder, data)),
            "cutoff_len": 64,
            "micro_batch_size": 2,  # that of two processes together
            "learning_rate": 1e-3,
            "max_steps": 4,
            "save_steps": 2,
            "max_grad_norm": 0.5,  # clips every step
            "logging_steps": 1,
            "bf16": False,
            "batching_workers": 0,
            "resume_from_checkpoint": None,
            # In bf16 the rounding of products would hide the order of a sum.
            # Newer sources have a `muon` of their own, which then runs.
            "optim_config": {
                "name": "hf_muon" if v1_has_top_level_keys() else "muon",
                "weight_decay": 0.1,
                "ns_dtype": "fp32",
            },
        }

    def settings(self, name: str, example: str, **changes: Any) -> dict[str, Any]:
        return read_yaml(YAML / example) | self.shared | {"output_dir": str(self.folder / name)} | changes

    def straight_and_resumed(self, name: str, example: str, **changes: Any) -> dict[str, dict[str, Any]]:
        """Return a run, and the same resumed from its checkpoint."""
        resume = changes | {"resume_from_checkpoint": str(self.folder / name / "checkpoint-2")}
        return {
            name: self.settings(name, example, **changes),
            f"{name}_resumed": self.settings(f"{name}_resumed", example, **resume),
        }

    def start(self, cases: dict[str, dict[str, Any]], ranks: int) -> str:
        path = self.folder / f"{next(iter(cases))}.json"
        path.write_text(json.dumps(cases), encoding="utf-8")
        diagnostics = {"LLAMAFACTORY_MUON_DIAG": "1"}
        return llamafactory_server.run([WORKER, path], cwd=self.folder, ranks=ranks, **diagnostics)

    def weights(self, name: str) -> dict[str, Tensor]:
        return weights(self.folder / name)

    def record(self, name: str) -> dict[str, Any]:
        """Return the losses and the first gradients of a run, and the shapes over which Ulysses attended."""
        record: dict[str, Any] = torch.load(self.folder / name / "record.pt", weights_only=True)
        return record

    def optimizer(self, name: str) -> dict[str, Any]:
        """Return the optimizer state of the last checkpoint, keyed by position, or by name under FSDP2."""
        saved = self.folder / name / "checkpoint-4" / "optimizer"
        if not (saved / "state_dict.pt").exists():
            from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

            dcp_to_torch_save(saved, saved / "state_dict.pt")
        state: dict[str, Any] = torch.load(saved / "state_dict.pt", weights_only=True)
        return state


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model, llamafactory_data):
    """Start one process, and two for all other runs but that with Ulysses, whose mesh is another one."""
    runs = Runs(tmp_path_factory.mktemp("v1"), tiny_model, llamafactory_data)
    cases = runs.straight_and_resumed("one", LLAMAFACTORY_V1)
    cases["dropped"] = cases["one_resumed"] | {"output_dir": str(runs.folder / "dropped"), "drop_momentum": True}
    runs.printed[1] = runs.start(cases, 1)
    cases = runs.straight_and_resumed(DDP, LLAMAFACTORY_V1, micro_batch_size=1)
    cases |= runs.straight_and_resumed(FSDP2, LLAMAFACTORY_V1_FSDP2, micro_batch_size=1)
    offload = {"name": "fsdp2", "offload_params": True, "pin_memory": False}
    cases["offload"] = cases[FSDP2] | {"dist_config": offload, "output_dir": str(runs.folder / "offload")}
    runs.printed[2] = runs.start(cases, 2)
    return runs


@pytest.mark.promise("llamafactory-v1")
@pytest.mark.parametrize("name", [DDP, FSDP2])
def test_two_processes_agree_with_one(name, runs, rounding):
    assert_close(runs.weights(name), runs.weights("one"), weights(runs.model), rounding)


@pytest.mark.promise("llamafactory-v1-ulysses")
def test_cp_on_two_ranks_equals_cp_off(runs):
    """LLaMA-Factory's own Ulysses needs CUDA and flash-attn, for which the worker stands in."""
    example = LLAMAFACTORY_V1_ULYSSES[v1_has_top_level_keys()]
    settings = runs.settings("ulysses", example, flash_attn="sdpa", save_steps=None)
    runs.start({"ulysses": settings}, 2)
    on, off = runs.record("ulysses"), runs.record("one")
    assert on["attended"] == {(64, 2, 1)}, "whole sequences, and half of the 4 query and 2 key heads"
    assert off["attended"] == set()
    assert on["losses"] == pytest.approx(off["losses"], rel=1e-6)
    assert on["gradients"].keys() == off["gradients"].keys()
    for name, gradient in off["gradients"].items():
        assert (on["gradients"][name] - gradient).norm() < 1e-5 * gradient.norm(), name
    assert distance(runs.weights("ulysses"), runs.weights("one"), weights(runs.model)) < 1e-4


def test_parameters_on_the_cpu_change_nothing(runs):
    torch.testing.assert_close(runs.weights("offload"), runs.weights(FSDP2), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["one", DDP, FSDP2])
def test_everything_reached_the_optimizer(name, runs):
    saved = runs.optimizer(name)
    groups = {(group["use_muon"], group["weight_decay"]): group for group in saved["param_groups"]}
    assert set(groups) == {(True, 0.1), (False, 0.1), (False, 0.0)}
    assert set(groups[True, 0.1]["param_names"]) == ALL_MATRICES
    assert {group["lr"] for group in groups.values()} == {1e-3}
    momenta = [state["momentum_buffer"] for state in saved["state"].values() if "momentum_buffer" in state]
    assert len(momenta) == len(ALL_MATRICES)
    assert all(momentum.dtype == torch.float32 and momentum.any() for momentum in momenta)


@pytest.mark.promise("llamafactory-v1")
@pytest.mark.parametrize("name", ["one", DDP, FSDP2])
def test_resumed_run_equals_the_uninterrupted_one(name, runs):
    """Compare weights, moments and param groups bit for bit."""
    assert [runs.printed[ranks].count("Resumed from checkpoint: step=2") for ranks in (1, 2)] == [2, 2]
    torch.testing.assert_close(runs.weights(f"{name}_resumed"), runs.weights(name), rtol=0, atol=0)
    there, here = runs.optimizer(name), runs.optimizer(f"{name}_resumed")
    for group in (*here["param_groups"], *there["param_groups"]):
        group.pop("differentiable", None)  # torch adds this key to loaded groups
    assert here["param_groups"] == there["param_groups"]
    torch.testing.assert_close(here["state"], there["state"], rtol=0, atol=0)
    # A run that resumes without momentum differs; otherwise the comparison above would show nothing.
    assert distance(runs.weights("dropped"), runs.weights("one"), weights(runs.model)) > 1e-2


@pytest.mark.extended
def test_a_checkpoint_without_optimizer_state_is_named(runs):
    """v1 goes on with new moments, and does not say so."""
    checkpoint = runs.folder / "lost" / "checkpoint-2"
    shutil.copytree(runs.folder / "one" / checkpoint.name, checkpoint)
    (checkpoint / "optimizer" / "state_dict.pt").unlink()
    settings = runs.settings("lost", LLAMAFACTORY_V1, resume_from_checkpoint=str(checkpoint))
    assert "[no-optimizer-state]" in runs.start({"lost": settings}, 1)
    assert "[no-optimizer-state]" not in runs.printed[1]


def test_one_report_of_the_first_step_for_each_run(runs):
    reports = runs.printed[2].split("the first step of Muon, as rank 0 sees it (2 processes, gloo):")[1:]
    assert len(reports) == 5, "rank 0 logs one for each run"
    stored = {
        DDP: ["parameter  Parameter (80, 32), float32, cpu", "gradient   Tensor (80, 32), float32, cpu"],
        FSDP2: [
            f"{what}DTensor (80, 32), placements (Replicate(), Shard(dim=0)), "
            "mesh (1, 2) ('mp_replicate', 'mp_shard'), local (40, 32), float32, cpu"
            for what in ("parameter  ", "gradient   ")
        ],
    }
    steps = {
        DDP: "Muon, stored whole on each, one owner of 2 ranks",
        FSDP2: "Muon, parts travel to one owner of 2 ranks",
    }
    for name, report in ((DDP, reports[0]), (FSDP2, reports[2])):
        entry = report[report.index("model.layers.*.mlp.up_proj.weight  (2 of them)") :].splitlines()
        assert [line.strip() for line in entry[1:3]] == stored[name]
        assert steps[name] in entry[3]
        assert "5 Newton-Schulz steps in float32" in entry[3]
        assert "AdamW on the local part" in report[report.index("model.norm.weight") :].splitlines()[3]


@pytest.mark.extended
def test_the_command_starts_ranks_that_train_the_same(runs):
    path = runs.folder / "command.yaml"
    path.write_text(json.dumps(runs.settings("command", LLAMAFACTORY_V1_FSDP2, micro_batch_size=1)), encoding="utf-8")
    launch = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "MASTER_PORT": free_port(), "USE_V1": "1"}
    printed = run([BIN / "llamafactory-cli", "sft", path], cwd=runs.folder, **launch)
    assert printed.count("which parameter goes where") == 1
    assert "2 distributed tasks" in printed
    torch.testing.assert_close(runs.weights("command"), runs.weights(FSDP2), rtol=0, atol=0)


def test_refused_before_the_model_is_loaded(runs):
    changes = {"dist_config": {"name": "other", "cp_size": 2}, "model": "no_model_is_here"}
    path = runs.folder / "bad.yaml"
    path.write_text(json.dumps(runs.settings("bad", LLAMAFACTORY_V1, **changes)), encoding="utf-8")
    words = [BIN / "llamafactory-cli", "sft", path]
    printed = llamafactory_server.run(words, cwd=runs.folder, fails=True, USE_V1="1")
    assert "[cp-without-fsdp2]" in printed


@pytest.mark.extended
def test_ulysses_files_differ_in_the_place_of_their_keys_alone(tmp_path):
    inside, top_level = (read_yaml(YAML / name) for name in LLAMAFACTORY_V1_ULYSSES)
    moved = {key: inside["dist_config"].pop(key) for key in ("cp_mode", "cp_size")}
    assert inside | moved == top_level
    assert moved == {"cp_mode": "ulysses", "cp_size": 2}
    if not v1_has_top_level_keys():
        code = "from llamafactory.v1.config import get_args; get_args()"
        path = YAML / LLAMAFACTORY_V1_ULYSSES[1]
        assert "cp_mode" in llamafactory_server.run_code(code, path, cwd=tmp_path, fails=True)


# --- the installed LLaMA-Factory


def test_the_installed_llamafactory_is_one_of_the_two_layouts(tmp_path):
    code = f"""
import dataclasses, importlib.util, json
parents = [name for name in {[OLD, NEW]!r} if importlib.util.find_spec(name.rpartition(".")[0])]
spec = [name for name in parents if importlib.util.find_spec(name)]
from llamafactory.v1.config.training_args import TrainingArguments
module = importlib.import_module(spec[0])
from hf_muon import _autoload
fields = [field.name for field in dataclasses.fields(TrainingArguments)]
states = {{hook.module: _autoload.status()[name] for name, hook in _autoload.HOOKS.items()}}
print(json.dumps([spec, fields, states, type(module.OptimizerPlugin._registry["muon"]).__name__]))
"""
    printed = llamafactory_server.run_code(code, cwd=tmp_path)
    layouts, fields, states, entry = json.loads(printed.strip().splitlines()[-1])
    assert len(layouts) == 1
    assert states[layouts[0]] == states[ARGUMENTS] == "patched"
    assert {"learning_rate", "dist_config", "optim_config"} <= set(fields)
    assert ("cp_size" in fields, entry) == {OLD: (False, "dict"), NEW: (True, "function")}[layouts[0]]


def test_a_checkpoint_of_fsdp2_loads_with_a_rule_switched_on(tmp_path):
    """Compare with the whole state; LLaMA-Factory's own functions save and load, in one process."""
    fsdp2 = importlib.import_module("llamafactory.v1.plugins.trainer_plugins.distributed.fsdp2")
    model = Net()
    optimizer = build_optimizer(model, lr=3e-3)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    fsdp2.save_checkpoint(model, optimizer, str(tmp_path))
    states = []
    for load in (
        lambda other, muon: fsdp2.load_checkpoint(other, muon, str(tmp_path)),
        lambda other, muon: muon.load_state_dict(optimizer.state_dict()),
    ):
        other = Net()
        muon = build_optimizer(other, lr=3e-3, normalize="rows")
        load(other, muon)
        muon.init_state()
        states.append(muon.state_dict()["state"])
    loaded, expected = states
    assert any(SECOND_MOMENT in own for own in loaded.values())
    for key, own in expected.items():
        assert own.keys() == loaded[key].keys()
        assert all(torch.equal(loaded[key][name], value) for name, value in own.items())
