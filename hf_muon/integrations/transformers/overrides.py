"""Settings of a YAML file, with those of a command line in their place: what `ulysses.launch` reads and hands on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Settings = dict[str, Any]
Override = tuple[str, str | None]
"""A key, with dots between its parts, and its value as text; None for a bare flag, which means true."""


def read_overrides(words: Sequence[str]) -> list[Override]:
    """Return the keys and values of a command line: `--key value`, `--key=value`, `key=value`, or `--key` alone.

    Raises:
        ValueError: a word that is none of these.
    """
    overrides: list[Override] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if not key or not (equals or word.startswith("--")):
            raise ValueError(f"{word!r} is neither --key value nor key=value")
        value: str | None = text if equals else None
        if value is None and rest and not _is_override(key, rest[0]):
            value = rest.pop(0)
        overrides.append((key, value))
    return overrides


def _is_override(key: str, word: str) -> bool:
    """Return whether the word after `--key` is an override of its own, and no value."""
    if key.rpartition(".")[2].endswith(("_args", "_kwargs")):
        return word.startswith("--")  # `--optim_args momentum=0.9`: such values are key=value themselves
    return word.startswith("--") or re.match(r"[A-Za-z_][\w.]*=", word) is not None


def read_settings(path: str, overrides: Sequence[Override]) -> Settings:
    """Return the settings of a YAML file, with the overrides in their place.

    Raises:
        ValueError: a file that cannot be read, or an override that does not fit into it.
    """
    import yaml

    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"CONFIG={path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ValueError(f"CONFIG={path} does not hold keys and values")
    for key, text in overrides:
        try:
            value = True if text is None else yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{key}: {text} cannot be read: {' '.join(str(error).split())}") from error
        _replace(settings, key, value)
    return settings


def _replace(settings: Settings, key: str, value: Any) -> None:
    """Replace `dist_config.name`, as LLaMA-Factory writes it, within the mapping `dist_config`."""
    target = settings
    *parents, last = key.split(".")
    for parent in parents:
        if target.get(parent) is None:
            target[parent] = {}
        target = target[parent]
        if not isinstance(target, dict):
            raise ValueError(f"{key}: {parent} is {target!r}, which holds no keys")
    target[last] = value


def as_options(overrides: Sequence[Override]) -> list[str]:
    """Return overrides as transformers' HfArgumentParser reads them."""
    return [f"--{key}" if text is None else f"--{key}={text}" for key, text in overrides]


def as_assignments(overrides: Sequence[Override]) -> list[str]:
    """Return overrides as LLaMA-Factory (OmegaConf) reads them."""
    return [f"{key}={'true' if text is None else text}" for key, text in overrides]
