"""What LLaMA-Factory v0 would silently use in place of `optim: muon`, which is refused."""

from __future__ import annotations

from typing import Any

# Trainings outside of the Trainer, each with an optimizer of its own. The environment chooses them, and the parser
# copies the choice into finetuning_args.
MEGATRON = {
    "use_mca": ("USE_MCA", "Megatron (mcore_adapter)"),
    "use_megatron_bridge": ("USE_MEGATRON_BRIDGE", "Megatron Bridge"),
}
RIVALS = ("use_muon", "use_galore", "use_apollo", "use_badam", "use_adam_mini")
# Options of Muon that may give it something to step beside or in place of LoRA factors.
_CHOICES = ("lora", "muon_patterns")


def refuse_rivals(finetuning_args: Any) -> None:
    """Raise if an option of LLaMA-Factory's would replace the optimizer that `optim: muon` asks for.

    Raises:
        ValueError: the option, and which of the two to keep.
        RuntimeError: a way of training in which Muon cannot step.
    """
    if getattr(finetuning_args, "use_muon", False):
        raise ValueError(
            "use_muon: true and optim: muon are two different optimizers, and use_muon would silently win. Keep "
            "optim: muon for hf_muon (embeddings and heads stay with AdamW), and remove use_muon; or keep "
            "use_muon: true for LLaMA-Factory's own Muon, and remove optim."
        )
    for rival in RIVALS[1:]:
        if getattr(finetuning_args, rival, False):
            raise ValueError(
                f"{rival}: true would replace the optimizer that optim: muon asks for. Keep optim: muon and remove "
                f"{rival}, or keep {rival} and remove optim."
            )
    _refuse_other_trainers(finetuning_args)


def refuse_factors(training_args: Any, finetuning_args: Any) -> None:
    """Raise if a run trains LoRA factors alone and does not say that Muon shall step them, before its model is loaded.

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
            "optim: muon has nothing to step in this run, which trains LoRA factors alone (finetuning_type: lora, "
            "LLaMA-Factory's default), and AdamW steps those unless you say otherwise. Write finetuning_type: full to "
            'train the matrices themselves, or optim_args: "lora=muon" to orthogonalize each factor, which in '
            "hf_muon's own study took more time than AdamW and showed no difference in the loss"
        )


def _refuse_other_trainers(finetuning_args: Any) -> None:
    for option, (variable, name) in MEGATRON.items():
        if getattr(finetuning_args, option, False):
            raise RuntimeError(
                f"optim: muon does not run with {variable}=1: LLaMA-Factory then trains with {name}, which ignores "
                f"optim and steps with an Adam of its own. Unset {variable}, and train with DDP, FSDP2 or DeepSpeed; "
                "or remove optim."
            )
    if getattr(finetuning_args, "use_hyper_parallel", False):
        raise RuntimeError(
            "optim: muon does not run with use_hyper_parallel: true: hyper_parallel keeps shards of matrices in a "
            "tensor class of its own, which does not say what they are part of. Remove use_hyper_parallel, and train "
            "with FSDP2 (fsdp_version: 2 in an accelerate config) or DeepSpeed; or remove optim."
        )
