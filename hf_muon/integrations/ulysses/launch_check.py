"""What would not start, or would start and train wrong, by what a launch of `scripts/run_ulysses.sh` asks for."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_muon.integrations.names import is_muon
from hf_muon.integrations.transformers.overrides import Override, Settings
from hf_muon.integrations.ulysses.refusals import model_complaints

ENGINES = ("hf", "llamafactory")


@dataclasses.dataclass(frozen=True)
class Launch:
    """The settings and the ranks of a launch.

    Attributes:
        settings: of the YAML file, with those of the command line in their place.
        sp_size: ranks that share a sequence.
        ranks: of all nodes.
        cuda: GPUs that torch sees here; 0 for the CPU.
        overrides: those of the command line, which the launched processes read again.
        script: the Trainer script of this repository, if that is what is launched.
    """

    settings: Settings
    sp_size: int
    ranks: int
    cuda: int
    overrides: Sequence[Override] = ()
    script: Path | None = None

    def get(self, key: str, default: Any = None) -> Any:
        """Return a setting; `default` where it is missing or empty."""
        value = self.settings.get(key)
        return default if value in (None, "") else value


def complaints(engine: str, launch: Launch) -> Iterator[str]:
    """Yield why a launch is refused, a sentence each.

    Raises:
        ValueError: an unknown engine.
    """
    if engine not in ENGINES:
        raise ValueError(f"ENGINE={engine}: valid are {', '.join(ENGINES)}")
    if launch.sp_size < 2:
        yield f"SP_SIZE={launch.sp_size}: at least 2 ranks share a sequence; with 1 there is no sequence parallel"
    elif launch.ranks % launch.sp_size:
        yield f"SP_SIZE={launch.sp_size} does not divide NPROC * NNODES = {launch.ranks}"
    else:
        yield from _hf_complaints(launch) if engine == "hf" else _llamafactory_complaints(launch)


def _hf_complaints(launch: Launch) -> Iterator[str]:
    missing = [name for name in ("deepspeed", "einops", "transformers", "accelerate") if not _installed(name)]
    if missing:
        yield f"{', '.join(missing)} is not installed: pip install 'hf_muon[deepspeed]'"
        return
    if not knows_sequence_parallel():
        yield "this accelerate knows no sequence parallel: use 1.12 or newer"
    if not is_muon(launch.get("optim")):
        yield f"optim: {launch.get('optim')}. Set optim: muon; other optimizers' gradients are not corrected"
    if not launch.cuda and launch.ranks != launch.sp_size:
        yield f"gloo needs SP_SIZE = NPROC * NNODES on the CPU, and these are {launch.sp_size} and {launch.ranks}"
    if launch.get("deepspeed") is None:
        yield "deepspeed is missing: name a DeepSpeed config, such as examples/deepspeed/zero2.json"
    else:
        yield from _refusals({**launch.settings, "parallelism_config": {"sp_size": launch.sp_size}})
    if launch.script is not None:
        yield from _script_complaints(launch, launch.script)
    attention = launch.get("attn_implementation", "sdpa")
    yield from _flash_complaints(launch, attention)
    if str(attention).startswith("flash") and not (launch.get("bf16") or launch.get("fp16")):
        yield f"{attention} computes in half precision. Set bf16: true"
    yield from _model_complaints(launch, "model_name_or_path", attention, "block_size")


def _llamafactory_complaints(launch: Launch) -> Iterator[str]:
    if not _installed("llamafactory"):
        yield "llamafactory is not installed"
        return
    if not launch.cuda:
        yield "LLaMA-Factory's Ulysses needs CUDA, and torch sees no GPU. Use ENGINE=hf on the CPU"
    attention = launch.get("flash_attn", "sdpa")
    if attention != "flash_attention_2":
        yield f"flash_attn: {attention}. LLaMA-Factory's Ulysses acts in flash attention only: flash_attention_2"
    yield from _flash_complaints(launch, "flash_attention_2")
    yield from _unknown_keys(launch.settings, v1_keys())
    if not is_muon(_section(launch, "optim_config").get("name")):
        yield "optim_config has another name than muon. Set optim_config: {name: muon}"
    distributed = _section(launch, "dist_config")
    if distributed.get("name") != "fsdp2":
        yield (
            "dist_config is not fsdp2: every rank would train on the gradient of its own part of the sequences, with a "
            "loss that looks normal. Set dist_config: {name: fsdp2}"
        )
    else:
        yield from _refusals(launch.settings)
    at_top = cp_keys_at_top()
    home = "the top level" if at_top else "dist_config"
    here, there = (launch.settings, distributed) if at_top else (distributed, launch.settings)
    stray = sorted({"cp_size", "cp_mode"} & there.keys())
    if stray:
        yield f"this LLaMA-Factory reads cp_mode and cp_size from {home} only; {', '.join(stray)} are elsewhere"
    elif here.get("cp_size", 1) != launch.sp_size:
        yield f"cp_size is {here.get('cp_size', 1)} in {home}, and SP_SIZE is {launch.sp_size}. Set both to the same"
    if here.get("cp_mode", "ulysses") != "ulysses":
        yield f"cp_mode: {here['cp_mode']} is not Ulysses. Set cp_mode: ulysses"
    yield from _model_complaints(launch, "model", "flash_attention_2", "cutoff_len")


def _refusals(settings: Settings) -> Iterator[str]:
    """Yield what the run itself would refuse of its options and its layout, by the functions that do so."""
    from hf_muon.integrations.transformers.training_file import optimizer_of, options_of, refusals

    try:
        if is_muon(optimizer_of(settings)):
            options_of(settings)
            yield from refusals(settings)
    except (ValueError, RuntimeError) as error:
        yield str(error)


def _script_complaints(launch: Launch, script: Path) -> Iterator[str]:
    """Yield what the Trainer script of this repository would refuse on every rank, by its own parser."""
    parser, keys = _parser_of(script)
    yield from _unknown_keys(launch.settings, keys)
    data = launch.get("data_path")
    if data and not Path(str(data)).exists():
        yield f"data_path: {data} does not exist, seen from {Path.cwd()}"
    bare = {key for key, text in launch.overrides if text is None}
    for key, value in launch.settings.items():
        if key in keys and isinstance(value, (str, int, float)):  # mappings may stand in a file alone
            word = f"--{key}" if key in bare else f"--{key}={value}"
            try:
                parser.parse_args([word])
            except ValueError as error:
                yield f"{word}: {error}"


def _parser_of(script: Path) -> tuple[argparse.ArgumentParser, set[str]]:
    """Return the parser of the script's arguments, with errors raised as ValueError, and its keys."""
    from transformers import HfArgumentParser, TrainingArguments

    class Parser(HfArgumentParser):
        def error(self, message: str) -> Any:
            raise ValueError(message)

    spec = importlib.util.spec_from_file_location("run_ulysses_script", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the names in their annotations
    spec.loader.exec_module(module)
    kinds: tuple[Any, ...] = (module.ScriptArguments, TrainingArguments)
    return Parser(kinds), {field.name for kind in kinds for field in dataclasses.fields(kind)}


def _unknown_keys(settings: Settings, known: Collection[str]) -> Iterator[str]:
    for key in sorted(settings.keys() - set(known)) if known else ():
        near = difflib.get_close_matches(key, known, n=1)
        yield f"{key} is not a setting of this run." + (f" Did you mean {near[0]}?" if near else "")


def _flash_complaints(launch: Launch, attention: str) -> Iterator[str]:
    if not str(attention).startswith("flash"):
        return
    if not launch.cuda:
        yield f"{attention} needs CUDA, and torch sees no GPU. Use sdpa"
    if attention == "flash_attention_2" and not _installed("flash_attn"):
        yield "flash_attention_2 needs the package flash-attn: pip install flash-attn --no-build-isolation"


def _model_complaints(launch: Launch, key: str, attention: str, length_key: str) -> Iterator[str]:
    from transformers import AutoConfig

    from hf_muon.routing.model_facts import text_config_of

    path = launch.get(key)
    if not path:
        yield f"{key} is missing"
        return
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=bool(launch.get("trust_remote_code")))
    except (OSError, ValueError) as error:
        yield f"{key}: the configuration of {path} cannot be read: {str(error).splitlines()[0]}"
        return
    yield from model_complaints(config, launch.sp_size, attention)
    most, length = getattr(text_config_of(config), "max_position_embeddings", None), launch.get(length_key)
    if not str(length or 0).isdigit() or int(length or 0) % launch.sp_size:
        yield f"{length_key}: {length} is no number divisible by SP_SIZE={launch.sp_size}; ranks hold equal parts"
    elif most and length and int(length) > most:
        yield f"{length_key}: {length} is longer than the {most} positions that the model knows"


def knows_sequence_parallel() -> bool:
    """Return whether the installed accelerate has sequence parallel."""
    from accelerate.parallelism_config import ParallelismConfig  # type: ignore[import-untyped]

    return "sp_size" in {field.name for field in dataclasses.fields(ParallelismConfig)}


def v1_keys() -> set[str]:
    """Return the keys that the installed LLaMA-Factory v1 knows; none where it cannot be imported."""
    kinds = {"model": "Model", "data": "Data", "training": "Training", "sample": "Sample"}
    try:
        modules = {kind: importlib.import_module(f"llamafactory.v1.config.{name}_args") for name, kind in kinds.items()}
    except ImportError:
        return set()
    return {
        field.name
        for kind, module in modules.items()
        for field in dataclasses.fields(getattr(module, f"{kind}Arguments"))
    }


def cp_keys_at_top() -> bool:
    """Return whether this LLaMA-Factory reads `cp_size` at the top level, as newer ones do; 0.9.5 in `dist_config`."""
    module = importlib.import_module("llamafactory.v1.config.training_args")
    return "cp_size" in {field.name for field in dataclasses.fields(module.TrainingArguments)}


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _section(launch: Launch, key: str) -> Mapping[str, Any]:
    section = launch.get(key, {})
    return section if isinstance(section, Mapping) else {}
