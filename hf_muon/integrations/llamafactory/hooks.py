"""LLaMA-Factory v0: `optim: muon` works there through transformers; what would silently win over it is refused."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_muon.integrations.transformers.hooks import NAME, OURS

# Trainings outside of the Trainer, which bring an optimizer of their own; chosen in the environment, and said to
# finetuning_args by the parser.
MEGATRON = {
    "use_mca": ("USE_MCA", "Megatron (mcore_adapter)"),
    "use_megatron_bridge": ("USE_MEGATRON_BRIDGE", "Megatron Bridge"),
}
RIVALS = ("use_muon", "use_galore", "use_apollo", "use_badam", "use_adam_mini")


def patch_parser(module: Any) -> Callable[[], None] | str | None:
    """Check the parsed arguments of a training run, before its model is loaded."""
    get_train_args = module.get_train_args
    if getattr(get_train_args, OURS, False):
        return None

    @functools.wraps(get_train_args)
    def checked_get_train_args(*args: Any, **kwargs: Any) -> Any:
        parsed = get_train_args(*args, **kwargs)
        training_args, finetuning_args = parsed[2], parsed[3]
        if training_args.optim == NAME:
            refuse_rivals(finetuning_args)
        return parsed

    setattr(checked_get_train_args, OURS, True)
    _replace(get_train_args, checked_get_train_args)
    return lambda: _replace(checked_get_train_args, get_train_args)


def patch_plots(module: Any) -> Callable[[], None] | None:
    """Have `plot_loss: true` draw Muon's metrics, too, where a run has logged some."""
    plot_loss = module.plot_loss
    if getattr(plot_loss, OURS, False):
        return None

    @functools.wraps(plot_loss)
    def plot_metrics_too(save_dictionary: Any, keys: Any = ("loss",)) -> None:
        plot_loss(save_dictionary, [*keys, *_logged_metrics(save_dictionary)])

    setattr(plot_metrics_too, OURS, True)
    module.plot_loss = plot_metrics_too

    def undo() -> None:
        module.plot_loss = plot_loss

    return undo


def _logged_metrics(folder: Any) -> list[str]:
    """Names of what a Trainer has logged of Muon; of update RMS the mean alone."""
    try:
        history = json.loads((Path(folder) / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    except (OSError, ValueError, KeyError):
        return []  # which is plot_loss's to complain about
    return sorted({key for entry in history for key in entry if key.startswith("muon/") and key.count("/") == 1})


def _replace(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Also where LLaMA-Factory's other modules have imported the function already."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "llamafactory" and getattr(module, "get_train_args", None) is old:
            module.get_train_args = new  # type: ignore[attr-defined]


def refuse_rivals(finetuning_args: Any) -> None:
    """Raise if an option of LLaMA-Factory's would replace the optimizer that `optim: muon` asks for.

    Raises:
        ValueError: which option it is, and which one to keep.
        RuntimeError: a route of training on which Muon cannot step.
    """
    if getattr(finetuning_args, "use_muon", False):
        raise ValueError(
            "use_muon: true and optim: muon are two different optimizers, and use_muon would win without a word. Keep "
            "optim: muon for hf_muon (embeddings and heads stay with AdamW), and remove use_muon; or keep "
            "use_muon: true for LLaMA-Factory's own Muon, and remove optim."
        )
    for rival in RIVALS[1:]:
        if getattr(finetuning_args, rival, False):
            raise ValueError(
                f"{rival}: true would replace the optimizer that optim: muon asks for. Keep optim: muon and remove "
                f"{rival}, or keep {rival} and remove optim."
            )
    _refuse_routes(finetuning_args)


def _refuse_routes(finetuning_args: Any) -> None:
    for option, (variable, name) in MEGATRON.items():
        if getattr(finetuning_args, option, False):
            raise RuntimeError(
                f"optim: muon does not run with {variable}=1: LLaMA-Factory then trains with {name}, which reads no "
                f"optim and steps with an Adam of its own. Unset {variable}, and train with DDP, FSDP2 or DeepSpeed; "
                "or remove optim."
            )
    if getattr(finetuning_args, "use_hyper_parallel", False):
        raise RuntimeError(
            "optim: muon does not run with use_hyper_parallel: true: hyper_parallel keeps shards of matrices in a "
            "tensor class of its own, which does not say what they are part of. Remove use_hyper_parallel, and train "
            "with FSDP2 (fsdp_version: 2 in an accelerate config) or DeepSpeed; or remove optim."
        )
