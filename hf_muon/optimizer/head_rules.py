"""Rules about attention heads: measure their logits, and rescale their rows after a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_muon.diagnostics.log import first_few, is_rank_zero, logger
from hf_muon.distributed.ranks import Ranks
from hf_muon.optimizer.agreement import refuse
from hf_muon.optimizer.layout import StepLayout
from hf_muon.routing.attention import attentions_of
from hf_muon.routing.attention_logits import measure
from hf_muon.routing.parameters import unwrapped
from hf_muon.rules import registry
from hf_muon.rules.heads import Attention, LogitsOf
from hf_muon.rules.rule import Rule
from hf_muon.storage.partitions import Partitions
from hf_muon.storage.tensors import has_data, is_dtensor, local_of

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


class HeadRules:
    """Measures the heads of a model's attentions, and rescales their rows by rules after each step.

    Before `attach`, and if there is no rule about heads, the other methods do nothing.
    """

    def __init__(self) -> None:
        self._attentions: list[Attention] = []
        self._logits_of: LogitsOf | None = None
        # By the name of a parameter: its param group, and its index in the group.
        self._places: dict[str, tuple[int, int]] = {}
        # Those of this step, on the host.
        self._logits: Tensor | None = None
        self._has_measured = False

    def attach(self, groups: Sequence[Group], model_of: Callable[[], nn.Module]) -> None:
        """Find the attentions of a model and measure them from now on, if a rule of the param groups asks for it.

        Args:
            groups: param groups.
            model_of: returns the model; called if a rule asks for it.

        Raises:
            ValueError: an attention that a rule does not fit, or that cannot be measured or rescaled.
        """
        names = _names(groups)
        if not names:
            return
        attentions, complaints = attentions_of(model_of())
        of_groups = {id(param): (k, i) for k, group in enumerate(groups) for i, param in enumerate(group["params"])}
        places: dict[str, tuple[int, int]] = {}
        for attention, parameters in attentions.items():
            missing = [name for name, param in parameters.items() if id(param) not in of_groups]
            if missing:
                complaints.append(
                    (attention.name, f"has weights that no param group has, as {missing[0]} [weights-without-group]")
                )
                continue
            of_attention = {name: of_groups[id(param)] for name, param in parameters.items()}
            places |= of_attention
            complaints += _complaints(attention, [groups[k] for k, _ in of_attention.values()])
        if not attentions and not complaints:
            complaints.append(("this model", "has no trained attention [no-attention]"))
        logits_of = measure([*attentions]) if not complaints else ""
        if isinstance(logits_of, str):
            lines = first_few(_joined(complaints) or [logits_of], 5, "\n  - ")
            raise ValueError(f"{names} cannot work with this model:\n  - {lines}")
        self._attentions, self._logits_of, self._places = [*attentions], logits_of, places
        if is_rank_zero():
            heads = sum(attention.heads.queries for attention in attentions)
            logger().info("%s: %d heads of %d attentions are measured", names, heads, len(attentions))

    def complaints(
        self,
        groups: Sequence[Group],
        layout: StepLayout,
        replicate_group: ProcessGroup | None,
    ) -> Iterator[str]:
        """Return why the rules of the param groups cannot be applied to heads in a step."""
        names = _names(groups)
        if not names:
            return
        if self._logits_of is None:
            if all(has_data(local_of(param)) for group in groups for param in group["params"][:1]):
                yield NO_MODEL.format(rules=names)
            return
        from torch import distributed as dist

        count = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if not layout.process_groups and replicate_group is None and count > 1:
            yield NO_RANKS.format(rules=names, count=count)

    def begin(self, groups: Sequence[Group], layout: StepLayout, *, is_first: bool) -> None:
        """Take the largest logits since the last step, over all ranks; they have agreed that they take a step.

        Args:
            groups: param groups.
            layout: the layout of these groups.
            is_first: whether this is the first or only part of a step, which a framework may take partition by
                partition. The other parts follow the same logits.

        Raises:
            RuntimeError: nothing was measured before the first step, on any rank; raised on all of them.
        """
        names = _names(groups)
        if self._logits_of is None or not names or not (is_first or self._logits is None):
            return
        device = local_of(next(param for group in groups for param in group["params"])).device
        measured = []
        for attention, logits in zip(self._attentions, self._logits_of(), strict=True):
            none = torch.full((attention.heads.queries,), -math.inf, dtype=torch.float32, device=device)
            # NaN as infinity, which a maximum over ranks keeps and `finish` ignores.
            infinite = {"nan": math.inf, "posinf": math.inf, "neginf": -math.inf}  # else those become large numbers
            measured.append(none if logits is None else logits.to(device).nan_to_num(**infinite))
        logits = torch.cat(measured)
        logits = Ranks(layout.root, device).maxima(logits).cpu()
        self._has_measured = self._has_measured or float(logits.max()) > -math.inf
        if not self._has_measured:
            refuse([UNMEASURED.format(rules=names)])
        self._logits = logits

    def finish(
        self, groups: Sequence[Group], partitions: Partitions | None, *, complete: bool = True
    ) -> tuple[dict[str, float], int]:
        """Rescale rows as rules say, in the parameters that are in the groups.

        Args:
            groups: param groups.
            partitions: flat partitions in place of parameters; None where there are none.
            complete: whether no other part of the step follows.

        Returns:
            The largest logit of each attention, by its name, and the number of query heads that were rescaled.
        """
        largest: dict[str, float] = {}
        count = 0
        measured = self._logits
        if measured is None:
            return largest, count
        if complete:
            self._logits = None
        sizes = [attention.heads.queries for attention in self._attentions]
        for attention, logits in zip(self._attentions, torch.split(measured, sizes), strict=True):
            if (highest := float(logits.max())) > -math.inf:
                largest[attention.name] = highest
            group = groups[self._places[next(iter(attention.rows))][0]]
            # Ignore overflowed (inf) logits: their distance to a threshold is unknown.
            factors = _factors(group, attention, logits.masked_fill(logits.isinf(), -math.inf))
            if bool((factors == 1).all()):
                continue
            count += int((factors[1 : 1 + attention.heads.queries] != 1).sum())
            for name, rows in attention.rows.items():
                of_outputs = factors[torch.tensor(rows.roles, dtype=torch.int64, device="cpu")]
                for stored, outputs in self._stored(groups, partitions, name, int(rows.transposed)):
                    exact = torch.promote_types(stored.dtype, torch.float32)
                    stored.copy_(stored.to(exact) * of_outputs[outputs].to(stored.device, exact))
        return largest, count

    def _stored(
        self, groups: Sequence[Group], partitions: Partitions | None, name: str, dim: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what this rank stores of a weight or bias, with the index along `dim` of each element, to broadcast."""
        if partitions is None:
            k, i = self._places[name]
            param = groups[k]["params"][i]
            ranges: Sequence[tuple[int, int]] = [(0, param.shape[dim])]
            if is_dtensor(param):
                from hf_muon.storage.dtensor import own_region

                ranges = own_region(param, param.shape).dims[dim]
            # Empty on a rank without rows.
            every = [k for start, stop in ranges for k in range(start, stop)]
            outputs = torch.tensor(every, dtype=torch.int64, device="cpu")
            yield local_of(param), outputs.view([-1 if d == dim else 1 for d in range(param.ndim)])
            return
        for flat in (param for group in groups for param in group["params"] if param in partitions):
            rank = partitions[flat].rank
            for slice_ in partitions[flat].slices:
                if unwrapped(slice_.name) == name:
                    elements = torch.arange(*slice_.division.held(rank)[:2], dtype=torch.int64, device="cpu")
                    columns = math.prod(slice_.shape[1:])
                    yield flat[slice_.elements(rank)], elements % columns if dim else elements // columns


def _factors(group: Group, attention: Attention, logits: Tensor) -> Tensor:
    """Return the factors ``[1, query heads, key heads, rotary parts of query heads]`` of an attention."""
    heads = attention.heads
    factors = {"query": logits.new_ones(heads.queries), "key": logits.new_ones(heads.keys)}
    factors["query_rotary"] = logits.new_ones(heads.queries)
    for rule in of_heads(group):
        assert rule.head_factors is not None
        for role, of_role in rule.head_factors(logits, heads, group).items():
            factors[role] = factors[role] * of_role
    return torch.cat([logits.new_ones(1), *factors.values()])


def _names(groups: Sequence[Group]) -> str:
    """Return the rules of some groups that follow heads, with their options, for errors; empty if there are none."""
    return ", ".join(dict.fromkeys(rule.name for group in groups for rule in of_heads(group)))


def _joined(complaints: Sequence[tuple[str, str]]) -> list[str]:
    """Return each text of the complaints once, with the first of the modules that it is about and their number."""
    names: dict[str, list[str]] = {}
    for name, text in complaints:
        names.setdefault(text, []).append(name)
    return [f"{some[0]}{f' and {len(some) - 1} more' if some[1:] else ''} {text}" for text, some in names.items()]


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
