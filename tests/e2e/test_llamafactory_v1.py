"""`optim_config: {name: muon}` in the real LLaMA-Factory v1: in one process, and in two with DDP and with FSDP2."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_muon import build_optimizer
from hf_muon.rules.normalize import SECOND_MOMENT
from tests import fixtures_text
from tests.e2e.example_files import ALL_MATRICES
from tests.e2e.harness import (
    CPU_V1,
    ROOT,
    assert_close,
    distance,
    llamafactory_server,
    llamafactory_v1,
    v1_has_top_level_keys,
    weights,
)
from tests.integrations.llamafactory_v1_stand_ins import ARGUMENTS, NEW, OLD, Net

pytestmark = [pytest.mark.slow, pytest.mark.llamafactory]

WORKER = ROOT / "tests" / "e2e" / "v1_worker.py"
DDP, FSDP2 = "ddp", "fsdp2"


class Runs:
    """Folders of finished runs, their common settings, and the output of the two ranks."""

    def __init__(self, folder: Path, model: Path, data: Path) -> None:
        self.folder, self.model = folder, model
        self.shared: dict[str, Any] = {
            "model": str(model),
            "train_dataset": str(fixtures_text.write_v1_data(folder, data)),
            "cutoff_len": 64,
            "learning_rate": 1e-3,
            "max_steps": 4,
            "save_steps": 2,
            "bf16": False,
            "batching_workers": 0,
            # In bf16 the rounding of products would hide the order of a sum.
            "optim_config": {"name": "muon", "weight_decay": 0.1, "ns_dtype": "fp32"},
        }
        self.printed = ""

    def weights(self, name: str) -> dict[str, Tensor]:
        return weights(self.folder / name)

    def yaml(self, name: str, changes: dict[str, Any]) -> Path:
        """Write the YAML file of a run in one process, whose batch is that of two processes together."""
        settings = self.shared | {"micro_batch_size": 2, "output_dir": str(self.folder / name)} | changes
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(settings), encoding="utf-8")
        return path

    def optimizer(self, name: str) -> dict[str, Any]:
        """Return the optimizer state of the last checkpoint, keyed by position, or by name under FSDP2."""
        saved = self.folder / name / "checkpoint-4" / "optimizer"
        if not (saved / "state_dict.pt").exists():
            from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

            dcp_to_torch_save(saved, saved / "state_dict.pt")
        state: dict[str, Any] = torch.load(saved / "state_dict.pt", weights_only=True)
        return state


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, llamafactory_data: Path) -> Runs:
    """Run one process from the command line, and all other runs one after the other in two ranks."""
    runs = Runs(tmp_path_factory.mktemp("v1"), tiny_model, llamafactory_data)
    llamafactory_v1(runs.yaml("one", {}), {}, cwd=runs.folder)
    cases: dict[str, dict[str, Any]] = {}
    for name in (DDP, FSDP2):
        layout = {"micro_batch_size": 1} | ({"dist_config": {"name": "fsdp2"}} if name == FSDP2 else {})
        resume = {"resume_from_checkpoint": str(runs.folder / name / "checkpoint-2")}
        for case, changes in (
            (name, {}),
            (f"{name}_resumed", resume),
            (f"{name}_dropped", resume | {"drop_momentum": True}),
        ):
            cases[case] = runs.shared | layout | changes | {"output_dir": str(runs.folder / case)}
    offload = {"name": "fsdp2", "offload_params": True, "pin_memory": False}
    cases["offload"] = cases[FSDP2] | {"dist_config": offload, "output_dir": str(runs.folder / "offload")}
    (runs.folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    words = [WORKER, runs.folder / "cases.json"]
    runs.printed = llamafactory_server.run(words, cwd=runs.folder, ranks=2, path=CPU_V1, LLAMAFACTORY_MUON_DIAG="1")
    return runs


@pytest.mark.promise("llamafactory-v1")
@pytest.mark.parametrize("name", [DDP, FSDP2])
def test_two_processes_agree_with_one(name: str, runs: Runs, rounding: dict[str, float]) -> None:
    assert_close(runs.weights(name), runs.weights("one"), weights(runs.model), rounding)


def test_parameters_on_the_cpu_change_nothing(runs: Runs) -> None:
    offloaded, expected = runs.weights("offload"), runs.weights(FSDP2)
    assert offloaded.keys() == expected.keys()
    assert all(torch.equal(offloaded[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("name", ["one", DDP, FSDP2])
def test_everything_reached_the_optimizer(name: str, runs: Runs) -> None:
    saved = runs.optimizer(name)
    groups = {(group["use_muon"], group["weight_decay"]): group for group in saved["param_groups"]}
    assert set(groups) == {(True, 0.1), (False, 0.1), (False, 0.0)}
    assert set(groups[True, 0.1]["param_names"]) == ALL_MATRICES
    assert {group["lr"] for group in groups.values()} == {1e-3}
    momenta = [state["momentum_buffer"] for state in saved["state"].values() if "momentum_buffer" in state]
    assert len(momenta) == len(ALL_MATRICES)
    assert all(momentum.dtype == torch.float32 and momentum.any() for momentum in momenta)


@pytest.mark.promise("llamafactory-v1")
@pytest.mark.parametrize("name", [DDP, FSDP2])
def test_resumed_run_equals_the_uninterrupted_one(name: str, runs: Runs) -> None:
    assert runs.printed.count("Resumed from checkpoint: step=2") == 4
    assert_equal(runs, name, f"{name}_resumed")
    # A run that resumes without momentum differs; otherwise the comparison above would show nothing.
    assert distance(runs.weights(f"{name}_dropped"), runs.weights(name), weights(runs.model)) > 1e-2


@pytest.mark.extended
def test_resumed_run_equals_the_uninterrupted_one_in_one_process(runs: Runs) -> None:
    path = runs.yaml("one_resumed", {"resume_from_checkpoint": str(runs.folder / "one" / "checkpoint-2")})
    printed = llamafactory_v1(path, {}, cwd=runs.folder)
    assert "Resumed from checkpoint: step=2" in printed
    assert "the first step of Muon" not in printed
    assert_equal(runs, "one", "one_resumed")


def assert_equal(runs: Runs, straight: str, resumed: str) -> None:
    """Compare weights, moments and param groups of two runs bit for bit."""
    expected, weights_resumed = runs.weights(straight), runs.weights(resumed)
    assert [name for name in expected if not torch.equal(weights_resumed[name], expected[name])] == []
    there, here = runs.optimizer(straight), runs.optimizer(resumed)
    for group in (*here["param_groups"], *there["param_groups"]):
        group.pop("differentiable", None)  # torch adds this key to loaded groups
    assert here["param_groups"] == there["param_groups"]
    assert here["state"].keys() == there["state"].keys()
    for name, state in there["state"].items():
        assert [key for key in state if not torch.equal(here["state"][name][key], state[key])] == [], name


def test_one_report_of_the_first_step_for_each_run(runs: Runs) -> None:
    reports = runs.printed.split("the first step of Muon, as rank 0 sees it (2 processes, gloo):")[1:]
    assert len(reports) == 7, "rank 0 logs one for each run"
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
    for name, report in ((DDP, reports[0]), (FSDP2, reports[3])):
        entry = report[report.index("model.layers.*.mlp.up_proj.weight  (2 of them)") :].splitlines()
        assert [line.strip() for line in entry[1:3]] == stored[name]
        assert steps[name] in entry[3]
        assert "5 Newton-Schulz steps in float32" in entry[3]
        assert "AdamW on the local part" in report[report.index("model.norm.weight") :].splitlines()[3]


def test_their_own_muon_is_replaced_with_one_line_for_each_run(runs: Runs) -> None:
    expected = 7 if v1_has_top_level_keys() else 0  # LLaMA-Factory 0.9.5 has no muon
    assert runs.printed.count("this LLaMA-Factory has a Muon of that name, too") == expected
    assert "already registered" not in runs.printed


def test_refused_before_the_model_is_loaded(runs: Runs) -> None:
    path = runs.yaml("bad", {"dist_config": {"name": "other", "cp_size": 2}, "model": "no_model_is_here"})
    assert "[cp-without-fsdp2]" in llamafactory_v1(path, {}, cwd=runs.folder, fails=True)


# --- the installed LLaMA-Factory


def test_the_installed_llamafactory_is_one_of_the_two_layouts(tmp_path: Path) -> None:
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


def test_a_checkpoint_of_fsdp2_loads_with_a_rule_switched_on(tmp_path: Path) -> None:
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
