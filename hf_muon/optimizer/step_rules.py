"""The rules of a Muon group in one step: what they are called with, and where what they return goes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.distributed.exchange import Exchange
from hf_muon.distributed.pieces import Piece, UpdatesOf
from hf_muon.distributed.units import Unit
from hf_muon.math.torch_private import storage_id
from hf_muon.optimizer.layout import GroupWork, Matrix
from hf_muon.optimizer.rule_state import flat_zeros, is_reduced, reduced_numel, reduced_shape, rule_keys
from hf_muon.rules import registry
from hf_muon.rules.rule import Rule
from hf_muon.storage.factors import KEY
from hf_muon.storage.tensors import local_of

Group = Mapping[str, Any]

_NOT_OPTIONS = ("params", "param_names", "views", KEY)


def hyperparameters(group: Group, number: int) -> dict[str, Any]:
    """Return the options of a group as they are in one step.

    Args:
        group: a param group.
        number: of the step, from one.
    """
    options = {name: value for name, value in group.items() if name not in _NOT_OPTIONS}
    for rule in registry.rules_of(group):
        if rule.hyperparameters is not None:
            options |= rule.hyperparameters(options, number)
    return options


class StepRules:
    """Calls the functions of the rules that a Muon group follows.

    Args:
        group: the param group.
        work: of the group.
        active: the matrices to step, by their position.
        weights: what this rank stores of each of them.
        state: of the group's parameters.
        options: of this step, from `hyperparameters`.
        number: of the step, from one.
    """

    def __init__(
        self,
        group: Group,
        work: GroupWork,
        active: Mapping[int, Matrix],
        weights: Mapping[int, Tensor],
        state: Mapping[Tensor, Any],
        options: Mapping[str, Any],
        number: int,
    ) -> None:
        rules = registry.rules_of(group)
        self._on_updates = [rule for rule in rules if rule.update is not None]
        self._on_directions = [rule for rule in rules if rule.direction is not None]
        self._on_applying = [rule for rule in rules if rule.apply is not None]
        self.decays = any(rule.decays for rule in rules)
        """Whether a rule takes care of the weight decay."""
        self._active = active
        self._weights = weights
        self._options = options
        self._number = number
        self._stored: dict[int, dict[str, Tensor]] = {}  # by matrix, stored like the weights
        self._reduced: dict[str, dict[int, Tensor]] = {}  # by key and matrix
        for key in rule_keys(group):
            if is_reduced(key):
                self._reduced[key] = _of_matrices(group, work.matrices, state, key)
            else:
                for k, matrix in active.items():
                    own = local_of(state[group["params"][matrix.param]][key])
                    self._stored.setdefault(k, {})[key] = matrix.of(own)

    def release(self, exchanges: Sequence[Exchange]) -> None:
        """Have exchanges, which stay until the next step, let go of this one."""
        for exchange in exchanges:
            exchange.rule = None

    def updates_of(self, updates_of: UpdatesOf) -> UpdatesOf:
        """Return what computes updates, changed by rules."""
        if not self._on_updates:
            return updates_of

        def changed(pieces: Sequence[Piece], others: Sequence[Piece] = ()) -> list[Tensor]:
            every = [*pieces, *others]  # a rule may have state that moves with every update
            updates = [self._changed(piece, update) for piece, update in zip(every, updates_of(every), strict=True)]
            return updates[: len(pieces)]

        return changed

    def _changed(self, piece: Piece, update: Tensor) -> Tensor:
        weight = piece.of(self._weights[piece.matrix]).to(update.device)
        for rule in self._on_updates:
            assert rule.update is not None
            with _Brought(self._stored.get(piece.matrix, {}), rule, piece, update.device) as state:
                update = rule.update(update, weight, state, self._options, self._number)
                if any(_share_memory(update, other) for other in (weight, *state.values())):
                    update = update.clone()  # what orthogonalizes updates overwrites them
        return update

    def attach(self, exchange: Exchange) -> None:
        """Have an exchange pass whole directions to the rules."""
        exchange.rule = self._directed if self._on_directions else None

    def _directed(self, unit: Unit, directions: Tensor) -> Tensor:
        """Return the directions of a unit ``(B, m, n)`` as rules change them, in their dtype."""
        transposed = self._active[unit.ranges[0].matrix].transposed
        changed = directions.to(torch.promote_types(directions.dtype, torch.float32))
        changed = changed.mT if transposed else changed
        for rule in self._on_directions:
            assert rule.direction is not None
            slices = {key: self._slices(unit, key) for key in rule.state if is_reduced(key)}
            state = {key: torch.cat(own).to(changed.device) for key, own in slices.items()}
            changed = rule.direction(changed, state, self._options, self._number)
            for key, own in slices.items():
                for stored, new in zip(own, torch.split(state[key], [len(part) for part in own]), strict=True):
                    stored.copy_(new)
        return (changed.mT if transposed else changed).to(directions.dtype)

    def _slices(self, unit: Unit, key: str) -> list[Tensor]:
        """Return the state of a unit's matrices: a view for each of its ranges, ``(b, ...)``."""
        return [self._reduced[key][matrix][start:stop] for matrix, start, stop in unit.ranges]

    def share(self, exchange: Exchange) -> None:
        """Copy what the owners of matrices have written into small state to all ranks."""
        if self._reduced and self._on_directions:
            exchange.share(self._active, lambda unit: [own for key in self._reduced for own in self._slices(unit, key)])

    def applied(
        self, pieces: Sequence[Piece], directions: Sequence[Tensor], weights: Sequence[Tensor], scales: Sequence[float]
    ) -> list[Tensor]:
        """Return the directions that are applied to some weights."""
        if not self._on_applying:
            return list(directions)
        changed = []
        for piece, direction, weight, scale in zip(pieces, directions, weights, scales, strict=True):
            exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
            own = direction.to(exact)
            options, factor = self._options, self._active[piece.matrix].factor
            if factor != 1:
                options = {**options, "lr": options["lr"] * factor}
            for rule in self._on_applying:
                assert rule.apply is not None
                with _Brought(self._stored.get(piece.matrix, {}), rule, piece, own.device) as state:
                    own = rule.apply(own, exact, state, options, self._number, scale)
            changed.append(own)
        return changed


class _Brought:
    """The state of a piece that a rule reads and writes, on the device where it does."""

    def __init__(self, stored: Mapping[str, Tensor], rule: Rule, piece: Piece, device: torch.device) -> None:
        self._own = {key: piece.of(stored[key]) for key in rule.state if key in stored}
        self._present = {key: own.to(device) for key, own in self._own.items()}

    def __enter__(self) -> dict[str, Tensor]:
        return self._present

    def __exit__(self, *error: object) -> None:
        for key, own in self._own.items():
            if self._present[key] is not own:
                own.copy_(self._present[key])


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return storage_id(one) == storage_id(other)


def _of_matrices(group: Group, matrices: Sequence[Matrix], state: Mapping[Tensor, Any], key: str) -> dict[int, Tensor]:
    """Return the small state of each matrix, a view of that of its parameter, which is created where it is missing."""
    shapes = {k: reduced_shape(one.shape, transposed=one.transposed) for k, one in enumerate(matrices)}
    by_param: dict[int, list[int]] = {}
    for k, matrix in enumerate(matrices):
        by_param.setdefault(matrix.param, []).append(k)
    return dict(_cut(group, state, key, by_param, shapes))


def _cut(
    group: Group,
    state: Mapping[Tensor, Any],
    key: str,
    by_param: Mapping[int, Sequence[int]],
    shapes: Mapping[int, tuple[int, int, int]],
) -> Iterator[tuple[int, Tensor]]:
    for i, members in by_param.items():
        param, numel = group["params"][i], reduced_numel(shapes[k] for k in members)
        own = state[param]
        if key not in own or own[key].numel() != numel:  # of a flat partition, whose matrices only its layout knows
            own[key] = flat_zeros(param, numel)
        parts = torch.split(own[key], [math.prod(shapes[k]) for k in members])
        yield from ((k, part.view(shapes[k])) for k, part in zip(members, parts, strict=True))
