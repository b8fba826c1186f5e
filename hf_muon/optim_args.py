"""The text of `optim_args`, as TrainingArguments hold it: `name=value,name=value`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_muon.config import FRONT, OPTIONS, MuonConfig, known_option, unknown_option
from hf_muon.options.declaration import as_text, listed, quoted


def parse_optim_args(text: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Split `optim_args`, `"momentum=0.9,ns_steps=6"`, as transformers does: blanks dropped, commas between items.

    A mapping of names to values, as a YAML file may hold it, is returned as a dict.

    Raises:
        ValueError: an item is not `name=value`, or a name is unknown or repeated.
    """
    if isinstance(text, Mapping):
        for name in text:
            if known_option(name) is None:
                raise unknown_option(name)
        return dict(text)
    if text is not None and not isinstance(text, str):
        raise ValueError(
            f'optim_args={quoted(text)} is neither text, "name=value,name=value", nor a mapping [invalid-value]'
        )
    options: dict[str, Any] = {}
    for item in (text or "").replace(" ", "").split(","):
        if not item and not text:
            continue
        name, equals, value = item.partition("=")
        names = listed(MuonConfig.names(), OPTIONS.keys() - FRONT)
        if not (name and equals and value) or "=" in value:
            raise ValueError(
                f"optim_args: {quoted(item)} is not of the form name=value. Items are joined by commas, lists by |, "
                f"and a value cannot hold a comma or an equals sign. Valid names: {names} [not-name-value]"
            )
        if known_option(name) is None:
            raise unknown_option(name)
        if name in options:
            raise ValueError(f"optim_args: {name} is given twice, {options[name]!r} and {value!r} [given-twice]")
        options[name] = value
    return options


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
