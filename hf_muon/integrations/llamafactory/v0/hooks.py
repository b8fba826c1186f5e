"""What is patched in LLaMA-Factory v0: its parser, and its plots. The optimizer comes from transformers."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_muon.integrations.llamafactory.v0.refusals import refuse_rivals
from hf_muon.integrations.names import OWN_NAME, is_muon, is_ours, mark
from hf_muon.integrations.other_muons import warn_of_other_muon


def patch_parser(module: Any) -> Callable[[], None] | str | None:
    """Check the parsed arguments of a training run before its model is loaded."""
    get_train_args = module.get_train_args
    if is_ours(get_train_args):
        return None

    @functools.wraps(get_train_args)
    def checked_get_train_args(*args: Any, **kwargs: Any) -> Any:
        parsed = get_train_args(*args, **kwargs)
        training_args, finetuning_args = parsed[2], parsed[3]
        if is_muon(training_args.optim):
            refuse_rivals(finetuning_args)
        elif getattr(finetuning_args, "use_muon", False):
            instead = f"write optim: {OWN_NAME} and remove use_muon"
            warn_of_other_muon("LLaMA-Factory", "use_muon: true", instead)
        return parsed

    mark(checked_get_train_args)
    _replace(get_train_args, checked_get_train_args)
    return lambda: _replace(checked_get_train_args, get_train_args)


def _replace(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Replace the parser, also in those of LLaMA-Factory's modules that have imported it already."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "llamafactory" and getattr(module, "get_train_args", None) is old:
            module.get_train_args = new  # type: ignore[attr-defined]


def patch_plots(module: Any) -> Callable[[], None] | None:
    """Patch `plot_loss: true` to draw Muon's metrics, too, where a run has logged some."""
    plot_loss = module.plot_loss
    if is_ours(plot_loss):
        return None

    @functools.wraps(plot_loss)
    def plot_metrics_too(save_dictionary: Any, keys: Any = ("loss",)) -> None:
        plot_loss(save_dictionary, [*keys, *_logged_metrics(save_dictionary)])

    module.plot_loss = mark(plot_metrics_too)

    def undo() -> None:
        module.plot_loss = plot_loss

    return undo


def _logged_metrics(folder: Any) -> list[str]:
    """Return the names of Muon's metrics in a Trainer's log; of those that are split by kind only the mean."""
    try:
        history = json.loads((Path(folder) / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    except (OSError, ValueError, KeyError):
        return []  # plot_loss reports that itself
    return sorted({key for entry in history for key in entry if key.startswith("muon/") and key.count("/") == 1})
