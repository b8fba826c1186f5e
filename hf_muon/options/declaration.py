"""The declaration of an option as an annotated dataclass field; its errors, and the docstrings that follow from it."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_type_hints

from hf_muon.options.types import OptionType, flag
from hf_muon.storage.tensors import quoted

Scope = Literal["group", "optimizer", "model"]
"""Who reads an option: a param group of `Muon`, `Muon` as a whole, or `build_optimizer`, which routes a model."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Option:
    """One option, as a field of `MuonConfig` or a rule declares it.

    Attributes:
        type: the values that it takes.
        default: the default in Python.
        meaning: what it does, in whole sentences, for docstrings and docs/options.md.
        scope: who reads it.
        fallback: where the value comes from if the user sets none, in place of or before `default`.
        source: papers and libraries, as Markdown links.
    """

    type: OptionType
    default: Any
    meaning: str
    scope: Scope = "group"
    fallback: str = ""
    source: str = ""

    def check(self, name: str, value: Any) -> Any:
        """Return the canonical form of a value. None is valid where it is the default.

        Raises:
            ValueError: the option does not take the value; the message names the valid ones.
        """
        if value is None and self.default is None:
            return None
        try:
            return self.type.check(value)
        except (ValueError, TypeError, OverflowError) as error:
            reason = f": {error}" if isinstance(error, ValueError) and str(error) else ""
            raise ValueError(
                f"{name}={quoted(value)} is not valid{reason}. Valid: {self.type.valid} [invalid-value]"
            ) from None

    def read(self, name: str, value: Any) -> Any:
        """Return a value that may be text, as `optim_args` and YAML hold it; `check` follows.

        Raises:
            ValueError: the text cannot be read.
        """
        try:
            return self.type.parse(value) if isinstance(value, str) else value
        except (ValueError, KeyError):
            text = value if len(value) <= 200 else f"{value[:200]}..."
            raise ValueError(f"{name}={text} cannot be read. Valid: {self.type.valid} [invalid-value]") from None


def option(default: _T, meaning: str, *, may_be_unset: bool = False, **more: Any) -> _T:
    """Return a dataclass field that declares an option; its annotation has the type: `bool`, or ``Annotated[...]``.

    That this returns the type of the default lets type checkers read ``name: float = option(0.95, ...)`` as a field
    with a default.

    Args:
        default: the default in Python.
        meaning: as in :class:`Option`.
        may_be_unset: whether a config holds None until the user sets the option, to tell the default from the same
            value that the user has set.
        **more: scope, fallback and source, as in :class:`Option`.
    """

    def complete(annotation: Any) -> Option:
        return Option(flag() if annotation is bool else annotation.__metadata__[0], default, meaning, **more)

    field: Any = dataclasses.field(default=None if may_be_unset else default, metadata={"option": complete})
    return field  # type: ignore[no-any-return]


def options_of(config: type) -> dict[str, Option]:
    """Return the options that the fields of a dataclass declare, by name."""
    annotations = get_type_hints(config, include_extras=True)
    fields = [field for field in dataclasses.fields(config) if "option" in field.metadata]
    return {field.name: field.metadata["option"](annotations[field.name]) for field in fields}


def documented(options: Mapping[str, Option]) -> Callable[[type[_T]], type[_T]]:
    """Return a class decorator that replaces the line ``{options}`` of a docstring with the meanings of options."""

    def described(line: re.Match[str]) -> str:
        return "\n".join(
            textwrap.fill(
                f"{name}: {option.meaning}"
                + (f" Default: {option.fallback}." if option.default is None and option.fallback else ""),
                width=120,
                initial_indent=line[1],
                subsequent_indent=f"{line[1]}    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            for name, option in options.items()
        )

    def decorate(cls: type[_T]) -> type[_T]:
        # python -OO has none.
        if cls.__doc__:
            cls.__doc__ = re.sub(r"^( *)\{options\}$", described, cls.__doc__, flags=re.M)
        return cls

    return decorate
