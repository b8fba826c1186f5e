"""timm's registry of optimizers gets the name `hf_muon`: for `--opt hf_muon` of its training script."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_muon._autoload import Change
from hf_muon.integrations.names import OWN_NAME, refuse_unless

if TYPE_CHECKING:
    from hf_muon.optimizer.muon import Muon

# timm reads what stands after the last underscore of a name and knows a muon of its own, so hf_muon would be that one.
_REGISTERED = OWN_NAME.replace("_", "")


def muon_of_groups(params: Iterable[Any], **options: Any) -> Muon:
    """Return a `Muon` for the param groups that timm makes of a model.

    Args:
        params: param groups or parameters. A group that timm marks for the second optimizer of a hybrid one
            (`use_fallback`, from `fallback_list`) goes to AdamW. Other keys are kept, among them the `lr_scale` of
            layer-wise decay, which timm's schedulers read.
        **options: of :class:`hf_muon.MuonOfGroups`.

    Raises:
        ValueError: whatever `MuonOfGroups` refuses.
    """
    from hf_muon.ready_groups import MuonOfGroups

    groups = [_with_flag(group) if isinstance(group, Mapping) else group for group in params]
    return MuonOfGroups(groups, **options)


def _with_flag(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param group with timm's flag for AdamW written as ours."""
    rest = {key: value for key, value in group.items() if key != "use_fallback"}
    return {**rest, "use_muon": False} if group.get("use_fallback") else rest


def _entry() -> dict[str, Any]:
    """Return what timm's list of optimizers says of this one."""
    return {
        "name": _REGISTERED,
        "opt_class": f"{__name__}.{muon_of_groups.__name__}",  # imported by timm when it is asked for
        "description": "hf_muon: Muon for hidden matrices and AdamW for all other parameters",
        "has_momentum": True,
        "has_betas": True,
    }


def patch_registry(module: ModuleType) -> Iterator[Change]:
    """Register `hf_muon` in timm.optim._optim_factory, and have it found by its whole name."""
    kind, registry, info = module.OptimizerRegistry, module.default_registry, module.OptimInfo(**_entry())
    create, register, register_alias = kind.create_optimizer, registry.register, registry.register_alias
    register(info)
    register_alias(OWN_NAME, _REGISTERED)

    @functools.wraps(create)
    def create_optimizer(self: Any, model_or_params: Any, opt: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(opt, str) and OWN_NAME in opt.lower():
            opt = opt.lower().replace(OWN_NAME, _REGISTERED)
        return create(self, model_or_params, opt, *args, **kwargs)

    yield kind, "create_optimizer", create_optimizer


def patch_names(module: ModuleType) -> Iterator[Change]:
    """Refuse `hf_muon` in timm.optim where the registry does not have it: a Muon of timm's own would run."""
    create = module.create_optimizer_v2

    @functools.wraps(create)
    def create_optimizer_v2(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, str) and OWN_NAME in value.lower() for value in (*args, kwargs.get("opt"))):
            refuse_unless("timm")
        return create(*args, **kwargs)

    yield module, "create_optimizer_v2", create_optimizer_v2
