"""The step of one param group: Muon with its exchanges, or AdamW."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hf_muon.distributed.exchange import UpdatesOf
from hf_muon.distributed.units import Matrix, Piece, Unit
from hf_muon.math.adamw import Stepped, adamw_
from hf_muon.math.coefficients import Steps, resolve
from hf_muon.math.moments import SCALES
from hf_muon.math.momentum import BUFFER, SCALE
from hf_muon.math.newton_schulz import newton_schulz_in_batches
from hf_muon.math.precision import compute_dtype
from hf_muon.math.update import apply_directions_, lr_scale
from hf_muon.optimizer import gradients
from hf_muon.optimizer.groups import rate_of
from hf_muon.optimizer.layout import GroupWork
from hf_muon.optimizer.moments import Momentum, adamw_offloaded_
from hf_muon.optimizer.state import STATE_KEYS, flat_zeros, is_offloaded, row_shape
from hf_muon.optimizer.watching import GroupWatch
from hf_muon.rules import registry
from hf_muon.rules.rule import Direction, Rule
from hf_muon.storage.factors import KEY, FactorRuns
from hf_muon.storage.tensors import local_of
from hf_muon.storage.transport import beside

Group = Mapping[str, Any]
State = Mapping[Tensor, dict[str, Any]]
Take = Callable[[GroupWatch | None], None]
"""Takes the step of a group, which something may watch."""

_NOT_OPTIONS = ("params", "param_names", "views", KEY)


def hyperparameters(group: Group, number: int) -> dict[str, Any]:
    """Return the options of a group in one step, after its rules have changed them.

    Args:
        group: a param group.
        number: of the step, from one.
    """
    options = {name: value for name, value in group.items() if name not in _NOT_OPTIONS}
    for rule in registry.rules_of(group):
        if rule.hyperparameters is not None:
            options |= rule.hyperparameters(options, number)
    return options


def prepared(
    groups: Sequence[Group],
    works: Sequence[GroupWork],
    indices: Sequence[Sequence[int]],
    state: State,
    max_batch_bytes: int,
) -> list[Take | None]:
    """Return the step of each group, ready to be taken: its options are read, and nothing has moved.

    Args:
        groups: param groups.
        works: of each group.
        indices: of the parameters of each group to step; a group without any has no step.
        state: of their parameters; complete.
        max_batch_bytes: as of `Muon`.
    """
    steps: list[Take | None] = []
    for group, work, own in zip(groups, works, indices, strict=True):
        number = group["step"] + 1  # the same for all partitions of a group
        if not own:
            steps.append(None)
        elif group["use_muon"]:
            steps.append(MuonStep(group, work, own, state, number, max_batch_bytes).take)
        else:
            steps.append(functools.partial(adamw_step, group, work, own, state, number, hyperparameters(group, number)))
    return steps


class MuonStep:
    """A step of a Muon group: momentum, orthogonalization and weights, round by round.

    An exchange calls `_update`, `_direction` and `_apply` for these three. Each calls the functions of rules for that
    point.

    Args:
        group: a param group.
        work: of the group.
        indices: of the parameters to step.
        state: of its parameters; complete.
        number: of the step, from one.
        max_batch_bytes: as of `Muon`.
    """

    def __init__(
        self,
        group: Group,
        work: GroupWork,
        indices: Sequence[int],
        state: State,
        number: int,
        max_batch_bytes: int,
    ) -> None:
        params = {i: group["params"][i] for i in indices}
        self._group = group
        self._work = work
        self._params = params
        self._number = number
        self._max_batch_bytes = max_batch_bytes
        self._options = hyperparameters(group, number)
        rules = registry.rules_of(group)
        self._on_update = [(rule, rule.update) for rule in rules if rule.update is not None]
        self._on_direction = registry.on_directions(group)
        self._on_apply = [(rule, rule.apply) for rule in rules if rule.apply is not None]
        self._active = {k: matrix for k, matrix in enumerate(work.matrices) if matrix.param in params}
        local = {i: local_of(param) for i, param in params.items()}
        moments = {
            i: {key: local_of(state[param][key]) for key in (BUFFER, SCALE) if key in state[param]}
            for i, param in params.items()
        }
        self._weights = {k: matrix.of(local[matrix.param]) for k, matrix in self._active.items()}
        self._moments = {
            k: {key: matrix.of(value) for key, value in moments[matrix.param].items()}
            for k, matrix in self._active.items()
        }
        self._rule_states = _rule_states(group, work.matrices, state)
        self._row_keys = [key for key, kind in registry.state_of(group).items() if kind == "row"]
        self._scales = {
            k: lr_scale(group["adjust_lr_fn"], matrix.out_in, group["update_rms"]) for k, matrix in self._active.items()
        }
        lr, decay = rate_of(group), self._options["weight_decay"]
        if any(rule.decays for rule in rules):
            decay = 0.0
        # What the weights of a matrix, and its direction, are multiplied by before they are added.
        self._rates = {
            k: (1 - lr * (decay * matrix.factor), -lr * (self._scales[k] * matrix.factor))
            for k, matrix in self._active.items()
        }

    def take(self, watch: GroupWatch | None = None) -> None:
        """Take the step, after all ranks have agreed on it.

        Args:
            watch: measures this step; None if it is not measured.
        """
        local = {i: gradients.local_grad(param) for i, param in self._params.items()}  # which may communicate
        grads = {k: matrix.of(local[matrix.param]) for k, matrix in self._active.items()}
        average = {key: self._options[key] for key in ("momentum", "nesterov")} | {"step": self._number}
        coefficients = resolve(self._options["ns_coefficients"], self._options["ns_steps"])
        for exchange in self._work.exchanges:
            dtype = compute_dtype(self._group["ns_dtype"], exchange.device.type, exchange.device.index)
            direction = functools.partial(self._direction, coefficients, dtype, watch)
            with Momentum(self._moments, grads, exchange.order(self._active), **average) as momentum:
                update = momentum.updates
                if self._on_update:
                    update = functools.partial(self._update, momentum.updates, grads)
                for pieces, directions in exchange.directions(self._active, update, direction, dtype):
                    self._apply(pieces, directions, watch)
                    del directions  # before the next ones are made
            if self._row_keys:
                exchange.share(
                    self._active, lambda unit: [own for key in self._row_keys for own in self._rows(unit, key)]
                )
        if watch is not None:
            watch.end({k: self._moments[k] for k in self._active}, self._options)

    def _update(
        self,
        updates_of: UpdatesOf,
        grads: Mapping[int, Tensor],
        pieces: Sequence[Piece],
        others: Sequence[Piece] = (),
    ) -> list[Tensor]:
        """Move the momentum of all these pieces, and return the updates of `pieces` as rules change them."""
        updates = []
        every = [*pieces, *others]  # a rule may have state that moves with every update
        for piece, computed in zip(every, updates_of(every), strict=True):
            weight = piece.of(self._weights[piece.matrix])
            update = computed.to(weight.device)
            grad = piece.of(grads[piece.matrix]).to(weight.device)
            for rule, function in self._on_update:
                state = self._state_of(piece, rule)
                update = function(update, grad, weight, state, self._options, self._number)
                if any(
                    update.untyped_storage() is other.untyped_storage() for other in (grad, weight, *state.values())
                ):
                    update = update.clone()  # what orthogonalizes updates overwrites them
            updates.append(update.to(computed.device))
        return updates[: len(pieces)]

    def _direction(
        self, coefficients: Steps, dtype: torch.dtype, watch: GroupWatch | None, unit: Unit, updates: Tensor
    ) -> Tensor:
        """Return the directions of whole matrices ``(B, m, n)`` as rules change them; updates are overwritten."""

        def orthogonalize(matrices: Tensor) -> Tensor:
            directions = newton_schulz_in_batches(matrices, coefficients, dtype, self._max_batch_bytes, overwrite=True)
            if watch is not None:
                watch.orthogonalized(unit, directions[: unit.count])
            return directions

        if watch is not None:
            watch.updates(unit, updates)
        return self._ruled(unit, updates, orthogonalize) if self._on_direction else orthogonalize(updates)

    def _ruled(self, unit: Unit, updates: Tensor, orthogonalize: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the directions of whole matrices ``(B, m, n)`` that rules make; the first rule gets the updates."""
        transposed = self._active[unit.ranges[0].matrix].transposed

        def turned(matrices: Tensor) -> Tensor:
            return matrices.mT if transposed else matrices

        def direct(matrices: Tensor) -> Tensor:
            return turned(orthogonalize(turned(matrices).contiguous()).float())

        for rule, function in reversed(self._on_direction):
            direct = functools.partial(self._directions_of_rule, unit, rule, function, direct)
        return turned(direct(turned(updates.float())))

    def _directions_of_rule(
        self, unit: Unit, rule: Rule, function: Direction, orthogonalize: Callable[[Tensor], Tensor], updates: Tensor
    ) -> Tensor:
        """Return the directions of whole matrices ``(B, out, in)`` that a rule makes, and store its state by row."""
        slices = {key: self._rows(unit, key) for key in rule.state if key in self._row_keys}
        state = {key: torch.cat(own).to(updates.device) for key, own in slices.items()}
        directions = function(updates, orthogonalize, state, self._options, self._number)
        for key, own in slices.items():
            for stored, new in zip(own, torch.split(state[key], list(map(len, own))), strict=True):
                stored.copy_(new)
        return directions

    def _apply(self, pieces: Sequence[Piece], directions: Sequence[Tensor], watch: GroupWatch | None) -> None:
        """Move the weights of some pieces by their directions, as rules change them."""
        weights = [piece.of(self._weights[piece.matrix]) for piece in pieces]
        if watch is not None:
            watch.directions(pieces, directions, [self._scales[piece.matrix] for piece in pieces], weights)
        directions = beside(directions, weights)
        if self._on_apply:
            directions = [self._applied(*each) for each in zip(pieces, directions, weights, strict=True)]
        apply_directions_(
            weights,
            directions,
            [self._rates[piece.matrix] for piece in pieces],
            step=self._number,
            rounding=self._group["weight_rounding"],
        )

    def _applied(self, piece: Piece, direction: Tensor, weight: Tensor) -> Tensor:
        """Return the direction of a piece after rules have changed it."""
        exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
        direction = direction.to(exact)
        options, factor = self._options, self._active[piece.matrix].factor
        if factor != 1:
            options = {**options, "lr": options["lr"] * factor}
        for rule, function in self._on_apply:
            state, scale = self._state_of(piece, rule), self._scales[piece.matrix]
            direction = function(direction, exact, state, options, self._number, scale)
        return direction

    def _state_of(self, piece: Piece, rule: Rule) -> dict[str, Tensor]:
        """Return a rule's state of the kind `weight`; views of the piece."""
        stored = self._rule_states[piece.matrix]
        return {key: piece.of(stored[key]) for key in rule.state if key not in self._row_keys}

    def _rows(self, unit: Unit, key: str) -> list[Tensor]:
        """Return the state by row of a unit's matrices: a view ``(b, out, 1)`` for each of its ranges."""
        return [self._rule_states[matrix][key][start:stop] for matrix, start, stop, _ in unit.ranges]


def _rule_states(group: Group, matrices: Sequence[Matrix], state: State) -> dict[int, dict[str, Tensor]]:
    """Return what this rank stores of the state of rules: by matrix and key, views like the weight or ``(B, out, 1)``.

    State by row of a flat partition is made here, since no one else knows its matrices.
    """
    states: dict[int, dict[str, Tensor]] = {k: {} for k in range(len(matrices))}
    for key, kind in registry.state_of(group).items():
        for i, members in itertools.groupby(states, key=lambda k: matrices[k].param):
            param, of_param = group["params"][i], list(members)
            if kind == "row":
                shapes = [row_shape(matrices[k].shape, transposed=matrices[k].transposed) for k in of_param]
                own, numels = state[param], list(map(math.prod, shapes))
                if key not in own or own[key].numel() != sum(numels):
                    own[key] = flat_zeros(param, sum(numels))
                flats = torch.split(own[key], numels)
                parts = [flat.view(shape) for flat, shape in zip(flats, shapes, strict=True)]
            else:
                parts = [matrices[k].of(local_of(state[param][key])) for k in of_param]
            for k, part in zip(of_param, parts, strict=True):
                states[k][key] = part
    return states


def adamw_step(
    group: Group,
    work: GroupWork,
    indices: Sequence[int],
    state: State,
    number: int,
    options: Mapping[str, Any],
    watch: GroupWatch | None = None,
) -> None:
    """Step an AdamW group.

    Args:
        group: a param group.
        work: of the group.
        indices: of the parameters to step.
        state: of its parameters; complete.
        number: of the group's step, from one.
        options: of this step, from `hyperparameters`.
        watch: measures this step; None if it is not measured.
    """
    params = [group["params"][i] for i in indices]
    keys = [*STATE_KEYS[False], *SCALES]
    states = [{key: local_of(state[param][key]) for key in keys if key in state[param]} for param in params]
    stepped: dict[tuple[bool, float], list[Stepped]] = {}
    for i, param, moments in zip(indices, params, states, strict=True):
        own = Stepped(local_of(param), gradients.local_grad(param), moments)
        for factor, part in _parts(own, work.factors[i] if work.factors else [(slice(0, None), 1.0)]):
            stepped.setdefault((is_offloaded(group, param), factor), []).append(part)
    for (offloaded, factor), members in sorted(stepped.items()):
        step = adamw_offloaded_ if offloaded else adamw_
        step(
            members,
            lr=rate_of(group) * factor,
            betas=cast(tuple[float, float], tuple(group["adamw_betas"])),
            eps=group["adamw_eps"],
            weight_decay=options["weight_decay"],
            step=number,
            rounding=group["weight_rounding"],
        )
    if watch is not None:
        for i, param, moments in zip(indices, params, states, strict=True):
            watch.adamw(i, local_of(param), moments)


def _parts(own: Stepped, runs: FactorRuns) -> Iterator[tuple[float, Stepped]]:
    """Yield the parts of a parameter that have the same factor, each with a separate step counter."""
    if len(runs) == 1:
        yield runs[0][1], own
        return
    step = own.state["step"]  # AdamW increments each part's counter, and the parameter's own once
    tensors = {key: value for key, value in own.state.items() if key != "step"}
    for i, (elements, factor) in enumerate(runs):
        moments = {key: value[elements] for key, value in tensors.items()}
        counter = step.clone() if i else step
        yield factor, Stepped(own.param[elements], own.grad[elements], {"step": counter, **moments})
