"""Register `hf_muon` in timm's registry of optimizers, for `--opt hf_muon` of its training script."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_muon._autoload import Change, everywhere
from hf_muon.integrations.names import OWN_NAME, not_in_place

if TYPE_CHECKING:
    from hf_muon.optimizer.muon import Muon

# timm drops everything before the last underscore of a name, so hf_muon would be its own muon.
_REGISTERED = OWN_NAME.replace("_", "")


def muon_of_groups(params: Iterable[Any], **options: Any) -> Muon:
    """Return a `Muon` for the param groups that timm makes of a model.

    Args:
        params: param groups or parameters. A group that timm marks for the second optimizer of a hybrid one
            (`use_fallback`, from `fallback_list`) goes to AdamW. Other keys are kept, among them the `lr_scale` of
            layer-wise decay, which timm's schedulers read.
        **options: options of :class:`hf_muon.MuonOfGroups`.

    Raises:
        ValueError: `MuonOfGroups` refuses the groups or options.
    """
    from hf_muon.ready_groups import MuonOfGroups

    groups = [dict(group) if isinstance(group, Mapping) else group for group in params]
    for group in groups:
        if isinstance(group, dict) and group.pop("use_fallback", False):
            group["use_muon"] = False
    return MuonOfGroups(groups, **options)


@functools.cache
def _register(factory: ModuleType) -> None:
    """Add `muon_of_groups` to timm's registry, which imports it on demand."""
    info = factory.OptimInfo(
        name=_REGISTERED,
        opt_class=f"{__name__}.{muon_of_groups.__name__}",
        description="hf_muon: Muon for hidden matrices and AdamW for all other parameters",
        has_momentum=True,
        has_betas=True,
    )
    factory.default_registry.register(info)


def patch_names(module: ModuleType) -> Iterator[Change]:
    """Make timm.optim look `hf_muon` up in its registry, instead of using its own `muon`."""
    create = module.create_optimizer_v2
    signature = inspect.signature(create)

    @functools.wraps(create)
    def create_optimizer_v2(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(value, str) and OWN_NAME in value.lower() for value in (*args, kwargs.get("opt"))):
            return create(*args, **kwargs)
        try:
            _register(sys.modules[create.__module__])
        except (AttributeError, TypeError) as error:
            raise not_in_place("timm", f"{type(error).__name__}: {error}") from error
        call = signature.bind(*args, **kwargs)
        call.arguments["opt"] = call.arguments["opt"].lower().replace(OWN_NAME, _REGISTERED)
        return create(*call.args, **call.kwargs)

    yield from everywhere(module, "create_optimizer_v2", create_optimizer_v2)
