"""class Muon: one torch optimizer for the matrices (Muon) and for the rest (AdamW)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from hf_muon.config import COMM_DTYPES, GROUP_OPTIONS, MAX_BUCKET_BYTES, check_option, unknown_option
from hf_muon.diagnostics import log as diagnostics
from hf_muon.diagnostics import metrics
from hf_muon.distributed.executor import Executor
from hf_muon.distributed.select import accelerator
from hf_muon.math import update
from hf_muon.math.newton_schulz import MAX_BATCH_BYTES
from hf_muon.optimizer import consensus, copies, empty_steps, gradients, loading, preflight
from hf_muon.optimizer import first_step_report as step_report
from hf_muon.optimizer import state as checkpoint
from hf_muon.optimizer.step import Watched, adamw_step, muon_step
from hf_muon.storage import views
from hf_muon.storage.partitions import Partitions
from hf_muon.storage.tensors import has_data, local_of, shape_of, storage_complaint

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
    a text for each parameter; :mod:`hf_muon.storage.views` has the words.

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

    A copy (``copy.deepcopy``, pickle) carries all options, but writes no metrics, not even with `diagnostics_every`:
    its lines would stand among the original's. Build a new optimizer with a file of its own for them, and load the
    state into it.

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
        self.diagnostics_every: int = check_option("diagnostics_every", diagnostics_every)
        self.diagnostics_file: str | None = check_option("diagnostics_file", diagnostics_file)
        self._begin()
        super().__init__(params, defaults)

    def _begin(self) -> None:
        """Set what an optimizer, or a copy of one, has not before its first step."""
        self.partitions: Partitions | None = None
        self.being_wrapped = False
        self.wrapped_views: Mapping[Tensor, views.View] = {}
        every = self.diagnostics_every or diagnostics.every_from_environment()
        self.metrics = metrics.Metrics(every, self.diagnostics_file) if every and diagnostics.is_rank_zero() else None
        self._watch: metrics.Watch | None = None
        self._watched_step = 0
        self._layouts: dict[tuple[int, ...], preflight.StepLayout] = {}

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as in torch; checked before it is added.

        Raises:
            ValueError: an unknown or invalid option, or a Muon group with something that is not a matrix.
            RuntimeError: a parameter stored in a way that this version cannot step.
        """
        own = dict(param_group)
        if not own.get("differentiable"):
            own.pop("differentiable", None)  # of groups that torch has loaded in an older version
        for name in own:
            if name in GROUP_OPTIONS:
                own[name] = check_option(name, own[name])
            elif name not in ("params", "param_names", "use_muon", "views", "step", *_FOREIGN_KEYS):
                raise unknown_option(name, ("params", "use_muon", "views", *GROUP_OPTIONS))
        if not isinstance(own.get("use_muon", True), bool):
            raise ValueError(f"use_muon={own['use_muon']!r} is not valid. Valid: true or false")
        before = len(self.param_groups)
        super().add_param_group(own)
        if not any(param in self.state for param in own["params"]):
            own["step"] = 0  # of a loaded optimizer's group, perhaps, whose moments are not here
        try:
            self._check_group(self.param_groups[before])
        except Exception:
            del self.param_groups[before:]
            raise

    def _check_group(self, group: Group) -> None:
        for key, none in (("views", ", '' for none"), ("param_names", "")):
            if complaint := views.texts_complaint(group.get(key), len(group["params"])):
                raise ValueError(f"{key}: {complaint}; give each one{none}")
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

    def _layout(self) -> preflight.StepLayout:
        """How the parameters that now stand in the param groups are stored."""
        key = tuple(id(param) for group in self.param_groups for param in group["params"])
        layout = self._layouts.get(key)
        if layout is None or layout.key != preflight.storage_key(self.param_groups):
            if self.partitions is None:  # otherwise ZeRO puts in one partition after the other
                self._layouts.clear()
            layout = self._layouts[key] = preflight.StepLayout(
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
            active = consensus.agree(self.param_groups, self.state, layout, complaints, may_be_idle=may_be_idle)
        if active is None:
            self.init_state()
            return []
        if self.partitions is None and not any(active):
            empty_steps.warn_once(self)
        return [
            (group, indices, matrices, executors)
            for group, indices, matrices, executors in zip(
                self.param_groups, active, layout.matrices, layout.executors, strict=True
            )
            if indices
        ]

    def _complaints(self, layout: preflight.StepLayout) -> list[str]:
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
        self._watch = None
        if self.metrics is not None and self._has_data():
            # ZeRO-3 empties the groups that it does not step now, and has stepped some of them already.
            first = next(group for group in self.param_groups if group["params"])
            self._watched_step = first["step"] + 1
            self._watch = self.metrics.begin(self._watched_step, local_of(first["params"][0]).device)

    @_disable_dynamo  # compiled, products and sums would be rounded otherwise, differently on each rank
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
                work = (number, indices, matrices, executors, self.max_batch_bytes)
                muon_step(group, self.state, *work, self._watched())
            else:
                adamw_step(group, self.state, indices, self._watched())
        if self.metrics is not None:
            self.metrics.end(self._watched_step, whole=self._all_stepped())
        return loss

    def _has_data(self) -> bool:
        """Whether there is something to measure; estimators of memory step on the meta device, or fake tensors."""
        return all(has_data(local_of(param)) for group in self.param_groups for param in group["params"][:1])

    def _watched(self) -> Watched | None:
        return None if self._watch is None else Watched(self._watch, self.param_groups, self.partitions is not None)

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

    def state_dict(self) -> dict[str, Any]:
        """The state, as in torch.

        Raises:
            RuntimeError: moments are missing of a group that has taken steps. A checkpoint without them would resume
                another run.
        """
        lost = [line for group in self.param_groups for line in checkpoint.state_complaints(group, self.state)]
        if lost:
            raise RuntimeError(
                "This optimizer's state cannot be saved:\n  - " + diagnostics.first_few(lost, 10, "\n  - ")
            )
        return super().state_dict()

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state, as in torch, after checking all of it.

        Momentum comes back in this run's `momentum_dtype`, whatever the checkpoint's. Whole tensors are cut as the
        parameters are stored, so that the state of one process loads under FSDP2. With DTensor parameters all ranks
        must load together.

        Raises:
            ValueError: state of another optimizer, of other parameters or another routing, or with moments missing;
                every complaint at once, on all ranks alike, and nothing was changed.
        """
        state_dict = loading.run_pre_hooks(self, state_dict)
        checked, notices = loading.check(self.param_groups, state_dict, accept_rerouted=self.accept_rerouted)
        previous = {"state": self.state, "param_groups": self.param_groups}
        try:
            loading.restore_(self, checked)
            loading.run_post_hooks(self)
        except BaseException:
            self.__dict__.update(previous)
            raise
        loading.log(notices)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles are made of.

        Raises:
            RuntimeError: DeepSpeed steps with this optimizer; when it is pickled, it has a `replicate_group`.
        """
        return {**super().__getstate__(), **copies.carried(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_layouts" not in self.__dict__:  # a copied or unpickled optimizer, not one that torch loads state into
            copies.complete_(self)
            self._begin()
            self.metrics = None  # the original may be writing into that file
