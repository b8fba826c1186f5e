"""LLaMA-Factory v0: refuse options that would silently replace `optim: muon`. transformers makes the optimizer."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from hf_muon._autoload import Change, everywhere
from hf_muon.integrations.names import is_muon, not_in_place

RIVALS = ("use_muon", "use_galore", "use_apollo", "use_badam", "use_adam_mini")
# Training loops other than the Trainer's, each with its own optimizer. The environment chooses them, and the parser
# copies the choice into finetuning_args.
MEGATRON = {
    "use_mca": ("USE_MCA", "Megatron (mcore_adapter)"),
    "use_megatron_bridge": ("USE_MEGATRON_BRIDGE", "Megatron Bridge"),
}
# Options that may give Muon other parameters than LoRA factors to step.
_CHOICES = ("lora", "muon_patterns")


def patch_parser(module: ModuleType) -> Iterator[Change]:
    """Check the parsed arguments of a training run before its model is loaded."""
    get_train_args = module.get_train_args

    @functools.wraps(get_train_args)
    def checked_get_train_args(*args: Any, **kwargs: Any) -> Any:
        parsed = get_train_args(*args, **kwargs)
        check_arguments(parsed if isinstance(parsed, (tuple, list)) else getattr(parsed, "__dict__", {}).values())
        return parsed

    yield from everywhere(module, "get_train_args", checked_get_train_args)


def check_arguments(dataclasses: Iterable[Any]) -> None:
    """Refuse options that would replace a Muon or leave it nothing to step.

    Args:
        dataclasses: LLaMA-Factory's arguments, in any order and among other values.
    """
    dataclasses = list(dataclasses)
    training, finetuning = _first_with(dataclasses, "optim"), _first_with(dataclasses, "finetuning_type")
    if not is_muon(getattr(training, "optim", None)):
        return
    if finetuning is None:
        raise not_in_place("LLaMA-Factory's parser", "its result holds no finetuning_type")
    refuse_rivals(finetuning)
    refuse_factors(training, finetuning)


def _first_with(values: Iterable[Any], name: str) -> Any:
    return next((value for value in values if name in getattr(value, "__dict__", ())), None)


def refuse_rivals(finetuning_args: Any) -> None:
    """Raise if an option of LLaMA-Factory's would replace the optimizer that `optim: muon` asks for.

    Raises:
        ValueError: the option, and which of the two to keep.
        RuntimeError: a way of training in which Muon cannot step.
    """
    for rival in RIVALS:
        if getattr(finetuning_args, rival, False):
            raise ValueError(
                f"{rival}: true would replace the optimizer that optim: muon asks for. Keep optim: muon and remove "
                f"{rival}, or keep {rival} and remove optim. [rival-optimizer]"
            )
    for option, (variable, name) in MEGATRON.items():
        if getattr(finetuning_args, option, False):
            raise RuntimeError(
                f"optim: muon does not run with {variable}=1: LLaMA-Factory then trains with {name}, which ignores "
                f"optim and steps with an Adam of its own. Unset {variable}, and train with DDP, FSDP2 or DeepSpeed; "
                "or remove optim. [rival-trainer]"
            )
    if getattr(finetuning_args, "use_hyper_parallel", False):
        raise RuntimeError(
            "optim: muon does not run with use_hyper_parallel: true: hyper_parallel keeps shards of matrices in a "
            "tensor class of its own, which does not say what they are part of. Remove use_hyper_parallel, and train "
            "with FSDP2 (fsdp_version: 2 in an accelerate config) or DeepSpeed; or remove optim. [hyper-parallel]"
        )


def refuse_factors(training_args: Any, finetuning_args: Any) -> None:
    """Raise if a run trains only LoRA factors and does not let Muon step them, before its model is loaded.

    Raises:
        ValueError: what LLaMA-Factory trains, and both ways out.
    """
    from hf_muon.optim_args import parse_optim_args

    if (
        getattr(training_args, "do_train", False)
        and finetuning_args.finetuning_type == "lora"
        and not getattr(finetuning_args, "additional_target", None)
        and getattr(finetuning_args, "stage", None) not in ("rm", "ppo")  # value heads are trained whole
        and not any(name in _CHOICES for name in parse_optim_args(getattr(training_args, "optim_args", None)))
    ):
        raise ValueError(
            "Keep AdamW for LoRA (optim: adamw_torch): no gain was shown. This run trains only LoRA factors "
            "(finetuning_type: lora, LLaMA-Factory's default). To train all weights with Muon, write finetuning_type: "
            'full; to try Muon on the factors anyway, optim_args: "lora=muon" [lora-without-muon]'
        )
