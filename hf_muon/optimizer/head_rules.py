"""Rules that follow the heads of attention: what is measured of them, and the factors of their rows after a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_muon.diagnostics.log import first_few, is_rank_zero, logger
from hf_muon.optimizer.layout import StepLayout
from hf_muon.optimizer.preflight import refuse
from hf_muon.routing.attention import attentions_of
from hf_muon.routing.parameters import unwrapped
from hf_muon.rules import registry
from hf_muon.rules.heads import Attention, LogitSource, source_of
from hf_muon.rules.rule import Rule
from hf_muon.storage.partitions import Partitions
from hf_muon.storage.rows import scale_rows_, scale_rows_of_slice_
from hf_muon.storage.tensors import has_data, local_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Group = Mapping[str, Any]

NO_MODEL = (
    "{rules} needs the attentions of a model, which this optimizer was built without: use build_optimizer(model), or "
    "MuonOfGroups(params, model=model). Copies and unpickled optimizers do not know their model either [model-needed]"
)
NO_RANKS = (
    "{rules} needs the largest logits of all ranks, and this process, one of {count}, steps its parameters alone: no "
    "DistributedDataParallel has reduced the gradients of this step. Wrap the model, or pass replicate_group; a group "
    "of this rank alone says that ranks train different models [logits-of-one-rank]"
)
UNMEASURED = (
    "{rules}: no forward pass in training mode, with gradients, has used an attention of the model before this step. "
    "Call model.train(), and step the model that the optimizer was built from [no-forward-pass]"
)


def of_heads(group: Group) -> list[Rule]:
    """Return the rules of a group that follow heads."""
    return [rule for rule in registry.rules_of(group) if rule.head_factors is not None]


@dataclass
class _Known:
    """The attentions of a model, what measures them, and where the param groups hold their parameters.

    Attributes:
        attentions: of the model, as far as they are trained.
        source: measures their logits.
        places: by the name of a parameter, its param group and its index there.
    """

    attentions: list[Attention]
    source: LogitSource
    places: dict[str, tuple[int, int]] = field(default_factory=dict)


class HeadRules:
    """Measures the heads of a model's attentions, and applies what rules make of that after each step."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._logits: Tensor | None = None  # of this step, on the host
        self._has_measured = False

    @staticmethod
    def is_asked(groups: Sequence[Group]) -> bool:
        """Return whether a rule of some param groups follows heads."""
        return bool(_names(groups))

    def attach(self, groups: Sequence[Group], model: nn.Module) -> None:
        """Find the attentions of a model and measure them from now on, if a rule of the param groups asks for it.

        Raises:
            ValueError: an attention that a rule does not fit, or that cannot be measured or rescaled.
        """
        names = _names(groups)
        if not names:
            return
        attentions, complaints = attentions_of(model)
        places = {id(param): (k, i) for k, group in enumerate(groups) for i, param in enumerate(group["params"])}
        known: dict[str, tuple[int, int]] = {}
        for attention in attentions:
            missing = [name for name, param in attention.parameters.items() if id(param) not in places]
            if missing:
                complaints.append(
                    (attention.name, f"has weights that no param group has, as {missing[0]} [weights-without-group]")
                )
                continue
            own = {name: places[id(param)] for name, param in attention.parameters.items()}
            known |= own
            complaints += _complaints(attention, [groups[k] for k, _ in own.values()])
        if not attentions and not complaints:
            complaints.append(("this model", "has no trained attention [no-attention]"))
        source = source_of(attentions) if not complaints else ""
        if isinstance(source, str):
            lines = first_few(_joined(complaints) or [source], 5, "\n  - ")
            raise ValueError(f"{names} cannot work with this model:\n  - {lines}")
        self._known = _Known(attentions, source, known)
        if is_rank_zero():
            heads = sum(attention.heads.queries for attention in attentions)
            logger().info("%s: %d heads of %d attentions are measured", names, heads, len(attentions))

    def complaints(
        self,
        groups: Sequence[Group],
        layout: StepLayout,
        replicate_group: ProcessGroup | None,
    ) -> Iterator[str]:
        """Say why the rules of the param groups cannot follow heads in a step."""
        names = _names(groups)
        if not names:
            return
        if self._known is None:
            if all(has_data(local_of(param)) for group in groups for param in group["params"][:1]):
                yield NO_MODEL.format(rules=names)
            return
        from torch import distributed as dist

        count = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if not layout.process_groups and replicate_group is None and count > 1:
            yield NO_RANKS.format(rules=names, count=count)

    def begin(self, groups: Sequence[Group], layout: StepLayout) -> None:
        """Take the largest logits since the last step, over all ranks; they have agreed that they take a step.

        Raises:
            RuntimeError: nothing was measured before the first step, on any rank; raised on all of them.
        """
        names = _names(groups)
        if self._known is None or not names or self._logits is not None:
            return
        device = local_of(next(param for group in groups for param in group["params"])).device
        own = []
        for attention, logits in zip(self._known.attentions, self._known.source.pop(), strict=True):
            none = torch.full((attention.heads.queries,), -math.inf, device=device)
            own.append(none if logits is None else logits.to(device).nan_to_num(nan=math.inf))
        logits = torch.cat(own)
        if layout.root is not None:
            from hf_muon.distributed.agreement import maxima

            logits = maxima(layout.root, device, logits)
        logits = logits.cpu()
        self._has_measured = self._has_measured or float(logits.max()) > -math.inf
        if not self._has_measured:
            refuse([UNMEASURED.format(rules=names)])
        self._logits = logits

    def forget(self) -> None:
        """Drop what was measured for a step that has failed."""
        self._logits = None

    def finish(
        self, groups: Sequence[Group], partitions: Partitions | None, *, complete: bool = True
    ) -> tuple[dict[str, float], int]:
        """Rescale rows as rules say, in the parameters that stand in the groups.

        Args:
            groups: param groups.
            partitions: flat partitions that stand in the place of parameters; None where there are none.
            complete: whether no other partitions follow in this step.

        Returns:
            The largest logit of each attention, by its name, and the number of query heads that were rescaled.
        """
        if self._known is None or self._logits is None:
            return {}, 0
        values = self._logits
        if complete:
            self._logits = None
        sizes = [attention.heads.queries for attention in self._known.attentions]
        largest, count = {}, 0
        for attention, logits in zip(self._known.attentions, torch.split(values, sizes), strict=True):
            if (highest := float(logits.max())) > -math.inf:
                largest[attention.name] = highest
            # What overflowed says nothing about how far it is from a threshold.
            factors = self._factors(groups, attention, logits.masked_fill(logits.isinf(), -math.inf))
            if factors is not None:
                count += int((factors[1 : 1 + attention.heads.queries] != 1).sum())
                self._apply(groups, partitions, attention, factors)
        return largest, count

    def _factors(self, groups: Sequence[Group], attention: Attention, logits: Tensor) -> Tensor | None:
        """Return the factors ``[1, query heads, key heads, rotary parts]`` of an attention; None where all are 1."""
        assert self._known is not None
        group = groups[self._known.places[next(iter(attention.rows))][0]]
        heads = attention.heads
        sizes = {"query": heads.queries, "key": heads.keys, "query_rotary": heads.queries}
        factors = {role: torch.ones(size) for role, size in sizes.items()}
        for rule in of_heads(group):
            assert rule.head_factors is not None
            for role, own in rule.head_factors(logits, heads, group).items():
                factors[role] = factors[role] * own
        joined = torch.cat([torch.ones(1), *factors.values()])
        return None if bool((joined == 1).all()) else joined

    def _apply(
        self, groups: Sequence[Group], partitions: Partitions | None, attention: Attention, factors: Tensor
    ) -> None:
        """Multiply the rows of an attention's weights and biases."""
        assert self._known is not None
        for name, rows in attention.rows.items():
            own = factors[torch.tensor(rows.roles)]
            if bool((own == 1).all()):
                continue
            if partitions is None:
                k, i = self._known.places[name]
                scale_rows_(groups[k]["params"][i], own, int(rows.transposed))
                continue
            for flat in (param for group in groups for param in group["params"] if param in partitions):
                partition = partitions[flat]
                for part in partition.slices:
                    if unwrapped(part.name) == name:
                        scale_rows_of_slice_(flat, part, partition.rank, own, int(rows.transposed))


def _names(groups: Sequence[Group]) -> str:
    """Return the rules of some groups that follow heads, with their options, for errors; empty if there are none."""
    return ", ".join(dict.fromkeys(rule.name for group in groups for rule in of_heads(group)))


def _joined(complaints: Sequence[tuple[str, str]]) -> list[str]:
    """Return each text of the complaints once, with the first of the modules that it is about and their number."""
    names: dict[str, list[str]] = {}
    for name, text in complaints:
        names.setdefault(text, []).append(name)
    return [f"{of[0]}{f' and {len(of) - 1} more' if of[1:] else ''} {text}" for text, of in names.items()]


def _complaints(attention: Attention, groups: Sequence[Group]) -> Iterator[tuple[str, str]]:
    """Yield the attention's name and why rules of the groups that hold its parameters do not fit it."""
    for rule in registry.RULES.values():
        if rule.head_factors is None:
            continue
        for option in rule.options:
            values = list(dict.fromkeys(repr(group.get(option)) for group in groups))
            if len(values) > 1:
                yield (
                    attention.name,
                    f"is in param groups that have {option}={values[0]} and {values[1]} [options-within-attention]",
                )
        complain = rule.head_complaint if rule in of_heads(groups[0]) else None
        if complain is not None and (text := complain(attention.heads, groups[0])):
            yield attention.name, f"({type(attention.module).__name__}) {text}"
