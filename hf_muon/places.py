"""Where a model keeps its parameters: names without wrappers, and the modules on the way to each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from hf_muon.distributed.base import class_complaint, shape_of, uninitialized

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_WRAPPER_TYPES = (nn.DataParallel, nn.parallel.DistributedDataParallel)
CONV_TYPES = (nn.modules.conv._ConvNd,)


def folded(name: str) -> str:
    """A name in which the numbers of layers are stars, so that layers are told together."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


@dataclass(frozen=True)
class Place:
    """A parameter, the module that holds it, and the steps that lead to it.

    Attributes:
        name: without the prefixes of wrappers.
        parameter: the parameter itself.
        owner: the module that holds it.
        steps: the components of the name, each with the module in which it is looked up.
    """

    name: str
    parameter: nn.Parameter
    owner: nn.Module
    steps: tuple[tuple[str, nn.Module], ...]

    @property
    def own_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def module_name(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.parameter)

    @property
    def folded(self) -> tuple[int, ...]:
        """The shape, with the kernel of a convolution folded into its columns."""
        return (self.shape[0], math.prod(self.shape[1:])) if self.is_kernel else self.shape

    @property
    def is_kernel(self) -> bool:
        return isinstance(self.owner, CONV_TYPES) and self.own_name == "weight"

    @property
    def home(self) -> tuple[str, nn.Module | None]:
        """The name of the module that holds it, and the module around that, without what peft puts in between."""
        steps = list(self.steps[:-1])
        while steps:
            if steps[-1][0] in ("base_layer", "original_module"):
                steps.pop()
            elif len(steps) > 1 and steps[-2][0] == "modules_to_save":
                del steps[-2:]
            else:
                return steps[-1]
        return "", None

    def outward(self) -> Iterator[tuple[str, nn.Module | None]]:
        """From the inside out, the components of the name, each with the module that it is; None for the parameter."""
        modules = [module for _, module in self.steps[1:]]
        yield self.own_name, None
        for (part, _), module in zip(self.steps[-2::-1], reversed(modules), strict=True):
            yield part, module


def places_of(model: nn.Module) -> list[Place]:
    """Return all parameters, in the model's order; tied ones once, by their first name.

    Raises:
        RuntimeError: a parameter of a lazy module that has no shape yet.
    """
    modules = dict(model.named_modules())
    places = []
    for full_name, parameter in model.named_parameters():
        if uninitialized(parameter):
            raise RuntimeError(f"{full_name} {class_complaint(parameter)}")
        parts = full_name.split(".")
        chain = [modules[".".join(parts[:i])] for i in range(len(parts))]  # from the model to the parameter's owner
        kept = [step for step in zip(parts, chain, strict=True) if not _of_wrapper(*step)]
        places.append(Place(".".join(part for part, _ in kept), parameter, chain[-1], tuple(kept)))
    return places


def _of_wrapper(part: str, parent: nn.Module) -> bool:
    """Whether a component of a name was put there by a wrapper. `module` may be a model's own name, too."""
    return part in _WRAPPERS or (part == "module" and isinstance(parent, _WRAPPER_TYPES))
