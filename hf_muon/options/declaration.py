"""The declaration of an option as a dataclass field; its errors, and the docstrings that follow from it."""

from __future__ import annotations

import dataclasses
import difflib
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from hf_muon.options.patterns import factor_text, is_factors
from hf_muon.options.types import InvalidError, OptionType

Scope = Literal["group", "optimizer", "model"]
"""Who reads an option: a param group of `Muon`, `Muon` as a whole, or `build_optimizer`, which routes a model."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Option:
    """One option, as its field of `MuonConfig` declares it; see `option`."""

    type: OptionType
    default: Any
    meaning: str
    scope: Scope = "model"
    fallback: str = ""
    source: str = ""
    may_be_unset: bool = False


def option(
    default: _T,
    type: OptionType,
    meaning: str,
    *,
    scope: Scope = "model",
    fallback: str = "",
    source: str = "",
    may_be_unset: bool = False,
) -> _T:
    """Return a dataclass field that declares an option.

    The annotated return type lets type checkers read ``name: float = option(0.95, ...)`` as a field with a default.

    Args:
        default: the default in Python.
        type: the values that the option takes.
        meaning: what the option does, in whole sentences, for docstrings and docs/options.md.
        scope: who reads it.
        fallback: where the value comes from if the user sets none, in place of or before `default`.
        source: papers and libraries, as Markdown links.
        may_be_unset: whether a config holds None until the user sets the option, to tell the default from the same
            value that the user has set.
    """
    metadata = {"option": Option(type, default, meaning, scope, fallback, source, may_be_unset)}
    field: Any = dataclasses.field(default=None if may_be_unset else default, metadata=metadata)
    return field  # type: ignore[no-any-return]


def declared(option: Option) -> Any:
    """Return a dataclass field for an option that is declared elsewhere."""
    return dataclasses.field(default=option.default, metadata={"option": option})


def options_of(config: Any) -> dict[str, Option]:
    """Return the options that a dataclass declares, by name."""
    fields = dataclasses.fields(config)
    return {field.name: field.metadata["option"] for field in fields if "option" in field.metadata}


def check_value(name: str, option: Option, value: Any) -> Any:
    """Return the canonical form of a value. None is valid where it is the default.

    Raises:
        ValueError: the option does not take the value; the message names the valid ones.
    """
    if value is None and option.default is None:
        return None
    try:
        return option.type.check(value)
    except (InvalidError, TypeError, OverflowError) as error:
        reason = f": {error}" if isinstance(error, InvalidError) and str(error) else ""
        raise ValueError(
            f"{name}={quoted(value)} is not valid{reason}. Valid: {option.type.valid} [invalid-value]"
        ) from None


def quoted(value: Any) -> str:
    """Return a value as an error message quotes it; of a tensor that is no single number, its shape."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return f"a tensor of shape {tuple(value.shape)}"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  an integer of more digits than Python prints, or a class with a broken repr
        return f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:200]}..."


def unknown_option(name: Any, valid: Sequence[str], hidden: Collection[str] = ()) -> ValueError:
    """Return the error for a key that is not an option, with the closest one that is; it counts those in `hidden`."""
    near = difflib.get_close_matches(name[:100], valid, n=1) if isinstance(name, str) else []
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"{quoted(name)} is not an option of muon.{hint} Valid: {listed(valid, hidden)} [unknown-option]")


def listed(names: Sequence[str], hidden: Collection[str]) -> str:
    """Return names as an error lists them, and the number of those that are in `hidden`."""
    rest = sum(name in hidden for name in names)
    shown = ", ".join(name for name in names if name not in hidden)
    return f"{shown}, and {rest} more in docs/options.md" if rest else shown


def as_text(value: Any) -> str:
    """Return a value as `optim_args` and docs/options.md write it."""
    pairs = value.items() if isinstance(value, Mapping) else value if is_factors(value) else ()
    if pairs:
        return "|".join(factor_text(str(pattern), factor) for pattern, factor in pairs)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "|".join(map(as_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def documented(options: Mapping[str, Option]) -> Callable[[type[_T]], type[_T]]:
    """Return a class decorator that replaces the line ``{options}`` of a docstring by the meanings of options."""

    def decorate(cls: type[_T]) -> type[_T]:
        if cls.__doc__:  # python -OO has none
            cls.__doc__ = re.sub(
                r"^( *)\{options\}$", lambda line: _described(options, line[1]), cls.__doc__, flags=re.M
            )
        return cls

    return decorate


def _described(options: Mapping[str, Option], indent: str) -> str:
    lines = []
    for name, option in options.items():
        default = f" Default: {option.fallback}." if option.default is None and option.fallback else ""
        lines += textwrap.wrap(
            f"{name}: {option.meaning}{default}",
            width=120,
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)
