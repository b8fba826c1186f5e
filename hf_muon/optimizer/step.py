"""A step of one param group: updates, orthogonalization, and what they do to the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import Tensor

from hf_muon.diagnostics import metrics
from hf_muon.distributed.executor import Executor, Piece
from hf_muon.math import update
from hf_muon.math.coefficients import resolve
from hf_muon.math.momentum import Quantized
from hf_muon.math.newton_schulz import Orthogonalizer, compute_dtype
from hf_muon.optimizer import gradients
from hf_muon.optimizer.preflight import Matrix
from hf_muon.storage.tensors import local_of, shape_of

if TYPE_CHECKING:
    from hf_muon.distributed.executor import Observer
    from hf_muon.distributed.units import Unit

Group = Mapping[str, Any]
State = Mapping[Tensor, Mapping[str, Tensor]]


class Watched(NamedTuple):
    """A step that is measured.

    Attributes:
        watch: what measures it.
        groups: all param groups.
        partitioned: whether DeepSpeed ZeRO has put partitions into them.
    """

    watch: metrics.Watch
    groups: Sequence[Group]
    partitioned: bool

    def names_of(self, group: Group, matrices: Sequence[Matrix]) -> dict[int, str]:
        """Return a name for each matrix: its parameter's, numbered where a parameter is seen as a few matrices."""
        names = list(group.get("param_names") or [])
        if self.partitioned:
            names = [f"{len(names)} parameters, weight decay {group['weight_decay']:g}"] * len(group["params"])
        elif not names:
            number = next(k for k, other in enumerate(self.groups) if other is group)
            names = [f"group {number}, parameter {i}" for i in range(len(group["params"]))]
        given = [matrix.name or names[matrix.param] for matrix in matrices]
        parts = Counter(given)
        seen: Counter[str] = Counter()
        found = {}
        for k, name in enumerate(given):
            found[k] = f"{name}[{seen[name]}]" if 1 < parts[name] <= metrics.MOST_PARTS else name
            seen[name] += 1
        return found


def muon_step(
    group: Group,
    state: State,
    number: int,
    indices: Sequence[int],
    matrices: Sequence[Matrix],
    executors: Sequence[Executor],
    max_batch_bytes: int,
    watched: Watched | None = None,
) -> None:
    """Step a Muon group.

    Args:
        group: a param group.
        state: of its parameters; complete.
        number: of the step, from one.
        indices: of the parameters to step.
        matrices: what `executors` know as parameters.
        executors: for the matrices.
        max_batch_bytes: as of `Muon`.
        watched: who measures this step, if anybody does.
    """
    coefficients = resolve(group["ns_coefficients"], group["ns_steps"])
    active = {k: matrix for k, matrix in enumerate(matrices) if matrix.param in indices}
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

    names: dict[int, str] = {}
    watch = None if watched is None else watched.watch
    if watched is not None:
        names = watched.names_of(group, matrices)
        watched.watch.muon(names, {k: matrix.shape for k, matrix in enumerate(matrices)}, float(group["lr"]))
    for executor in executors:
        executor.observer = None if watch is None else _observer(watch, names)
        dtype = compute_dtype(group["ns_dtype"], executor.device.type, executor.device.index)
        orthogonalizer = Orthogonalizer(coefficients, dtype, max_batch_bytes)
        for pieces, directions in executor.directions(active, updates_of, orthogonalizer):
            if watch is not None:
                for piece, direction in zip(pieces, directions, strict=True):
                    watch.direction(names[piece.matrix], direction, scales[piece.matrix])
                    del direction
            update.apply_directions_(
                [piece.of(params[piece.matrix]) for piece in pieces],
                directions,
                lr=float(group["lr"]),
                weight_decay=group["weight_decay"],
                scales=[scales[piece.matrix] for piece in pieces],
            )
            del directions  # before the next ones are made
    if watch is not None:
        for k, buffer in buffers.items():
            i = active[k].param
            watch.momentum(names[k], quantized[i].values() if i in quantized else buffer)


def adamw_step(group: Group, state: State, indices: Sequence[int], watched: Watched | None = None) -> None:
    """Step an AdamW group.

    Args:
        group: a param group.
        state: of its parameters; complete.
        indices: of the parameters to step.
        watched: who measures this step, if anybody does.
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
    if watched is not None:
        for i, moments in zip(indices, states, strict=True):
            local = {key: local_of(value) for key, value in moments.items()}
            name = watched.names_of(group, [Matrix(i, shape_of(group["params"][i]))])[0]
            watched.watch.adamw(name, local, group["adamw_betas"], group["adamw_eps"], float(group["lr"]))


def _values_of(kept: Quantized, piece: Piece) -> Tensor:
    """The momentum of a piece, in fp32."""
    if piece.cut is None or piece.cut.dim < kept.codes.ndim - 1:
        return Quantized(piece.of(kept.codes), piece.of(kept.scales)).values()
    return piece.cut.of(kept.values(piece.local))  # columns cut blocks


def _observer(watch: metrics.Watch, names: dict[int, str]) -> Observer:
    def observe(unit: Unit, updates: Tensor, directions: Tensor) -> None:
        runs = [(names[run.matrix], run.stop - run.start) for run in unit.runs]
        watch.orthogonalized(runs, updates, directions)

    return observe
