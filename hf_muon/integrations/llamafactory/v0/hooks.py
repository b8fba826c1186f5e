"""What is patched in LLaMA-Factory v0: its parser. The optimizer comes from transformers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from hf_muon._autoload import Change, everywhere
from hf_muon.integrations.llamafactory.v0.refusals import refuse_factors, refuse_rivals
from hf_muon.integrations.names import first_with, is_muon, not_in_place


def patch_parser(module: ModuleType) -> Iterator[Change]:
    """Check the parsed arguments of a training run before its model is loaded."""
    get_train_args = module.get_train_args

    @functools.wraps(get_train_args)
    def checked_get_train_args(*args: Any, **kwargs: Any) -> Any:
        parsed = get_train_args(*args, **kwargs)
        parts = parsed if isinstance(parsed, (tuple, list)) else getattr(parsed, "__dict__", {}).values()
        check_arguments(parts)
        return parsed

    yield from everywhere(module, "get_train_args", checked_get_train_args)


def check_arguments(parts: Iterable[Any]) -> None:
    """Refuse what would replace a Muon or leave it nothing to step.

    Args:
        parts: LLaMA-Factory's dataclasses of arguments, in any order and among others.
    """
    parts = list(parts)
    training, finetuning = first_with(parts, "optim"), first_with(parts, "finetuning_type")
    if not is_muon(getattr(training, "optim", None)):
        return
    if finetuning is None:
        raise not_in_place("LLaMA-Factory's parser", "its result holds no finetuning_type")
    refuse_rivals(finetuning)
    refuse_factors(training, finetuning)
