"""class Muon: one torch optimizer for the matrices (Muon) and for the rest (AdamW)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_muon import checkpoint, consensus, diagnostics, gradients, metrics, preflight, step_report, update, views
from hf_muon.coefficients import resolve
from hf_muon.config import COMM_DTYPES, GROUP_OPTIONS, MAX_BUCKET_BYTES, check_option, unknown_option
from hf_muon.distributed import Executor, Partitions, Piece, accelerator, local_of, shape_of, storage_complaint
from hf_muon.momentum import Quantized
from hf_muon.newton_schulz import MAX_BATCH_BYTES, Orthogonalizer, compute_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from hf_muon.distributed.base import Observer
    from hf_muon.distributed.ownership import Unit

Group = dict[str, Any]

# What torch's schedulers keep in param groups, and the tag that people give them.
_FOREIGN_KEYS = ("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum", "name")


class Muon(Optimizer):
    """MomentUm Orthogonalized by Newton-Schulz for matrices, AdamW for the rest, in one optimizer.

    For a matrix ``W`` of shape ``(out, in)`` with gradient ``G``::

        buffer    = momentum * buffer + (1 - momentum) * G
        update    = momentum * buffer + (1 - momentum) * G      if nesterov, else buffer
        direction = orthogonalize(update)
        W         = (1 - lr * weight_decay) * W - lr * scale(out, in) * direction

    A param group with ``use_muon: False`` is stepped by torch's own AdamW instead, with `adamw_betas` and `adamw_eps`.
    Without that key a group means Muon, and must hold nothing but matrices ``(m, n)`` or stacks of them ``(B, m, n)``.
    What is stored otherwise (as ``(in, out)``, several matrices in one, a convolution) says so in the group's `views`,
    a text for each parameter; :mod:`hf_muon.views` has the words.

    Momentum is kept in fp32, also under bf16 and fp16 parameters, unless `momentum_dtype` says otherwise; AdamW's
    moments have the parameter's dtype, as in torch. State is stored like its parameter, and is whole for a group or
    absent.

    DTensor parameters (FSDP2, HSDP, tensor parallel) are stepped as they are: the parts of a matrix travel to one
    owner, which orthogonalizes it once, and the direction's parts travel back. Of plain parameters under DDP the same
    is true with `replicate_group`; without it, each process does all the work. All ranks must step together.

    Args:
        params: parameters, ``(name, parameter)`` pairs, or param groups, as in any torch optimizer. Groups may set
            `use_muon` and each of the options below.
        lr: learning rate.
        weight_decay: decoupled weight decay, applied as ``1 - lr * weight_decay``.
        momentum: decay of the moving average of the gradients.
        nesterov: look one step ahead along the average.
        momentum_dtype: how the average is kept between steps: `auto` (fp32), `fp32`, `bf16` (2 bytes a weight, rounded
            stochastically) or `int8` (a byte a weight, and four for every 64 of a row). A step computes in fp32.
        ns_coefficients: `polar_express`, `original`, `you_jiacheng`, `cans`, or three numbers.
        ns_steps: Newton-Schulz steps.
        ns_dtype: `auto` (bf16 where the hardware has it, else fp32), `bf16`, `fp16` or `fp32`.
        adjust_lr_fn: scale by shape: `match_rms_adamw` 0.2*sqrt(max(out, in)), `original` sqrt(max(1, out/in)),
            `rms_to_rms` sqrt(out/in).
        adamw_betas: AdamW's averaging coefficients.
        adamw_eps: AdamW's denominator term.
        max_bucket_bytes: bound on the bytes of updates and directions that a rank has under way at once, beside what
            orthogonalizing one matrix takes (or 16 MiB of small ones). Matrices so large that those of all ranks do
            not fit are not overlapped with communication; a larger bound lets them be.
        max_batch_bytes: bound on the bytes that orthogonalizing matrices of one shape together takes, updates and
            directions among them; more go one part after the other, and one matrix always goes. In one process a step
            takes no more than this, or than one matrix does.
        comm_dtype: dtype in which updates and directions travel: `fp32`, which is exact, or `bf16`.
        offload_compute: where momentum that lives on the CPU is orthogonalized: `auto` (on the accelerator, there and
            back, where the model computes on one and has offloaded the momentum; else on the CPU), `cpu` or
            `accelerator`.
        accept_rerouted: load checkpoints in which some parameters were on the other side, Muon or AdamW; their moments
            start from zero. Refused by name otherwise.
        replicate_group: the process group over which plain parameters are replicated (DDP's). Never concluded from
            torch.distributed being initialized.
        diagnostics_every: steps from one line of metrics to the next, written by rank 0; 0 for none, or for what
            HF_MUON_DIAGNOSTICS_EVERY says. Weights do not differ by a bit for it.
        diagnostics_file: where these lines go; `muon_diagnostics.jsonl` if it is not said.

    Raises:
        ValueError: an option that is not valid, or a Muon group with something that is not a matrix.
        RuntimeError: a parameter stored in a way that this version cannot step (FSDP1, ZeRO), or
            `offload_compute=accelerator` on a machine without one.

    Source: Jordan et al., https://kellerjordan.github.io/posts/muon/; defaults of scale and decay from Liu et al.,
    https://arxiv.org/abs/2502.16982; coefficients from Amsel et al., https://arxiv.org/abs/2505.16932.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Sequence[float] = "polar_express",
        ns_steps: int = 5,
        ns_dtype: str = "auto",
        adjust_lr_fn: str = "match_rms_adamw",
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        *,
        momentum_dtype: str = "auto",
        max_bucket_bytes: int = MAX_BUCKET_BYTES,
        max_batch_bytes: int = MAX_BATCH_BYTES,
        comm_dtype: str = "fp32",
        offload_compute: str = "auto",
        accept_rerouted: bool = False,
        replicate_group: ProcessGroup | None = None,
        diagnostics_every: int = 0,
        diagnostics_file: str | None = None,
    ) -> None:
        defaults: Group = {
            "use_muon": True,
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "momentum_dtype": momentum_dtype,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "adjust_lr_fn": adjust_lr_fn,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
        }
        for name in GROUP_OPTIONS:
            defaults[name] = check_option(name, defaults[name])
        self.max_bucket_bytes: int = check_option("max_bucket_bytes", max_bucket_bytes)
        self.max_batch_bytes: int = check_option("max_batch_bytes", max_batch_bytes)
        self.comm_dtype: str = check_option("comm_dtype", comm_dtype)
        self.offload_compute: str = check_option("offload_compute", offload_compute)
        if self.offload_compute == "accelerator":
            accelerator()
        self.accept_rerouted: bool = check_option("accept_rerouted", accept_rerouted)
        self.replicate_group = replicate_group
        self.partitions: Partitions | None = None
        self.being_wrapped = False
        self.wrapped_views: Mapping[Tensor, views.View] = {}
        every = check_option("diagnostics_every", diagnostics_every) or diagnostics.every_from_environment()
        file = check_option("diagnostics_file", diagnostics_file)
        self.metrics = metrics.Metrics(every, file) if every and diagnostics.is_rank_zero() else None
        self._watch: metrics.Watch | None = None
        self._watched_step = 0
        self._layouts: dict[tuple[int, ...], preflight.Layout] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as in torch; checked before it is added.

        Raises:
            ValueError: an unknown or invalid option, or a Muon group with something that is not a matrix.
            RuntimeError: a parameter stored in a way that this version cannot step.
        """
        own = dict(param_group)
        for name in own:
            if name in GROUP_OPTIONS:
                own[name] = check_option(name, own[name])
            elif name not in ("params", "param_names", "use_muon", "views", "step", *_FOREIGN_KEYS):
                raise unknown_option(name, ("params", "use_muon", "views", *GROUP_OPTIONS))
        if not isinstance(own.get("use_muon", True), bool):
            raise ValueError(f"use_muon={own['use_muon']!r} is not valid. Valid: true or false")
        own.setdefault("step", 0)
        before = len(self.param_groups)
        super().add_param_group(own)
        try:
            self._check_group(self.param_groups[before])
        except Exception:
            del self.param_groups[before:]
            raise

    def _check_group(self, group: Group) -> None:
        given = group.get("views")
        if given is not None and len(given) != len(group["params"]):
            raise ValueError(f"views: {len(given)} of {len(group['params'])} parameters; give each one, '' for none")
        for i, (param, view) in enumerate(zip(group["params"], views.views_of(group), strict=True)):
            complaint = storage_complaint(param) or checkpoint.blocks_complaint(group, param)
            if complaint:
                raise RuntimeError(f"{checkpoint.describe(group, i)} {complaint}")
            if group["use_muon"] and (complaint := views.complaint(view, shape_of(param))):
                raise ValueError(
                    f"{checkpoint.describe(group, i)} {complaint}: Muon steps (m, n) matrices and (B, m, n) stacks of "
                    "matrices. Put it into a group with use_muon=False, or let build_optimizer(model) decide"
                )
        complaint = preflight.hyperparameter_complaint(group)
        if complaint:
            raise ValueError(complaint)

    def init_state(self) -> None:
        """Create the state that is missing, zero moments, for every parameter. Steps and loads do it by themselves."""
        consensus.refuse(
            [line for group in self.param_groups for line in checkpoint.state_complaints(group, self.state)]
        )
        for group in self.param_groups:
            self._reconcile_state(group)

    def _reconcile_state(self, group: Group) -> None:
        """Every parameter of the group has its state, on its device, in the dtype that the step computes with."""
        fused = not group["use_muon"] and update.uses_fused_adamw(group["params"])
        for param in group["params"]:
            state = self.state[param]
            choice = group["momentum_dtype"]
            keys = checkpoint.state_keys(group, param)
            if "momentum_buffer" in state and ("momentum_scale" in state) != ("momentum_scale" in keys):
                kept = checkpoint.kept_momentum(param, state, choice)
                state.clear()
                state.update(kept)
            for key in keys:
                if key not in state:
                    state[key] = checkpoint.zero_state(param, key, choice)
                device = torch.device("cpu") if key == "step" and not fused else param.device
                dtype = checkpoint.state_dtype(param, key, choice)
                if not torch.is_tensor(state[key]):
                    state[key] = torch.as_tensor(state[key], dtype=dtype, device=device)
                elif state[key].dtype != dtype or state[key].device != device:
                    state[key] = state[key].to(device=device, dtype=dtype)

    def reset_layouts(self) -> None:
        """Look anew at how parameters are stored, as after `partitions` or `replicate_group` were set."""
        self._layouts.clear()

    def _layout(self) -> preflight.Layout:
        """How the parameters that now stand in the param groups are stored."""
        key = tuple(id(param) for group in self.param_groups for param in group["params"])
        layout = self._layouts.get(key)
        if layout is None or layout.key != preflight.storage_key(self.param_groups):
            if self.partitions is None:  # otherwise ZeRO puts in one partition after the other
                self._layouts.clear()
            layout = self._layouts[key] = preflight.Layout(
                self.param_groups,
                self.replicate_group,
                self.max_bucket_bytes,
                COMM_DTYPES[self.comm_dtype],
                self.partitions,
                self.offload_compute,
            )
        return layout

    def _preflight(self) -> list[tuple[Group, list[int], list[preflight.Matrix], list[Executor]]]:
        """The groups to step, the indices of their parameters, which are the same on all ranks, and how.

        Raises:
            RuntimeError: every complaint of every rank at once, before weights or moments are touched.
        """
        layout = self._layout()
        complaints = list(layout.complaints)
        may_be_idle = False
        with layout.guarded(complaints):
            self._clear_gradients_of_others()
            complaints += self._complaints(layout)
            # torch.distributed.checkpoint makes moments to load into by such a step, which is not to count as one.
            may_be_idle = not (complaints or self.state) and all(float(g["lr"]) == 0 for g in self.param_groups)
            if not may_be_idle:
                step_report.tell_once(self, layout, self.partitions)
            self._begin_watch()
        with step_report.told_if_refused(self):
            active = consensus.agree(self.param_groups, layout, complaints, may_be_idle=may_be_idle)
        if active is None:
            self.init_state()
            return []
        return [
            (group, indices, matrices, executors)
            for group, indices, matrices, executors in zip(
                self.param_groups, active, layout.matrices, layout.executors, strict=True
            )
            if indices
        ]

    def _complaints(self, layout: preflight.Layout) -> list[str]:
        """What speaks against a step, on this rank."""
        complaints: list[str] = []
        for group, devices in zip(self.param_groups, layout.devices, strict=False):  # fewer where the layout is refused
            complaints += checkpoint.state_complaints(group, self.state)
            if complaint := preflight.hyperparameter_complaint(group, devices):
                complaints.append(complaint)
            for i, param in enumerate(group["params"]):
                if complaint := gradients.complaint(group, param):
                    complaints.append(f"{checkpoint.describe(group, i)} {complaint}")
        return complaints

    def _begin_watch(self) -> None:
        if self.metrics is not None:
            # ZeRO-3 empties the groups that it does not step now, and has stepped some of them already.
            first = next(group for group in self.param_groups if group["params"])
            self._watched_step = first["step"] + 1
            self._watch = self.metrics.begin(self._watched_step, local_of(first["params"][0]).device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. Parameters without a gradient on any rank stay as they are, and so do their moments.

        Args:
            closure: reevaluates the model and returns the loss, as in torch.

        Raises:
            RuntimeError: a gradient that is not finite, or a parameter that cannot be stepped; on all ranks alike.
                Nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.being_wrapped:
            self._step_of_wrapper()
            return loss
        for group, indices, matrices, executors in self._preflight():
            self._reconcile_state(group)
            number = group["step"] + 1  # the same for all parts of a group
            if self._is_last(group):
                group["step"] = number
            if group["use_muon"]:
                self._muon_step(group, number, indices, matrices, executors)
            else:
                self._adamw_step(group, indices)
        if self.metrics is not None:
            self.metrics.end(self._watched_step, whole=self._all_stepped())
        return loss

    def _all_stepped(self) -> bool:
        """Whether a watched step is over; ZeRO takes it partition by partition."""
        if self.partitions is None or self._watch is None:
            return True
        self._watch.stepped.update(id(param) for group in self.param_groups for param in group["params"])
        return self._watch.stepped.issuperset(map(id, self.partitions))

    def _clear_gradients_of_others(self) -> None:
        """Zeros where a partition has no gradient, in place of what lies in that memory."""
        for group in self.param_groups if self.partitions else ():
            for param in group["params"]:
                partition = (self.partitions or {}).get(param)
                if partition is not None and partition.without_gradient is not None and param.grad is not None:
                    for elements in partition.without_gradient():
                        param.grad[elements].zero_()

    def _is_last(self, group: Group) -> bool:
        """Whether all of a group has been stepped after this; ZeRO-3 puts in one part of a group after the other."""
        parts = (
            [self.partitions[param] for param in group["params"] if param in self.partitions] if self.partitions else []
        )
        return all(part.last for part in parts)

    def _step_of_wrapper(self) -> None:
        """A step with zero gradients, by which DeepSpeed has optimizers make their state while it is set up."""
        for group in self.param_groups:
            for i, param in enumerate(group["params"]):
                if param.grad is not None and bool(local_of(param.grad).any()):
                    raise RuntimeError(
                        f"{checkpoint.describe(group, i)} is stepped before it is known how DeepSpeed stores it. The "
                        "attempt to start DeepSpeed has failed; start it again"
                    )
        self.init_state()

    def _muon_step(
        self,
        group: Group,
        number: int,
        indices: list[int],
        matrices: list[preflight.Matrix],
        executors: list[Executor],
    ) -> None:
        coefficients = resolve(group["ns_coefficients"], group["ns_steps"])
        active = {k: matrix for k, matrix in enumerate(matrices) if matrix.param in indices}
        stored = {i: group["params"][i] for i in indices}
        local = {i: local_of(param) for i, param in stored.items()}
        local_buffers = {i: local_of(self.state[param]["momentum_buffer"]) for i, param in stored.items()}
        local_scales = {
            i: local_of(self.state[p]["momentum_scale"]) for i, p in stored.items() if "momentum_scale" in self.state[p]
        }
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
            some = [piece.of(grads[piece.param]) for piece in pieces]
            if not quantized:
                return update.muon_updates(some, [piece.of(buffers[piece.param]) for piece in pieces], **options)
            updates: list[Tensor] = []
            for piece, grad in zip(pieces, some, strict=True):
                i = active[piece.param].param
                if i not in quantized:
                    updates += update.muon_updates([grad], [piece.of(buffers[piece.param])], **options)
                    continue
                found = _values_of(quantized[i], piece)
                updates += (
                    update.look_ahead([grad.float()], [found], momentum=group["momentum"])
                    if group["nesterov"]
                    else [found]
                )
            return updates

        names: dict[int, str] = {}
        if self._watch is not None:
            names = self._names_of(group, matrices)
            self._watch.muon(names, {k: matrix.shape for k, matrix in enumerate(matrices)}, float(group["lr"]))
        for executor in executors:
            executor.observer = None if self._watch is None else _observer(self._watch, names)
            dtype = compute_dtype(group["ns_dtype"], executor.device.type, executor.device.index)
            orthogonalizer = Orthogonalizer(coefficients, dtype, self.max_batch_bytes)
            for pieces, directions in executor.directions(active, updates_of, orthogonalizer):
                if self._watch is not None:
                    for piece, direction in zip(pieces, directions, strict=True):
                        self._watch.direction(names[piece.param], direction, scales[piece.param])
                        del direction
                update.apply_directions_(
                    [piece.of(params[piece.param]) for piece in pieces],
                    directions,
                    lr=float(group["lr"]),
                    weight_decay=group["weight_decay"],
                    scales=[scales[piece.param] for piece in pieces],
                )
                del directions  # before the next ones are made
        if self._watch is not None:
            for k, buffer in buffers.items():
                i = active[k].param
                self._watch.momentum(names[k], quantized[i].values() if i in quantized else buffer)

    def _adamw_step(self, group: Group, indices: list[int]) -> None:
        params = [group["params"][i] for i in indices]
        states = [self.state[param] for param in params]
        update.adamw_(
            [local_of(param) for param in params],
            [gradients.local_grad(param) for param in params],
            [local_of(state["exp_avg"]) for state in states],
            [local_of(state["exp_avg_sq"]) for state in states],
            [state["step"] for state in states],
            lr=float(group["lr"]),
            betas=cast(tuple[float, float], tuple(group["adamw_betas"])),
            eps=group["adamw_eps"],
            weight_decay=group["weight_decay"],
        )
        if self._watch is not None:
            for i, state in zip(indices, states, strict=True):
                local = {key: local_of(value) for key, value in state.items()}
                name = self._names_of(group, [preflight.Matrix(i, shape_of(group["params"][i]))])[0]
                self._watch.adamw(name, local, group["adamw_betas"], group["adamw_eps"], float(group["lr"]))

    def _names_of(self, group: Group, matrices: Sequence[preflight.Matrix]) -> dict[int, str]:
        """A name for each matrix: its parameter's, numbered where a parameter is seen as a few matrices."""
        names = list(group.get("param_names") or [])
        if self.partitions is not None:
            names = [f"{len(names)} parameters, weight decay {group['weight_decay']:g}"] * len(group["params"])
        elif not names:
            number = next(k for k, other in enumerate(self.param_groups) if other is group)
            names = [f"group {number}, parameter {i}" for i in range(len(group["params"]))]
        given = [matrix.name or names[matrix.param] for matrix in matrices]
        parts = Counter(given)
        seen: Counter[str] = Counter()
        found = {}
        for k, name in enumerate(given):
            found[k] = f"{name}[{seen[name]}]" if 1 < parts[name] <= metrics.MOST_PARTS else name
            seen[name] += 1
        return found

    def state_dict(self) -> dict[str, Any]:
        """The state, as in torch.

        Raises:
            RuntimeError: moments are missing of a group that has taken steps. A checkpoint without them would resume
                another run.
        """
        lost = [line for group in self.param_groups for line in checkpoint.state_complaints(group, self.state)]
        if lost:
            raise RuntimeError("This optimizer's state cannot be saved:\n  - " + "\n  - ".join(lost[:10]))
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state, as in torch, after checking all of it.

        Momentum comes back in this run's `momentum_dtype`, whatever the checkpoint's. Whole tensors are cut as the
        parameters are stored, so that the state of one process loads under FSDP2. With DTensor parameters all ranks
        must load together.

        Raises:
            ValueError: state of another optimizer, of other parameters or another routing, or with moments missing;
                every complaint at once, on all ranks alike, and nothing was changed.
        """
        seen: dict[str, Any] = {}
        # How parameters are seen as matrices is decided by the model, and moments do not depend on it.
        own_views = [group.get("views") for group in self.param_groups]
        own_momentum = [group["momentum_dtype"] for group in self.param_groups]

        def check(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            if self.accept_rerouted:
                state_dict = checkpoint.reroute(self.param_groups, state_dict)
            complaints = list(checkpoint.load_complaints(self.param_groups, state_dict))
            checkpoint.refuse_load(consensus.complaints_of_all(self.param_groups, complaints))
            seen.update(state_dict)
            changed = checkpoint.changed_options(self.param_groups, state_dict)
            if changed and diagnostics.is_rank_zero():
                diagnostics.logger().warning(
                    "the checkpoint's options win over those of this run, as in any torch optimizer: %s", changed
                )
            changed = checkpoint.changed_momentum(self.param_groups, state_dict)
            if changed and diagnostics.is_rank_zero():
                diagnostics.logger().info("momentum is converted: %s", changed)
            changed = checkpoint.changed_views(self.param_groups, state_dict)
            if changed and diagnostics.is_rank_zero():
                diagnostics.logger().warning("from here on, other matrices than before are orthogonalized: %s", changed)
            return state_dict

        # Registered last, so that it sees what the user's own hooks have made of the state.
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group, kept in zip(self.param_groups, own_momentum, strict=True):
            group["momentum_dtype"] = kept
        checkpoint.restore_storage_(self.param_groups, self.state, seen)
        for group, own in zip(self.param_groups, own_views, strict=True):
            # Some ways of saving turn tuples into lists.
            group.update({name: check_option(name, group[name]) for name in GROUP_OPTIONS})
            group.pop("views", None)
            if own is not None:
                group["views"] = own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_layouts"):  # a copied or unpickled optimizer
            self._layouts, self.wrapped_views, self.being_wrapped = {}, {}, False
            self.partitions = self.replicate_group = self.metrics = self._watch = None
            self.max_bucket_bytes, self.max_batch_bytes = MAX_BUCKET_BYTES, MAX_BATCH_BYTES
            self.comm_dtype, self.offload_compute, self.accept_rerouted = "fp32", "auto", False
        for group in self.param_groups:
            group.setdefault("step", 0)
            for name, default in self.defaults.items():
                group.setdefault(name, default)


def _values_of(kept: Quantized, piece: Piece) -> Tensor:
    """The momentum of a piece, in fp32."""
    if piece.cut is None or piece.cut.dim < kept.codes.ndim - 1:
        return Quantized(piece.of(kept.codes), piece.of(kept.scales)).values()
    return piece.cut.of(kept.values(piece.local))  # columns cut blocks


def _observer(watch: metrics.Watch, names: dict[int, str]) -> Observer:
    def observe(unit: Unit, updates: Tensor, directions: Tensor) -> None:
        runs = [(names[run.param], run.stop - run.start) for run in unit.runs]
        watch.orthogonalized(runs, updates, directions)

    return observe
