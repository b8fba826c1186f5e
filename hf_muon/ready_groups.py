"""`MuonOfGroups`: an optimizer for callers that pass parameters or param groups, and no model."""

from __future__ import annotations

import functools
import inspect
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hf_muon.build import add_routed, as_config, follow_heads, log_routes, muon_options, require_muon
from hf_muon.config import OPTIONS, MuonConfig
from hf_muon.optimizer.muon import Muon
from hf_muon.routing.route import Route
from hf_muon.split_groups import split_groups, with_own_names

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class MuonOfGroups(Muon):
    """`Muon` for callers that pass parameters or param groups and no model.

    LitGPT, torchtune and LightningCLI make optimizers by the path of a class, and LLaMA-Factory, ms-swift, axolotl and
    Unsloth make their own groups. Each group is split into a Muon and an AdamW part. Which parameters are embeddings or
    heads is known from the model that holds them: `model`, or else the live module that holds most of them.

    A group's `lr` and `weight_decay` apply to both of its parts. `muon_lr` and `adamw_lr` replace the `lr` of groups;
    if `lr` is passed, too, a group's rate is multiplied by `muon_lr / lr` or `adamw_lr / lr`, so that groups keep
    their proportions. `weight_decay` applies to norms and biases, too, unless `adamw_weight_decay` is set. A group with
    `use_muon: False` goes to AdamW, parameters that no module holds among it.

    Arguments and groups may have the keys of torch.optim.AdamW, too: `betas` and `eps` are `adamw_betas` and
    `adamw_eps`; `foreach` and `fused` do nothing; `capturable`, `differentiable`, `maximize` and `amsgrad` may have
    torch's defaults. Other keys of groups, unless they look like an option, stay there and do nothing.

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
        RuntimeError: a matrix that belongs to no live module, in a group that does not say `use_muon: False`.
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
        config = as_config(config, with_own_names(options))
        items: list[Any] = [params] if isinstance(params, (Tensor, Mapping)) else list(params)
        groups = (
            [with_own_names(g) for g in items] if all(isinstance(g, Mapping) for g in items) else [{"params": items}]
        )
        self._config, self._model = config, model
        split, routes = split_groups(groups, config, model)
        require_muon(routes, "the given param groups")
        super().__init__(
            split, replicate_group=replicate_group, diagnostics_file=diagnostics_file, **muon_options(config)
        )
        self.add_group = functools.partial(add_routed, config=config, model=lambda: model)
        self._end(routes)

    def _end(self, routes: Sequence[Route]) -> None:
        """Attach rules that follow heads to all groups, and log the routes."""
        follow_heads(self, lambda: self._model)
        log_routes(routes)


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
