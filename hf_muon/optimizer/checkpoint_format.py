"""The format of saved param groups, which later versions must read.

`torch.distributed.checkpoint` reads a sharded checkpoint into the keys that the optimizer offers, and fails if the file
lacks one. So the keys of a saved group are fixed, and the options, of which a later version may have more, are one text
of JSON under `KEY`. An option that the text lacks is one that its writer did not have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import hf_muon
from hf_muon.config import GROUP_OPTIONS
from hf_muon.storage import factors
from hf_muon.storage.tensors import quoted

FORMAT = 1
"""Rises when a version can no longer be read by the one before, for another reason than that an option was added."""

KEY = "hf_muon"
"""The key of the text in saved param groups."""

# Options that keep their keys: other programs read them, and a learning rate may be a tensor.
_PLAIN = ("lr", "weight_decay")


def packed(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param group as a state dict holds it, with one text in place of its options."""
    options = {name: group[name] for name in sorted(_names()) if name in group}
    rest = {key: value for key, value in group.items() if key not in options}
    return {**rest, KEY: to_text({"options": options})}


def unpacked(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved param group with a key for each option; a key next to the text wins.

    Raises:
        ValueError: the text cannot be read, or has options that are not known here.
    """
    content = from_text(group[KEY])
    options = content.get("options")
    if not isinstance(options, Mapping):
        raise _invalid(group[KEY])
    if unknown := sorted(options.keys() - _names()):
        rule = "If a rule of yours has these options, register it before the load. Otherwise: "
        raise _newer(content, f"options {', '.join(unknown)}", rule)
    return {**options, **{key: value for key, value in group.items() if key != KEY}}


def to_text(content: Mapping[str, Any]) -> str:
    """Return content of a checkpoint as JSON, with the format and the version that writes it."""
    stamped = {"format": FORMAT, "version": hf_muon.__version__, **content}
    # Not sorted: DeepSpeed's index has parameters in the order of their elements. `_plain` gets scalars of numpy, too.
    return json.dumps(stamped, default=_plain)


def _plain(value: Any) -> Any:
    """Return a number that JSON does not know as one that it does."""
    return value.item() if hasattr(value, "item") else float(value)


def from_text(text: Any) -> dict[str, Any]:
    """Return what `to_text` was given, with its format and version.

    Raises:
        ValueError: the text cannot be read, or a later version has written it.
    """
    try:
        content = json.loads(text)
        newer = content["format"] > FORMAT
    except (ValueError, TypeError, KeyError):
        raise _invalid(text) from None
    if newer:
        raise _newer(content, f"format {content['format']}")
    return dict(content)


def _names() -> set[str]:
    """Return the keys of param groups that the text holds."""
    return {*GROUP_OPTIONS, factors.KEY} - {*_PLAIN}


def _invalid(text: Any) -> ValueError:
    return ValueError(f"{KEY}={quoted(text)}, which is not a text that hf_muon writes [invalid-value]")


def _newer(content: Mapping[str, Any], what: str, first: str = "") -> ValueError:
    return ValueError(
        f"{what} of hf_muon {content.get('version')}, and this is hf_muon {hf_muon.__version__}, which reads format "
        f"{FORMAT} and does not know all that is there. {first}Install hf_muon {content.get('version')} or newer, or "
        "start from the weights [newer-state]"
    )
