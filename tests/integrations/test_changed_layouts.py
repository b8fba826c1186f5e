"""Trainer's checkpoints of another kind are refused before any rank reads them; `tests/e2e` does so on two ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer

from hf_muon.integrations.transformers.changed_layouts import kind_complaint
from tests.integrations.plain_script import model
from tests.integrations.trainer_runs import train

FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


def write(folder, kind):
    """Write the names that Trainer's checkpoints of a kind have; FULL_STATE_DICT has the weights twice."""
    names = {
        "": ("model.safetensors", "optimizer.pt"),
        FULL: ("model.safetensors", "pytorch_model_fsdp.bin", "optimizer.bin"),
        SHARDED: ("pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"),
        "adapter": ("adapter_model.safetensors",),
    }[kind]
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    return folder


def trainer_of(kind, optim="muon"):
    plugin = SimpleNamespace(state_dict_type=SimpleNamespace(name=kind)) if kind else None
    return SimpleNamespace(
        args=SimpleNamespace(optim=optim),
        is_fsdp_enabled=bool(kind),
        accelerator=SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)),
    )


@pytest.mark.parametrize("own", ["", FULL, SHARDED])
@pytest.mark.parametrize("saved", ["", FULL, SHARDED])
def test_only_the_runs_own_kind_is_loaded(tmp_path, saved, own):
    complaint = kind_complaint(trainer_of(own), write(tmp_path, saved))
    if saved == own:
        assert complaint is None
        return
    advice = {
        ("", own): "Resume without FSDP, or start a new run from the checkpoint's weights",
        (FULL, ""): "remove its pytorch_model_fsdp.bin and rename its optimizer.bin to optimizer.pt",
        (SHARDED, ""): "Resume with FSDP",
        (FULL, SHARDED): "Set FSDP's state_dict_type to FULL_STATE_DICT",
        (SHARDED, FULL): "Set FSDP's state_dict_type to SHARDED_STATE_DICT",
    }
    assert f"of FSDP, and a run {f'with FSDP and {own}' if own else 'without FSDP'} cannot resume" in complaint
    assert advice[saved, own] in complaint
    with pytest.raises(ValueError, match="cannot resume from it"):
        Trainer._load_from_checkpoint(trainer_of(own), str(tmp_path))


@pytest.mark.parametrize("own", ["", FULL, SHARDED])
def test_trainer_decides_where_there_are_no_whole_weights(tmp_path, own):
    assert kind_complaint(trainer_of(own), tmp_path) is None
    assert kind_complaint(trainer_of(own), write(tmp_path, "adapter")) is None


def test_a_run_says_it_before_training_and_other_optimizers_hear_transformers(tmp_path):
    save = {"save_strategy": "steps", "save_steps": 3}
    for optim, message in (("muon", "has a FULL_STATE_DICT of FSDP"), ("adamw_torch", "only supported when using")):
        folder = tmp_path / optim
        options = {**save, "optim": optim} | ({} if optim == "muon" else {"optim_args": None})
        straight, resumed = model(), model()
        train(straight, folder, **options)
        checkpoint = folder / "checkpoint-3"
        (checkpoint / "pytorch_model_fsdp.bin").touch()
        (checkpoint / "optimizer.pt").rename(checkpoint / "optimizer.bin")
        with pytest.raises(ValueError, match=message):
            train(resumed, folder, resume=str(checkpoint), **options)
        # What the message advises.
        (checkpoint / "pytorch_model_fsdp.bin").unlink()
        (checkpoint / "optimizer.bin").rename(checkpoint / "optimizer.pt")
        train(resumed, folder, resume=str(checkpoint), **options)
        assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))
