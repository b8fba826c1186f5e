"""The check before a launch of `scripts/run_ulysses.sh`: `python -m hf_muon.integrations.ulysses.launch ENGINE ...`.

Standard output has one NAME=VALUE a line for the launched processes' environment, and one WORD=TEXT for each word of
their command line. What would not start, or would start and silently train wrong, is printed on standard error, a
sentence a line, with exit status 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_muon.integrations.transformers.overrides import (
    Override,
    as_assignments,
    as_options,
    read_overrides,
    read_settings,
)
from hf_muon.integrations.ulysses.launch_check import Launch, complaints


def environment(engine: str, launch: Launch) -> dict[str, str]:
    """Return the environment variables of the launched processes."""
    if engine == "llamafactory":
        return {"USE_V1": "1", "FORCE_TORCHRUN": "1"}
    variables = {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
        "PARALLELISM_CONFIG_SP_SIZE": str(launch.sp_size),
        "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": launch.get("attn_implementation", "sdpa"),
    }
    return variables if launch.cuda else {**variables, "DS_ACCELERATOR": "cpu"}


def words(engine: str, launch: Launch) -> list[str]:
    """Return the overrides of the command line, as the launched program reads them.

    Raises:
        ValueError: a line break.
    """
    texts = as_options(launch.overrides) if engine == "hf" else as_assignments(launch.overrides)
    if broken := [word for word in texts if "\n" in word]:
        raise ValueError(f"{broken[0]!r} holds a line break. Write it into CONFIG")
    return texts


def _launch_of(flags: argparse.Namespace, overrides: list[Override]) -> Launch:
    """Return the launch that the flags and the overrides ask for.

    Raises:
        ValueError: something that cannot be read.
    """
    import torch

    for name in ("nproc", "nnodes", "sp_size"):
        value = getattr(flags, name)
        if value and not (value.isdigit() and int(value) > 0):
            raise ValueError(f"{name.upper()}={value} is not a number above 0")
    dotted = [key for key, _ in overrides if "." in key]
    if dotted and flags.engine == "hf":
        raise ValueError(f"{dotted[0]}: keys with dots are LLaMA-Factory's; write {dotted[0]} into CONFIG")
    settings = read_settings(flags.config, overrides)
    script = None
    if flags.engine == "hf":
        root = Path(flags.root) if flags.root else None
        script = root / "examples" / "train.py" if root and not flags.train else None
        config = settings.get("deepspeed")
        # The examples name theirs from the top of the repository.
        if root and isinstance(config, str) and not Path(config).exists() and (root / config).is_file():
            settings["deepspeed"] = str(root / config)
            overrides.append(("deepspeed", settings["deepspeed"]))
    cuda = 0 if settings.get("use_cpu") else torch.cuda.device_count()
    nnodes = int(flags.nnodes or 1)
    nproc = int(flags.nproc or cuda or flags.sp_size or 2)
    return Launch(settings, int(flags.sp_size or nproc * nnodes), nproc * nnodes, cuda, overrides, script)


def main(argv: Sequence[str] | None = None) -> int:
    """Check the launch, and print its environment and its words; see the module."""
    parser = argparse.ArgumentParser(prog="ulysses_launch")
    parser.add_argument("engine")
    for name in ("nproc", "nnodes", "sp-size", "config", "root", "train"):
        parser.add_argument(f"--{name}", default="")
    line = list(sys.argv[1:] if argv is None else argv)
    end = line.index("--") if "--" in line else len(line)
    flags = parser.parse_args(line[:end])
    lines: list[str] = []
    try:
        launch = _launch_of(flags, read_overrides(line[end + 1 :]))
        refusals = list(complaints(flags.engine, launch))
        nnodes = int(flags.nnodes or 1)
        counts = {"NPROC": str(launch.ranks // nnodes), "NNODES": str(nnodes)}
        lines = [f"{name}={value}" for name, value in (environment(flags.engine, launch) | counts).items()]
        lines += [f"WORD={word}" for word in words(flags.engine, launch)]
    except ValueError as error:
        refusals = [str(error)]
    except (ImportError, OSError) as error:
        refusals = [
            f"PYTHON={sys.executable} cannot import what it needs ({error}). Activate the environment with torch and "
            "hf_muon, or name its python in PYTHON"
        ]
    for complaint in refusals:
        print(f"run_ulysses.sh: {complaint}", file=sys.stderr)
    if refusals:
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
