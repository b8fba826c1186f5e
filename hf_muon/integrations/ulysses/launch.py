"""The check before a launch of `scripts/run_ulysses.sh`: `python -m hf_muon.integrations.ulysses.launch ENGINE ...`.

Standard output has one NAME=VALUE a line for the launched processes' environment, and one WORD=TEXT for each word of
their command line. What would not start, or would start and train wrong without a word, is printed on standard error,
sentence by sentence, with exit status 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_muon.integrations.transformers.overrides import (
    Override,
    Settings,
    as_assignments,
    as_options,
    read_overrides,
    read_settings,
)
from hf_muon.integrations.ulysses.hooks import model_complaints

ENGINES = ("hf", "llamafactory")


@dataclasses.dataclass(frozen=True)
class Run:
    """What is to be launched.

    Attributes:
        settings: what the YAML file and the command line say; the command line wins.
        sp_size: ranks that share a sequence.
        ranks: of all nodes.
        cuda: GPUs that torch sees here; 0 for the CPU.
        overrides: what the command line says, for the launched processes to read again.
        script: the Trainer script of this repository, if that is launched.
    """

    settings: Settings
    sp_size: int
    ranks: int
    cuda: int
    overrides: Sequence[Override] = ()
    script: Path | None = None

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
    if not knows_sequence_parallel():
        yield "this accelerate knows no sequence parallel: take 1.12 or newer"
    if run.get("optim") != "muon":
        yield f"optim: {run.get('optim')}. Say optim: muon; other optimizers' gradients are not corrected"
    if not run.cuda and run.ranks != run.sp_size:
        yield f"gloo needs SP_SIZE = NPROC * NNODES on the CPU, and these are {run.sp_size} and {run.ranks}"
    if run.get("deepspeed") is None:
        yield "deepspeed is missing: name a DeepSpeed config, such as examples/deepspeed/zero2.json"
    else:
        yield from _refusals({**run.settings, "parallelism_config": {"sp_size": run.sp_size}})
    if run.script is not None:
        yield from _script_complaints(run, run.script)
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
    yield from _unknown_keys(run.settings, v1_keys())
    if _part(run, "optim_config").get("name") != "muon":
        yield "optim_config has another name than muon. Say optim_config: {name: muon}"
    distributed = _part(run, "dist_config")
    if distributed.get("name") != "fsdp2":
        yield (
            "dist_config is not fsdp2: every rank would train on the gradient of its own part of the sequences, with a "
            "loss that looks as usual. Say dist_config: {name: fsdp2}"
        )
    else:
        yield from _refusals(run.settings)
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


def _refusals(settings: Settings) -> Iterator[str]:
    """Yield what the run itself would refuse of its options and its layout."""
    from hf_muon.integrations.transformers.hooks import NAME
    from hf_muon.integrations.transformers.training_file import optimizer_of, options_of, refusals

    try:
        if optimizer_of(settings) == NAME:
            options_of(settings)
            yield from refusals(settings)
    except (ValueError, RuntimeError) as error:
        yield str(error)


def _script_complaints(run: Run, script: Path) -> Iterator[str]:
    """Yield what the Trainer script of this repository would refuse on every rank, by its own parser."""
    parser, keys = _parser_of(script)
    yield from _unknown_keys(run.settings, keys)
    data = run.get("data_path")
    if data and not Path(str(data)).exists():
        yield f"data_path: {data} does not exist, seen from {Path.cwd()}"
    bare = {key for key, text in run.overrides if text is None}
    for key, value in run.settings.items():
        if key in keys and isinstance(value, (str, int, float)):  # mappings may stand in a file alone
            word = f"--{key}" if key in bare else f"--{key}={value}"
            try:
                parser.parse_args([word])
            except ValueError as error:
                yield f"{word}: {error}"


def _parser_of(script: Path) -> tuple[argparse.ArgumentParser, set[str]]:
    """Return the parser of the script's arguments, whose errors are raised, and the keys that it knows."""
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


def _flash_complaints(run: Run, attention: str) -> Iterator[str]:
    if not str(attention).startswith("flash"):
        return
    if not run.cuda:
        yield f"{attention} needs CUDA, and torch sees no GPU. Use sdpa"
    if attention == "flash_attention_2" and not _installed("flash_attn"):
        yield "flash_attention_2 needs the package flash-attn: pip install flash-attn --no-build-isolation"


def _model_complaints(run: Run, key: str, attention: str, length_key: str) -> Iterator[str]:
    from transformers import AutoConfig

    from hf_muon.routing.model_facts import text_config_of

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
    most, length = getattr(text_config_of(config), "max_position_embeddings", None), run.get(length_key)
    if not str(length or 0).isdigit() or int(length or 0) % run.sp_size:
        yield f"{length_key}: {length} is no number divisible by SP_SIZE={run.sp_size}; ranks hold equal parts"
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
    """Whether this LLaMA-Factory reads `cp_size` at the top level, as newer ones do, or in `dist_config` (0.9.5)."""
    module = importlib.import_module("llamafactory.v1.config.training_args")
    return "cp_size" in {field.name for field in dataclasses.fields(module.TrainingArguments)}


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _part(run: Run, key: str) -> Mapping[str, Any]:
    found = run.get(key, {})
    return found if isinstance(found, Mapping) else {}


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


def words(engine: str, run: Run) -> list[str]:
    """Return what the command line says, as the launched program reads it.

    Raises:
        ValueError: a line break.
    """
    written = as_options(run.overrides) if engine == "hf" else as_assignments(run.overrides)
    if broken := [word for word in written if "\n" in word]:
        raise ValueError(f"{broken[0]!r} holds a line break. Write it into CONFIG")
    return written


def _run_of(asked: argparse.Namespace, overrides: list[Override]) -> Run:
    """Return what was asked for.

    Raises:
        ValueError: something that cannot be read.
    """
    import torch

    for name in ("nproc", "nnodes", "sp_size"):
        value = getattr(asked, name)
        if value and not (value.isdigit() and int(value) > 0):
            raise ValueError(f"{name.upper()}={value} is not a number above 0")
    dotted = [key for key, _ in overrides if "." in key]
    if dotted and asked.engine == "hf":
        raise ValueError(f"{dotted[0]}: keys with dots are LLaMA-Factory's; write {dotted[0]} into CONFIG")
    settings = read_settings(asked.config, overrides)
    script = None
    if asked.engine == "hf":
        root = Path(asked.root) if asked.root else None
        script = root / "examples" / "train.py" if root and not asked.train else None
        config = settings.get("deepspeed")
        # The examples name theirs from the top of the repository.
        if root and isinstance(config, str) and not Path(config).exists() and (root / config).is_file():
            settings["deepspeed"] = str(root / config)
            overrides.append(("deepspeed", settings["deepspeed"]))
    cuda = 0 if settings.get("use_cpu") else torch.cuda.device_count()
    nnodes = int(asked.nnodes or 1)
    nproc = int(asked.nproc or cuda or asked.sp_size or 2)
    return Run(settings, int(asked.sp_size or nproc * nnodes), nproc * nnodes, cuda, overrides, script)


def main(argv: Sequence[str] | None = None) -> int:
    """Check, and print the environment and the words; see the module."""
    parser = argparse.ArgumentParser(prog="ulysses_launch")
    parser.add_argument("engine")
    for name in ("nproc", "nnodes", "sp-size", "config", "root", "train"):
        parser.add_argument(f"--{name}", default="")
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    asked = parser.parse_args(given[:end])
    lines: list[str] = []
    try:
        run = _run_of(asked, read_overrides(given[end + 1 :]))
        refused = list(complaints(asked.engine, run))
        nnodes = int(asked.nnodes or 1)
        counts = {"NPROC": str(run.ranks // nnodes), "NNODES": str(nnodes)}
        lines = [f"{name}={value}" for name, value in (environment(asked.engine, run) | counts).items()]
        lines += [f"WORD={word}" for word in words(asked.engine, run)]
    except ValueError as error:
        refused = [str(error)]
    except (ImportError, OSError) as error:
        refused = [
            f"PYTHON={sys.executable} cannot import what it needs ({error}). Activate the environment with torch and "
            "hf_muon, or name its python in PYTHON"
        ]
    for complaint in refused:
        print(f"run_ulysses.sh: {complaint}", file=sys.stderr)
    if refused:
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
