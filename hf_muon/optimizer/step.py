"""A step of one param group: updates, orthogonalization, and what they do to the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from hf_muon.distributed.executor import Piece
from hf_muon.math import update
from hf_muon.math.coefficients import resolve
from hf_muon.math.momentum import Quantized
from hf_muon.math.newton_schulz import Orthogonalizer, compute_dtype
from hf_muon.optimizer import gradients
from hf_muon.optimizer.layout import GroupWork
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
) -> None:
    """Step a Muon group.

    Args:
        group: a param group.
        work: of the group.
        indices: of the parameters to step.
        state: of its parameters; complete.
        number: of the step, from one.
        max_batch_bytes: as of `Muon`.
        watch: measures this step; None where nothing does.
    """
    coefficients = resolve(group["ns_coefficients"], group["ns_steps"])
    active = {k: matrix for k, matrix in enumerate(work.matrices) if matrix.param in indices}
    stored = {i: group["params"][i] for i in indices}
    local = {i: local_of(param) for i, param in stored.items()}
    local_buffers = {i: local_of(state[param]["momentum_buffer"]) for i, param in stored.items()}
    local_scales = {i: local_of(state[p]["momentum_scale"]) for i, p in stored.items() if "momentum_scale" in state[p]}
    local_grads = {i: gradients.local_grad(param) for i, param in stored.items()}
    params = {k: matrix.of(local[matrix.param]) for k, matrix in active.items()}
    buffers = {k: matrix.of(local_buffers[matrix.param]) for k, matrix in active.items()}
    grads = {k: matrix.of(local_grads[matrix.param]) for k, matrix in active.items()}
    scales = {k: update.lr_scale(group["adjust_lr_fn"], matrix.out_in) for k, matrix in active.items()}

    options = {"momentum": group["momentum"], "nesterov": group["nesterov"], "step": number}
    # Blocks of codes move at once, whatever pieces they are orthogonalized in.
    quantized = {i: Quantized(local_buffers[i], found) for i, found in local_scales.items()}
    for i, kept in quantized.items():
        kept.move_(local_grads[i], group["momentum"])

    def updates_of(pieces: Sequence[Piece]) -> list[Tensor]:
        some = [piece.of(grads[piece.matrix]) for piece in pieces]
        if not quantized:
            return update.muon_updates(some, [piece.of(buffers[piece.matrix]) for piece in pieces], **options)
        updates: list[Tensor] = []
        for piece, grad in zip(pieces, some, strict=True):
            i = active[piece.matrix].param
            if i not in quantized:
                updates += update.muon_updates([grad], [piece.of(buffers[piece.matrix])], **options)
                continue
            found = _values_of(quantized[i], piece)
            updates += (
                update.look_ahead([grad.float()], [found], momentum=group["momentum"]) if group["nesterov"] else [found]
            )
        return updates

    for executor in work.executors:
        executor.observer = None if watch is None else watch.orthogonalized
        dtype = compute_dtype(group["ns_dtype"], executor.device.type, executor.device.index)
        orthogonalizer = Orthogonalizer(coefficients, dtype, max_batch_bytes)
        for pieces, directions in executor.directions(active, updates_of, orthogonalizer):
            piece_scales = [scales[piece.matrix] for piece in pieces]
            if watch is not None:
                watch.directions(pieces, directions, piece_scales)
            update.apply_directions_(
                [piece.of(params[piece.matrix]) for piece in pieces],
                directions,
                lr=float(group["lr"]),
                weight_decay=group["weight_decay"],
                scales=piece_scales,
            )
            del directions  # before the next ones are made
    if watch is not None:
        for k, buffer in buffers.items():
            i = active[k].param
            watch.momentum(k, quantized[i].values() if i in quantized else buffer)


def adamw_step(group: Group, indices: Sequence[int], state: State, watch: GroupWatch | None = None) -> None:
    """Step an AdamW group.

    Args:
        group: a param group.
        indices: of the parameters to step.
        state: of its parameters; complete.
        watch: measures this step; None where nothing does.
    """
    params = [group["params"][i] for i in indices]
    states = [state[param] for param in params]
    update.adamw_(
        [local_of(param) for param in params],
        [gradients.local_grad(param) for param in params],
        [local_of(moments["exp_avg"]) for moments in states],
        [local_of(moments["exp_avg_sq"]) for moments in states],
        [moments["step"] for moments in states],
        lr=float(group["lr"]),
        betas=cast(tuple[float, float], tuple(group["adamw_betas"])),
        eps=group["adamw_eps"],
        weight_decay=group["weight_decay"],
    )
    if watch is not None:
        for i, moments in zip(indices, states, strict=True):
            watch.adamw(i, moments)


def _values_of(kept: Quantized, piece: Piece) -> Tensor:
    """The momentum of a piece, in fp32."""
    if piece.cut is None or piece.cut.dim < kept.codes.ndim - 1:
        return Quantized(piece.of(kept.codes), piece.of(kept.scales)).values()
    return piece.cut.of(kept.values(piece.local))  # columns cut blocks
