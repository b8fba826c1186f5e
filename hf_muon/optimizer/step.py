"""The step of one param group: Muon with its exchanges, or AdamW."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from hf_muon.distributed.exchange import Exchange
from hf_muon.distributed.pieces import Directions, Piece, UpdatesOf
from hf_muon.math.adamw import Stepped, adamw_
from hf_muon.math.coefficients import resolve
from hf_muon.math.moments import SCALES
from hf_muon.math.momentum import BUFFER, SCALE, MomentumBuffers
from hf_muon.math.newton_schulz import Orthogonalizer
from hf_muon.math.precision import compute_dtype
from hf_muon.math.rounding import Observer
from hf_muon.math.update import apply_directions_, lr_scale
from hf_muon.optimizer import gradients
from hf_muon.optimizer.factor_runs import parts_of
from hf_muon.optimizer.groups import rate_of
from hf_muon.optimizer.layout import GroupWork
from hf_muon.optimizer.offloaded import adamw_offloaded_, updates_for
from hf_muon.optimizer.state import STATE_KEYS, is_offloaded
from hf_muon.optimizer.step_rules import StepRules, hyperparameters
from hf_muon.optimizer.watching import GroupWatch
from hf_muon.storage.tensors import local_of
from hf_muon.storage.transport import beside

Group = Mapping[str, Any]
State = Mapping[Tensor, Mapping[str, Tensor]]


class MuonStep:
    """A step of a Muon group: momentum, orthogonalization, weights, one bucket of pieces after the other.

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
        self.group = group
        self.indices = indices
        self._exchanges = work.exchanges
        self._number = number
        self._max_batch_bytes = max_batch_bytes
        params = {i: group["params"][i] for i in indices}
        self._active = {k: matrix for k, matrix in enumerate(work.matrices) if matrix.param in params}
        local = {i: local_of(param) for i, param in params.items()}
        moments = {
            i: {key: local_of(state[param][key]) for key in (BUFFER, SCALE) if key in state[param]}
            for i, param in params.items()
        }
        self._has_factors = any(matrix.factor != 1 for matrix in self._active.values())
        self._weights = {k: matrix.of(local[matrix.param]) for k, matrix in self._active.items()}
        self._stored = {
            k: {key: matrix.of(value) for key, value in moments[matrix.param].items()}
            for k, matrix in self._active.items()
        }
        self._offloads = any(is_offloaded(group, param) for param in params.values())
        self._hyper = hyperparameters(group, number)
        self._rules = StepRules(group, work, self._active, self._weights, state, self._hyper, number)
        rule, rms = group["adjust_lr_fn"], group["update_rms"]
        self._scales = {k: lr_scale(rule, matrix.out_in, rms) for k, matrix in self._active.items()}
        self._options = {"momentum": self._hyper["momentum"], "nesterov": self._hyper["nesterov"], "step": number}

    def take(self, watch: GroupWatch | None = None, observer: Observer | None = None) -> None:
        """Take the step; all ranks have agreed that they do.

        Args:
            watch: measures this step; None where nothing does.
            observer: of weights that are rounded.
        """
        grads = {i: gradients.local_grad(self.group["params"][i]) for i in self.indices}  # which may communicate
        of_matrices = {k: matrix.of(grads[matrix.param]) for k, matrix in self._active.items()}
        momentum = MomentumBuffers(self._stored, of_matrices, **self._options)
        for exchange in self._exchanges:
            exchange.observer = watch
            self._rules.attach(exchange)
            with (
                updates_for(exchange, self._active, self._stored, of_matrices, **self._options)
                if self._offloads
                else contextlib.nullcontext(momentum.updates)
            ) as updates_of:
                changed = self._rules.updates_of(updates_of)
                for pieces, directions in self._directions(exchange, changed):
                    self._apply(pieces, directions, watch, observer)
                    del directions  # before the next ones are made
            self._rules.share(exchange)
        self._rules.release(self._exchanges)
        if watch is not None:
            for k in self._active:
                watch.momentum(k, momentum.values(k))
            watch.rules(self._hyper)

    def _directions(self, exchange: Exchange, updates_of: UpdatesOf) -> Directions:
        coefficients = resolve(self._hyper["ns_coefficients"], self._hyper["ns_steps"])
        dtype = compute_dtype(self.group["ns_dtype"], exchange.device.type, exchange.device.index)
        return exchange.directions(self._active, updates_of, Orthogonalizer(coefficients, dtype, self._max_batch_bytes))

    def _apply(
        self,
        pieces: Sequence[Piece],
        directions: Sequence[Tensor],
        watch: GroupWatch | None,
        observer: Observer | None,
    ) -> None:
        """Move the weights of some pieces."""
        scales = [self._scales[piece.matrix] for piece in pieces]
        factors = [self._active[piece.matrix].factor for piece in pieces] if self._has_factors else None
        weights = [piece.of(self._weights[piece.matrix]) for piece in pieces]
        if watch is not None:
            watch.directions(pieces, directions, scales, weights)
        moves = self._rules.applied(pieces, beside(directions, weights), weights, scales)
        if factors is not None:
            scales = [scale * factor for scale, factor in zip(scales, factors, strict=True)]
        apply_directions_(
            weights,
            moves,
            lr=rate_of(self.group),
            weight_decay=0.0 if self._rules.decays else self._hyper["weight_decay"],
            scales=scales,
            decay_factors=factors,
            step=self._number,
            rounding=self.group["weight_rounding"],
            observer=observer,
        )


def adamw_step(
    group: Group,
    indices: Sequence[int],
    state: State,
    number: int,
    watch: GroupWatch | None = None,
    observer: Observer | None = None,
    work: GroupWork | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Step an AdamW group.

    Args:
        group: a param group.
        indices: of the parameters to step.
        state: of its parameters; complete.
        number: of the group's step, from one.
        watch: measures this step; None where nothing does.
        observer: of weights that are rounded.
        work: of the group; None where no parameter has factors.
        options: of this step, from `hyperparameters`; None to ask for them.
    """
    options = options or hyperparameters(group, number)
    params = [group["params"][i] for i in indices]
    keys = [*STATE_KEYS[False], *SCALES]
    states = [{key: local_of(state[param][key]) for key in keys if key in state[param]} for param in params]
    stepped: dict[tuple[bool, float], list[Stepped]] = {}
    for i, param, moments in zip(indices, params, states, strict=True):
        own = Stepped(local_of(param), gradients.local_grad(param), moments)
        runs = work.factors[i] if work is not None and work.factors else [(slice(0, None), 1.0)]
        for factor, part in parts_of(own, runs):
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
            observer=observer,
        )
    if watch is not None:
        for i, param, moments in zip(indices, params, states, strict=True):
            watch.adamw(i, local_of(param), moments)
