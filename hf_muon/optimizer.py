"""class Muon: one torch optimizer for the matrices (Muon) and for the rest (AdamW)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_muon import checkpoint, diagnostics, update
from hf_muon.coefficients import resolve
from hf_muon.config import GROUP_OPTIONS, check_option, unknown_option
from hf_muon.distributed import Executor, LocalExecutor, storage_complaint
from hf_muon.newton_schulz import compute_dtype, newton_schulz

Group = dict[str, Any]

# What torch's schedulers keep in param groups, and the tag that people give them.
_FOREIGN_KEYS = ("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum", "name")


class Muon(Optimizer):
    r"""MomentUm Orthogonalized by Newton-Schulz for matrices, AdamW for the rest, in one optimizer.

    For a matrix ``W`` of shape ``(out, in)`` with gradient ``G``::

        buffer    = momentum * buffer + (1 - momentum) * G
        update    = momentum * buffer + (1 - momentum) * G      if nesterov, else buffer
        direction = orthogonalize(update)
        W         = (1 - lr * weight_decay) * W - lr * scale(out, in) * direction

    A param group with ``use_muon: False`` is stepped by torch's own AdamW instead, with `adamw_betas` and `adamw_eps`.
    Without that key a group means Muon, and must hold nothing but matrices ``(m, n)`` or stacks of them ``(B, m, n)``.

    Momentum is kept in fp32, also under bf16 and fp16 parameters; AdamW's moments have the parameter's dtype, as in
    torch. State is whole for a group or absent.

    Args:
        params: parameters, ``(name, parameter)`` pairs, or param groups, as in any torch optimizer. Groups may set
            `use_muon` and each of the options below.
        lr: learning rate.
        weight_decay: decoupled weight decay, applied as ``1 - lr * weight_decay``.
        momentum: decay of the moving average of the gradients.
        nesterov: look one step ahead along the average.
        ns_coefficients: `polar_express`, `original`, `you_jiacheng`, `cans`, or three numbers.
        ns_steps: Newton-Schulz steps.
        ns_dtype: `auto` (bf16 where the hardware has it, else fp32), `bf16`, `fp16` or `fp32`.
        adjust_lr_fn: scale by shape: `match_rms_adamw` 0.2*sqrt(max(out, in)), `original` sqrt(max(1, out/in)),
            `rms_to_rms` sqrt(out/in).
        adamw_betas: AdamW's averaging coefficients.
        adamw_eps: AdamW's denominator term.

    Raises:
        ValueError: an option that is not valid, or a Muon group with something that is not a matrix.
        RuntimeError: a parameter stored in a way that this version cannot step (DTensor, FSDP1, ZeRO).

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
    ) -> None:
        defaults: Group = {
            "use_muon": True,
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "adjust_lr_fn": adjust_lr_fn,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
        }
        for name in GROUP_OPTIONS:
            defaults[name] = check_option(name, defaults[name])
        self._executor: Executor = LocalExecutor()
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
            elif name not in ("params", "param_names", "use_muon", *_FOREIGN_KEYS):
                raise unknown_option(name, ("params", "use_muon", *GROUP_OPTIONS))
        if not isinstance(own.get("use_muon", True), bool):
            raise ValueError(f"use_muon={own['use_muon']!r} is not valid. Valid: true or false")
        before = len(self.param_groups)
        super().add_param_group(own)
        try:
            self._check_group(self.param_groups[before])
        except Exception:
            del self.param_groups[before:]
            raise

    def _check_group(self, group: Group) -> None:
        for i, param in enumerate(group["params"]):
            complaint = storage_complaint(param)
            if complaint:
                raise RuntimeError(f"{checkpoint.describe(group, i)} {complaint}")
            if group["use_muon"] and param.ndim not in (2, 3):
                raise ValueError(
                    f"{checkpoint.describe(group, i)} is not a matrix: Muon steps (m, n) matrices and (B, m, n) stacks "
                    "of matrices. Put it into a group with use_muon=False, or let build_optimizer(model) decide"
                )
        self._check_hyperparameters(group)

    @staticmethod
    def _check_hyperparameters(group: Group) -> None:
        """What depends on more than one option, or on the device; a loaded group may bring what does not fit here."""
        resolve(group["ns_coefficients"], group["ns_steps"])
        if group["use_muon"]:
            for device in {param.device for param in group["params"]}:
                compute_dtype(group["ns_dtype"], device.type, device.index)

    def init_state(self) -> None:
        """Create the state that is missing, zero moments, for every parameter. Steps and loads do it by themselves."""
        for group in self.param_groups:
            self._reconcile_state(group)

    def _reconcile_state(self, group: Group) -> None:
        """Every parameter of the group has its state, on its device, in the dtype that the step computes with."""
        fused = not group["use_muon"] and update.uses_fused_adamw(group["params"])
        for i, param in enumerate(group["params"]):
            state = self.state[param]
            dtype = update.momentum_dtype(param) if group["use_muon"] else param.dtype
            for key in checkpoint.STATE_KEYS[group["use_muon"]]:
                if key == "step":
                    device = param.device if fused else torch.device("cpu")
                    step = state.get(key, 0.0)
                    state[key] = torch.as_tensor(step, dtype=torch.float32, device=device)
                elif key not in state:
                    state[key] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
                elif state[key].shape != param.shape:
                    raise RuntimeError(
                        f"{checkpoint.describe(group, i)}: its {key} has shape {tuple(state[key].shape)}. The "
                        "parameter was resized or replaced after the optimizer had taken steps; build a new optimizer"
                    )
                elif state[key].dtype != dtype or state[key].device != param.device:
                    state[key] = state[key].to(device=param.device, dtype=dtype)

    def _preflight(self) -> list[tuple[Group, list[int]]]:
        """The groups to step, with the indices of their parameters that have gradients and are not empty.

        Raises:
            RuntimeError: every complaint at once, before weights or moments are touched.
        """
        complaints: list[str] = []
        work: list[tuple[Group, list[int]]] = []
        for group in self.param_groups:
            indices = [i for i, param in enumerate(group["params"]) if param.grad is not None]
            for i in indices:
                complaint = storage_complaint(group["params"][i])
                if complaint is None and group["params"][i].grad.layout != torch.strided:
                    complaint = "has a sparse gradient; build its embedding with sparse=False"
                if complaint:
                    complaints.append(f"{checkpoint.describe(group, i)} {complaint}")
            if indices := [i for i in indices if group["params"][i].numel()]:
                work.append((group, indices))
        self._refuse_step(complaints)
        for group, _ in work:
            self._check_hyperparameters(group)
            self._reconcile_state(group)
        self._refuse_step(
            [f"{name} has a gradient that is not finite" for name in self._not_finite(work)],
            "\nSuch gradients come from a diverged loss (lower the learning rate), from bad input, or from fp16 "
            "without a GradScaler.",
        )
        return work

    @staticmethod
    def _refuse_step(complaints: Sequence[str], advice: str = "") -> None:
        if complaints:
            lines = [*complaints[:10], *([f"and {len(complaints) - 10} more"] if len(complaints) > 10 else [])]
            raise RuntimeError(
                "Muon refuses this step; weights and moments are as they were:\n  - " + "\n  - ".join(lines) + advice
            )

    def _not_finite(self, work: Sequence[tuple[Group, Sequence[int]]]) -> list[str]:
        """Parameters with a NaN or infinite gradient; one read from the device where there is none."""
        places = [(group, i) for group, indices in work for i in indices]
        by_device: dict[torch.device, list[Tensor]] = {}
        for group, i in places:
            grad = group["params"][i].grad
            by_device.setdefault(grad.device, []).append(grad)
        largest = [torch._foreach_norm(grads, float("inf")) for grads in by_device.values()]
        if all(bool(torch.stack([x.float() for x in norms]).isfinite().all()) for norms in largest):
            return []
        bad = [(group, i) for group, i in places if not bool(group["params"][i].grad.isfinite().all())]
        if len(bad) == len(places) > 1:
            return [f"every parameter (clipping by a norm that is not finite spreads it), {len(places)} in all,"]
        return [checkpoint.describe(group, i) for group, i in bad]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. Parameters without a gradient stay as they are, and so do their moments.

        Args:
            closure: reevaluates the model and returns the loss, as in torch.

        Raises:
            RuntimeError: a gradient that is not finite, or a parameter that cannot be stepped. Nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = self._preflight()
        for group, indices in work:
            params = [group["params"][i] for i in indices]
            grads = [param.grad for param in params]
            if group["use_muon"]:
                self._muon_step(group, params, grads)
            else:
                self._adamw_step(group, params, grads)
        return loss

    def _muon_step(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        coefficients = resolve(group["ns_coefficients"], group["ns_steps"])

        def direction(matrices: Tensor) -> Tensor:
            device = matrices.device
            return newton_schulz(matrices, coefficients, compute_dtype(group["ns_dtype"], device.type, device.index))

        for batch in self._executor.plan(params):
            some = [params[i] for i in batch]
            updates = update.muon_updates(
                [grads[i] for i in batch],
                [self.state[param]["momentum_buffer"] for param in some],
                momentum=group["momentum"],
                nesterov=group["nesterov"],
            )
            update.apply_directions_(
                some,
                self._executor.orthogonalize(updates, direction),
                lr=float(group["lr"]),
                weight_decay=group["weight_decay"],
                scales=[update.lr_scale(group["adjust_lr_fn"], param.shape) for param in some],
            )

    def _adamw_step(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        states = [self.state[param] for param in params]
        update.adamw_(
            params,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["step"] for state in states],
            lr=float(group["lr"]),
            betas=cast(tuple[float, float], tuple(group["adamw_betas"])),
            eps=group["adamw_eps"],
            weight_decay=group["weight_decay"],
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state, as in torch, after checking all of it.

        Momentum comes back in fp32, whatever the parameters' dtype and the checkpoint's.

        Raises:
            ValueError: state of another optimizer, of other parameters or another routing, or with moments missing;
                every complaint at once, and nothing was changed.
        """
        seen: dict[str, Any] = {}

        def check(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
            checkpoint.check_loadable(self.param_groups, state_dict)
            seen.update(state_dict)
            changed = checkpoint.changed_options(self.param_groups, state_dict)
            if changed and diagnostics.is_rank_zero():
                diagnostics.logger().warning(
                    "the checkpoint's options win over those of this run, as in any torch optimizer: %s", changed
                )

        # Registered last, so that it sees what the user's own hooks have made of the state.
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        checkpoint.restore_precision_(self.param_groups, self.state, seen)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_executor"):  # a copied or unpickled optimizer
            self._executor = LocalExecutor()
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
