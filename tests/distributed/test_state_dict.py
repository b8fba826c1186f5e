"""What `torch.distributed.checkpoint.state_dict` does that no cell of `tests.equality` has: cases of torch's own tests.

Cells show that every layout resumes exactly in every form. Ranks import the functions of this file by name.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_muon import Muon, build_optimizer
from tests.distributed.lacking_cases import without
from tests.distributed.training import VOCABULARY, Block, Model
from tests.equality.placed import whole

FORMS = {
    "sharded": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "whole": {"full_state_dict": True},
    "whole flat": {"full_state_dict": True, "flatten_optimizer_state_dict": True},
    "broadcast": {"full_state_dict": True, "broadcast_from_rank0": True},
    "broadcast flat": {"full_state_dict": True, "broadcast_from_rank0": True, "flatten_optimizer_state_dict": True},
}


def wrapped(model, layout):
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout == "replicate":
        return replicate(model)
    if layout == "checkpointed":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    if layout != "single":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return torch.compile(model, backend="eager") if layout == "compiled" else model


def groups_of(model, case):
    """Return param groups with learning rates of their own, one of them empty in one case."""
    params = dict(model.named_parameters())
    one, two = params["blocks.0.up.weight"], params["blocks.0.down.weight"]
    if case == "an empty group":
        return [{"params": [one, two]}, {"params": [], "lr": 0.2}]
    return [{"params": [one]}, {"params": [two], "lr": 0.2}]


def started(layout, case=""):
    torch.manual_seed(0)
    model = Model()
    if case == "tied":
        model.lm_head.weight = model.embed.weight
    elif case == "frozen":
        model.blocks[0].requires_grad_(False)
    model = wrapped(model, layout)
    return model, optimizer_of(model, case)


def optimizer_of(model, case=""):
    if "group" in case:
        return Muon(groups_of(model, case), lr=0.1, ns_dtype="fp32")
    optimizer = build_optimizer(model, lr=1e-2, ns_dtype="fp32")
    for group in optimizer.param_groups if case == "lr as a tensor" else ():
        group["lr"] = torch.tensor(1e-2)  # torch then loads the options of groups one by one
    return optimizer


def train(model, optimizer, steps=2, seed=0):
    """Step on batches that are equal on all ranks, and drop the gradients."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(seed + step)
        model(torch.randint(VOCABULARY, (8, 3), generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def parts(state, where=""):
    """Return what a state dict has by its path, tensors whole and as lists of numbers, to compare with another one."""
    if isinstance(state, (dict, list, tuple)):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {path: value for key, own in items for path, value in parts(own, f"{where}/{key}").items()}
    return {where: (str(state.dtype), whole(state).tolist()) if isinstance(state, torch.Tensor) else state}


def differing(one, other):
    """Return the paths at which two states differ."""
    return sorted(path for path in {**one, **other} if path not in one or one[path] != other.get(path))


def round_trip(rank, layout, form, case="", lacks=(), steps=0, strict=True):
    """Load what was saved into a new optimizer; return the error, or the differences from the one that was saved.

    Args:
        rank: of this process.
        layout: of the model.
        form: of `FORMS`.
        case: of the model or its optimizer.
        lacks: what to remove from the state.
        steps: that the new optimizer has taken before.
        strict: of torch's options.
    """
    model, optimizer = started(layout, case)
    if case == "scheduled":
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.95**epoch)
    train(model, optimizer)
    expected = parts(optimizer.state_dict())
    saves = {key: value for key, value in FORMS[form].items() if not key.startswith("broadcast")}
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**saves))
    without(state, lacks, "flat" in form)
    fresh = optimizer_of(model, case)
    train(model, fresh, steps, seed=7)
    if case == "frozen by now":
        model.blocks[1].down.weight.requires_grad_(False)
    mine = {} if "broadcast" in form and rank else state
    reads = {key: value for key, value in FORMS[form].items() if not lacks or not key.startswith("flatten")}
    try:
        set_optimizer_state_dict(model, fresh, mine, options=StateDictOptions(strict=strict, **reads))
    except (RuntimeError, ValueError, AssertionError, KeyError) as error:
        return str(error)
    if case == "frozen by now":
        assert not model.blocks[1].down.weight.requires_grad
        assert model.blocks[1].up.weight.requires_grad
    if case == "scheduled" and rank == 0:  # torch gives only rank 0 the values of the groups
        assert {group["initial_lr"] for group in fresh.param_groups} == {1e-2}
    differences = differing(expected, parts(fresh.state_dict()))
    return [path for path in differences if case != "scheduled" or "initial_lr" not in path]


def everywhere(pools, layout, function=round_trip, **options):
    if layout == "single":
        return [function(0, layout=layout, **options)]
    return pools[2].run(function, layout=layout, **options)


@pytest.mark.first_tier("stepped-(fsdp-(tied-flat|frozen-|scheduled|two.*broadcast)|compiled.*flat)")
@pytest.mark.second_tier("stepped|new-fsdp-(tied|scheduled)")
@pytest.mark.parametrize(
    ("layout", "case", "form"),
    [
        *((layout, "", form) for layout in ("replicate", "compiled", "checkpointed") for form in ("sharded", "flat")),
        *(("fsdp", "tied", form) for form in ("sharded", "flat")),
        *((layout, "frozen", "sharded") for layout in ("ddp", "fsdp")),
        *((layout, "", "broadcast") for layout in ("ddp", "fsdp")),
        ("fsdp", "scheduled", "broadcast"),
        *(
            ("fsdp", case, form)
            for case in ("two groups", "an empty group", "frozen by now")
            for form in ("sharded", "whole", "broadcast")
        ),
    ],
    ids=lambda value: value or "plain",
)
@pytest.mark.parametrize("steps", [0, 2], ids=["new", "stepped"])
def test_what_is_loaded_is_what_was_saved(pools, layout, case, form, steps):
    assert everywhere(pools, layout, case=case, form=form, steps=steps) == [[], []]


WHAT_LACKS = {
    "blocks.1.down.weight momentum_buffer": r"blocks.1.down.weight \(20, 52\) lacks \['momentum_buffer'\]",
    "norm.bias exp_avg_sq": r"norm.bias \(20,\) lacks \['exp_avg_sq'\]",
    "norm.bias step": r"norm.bias \(20,\) lacks \['step'\]",
    "blocks.1.down.weight": r"blocks.1.down.weight \(20, 52\) lacks \['momentum_buffer'\]",
}
"""What a whole state lacks, and what the error must say."""


@pytest.mark.first_tier("^fsdp-broadcast-(blocks.*buffer|norm.*step)")
@pytest.mark.second_tier("^(single-whole|fsdp-broadcast)-(?!flat)|^fsdp-broadcast flat-norm.bias step|buffer$")
@pytest.mark.parametrize("lacks", WHAT_LACKS)
@pytest.mark.parametrize(
    ("layout", "form"),
    [
        *(("single", form) for form in ("whole", "whole flat")),
        *(
            (layout, form)
            for layout in ("ddp", "fsdp")
            for form in ("whole", "whole flat", "broadcast", "broadcast flat")
        ),
    ],
)
def test_whole_states_that_lack_moments_are_refused(pools, layout, form, lacks):
    """Expect an error, and not the moments of the optimizer that loads: zeros, or those of other steps."""
    for steps in (0, 2):
        first, *others = everywhere(pools, layout, form=form, lacks=[lacks], steps=steps)
        assert re.search(rf"{WHAT_LACKS[lacks]} \[moments-missing\]", first)
        assert others in ([], [first])


@pytest.mark.parametrize(
    ("lacks", "options", "says"),
    [
        ("blocks.1.down.weight", {"strict": False}, r"blocks.1.down.weight.*\[moments-missing\]"),
        ("groups step", {"steps": 2}, r"\[no-steps\]"),
        ("groups use_muon", {}, r"\[foreign-state\]"),
    ],
)
def test_whole_states_that_lack_something_are_refused_with_every_option_of_torch(pools, lacks, options, says):
    """Torch copies a checkpoint over a template, which has the counts of the optimizer that loads."""
    for text in everywhere(pools, "fsdp", form="broadcast", lacks=[lacks], **options):
        assert re.search(says, text)


def loads_nothing(rank, layout, form):
    """Return the differences from an optimizer that loads nothing, after training, of one that loads no moments."""
    results = []
    for loads in (False, True):
        model, optimizer = started(layout)
        if loads:
            options = StateDictOptions(**FORMS[form])
            groups = get_optimizer_state_dict(model, optimizer_of(model), options=options)["param_groups"]
            state = {} if "broadcast" in form and rank else {"state": {}, "param_groups": groups}
            set_optimizer_state_dict(model, optimizer, state, options=options)
        train(model, optimizer)
        results.append(parts(optimizer.state_dict()))
    return differing(*results)


@pytest.mark.parametrize("form", ["whole", "broadcast"])
def test_a_whole_state_of_no_steps_needs_no_moments(pools, form):
    assert everywhere(pools, "fsdp", loads_nothing, form=form) == [[], []]


def test_torch_itself_loads_zeros_for_a_moment_that_a_whole_state_lacks():
    """The reason for `torch_states.patch_loading`, as a report to torch would show it: if this fails, torch is mended.

    AdamW, which nothing of ours touches, trains on with a first moment of zeros, without a word.
    """
    model, options = nn.Linear(2, 2, bias=False), StateDictOptions(full_state_dict=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer, options=options)
    del state["state"]["weight"]["exp_avg"]
    optimizer.zero_grad()
    resumed = torch.optim.AdamW(model.parameters())
    set_optimizer_state_dict(model, resumed, state, options=options)
    assert not resumed.state[model.weight]["exp_avg"].any()
