"""Before a step, by itself: each rank checks what it stores and gets its step ready, and changes nothing.

Nothing in this file communicates, so a rank may fail here while others do not. What is wrong becomes a complaint, of
which :mod:`hf_muon.optimizer.agreement` tells all ranks.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_muon.diagnostics import log
from hf_muon.math import compiler
from hf_muon.math.precision import compute_dtype
from hf_muon.optimizer.gradients import Gradients
from hf_muon.optimizer.groups import OWN_KEYS, hyperparameter_complaint, rounding_complaint
from hf_muon.optimizer.layout import GroupWork, StepLayout
from hf_muon.optimizer.state import CheckedState, completed, state_complaints
from hf_muon.optimizer.step import Run, runs_of
from hf_muon.storage.tensors import has_data, local_of

if TYPE_CHECKING:
    from hf_muon.optimizer.muon import Muon

Group = Mapping[str, Any]
State = MutableMapping[Tensor, dict[str, Any]]


@dataclass
class Prepared:
    """A step of this rank, ready to be taken when all ranks have agreed on it.

    Attributes:
        complaints: why this rank cannot take it. If there are some, the rest is incomplete, and decides nothing.
        groups: the param groups as they were read, with learning rates as numbers.
        state: the state of all parameters in the groups, complete. It is the optimizer's own only after the agreement.
        is_new: whether `state` is not yet the optimizer's own.
        runs: for each group, what takes its step; None where no parameter has a gradient on this rank.
        stored: for each parameter, how its gradient is stored; see `Gradients`.
        flags: facts about the gradients, perhaps still being computed by their device; see `Gradients.flags`.
        options: the options of the param groups, as lines that must be equal on all ranks.
    """

    complaints: list[str]
    groups: list[Group] = field(default_factory=list)
    state: State = field(default_factory=dict)
    is_new: bool = False
    runs: list[Run | None] = field(default_factory=list)
    stored: Sequence[str] = ()
    flags: Sequence[Tensor] = ()
    options: Sequence[str] = ()

    @property
    def is_idle(self) -> bool:
        """Whether this may be a step that only creates state, and all gradients, of all replicas alike, are zero."""
        return len(self.flags) == 2 and has_data(self.flags[1]) and not self.flags[1]

    def prepare_runs(self, layout: StepLayout, has_gradient: Sequence[object]) -> None:
        """Get the steps of the groups ready; see `by_group`."""
        indices = by_group(self.groups, has_gradient)
        self.runs = runs_of(self.groups, layout.works, indices, self.state)


class Preparation:
    """Prepares the steps of an optimizer. It checks again only what has changed since the last step."""

    def __init__(self) -> None:
        self.checked_state = CheckedState()
        # By position of a param group: the layout and the texts of options that were found to be valid.
        self._valid: dict[int, tuple[StepLayout, dict[str, str]]] = {}

    def prepare(self, optimizer: Muon, layout: StepLayout) -> Prepared:
        """Check a step and get it ready.

        Args:
            optimizer: takes the step.
            layout: the layout of its parameters.
        """
        prepared = Prepared(list(layout.complaints))
        with layout.guarded(prepared.complaints):
            optimizer.partitioned.clear_stale_gradients(optimizer.param_groups)
            prepared.groups = list(map(as_read, optimizer.param_groups))
            self._check_and_complete(prepared, optimizer, layout)
        return prepared

    def _check_and_complete(self, prepared: Prepared, optimizer: Muon, layout: StepLayout) -> None:
        groups, state, complaints = prepared.groups, optimizer.state, prepared.complaints
        is_complete = not complaints and self.checked_state.is_unchanged(groups, state, layout)
        # Not all of them, where the layout's complaints came early.
        checked = groups[: len(layout.works)]
        gradients = Gradients(checked, layout.trained)
        texts = list(map(_option_texts, groups))
        if not is_complete:
            complaints += state_complaints(checked, state)
            complaints += self.checked_state.complaints(checked, state)
        complaints += [*self._option_complaints(checked, layout, texts), *gradients.complaints]
        complaints += optimizer.head_rules.complaints(groups, layout, optimizer.replicate_group)
        if complaints:
            return
        # The device computes the flags while the host prepares the rest.
        prepared.flags = gradients.flags(may_be_idle=may_be_idle(groups, state))
        prepared.stored = gradients.stored
        prepared.is_new = not is_complete
        prepared.state = {} if prepared.is_new else state
        for group in groups if prepared.is_new else ():
            prepared.state.update(zip(group["params"], completed(group, state), strict=True))
        try_compiling(groups, layout, prepared.state)
        prepared.prepare_runs(layout, prepared.stored)
        prepared.options = list(_option_lines(groups, layout, texts))

    def _option_complaints(
        self, groups: Sequence[Group], layout: StepLayout, texts: Sequence[dict[str, str]]
    ) -> Iterator[str]:
        """Yield why options of param groups are not valid; schedulers and users write into groups between steps."""
        for k, (group, work) in enumerate(zip(groups, layout.works, strict=True)):
            if self._valid.get(k) == (layout, texts[k]):
                continue
            if complaint := hyperparameter_complaint(group, work.devices) or rounding_complaint(group):
                yield complaint
            elif not any("<" in text for text in texts[k].values()):
                self._valid[k] = layout, texts[k]


def as_read(group: Group) -> Group:
    """Return a param group with numbers in place of tensors, as a learning rate and its `initial_lr` may be.

    A step reads the rate in several places, and each read of a tensor on a device is a wait for it. `step` may be read
    from the copy: it is counted after the step.
    """
    tensors = {name: value for name, value in group.items() if isinstance(value, Tensor)}
    read = {name: value.item() for name, value in tensors.items() if value.numel() == 1 and has_data(value)}
    return {**group, **read} if read else group


def may_be_idle(groups: Sequence[Group], state: Mapping[Tensor, Any]) -> bool:
    """Return whether this may be a step that only creates state.

    torch.distributed.checkpoint takes one with learning rates and gradients of zero, to have moments to load into. It
    must not count as a step.
    """
    return not state and all(float(group["lr"]) == 0 for group in groups)


def by_group(groups: Sequence[Group], has_gradient: Sequence[object]) -> list[list[int]]:
    """Return for each group the indices of the parameters, not empty, that have a gradient.

    Args:
        groups: param groups.
        has_gradient: for every parameter in order, something that is true if it has a gradient.
    """
    rest = iter(has_gradient)
    # Parameters first: the other way round, `zip` would take one element of `rest` too many from each group.
    return [
        [i for i, (param, has) in enumerate(zip(group["params"], rest, strict=False)) if has and param.numel()]
        for group in groups
    ]


# --- options as texts, which are compared between ranks, and between steps


def _option_lines(groups: Sequence[Group], layout: StepLayout, texts: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield a line for each option of param groups that must be equal on all ranks."""
    for k, (group, work) in enumerate(zip(groups, layout.works, strict=True)):
        yield from [f"{name}={text} in param group {k}" for name, text in texts[k].items()]
        # Ranks may count other steps of parameters that they do not share: those are stepped when they have gradients.
        if any(place is not None for place in work.shared):
            yield f"step={group['step']} in param group {k}"
        if group["use_muon"]:
            yield from _precision_lines(group, work)


def _precision_lines(group: Group, work: GroupWork) -> Iterator[str]:
    for type_ in sorted({device.type for device in work.devices}):
        yield f"Newton-Schulz in {compute_dtype(group['ns_dtype'], type_)} on {type_}"


# Entries of a group that the lines of its layout describe, parameter by parameter; and the number of steps.
_DESCRIBED = frozenset(OWN_KEYS) - {"use_muon"}


def _option_texts(group: Group) -> dict[str, str]:
    return {str(name): _comparable(group[name]) for name in sorted(group, key=str) if name not in _DESCRIBED}


def _comparable(value: Any) -> str:
    """Return a text that is equal on two ranks, or in two steps, if an entry of a param group is.

    Entries with equal texts are equal, unless the text has a `<`.
    """
    if isinstance(value, Mapping):
        return _comparable(sorted(value.items(), key=str))
    # The lists of other packages, too, such as OmegaConf's.
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_comparable, value))}]"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    # Scalars of numpy.
    if isinstance(value, numbers.Real):
        return repr(float(value))
    # Not its repr, which may have an address.
    return f"<{type(value).__name__}>"


# --- compiled functions


def try_compiling(groups: Sequence[Group], layout: StepLayout, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Try whether functions can be compiled on the devices of a step, once for each.

    Args:
        groups: param groups.
        layout: the layout of these groups.
        state: the state of their parameters; complete.
    """
    untried = compiler.untried(dict.fromkeys([*layout.devices, *(d for work in layout.works for d in work.devices)]))
    if not untried:
        return
    params = [param for group in groups for param in group["params"]]
    grads = [param.grad for param in params if param.grad is not None]
    moments = [local_of(value) for param in params for value in state.get(param, {}).values() if torch.is_tensor(value)]
    dtypes = [torch.float32, *(tensor.dtype for tensor in (*params, *grads, *moments))]
    precisions = [group["ns_dtype"] for group in groups if group["use_muon"]]
    for device in untried:
        of_products = (compute_dtype(precision, device.type, device.index) for precision in precisions)
        compiler.try_on(device, dict.fromkeys([*dtypes, *of_products]))
        if compiler.why_off():
            return
    if log.is_rank_zero():
        log.logger().info("compiling elementwise functions: the first step takes longer")
