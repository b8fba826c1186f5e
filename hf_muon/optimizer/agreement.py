"""Before a step or a load, together: all ranks learn of each other's complaints, and raise one error or continue alike.

Each rank has prepared its part by itself. Here the ranks exchange one record of six numbers; if it shows a difference
or a complaint, they exchange texts about it. After `agree`, no rank may do what another does not: if one then fails,
the others hang until their collective times out. What fails can be memory, a lost device or process, and a hook or a
rule of somebody else. Metrics that fail are dropped, and a function that cannot be compiled then runs as it is, with
the same bits. A process without other ranks runs the same code.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_muon.diagnostics import log
from hf_muon.distributed.ranks import Ranks, listed, merged_texts
from hf_muon.math import compiler
from hf_muon.optimizer.gradients import bad_names, needs_others
from hf_muon.optimizer.layout import StepLayout, first_device_of, process_groups_of
from hf_muon.optimizer.partitioned import REFUSED
from hf_muon.optimizer.state import describe
from hf_muon.optimizer.step_plan import Mine, StepPlan
from hf_muon.storage.boxes import SharedStorage
from hf_muon.storage.tensors import has_data

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Group = Mapping[str, Any]

NOT_FINITE = (
    "\nSuch gradients come from a diverged loss (lower the learning rate), from bad input, or from fp16 without a "
    "GradScaler."
)
DIVERGING = (
    "{name} has a gradient on rank {having} and none on rank {lacking}, which store the same part of it: replicas "
    "would diverge. Let every rank use it, or reduce gradients over all ranks (DDP: find_unused_parameters=True) "
    "[diverging-gradients]"
)
OTHER_PARAMETERS = (
    ". Give all ranks the same parameters in the same order. A rank that steps parameters of its own, as in "
    "ZeroRedundancyOptimizer, needs replicate_group=torch.distributed.new_group([rank], use_local_synchronization=True)"
)
STORED_DIFFERENTLY = (
    "{name} has a gradient that is stored as {stored}, and not as the parameter, on rank {having}, but not on rank "
    "{lacking}: redistribute it on every rank [gradient-placements]"
)


_PARTED = 2
"""In place of whether there are complaints: the moments of a rank are not those of others, which it steps without."""


def refuse(complaints: Sequence[str], advice: str = "", head: str = REFUSED) -> None:
    """Raise if there are complaints.

    Raises:
        RuntimeError: the first complaints, and the number of the others.
    """
    if complaints:
        raise RuntimeError(head + ":\n  - " + log.first_few(complaints, 10, "\n  - ") + advice)


class Agreed(NamedTuple):
    """The step on which all ranks have agreed.

    Attributes:
        moves: whether it moves parameters, or else creates state only.
        indices: for each group, the parameters to step, by position; not empty ones.
    """

    moves: bool
    indices: list[list[int]]


def agree(plan: StepPlan, mine: Mine) -> Agreed | None:
    """Agree with all ranks on the parameters to step, or on an error.

    A sharded parameter is stepped if any rank has a gradient for it; the gradient of a rank without one is zero there.
    If nothing is wrong and all ranks have the same gradients, one collective of a few numbers suffices.

    Args:
        plan: of this step.
        mine: this rank's part of it.

    Returns:
        What to step. None if a rank has parted from the others, so that each must take the step by itself.

    Raises:
        RuntimeError: every complaint of every rank, the same on all of them; weights and moments are as they were.
    """
    layout, refusal = plan.layout, plan.terms.partitioned.refusal
    # One replica, whose gradients the others have, may ask for state without them, as who saves a checkpoint.
    ranks = Ranks(None if layout.is_whole and mine.is_idle else layout.root, layout.first_device)
    # Fake tensors, by which memory is estimated, have no values.
    flags = [flag for flag in mine.flags if has_data(flag)]
    numbers = [
        _hash([layout.digest, *mine.lines]),
        _hash(mine.stored),
        int(bool(mine.complaints)),
        int(bool(compiler.why_off())),
    ]
    # Six on every rank: flags that are missing are 1.
    rows = ranks.numbers([1] * (2 - len(flags)) + numbers, flags)
    # For each rank: whether all entries of gradients can be stepped; whether any is not zero; the hash of what must be
    # the same; the hash of how gradients are stored; whether there are complaints; whether no function is compiled.
    steppable, moves, digests, stored, complains, are_off = zip(*rows, strict=True)
    if _PARTED in complains:
        return None
    if any(complains):
        refuse(merged_texts(ranks.texts(mine.complaints)), head=refusal)
    if len(set(digests)) > 1:
        refuse([_difference(ranks.texts([*layout.lines, *mine.lines]))], head=refusal)
    if not all(steppable):
        names = [] if bool(mine.flags[0]) else bad_names(mine.groups)
        refuse(merged_texts(ranks.texts(names)), NOT_FINITE, refusal)
    has_gradient = list(map(bool, mine.stored))
    if len(set(stored)) > 1:
        has_gradient, differences = _of_any_rank(ranks, mine.groups, layout, mine.stored)
        refuse(merged_texts(ranks.texts(differences)), head=refusal)
    _compile_alike(ranks, are_off)
    return Agreed(any(moves), by_group(mine.groups, has_gradient))


def by_group(groups: Sequence[Group], has_gradient: Sequence[bool]) -> list[list[int]]:
    """Return for each group the indices of the parameters, not empty, that have a gradient.

    Args:
        groups: param groups.
        has_gradient: whether it has one, for every parameter in order.
    """
    rest = iter(has_gradient)
    # Parameters first: the other way round, `zip` would take one element of `rest` too many from each group.
    return [
        [i for i, (param, has) in enumerate(zip(group["params"], rest, strict=False)) if has and param.numel()]
        for group in groups
    ]


def say_parted(ranks: Ranks) -> None:
    """Tell the ranks that agree on a step that this one has parted, which only some of them may have."""
    ranks.numbers([1, 1, 0, 0, _PARTED, 0])


def _of_any_rank(
    ranks: Ranks, groups: Sequence[Group], layout: StepLayout, stored: Sequence[str]
) -> tuple[list[bool], list[str]]:
    """Return which parameters have a gradient on any of the ranks that store them, and complaints."""
    # All ranks have as many parameters: the layouts that they agree on have a line for each.
    rows = ranks.bits([*map(bool, stored), *map(needs_others, stored)])
    has_gradient = [bool(text) for text in stored]
    shared = list(_shared(groups, layout))
    for k, _, _, members in shared:
        has_gradient[k] = any(rows[rank][k] for rank in members)
    differences = list(_diverging(shared, rows))
    if any(any(row[len(stored) :]) for row in rows.values()):
        differences += _stored_differently(shared, ranks.texts(stored))
    return has_gradient, differences


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
        if len({has[rank][k] for rank in members}) == 1:
            continue
        by_region: dict[Any, tuple[list[int], list[int]]] = {}
        # Flat partitions have no regions: each element of theirs is on one rank.
        for rank, region in zip(members, place.regions, strict=False):
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


def ranks_of(groups: Sequence[Group], replicate_group: ProcessGroup | None = None) -> Ranks:
    """Return the ranks that store DTensors or replicas together with this one."""
    from hf_muon.distributed.groups import root_group

    process_groups = process_groups_of(groups, replicate_group)
    return Ranks(root_group(process_groups) if process_groups else None, first_device_of(groups))


# --- texts that must be equal on all ranks, and their hash


def _hash(lines: Sequence[str]) -> int:
    # 7 bytes: the number travels in an int64, clear of its sign.
    return int.from_bytes(hashlib.blake2b("\n".join(lines).encode(), digest_size=7).digest(), "big")


def differences(ranks: Ranks, lines: Sequence[str]) -> list[str]:
    """Return the first difference between lines that must be equal on all ranks; empty if there is none."""
    hashes = {number for (number,) in ranks.numbers([_hash(lines)])}
    return [_difference(ranks.texts(lines))] if len(hashes) > 1 else []


def _difference(texts: Mapping[int, Sequence[str]]) -> str:
    """Return the difference between the first rank of a group and the next one that differs from it.

    Entries that only one of the two has come first: where one is missing, all later lines differ by position.
    """
    first, lines = next(iter(texts.items()))
    rank, other_lines = next(item for item in texts.items() if item[1] != lines)
    entries, other_entries = set(lines), set(other_lines)
    mine = [line for line in lines if line not in other_entries]
    theirs = [line for line in other_lines if line not in entries]
    # The same entries in another order.
    if not mine and not theirs:
        mine, theirs = list(lines), list(other_lines)
    pairs = itertools.zip_longest(mine, theirs, fillvalue="no such entry")
    line, other = next((line, other) for line, other in pairs if line != other)
    advice = OTHER_PARAMETERS if f"{line}{other}".count("of its model") else ""
    return f"the ranks disagree: rank {first} has {line}, rank {rank} has {other}{advice} [ranks-disagree]"


# --- compiled functions


def _compile_alike(ranks: Ranks, are_off: Sequence[int]) -> None:
    """Make all ranks compile functions, or none, and warn of the reasons once.

    Args:
        ranks: those that decide together.
        are_off: for each rank, whether it compiles nothing.
    """
    reasons = [compiler.why_off()]
    if len(set(are_off)) > 1:
        reasons = merged_texts(ranks.texts(list(filter(None, reasons))))
        compiler.turn_off("; ".join(reasons))
    if log.is_rank_zero() and compiler.is_news() and not all(text.endswith("=1 is set") for text in reasons):
        log.logger().warning(
            "Elementwise functions are not compiled, which makes steps slower: %s [not-compiled]",
            log.first_few(reasons, 3, "; "),
        )
