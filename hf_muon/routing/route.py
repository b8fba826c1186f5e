"""Route every parameter of a model to Muon or to AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_muon.config import MuonConfig
from hf_muon.routing.parameters import parameters_of
from hf_muon.routing.rules import Rules
from hf_muon.routing.scales import factors_by_name
from hf_muon.storage.tensors import shape_of


@dataclass(frozen=True)
class Route:
    """The optimizer of one parameter.

    Attributes:
        name: without the prefixes of wrappers (DDP, torch.compile, activation checkpointing).
        parameter: the parameter itself.
        use_muon: True for Muon, False for AdamW.
        decay: apply weight decay.
        reason: text that says why.
        view: how Muon reads the parameter as matrices, as by :mod:`hf_muon.storage.views`; empty to read it as stored.
        factor: of the learning rate.
    """

    name: str
    parameter: nn.Parameter
    use_muon: bool
    decay: bool
    reason: str
    view: str = ""
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.parameter)


def route_parameters(model: nn.Module, config: MuonConfig | None = None, **options: Any) -> list[Route]:
    """Return a route for every trainable parameter, in the model's order; tied parameters appear once.

    The first rule that applies decides: the user's patterns, `optim_target_modules`, the shape, excluded names, and
    then the structure of the model: its input and output embeddings, the types of its modules, routers beside experts,
    and heads outside the base model.

    Args:
        model: any module.
        config: the options; `muon_patterns`, `adamw_patterns`, `optim_target_modules`, `lora`, `split_fused`,
            `per_head` and `lr_scales` matter here.
        **options: override those of `config`.

    Raises:
        ValueError: a pattern matches nothing, or an option is not valid.
    """
    config = (config or MuonConfig()).replace(options)
    params = parameters_of(model)
    rules = Rules(model, config, params)
    factors = factors_by_name(config, params)
    return [
        Route(param.name, param.parameter, *rules.decide(param), factors.get(param.name, 1.0))
        for param in params
        if param.parameter.requires_grad
    ]
