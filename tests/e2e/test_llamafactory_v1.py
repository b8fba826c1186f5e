"""`optim_config: {name: muon}` in the real LLaMA-Factory v1: in one process, and in two with DDP and with FSDP2."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import fixtures_text
from tests.e2e.harness import (
    BIN,
    CPU_V1,
    ROOT,
    assert_close,
    distance,
    llamafactory_v1,
    run,
    v1_has_top_level_keys,
    weights,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llamafactory") is None, reason="llamafactory is not installed"),
]

MATRICES = {f"{name}.weight" for name in fixtures_text.qwen3_matrices()}
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
    command = [BIN / "torchrun", "--standalone", "--nproc-per-node", 2, WORKER, runs.folder / "cases.json"]
    runs.printed = run(command, cwd=runs.folder, path=CPU_V1, LLAMAFACTORY_MUON_DIAG="1")
    return runs


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
    assert set(groups[True, 0.1]["param_names"]) == MATRICES
    assert {group["lr"] for group in groups.values()} == {1e-3}
    momenta = [state["momentum_buffer"] for state in saved["state"].values() if "momentum_buffer" in state]
    assert len(momenta) == len(MATRICES)
    assert all(momentum.dtype == torch.float32 and momentum.any() for momentum in momenta)


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


@pytest.mark.extended(but="bad_dist")
@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        (
            "bad_key",
            {"optim_config": {"name": "muon", "momentun": 0.9}},
            "'momentun' is not an option of muon. Did you",
        ),
        ("bad_dist", {"dist_config": {"name": "other", "cp_size": 2}}, "cp_size: 2 needs dist_config: {name: fsdp2}"),
    ],
)
def test_refused_before_the_model_is_loaded(name: str, changes: dict[str, Any], sentence: str, runs: Runs) -> None:
    path = runs.yaml(name, changes | {"model": str(runs.folder / "no_model_is_here")})
    assert sentence in llamafactory_v1(path, {}, cwd=runs.folder, fails=True)
