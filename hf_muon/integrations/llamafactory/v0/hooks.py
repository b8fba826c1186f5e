"""What is patched in LLaMA-Factory v0: its parser, and its plots. The optimizer comes from transformers."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_muon._autoload import Change
from hf_muon.integrations.llamafactory.v0.refusals import refuse_factors, refuse_rivals
from hf_muon.integrations.names import OWN_NAME, first_with, is_muon, not_in_place
from hf_muon.integrations.other_muons import warn_of_other_muon


def patch_parser(module: ModuleType) -> Iterator[Change]:
    """Check the parsed arguments of a training run before its model is loaded.

    The parser is replaced in those of LLaMA-Factory's modules, too, that have imported it already.
    """
    get_train_args = module.get_train_args

    @functools.wraps(get_train_args)
    def checked_get_train_args(*args: Any, **kwargs: Any) -> Any:
        parsed = get_train_args(*args, **kwargs)
        parts = parsed if isinstance(parsed, (tuple, list)) else getattr(parsed, "__dict__", {}).values()
        check_arguments(parts)
        return parsed

    yield module, "get_train_args", checked_get_train_args
    for name, other in list(sys.modules.items()):
        if name.partition(".")[0] == "llamafactory" and getattr(other, "get_train_args", None) is get_train_args:
            yield other, "get_train_args", checked_get_train_args


def patch_dependencies(module: ModuleType) -> Iterator[Change]:
    """Check arguments before LLaMA-Factory asks for the package of an optimizer that is refused anyway."""
    check = module._check_extra_dependencies

    @functools.wraps(check)
    def check_arguments_first(*args: Any, **kwargs: Any) -> Any:
        check_arguments((*args, *kwargs.values()))
        return check(*args, **kwargs)

    yield module, "_check_extra_dependencies", check_arguments_first


def check_arguments(parts: Iterable[Any]) -> None:
    """Refuse what would replace a Muon or leave it nothing to step; warn where LLaMA-Factory's own runs.

    Args:
        parts: LLaMA-Factory's dataclasses of arguments, in any order and among others.
    """
    parts = list(parts)
    training, finetuning = first_with(parts, "optim"), first_with(parts, "finetuning_type")
    if not is_muon(getattr(training, "optim", None)):
        if training is not None and getattr(finetuning, "use_muon", False) is True:
            instead = f"write optim: {OWN_NAME} and remove use_muon"
            warn_of_other_muon("LLaMA-Factory", "use_muon: true", instead)
        return
    if finetuning is None:
        raise not_in_place("LLaMA-Factory's parser", "its result holds no finetuning_type")
    refuse_rivals(finetuning)
    refuse_factors(training, finetuning)


def patch_plots(module: ModuleType) -> Iterator[Change]:
    """Patch `plot_loss: true` to draw Muon's metrics, too, where a run has logged some."""
    plot_loss = module.plot_loss

    @functools.wraps(plot_loss)
    def plot_metrics_too(save_dictionary: Any, keys: Any = ("loss",)) -> None:
        plot_loss(save_dictionary, [*keys, *_logged_metrics(save_dictionary)])

    yield module, "plot_loss", plot_metrics_too


def _logged_metrics(folder: Any) -> list[str]:
    """Return the names of Muon's metrics in a Trainer's log; of those that are split by kind only the mean."""
    try:
        history = json.loads((Path(folder) / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    except (OSError, ValueError, KeyError):
        return []  # plot_loss reports that itself
    return sorted({key for entry in history for key in entry if key.startswith("muon/") and key.count("/") == 1})
