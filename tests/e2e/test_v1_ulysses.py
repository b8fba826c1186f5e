"""LLaMA-Factory v1's own Ulysses with Muon, on two CPU ranks, against one process without it.

As shipped it needs CUDA and flash-attn, for which `v1_ulysses.py` stands in.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests import fixtures_text
from tests.e2e.harness import (
    CPU_V1,
    ROOT,
    YAML,
    distance,
    llamafactory_server,
    read_yaml,
    v1_has_top_level_keys,
    weights,
)

pytestmark = [pytest.mark.slow, pytest.mark.llamafactory]
SCRIPT = ROOT / "tests" / "e2e" / "v1_ulysses.py"


@pytest.mark.promise("llamafactory-v1-ulysses")
def test_cp_on_two_ranks_equals_cp_off(tiny_model: Path, llamafactory_data: Path, tmp_path: Path) -> None:
    top_level = v1_has_top_level_keys()
    example = read_yaml(YAML / f"llamafactory_v1_qwen3_ulysses{'_top_level' if top_level else ''}.yaml")
    shared = example | {
        "model": str(tiny_model),
        "flash_attn": "sdpa",
        "train_dataset": str(fixtures_text.write_v1_data(tmp_path, llamafactory_data)),
        "cutoff_len": 64,
        "micro_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "bf16": False,
        "batching_workers": 0,
        "save_steps": None,
        "resume_from_checkpoint": None,
        "logging_steps": 1,
        "optim_config": {"name": "muon", "ns_dtype": "fp32"},
        "max_grad_norm": 0.5,  # clips every step
    }
    records = {}
    for name, processes in (("off", 1), ("on", 2)):
        settings = shared | {"output_dir": str(tmp_path / name)}
        if processes == 1:
            settings = {k: v for k, v in settings.items() if k not in ("dist_config", "cp_mode", "cp_size")}
        path, record = tmp_path / f"{name}.json", tmp_path / f"{name}.pt"
        path.write_text(json.dumps(settings), encoding="utf-8")
        llamafactory_server.run([SCRIPT, path, record], cwd=tmp_path, ranks=processes, path=CPU_V1)
        records[name] = torch.load(record, weights_only=True)

    on, off = records["on"], records["off"]
    assert on["attended"] == {(64, 2, 1)}, "whole sequences, and half of the 4 query and 2 key heads"
    assert off["attended"] == set()
    assert on["losses"] == pytest.approx(off["losses"], rel=1e-6)
    assert on["gradients"].keys() == off["gradients"].keys()
    for name, gradient in off["gradients"].items():
        assert (on["gradients"][name] - gradient).norm() < 1e-5 * gradient.norm(), name
    assert distance(weights(tmp_path / "on"), weights(tmp_path / "off"), weights(tiny_model)) < 1e-4
