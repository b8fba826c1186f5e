"""Agreement of all ranks before a step: the same parameters to step, or the same error, before anything is changed."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_muon.math.compiler import Readiness
from hf_muon.math.precision import compute_dtype
from hf_muon.optimizer import compilation, gradients
from hf_muon.optimizer.groups import OWN_KEYS
from hf_muon.optimizer.layout import StepLayout, first_device_of, process_groups_of
from hf_muon.optimizer.preflight import REFUSED, refuse
from hf_muon.optimizer.state import describe
from hf_muon.storage.shared import SharedStorage
from hf_muon.storage.tensors import has_data, is_dtensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Group = Mapping[str, Any]

DIVERGING = (
    "{name} has a gradient on rank {having} and none on rank {lacking}, which store the same part of it: replicas "
    "would diverge. Let every rank use it, or reduce gradients over all ranks (DDP: find_unused_parameters=True) "
    "[diverging-gradients]"
)
STORED_DIFFERENTLY = (
    "{name} has a gradient that is stored as {stored}, and not as the parameter, on rank {having}, but not on rank "
    "{lacking}: redistribute it on every rank [gradient-placements]"
)


def together(texts: Sequence[Sequence[str]], ranks: Sequence[int] | None = None) -> list[str]:
    """Return each text of the ranks once, followed by the ranks that it comes from unless it comes from all of them.

    Args:
        texts: of each rank.
        ranks: their numbers; None for 0, 1, 2, ...
    """
    origins: dict[str, list[int]] = {}
    for rank, lines in zip(ranks or range(len(texts)), texts, strict=True):
        for line in dict.fromkeys(lines):
            origins.setdefault(line, []).append(rank)
    return [line if len(of) == len(texts) else f"{line} [rank {_listed(of)}]" for line, of in origins.items()]


def agree(
    groups: Sequence[Group],
    layout: StepLayout,
    complaints: Sequence[str],
    prepare: Callable[[list[list[int]]], None],
    readiness: Callable[[], tuple[Readiness, str]],
    *,
    may_be_idle: bool = False,
    refusal: str = REFUSED,
) -> list[list[int]] | None:
    """Ask all ranks for the parameters of each group to step, or for errors.

    A sharded parameter is stepped if any rank has a gradient for it; the gradient of a rank without one is zero there.
    If nothing is wrong and all ranks have the same gradients, one collective of a few numbers suffices.

    Args:
        groups: param groups.
        layout: of these groups.
        complaints: why this rank cannot take the step.
        prepare: called with the indices that may be returned, once or twice; an error of it is one of this rank.
        readiness: called after that; returns whether this rank compiles elementwise functions, and why not.
        may_be_idle: whether to look for gradients that are all zero.
        refusal: how the error begins.

    Returns:
        The indices of the parameters of each group to step, or None for an idle step.

    Raises:
        RuntimeError: every complaint of every rank, the same on all of them.
    """
    stop = functools.partial(refuse, head=refusal)
    if not layout.process_groups:
        stop(complaints)
        return _agree_alone(groups, prepare, readiness, stop, may_be_idle=may_be_idle)

    from hf_muon.distributed import agreement

    complaints = list(complaints)
    bits: list[bool] = []
    options: list[str] = []
    stored: list[str] = []
    flags = gradients.flags([], may_be_idle=False)
    ready, reason = Readiness.CAN, ""
    with layout.guarded(complaints):
        if not complaints:
            params = [param for group in groups for param in group["params"]]
            bits = [param.grad is not None for param in params]
            options = _option_lines(groups, layout)
            stored = [_stored(param) for param in params]
            flags = gradients.flags(groups, may_be_idle=may_be_idle)
            prepare(_by_group(groups, bits))
            ready, reason = readiness()
    root, device = layout.root, layout.first_device
    assert root is not None
    reports = agreement.exchange_reports(
        root, device, _fingerprint([layout.digest, *options]), _fingerprint(stored), bool(complaints), ready, flags
    )
    ranks = _ranks(root)

    def of_all_ranks(texts: Sequence[str]) -> list[str]:
        return together(agreement.exchange_texts(root, device, texts), ranks)

    if any(report.complains for report in reports):
        stop(of_all_ranks(complaints))
    if len({report.fingerprint for report in reports}) > 1:
        stop([_difference(agreement.exchange_texts(root, device, [*layout.lines, *options]), ranks)])
    if not all(report.flags[0] for report in reports):
        names = [] if bool(flags[0]) else gradients.bad_names(groups)
        stop(of_all_ranks(names), gradients.NOT_FINITE)
    has = bits
    if len({report.gradients for report in reports}) > 1:
        # All ranks have as many parameters: the layouts that they agree on have a line for each.
        rows = agreement.exchange_bits(root, device, [*bits, *map(_needs_others, stored)])
        has = _of_any_rank(groups, layout, bits, dict(zip(ranks, rows, strict=True)), stored, of_all_ranks, stop)
        with layout.guarded(complaints):
            prepare(_by_group(groups, has))
        if any(itertools.chain(*agreement.exchange_bits(root, device, [bool(complaints)]))):
            stop(of_all_ranks(complaints))
    compilation.decide([report.readiness for report in reports], ready, reason, of_all_ranks, stop)
    return _by_group(groups, has) if any(report.flags[1] for report in reports) else None


def _of_any_rank(
    groups: Sequence[Group],
    layout: StepLayout,
    bits: Sequence[bool],
    rows: Mapping[int, Sequence[bool]],
    stored: Sequence[str],
    of_all_ranks: Callable[[Sequence[str]], list[str]],
    stop: Callable[..., None],
) -> list[bool]:
    """Return which parameters have a gradient on any of the ranks that store them, or raise what is wrong with that.

    Args:
        groups: param groups.
        layout: of these groups.
        bits: whether each parameter has a gradient here.
        rows: the same of each rank, followed by which gradients it would redistribute.
        stored: how this rank's gradients are stored.
        of_all_ranks: puts the texts of all ranks together.
        stop: raises if there are any.
    """
    from hf_muon.distributed import agreement

    has = {rank: row[: len(bits)] for rank, row in rows.items()}
    differences = list(_diverging(groups, layout, has))
    if any(any(row[len(bits) :]) for row in rows.values()):
        assert layout.root is not None
        device = layout.first_device
        texts = dict(zip(rows, agreement.exchange_texts(layout.root, device, stored), strict=True))
        differences += _stored_differently(groups, layout, texts)
    stop(of_all_ranks(differences))
    return [
        mine if place is None else any(has[rank][k] for rank in _ranks(place.group))
        for k, (mine, place) in enumerate(
            zip(bits, itertools.chain.from_iterable(work.shared for work in layout.works), strict=True)
        )
    ]


def _agree_alone(
    groups: Sequence[Group],
    prepare: Callable[[list[list[int]]], None],
    readiness: Callable[[], tuple[Readiness, str]],
    stop: Callable[..., None],
    *,
    may_be_idle: bool,
) -> list[list[int]] | None:
    """Do what `agree` does in a process that is alone with its parameters and has no complaints."""
    indices = _by_group(groups, [param.grad is not None for group in groups for param in group["params"]])
    flags = gradients.flags(groups, may_be_idle=may_be_idle)
    prepare(indices)
    ready, reason = readiness()
    compilation.decide([ready], ready, reason, list, stop)
    if not has_data(flags[0]):  # of fake tensors, by which memory is estimated
        return indices
    if not bool(flags[0]):
        stop(gradients.bad_names(groups), gradients.NOT_FINITE)
    return indices if len(flags) == 1 or bool(flags[1]) else None


def complaints_of_all(
    groups: Sequence[Group], complaints: Sequence[str], replicate_group: ProcessGroup | None = None
) -> list[str]:
    """Return the complaints of all ranks that store DTensors or replicas together; without those, this rank's own."""
    process_groups = process_groups_of(groups, replicate_group)
    if not process_groups:
        return list(complaints)
    from hf_muon.distributed.agreement import exchange_texts
    from hf_muon.distributed.groups import root_group

    root = root_group(process_groups)
    return together(exchange_texts(root, first_device_of(groups), complaints), _ranks(root))


def _ranks(group: ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group."""
    import torch.distributed as dist

    return dist.get_process_group_ranks(group)


def _fingerprint(lines: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\n".join(lines).encode(), digest_size=7).digest(), "big")


def _by_group(groups: Sequence[Group], bits: Sequence[bool]) -> list[list[int]]:
    rest = iter(bits)
    return [
        [i for i, (param, bit) in enumerate(zip(group["params"], rest, strict=False)) if bit and param.numel()]
        for group in groups
    ]


def _option_lines(groups: Sequence[Group], layout: StepLayout) -> list[str]:
    lines = []
    for k, (group, work) in enumerate(zip(groups, layout.works, strict=True)):
        values = {
            name: _comparable(float(value) if name == "lr" else value)  # of any type of number
            for name, value in sorted(group.items())
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


def _comparable(value: Any) -> str:
    """Return a text that is equal on two ranks if an entry of a param group is."""
    if isinstance(value, Tensor):
        return repr(value.tolist()) if has_data(value) and value.numel() == 1 else f"a {type(value).__name__}"
    if isinstance(value, Mapping):
        return _comparable(sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_comparable, value))}]"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return f"a {type(value).__name__}"  # its repr may have an address


def _difference(texts: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    """Say what differs between rank 0 of a group and the first rank that has something else.

    Entries that only one of the two has come first: where one is missing, all later lines differ by position.
    """
    lines, known = texts[0], set(texts[0])
    for rank, others in zip(ranks[1:], texts[1:], strict=True):
        if others != lines:
            theirs_known = set(others)
            mine = [line for line in lines if line not in theirs_known]
            theirs = [line for line in others if line not in known]
            if not mine and not theirs:  # in another order
                mine, theirs = list(lines), list(others)
            pairs = itertools.zip_longest(mine, theirs, fillvalue="no such entry")
            here, there = next((here, there) for here, there in pairs if here != there)
            return f"the ranks disagree: rank {ranks[0]} has {here}, rank {rank} has {there} [ranks-disagree]"
    raise AssertionError("fingerprints differ, but not the lines that they were computed from")


def _stored(param: Tensor) -> str:
    """Return how a gradient is stored if it takes communication to store it like the parameter.

    Otherwise return `_IN_PLACE`, or "" without a gradient.
    """
    grad = param.grad
    if grad is None:
        return ""
    if not is_dtensor(grad) or grad.placements == param.placements:  # type: ignore[attr-defined]
        return _IN_PLACE
    pairs = zip(grad.placements, param.placements, strict=True)  # type: ignore[attr-defined]
    if all(placement == own or placement.is_replicate() for placement, own in pairs):
        return _IN_PLACE
    return str(grad.placements)  # type: ignore[attr-defined]


_IN_PLACE = "="


def _needs_others(stored: str) -> bool:
    return stored not in ("", _IN_PLACE)


def _shared(groups: Sequence[Group], layout: StepLayout) -> Iterator[tuple[int, str, SharedStorage]]:
    """Yield the index among all parameters, the description and the storage of each parameter that ranks share."""
    k = 0
    for group, work in zip(groups, layout.works, strict=True):
        for i, place in enumerate(work.shared):
            if place is not None:
                yield k, describe(group, i), place
            k += 1


def _diverging(groups: Sequence[Group], layout: StepLayout, has: Mapping[int, Sequence[bool]]) -> Iterator[str]:
    """Complain of ranks that store the same region of a parameter, of which some have a gradient and others none."""
    for k, name, place in _shared(groups, layout):
        ranks = _ranks(place.group)
        for region in dict.fromkeys(place.regions):
            alike = [rank for rank, other in zip(ranks, place.regions, strict=True) if other == region and region.numel]
            having = [rank for rank in alike if has[rank][k]]
            lacking = [rank for rank in alike if not has[rank][k]]
            if having and lacking:
                yield DIVERGING.format(name=name, having=_listed(having), lacking=_listed(lacking))
                break


def _stored_differently(
    groups: Sequence[Group], layout: StepLayout, stored: Mapping[int, Sequence[str]]
) -> Iterator[str]:
    """Complain of gradients that only some ranks would redistribute, which would wait for the others forever."""
    for k, name, place in _shared(groups, layout):
        texts = {rank: stored[rank][k] for rank in _ranks(place.group)}
        text = next((text for text in texts.values() if _needs_others(text)), None)
        if text is not None and len(set(texts.values())) > 1:
            having = [rank for rank in texts if texts[rank] == text]
            lacking = [rank for rank in texts if texts[rank] != text]
            yield STORED_DIFFERENTLY.format(name=name, stored=text, having=_listed(having), lacking=_listed(lacking))


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
