"""List the parameters of a model, with names without wrappers and the modules on the path to each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from hf_muon.storage.tensors import class_complaint, shape_of, uninitialized

# Components of names that torch.compile, FSDP and activation checkpointing add.
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_WRAPPER_TYPES = (nn.DataParallel, nn.parallel.DistributedDataParallel)
CONV_TYPES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
EMBEDDING_TYPES = (nn.Embedding, nn.EmbeddingBag)
# Our name for a tensor that makes up a weight together with others.
PART = "part of a weight"
# Packages of adapters, and the names under which their modules hold what they adapt, or train it as it is.
_ADAPTERS = ("peft.", "lycoris.")
_ADAPTED = ("base_model", "model", "lora_model", "base_layer", "original_module", "modules_to_save", "token_adapter")


def folded(name: str) -> str:
    """Return a name with stars in place of layer numbers, equal for all layers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def unwrapped(name: str) -> str:
    """Return a name without the components of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def names_of(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter, of which tied ones have several."""
    names: dict[Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return list(names.values())


def examples(names: Iterable[str]) -> str:
    """Return up to four of these names for an error, showing one layer only."""
    distinct = list(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in names))
    return ", ".join(distinct[:: max(1, len(distinct) // 4)][:4]) or "nothing"


@dataclass(frozen=True)
class ModelParameter:
    """A parameter, the module that holds it, and the path to it.

    A tensor that a module computes its weight from (parametrizations, spectral norm, pruning) is treated as that weight
    if it has its shape. If not, as the magnitude of a weight norm, it is called `PART`.

    Attributes:
        name: without the prefixes of wrappers.
        parameter: the parameter itself.
        owner: the module that holds the parameter, or whose weight it forms.
        steps: the components of the name, each with the module that has this attribute.
    """

    name: str
    parameter: nn.Parameter
    owner: nn.Module
    steps: tuple[tuple[str, nn.Module], ...]

    @property
    def own_name(self) -> str:
        return self.steps[-1][0]

    @property
    def module_name(self) -> str:
        return ".".join(part for part, _ in self.steps[:-1])

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
    def is_adapter(self) -> bool:
        """Whether an adapter added this parameter to the model; its innermost module tells."""
        of_adapter = (part for part, module in reversed(self.steps) if _adapts(type(module)))  # type: ignore[arg-type]
        return next(of_adapter, _ADAPTED[0]) not in _ADAPTED

    @cached_property
    def in_layer(self) -> bool:
        """Whether a layer holds this parameter."""
        return any(is_layer(*step) for step in self.outward())

    @property
    def ends_sequence(self) -> bool:
        """Whether the owner is the last module with parameters of an `nn.Sequential`, which no other layer holds."""
        steps = list(self.steps[:-1])
        while steps and isinstance(sequence := steps[-1][1], nn.Sequential):
            names = [name for name, child in sequence.named_children() if any(True for _ in child.parameters())]
            if steps.pop()[0] != names[-1]:
                return False
        # The last step that is left holds the outermost sequence.
        around = zip((part for part, _ in steps[:-1]), (module for _, module in steps[1:]), strict=True)
        return len(steps) < len(self.steps) - 1 and not any(is_layer(*step) for step in around)

    @property
    def holder(self) -> tuple[str, nn.Module | None]:
        """The name of the owner and the module around it, skipping modules that peft inserts."""
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
        """Yield the components of the name from the last to the first, each with its module; None for the parameter."""
        yield self.own_name, None
        for (part, _), (_, module) in zip(self.steps[-2::-1], self.steps[:0:-1], strict=True):
            yield part, module


def parameters_of(model: nn.Module) -> list[ModelParameter]:
    """Return all parameters, in the model's order; tied ones once, by their first name.

    Raises:
        RuntimeError: a parameter of a lazy module that has no shape yet.
    """
    modules = dict(model.named_modules())
    params = []
    for full_name, parameter in model.named_parameters():
        if uninitialized(parameter):
            raise RuntimeError(f"{full_name} {class_complaint(parameter)}")
        components = full_name.split(".")
        # From the model to the parameter's owner.
        chain = [modules[".".join(components[:i])] for i in range(len(components))]
        kept = [step for step in zip(components, chain, strict=True) if not _of_wrapper(*step)]
        name = ".".join(part for part, _ in kept)
        steps = _as_weight(kept, shape_of(parameter))
        params.append(ModelParameter(name, parameter, steps[-1][1], tuple(steps)))
    return params


def matching(option: str, pattern: str | re.Pattern[str], params: Sequence[ModelParameter]) -> list[ModelParameter]:
    """Return the parameters whose names match a pattern of an option.

    Raises:
        ValueError: no parameter matches, or no matching one is trainable.
    """
    matches = [param for param in params if re.search(pattern, param.name)]
    text = pattern if isinstance(pattern, str) else pattern.pattern
    if not matches:
        names = examples(param.name for param in params)
        raise ValueError(f"{option}: {text!r} matches no parameter. Names look like {names} [matches-nothing]")
    if not any(param.parameter.requires_grad for param in matches):
        names = examples(param.name for param in matches)
        raise ValueError(f"{option}: {text!r} matches no trained parameter, only {names} [matches-nothing]")
    return matches


def _as_weight(steps: list[tuple[str, nn.Module]], shape: tuple[int, ...]) -> list[tuple[str, nn.Module]]:
    """Redirect the path of a tensor that a module computes its weight from to this weight, or to `PART`."""
    for depth, (_, module) in enumerate(steps):
        if depth > 1 and isinstance(module, ParametrizationList):
            (_, owner), (weight, _) = steps[depth - 2 : depth]
            shapes = [shape_of(parameter) for parameter in module.parameters(recurse=False)]
            is_weight = len(shapes) == 1 or [each for each in shapes if sum(n > 1 for n in each) > 1] == [shape]
            if isinstance(owner, nn.Linear) and weight == "weight":
                is_weight = is_weight and shape == (owner.out_features, owner.in_features)
            own_name = weight if is_weight and depth == len(steps) - 1 else PART
            return [*steps[: depth - 2], (own_name, owner)]
    # Hooks of the older weight norm, spectral norm and pruning store `weight_v` or `weight_orig`, and compute `weight`.
    name, owner = steps[-1]
    weight, _, suffix = name.rpartition("_")
    if suffix in ("v", "g", "orig") and isinstance(computed := vars(owner).get(weight), Tensor):
        return [*steps[:-1], (weight if computed.shape == shape else PART, owner)]
    return steps


@cache
def _adapts(kind: type) -> bool:
    """Return whether a class of modules is one of a package of adapters, or derives from one."""
    return any(base.__module__.startswith(_ADAPTERS) for base in kind.__mro__)


def is_layer(part: str, module: nn.Module | None) -> bool:
    """Return whether a module with this last component of its name is a layer: numbered, with several matrices."""
    return part.isdigit() and module is not None and matrices_of(module) > 1


def matrices_of(module: nn.Module) -> int:
    """Return the number of parameters with at least two dims in a module and its children."""
    return sum(len(shape_of(parameter)) > 1 for parameter in module.parameters())


def _of_wrapper(part: str, parent: nn.Module) -> bool:
    """Return whether a wrapper added a component to a name. A model may itself have an attribute `module`."""
    return part in WRAPPERS or (part == "module" and isinstance(parent, _WRAPPER_TYPES))
