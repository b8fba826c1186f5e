"""Other optimizers in Trainer, on the param groups that hf_muon would make: same routes, rates and decay."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hf_muon import Muon, build_optimizer

Groups = list[dict[str, Any]]


class Pair(torch.optim.Optimizer):
    """torch.optim.Muon and torch.optim.AdamW as one optimizer, whose param groups are theirs."""

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self.halves = (muon, adamw)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        # A scheduler writes rates into these groups, which accelerate replaces by copies.
        first = len(self.halves[0].param_groups)
        for half, groups in zip(self.halves, (self.param_groups[:first], self.param_groups[first:]), strict=True):
            half.param_groups = groups
            half.step()


def build_rival(name: str, model: nn.Module, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return another package's optimizer.

    Args:
        name: `adamw`; a Muon: `hf_muon`, `torch`, `torch_original`, `llamafactory` or `deepspeed`; or `sinkhorn`:
            hf_muon with examples/rules/sinkhorn.py on embeddings and heads.
        model: whose parameters it steps.
        settings: `learning_rate`, `weight_decay`, `adam_beta1`, `adam_beta2`, and the rate of the matrices that
            Muon steps where it is another: `muon_lr`, or `hidden_lr` if AdamW steps them here, then with
            `hidden_betas`; `betas_of` and `decay_of`, by what AdamW steps: `embedding`, `head` and `norms`. For
            `sinkhorn` `table_lr`, how many times this rate that of tables is.

    Raises:
        ValueError: there is no such rival.
    """
    if name == SINKHORN:
        return _with_sinkhorn_tables(model, settings)
    if name not in RIVALS:
        raise ValueError(f"rival {name} is not known. Valid: {', '.join([*RIVALS, SINKHORN])}")
    rate, decay = settings["learning_rate"], settings["weight_decay"]
    hidden_lr = settings.get("hidden_lr", settings.get("muon_lr", rate))
    ours = build_optimizer(model, lr=rate, weight_decay=decay)
    betas = (settings["adam_beta1"], settings["adam_beta2"])
    muon: Groups = []
    adamw: Groups = []
    parts = {id(param): _part(name) for name, param in model.named_parameters()}
    for group in ours.param_groups:
        if group["use_muon"]:
            of_hidden = {"betas": settings["hidden_betas"]} if "hidden_betas" in settings else {}
            muon.append({"params": group["params"], "weight_decay": decay, "lr": hidden_lr, **of_hidden})
            continue
        for part in PARTS:
            if params := [param for param in group["params"] if parts[id(param)] == part]:
                decay_of_part = settings.get("decay_of", {}).get(part, group["weight_decay"])
                betas_of_part = settings.get("betas_of", {}).get(part, betas)
                adamw.append({"params": params, "lr": rate, "weight_decay": decay_of_part, "betas": betas_of_part})
    return RIVALS[name](muon, adamw, betas)


def _part(name: str) -> str:
    return "head" if "lm_head" in name else "embedding" if "embed" in name else "norms"


def _with_sinkhorn_tables(model: nn.Module, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    rate, betas = settings["learning_rate"], (settings["adam_beta1"], settings["adam_beta2"])
    ours = build_optimizer(model, lr=rate, weight_decay=settings["weight_decay"], adamw_betas=betas)
    groups: Groups = []
    for group in ours.param_groups:
        own = {name: group[name] for name in ("use_muon", "lr", "weight_decay", "adamw_betas")}
        tables = [param for param in group["params"] if param.ndim == 2 and not group["use_muon"]]
        others = [param for param in group["params"] if all(param is not table for table in tables)]
        table = {"use_muon": True, "sinkhorn": True, "lr": rate * settings["table_lr"], "weight_decay": 0.0}
        groups += [{**own, "params": others}] if others else []
        groups += [{**table, "params": tables}] if tables else []
    return Muon(groups)


def _torch(scale: str) -> Callable[[Groups, Groups, tuple[float, float]], torch.optim.Optimizer]:
    def build(muon: Groups, adamw: Groups, betas: tuple[float, float]) -> torch.optim.Optimizer:
        return Pair(torch.optim.Muon(muon, adjust_lr_fn=scale), torch.optim.AdamW(adamw, betas=betas))

    return build


def _adamw(muon: Groups, adamw: Groups, betas: tuple[float, float]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*muon, *adamw], betas=betas)


def _ours(muon: Groups, adamw: Groups, betas: tuple[float, float]) -> torch.optim.Optimizer:
    groups: Groups = [{**group, "use_muon": True} for group in muon]
    groups += [{"adamw_betas": group.pop("betas"), **group, "use_muon": False} for group in adamw]
    return Muon(groups)


def _llamafactory(muon: Groups, adamw: Groups, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Return LLaMA-Factory's, which decays all parameters of AdamW, norms too."""
    cls = _llamafactory_module().Muon
    decay = muon[0]["weight_decay"]
    return cls(  # type: ignore[no-any-return]
        lr=muon[0]["lr"],
        wd=decay,
        muon_params=[param for group in muon for param in group["params"]],
        adamw_params=[param for group in adamw for param in group["params"]],
        adamw_betas=betas,
        adamw_eps=1e-8,
    )


def _llamafactory_module() -> ModuleType:
    """Import LLaMA-Factory's file without its package, which imports much more."""
    package = importlib.util.find_spec("llamafactory")
    if package is None or not package.submodule_search_locations:
        raise RuntimeError("LLaMA-Factory is not installed, and its Muon is a side of this study: make evidence")
    path = Path(next(iter(package.submodule_search_locations))) / "third_party" / "muon" / "muon.py"
    spec = importlib.util.spec_from_file_location("llamafactory_muon", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _deepspeed(muon: Groups, adamw: Groups, betas: tuple[float, float]) -> torch.optim.Optimizer:
    module = importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    groups = [{**group, "momentum": 0.95, "use_muon": True} for group in muon]
    groups += [{**group, "eps": 1e-8, "use_muon": False} for group in adamw]
    return module.SingleDeviceMuonWithAuxAdam(groups)  # type: ignore[no-any-return]


PARTS = ("embedding", "head", "norms")
SINKHORN = "sinkhorn"
RIVALS: dict[str, Callable[[Groups, Groups, tuple[float, float]], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "hf_muon": _ours,
    "torch": _torch("match_rms_adamw"),
    "torch_original": _torch("original"),
    "llamafactory": _llamafactory,
    "deepspeed": _deepspeed,
}
