"""`scripts/run_ulysses.sh`: what it refuses, and the command that it launches."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.newest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "run_ulysses.sh"
CONFIG = ROOT / "examples/yaml/trainer_qwen3_ulysses.yaml"


def script(*words, **variables):
    process = subprocess.run(
        ["bash", SCRIPT, *words], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **variables}
    )
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
        (["--size", "2"], "unknown: --size. See --help"),
        (["--nproc"], "--nproc needs a value"),
        (["--engine", "x"], "ENGINE=x: valid are hf, llamafactory"),
        (["--config", "lost.yaml"], "CONFIG=lost.yaml is not a file"),
        (["--engine", "llamafactory"], "CONFIG= is not a file"),
        (["--nproc", "PATH[$(echo 1)]"], "NPROC, NNODES and SP_SIZE are numbers"),
        (["--nproc", "1"], "SP_SIZE=1 is not above 1"),
        (["--nproc", "3", "--sp-size", "2"], "SP_SIZE=2 is not above 1, or does not divide NPROC * NNODES"),
        (
            ["--engine", "llamafactory", "--config", CONFIG, "--nproc", "2", "--sp-size", "2"],
            "write cp_size into CONFIG",
        ),
    ],
)
def test_refused(words, sentence):
    code, out, err = script(*words)
    assert (code, out) == (2, "")
    assert err.startswith("run_ulysses.sh: ")
    assert sentence in err


def test_a_python_without_torch(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\nexit 1\n")
    python.chmod(0o755)
    code, _, err = script("--dry-run", PYTHON=str(python))
    assert code == 2
    assert f"{python} has no torch: set PYTHON" in err


def test_transformers():
    words = command("--nproc", "4", "--", "--save_strategy", "no", NPROC="9", SP_SIZE="2", PYTHON="/my/python")
    launch = f"/my/python -m torch.distributed.run --standalone --nproc-per-node 4 {ROOT}/examples/train.py {CONFIG}"
    assert words[0] == "env"
    assert words[4:] == [*launch.split(), "--save_strategy", "no"]
    assert sorted(words[1:4]) == [
        "ACCELERATE_USE_PARALLELISM_CONFIG=true",
        "PARALLELISM_CONFIG_SP_BACKEND=deepspeed",
        "PARALLELISM_CONFIG_SP_SIZE=2",
    ]


def test_two_nodes():
    words = command(NPROC="8", NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1", TRAIN="mine.py")
    assert "PARALLELISM_CONFIG_SP_SIZE=16" in words
    nodes = "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 --nproc-per-node 8 mine.py"
    assert nodes in " ".join(words)


def test_llamafactory():
    words = command("--engine", "llamafactory", "--nproc", "2", "--config", CONFIG, "--", "a.b=1")
    assert (
        words == f"env USE_V1=1 FORCE_TORCHRUN=1 NNODES=1 NPROC_PER_NODE=2 llamafactory-cli sft {CONFIG} a.b=1".split()
    )


def test_words_stay_whole_and_out_of_the_environment():
    value = "a b\nLD_PRELOAD=/tmp/x.so; $(false)"
    words = command("--nproc", "2", "--", "--run_name", value)
    assert words[-2:] == ["--run_name", value]
    environment = words[1 : words.index("python")]
    assert all(
        word.startswith(("ACCELERATE_USE_PARALLELISM_CONFIG=", "PARALLELISM_CONFIG_SP_")) for word in environment
    )


def test_the_examples_of_the_help():
    code, out, _ = script("--help")
    assert code == 0
    text = out.replace("\\\n", " ")
    for line in re.findall(r"^  (.*)scripts/run_ulysses\.sh (.*)$", text, re.MULTILINE):
        variables = dict(word.split("=", 1) for word in line[0].split())
        assert command(*shlex.split(line[1]), **{"NPROC": "2", **variables})
