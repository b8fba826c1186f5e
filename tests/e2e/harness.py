"""Shared by the end-to-end tests: real processes, the files they save, and the plain loop to compare with."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from hf_muon import build_optimizer
from tests.support import bounds, fixtures_text

ROOT = Path(__file__).resolve().parents[2]
YAML = ROOT / "examples" / "yaml"
PLAIN_LOOP = ROOT / "examples" / "plain_loop.py"
BIN = Path(sys.executable).parent
SERVER = Path(__file__).with_name("server.py")
STARTUP = ROOT / "tests" / "startup"  # what processes of tests do first
CPU_RANKS = ROOT / "tests" / "e2e" / "cpu_ranks"  # lets ranks that torchrun starts run on CPU and gloo
TIMEOUT = 600.0  # a process takes seconds, but the machine may be busy
MARK = "e2e_mark"
Weights = Mapping[str, Tensor]


def environment_of(path: Path | None = None, **variables: str) -> dict[str, str]:
    """Return a user's environment: `optim: muon` is autoloaded, nothing downloaded; `path` precedes PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_MUON", "PYTEST"))}
    folders = [str(path or STARTUP), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {
        "PYTHONPATH": os.pathsep.join(folders),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",  # LLaMA-Factory looks torchrun up on the PATH
        "CUDA_VISIBLE_DEVICES": "",
        "DISABLE_VERSION_CHECK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **variables,
    }


def kill(process: subprocess.Popen[str]) -> None:
    """End a process and all that it has started: torchrun gives each rank a process group of its own."""
    for one in [process, *psutil.Process(process.pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def run(
    command: Sequence[object], *, cwd: Path, fails: bool = False, path: Path | None = None, **variables: str
) -> str:
    """Run a process as a user would, outside the checkout, that must succeed or fail; return what it prints."""
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=environment_of(path or CPU_RANKS, **variables),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    assert (process.returncode != 0) is fails, _shown(command, process.returncode, output)
    return output


class Server:
    """A process of `server.py`, which imports modules for all runs, from the first one to the end of this process."""

    def __init__(self, *modules: str, **variables: str) -> None:
        self.modules = modules
        self.variables = variables
        self.process: subprocess.Popen[str] | None = None

    def run(self, words, *, cwd: Path, ranks: int = 1, fails: bool = False, **variables: str) -> str:
        """Run a script with arguments in forked processes, as torchrun would start its ranks; else as `run` does."""
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, str(SERVER), *self.modules],
                env=environment_of(**self.variables),
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            atexit.register(self.close)
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "output"
            order = {"words": [*map(str, words)], "ranks": ranks, "environment": environment_of(**variables)}
            self.process.stdin.write(json.dumps(order | {"cwd": str(cwd), "output": str(output)}) + "\n")
            self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], TIMEOUT)[0]:
                self.close()
            answer = self.process.stdout.readline()
            printed = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
        assert answer, f"the server died: {_shown(words, -signal.SIGKILL, printed)}"
        assert (int(answer) != 0) is fails, _shown(words, int(answer), printed)
        return printed

    def run_code(self, code: str, *words: object, cwd: Path, fails: bool = False, **variables: str) -> str:
        """Run code as a script."""
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "code.py"
            script.write_text(code, encoding="utf-8")
            return self.run([script, *words], cwd=cwd, fails=fails, **variables)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            kill(self.process)


TRAINING = (
    *("datasets", "peft", "transformers.trainer", "transformers.models.qwen3.modeling_qwen3"),
    *("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "accelerate.utils.fsdp_utils"),
    *("hf_muon.optimizer.muon", "hf_muon.integrations.transformers.handler", "hf_muon.distributed.exchange"),
)
server = Server(*TRAINING)
"""Runs scripts of Trainer."""
llamafactory_server = Server(*TRAINING, "llamafactory.train.tuner", "llamafactory.v1.trainers.sft_trainer")
"""Runs LLaMA-Factory."""


_SYMPTOMS = re.compile(r"error|exception|terminate|signal|exitcode|abort|refuse|killed", re.IGNORECASE)


def _shown(command: Sequence[object], code: int, output: str) -> str:
    """Return a report of a process with the wrong exit code. Causes come first: pytest cuts the end of a report."""
    ending = f"ended with {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    lines = output.splitlines()
    symptoms = [line[:300] for line in lines if _SYMPTOMS.search(line)]
    end = ["--- the end of what it printed", output[-6000:]]
    return "\n".join([f"{' '.join(map(str, command))}\n{ending}", *symptoms[:30], *end])


def needs(package: str) -> pytest.MarkDecorator:
    """Return a mark that skips where a package is not installed, without importing the package."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def python(*arguments: object, cwd: Path, fails: bool = False, **variables: str) -> str:
    """Run the running environment's python."""
    return run([sys.executable, *arguments], cwd=cwd, fails=fails, **variables)


def v1_has_top_level_keys() -> bool:
    """Return whether LLaMA-Factory is newer than 0.9.5, with cp_size at the top level and its own muon."""
    return (llamafactory_launcher().parent / "v1" / "plugins" / "trainer_plugins" / "optimizers").is_dir()


def llamafactory_launcher() -> Path:
    """Return the script that `llamafactory-cli train` gives to torchrun."""
    return Path(importlib.util.find_spec("llamafactory").origin).with_name("launcher.py")


def options(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as ``--key value``."""
    texts = {k: json.dumps(v) if v is None or isinstance(v, bool) else str(v) for k, v in settings.items()}
    return [part for key, text in texts.items() for part in (f"--{key}", text)]


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML file."""
    settings: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return settings


def free_port() -> str:
    """Return a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def accelerate_file(name: str, processes: int, folder: Path) -> Path:
    """Write an example's config file of accelerate for processes of this machine."""
    config = read_yaml(YAML / name) | {"num_machines": 1, "num_processes": processes, "mixed_precision": "no"}
    if sizes := config.get("parallelism_config"):
        assert sizes["parallelism_config_dp_replicate_size"] == 2
        sizes["parallelism_config_dp_shard_size"] = 2
    path = folder / name
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def accelerate_variables(name: str, processes: int, folder: Path) -> dict[str, str]:
    """Return the environment variables that `accelerate launch` sets for an example, by its own functions."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--config_file", str(accelerate_file(name, processes, folder)), "--main_process_port", "0", "script.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    variables = {k: v for k, v in prepare_multi_gpu_env(arguments).items() if os.environ.get(k) != v}
    assert variables["ACCELERATE_USE_FSDP"] == "true"
    return variables


# --- the example files, what runs them, and the parameters that they give to Muon and to AdamW

TRAIN = ROOT / "examples" / "train.py"
CPU_FSDP = ROOT / "tests" / "e2e" / "cpu_fsdp.py"  # runs a script with FSDP2 on a CPU

LLAMAFACTORY_SFT = {  # with the settings that make each of them small
    "llamafactory_qwen3_full_sft.yaml": {},
    "llamafactory_qwen3_8b_sft.yaml": {"pure_bf16": False},  # LLaMA-Factory has it on GPUs only
    "llamafactory_qwen3_freeze_sft.yaml": {"freeze_trainable_layers": 1},
    "llamafactory_qwen3_lora_sft.yaml": {},
}
LLAMAFACTORY_PRETRAIN = "llamafactory_qwen3_pretrain.yaml"
FINETUNE = "llamafactory_smollm2_sft.yaml"  # `make finetune` runs it
LLAMAFACTORY_FSDP2 = "llamafactory_qwen3_fsdp2.yaml"
LLAMAFACTORY_V1, LLAMAFACTORY_V1_FSDP2 = "llamafactory_v1_qwen3_sft.yaml", "llamafactory_v1_qwen3_fsdp2.yaml"
LLAMAFACTORY_V1_ULYSSES = ("llamafactory_v1_qwen3_ulysses.yaml", "llamafactory_v1_qwen3_ulysses_top_level.yaml")
TRL = {stage: f"trl_qwen3_{stage}.yaml" for stage in ("sft", "dpo", "grpo")}
TRAINER = "trainer_qwen3_pretrain.yaml"
TRAINER_FSDP2 = "trainer_qwen3_fsdp2.yaml"
ACCELERATE_FSDP2, ACCELERATE_HSDP = "accelerate_qwen3_fsdp2.yaml", "accelerate_qwen3_hsdp.yaml"
DEEPSPEED = {  # test_deepspeed.py runs those of trainer, and those of llamafactory differ in nothing else
    f"{framework}_qwen3_{layout}.yaml"
    for framework in ("llamafactory", "trainer")
    for layout in ("zero2", "zero3", "zero3_offload", "zero3_nvme")
}
ULYSSES = "trainer_qwen3_ulysses.yaml"  # tests/deepspeed/test_ulysses.py runs this

ALL_MATRICES = {f"{name}.weight" for name in fixtures_text.qwen3_matrices()}
ALL_OTHERS = {
    *(f"{name}.weight" for name in fixtures_text.qwen3_norms()),
    *("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
}


# --- settings that make an example small


def llamafactory_settings(model: Path, data: Path, output: Path, dataset: str) -> dict[str, Any]:
    """Return settings that make a LLaMA-Factory example small."""
    return {
        "model_name_or_path": model,
        "dataset_dir": data,
        "dataset": dataset,
        "output_dir": output,
        "max_steps": 3,
        "bf16": False,
        "use_cpu": True,
        "cutoff_len": 64,
        "gradient_accumulation_steps": 1,
        "preprocessing_num_workers": None,  # worker processes cost more time than they save here
        "dataloader_num_workers": 0,
    }


TINY = {  # settings that make a run of examples/train.py small
    "block_size": 64,
    "eval_fraction": 0.1,
    "max_steps": 3,
    "save_steps": 3,
    "warmup_steps": 1,
    "learning_rate": 0.001,
    "optim_args": "ns_dtype=fp32",
    "gradient_accumulation_steps": 1,
    "train_sampling_strategy": "sequential",
    "bf16": False,
    "use_cpu": True,
}


# --- saved files


@dataclass(frozen=True)
class Saved:
    """The optimizer state of a checkpoint, by parameter name."""

    groups: list[dict[str, Any]]
    state: dict[str, dict[str, Tensor]]

    @classmethod
    def of(cls, checkpoint: Path) -> Saved:
        content = torch.load(checkpoint / "optimizer.pt", weights_only=True)
        groups = content["param_groups"]
        names = {i: name for g in groups for i, name in zip(g["params"], g["param_names"], strict=True)}
        return cls(groups, {names[i]: state for i, state in content["state"].items()})

    def names(self, *, use_muon: bool) -> list[str]:
        return sorted(name for g in self.groups if g["use_muon"] is use_muon for name in g["param_names"])


def plain_loop_options(model: Path, folder: Path, *more: object) -> list[object]:
    """Return arguments of `examples/plain_loop.py` for a tiny model, and write its text into a folder."""
    text = folder / "text.txt"
    text.write_text("\n".join(fixtures_text.texts(20)), encoding="utf-8")
    return [model, text, "--block", 64, "--batch", 4, "--lr", 1e-3, "--option", "ns_dtype=fp32", *more]


def weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights in a folder, of a model or of an adapter."""
    files = [folder / name for name in ("model.safetensors", "adapter_model.safetensors") if (folder / name).exists()]
    assert len(files) == 1, f"{folder} has {files}"
    return load_file(files[0])


def assert_routed(checkpoint: Path, *, muon: set[str], adamw: set[str], steps: int) -> Saved:
    """Check which parameters of a checkpoint are Muon's and AdamW's, and that each has its whole state."""
    saved = Saved.of(checkpoint)
    assert saved.names(use_muon=True) == sorted(muon)
    assert saved.names(use_muon=False) == sorted(adamw)
    assert saved.state.keys() == muon | adamw
    for name, state in saved.state.items():
        if name in muon:
            assert state.keys() == {"momentum_buffer"}, name
            assert state["momentum_buffer"].dtype == torch.float32, name
            assert state["momentum_buffer"].count_nonzero() > 0, name
        else:
            assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}, name
            assert state["step"].item() == steps, name
    return saved


def distance(result: Weights, expected: Weights, start: Weights) -> float:
    """Return the distance of two runs' weights relative to the distance from the start, the largest of all weights."""
    assert result.keys() == expected.keys()
    assert all(not torch.equal(expected[name], start[name]) for name in expected), "a parameter did not move"
    return max(
        ((result[name] - expected[name]).norm() / (expected[name] - start[name]).norm()).item() for name in expected
    )


def rounding_of_runs(model_folder: Path, **settings: Any) -> dict[str, float]:
    """Return how far rounding moves the weights of a run with these settings: a plain loop from moved weights."""
    from transformers import AutoModelForCausalLM

    usual = {"max_steps": 4, "learning_rate": 0.001, "weight_decay": 0.1, "adam_beta2": 0.999, "max_grad_norm": 1.0}
    blocks = blocks_of(fixtures_text.texts(20), model_folder, 64)
    results = []
    for seed in (None, 0, 1):
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        bounds.move(model, seed)
        plain_loop(model, blocks, 2, usual | {"lr_scheduler_type": "cosine", "warmup_steps": 1} | settings)
        results.append({name: param.detach() for name, param in model.named_parameters()})
    expected, *controls = results
    return bounds.rounding(expected, controls)


def assert_close(result: Weights, expected: Weights, start: Weights, rounding: dict[str, float]) -> None:
    """Check that two runs have ended at the same weights, up to rounding.

    Norm weights start at 1 and move by 1e-3, so that one unit in the last place of a norm weight is 3e-5 of its way.
    """
    assert all(not torch.equal(expected[name], start[name]) for name in expected), "a parameter did not move"
    # Half the usual bound: the runs start from the same weights, and one unit in the last place is much for norms.
    assert not bounds.beyond(result, expected, rounding, bounds.TIMES / 2)


def interrupt(output: Path, *, after: int, destination: Path) -> Path:
    """Copy a run's folder as if the run had stopped after a checkpoint; return the checkpoint's folder.

    The log of the checkpoint gets a mark, which only a run that resumes it carries on.
    """
    checkpoint = destination / f"checkpoint-{after}"
    shutil.copytree(output / checkpoint.name, checkpoint)
    mark(checkpoint)
    return checkpoint


def mark(checkpoint: Path) -> None:
    """Put a mark into the log of a checkpoint."""
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    state["log_history"].append({"step": state["global_step"], MARK: 1})
    (checkpoint / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")


def is_marked(checkpoint: Path) -> bool:
    """Return whether the run of a checkpoint has resumed one with a mark."""
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    return any(MARK in entry for entry in state["log_history"])


def assert_resumed(checkpoint: Path, straight: Path) -> None:
    """Check that an interrupted and resumed run is bit-identical to the uninterrupted one."""
    assert is_marked(checkpoint), "the run was not resumed"
    torch.testing.assert_close(weights(checkpoint), weights(straight), rtol=0, atol=0)
    saved, expected = Saved.of(checkpoint), Saved.of(straight)
    assert saved.groups == expected.groups
    torch.testing.assert_close(saved.state, expected.state, rtol=0, atol=0)


# --- the plain loop to compare with


def blocks_of(texts: Sequence[str], model_folder: Path, size: int) -> Tensor:
    """Tokenize texts, each with an end token, and cut them into blocks of shape (count, size)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ids = [i for text in texts for i in [*tokenizer(text).input_ids, tokenizer.eos_token_id]]
    count = len(ids) // size
    return torch.tensor(ids[: count * size]).view(count, size)


def plain_loop(model: torch.nn.Module, blocks: Tensor, batch_size: int, settings: Mapping[str, Any]) -> None:
    """Train on one batch after the other, with the settings of a run and `ns_dtype=fp32`."""
    from transformers import get_scheduler

    steps = settings["max_steps"]
    optimizer = build_optimizer(
        model,
        lr=settings["learning_rate"],
        weight_decay=settings["weight_decay"],
        adamw_betas=(0.9, settings["adam_beta2"]),
        adamw_eps=settings.get("adam_epsilon", 1e-8),
        ns_dtype="fp32",
    )
    scheduler = get_scheduler(settings["lr_scheduler_type"], optimizer, settings["warmup_steps"], steps)
    model.train()
    for batch in blocks.split(batch_size)[:steps]:
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
