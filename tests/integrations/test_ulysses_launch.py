"""`scripts/run_ulysses.sh`: the checks before a launch, and the command that it launches."""

from __future__ import annotations

import importlib.util
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from hf_muon.integrations.transformers.overrides import read_overrides, read_settings
from hf_muon.integrations.ulysses import launch, launch_check
from hf_muon.integrations.ulysses.launch_check import Launch, complaints

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "run_ulysses.sh"
HF = {
    "optim": "muon",
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "attn_implementation": "sdpa",
    "block_size": 64,
}
V1 = {
    "flash_attn": "flash_attention_2",
    "dist_config": {"name": "fsdp2", "cp_mode": "ulysses", "cp_size": 2},
    "optim_config": {"name": "muon"},
    "cutoff_len": 64,
}


@pytest.fixture(autouse=True)
def everything_installed(monkeypatch):
    monkeypatch.setattr(launch_check, "_installed", lambda name: True)
    monkeypatch.setattr(launch_check, "cp_keys_at_top", lambda: False)
    monkeypatch.setattr(launch_check, "v1_keys", set)
    monkeypatch.setattr(launch_check, "knows_sequence_parallel", lambda: True)  # an older accelerate does not


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Write a configuration with 4 heads into a folder."""
    folder = tmp_path_factory.mktemp("model")
    Qwen3Config(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128).save_pretrained(folder)
    return str(folder)


def complaints_of(engine, model, *, sp_size=2, ranks=2, cuda=2, script=None, **changes):
    base = {**HF, "model_name_or_path": model} if engine == "hf" else {**V1, "model": model}
    return list(complaints(engine, Launch({**base, **changes}, sp_size, ranks, cuda, script=script)))


@pytest.mark.parametrize("cuda", [0, 2])
def test_hf_is_launched(model, cuda):
    assert complaints_of("hf", model, cuda=cuda) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sp_size": 1}, "SP_SIZE=1: at least 2 ranks share a sequence"),
        ({"sp_size": 4, "ranks": 6}, "SP_SIZE=4 does not divide NPROC * NNODES = 6"),
        ({"sp_size": 3, "ranks": 3, "block_size": 63}, "4 attention heads are not divisible by SP_SIZE=3"),
        ({"ranks": 4, "cuda": 0}, "gloo needs SP_SIZE = NPROC * NNODES on the CPU, and these are 2 and 4"),
        ({"optim": "adamw_torch"}, "optim: adamw_torch. Set optim: muon"),
        ({"optim": None}, "optim: None. Set optim: muon"),
        ({"deepspeed": None}, "deepspeed is missing: name a DeepSpeed config"),
        ({"deepspeed": "nowhere.json"}, "deepspeed: nowhere.json is not a file, seen from"),
        ({"optim_args": "momentun=0.9"}, "'momentun' is not an option of muon. Did you mean 'momentum'?"),
        ({"optim_args": "momentum=2"}, "momentum=2.0 is not valid"),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, "FSDP version 1"),
        ({"deepspeed": {"optimizer": {"type": "AdamW"}}}, '"optimizer" (AdamW), which DeepSpeed would use'),
        ({"deepspeed": {"zero_optimization": {"zenflow": {"x": 1}}}}, "zenflow"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is ignored"),
        ({"attn_implementation": "eager"}, "attention 'eager' needs a mask, which is dropped"),
        ({"attn_implementation": "flash_attention_2", "bf16": True, "cuda": 0}, "flash_attention_2 needs CUDA"),
        ({"attn_implementation": "flash_attention_2"}, "flash_attention_2 computes in half precision"),
        ({"block_size": 63}, "block_size: 63 is no number divisible by SP_SIZE=2"),
        ({"block_size": 256}, "block_size: 256 is longer than the 128 positions"),
        ({"model_name_or_path": None}, "model_name_or_path is missing"),
        ({"model_name_or_path": "/nowhere"}, "the configuration of /nowhere cannot be read"),
    ],
)
def test_hf_is_refused(model, changes, sentence):
    assert [line for line in complaints_of("hf", model, **changes) if sentence in line]


def test_missing_packages_are_named(model, monkeypatch):
    monkeypatch.setattr(launch_check, "_installed", lambda name: name not in ("deepspeed", "flash_attn"))
    assert complaints_of("hf", model) == ["deepspeed is not installed: pip install 'hf_muon[deepspeed]'"]
    assert [line for line in complaints_of("llamafactory", model) if "needs the package flash-attn" in line]
    monkeypatch.setattr(launch_check, "_installed", lambda name: name != "llamafactory")
    assert complaints_of("llamafactory", model) == ["llamafactory is not installed"]


@pytest.mark.parametrize("at_top", [False, True])
def test_llamafactory_is_launched(model, at_top, monkeypatch):
    monkeypatch.setattr(launch_check, "cp_keys_at_top", lambda: at_top)
    top = {"dist_config": {"name": "fsdp2"}, "cp_mode": "ulysses", "cp_size": 2}
    assert complaints_of("llamafactory", model, **(top if at_top else {})) == []
    (line,) = complaints_of("llamafactory", model, **({} if at_top else top))  # the other version's layout
    assert f"reads cp_mode and cp_size from {'the top level' if at_top else 'dist_config'} only" in line


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cuda": 0}, "LLaMA-Factory's Ulysses needs CUDA, and torch sees no GPU. Use ENGINE=hf"),
        ({"flash_attn": "sdpa"}, "flash_attn: sdpa. LLaMA-Factory's Ulysses acts in flash attention only"),
        ({"optim_config": {"name": "adamw"}}, "Set optim_config: {name: muon}"),
        ({"dist_config": None}, "every rank would train on the gradient of its own part"),
        ({"dist_config": {"name": "deepspeed", "cp_size": 2}}, "dist_config is not fsdp2"),
        ({"dist_config": {"name": "fsdp2", "cp_size": 4}}, "cp_size is 4 in dist_config, and SP_SIZE is 2"),
        ({"dist_config": {"name": "fsdp2"}}, "cp_size is 1 in dist_config, and SP_SIZE is 2"),
        ({"dist_config": {"name": "fsdp2", "cp_size": 2, "cp_mode": "ring"}}, "cp_mode: ring is not Ulysses"),
        ({"cutoff_len": 63}, "cutoff_len: 63 is no number divisible"),
        ({"optim_config": {"name": "muon", "momentun": 0.9}}, "'momentun' is not an option of muon"),
    ],
)
def test_llamafactory_is_refused(model, changes, sentence):
    assert [line for line in complaints_of("llamafactory", model, **changes) if sentence in line]


def test_an_unknown_engine_is_an_error(model):
    with pytest.raises(ValueError, match="ENGINE=megatron: valid are hf, llamafactory"):
        list(complaints("megatron", Launch({}, 2, 2, 0)))


@pytest.mark.skipif(importlib.util.find_spec("llamafactory") is None, reason="llamafactory is not installed")
def test_what_the_installed_llamafactory_reads(model, monkeypatch):
    monkeypatch.undo()
    assert launch_check.cp_keys_at_top() is False  # 0.9.5
    assert {"model", "train_dataset", "optim_config", "cutoff_len"} <= launch_check.v1_keys()
    lines = complaints_of("llamafactory", model, cutof_len=3)
    assert "cutof_len is not a setting of this run. Did you mean cutoff_len?" in lines


# --- the script


def script(*words, **variables):
    process = subprocess.run(
        ["bash", SCRIPT, *words], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **variables}
    )
    return process.returncode, process.stdout, process.stderr


def test_help():
    code, out, _ = script("--help")
    assert code == 0
    assert all(name in out for name in ("ENGINE", "NPROC", "NNODES", "SP_SIZE", "CONFIG"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--size", "2"], "unknown: --size. Valid are --engine,"),
        (["--nproc"], "--nproc needs a value"),
        (["--engine", "llamafactory"], "CONFIG is missing"),
    ],
)
def test_wrong_flags(words, sentence):
    code, _, err = script(*words)
    assert code == 2
    assert sentence in err


@pytest.fixture
def answer(tmp_path):
    """Make a `python` that prints the answer of the check and writes its arguments into a file."""

    def make(code=0, **settings):
        path = tmp_path / "python"
        lines = "".join(f"echo {name}={value}\n" for name, value in settings.items())
        path.write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/arguments\n{lines}exit {code}\n')
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
        return str(path), tmp_path / "arguments"

    return make


def test_command_of_hf(answer):
    python, arguments = answer(NPROC=2, NNODES=1, WORD="--max_steps=3")
    code, out, err = script(
        "--nproc", "2", "--dry-run", "--", "--max_steps", "3", PYTHON=python, NPROC="9", SP_SIZE="2"
    )
    assert code == 0, err
    config, train = ROOT / "examples/yaml/trainer_qwen3_ulysses.yaml", ROOT / "examples/train.py"
    check = f"-m hf_muon.integrations.ulysses.launch hf --nproc 2 --nnodes --sp-size 2 --config {config}"
    assert arguments.read_text().split() == [*check.split(), *f"--root {ROOT} --train -- --max_steps 3".split()]
    command = f"{python} -m torch.distributed.run --standalone --nproc-per-node 2 {train} {config} --max_steps=3"
    assert out.splitlines()[-1].split() == command.split()


def test_command_on_two_nodes(answer):
    python, _ = answer(NPROC=8, NNODES=2)
    code, out, err = script("--dry-run", PYTHON=python, NODE_RANK="1", MASTER_ADDR="10.0.0.1", TRAIN="mine.py")
    assert code == 0, err
    assert "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 --nproc-per-node 8 mine.py" in out


def test_command_of_llamafactory(answer):
    python, _ = answer(USE_V1=1, FORCE_TORCHRUN=1, NPROC=4, NNODES=1, WORD="max_steps=3")
    words = ("--engine", "llamafactory", "--config", "x.yaml", "--dry-run", "--", "--max_steps", "3")
    code, out, err = script(*words, PYTHON=python)
    assert code == 0, err
    assert out.splitlines()[-1].split() == ["llamafactory-cli", "sft", "x.yaml", "max_steps=3"]


def test_a_refusal_ends_the_script(answer):
    python, _ = answer(code=2, NPROC=2, NNODES=1)
    assert script("--dry-run", PYTHON=python)[:2] == (2, "")


def test_a_python_without_hf_muon_or_without_torch(tmp_path):
    """Try a python without installed packages (`-I -S`), a missing python, and one whose torch does not import."""
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/bash\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    for python in (str(bare), str(tmp_path / "none")):
        code, out, err = script("--dry-run", PYTHON=python)
        assert (code, out) == (2, "")
        assert f"PYTHON={python} did not run the check. Activate the environment with torch and hf_muon" in err
        assert "Traceback" not in err
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('no libtorch')")
    code, out, err = script("--dry-run", PYTHON=sys.executable, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (code, out) == (2, "")
    assert f"PYTHON={sys.executable} cannot import what it needs (no libtorch). Activate the environment" in err
    assert "Traceback" not in err


class TestWords:
    """The arguments after `--`."""

    @pytest.fixture
    def check(self, model, tmp_path, monkeypatch, capsys):
        """Return a function that runs the script's check in an empty folder, on two CPUs."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        (tmp_path / "my_pairs.jsonl").touch()

        def run(*words, config=ROOT / "examples/yaml/trainer_qwen3_ulysses.yaml"):
            small = ["--model_name_or_path", model, "--block_size", "64"]
            flags = ["--nproc", "2", "--sp-size", "2", "--config", str(config), "--root", str(ROOT), "--train", ""]
            code = launch.main(["hf", *flags, "--", *words, *small])
            shown = capsys.readouterr()
            refused = [line for line in shown.err.splitlines() if line.startswith("run_ulysses.sh")]
            return code, shown.out.splitlines(), refused

        return run

    CPU = ("--use_cpu", "--bf16", "false", "--attn_implementation", "sdpa")

    def test_the_examples_of_the_help(self, check):
        """Accept the example for the CPU from any folder, and refuse the other only because there is no GPU."""
        text = script("--help")[1].replace("\\\n", " ")
        gpu, cpu = (shlex.split(line) for line in re.findall(r"^  (.*scripts/run_ulysses.sh .*)$", text, re.MULTILINE))
        assert cpu[: cpu.index("--")] == ["scripts/run_ulysses.sh", "--nproc", "2", "--sp-size", "2"]
        assert check(*cpu[cpu.index("--") + 1 :])[2] == []
        assert all("CUDA" in line or "flash" in line for line in check(*gpu[gpu.index("--") + 1 :])[2])

    def test_bare_flags_and_the_config_of_the_repository(self, check):
        code, lines, refused = check(*self.CPU, "--gradient_checkpointing", "--max_steps", "3")
        assert refused == []
        assert code == 0
        written = [line.removeprefix("WORD=") for line in lines if line.startswith("WORD=")]
        options = [
            "--use_cpu",
            "--bf16=false",
            "--attn_implementation=sdpa",
            "--gradient_checkpointing",
            "--max_steps=3",
        ]
        assert written[:5] == options
        assert written[-1] == f"--deepspeed={ROOT / 'examples/deepspeed/zero3.json'}"

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            (["--learning_rat", "1"], "learning_rat is not a setting of this run. Did you mean learning_rate?"),
            (["--max_steps", "many"], "--max_steps=many: argument --max_steps/--max-steps: invalid int value: 'many'"),
            (["--max_steps"], "argument --max_steps/--max-steps: expected one argument"),
            (["--optim_args", "ns_step=3"], "'ns_step' is not an option of muon. Did you mean 'ns_steps'?"),
            (["--data_path", "lost.jsonl"], "data_path: lost.jsonl does not exist, seen from"),
            (["--use_muon"], "use_muon is not a setting of this run"),
            (["block_size.x=1"], "block_size.x: keys with dots are LLaMA-Factory's"),
            (["--optim_args", "a: {"], "optim_args: a: { cannot be read"),
            (["max_steps"], "'max_steps' is neither --key value nor key=value"),
            (["--", "x=1"], "'--' is neither --key value nor key=value"),
            (["--run_name", "'a\n\nb'"], "holds a line break"),
        ],
    )
    def test_refused(self, check, words, sentence):
        code, lines, refused = check(*words, *self.CPU)
        assert (code, lines) == (2, [])
        assert [line for line in refused if sentence in line], refused

    def test_dots_reach_into_mappings_alone(self, tmp_path):
        path = tmp_path / "v1.yaml"
        path.write_text("cutoff_len: 2048\ndist_config:\n")
        assert read_settings(str(path), [("dist_config.name", "fsdp2")])["dist_config"] == {"name": "fsdp2"}
        with pytest.raises(ValueError, match=r"cutoff_len\.x: cutoff_len is 2048, which holds no keys"):
            read_settings(str(path), [("cutoff_len.x", "1")])

    def test_each_engine_reads_its_own_form(self):
        run = Launch({}, 2, 2, 0, read_overrides(["--a", "1", "b.c=2", "--d", "--e=x=y"]))
        assert launch.words("hf", run) == ["--a=1", "--b.c=2", "--d", "--e=x=y"]
        assert launch.words("llamafactory", run) == ["a=1", "b.c=2", "d=true", "e=x=y"]


def test_environment():
    assert launch.environment("llamafactory", Launch({}, 2, 2, 2)) == {"USE_V1": "1", "FORCE_TORCHRUN": "1"}
    variables = launch.environment("hf", Launch({}, 2, 2, 0))
    assert variables["PARALLELISM_CONFIG_SP_SIZE"] == "2"
    assert variables["PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION"] == "sdpa"
    assert variables["DS_ACCELERATOR"] == "cpu"
    assert "DS_ACCELERATOR" not in launch.environment("hf", Launch({}, 2, 2, 2))


def test_settings(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("a: 1\nb: {c: 2}\n")
    words = read_overrides(["--a", "2", "b.d=true", "--e"])
    assert read_settings(str(path), words) == {"a": 2, "b": {"c": 2, "d": True}, "e": True}
    path.write_text("[1]")
    with pytest.raises(ValueError, match="does not hold keys and values"):
        read_settings(str(path), [])
