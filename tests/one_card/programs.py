"""Small trainings on one card, by Trainer and by LLaMA-Factory: resumed, and with metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_shared import same


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that are not equal, bit by bit."""
    return [name for name in one.keys() | other.keys() if name not in other or not same(one[name], other[name])]


# --- Trainer


def tried(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return what differs in a resumed run and in one with metrics, and the losses."""
    saves = {"save_strategy": "steps", "save_steps": 4}
    straight = _trained(folder / "straight", {**settings, **saves})
    resumed = _trained(folder / "resumed", settings, seed=3, resume=folder / "straight" / "checkpoint-4")
    os.environ["HF_MUON_DIAGNOSTICS_EVERY"] = "2"
    try:
        watched = _trained(folder / "watched", settings)
    finally:
        del os.environ["HF_MUON_DIAGNOSTICS_EVERY"]
    cells = []
    for other in (resumed, watched):
        names = differing(straight["tensors"], other["tensors"])
        names += ["losses"] if straight["losses"] != other["losses"] else []
        cells.append("=" if not names else f"**{len(names)} differ**: {', '.join(names[:3])}")
    losses = [*straight["losses"].values()]
    return [*cells, f"{losses[0]:.4f} to {losses[-1]:.4f}"]


def _trained(
    folder: Path,
    settings: Mapping[str, Any],
    *,
    seed: int = 11,
    resume: Path | None = None,
) -> dict[str, Any]:
    """Train a model, and return its weights, moments and losses."""
    from tests.e2e import cpu_fsdp
    from tests.e2e import layouts_worker as worker

    settings = dict(settings)
    weights, attention = settings.pop("weights", ""), settings.pop("attention", "sdpa")
    on_cuda = torch.cuda.is_available()
    arguments = {"use_cpu": not on_cuda, "optim_args": None, **settings}
    model = worker.network(even=True, bf16=weights, seed=seed)
    model.set_attn_implementation(attention)
    args = worker.arguments_of({"layout": "plain", "arguments": arguments}, folder)
    own = worker.InOrder(model, args, train_dataset=worker.rows())
    own.train(resume_from_checkpoint=str(resume) if resume else None)
    found = worker.describe(own)
    cpu_fsdp.forget_accelerator()
    return {"tensors": {**found["weights"], **found["state"]}, "losses": found["losses"]}


# --- LLaMA-Factory

ENTRY = """
import sys
import hf_muon_autoload
hf_muon_autoload.activate()
import torch
torch.use_deterministic_algorithms(True, warn_only=True)
from llamafactory.cli import main
from tests.e2e.cpu_fsdp import forget_accelerator
for name in list(sys.argv[1:]):
    sys.argv = ["llamafactory-cli", "train", name]
    main()
    forget_accelerator()
"""


def prepare(folder: Path) -> dict[str, Tensor]:
    """Write a model, its tokenizer and a data set, and return the model's weights."""
    from safetensors.torch import load_file

    from tests.e2e import layouts_worker as worker
    from tests.support import fixtures_text

    worker.network(even=True).save_pretrained(folder / "model")
    fixtures_text.build_tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    rows = [{"instruction": f"say {i}", "input": "", "output": str(i) * 3} for i in range(64)]
    (folder / "data" / "d.json").write_text(json.dumps(rows))
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"d": {"file_name": "d.json"}}))
    return load_file(folder / "model" / "model.safetensors")


def settings_of(folder: Path, tuning: str, resumed: bool, on_cuda: bool) -> str:
    """Write the settings of a run, and return the name of their file."""
    name = f"{tuning}_resumed" if resumed else tuning
    settings: dict[str, Any] = {"stage": "sft", "do_train": True, "finetuning_type": tuning, "output_dir": name}
    settings |= {"model_name_or_path": "model", "dataset": "d", "dataset_dir": "data", "template": "default"}
    settings |= {"optim": "muon", "learning_rate": 1e-3, "max_steps": 6, "save_steps": 3, "logging_steps": 1}
    settings |= {"cutoff_len": 64, "per_device_train_batch_size": 4, "report_to": "none", "overwrite_output_dir": True}
    settings |= {"bf16": True} if on_cuda else {"use_cpu": True}
    settings |= {"freeze_trainable_layers": 1} if tuning == "freeze" else {}
    settings |= {"resume_from_checkpoint": f"{tuning}/checkpoint-3"} if resumed else {}
    (folder / f"{name}.yaml").write_text(json.dumps(settings))  # which is YAML, too
    return f"{name}.yaml"


def ran(folder: Path, tuning: str, start: Mapping[str, Tensor]) -> list[str]:
    """Return what differs after a resume, what the checkpoint's optimizer holds, and the losses."""
    from safetensors.torch import load_file

    straight, resumed = (load_file(folder / name / "model.safetensors") for name in (tuning, f"{tuning}_resumed"))
    names = differing(straight, resumed)
    moved = sum(not torch.equal(straight[name], start[name].to(straight[name].dtype)) for name in start)
    state = torch.load(folder / tuning / "checkpoint-6" / "optimizer.pt", weights_only=True)
    by_muon = sum(len(group["params"]) for group in state["param_groups"] if group.get("use_muon"))
    momentum = sum("momentum_buffer" in own for own in state["state"].values())
    words = (
        f"{momentum} momenta" if by_muon and momentum == by_muon else f"no Muon: {by_muon} of its, {momentum} momenta"
    )
    lines = (folder / tuning / "trainer_log.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]
    return [
        "=" if not names else f"**{len(names)} differ**: {', '.join(names[:3])}",
        f"{words}, {moved} of {len(start)} weights moved",
        f"{losses[0]} to {losses[-1]}",
    ]
