"""The plan of a step, by itself: each rank checks what it stores, plans the step, and finds what its gradients allow.

Nothing in this file communicates or changes an optimizer, so a rank may fail here while others do not. What is wrong
becomes a complaint, of which :mod:`hf_muon.optimizer.agreement` tells all ranks.
"""

from __future__ import annotations

import itertools
import numbers
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_muon.diagnostics import log
from hf_muon.math import compiler
from hf_muon.math.precision import compute_dtype
from hf_muon.optimizer.gradients import Gradients
from hf_muon.optimizer.groups import OWN_KEYS, hyperparameter_complaint, number_of, rounding_complaint
from hf_muon.optimizer.layout import GroupWork, StepLayout, params_of, storage_of
from hf_muon.optimizer.partitioned import PartitionedStep
from hf_muon.optimizer.state import completed, describe, entries_of, state_complaints
from hf_muon.optimizer.step import MuonStep, adamw_step
from hf_muon.optimizer.step_rules import hyperparameters
from hf_muon.rules import registry
from hf_muon.storage.tensors import has_data, local_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from hf_muon.optimizer.diagnostics import Diagnostics

Group = Mapping[str, Any]
State = MutableMapping[Tensor, dict[str, Any]]


class Terms(NamedTuple):
    """What an optimizer's steps depend on in addition to its param groups and state.

    Attributes:
        replicate_group: over which plain parameters are replicas in this step; None if they are not.
        model: whose parameters these are, if DDP says so.
        partitioned: the flat partitions in place of parameters.
        comm_dtype: the option of `Muon`.
        max_batch_bytes: the option of `Muon`.
    """

    replicate_group: ProcessGroup | None
    model: nn.Module | None
    partitioned: PartitionedStep
    comm_dtype: str
    max_batch_bytes: int


class Fingerprint(NamedTuple):
    """What a plan depends on, to compare with that of the next step.

    Attributes:
        storage: that of parameters, from which a layout follows.
        state: keys and forms of the state of parameters. Not the tensors: a step writes into those that are there, and
            a framework may take them off the device between steps.
        options: of each param group, as texts, learning rates among them.
    """

    storage: list[Any]
    state: list[Any]
    options: list[Any]


# Fast, because every step asks for each tensor. `_spec` has the mesh and placements of a DTensor; those of tensors that
# have not changed are the same object, which is equal to itself at once.
_FORMS: tuple[Callable[[Any], Any], ...] = (
    operator.attrgetter("shape"),
    operator.attrgetter("dtype"),
    operator.attrgetter("device"),
    operator.methodcaller("stride"),
    operator.methodcaller("is_inference"),
    lambda tensor: getattr(tensor, "_spec", None),
)


def fingerprint_of(groups: Sequence[Group], state: State, terms: Terms) -> Fingerprint:
    """Return what is equal in two steps if nothing but gradients and the number of steps has changed between them.

    If a group or a parameter is not as it must be, of which the plan complains, it is equal to no other.
    """
    try:
        params = params_of(groups)
        # As text, as other options: two values that are not valid must compare, too.
        own = f"{terms.comm_dtype!r} {terms.max_batch_bytes!r}"
        storage = [own, id(terms.replicate_group), id(terms.partitioned), *storage_of(groups)]
        of_params = [state.get(param, {}) for param in params]
        values = list(itertools.chain.from_iterable(of_param.values() for of_param in of_params))
        tensors = [value for value in values if isinstance(value, Tensor)]
        keys = [list(map(registry.state_of, groups)), list(map(list, of_params)), len(values)]
        texts = list(map(_option_texts, groups))
        # Values with a `<` in their text may differ where texts do not.
        unknown = [object() for of_group in texts for text in of_group.values() if "<" in text]
        return Fingerprint(storage, [*keys, *(list(map(form, tensors)) for form in _FORMS)], [*texts, *unknown])
    except Exception:  # noqa: BLE001  raised by one rank, it would leave the others waiting
        return Fingerprint([object()], [object()], [object()])


class Plans:
    """The plans of an optimizer: one, or one for each partition that a framework puts into the param groups."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, ...], StepPlan] = {}

    def of(self, groups: Sequence[Group], state: State, terms: Terms) -> StepPlan:
        """Return the plan of a step of the parameters that are in the groups now, made again if something has changed.

        Args:
            groups: param groups, with learning rates as numbers.
            state: the state of parameters; those in the groups may lack theirs.
            terms: what else the step depends on.
        """
        ids = tuple(map(id, params_of(groups)))
        before, fingerprint = self._plans.get(ids), fingerprint_of(groups, state, terms)
        if before is not None and before.is_complete and not before.complaints and before.fingerprint == fingerprint:
            return before
        plan = StepPlan(groups, state, terms, fingerprint, before)
        # ZeRO puts its partitions into the groups one after the other, so each keeps its plan. Other parameters have
        # one: that of a storage that is gone would only grow this dict.
        if terms.partitioned.partitions is None:
            self._plans.clear()
        self._plans[ids] = plan
        return plan

    def forget_state(self) -> None:
        """Check state again in the next step, and expect none of rules: what was loaded may lack it."""
        for plan in self._plans.values():
            plan.is_complete, plan.left = False, []


class StepPlan:
    """What follows from how parameters and their state are stored and from options, found and checked once.

    Args:
        groups: param groups as they are now, with learning rates as numbers; they are not kept.
        state: the state of their parameters; not kept either.
        terms: what else the step depends on.
        fingerprint: of all of these.
        before: the plan that this one replaces, of which stays what has not changed; None if there was none.

    Attributes:
        fingerprint: as long as it is equal, the plan is good.
        terms: without the model, which the plan must not keep.
        layout: how parameters are stored, and the work of each group's step.
        is_complete: whether a step has been taken with this state, which has all that a step needs.
        left: for each group, the keys of rules whose state the last step has left.
        lines: the options, as lines that must be equal on all ranks.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        state: State,
        terms: Terms,
        fingerprint: Fingerprint,
        before: StepPlan | None,
    ) -> None:
        self.fingerprint = fingerprint
        self.terms = terms._replace(model=None)
        self.lines: list[str] = []
        self.is_complete = False
        self.left: list[Mapping[str, str]] = [] if before is None else before.left
        self._of_state: list[str] = []
        self._of_options: list[str] = []
        old = before if before is not None and before.fingerprint.storage == fingerprint.storage else None
        layout = old.layout if old is not None and not old.layout.complaints else _layout(groups, terms)
        self.layout: StepLayout = layout
        # Not all of them, where the layout's complaints came early.
        checked = groups[: len(layout.works)]
        if old is not None and old.is_complete and old.fingerprint.state == fingerprint.state:
            self.is_complete = True
        else:
            with layout.guarded(self._of_state):
                self._of_state += state_complaints(checked, state)
                self._of_state += _rule_complaints(checked, state, self.left)
        if old is not None and not old._of_options and old.fingerprint.options == fingerprint.options:
            self.lines = old.lines
        else:
            with layout.guarded(self._of_options):
                self._of_options += _option_complaints(checked, layout)
                self.lines += _option_lines(checked, layout) if not self._of_options else ()

    @property
    def complaints(self) -> list[str]:
        """Why the parameters cannot be stepped."""
        return [*self.layout.complaints, *self._of_state, *self._of_options]

    def gradients(self, groups: Sequence[Group], state: State, others: Iterable[str] = ()) -> Mine:
        """Read gradients, and return this rank's part of a step.

        Args:
            groups: param groups, with learning rates as numbers.
            state: the state of their parameters.
            others: yields complaints of others.
        """
        mine = Mine(groups, self.complaints)
        with self.layout.guarded(mine.complaints):
            self.terms.partitioned.clear_stale_gradients(groups)
            gradients = Gradients(groups[: len(self.layout.works)], self.layout.trained)
            mine.complaints += [*gradients.complaints, *others]
            if not mine.complaints:
                self._complete(mine, gradients, state)
        return mine

    def _complete(self, mine: Mine, gradients: Gradients, state: State) -> None:
        groups = mine.groups
        # The device computes the flags while the host prepares the rest.
        mine.flags = gradients.flags(may_be_idle=may_be_idle(groups, state))
        mine.stored = gradients.stored
        mine.is_new = not self.is_complete
        mine.state = {} if mine.is_new else state
        for group in groups if mine.is_new else ():
            mine.state.update(zip(group["params"], completed(group, state), strict=True))
        try_compiling(groups, self.layout, mine.state)
        mine.options = [hyperparameters(group, number_of(group)) for group in groups]
        mine.lines = [*self.lines, *_step_lines(groups, self.layout)]

    def note(self, groups: Sequence[Group], state: State) -> None:
        """Note that a step has left complete state, which later ones check again only if its form has changed."""
        self.fingerprint = fingerprint_of(groups, state, self.terms)
        self.is_complete = True
        self.left = list(map(registry.state_of, groups))

    def step(self, k: int, mine: Mine, indices: Sequence[int], watch: Diagnostics | None) -> None:
        """Step the group at position `k`, after all ranks have agreed on it.

        Args:
            k: position of the param group.
            mine: this rank's part of the step.
            indices: the parameters to step, by position in the group.
            watch: measures the step of the group; None if it is not measured.
        """
        group, own = mine.groups[k], (self.layout.works[k], indices, mine.state, mine.options[k])
        if group["use_muon"]:
            MuonStep(group, *own).run(watch)
        else:
            adamw_step(group, *own, watch)


@dataclass
class Mine:
    """A rank's own part in a step.

    Attributes:
        groups: the param groups, with learning rates as numbers.
        complaints: why this rank cannot take the step. If there are some, the rest decides nothing.
        options: for each group, its options in this step, as rules change them.
        state: the state of all parameters in the groups, complete. It is the optimizer's own only after the agreement.
        is_new: whether `state` is not yet the optimizer's own.
        stored: for each parameter, how its gradient is stored; see `Gradients`.
        flags: facts about the gradients, perhaps still being computed by their device; see `Gradients.flags`.
        lines: options and numbers of steps, as lines that must be equal on all ranks.
    """

    groups: Sequence[Group]
    complaints: list[str]
    options: list[dict[str, Any]] = field(default_factory=list)
    state: State = field(default_factory=dict)
    is_new: bool = False
    stored: Sequence[str] = ()
    flags: Sequence[Tensor] = ()
    lines: Sequence[str] = ()

    @property
    def is_idle(self) -> bool:
        """Whether this may be a step that only creates state, and all gradients, of all replicas alike, are zero."""
        return len(self.flags) == 2 and has_data(self.flags[1]) and not self.flags[1]


def _layout(groups: Sequence[Group], terms: Terms) -> StepLayout:
    partitions, options = terms.partitioned.partitions, (terms.comm_dtype, terms.max_batch_bytes)
    return StepLayout(groups, terms.replicate_group, partitions, *options, terms.model)


def _rule_complaints(groups: Sequence[Group], state: State, left: Sequence[Collection[str]]) -> Iterator[str]:
    """Yield which state of rules does not fit, or is missing where the last step has left it.

    Args:
        groups: param groups.
        state: the state of their parameters.
        left: for each group, the keys of rules that the last step has left. A rule that is switched on begins without.
    """
    for group, keys in zip(groups, [*left, *((),) * len(groups)], strict=False):
        rules = registry.state_of(group)
        for i, (param, entries) in enumerate(zip(group["params"], entries_of(group), strict=True) if rules else ()):
            values, text = state.get(param, {}), ""
            for key in rules:
                if key in values and not entries[key].fits(values[key]):
                    text = f"has shape {tuple(values[key].shape)}, not {entries[key].shape or 'a flat one'}"
                elif values and key in keys and key not in values:
                    text = "is gone"
                if text:
                    yield (
                        f"{describe(group, i)}: its {key} {text}. "
                        "It was dropped or resized on the way; load a checkpoint that has it [rule-state-gone]"
                    )
                    break


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


# --- options, which schedulers and users write between steps


def _option_complaints(groups: Sequence[Group], layout: StepLayout) -> Iterator[str]:
    for group, work in zip(groups, layout.works, strict=True):
        if complaint := hyperparameter_complaint(group, work.devices) or rounding_complaint(group):
            yield complaint


def _option_lines(groups: Sequence[Group], layout: StepLayout) -> Iterator[str]:
    """Yield a line for each option of param groups that must be equal on all ranks."""
    for k, (group, work) in enumerate(zip(groups, layout.works, strict=True)):
        yield from [f"{name}={text} in param group {k}" for name, text in _option_texts(group).items()]
        if group["use_muon"]:
            yield from _precision_lines(group, work)


def _step_lines(groups: Sequence[Group], layout: StepLayout) -> Iterator[str]:
    """Yield the number of steps of each param group whose ranks must have counted the same."""
    for k, (group, work) in enumerate(zip(groups, layout.works, strict=True)):
        # Ranks may count other steps of parameters that they do not share: those are stepped when they have gradients.
        if any(place is not None for place in work.shared):
            yield f"step={group['step']} in param group {k}"


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
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, Mapping):
        return _comparable(sorted(value.items(), key=str))
    # The lists of other packages, too, such as OmegaConf's.
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_comparable, value))}]"
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
