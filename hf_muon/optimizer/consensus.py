"""One error on all ranks, or none: what ranks make of their complaints together, before weights or moments move."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_muon.config import GROUP_OPTIONS
from hf_muon.diagnostics.log import first_few
from hf_muon.math.newton_schulz import compute_dtype
from hf_muon.optimizer import gradients
from hf_muon.optimizer import state as checkpoint
from hf_muon.optimizer.preflight import REFUSED, StepLayout
from hf_muon.storage.shared import Shared
from hf_muon.storage.tensors import has_data, is_dtensor, local_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Group = Mapping[str, Any]

PARTING = (
    "{name} has a gradient on rank {having} and none on rank {lacking}, which store the same part of it: replicas "
    "would part. Let every rank use it, or reduce gradients over all ranks (DDP: find_unused_parameters=True)"
)
STORED_OTHERWISE = (
    "{name} has a gradient that is stored as {stored}, and not as the parameter, on rank {having}, but not on rank "
    "{lacking}: redistribute it on every rank"
)


def refuse(complaints: Sequence[str], advice: str = "", head: str = REFUSED) -> None:
    """Raise if there are complaints."""
    if complaints:
        raise RuntimeError(head + ":\n  - " + first_few(complaints, 10, "\n  - ") + advice)


def together(texts: Sequence[Sequence[str]], ranks: Sequence[int] | None = None) -> list[str]:
    """Return what ranks say, once each, with the ranks that say it where not all do.

    Args:
        texts: of each rank.
        ranks: their numbers; None where they are those of all ranks.
    """
    speakers: dict[str, list[int]] = {}
    for rank, lines in zip(ranks or range(len(texts)), texts, strict=True):
        for line in lines:
            speakers.setdefault(line, []).append(rank)
    return [line if len(who) == len(texts) else f"{line} [rank {_listed(who)}]" for line, who in speakers.items()]


def agree(
    groups: Sequence[Group],
    state: Mapping[Tensor, Mapping[str, Any]],
    layout: StepLayout,
    complaints: Sequence[str],
    *,
    may_be_idle: bool = False,
) -> list[list[int]] | None:
    """Return which parameters of each group to step, the same on all ranks; or raise the same error on all of them.

    A sharded parameter is stepped where any rank has a gradient for it; a rank without one has a part that is zero.
    A step in which nothing is wrong, and all ranks have the same gradients, takes one collective of a few numbers.

    Args:
        groups: param groups.
        state: of their parameters.
        layout: of these groups.
        complaints: what speaks against the step, on this rank.
        may_be_idle: whether to look for gradients that are all zero.

    Returns:
        Indices for each group, or None for an idle step.

    Raises:
        RuntimeError: every complaint of every rank.
    """
    stop = functools.partial(refuse, head=layout.head)
    params = [param for group in groups for param in group["params"]]
    bits = [param.grad is not None for param in params]
    if not layout.talking:
        stop(complaints)
        flags = gradients.flags(groups, state, may_be_idle=may_be_idle)
        if not has_data(flags):  # of fake tensors, by which memory is estimated
            return _by_group(groups, bits)
        bad, moves = flags.tolist()
        if bad:
            stop(gradients.bad_names(groups, state), gradients.NOT_FINITE)
        return _by_group(groups, bits) if moves else None

    from hf_muon.distributed import agreement

    complaints = list(complaints)
    options: list[str] = []
    stored: list[str] = []
    flags = gradients.flags([], {}, may_be_idle=False)
    with layout.guarded(complaints):
        if not complaints:
            options = _option_lines(groups, layout)
            stored = [_stored(param) for param in params]
            flags = gradients.flags(groups, state, may_be_idle=may_be_idle)
    root = layout.root
    assert root is not None
    home = local_of(params[0]).device
    heard = agreement.exchange_words(
        root, home, _fingerprint([layout.digest, *options]), _fingerprint(stored), bool(complaints), flags
    )
    ranks = _ranks(root)

    def all_say(texts: Sequence[str]) -> list[str]:
        return together(agreement.exchange_texts(root, texts), ranks)

    if any(said.complains for said in heard):
        stop(all_say(complaints))
    if len({said.fingerprint for said in heard}) > 1:
        stop([_difference(agreement.exchange_texts(root, [*layout.lines, *options]), ranks)])
    if any(said.flags[0] for said in heard):
        names = gradients.bad_names(groups, state) if flags[0].item() else []
        stop(all_say(names), gradients.NOT_FINITE)
    if len({said.gradients for said in heard}) > 1:
        # All ranks have as many parameters: the layouts that they agree on have a line for each.
        of_ranks = agreement.exchange_bits(root, home, [*bits, *map(_travels, stored)])
        has = {rank: row[: len(bits)] for rank, row in zip(ranks, of_ranks, strict=True)}
        parting = list(_parting(groups, layout, has))
        if any(any(row[len(bits) :]) for row in of_ranks):
            texts = dict(zip(ranks, agreement.exchange_texts(root, stored), strict=True))
            parting += _stored_otherwise(groups, layout, texts)
        stop(all_say(parting))
        bits = [
            mine if place is None else any(has[rank][k] for rank in _ranks(place.group))
            for k, (mine, place) in enumerate(zip(bits, itertools.chain(*layout.places), strict=True))
        ]
    return _by_group(groups, bits) if any(said.flags[1] for said in heard) else None


def complaints_of_all(groups: Sequence[Group], complaints: Sequence[str]) -> list[str]:
    """The complaints of all ranks that store parameters together as DTensors; otherwise this rank's own."""
    meshes = [param.device_mesh for group in groups for param in group["params"] if is_dtensor(param)]
    if not meshes:
        return list(complaints)
    from hf_muon.distributed.agreement import exchange_texts
    from hf_muon.distributed.groups import mesh_groups, root_group

    root = root_group(mesh_groups(meshes))
    return together(exchange_texts(root, complaints), _ranks(root))


def _ranks(group: ProcessGroup) -> list[int]:
    """The ranks of a group as all ranks count them."""
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
    for k, (group, devices, places) in enumerate(zip(groups, layout.devices, layout.places, strict=True)):
        values = {name: float(group[name]) if name == "lr" else group[name] for name in GROUP_OPTIONS}
        if any(place is not None for place in places):  # a rank's own parameters are stepped when it has gradients
            values["step"] = group["step"]
        lines += [f"{name}={value!r} in param group {k}" for name, value in values.items()]
        if group["use_muon"]:
            types = sorted({device.type for device in devices})
            lines += [f"Newton-Schulz in {compute_dtype(group['ns_dtype'], type_)} on {type_}" for type_ in types]
    return lines


def _difference(texts: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    for lines in itertools.zip_longest(*texts, fillvalue="less"):
        if len(set(lines)) > 1:
            other = next(i for i, line in enumerate(lines) if line != lines[0])
            return f"the ranks disagree: rank {ranks[0]} has {lines[0]}, rank {ranks[other]} has {lines[other]}"
    raise AssertionError("fingerprints differ, and what they are made from does not")


def _stored(param: Tensor) -> str:
    """How a gradient is stored, where other ranks are needed to store it as the parameter; "" where there is none."""
    grad = param.grad
    if grad is None:
        return ""
    if not is_dtensor(grad) or grad.placements == param.placements:  # type: ignore[attr-defined]
        return _AT_ITS_PLACE
    pairs = zip(grad.placements, param.placements, strict=True)  # type: ignore[attr-defined]
    if all(placement == wanted or placement.is_replicate() for placement, wanted in pairs):
        return _AT_ITS_PLACE
    return str(grad.placements)  # type: ignore[attr-defined]


_AT_ITS_PLACE = "="


def _travels(stored: str) -> bool:
    return stored not in ("", _AT_ITS_PLACE)


def _shared(groups: Sequence[Group], layout: StepLayout) -> Iterator[tuple[int, str, Shared]]:
    """The place among all parameters, the description and the storage of each parameter that ranks share."""
    k = 0
    for group, places in zip(groups, layout.places, strict=True):
        for i, place in enumerate(places):
            if place is not None:
                yield k, checkpoint.describe(group, i), place
            k += 1


def _parting(groups: Sequence[Group], layout: StepLayout, has: Mapping[int, Sequence[bool]]) -> Iterator[str]:
    """Whose replicas would part: ranks that store the same, of which some have a gradient and others none."""
    for k, name, place in _shared(groups, layout):
        ranks = _ranks(place.group)
        for region in dict.fromkeys(place.regions):
            alike = [rank for rank, other in zip(ranks, place.regions, strict=True) if other == region and region.numel]
            having, lacking = ([rank for rank in alike if has[rank][k] is wanted] for wanted in (True, False))
            if having and lacking:
                yield PARTING.format(name=name, having=_listed(having), lacking=_listed(lacking))
                break


def _stored_otherwise(
    groups: Sequence[Group], layout: StepLayout, stored: Mapping[int, Sequence[str]]
) -> Iterator[str]:
    """Whose gradients would be redistributed by some ranks only, which would wait for the others."""
    for k, name, place in _shared(groups, layout):
        texts = {rank: stored[rank][k] for rank in _ranks(place.group)}
        text = next((text for text in texts.values() if _travels(text)), None)
        if text is not None and len(set(texts.values())) > 1:
            having, lacking = ([rank for rank in texts if (texts[rank] == text) is wanted] for wanted in (True, False))
            yield STORED_OTHERWISE.format(name=name, stored=text, having=_listed(having), lacking=_listed(lacking))


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
