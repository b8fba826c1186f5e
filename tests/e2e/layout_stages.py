"""Starts of the processes that run the cases of `layout_cases`, and comparisons of the results."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.bounds import beyond_rounding
from tests.e2e import layout_cases
from tests.e2e import layouts_worker as worker
from tests.e2e.harness import ROOT, accelerate_variables, server
from tests.e2e.layout_cases import Case

Result = dict[str, Any]
Get = Callable[[str], Result]

ACCELERATE_CONFIG = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 2,
    "machine_rank": 0,
    "main_training_function": "main",
    "rdzv_backend": "static",
    "use_cpu": False,  # with true, `accelerate launch` starts one process; the training arguments set use_cpu
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": False,
    },
}


class Stages:
    """Starts of processes. Each stage runs once in a test session, for all workers of pytest-xdist.

    Args:
        folder: where the processes write, the same folder for all workers.
        first: whether to run only the cases of `layout_cases.FIRST`.
    """

    def __init__(self, folder: Path, *, first: bool = False) -> None:
        self.folder = folder
        self.first = first
        folder.mkdir(exist_ok=True)

    def result(self, stage: str, name: str) -> Result:
        """Return the result of a case, after its stage has run."""
        self.run(stage)
        result: Result = torch.load(self.folder / f"{name}.pt", weights_only=False)
        return result

    def run(self, stage: str) -> str:
        """Run a stage unless it has run, and return what its processes printed."""
        with (self.folder / f"{stage}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            record = self.folder / f"{stage}.done"
            if not record.exists():
                record.write_text("failed")  # a stage that fails is not run again for each of its tests
                record.write_text(getattr(self, f"_{stage}")())
            printed = record.read_text()
            assert printed != "failed", f"the processes of stage {stage} have failed"
            return printed

    def _one(self) -> str:
        return self.start(layout_cases.one())

    def _two(self) -> str:
        return self.start(layout_cases.two(), ranks=2)

    def _four(self) -> str:
        self.run("two")
        return self.start(layout_cases.four(), ranks=4)

    def _launched(self) -> str:
        if not self.first:
            self.run("four")
        return self.start(layout_cases.launched(), ranks=2, **accelerate_variables(ACCELERATE_CONFIG, self.folder))

    def _alone(self) -> str:
        self.run("two")
        source = self.folder / "fsdp" / f"checkpoint-{worker.SAVE_STEP}"
        copy = self.folder / "fsdp_for_one" / source.name
        shutil.copytree(source, copy)
        # In one process Trainer reads model.safetensors, which FSDP2 has written too, and optimizer.pt.
        (copy / "pytorch_model_fsdp.bin").unlink()
        (copy / "optimizer.bin").rename(copy / "optimizer.pt")
        return self.start(layout_cases.alone())

    def start(self, cases: list[Case], *, ranks: int = 1, **variables: str) -> str:
        """Run cases in processes and return what they print; start them again, with a warning, if one is lost.

        An error of a case is its result and ends no process. Only a signal ends one, or a connection that broke on a
        busy machine.
        """
        words = [worker.__file__, self.folder, self.write(cases)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            return server.run(words, cwd=self.folder, ranks=ranks, PYTHONPATH=path, **variables)
        except AssertionError as error:
            warnings.warn(f"these processes were lost, and are started again:\n{error}", stacklevel=1)
            return server.run(words, cwd=self.folder, ranks=ranks, PYTHONPATH=path, **variables)

    def write(self, cases: list[Case]) -> Path:
        if self.first:
            cases = [case for case in cases if case["name"] in layout_cases.FIRST]
        path = self.folder / f"{cases[0]['name']}.json"
        path.write_text(json.dumps(cases), encoding="utf-8")
        return path


def start_of(**options: Any) -> dict[str, Tensor]:
    """Return the weights from which a run starts."""
    return {worker.clean(name): p.detach().clone() for name, p in worker.network(**options).named_parameters()}


def controls_of(name: str, get: Get) -> list[Result]:
    return [get(f"{name}_moved_{seed}") for seed in (0, 1)]


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


def assert_same_run(result: Result, expected: Result, start: Mapping[str, Tensor], controls: list[Result]) -> None:
    """Compare weights, moments, losses, gradient norms and groups, up to the rounding of another order of sums."""
    assert result["agree"], "ranks hold different weights or moments"
    assert min(expected["grad_norms"].values()) > expected["max_grad_norm"], "clipping was not active"
    assert distance(result, expected, start) < torch.inf, "a frozen parameter moved, or a trained one did not"
    assert not beyond_rounding(numbers(result), numbers(expected), [numbers(control) for control in controls])
    assert groups(result) == groups(expected)


def assert_identical(result: Result, expected: Result) -> None:
    """Compare weights, moments and losses of all steps bit for bit."""
    assert result["agree"]
    assert result["weights"].keys() == expected["weights"].keys()
    assert [n for n, x in expected["weights"].items() if not torch.equal(result["weights"][n], x)] == []
    assert result["state"].keys() == expected["state"].keys()
    assert [n for n, x in expected["state"].items() if not torch.equal(result["state"][n], x)] == []
    assert result["losses"] == expected["losses"]  # the log of a checkpoint has the losses before it
    assert groups(result) == groups(expected)
