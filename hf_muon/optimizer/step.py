"""The step of one param group: Muon with its exchanges, or AdamW. docs/design.md shows one from top to bottom."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hf_muon.distributed.units import Piece, Unit
from hf_muon.math.adamw import Stepped, adamw_
from hf_muon.math.coefficients import Steps, resolve
from hf_muon.math.moments import SCALES
from hf_muon.math.momentum import BUFFER, SCALE
from hf_muon.math.newton_schulz import newton_schulz_in_batches
from hf_muon.math.precision import compute_dtype
from hf_muon.math.update import apply_directions_, lr_scale
from hf_muon.optimizer.diagnostics import Diagnostics
from hf_muon.optimizer.gradients import local_grad
from hf_muon.optimizer.groups import number_of, rate_of
from hf_muon.optimizer.layout import GroupWork
from hf_muon.optimizer.state import STATE_KEYS
from hf_muon.optimizer.step_momentum import Momentum
from hf_muon.optimizer.step_rules import RulesOfStep
from hf_muon.storage.factors import FactorRuns
from hf_muon.storage.tensors import local_of
from hf_muon.storage.transport import on_devices_of

Group = Mapping[str, Any]
State = Mapping[Tensor, dict[str, Any]]


class MuonStep:
    """A step of a Muon group: momentum, orthogonalization and weights, round by round of each exchange.

    Matrices are known by their position in `GroupWork.matrices`.

    Args:
        group: a param group.
        work: the work of the group.
        indices: the parameters to step, by position.
        state: the state of its parameters; complete.
        options: the options of this step, from `hyperparameters`.
    """

    def __init__(
        self, group: Group, work: GroupWork, indices: Sequence[int], state: State, options: Mapping[str, Any]
    ) -> None:
        self._group = group
        self._work = work
        self._number = number_of(group)
        self._params = {i: group["params"][i] for i in indices}
        self._rules = RulesOfStep(group, self._number, options, work.matrices, state)
        self._matrices = {k: matrix for k, matrix in enumerate(work.matrices) if matrix.param in self._params}
        moments = {
            i: {key: local_of(state[param][key]) for key in (BUFFER, SCALE) if key in state[param]}
            for i, param in self._params.items()
        }
        self._weights = self._views({i: local_of(param) for i, param in self._params.items()})
        self._moments = {
            k: {key: matrix.of(value) for key, value in moments[matrix.param].items()}
            for k, matrix in self._matrices.items()
        }
        self._scales = {
            k: lr_scale(group["adjust_lr_fn"], matrix.out_in, group["update_rms"])
            for k, matrix in self._matrices.items()
        }
        # A rule that decays (cautious) does so in its `apply`, element by element.
        lr, decay = rate_of(group), 0.0 if self._rules.decay else self._rules.options["weight_decay"]
        # What the weights of a matrix, and its direction, are multiplied by before they are added.
        self._rates = {
            k: (1 - lr * (decay * matrix.factor), -lr * (self._scales[k] * matrix.factor))
            for k, matrix in self._matrices.items()
        }

    def _views(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return what this rank stores of each matrix to step, as views of its parameter's tensor."""
        return {k: matrix.of(tensors[matrix.param]) for k, matrix in self._matrices.items()}

    def run(self, watch: Diagnostics | None = None) -> None:
        """Take the step; `watch` measures it, or is None."""
        options, rules = self._rules.options, self._rules
        # A gradient with other placements is redistributed, which all ranks do.
        grads = self._views({i: local_grad(param) for i, param in self._params.items()})
        coefficients = resolve(options["ns_coefficients"], options["ns_steps"])
        average = {"momentum": options["momentum"], "nesterov": options["nesterov"], "step": self._number}
        for exchange in self._work.exchanges:
            dtype = compute_dtype(self._group["ns_dtype"], exchange.device.type, exchange.device.index)
            directions_of = functools.partial(self._directions, coefficients, dtype, watch)
            momentum = Momentum(self._moments, grads, **average)
            updates_of = rules.updates_of(momentum.updates, grads, self._weights)
            for pieces, directions in exchange.directions(self._matrices, updates_of, directions_of, dtype):
                self._apply(pieces, directions, watch)
                # Their memory is free before the next ones are made.
                del directions
            rules.share_rows(exchange, self._matrices)
        if watch is not None:
            watch.momentum(self._moments, options)

    def _directions(
        self, coefficients: Steps, dtype: torch.dtype, watch: Diagnostics | None, unit: Unit, updates: Tensor
    ) -> Tensor:
        """Return the directions of whole matrices ``(B, m, n)``; the updates, of that shape, are overwritten."""

        def orthogonalize(matrices: Tensor) -> Tensor:
            most_bytes = self._work.max_batch_bytes
            directions = newton_schulz_in_batches(matrices, coefficients, dtype, most_bytes, overwrite=True)
            if watch is not None:
                watch.orthogonalized(unit, directions[: unit.count])
            return directions

        return self._rules.directions(unit, updates, orthogonalize)

    def _apply(self, pieces: Sequence[Piece], directions: Sequence[Tensor], watch: Diagnostics | None) -> None:
        """Move the weights of some pieces by their directions, each of the shape of its piece."""
        weights = [piece.of(self._weights[piece.matrix]) for piece in pieces]
        if watch is not None:
            watch.directions(pieces, directions, [self._scales[piece.matrix] for piece in pieces], weights)
        apply_directions_(
            weights,
            self._rules.applied(pieces, on_devices_of(directions, weights), weights, self._scales),
            [self._rates[piece.matrix] for piece in pieces],
            step=self._number,
            rounding=self._group["weight_rounding"],
        )


def adamw_step(
    group: Group,
    work: GroupWork,
    indices: Sequence[int],
    state: State,
    options: Mapping[str, Any],
    watch: Diagnostics | None = None,
) -> None:
    """Step an AdamW group.

    Args:
        group: a param group.
        work: the work of the group.
        indices: the parameters to step, by position.
        state: the state of its parameters; complete.
        options: the options of this step, from `hyperparameters`.
        watch: measures this step; None if it is not measured.
    """
    params = [group["params"][i] for i in indices]
    keys = [*STATE_KEYS[False], *SCALES]
    states = [{key: local_of(state[param][key]) for key in keys if key in state[param]} for param in params]
    stepped: dict[float, list[Stepped]] = {}
    for i, param, moments in zip(indices, params, states, strict=True):
        whole = Stepped(local_of(param), local_grad(param), moments)
        for factor, chunk in _by_factor(whole, work.factors[i] if work.factors else [(slice(0, None), 1.0)]):
            stepped.setdefault(factor, []).append(chunk)
    for factor, members in sorted(stepped.items()):
        adamw_(
            members,
            lr=rate_of(group) * factor,
            betas=cast(tuple[float, float], tuple(group["adamw_betas"])),
            eps=group["adamw_eps"],
            weight_decay=options["weight_decay"],
            step=number_of(group),
            rounding=group["weight_rounding"],
        )
    if watch is not None:
        for i, param, moments in zip(indices, params, states, strict=True):
            watch.adamw(i, local_of(param), moments)


def _by_factor(whole: Stepped, runs: FactorRuns) -> Iterator[tuple[float, Stepped]]:
    """Yield a parameter's factors, each with the chunk of the parameter that has it and a separate step counter."""
    if len(runs) == 1:
        yield runs[0][1], whole
        return
    # AdamW increments the counter of each chunk. The parameter's must be incremented once: it is that of the first.
    step = whole.state["step"]
    tensors = {key: value for key, value in whole.state.items() if key != "step"}
    for i, (elements, factor) in enumerate(runs):
        moments = {key: value[elements] for key, value in tensors.items()}
        counter = step.clone() if i else step
        yield factor, Stepped(whole.param[elements], whole.grad[elements], {"step": counter, **moments})
