"""class Muon: one torch optimizer for the matrices (Muon) and for the rest (AdamW)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_muon.config import GROUP_OPTIONS, MUON_OPTIONS, MuonConfig, check_option
from hf_muon.diagnostics import log
from hf_muon.distributed.ddp import Replicas
from hf_muon.math.torch_private import disable_dynamo
from hf_muon.optimizer import agreement, copies, load, reports
from hf_muon.optimizer.agreement import Agreed, agree
from hf_muon.optimizer.checkpoint_format import packed
from hf_muon.optimizer.diagnostics import Diagnostics
from hf_muon.optimizer.groups import check_names, complete_group_, number_of, with_checked_options
from hf_muon.optimizer.head_rules import HeadRules
from hf_muon.optimizer.layout import params_of
from hf_muon.optimizer.partitioned import PartitionedStep
from hf_muon.optimizer.state import check_params, completed, state_complaints
from hf_muon.optimizer.step_plan import Mine, Plans, StepPlan, Terms, as_read, may_be_idle
from hf_muon.options.declaration import documented
from hf_muon.storage import factors
from hf_muon.versions import refuse_older

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn.parallel import DistributedDataParallel

Group = dict[str, Any]


@documented(MUON_OPTIONS)
class Muon(Optimizer):
    """MomentUm Orthogonalized by Newton-Schulz for matrices, AdamW for the rest, in one optimizer.

    For a matrix ``W`` of shape ``(out, in)`` with gradient ``G``::

        buffer    = momentum * buffer + (1 - momentum) * G
        update    = momentum * buffer + (1 - momentum) * G      if nesterov, else buffer
        direction = orthogonalize(update)
        W         = (1 - lr * weight_decay) * W - lr * scale(out, in) * direction

    A param group with ``use_muon: False`` is stepped by AdamW, with `adamw_betas` and `adamw_eps`: by torch's own where
    parameters, gradients and moments have one dtype of 32 bits or more. Every other group is stepped by Muon and may
    hold only matrices ``(m, n)`` and stacks of matrices ``(B, m, n)``. For parameters stored differently (as
    ``(in, out)``, several matrices in one, a convolution), the group's `views` has a text for each parameter, as
    :mod:`hf_muon.storage.views` describes.

    Moments are stored in fp32, also for bf16 and fp16 parameters, unless `momentum_dtype` or `adamw_state_dtype` is
    set. State is stored like its parameter; the first step with any gradient makes that of all parameters.

    A step of bf16 parameters computes in fp32 and rounds once, up or down at random, so that updates smaller than a
    unit in the last place are not lost; see `weight_rounding`. fp16 parameters can only be rounded to nearest.

    DTensor parameters (FSDP2, HSDP, tensor parallel) need nothing else: the ranks send their parts of a matrix's update
    to one owner, which orthogonalizes the matrix and sends back the parts of the direction. The same happens for plain
    parameters that DistributedDataParallel holds, in the steps whose gradients it has reduced; in others, as in
    `no_sync`, each process steps without the others. Ranks that share parameters must step together.

    Args:
        params: parameters, ``(name, parameter)`` pairs, or param groups, as in any torch optimizer. Groups may set
            `use_muon` and each of the options below. A group that does not set `use_muon` goes to Muon, embeddings and
            heads included: `build_optimizer` and `MuonOfGroups` tell them apart.
        {options}
        replicate_group: process group over which plain parameters are replicated, and their gradients equal in every
            step, if they are not in torch's DistributedDataParallel. For parameters that are not replicated, a group
            of only this rank. An initialized torch.distributed does not imply replicas.
        diagnostics_file: file to which the lines of metrics are appended; None for `muon_diagnostics.jsonl`.
        **rules: options of rules, see :mod:`hf_muon.rules`: those above that are not among the arguments, and those of
            registered rules.

    A copy (``copy.deepcopy``, pickle) has all options but writes no metrics, even with `diagnostics_every`: its lines
    would mix with those of the original. To have them, build a new optimizer with its own `diagnostics_file` and load
    the state into it.

    Raises:
        ValueError: an option that is not valid, or a Muon group with a parameter that is not a matrix.
        RuntimeError: a torch that is too old, or a parameter stored in a way that this version cannot step (FSDP1,
            ZeRO).

    Source: Jordan et al., https://kellerjordan.github.io/posts/muon/; defaults of scale and decay from Liu et al.,
    https://arxiv.org/abs/2502.16982; coefficients from Amsel et al., https://arxiv.org/abs/2505.16932.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = MuonConfig.weight_decay,
        momentum: float = MuonConfig.momentum,
        nesterov: bool = MuonConfig.nesterov,
        ns_coefficients: str | Sequence[float] | Sequence[Sequence[float]] = MuonConfig.ns_coefficients,
        ns_steps: int | str = MuonConfig.ns_steps,
        ns_dtype: str = MuonConfig.ns_dtype,
        adjust_lr_fn: str = MuonConfig.adjust_lr_fn,
        adamw_betas: tuple[float, float] = MuonConfig.adamw_betas,
        adamw_eps: float = MuonConfig.adamw_eps,
        *,
        update_rms: float = MuonConfig.update_rms,
        momentum_dtype: str = MuonConfig.momentum_dtype,
        adamw_state_dtype: str = MuonConfig.adamw_state_dtype,
        weight_rounding: str = MuonConfig.weight_rounding,
        max_batch_bytes: int = MuonConfig.max_batch_bytes,
        comm_dtype: str = MuonConfig.comm_dtype,
        replicate_group: ProcessGroup | None = None,
        diagnostics_every: int = MuonConfig.diagnostics_every,
        diagnostics_file: str | os.PathLike[str] | None = None,
        **rules: Any,
    ) -> None:
        refuse_older("torch")
        defaults = {name: of.default for name, of in GROUP_OPTIONS.items()} | {
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
            "update_rms": update_rms,
            "momentum_dtype": momentum_dtype,
            "adamw_state_dtype": adamw_state_dtype,
            "weight_rounding": weight_rounding,
        }
        # Unknown names first; the values of all are checked below.
        defaults |= {name: check_option(name, value, MUON_OPTIONS) for name, value in rules.items()}
        defaults = {name: check_option(name, value) for name, value in defaults.items()}
        self.max_batch_bytes: int = check_option("max_batch_bytes", max_batch_bytes)
        self.comm_dtype: str = check_option("comm_dtype", comm_dtype)
        self.diagnostics_every: int = check_option("diagnostics_every", diagnostics_every)
        self.replicate_group = replicate_group
        self._begin()
        self.diagnostics = Diagnostics(self.diagnostics_every or log.every_from_environment(), diagnostics_file)
        super().__init__(params, {"use_muon": True, factors.KEY: None, **defaults})

    def _begin(self) -> None:
        """Set what an optimizer, or a copy of one, does not have before its first step."""
        self.add_group: Callable[[Muon, Callable[[Group], None], Group], None] | None = None
        """Divides and adds a later param group; None to add it as it is."""
        self.partitioned = PartitionedStep()
        # In a copy, too: the original may be writing into that file.
        self.diagnostics = Diagnostics()
        self._warned_of: set[str] = set()
        """Codes of warnings that come once."""
        self.head_rules = HeadRules()
        self._plans = Plans()
        self.replicas = Replicas()

    def add_param_group(self, param_group: Group) -> None:
        """Add a param group, as in torch, unless a check of it fails.

        An optimizer of `build_optimizer` or `MuonOfGroups` divides it as its first ones, by the model, unless it says
        `use_muon`. A copy does not know the model, and adds it as it is.

        Raises:
            ValueError: no parameters, an option that is unknown or not valid, or a Muon group with a parameter that is
                not a matrix.
            RuntimeError: a parameter stored in a way that this version cannot step.
        """
        if self.add_group is None:
            self._add_as_it_is(param_group)
        else:
            self.add_group(self, self._add_as_it_is, param_group)

    def _add_as_it_is(self, param_group: Group) -> None:
        """Add a param group that says itself what goes to Muon."""
        group = with_checked_options(param_group)
        count = len(self.param_groups)
        check_params([group], count)
        check_names(group, self.param_groups)
        super().add_param_group(group)
        try:
            if not any(param in self.state for param in group["params"]):
                # The group of a loaded optimizer may say more, but its moments are not here.
                group["step"] = 0
            # A group that was taken out has taken as many steps as the others.
            elif "step" not in group:
                has_moments = any(self.state.get(param) for param in group["params"])
                steps = [other.get("step", 0) for other in self.param_groups[:count]]
                group["step"] = max(steps, default=0) if has_moments else 0
            complete_group_(self.param_groups[count])
        except Exception:
            del self.param_groups[count:]
            raise

    def init_state(self) -> None:
        """Create missing state, moments of zero, for every parameter. Steps and loads do so themselves."""
        agreement.refuse(list(state_complaints(self.param_groups, self.state)))
        for group in self.param_groups:
            for param, values in zip(group["params"], completed(group, self.state), strict=True):
                self._keep({param: values})

    def _keep(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Make the state of some parameters the optimizer's own."""
        for param, values in state.items():
            # The same dict as before: a framework may hold it.
            kept = self.state.setdefault(param, {})
            kept.clear()
            kept.update(values)

    # Compiled, products and sums would round differently, and not alike on all ranks.
    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. Parameters without a gradient on any rank stay as they are, and so do their moments.

        Args:
            closure: reevaluates the model and returns the loss, as in torch.

        Raises:
            RuntimeError: a gradient that is not finite, or a parameter that cannot be stepped. All ranks raise the same
                error, and nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.partitioned.is_expected:
            self.partitioned.check_creates_state_only(self.param_groups)
            self.init_state()
            return loss
        ddp = self.replicas.of_step(params_of(self.param_groups)) if self.replicate_group is None else None
        if ddp is not None and self.replicas.have_parted:
            # Others may not know: they loaded a state since, or did not take the step with which ranks have parted.
            agreement.say_parted(agreement.ranks_of(self.param_groups, ddp.process_group))
            ddp = None
        self._step(ddp)
        return loss

    def _step(self, ddp: DistributedDataParallel | None = None) -> None:
        groups = list(map(as_read, self.param_groups))
        # By itself: this rank sends nothing and changes nothing, and what is wrong is a complaint.
        plan = self._plan(groups, ddp)
        of_heads = self.head_rules.complaints(groups, plan.layout, self.replicate_group)
        mine = plan.gradients(groups, self.state, of_heads)
        is_idle = not mine.complaints and may_be_idle(groups, self.state)
        self.diagnostics.begin(self.param_groups, self.partitioned, plan.layout, is_idle=is_idle)
        # Together: from here on, no rank does what another does not.
        agreed = agree(plan, mine)
        if agreed is None:
            self.replicas.part()
            self._step()
            return
        if agreed.moves:
            is_first = self.partitioned.begins_step(self.param_groups)
            self.head_rules.begin(self.param_groups, plan.layout, is_first=is_first)
        # Where this step creates no state, moves nothing, and there was none before, nothing has happened.
        is_kept = mine.is_new and bool(not agreed.moves or any(agreed.indices) or self.state)
        if is_kept:
            self._keep(mine.state)
            # The step may add to it: only the layout of a flat partition knows its state by row.
            mine.state = self.state
        if agreed.moves:
            self._move(plan, mine, agreed)
        if is_kept:
            plan.note(groups, self.state)

    def _plan(self, groups: Sequence[Mapping[str, Any]], ddp: DistributedDataParallel | None = None) -> StepPlan:
        """Return the plan of a step, made again if parameters, their state or options are not what they were."""
        terms = Terms(
            ddp.process_group if ddp else self.replicate_group,
            ddp.module if ddp else None,
            self.partitioned,
            self.comm_dtype,
            self.max_batch_bytes,
        )
        return self._plans.of(groups, self.state, terms)

    def _move(self, plan: StepPlan, mine: Mine, agreed: Agreed) -> None:
        """Step the groups, and count their steps."""
        self._warn(plan, mine, agreed)
        for k, (group, indices) in enumerate(zip(self.param_groups, agreed.indices, strict=True)):
            if indices:
                watch = self.diagnostics.of_group(k, self.param_groups, plan.layout.works[k], self.partitioned)
                plan.step(k, mine, indices, watch)
            # Last, so that a step which fails here and is taken again counts once. Without state no parameter has ever
            # had a gradient: a step that counted would miss its moments [moments-gone] at the next one.
            if self.state and self.partitioned.completes_group(group):
                group["step"] = number_of(group)
        complete = self.partitioned.count(self.param_groups)
        measured = self.head_rules.finish(self.param_groups, self.partitioned.partitions, complete=complete)
        self.diagnostics.end(*measured, complete=complete)

    def _warn(self, plan: StepPlan, mine: Mine, agreed: Agreed) -> None:
        """Log warnings about steps, each once."""
        warned_of = self._warned_of
        if not any(agreed.indices) and self.partitioned.partitions is None and "no-gradients" not in warned_of:
            warned_of.add("no-gradients")
            reports.warn_of_empty_step(mine.groups)
        judges, code = reports.warn_of_weights_that_cannot_move, "weights-cannot-move"
        if code not in warned_of and judges(mine.groups, plan.layout):
            warned_of.add(code)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as in torch, with one text in place of the options of a param group.

        Raises:
            RuntimeError: a group has taken steps and its moments are missing. A run that resumes from such a checkpoint
                would continue differently.
        """
        if lost := list(state_complaints(self.param_groups, self.state)):
            raise RuntimeError("This optimizer's state cannot be saved:\n  - " + log.first_few(lost, 10, "\n  - "))
        state_dict = super().state_dict()
        return {**state_dict, "param_groups": list(map(packed, state_dict["param_groups"]))}

    @disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as in torch, after checking all of it.

        Moments are converted to this run's `momentum_dtype` and `adamw_state_dtype`. Whole tensors are sharded like
        their parameters, so that the state of a single process loads under FSDP2. With DTensor parameters, or with a
        `replicate_group`, all ranks must load together.

        Raises:
            ValueError: the state of another optimizer, of other parameters or of another routing, or one that lacks
                moments. All ranks raise every complaint at once, and nothing was changed.
        """
        load.load_(self, state_dict)
        self._plans.forget_state()
        self.replicas = Replicas()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that copies and pickles consist of.

        Raises:
            RuntimeError: a framework steps this optimizer on flat partitions; or it is pickled with a
                `replicate_group`.
        """
        return {**super().__getstate__(), **copies.carried(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy or an unpickled optimizer has none; a loaded one keeps its attributes.
        if "_plans" not in self.__dict__:
            self._begin()
            copies.complete_(self)
