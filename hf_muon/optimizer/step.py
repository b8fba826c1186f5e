"""The step of one param group: Muon with its executors, or AdamW."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from hf_muon.math import update
from hf_muon.math.adamw import Stepped, adamw_
from hf_muon.math.coefficients import resolve
from hf_muon.math.moments import SCALES
from hf_muon.math.momentum import BUFFER, SCALE, MomentumBuffers
from hf_muon.math.newton_schulz import Orthogonalizer
from hf_muon.math.precision import compute_dtype
from hf_muon.math.weight_rounding import Observer
from hf_muon.optimizer import gradients
from hf_muon.optimizer.groups import rate_of
from hf_muon.optimizer.layout import GroupWork
from hf_muon.optimizer.offloaded import adamw_offloaded_, updates_for
from hf_muon.optimizer.state import STATE_KEYS, is_offloaded
from hf_muon.optimizer.watching import GroupWatch
from hf_muon.storage.tensors import local_of

Group = Mapping[str, Any]
State = Mapping[Tensor, Mapping[str, Tensor]]


def muon_step(
    group: Group,
    work: GroupWork,
    indices: Sequence[int],
    state: State,
    number: int,
    max_batch_bytes: int,
    watch: GroupWatch | None = None,
    observer: Observer | None = None,
) -> None:
    """Step a Muon group: momentum, orthogonalization, weights, one bucket of pieces after the other.

    Args:
        group: a param group.
        work: of the group.
        indices: of the parameters to step.
        state: of its parameters; complete.
        number: of the step, from one.
        max_batch_bytes: as of `Muon`.
        watch: measures this step; None where nothing does.
        observer: of weights that are rounded.
    """
    coefficients = resolve(group["ns_coefficients"], group["ns_steps"])
    params = {i: group["params"][i] for i in indices}
    active = {k: matrix for k, matrix in enumerate(work.matrices) if matrix.param in params}
    local = {i: local_of(param) for i, param in params.items()}
    grads = {i: gradients.local_grad(param) for i, param in params.items()}
    moments = {
        i: {key: local_of(state[param][key]) for key in (BUFFER, SCALE) if key in state[param]}
        for i, param in params.items()
    }
    weights = {k: matrix.of(local[matrix.param]) for k, matrix in active.items()}
    scales = {k: update.lr_scale(group["adjust_lr_fn"], matrix.out_in) for k, matrix in active.items()}
    stored = {
        k: {key: matrix.of(value) for key, value in moments[matrix.param].items()} for k, matrix in active.items()
    }
    gradient_of = {k: matrix.of(grads[matrix.param]) for k, matrix in active.items()}
    options = {"momentum": group["momentum"], "nesterov": group["nesterov"], "step": number}
    momentum = MomentumBuffers(stored, gradient_of, **options)
    offloads = any(is_offloaded(group, param) for param in params.values())
    for executor in work.executors:
        executor.observer = None if watch is None else watch.orthogonalized
        dtype = compute_dtype(group["ns_dtype"], executor.device.type, executor.device.index)
        orthogonalizer = Orthogonalizer(coefficients, dtype, max_batch_bytes)
        with (
            updates_for(executor, active, stored, gradient_of, **options)
            if offloads
            else contextlib.nullcontext(momentum.updates)
        ) as updates_of:
            for pieces, directions in executor.directions(active, updates_of, orthogonalizer):
                piece_scales = [scales[piece.matrix] for piece in pieces]
                if watch is not None:
                    watch.directions(pieces, directions, piece_scales)
                update.apply_directions_(
                    [piece.of(weights[piece.matrix]) for piece in pieces],
                    directions,
                    lr=rate_of(group),
                    weight_decay=group["weight_decay"],
                    scales=piece_scales,
                    step=number,
                    rounding=group["weight_rounding"],
                    observer=observer,
                )
                del directions  # before the next ones are made
    if watch is not None:
        for k in active:
            watch.momentum(k, momentum.values(k))


def adamw_step(
    group: Group,
    indices: Sequence[int],
    state: State,
    number: int,
    watch: GroupWatch | None = None,
    observer: Observer | None = None,
) -> None:
    """Step an AdamW group.

    Args:
        group: a param group.
        indices: of the parameters to step.
        state: of its parameters; complete.
        number: of the group's step, from one.
        watch: measures this step; None where nothing does.
        observer: of weights that are rounded.
    """
    params = [group["params"][i] for i in indices]
    keys = [*STATE_KEYS[False], *SCALES]
    states = [{key: local_of(state[param][key]) for key in keys if key in state[param]} for param in params]
    stepped: dict[bool, list[Stepped]] = {False: [], True: []}
    for param, moments in zip(params, states, strict=True):
        own = Stepped(local_of(param), gradients.local_grad(param), moments)
        stepped[is_offloaded(group, param)].append(own)
    for offloaded, members in stepped.items():
        step = adamw_offloaded_ if offloaded else adamw_
        step(
            members,
            lr=rate_of(group),
            betas=cast(tuple[float, float], tuple(group["adamw_betas"])),
            eps=group["adamw_eps"],
            weight_decay=group["weight_decay"],
            step=number,
            rounding=group["weight_rounding"],
            observer=observer,
        )
    if watch is not None:
        for i, moments in zip(indices, states, strict=True):
            watch.adamw(i, moments)
