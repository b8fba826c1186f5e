"""`MuonOfGroups`: an optimizer for callers that pass parameters or param groups, and no model."""

from __future__ import annotations

import dataclasses
import inspect
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hf_muon.build import as_config, groups_of, log_routes, muon_options, require_muon
from hf_muon.config import OPTIONS, MuonConfig, check_option
from hf_muon.diagnostics.log import first_few
from hf_muon.optimizer.muon import Muon
from hf_muon.optimizer.state import check_params
from hf_muon.routing.live_models import holder_of, routes_of
from hf_muon.routing.route import Route
from hf_muon.storage.tensors import quoted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Routing sets these for each part of a group; all other keys of a group are copied to both parts.
_ROUTED = ("params", "param_names", "use_muon", "lr", "weight_decay")

# Names of options in torch.optim.AdamW. The signature has only ours, because LitGPT sets `fused` if it finds it there.
_RENAMED = {"betas": "adamw_betas", "eps": "adamw_eps"}
_TORCHS = ("foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad")


class MuonOfGroups(Muon):
    """`Muon` for callers that pass parameters or param groups and no model.

    LitGPT, torchtune and LightningCLI make optimizers by the path of a class, and LLaMA-Factory, ms-swift, axolotl and
    Unsloth make their own groups. Each group is split into a Muon and an AdamW part. Which parameters are embeddings or
    heads is known from the model that holds them: `model`, or else the live module that holds most of them.

    A group's `lr` and `weight_decay` apply to both of its parts. `muon_lr` and `adamw_lr` replace the `lr` of groups;
    if `lr` is passed, too, a group's rate is multiplied by `muon_lr / lr` or `adamw_lr / lr`, so that groups keep
    their proportions. `weight_decay` applies to norms and biases, too, unless `adamw_weight_decay` is set. A group with
    `use_muon: False` goes to AdamW.

    Arguments and groups may have the keys of torch.optim.AdamW, too: `betas` and `eps` are `adamw_betas` and
    `adamw_eps`; `foreach`, `fused`, `capturable`, `differentiable`, `maximize` and `amsgrad` may have torch's defaults.

    Args:
        params: parameters, ``(name, parameter)`` pairs, or param groups; names are those of the model.
        config: a `MuonConfig`, or a mapping of its options.
        model: the module that holds the parameters; the default is to look among all live modules.
        replicate_group: as in :class:`Muon`.
        diagnostics_file: as in :class:`Muon`.
        **options: options that replace those of `config`; :class:`MuonConfig` lists them.

    Raises:
        ValueError: an option is not valid, no parameter of the model reaches Muon, a group asks for Muon and holds
            something other than hidden matrices, or `muon_lr` or `adamw_lr` would make the different rates of groups
            equal.
        RuntimeError: a parameter that belongs to no live module.
    """

    def __init__(
        self,
        params: Iterable[Any],
        config: MuonConfig | Mapping[str, Any] | None = None,
        *,
        model: nn.Module | None = None,
        replicate_group: ProcessGroup | None = None,
        diagnostics_file: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        config = as_config(config, _with_own_names(options))
        items: list[Any] = [params] if isinstance(params, (Tensor, Mapping)) else list(params)
        groups = (
            [_with_own_names(g) for g in items] if all(isinstance(g, Mapping) for g in items) else [{"params": items}]
        )
        self._config, self._model = config, model  # a copy lacks it, and takes groups as Muon does
        split, routes = _split(groups, config, model)
        require_muon(routes, "the given param groups")
        super().__init__(
            split, replicate_group=replicate_group, diagnostics_file=diagnostics_file, **muon_options(config)
        )
        self._end(routes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, split as the constructor does, or as it is if it says `use_muon`.

        Raises:
            ValueError: as the constructor, and as :class:`Muon`.
            RuntimeError: as the constructor, and as :class:`Muon`.
        """
        if "use_muon" in param_group or "_config" not in self.__dict__:
            super().add_param_group(param_group)
            return
        split, routes = _split([_with_own_names(param_group)], self._config, self._model)
        count = len(self.param_groups)
        try:
            for part in split:
                super().add_param_group(part)
        except Exception:
            del self.param_groups[count:]
            raise
        self._end(routes)

    def _end(self, routes: Sequence[Route]) -> None:
        """Attach rules that follow heads to all groups, and log the routes of new ones."""
        trained = {p for group in self.param_groups for p in group["params"]}
        model = self._model
        self.head_rules.attach(self.param_groups, lambda: holder_of(trained, model))
        log_routes(routes)


def _split(
    groups: Sequence[dict[str, Any]], config: MuonConfig, model: nn.Module | None
) -> tuple[list[dict[str, Any]], list[Route]]:
    """Return the parts of param groups that go to Muon and to AdamW, and the routes of all their parameters."""
    check_params(groups)
    members = [_tensors(group["params"]) for group in groups]
    routes = routes_of({p for group in members for p in group if p.requires_grad}, config, model)
    split: list[dict[str, Any]] = []
    reached: list[Route] = []
    rates: list[tuple[bool, Any]] = []
    for group, parameters in zip(groups, members, strict=True):
        group_routes = _as_asked(group, [routes[p] for p in parameters if p.requires_grad])
        lr = None if group.get("lr") is None else check_option("lr", group["lr"])
        group_parts = groups_of(group_routes, config, lr=lr, weight_decay=group.get("weight_decay"))
        other_keys = {key: value for key, value in group.items() if key not in _ROUTED}
        split += [{**part, **other_keys} for part in group_parts]
        reached += group_routes
        rates += [(part["use_muon"], lr) for part in group_parts]
    _require_one_rate(rates, config)
    return split, reached


def _signature() -> inspect.Signature:
    """Return a signature with all options as arguments, for programs that inspect it.

    `config` is left out: LightningCLI (jsonargparse) passes every default that it reads here, which would replace the
    values of `config`.
    """
    first = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("self", first), inspect.Parameter("params", first, annotation=Iterable[Any])]
    types = typing.get_type_hints(MuonConfig)
    for name, parameter in inspect.signature(MuonConfig).parameters.items():
        if name in OPTIONS:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=types[name]))
    return inspect.Signature(parameters)


MuonOfGroups.__init__.__signature__ = _signature()  # type: ignore[attr-defined]


def _as_asked(group: Mapping[str, Any], routes: Sequence[Route]) -> list[Route]:
    """Return the routes of a group's parameters, all to AdamW if the group says `use_muon: False`.

    Raises:
        ValueError: the group says `use_muon: True`, and a route goes to AdamW.
    """
    use_muon = group.get("use_muon")
    if use_muon is False:
        return [dataclasses.replace(route, use_muon=False, reason="use_muon: False in its group") for route in routes]
    complaints = [f"{route.name} ({route.reason})" for route in routes if not route.use_muon]
    if use_muon and complaints:
        raise ValueError(
            f"A param group says use_muon: True, and holds {first_few(complaints, 3)}. Leave use_muon out, name hidden "
            "matrices with muon_patterns, or pass the group to hf_muon.Muon, which takes every matrix as it is "
            "[not-for-muon]"
        )
    return list(routes)


def _tensors(params: Any) -> list[Tensor]:
    """Return the tensors of a group's `params`: one, several, or ``(name, tensor)`` pairs."""
    if isinstance(params, Tensor):
        return [params]
    return [p[1] if isinstance(p, tuple) else p for p in params]


def _with_own_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Rename options that arguments or a param group have under the names of torch.optim.AdamW.

    Raises:
        ValueError: an option is set under both names, or an option that only torch has is not at its default.
    """
    renamed = dict(options)
    for theirs, ours in _RENAMED.items():
        if theirs in renamed:
            if ours in renamed:
                raise ValueError(f"{theirs} and {ours} are the same option of Muon: set one of the two [given-twice]")
            renamed[ours] = renamed.pop(theirs)
    for name in _TORCHS:
        if renamed.pop(name, None):
            raise ValueError(
                f"{name}={quoted(options[name])} is of torch.optim.AdamW, and Muon has its default alone: "
                "leave it out [only-default]"
            )
    return renamed


def _require_one_rate(rates: Sequence[tuple[bool, Any]], config: MuonConfig) -> None:
    """Raise if `muon_lr` or `adamw_lr` would replace the different rates of groups by one.

    Args:
        rates: for each part of a group whether Muon steps it, and the `lr` of the group; None if the group sets none.
        config: the options. If it has `lr`, groups keep their proportions to it.

    Raises:
        ValueError: groups have different rates, and `lr` is not set.
    """
    for for_muon, name in ((True, "muon_lr"), (False, "adamw_lr")):
        group_rates = [lr for use_muon, lr in rates if use_muon is for_muon]
        texts = dict.fromkeys("none" if lr is None else f"{float(lr):g}" for lr in group_rates)
        if (rate := getattr(config, name)) is not None and not config.lr and len(texts) > 1:
            raise ValueError(
                f"{name}={rate:g} is one rate, and param groups have several: {first_few(texts, 4)}. Pass lr, too: the "
                f"rate of a group is then its own times {name} / lr. Or leave {name} out, and set lr in each group "
                "[one-rate-for-several]"
            )
