"""`examples/plain_loop.py` in one process, under DDP and under FSDP2; `test_deepspeed.py` runs it under DeepSpeed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

from tests.e2e.example_files import CPU_FSDP, several
from tests.e2e.harness import BIN, PLAIN_LOOP, assert_close, plain_loop_options, run, weights

pytestmark = [pytest.mark.slow, pytest.mark.extended]

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
TWO = (BIN / "torchrun", "--standalone", "--nproc-per-node", 2)
LAUNCHES = {
    "one": ((BIN / "python",), {}),
    "ddp": (TWO, {}),
    "fsdp2": ((*TWO, CPU_FSDP), FSDP2),
}
OLD_ACCELERATE = tuple(map(int, importlib.metadata.version("accelerate").split(".")[:2])) < (1, 13)


def test_layouts_equal_one_process_and_resume(tiny_model: Path, rounding: dict[str, float], tmp_path: Path) -> None:
    """Take the uninterrupted run and the first half of the other in the same processes, and resume in fresh ones."""
    results = {}
    for name, (launcher, variables) in LAUNCHES.items():
        if name == "fsdp2" and OLD_ACCELERATE:
            continue
        straight, half, resume = (
            [PLAIN_LOOP, *plain_loop_options(tiny_model, tmp_path, "--output", tmp_path / name / folder, *more)]
            for folder, more in (
                ("straight", ("--steps", 3)),
                ("half", ("--steps", 2)),
                ("resumed", ("--steps", 3, "--resume", tmp_path / name / "half" / "checkpoint")),
            )
        )
        for words, count in ((several([straight, half], tmp_path), 2), (resume, 1)):
            printed = run([*launcher, *words], cwd=tmp_path, ACCELERATE_USE_CPU="true", **variables)
            assert printed.count("which parameter goes where") == count
            assert printed.count("step 2 loss") == 2 * (count - 1)
            assert printed.count("step 3 loss") == 1
        results[name], resumed = (weights(tmp_path / name / folder) for folder in ("straight", "resumed"))
        assert all(torch.equal(value, resumed[key]) for key, value in results[name].items())
    for result in results.values():
        assert_close(result, results["one"], weights(tiny_model), rounding)
