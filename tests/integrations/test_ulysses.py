"""Sequence parallelism: batches, what DeepSpeed divides gradients by, and the script that launches it.

`tests/deepspeed/test_trainer.py` trains with it, and `tests/refusals/integrations.py` has what is refused.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, MistralConfig, Qwen3Config

from hf_muon.integrations.ulysses import batches, gradients, refusals

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/yaml/trainer_qwen3_ulysses.yaml"


def test_models_and_batches_that_are_not_refused():
    flash = "flash_attention_2"
    windows = MistralConfig(sliding_window=8)
    for config, implementation in ((Qwen3Config(), "sdpa"), (GPT2Config(), "sdpa"), (windows, flash)):
        assert list(refusals.model_complaints(config, implementation)) == []
    ids = torch.zeros(2, 4, dtype=torch.long)
    assert torch.equal(batches.complete({"input_ids": ids}, "sdpa")["position_ids"], torch.arange(4).expand(2, -1))
    packed = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])}
    assert batches.complete(packed, flash) is packed
    padded = {**packed, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}
    assert batches.complete(padded, "sdpa") is padded


def test_rows_are_lengthened():
    rows = {
        "input_ids": ([7, 8, 9], [7, 8, 9, 0, 0]),
        "labels": ([7, 8, 9], [7, 8, 9, -100, -100]),
        "position_ids": ([0, 0, 1], [0, 0, 1, 2, 3]),
        "attention_mask": ([1, 1, 1], [1, 1, 1, 0, 0]),
    }
    batch = {name: torch.tensor([row]) for name, (row, _) in rows.items()}
    longer = batches.lengthened({**batch, "names": ["one"]}, 5)
    assert longer.pop("names") == ["one"]
    assert {name: value.tolist() for name, value in longer.items()} == {name: [row] for name, (_, row) in rows.items()}


class Adapter:
    """Yields every batch twice, once for each of two ranks, as DeepSpeed's adapter does; all read the same data."""

    def __init__(self, loader, skip):
        self.loader = loader[skip:]

    def __iter__(self):
        for batch in self.loader:
            yield from ((batch, 0), (batch, 1))


def test_skipped_batches_and_an_epoch_that_starts_anew():
    loader = batches.ShardedLoader([1, 2, 3], Adapter, 2)
    assert len(loader) == 6
    for count in range(5):
        assert list(loader.skipping(count)) == list(loader)[count:]
    epoch = iter(loader)
    assert [next(epoch) for _ in range(len(loader))] == list(loader)  # Trainer does not exhaust it either


@pytest.mark.parametrize("holder", ["engine", "optimizer"])
def test_a_deepspeed_that_divides_by_something_else_is_refused(holder):
    sizes = {"sequence_parallel_size": 2}
    engine = SimpleNamespace(optimizer=SimpleNamespace(**sizes), zero_optimization=lambda: True, **sizes)
    engine.mpu = SimpleNamespace(initialize_sequence_parallel=None)
    delattr(engine if holder == "engine" else engine.optimizer, "sequence_parallel_size")
    with pytest.raises(RuntimeError, match="has no sequence_parallel_size"):
        gradients.average_over_all_ranks(engine, None)


# --- scripts/run_ulysses.sh


def script(*words, **variables):
    command = ["bash", ROOT / "scripts/run_ulysses.sh", *words]
    process = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **variables})
    return process.returncode, process.stdout, process.stderr


def command(*words, **variables):
    """Return the words of the command that a dry run prints."""
    code, out, err = script("--dry-run", *words, **variables)
    assert code == 0, err
    read = subprocess.run(["bash", "-c", f"printf '%s\\0' {out}"], capture_output=True, text=True, check=True)
    return read.stdout.split("\0")[:-1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--size 2", "unknown: --size. See --help"),
        ("--nproc", "--nproc needs a value"),
        ("--engine x", "ENGINE=x: valid are hf, llamafactory"),
        ("--config lost.yaml", "CONFIG=lost.yaml is not a file"),
        ("--engine llamafactory", "CONFIG= is not a file"),
        ("--nproc 'PATH[$(echo 1)]'", "NPROC, NNODES and SP_SIZE are numbers"),
        ("--nproc 1", "SP_SIZE=1 is not above 1"),
        ("--nproc 3 --sp-size 2", "SP_SIZE=2 is not above 1, or does not divide NPROC * NNODES"),
        (f"--engine llamafactory --config {CONFIG} --nproc 2 --sp-size 2", "write cp_size into CONFIG"),
    ],
)
def test_the_script_refuses(words, sentence):
    code, out, err = script(*shlex.split(words))
    assert (code, out) == (2, "")
    assert err.startswith("run_ulysses.sh: ")
    assert sentence in err


def test_the_script_refuses_a_python_without_torch(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\nexit 1\n")
    python.chmod(0o755)
    code, _, err = script("--dry-run", PYTHON=str(python))
    assert code == 2
    assert f"{python} has no torch: set PYTHON" in err


def test_the_script_launches_transformers():
    """Expect words to stay whole, and to stay out of the environment."""
    value = "a b\nLD_PRELOAD=/tmp/x.so; $(false)"
    words = command("--nproc", "4", "--", "--run_name", value, NPROC="9", SP_SIZE="2", PYTHON="/my/python")
    launch = f"/my/python -m torch.distributed.run --standalone --nproc-per-node 4 {ROOT}/examples/train.py {CONFIG}"
    assert words[0] == "env"
    assert sorted(words[1:4]) == [
        "ACCELERATE_USE_PARALLELISM_CONFIG=true",
        "PARALLELISM_CONFIG_SP_BACKEND=deepspeed",
        "PARALLELISM_CONFIG_SP_SIZE=2",
    ]
    assert words[4:] == [*launch.split(), "--run_name", value]


def test_the_script_launches_two_nodes_and_llamafactory():
    words = command(NPROC="8", NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1", TRAIN="mine.py")
    assert "PARALLELISM_CONFIG_SP_SIZE=16" in words
    nodes = "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 --nproc-per-node 8 mine.py"
    assert nodes in " ".join(words)
    words = command("--engine", "llamafactory", "--nproc", "2", "--config", CONFIG, "--", "a.b=1")
    expected = f"env USE_V1=1 FORCE_TORCHRUN=1 NNODES=1 NPROC_PER_NODE=2 llamafactory-cli sft {CONFIG} a.b=1"
    assert words == expected.split()


def test_the_examples_of_the_help():
    code, out, _ = script("--help")
    assert code == 0
    for line in re.findall(r"^  (.*)scripts/run_ulysses\.sh (.*)$", out.replace("\\\n", " "), re.MULTILINE):
        variables = dict(word.split("=", 1) for word in line[0].split())
        assert command(*shlex.split(line[1]), **{"NPROC": "2", **variables})
