"""The text of `optim_args`, as TrainingArguments hold it: `name=value,name=value`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_muon.config import OPTIONS, listed, option_of
from hf_muon.options.patterns import factor_text
from hf_muon.storage.tensors import quoted


def parse_optim_args(text: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Split `optim_args`, `"momentum=0.9,ns_steps=6"`, as transformers does: blanks dropped, commas between items.

    A mapping of names to values, as a YAML file may hold it, is returned as a dict.

    Raises:
        ValueError: an item is not `name=value`, or a name is unknown or repeated.
    """
    options: dict[str, Any] = {}
    if isinstance(text, Mapping):
        options.update(text)
    elif isinstance(text, str):
        for item in without_blanks(text).split(",") if text else ():
            name, equals, value = item.partition("=")
            if not (name and equals and value) or "=" in value:
                raise ValueError(
                    f"optim_args: {quoted(item)} is not of the form name=value. Items are joined by commas, lists by "
                    f"|, and a value cannot hold a comma or an equals sign. Valid names: {listed(OPTIONS)} "
                    "[not-name-value]"
                )
            if name in options:
                raise ValueError(f"optim_args: {name} is given twice, {options[name]!r} and {value!r} [given-twice]")
            options[name] = value
    elif text is not None:
        raise ValueError(
            f'optim_args={quoted(text)} is neither text, "name=value,name=value", nor a mapping [invalid-value]'
        )
    for name in options:
        option_of(name)
    return options


def without_blanks(text: str) -> str:
    """Return `optim_args` without blanks and line breaks, of which transformers drops the first only."""
    return "".join(text.split())


def text_of(options: Mapping[str, Any]) -> str:
    """Return options as the text of `optim_args`, which transformers splits again.

    Raises:
        ValueError: `optim_args` cannot hold a value.
    """
    items = []
    for name, value in options.items():
        if value is None:
            continue
        text = as_text(value)
        if not text or set(text) & set(" ,="):
            raise ValueError(
                f"optim_args: {name}={quoted(value)} holds a blank, a comma or an equals sign, at which transformers "
                "splits. Write a pattern with \\s, \\x2c or \\x3d in their place [unwritable-value]"
            )
        items.append(f"{name}={text}")
    return ",".join(items)


def as_text(value: Any) -> str:
    """Return a value as `optim_args` and docs/options.md write it."""
    if isinstance(value, Mapping):
        return "|".join(factor_text(str(pattern), factor) for pattern, factor in value.items())
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and not isinstance(value[1], str):
        return factor_text(*value)  # a value of `lr_scales`
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "|".join(map(as_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
