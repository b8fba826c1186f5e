"""The rules that a Muon group follows in one step: where they change the step, and the state that they keep."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.distributed.exchange import Exchange, UpdatesOf
from hf_muon.distributed.units import Matrix, Piece, Unit
from hf_muon.optimizer.state import flat_zeros, row_shape
from hf_muon.rules import registry
from hf_muon.rules.rule import Direction, Rule
from hf_muon.storage.factors import KEY
from hf_muon.storage.tensors import local_of

Group = Mapping[str, Any]
State = Mapping[Tensor, dict[str, Any]]
Orthogonalize = Callable[[Tensor], Tensor]

_NOT_OPTIONS = ("params", "param_names", "views", KEY)


def hyperparameters(group: Group, number: int) -> dict[str, Any]:
    """Return the options of a group in one step, after its rules have changed them.

    Args:
        group: a param group.
        number: the number of the step, from one.
    """
    options = {name: value for name, value in group.items() if name not in _NOT_OPTIONS}
    for rule in registry.rules_of(group):
        if rule.hyperparameters is not None:
            options |= rule.hyperparameters(options, number)
    return options


class RulesOfStep:
    """The rules of a Muon group in one step. Without rules, each method returns what it is given.

    Args:
        group: a param group.
        number: the number of the step, from one.
        options: the options of the group in this step, from `hyperparameters`.
        matrices: all matrices of the group.
        state: the state of its parameters; complete.

    Attributes:
        options: the options of the group in this step, after rules have changed them.
        decay: whether a rule takes care of weight decay.
    """

    def __init__(
        self, group: Group, number: int, options: Mapping[str, Any], matrices: Sequence[Matrix], state: State
    ) -> None:
        rules = registry.rules_of(group)
        kinds = registry.state_of(group)
        self.options = options
        self.decay = any(rule.decays for rule in rules)
        self._number = number
        self._matrices = matrices
        self._on_update = [(rule, rule.update) for rule in rules if rule.update is not None]
        self._on_direction = registry.on_directions(group)
        self._on_apply = [(rule, rule.apply) for rule in rules if rule.apply is not None]
        self._row_keys = [key for key, kind in kinds.items() if kind == "row"]
        self._states = _by_matrix_(group, kinds, matrices, state)

    def updates_of(self, momentum: UpdatesOf, grads: Mapping[int, Tensor], weights: Mapping[int, Tensor]) -> UpdatesOf:
        """Return a function that moves momentum and returns updates as rules change them.

        Args:
            momentum: does so without rules.
            grads: what this rank stores of each matrix's gradient, by the position of the matrix.
            weights: what it stores of each matrix, likewise.
        """
        return functools.partial(self._updates, momentum, grads, weights) if self._on_update else momentum

    def _updates(
        self,
        momentum: UpdatesOf,
        grads: Mapping[int, Tensor],
        weights: Mapping[int, Tensor],
        pieces: Sequence[Piece],
        moved_only: Sequence[Piece] = (),
    ) -> list[Tensor]:
        updates = []
        # All of them: a rule may have state that moves with every update.
        every = [*pieces, *moved_only]
        for piece, computed in zip(every, momentum(every), strict=True):
            weight, grad, update = piece.of(weights[piece.matrix]), piece.of(grads[piece.matrix]), computed
            for rule, function in self._on_update:
                state = self._state_of(piece, rule)
                update = function(update, grad, weight, state, self.options, self._number)
                # Orthogonalization overwrites updates.
                if any(
                    update.untyped_storage() is other.untyped_storage() for other in (grad, weight, *state.values())
                ):
                    update = update.clone()
            updates.append(update)
        return updates[: len(pieces)]

    def directions(self, unit: Unit, updates: Tensor, orthogonalize: Orthogonalize) -> Tensor:
        """Return the directions of whole matrices ``(B, m, n)``; the first rule gets the updates.

        Args:
            unit: the matrices.
            updates: their updates ``(B, m, n)``; may be overwritten.
            orthogonalize: returns directions ``(B, m, n)`` without rules, and overwrites its argument.
        """
        if not self._on_direction:
            return orthogonalize(updates)
        transposed = self._matrices[unit.ranges[0].matrix].transposed

        # Rules get (B, out, in). What is orthogonalized is stored as (B, m, n), as without rules.
        def turned(matrices: Tensor) -> Tensor:
            return matrices.mT if transposed else matrices

        def direct(matrices: Tensor) -> Tensor:
            return turned(orthogonalize(turned(matrices).contiguous()).float())

        for rule, function in reversed(self._on_direction):
            direct = functools.partial(self._directions_of, unit, rule, function, direct)
        return turned(direct(turned(updates.float())))

    def _directions_of(
        self, unit: Unit, rule: Rule, function: Direction, orthogonalize: Orthogonalize, updates: Tensor
    ) -> Tensor:
        """Return the directions of whole matrices ``(B, out, in)`` that a rule makes, and store its state by row."""
        slices = {key: self._rows(unit, key) for key in rule.state if key in self._row_keys}
        state = {key: torch.cat(rows).to(updates.device) for key, rows in slices.items()}
        directions = function(updates, orthogonalize, state, self.options, self._number)
        for key, rows in slices.items():
            for stored, new in zip(rows, torch.split(state[key], list(map(len, rows))), strict=True):
                stored.copy_(new)
        return directions

    def applied(
        self,
        pieces: Sequence[Piece],
        directions: Sequence[Tensor],
        weights: Sequence[Tensor],
        scales: Mapping[int, float],
    ) -> Sequence[Tensor]:
        """Return the directions of some pieces as rules change them before weights move.

        Args:
            pieces: where the directions lie.
            directions: one for each piece.
            weights: likewise; not changed.
            scales: what the directions of each matrix are multiplied by, by the position of the matrix.
        """
        if not self._on_apply:
            return directions
        return [
            self._applied(piece, direction, weight, scales[piece.matrix])
            for piece, direction, weight in zip(pieces, directions, weights, strict=True)
        ]

    def _applied(self, piece: Piece, direction: Tensor, weight: Tensor, scale: float) -> Tensor:
        exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
        direction = direction.to(exact)
        options, factor = self.options, self._matrices[piece.matrix].factor
        if factor != 1:
            options = {**options, "lr": options["lr"] * factor}
        for rule, function in self._on_apply:
            direction = function(direction, exact, self._state_of(piece, rule), options, self._number, scale)
        return direction

    def share_rows(self, exchange: Exchange, active: Mapping[int, Matrix]) -> None:
        """Copy the state by row of matrices that were stepped from their owners to all ranks."""
        if self._row_keys:
            exchange.share(active, lambda unit: [rows for key in self._row_keys for rows in self._rows(unit, key)])

    def _state_of(self, piece: Piece, rule: Rule) -> dict[str, Tensor]:
        """Return a rule's state of the kind `weight`; views of the piece."""
        stored = self._states[piece.matrix]
        return {key: piece.of(stored[key]) for key in rule.state if key not in self._row_keys}

    def _rows(self, unit: Unit, key: str) -> list[Tensor]:
        """Return the state by row of a unit's matrices: a view ``(b, out, 1)`` for each of its ranges."""
        return [self._states[matrix][key][start:stop] for matrix, start, stop, _ in unit.ranges]


def _by_matrix_(
    group: Group, kinds: Mapping[str, str], matrices: Sequence[Matrix], state: State
) -> dict[int, dict[str, Tensor]]:
    """Return what this rank stores of the state of rules: by matrix and key, views like the weight or ``(B, out, 1)``.

    Write missing state by row of a flat partition into `state`: only its layout knows its matrices.
    """
    states: dict[int, dict[str, Tensor]] = {k: {} for k in range(len(matrices))}
    for key, kind in kinds.items():
        for i, positions in itertools.groupby(states, key=lambda k: matrices[k].param):
            param, of_param = group["params"][i], list(positions)
            if kind == "row":
                shapes = [row_shape(matrices[k].shape, transposed=matrices[k].transposed) for k in of_param]
                stored, numels = state[param], list(map(math.prod, shapes))
                if key not in stored or stored[key].numel() != sum(numels):
                    stored[key] = flat_zeros(param, sum(numels))
                flats = torch.split(stored[key], numels)
                stored_of = [flat.view(shape) for flat, shape in zip(flats, shapes, strict=True)]
            else:
                stored_of = [matrices[k].of(local_of(state[param][key])) for k in of_param]
            for k, of_matrix in zip(of_param, stored_of, strict=True):
                states[k][key] = of_matrix
    return states
