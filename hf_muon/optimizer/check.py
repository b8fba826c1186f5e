"""The check before a step: all ranks agree on the parameters to step, or on one error, before anything moves.

Each rank collects its complaints in a list, and prepares the step. Then the ranks exchange one record of six numbers.
If the record shows a difference or an error, they exchange texts about it. A process without other ranks uses the same
code.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hf_muon.diagnostics import log
from hf_muon.distributed.ranks import Ranks, listed, together
from hf_muon.math import compiler
from hf_muon.math.precision import compute_dtype
from hf_muon.optimizer.gradients import bad_names, needs_others
from hf_muon.optimizer.groups import OWN_KEYS, hyperparameter_complaint
from hf_muon.optimizer.layout import StepLayout, first_device_of, process_groups_of
from hf_muon.optimizer.state import describe
from hf_muon.storage.boxes import SharedStorage
from hf_muon.storage.tensors import has_data, local_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Group = Mapping[str, Any]
State = Mapping[Tensor, Mapping[str, Any]]

REFUSED = "Muon refuses this step; weights and moments are as they were"
NOT_FINITE = (
    "\nSuch gradients come from a diverged loss (lower the learning rate), from bad input, or from fp16 without a "
    "GradScaler."
)
DIVERGING = (
    "{name} has a gradient on rank {having} and none on rank {lacking}, which store the same part of it: replicas "
    "would diverge. Let every rank use it, or reduce gradients over all ranks (DDP: find_unused_parameters=True) "
    "[diverging-gradients]"
)
STORED_DIFFERENTLY = (
    "{name} has a gradient that is stored as {stored}, and not as the parameter, on rank {having}, but not on rank "
    "{lacking}: redistribute it on every rank [gradient-placements]"
)


class Own(NamedTuple):
    """The findings of this rank before a step, if it has no complaints.

    Attributes:
        options: of param groups, as lines that must be equal on all ranks.
        stored: how the gradient of each parameter is stored; see `Gradients`.
        flags: of the gradients; see `Gradients.flags`.
        are_reduced: whether DDP has reduced the gradients; true without DDP.
    """

    options: Sequence[str] = ()
    stored: Sequence[str] = ()
    flags: Sequence[Tensor] = ()
    are_reduced: bool = True

    @property
    def is_idle(self) -> bool:
        """Whether this may be a step that only creates state, and all gradients, of all replicas alike, are zero."""
        return self.are_reduced and len(self.flags) == 2 and has_data(self.flags[1]) and not self.flags[1]

    @property
    def lines(self) -> list[str]:
        """What must be the same on all ranks, in words."""
        return [*self.options, f"gradients that DDP has {'' if self.are_reduced else 'not '}reduced"]


def complaints_of_groups(groups: Sequence[Group], layout: StepLayout) -> Iterator[str]:
    """Return complaints about the options of param groups on this rank."""
    for group, work in zip(groups, layout.works, strict=False):  # fewer works where the layout has complaints itself
        if complaint := hyperparameter_complaint(group, work.devices):
            yield complaint


def may_be_idle(groups: Sequence[Group], state: State) -> bool:
    """Return whether this may be a step that only creates state.

    torch.distributed.checkpoint takes one with learning rates and gradients of zero, to have moments to load into. It
    must not count as a step.
    """
    return not state and all(float(group["lr"]) == 0 for group in groups)


def refuse(complaints: Sequence[str], advice: str = "", head: str = REFUSED) -> None:
    """Raise if there are complaints.

    Raises:
        RuntimeError: the first complaints, and the number of the others.
    """
    if complaints:
        raise RuntimeError(head + ":\n  - " + log.first_few(complaints, 10, "\n  - ") + advice)


def agree(
    ranks: Ranks,
    groups: Sequence[Group],
    layout: StepLayout,
    complaints: Sequence[str],
    own: Own,
    refusal: str = REFUSED,
) -> tuple[list[list[int]] | None, bool]:
    """Agree with all ranks on the parameters to step, or on an error.

    A sharded parameter is stepped if any rank has a gradient for it; the gradient of a rank without one is zero there.
    If nothing is wrong and all ranks have the same gradients, one collective of a few numbers suffices.

    Args:
        ranks: that take the step together.
        groups: param groups.
        layout: of these groups.
        complaints: why this rank cannot take the step.
        own: the findings of this rank; not read if there are complaints.
        refusal: how the error begins.

    Returns:
        The indices of the parameters of each group to step, the same on all ranks, None for an idle step or where DDP
        has not reduced the gradients; and whether all ranks have gradients for the same parameters.

    Raises:
        RuntimeError: every complaint of every rank, the same on all of them.
    """

    def stop(texts: Sequence[str], advice: str = "") -> None:
        refuse(together(ranks.texts(texts)), advice, refusal)

    # What each rank says, in six numbers: whether all entries of its gradients can be stepped, and whether any of them
    # is not zero; what must be the same on all ranks; how gradients are stored; whether it has complaints; and whether
    # it compiles no functions.
    flags = [flag for flag in own.flags if has_data(flag)]  # fake tensors, by which memory is estimated, have none
    numbers = [
        _hash([layout.digest, *own.lines]),
        _hash(own.stored),
        int(bool(complaints)),
        int(bool(compiler.why_off())),
    ]
    rows = ranks.numbers([1] * (2 - len(flags)) + numbers, flags)
    steppable, moves, same, stored, complains, are_off = zip(*rows, strict=True)
    if any(complains):
        stop(complaints)
    if len(set(same)) > 1:
        refuse([_difference(ranks.texts([*layout.lines, *own.lines]))], head=refusal)
    if not own.are_reduced:
        return None, False
    if not all(steppable):
        stop([] if bool(own.flags[0]) else bad_names(groups), NOT_FINITE)
    there = list(map(bool, own.stored))
    is_alike = len(set(stored)) == 1
    if not is_alike:
        there, differences = _of_any_rank(ranks, groups, layout, own.stored)
        stop(differences)
    _compile_alike(ranks, are_off)
    return by_group(groups, there) if any(moves) else None, is_alike


def agree_on_complaints(ranks: Ranks, complaints: Sequence[str], refusal: str) -> None:
    """Raise the complaints of all ranks if any of them has some; all ranks call this together.

    Raises:
        RuntimeError: every complaint of every rank, the same on all of them.
    """
    if any(itertools.chain.from_iterable(ranks.bits([bool(complaints)]).values())):
        refuse(together(ranks.texts(complaints)), head=refusal)


def _of_any_rank(
    ranks: Ranks, groups: Sequence[Group], layout: StepLayout, stored: Sequence[str]
) -> tuple[list[bool], list[str]]:
    """Return which parameters have a gradient on any of the ranks that store them, and complaints."""
    # All ranks have as many parameters: the layouts that they agree on have a line for each.
    rows = ranks.bits([*map(bool, stored), *map(needs_others, stored)])
    there = [bool(text) for text in stored]
    shared = list(_shared(groups, layout))
    for k, _, _, members in shared:
        there[k] = any(rows[rank][k] for rank in members)
    differences = list(_diverging(shared, rows))
    if any(any(row[len(stored) :]) for row in rows.values()):
        differences += _stored_differently(shared, ranks.texts(stored))
    return there, differences


class _Shared(NamedTuple):
    """A parameter that ranks store together: its position among all, its name, where it lies, and the ranks."""

    position: int
    name: str
    place: SharedStorage
    members: Sequence[int]


def _shared(groups: Sequence[Group], layout: StepLayout) -> Iterator[_Shared]:
    places = [
        (group, i, place)
        for group, work in zip(groups, layout.works, strict=True)
        for i, place in enumerate(work.shared)
    ]
    for k, (group, i, place) in enumerate(places):
        if place is not None:
            yield _Shared(k, describe(group, i), place, Ranks(place.group, layout.first_device).members)


def _diverging(shared: Sequence[_Shared], has: Mapping[int, Sequence[bool]]) -> Iterator[str]:
    """Return complaints if only some of the ranks that store the same region of a parameter have a gradient."""
    for k, name, place, members in shared:
        by_region: dict[Any, tuple[list[int], list[int]]] = {}
        for rank, region in zip(members, place.regions, strict=False):  # a flat partition has none
            if region.numel:
                by_region.setdefault(region, ([], []))[not has[rank][k]].append(rank)
        for having, lacking in by_region.values():
            if having and lacking:
                yield DIVERGING.format(name=name, having=listed(having), lacking=listed(lacking))
                break


def _stored_differently(shared: Sequence[_Shared], stored: Mapping[int, Sequence[str]]) -> Iterator[str]:
    """Return complaints about gradients that only some ranks would redistribute, waiting forever for the others."""
    for k, name, _, members in shared:
        text = next((stored[rank][k] for rank in members if needs_others(stored[rank][k])), None)
        lacking = [rank for rank in members if stored[rank][k] != text]
        if text is not None and lacking:
            having = [rank for rank in members if stored[rank][k] == text]
            yield STORED_DIFFERENTLY.format(name=name, stored=text, having=listed(having), lacking=listed(lacking))


def by_group(groups: Sequence[Group], there: Iterable[object]) -> list[list[int]]:
    """Return for each group the indices of the parameters, not empty, that have a gradient.

    Args:
        groups: param groups.
        there: of each parameter, something that is true if it has one; in the order of all parameters.
    """
    rest = iter(there)
    return [
        [i for i, (param, bit) in enumerate(zip(group["params"], rest, strict=False)) if bit and param.numel()]
        for group in groups
    ]


def complaints_of_all(
    groups: Sequence[Group], complaints: Sequence[str], replicate_group: ProcessGroup | None = None
) -> list[str]:
    """Return the complaints of all ranks that store DTensors or replicas together; without those, this rank's own."""
    from hf_muon.distributed.groups import root_group

    process_groups = process_groups_of(groups, replicate_group)
    root = root_group(process_groups) if process_groups else None
    return together(Ranks(root, first_device_of(groups)).texts(complaints))


# --- texts that must be equal on all ranks, and their hash


def _hash(lines: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\n".join(lines).encode(), digest_size=7).digest(), "big")


def option_lines(groups: Sequence[Group], layout: StepLayout) -> list[str]:
    """Return a text for each option of param groups that must be equal on all ranks."""
    lines = []
    for k, (group, work) in enumerate(zip(groups, layout.works, strict=True)):
        values = {
            name: _comparable(float(value) if name == "lr" else value)  # of any type of number
            for name, value in sorted(group.items(), key=_name)
            if name not in _OF_PARAMETERS
        }
        if all(place is None for place in work.shared):  # a rank's own parameters are stepped when it has gradients
            values.pop("step", None)
        lines += [f"{name}={value} in param group {k}" for name, value in values.items()]
        if group["use_muon"]:
            types = sorted({device.type for device in work.devices})
            lines += [f"Newton-Schulz in {compute_dtype(group['ns_dtype'], type_)} on {type_}" for type_ in types]
    return lines


# Entries of a group that the lines of its layout describe, parameter by parameter.
_OF_PARAMETERS = frozenset(OWN_KEYS) - {"use_muon", "step"}


def _name(entry: tuple[Any, Any]) -> str:
    return str(entry[0])


def _comparable(value: Any) -> str:
    """Return a text that is equal on two ranks if an entry of a param group is."""
    if isinstance(value, Tensor):
        return repr(value.tolist()) if has_data(value) and value.numel() == 1 else f"a {type(value).__name__}"
    if isinstance(value, Mapping):
        return _comparable(sorted(value.items(), key=_name))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_comparable, value))}]"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return f"a {type(value).__name__}"  # its repr may have an address


def _difference(texts: Mapping[int, Sequence[str]]) -> str:
    """Return the difference between the first rank of a group and the next one that differs from it.

    Entries that only one of the two has come first: where one is missing, all later lines differ by position.
    """
    first, lines = next(iter(texts.items()))
    rank, others = next(item for item in texts.items() if item[1] != lines)
    known, others_known = set(lines), set(others)
    mine = [line for line in lines if line not in others_known]
    theirs = [line for line in others if line not in known]
    if not mine and not theirs:  # in another order
        mine, theirs = list(lines), list(others)
    pairs = itertools.zip_longest(mine, theirs, fillvalue="no such entry")
    here, there = next((here, there) for here, there in pairs if here != there)
    return f"the ranks disagree: rank {first} has {here}, rank {rank} has {there} [ranks-disagree]"


# --- compiled functions


def try_compiling(groups: Sequence[Group], layout: StepLayout, state: State) -> None:
    """Try whether functions can be compiled on the devices of a step, once for each.

    Args:
        groups: param groups.
        layout: of these groups.
        state: of their parameters; complete.
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


def _compile_alike(ranks: Ranks, are_off: Sequence[int]) -> None:
    """Make all ranks compile functions, or none, and warn of the reasons once.

    Args:
        ranks: that decide together.
        are_off: whether functions are compiled on no device, of each of them.
    """
    reasons = [compiler.why_off()]
    if len(set(are_off)) > 1:
        reasons = together(ranks.texts(list(filter(None, reasons))))
        compiler.turn_off("; ".join(reasons))
    if log.is_rank_zero() and compiler.is_news() and not all(text.endswith("=1 is set") for text in reasons):
        log.logger().warning(
            "Elementwise functions are not compiled, which makes steps slower: %s [not-compiled]",
            log.first_few(reasons, 3, "; "),
        )
