"""What the optimizer in a file of a DeepSpeed checkpoint consists of, whatever the stage that wrote it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_muon.integrations.deepspeed.index import Copy, Index, StoredPartition
from hf_muon.optimizer.rule_state import is_reduced, reduced_numel, reduced_shapes
from hf_muon.optimizer.state_check import steps_of
from hf_muon.routing.parameters import unwrapped


class Stored(NamedTuple):
    """The optimizer in a file: master weights and moments, flat, by the number of the partition.

    Attributes:
        about: what DeepSpeed stores beside.
        groups: the param groups.
        masters: the fp32 weights; shorter than the partition where DeepSpeed leaves padding out.
        states: moments, and AdamW's count of steps.
        numbers: of the param groups.
    """

    about: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    masters: Sequence[Tensor]
    states: Sequence[Mapping[str, Any]]
    numbers: Sequence[int]

    @staticmethod
    def of(content: Mapping[str, Any], index: Index) -> Stored:
        """Return what a file holds."""
        about = content["optimizer_state_dict"] if index.stage else content["optimizer"]
        muon = about.get("base_optimizer_state", about.get("optimizer_state_dict", about))
        masters = about.get("fp32_flat_groups", about.get("single_partition_of_fp32_groups"))
        if masters is None and "fp32_groups" in about:
            masters = [one for group in about["fp32_groups"] for one in group]
        elif masters is None:
            weights = {unwrapped(name): weight for name, weight in content["module"].items()}
            masters = [weights[name] for name in index.parameters]
        keys = {number: iter(group["params"]) for number, group in enumerate(muon["param_groups"])}
        numbers = [part.group for part in index.partitions]
        states = [muon["state"].get(next(keys[number]), {}) for number in numbers]
        flat = [{key: _flat(value) for key, value in state.items()} for state in states]
        return Stored(about, muon["param_groups"], [_flat(one) for one in masters], flat, numbers)

    @property
    def steps(self) -> list[int | None]:
        """The steps that each param group has taken."""
        return [steps_of(group.get("step")) for group in self.groups]

    def zeros_like(self, part: StoredPartition) -> dict[str, Any]:
        """Return moments of zeros for a partition of the same param group, with the counts of its steps."""
        state = next((one for one, number in zip(self.states, self.numbers, strict=True) if number == part.group), {})
        return {
            key: value.clone() if key == "step" else torch.zeros(part.numel, dtype=value.dtype)
            for key, value in state.items()
            if not is_reduced(key)
        }

    def small_states(self, source: Index, target: Index) -> list[dict[str, Tensor]]:
        """Return the state of rules for each partition of another layout; each file has that of whole parameters."""
        by_name: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for part, state in zip(source.partitions, self.states, strict=True):
            for key in filter(is_reduced, state):
                numels = self._small_numels(part, key)
                if sum(numels) == len(state[key]):  # the check of the state misses it otherwise
                    for name, own in zip(part.parameters, torch.split(state[key], numels), strict=True):
                        by_name[key][name] = own
        return [
            {
                key: torch.cat([of[name] for name in part.parameters])
                for key, of in by_name.items()
                if all(name in of for name in part.parameters)
            }
            for part in target.partitions
        ]

    def _small_numels(self, part: StoredPartition, key: str) -> list[int]:
        """Return how many elements of a rule's state each parameter of a partition has."""
        group = self.groups[part.group]
        names = [unwrapped(name) for name in group["param_names"]]
        views = dict(zip(names, group.get("views") or [""] * len(names), strict=True))
        shapes = [reduced_shapes(one.shape, views[name]) for name, one in part.parameters.items()]
        return [reduced_numel(own) for own in shapes]

    def state_dict(self, index: Index, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a Muon's state dict with moments of other partitions."""
        groups = [{**group, "params": []} for group in self.groups]
        order = sorted(range(len(states)), key=lambda k: index.partitions[k].group)
        state = {}
        for key, k in enumerate(order):
            part = index.partitions[k]
            groups[part.group]["params"].append(key)
            shape = next(iter(part.parameters.values())).shape if index.stage == 0 else (part.numel,)
            state[key] = {
                name: v if name == "step" or is_reduced(name) else v.view(shape) for name, v in states[k].items()
            }
        return {"state": state, "param_groups": groups}


def _flat(value: Any) -> Any:
    return value.detach().reshape(-1) if isinstance(value, Tensor) and value.ndim else value


def move(stored: Mapping[str, Any], state: dict[str, Any], one: Copy) -> Iterator[str]:
    """Copy moments; a moment that the file lacks is removed, and missed by the check of the state."""
    for key, value in list(state.items()):
        if key not in stored:
            del state[key]
        elif key == "step":
            if steps_of(stored[key]) != steps_of(value):
                yield f"parameters that share a partition here have taken {value:g} and {stored[key]:g} steps of AdamW"
        else:
            value[one.at :][: one.numel] = stored[key][one.begin :][: one.numel]
