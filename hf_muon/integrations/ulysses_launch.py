"""What `scripts/run_ulysses.sh` asks before it launches: `python -m hf_muon.integrations.ulysses_launch ENGINE ...`.

Standard output has one NAME=VALUE a line for the launched processes' environment. What would not start, or would start
and train wrong without a word, is told on standard error, sentence by sentence, with exit status 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_muon.integrations.ulysses import model_complaints

ENGINES = ("hf", "llamafactory")
Settings = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """What is to be launched.

    Attributes:
        settings: what the YAML file and the command line say; the command line wins.
        sp_size: ranks that share a sequence.
        ranks: of all nodes.
        cuda: GPUs that torch sees here; 0 for the CPU.
    """

    settings: Settings
    sp_size: int
    ranks: int
    cuda: int

    def get(self, key: str, default: Any = None) -> Any:
        """A setting, where an empty one counts as left out."""
        found = self.settings.get(key)
        return default if found in (None, "") else found


# --- what is refused


def complaints(engine: str, run: Run) -> Iterator[str]:
    """Everything that speaks against a launch, a sentence each.

    Raises:
        ValueError: an unknown engine.
    """
    if engine not in ENGINES:
        raise ValueError(f"ENGINE={engine}: valid are {', '.join(ENGINES)}")
    if run.sp_size < 2:
        yield f"SP_SIZE={run.sp_size}: at least 2 ranks share a sequence; with 1 there is no sequence parallel"
    elif run.ranks % run.sp_size:
        yield f"SP_SIZE={run.sp_size} does not divide NPROC * NNODES = {run.ranks}"
    else:
        yield from _hf_complaints(run) if engine == "hf" else _llamafactory_complaints(run)


def _hf_complaints(run: Run) -> Iterator[str]:
    missing = [name for name in ("deepspeed", "einops", "transformers", "accelerate") if not _installed(name)]
    if missing:
        yield f"{', '.join(missing)} is not installed: pip install 'hf_muon[deepspeed]'"
        return
    from accelerate.parallelism_config import ParallelismConfig  # type: ignore[import-untyped]

    from hf_muon.integrations.deepspeed import config_complaints

    if "sp_size" not in {field.name for field in dataclasses.fields(ParallelismConfig)}:
        yield "this accelerate knows no sequence parallel: take 1.12 or newer"
    if run.get("optim") != "muon":
        yield f"optim: {run.get('optim')}. Say optim: muon; other optimizers' gradients are not corrected"
    if not run.cuda and run.ranks != run.sp_size:
        yield f"gloo needs SP_SIZE = NPROC * NNODES on the CPU, and these are {run.sp_size} and {run.ranks}"
    try:
        config = _mapping(run.get("deepspeed"), "deepspeed")
    except ValueError as error:
        yield str(error)
    else:
        for complaint in config_complaints(config):
            yield f"Muon does not run with this DeepSpeed config: {complaint}"
    if run.get("label_smoothing_factor"):
        yield "label_smoothing_factor is ignored under sequence parallel. Leave it out"
    attention = run.get("attn_implementation", "sdpa")
    yield from _flash_complaints(run, attention)
    if str(attention).startswith("flash") and not (run.get("bf16") or run.get("fp16")):
        yield f"{attention} computes in half precision. Say bf16: true"
    yield from _model_complaints(run, "model_name_or_path", attention, "block_size")


def _llamafactory_complaints(run: Run) -> Iterator[str]:
    if not _installed("llamafactory"):
        yield "llamafactory is not installed"
        return
    if not run.cuda:
        yield "LLaMA-Factory's Ulysses needs CUDA, and torch sees no GPU. Use ENGINE=hf on the CPU"
    attention = run.get("flash_attn", "sdpa")
    if attention != "flash_attention_2":
        yield f"flash_attn: {attention}. LLaMA-Factory's Ulysses acts in flash attention only: flash_attention_2"
    yield from _flash_complaints(run, "flash_attention_2")
    if _part(run, "optim_config").get("name") != "muon":
        yield "optim_config has another name than muon. Say optim_config: {name: muon}"
    distributed = _part(run, "dist_config")
    if distributed.get("name") != "fsdp2":
        yield (
            "dist_config is not fsdp2: every rank would train on the gradient of its own part of the sequences, with a "
            "loss that looks as usual. Say dist_config: {name: fsdp2}"
        )
    at_top = cp_keys_at_top()
    home = "the top level" if at_top else "dist_config"
    here, there = (run.settings, distributed) if at_top else (distributed, run.settings)
    stray = sorted({"cp_size", "cp_mode"} & there.keys())
    if stray:
        yield f"this LLaMA-Factory reads cp_mode and cp_size from {home} only; {', '.join(stray)} stand elsewhere"
    elif here.get("cp_size", 1) != run.sp_size:
        yield f"cp_size is {here.get('cp_size', 1)} in {home}, and SP_SIZE is {run.sp_size}. Say the same in both"
    if here.get("cp_mode", "ulysses") != "ulysses":
        yield f"cp_mode: {here['cp_mode']} is not Ulysses. Say cp_mode: ulysses"
    yield from _model_complaints(run, "model", "flash_attention_2", "cutoff_len")


def _flash_complaints(run: Run, attention: str) -> Iterator[str]:
    if not str(attention).startswith("flash"):
        return
    if not run.cuda:
        yield f"{attention} needs CUDA, and torch sees no GPU. Use sdpa"
    if attention == "flash_attention_2" and not _installed("flash_attn"):
        yield "flash_attention_2 needs the package flash-attn: pip install flash-attn --no-build-isolation"


def _model_complaints(run: Run, key: str, attention: str, length_key: str) -> Iterator[str]:
    from transformers import AutoConfig

    path = run.get(key)
    if not path:
        yield f"{key} is missing"
        return
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=bool(run.get("trust_remote_code")))
    except (OSError, ValueError) as error:
        yield f"{key}: the configuration of {path} cannot be read: {str(error).splitlines()[0]}"
        return
    yield from model_complaints(config, run.sp_size, attention)
    most, length = getattr(config.get_text_config(), "max_position_embeddings", None), run.get(length_key)
    if not str(length or 0).isdigit() or int(length or 0) % run.sp_size:
        yield f"{length_key}: {length} is no number divisible by SP_SIZE={run.sp_size}; ranks hold equal parts"
    elif most and length and int(length) > most:
        yield f"{length_key}: {length} is longer than the {most} positions that the model knows"


def cp_keys_at_top() -> bool:
    """Whether this LLaMA-Factory reads `cp_size` at the top level, as newer ones do, or in `dist_config` (0.9.5)."""
    module = importlib.import_module("llamafactory.v1.config.training_args")
    return "cp_size" in {field.name for field in dataclasses.fields(module.TrainingArguments)}


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _part(run: Run, key: str) -> Mapping[str, Any]:
    found = run.get(key, {})
    return found if isinstance(found, Mapping) else {}


def _mapping(value: Any, key: str) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    if value is None:
        raise ValueError(f"{key} is missing: name a DeepSpeed config, such as examples/deepspeed/zero2.json")
    try:
        found = json.loads(Path(value).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}: {value} cannot be read: {error}") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{key}: {value} holds no object")
    return found


# --- what is launched


def environment(engine: str, run: Run) -> dict[str, str]:
    """Variables of the launched processes."""
    if engine == "llamafactory":
        return {"USE_V1": "1", "FORCE_TORCHRUN": "1"}
    found = {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
        "PARALLELISM_CONFIG_SP_SIZE": str(run.sp_size),
        "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": run.get("attn_implementation", "sdpa"),
    }
    return found if run.cuda else {**found, "DS_ACCELERATOR": "cpu"}


def read_settings(path: str, overrides: Sequence[str]) -> Settings:
    """A YAML file, and what the command line puts in the place of its values: `--key value` or `key=value`.

    Raises:
        ValueError: a file that cannot be read, or something on the command line that is neither.
    """
    import yaml

    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"CONFIG={path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"CONFIG={path} does not hold keys and values")
    words = list(overrides)
    while words:
        word = words.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            if not word.startswith("--") or not words or words[0].startswith("--"):
                raise ValueError(f"{word!r} is neither --key value nor key=value")
            value = words.pop(0)
        target = settings
        *parents, key = key.split(".")  # dist_config.name=fsdp2, as LLaMA-Factory writes it
        for parent in parents:
            target = target.setdefault(parent, {})
        target[key] = yaml.safe_load(value)
    return settings


def main(argv: Sequence[str] | None = None) -> int:
    """Check, and print the environment; see the module."""
    parser = argparse.ArgumentParser(prog="ulysses_launch")
    parser.add_argument("engine")
    for name in ("nproc", "nnodes", "sp-size", "config"):
        parser.add_argument(f"--{name}", default="")
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    asked = parser.parse_args(words[:end])
    import torch

    try:
        for name in ("nproc", "nnodes", "sp_size"):
            value = getattr(asked, name)
            if value and not (value.isdigit() and int(value) > 0):
                raise ValueError(f"{name.upper()}={value} is not a number above 0")
        settings = read_settings(asked.config, words[end + 1 :])
        cuda = 0 if settings.get("use_cpu") else torch.cuda.device_count()
        nnodes = int(asked.nnodes or 1)
        nproc = int(asked.nproc or cuda or asked.sp_size or 2)
        run = Run(settings, int(asked.sp_size or nproc * nnodes), nproc * nnodes, cuda)
        found = list(complaints(asked.engine, run))
    except ValueError as error:
        found = [str(error)]
    for complaint in found:
        print(f"run_ulysses.sh: {complaint}", file=sys.stderr)
    if found:
        return 2
    for name, value in (environment(asked.engine, run) | {"NPROC": str(nproc), "NNODES": str(nnodes)}).items():
        print(f"{name}={value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
