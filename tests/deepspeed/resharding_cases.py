"""Runs that begin in one layout and continue in another, and what every parameter then consists of."""

from __future__ import annotations

from unittest import mock

import deepspeed
import torch
import torch.distributed as dist

from hf_muon.optimizer.rule_state import is_reduced, reduced_numel, reduced_shapes
from tests.deepspeed import cases
from tests.deepspeed.models import build_model, loss_of, tokens_of


def whole_state(engine, optimizer):
    """Return for each parameter its weight, and its master weight and moments, flat, of all ranks' partitions."""
    params = dict(engine.module.named_parameters())
    result = {}
    for name, param in params.items():
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            result[name] = {"weight": param.detach().clone()}
    pieces = {}
    for flat, partition in (optimizer.partitioned.partitions or {}).items():
        small = {key: value for key, value in optimizer.state[flat].items() if is_reduced(key)}
        for part in partition.slices:
            for key, value in small.items():
                numel = reduced_numel(reduced_shapes(part.shape, part.view.text))
                result[part.name][key], small[key] = value[:numel].clone(), value[numel:]
            for key, value in {"master": flat.detach(), **optimizer.state[flat]}.items():
                if key in small:
                    continue
                own = value.reshape(1) if key == "step" else value[part.elements(partition.rank)]
                pieces[part.name, key] = own.clone()
    if optimizer.partitioned.partitions is None:
        names = {param: name for name, param in params.items()}
        groups = getattr(engine.optimizer, "fp16_groups", None) or [g["params"] for g in optimizer.param_groups]
        for group, standing in zip(groups, optimizer.param_groups, strict=True):
            for param, master in zip(group, standing["params"], strict=True):
                for key, value in {"master": master.detach(), **optimizer.state[master]}.items():
                    result[names[param]][key] = value.reshape(-1).clone()
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, pieces)
    for name, key in pieces:
        own = [rank[name, key] for rank in gathered]
        result[name][key] = own[0] if key == "step" else torch.cat(own)
    return result


def start(stage, tied=False, **options):
    """Start an engine whose model has a buffer, and one matrix as embedding and head if `tied`."""

    def model(*args):
        network = build_model(*args)
        network.register_buffer("steps", torch.zeros(2))
        if tied:
            network.lm_head.weight = network.embed.weight
        return network

    with mock.patch.object(cases, "build_model", model):
        return cases.engine_of(stage, **options)


def forget_weights(engine):
    """Write zeros over all weights, frozen ones too, which a process would otherwise have without a checkpoint."""
    for param in engine.module.parameters():
        for tensor in (param, getattr(param, "ds_tensor", param)):
            tensor.data.zero_()


def chain(rank, stage, load=None, save=None, first=0, last=1, drop=None, **options):
    """Train some steps from a checkpoint, on the same data on all ranks.

    Returns:
        the whole state right after the load and at the end; the losses; and what a checkpoint counts, right after the
        load: the engine's steps, the optimizer's, a buffer of the model, and an entry of the user's.
    """
    engine, optimizer = start(stage, **options)
    client = {"last": 0}
    if load:
        forget_weights(engine)
        _, client = engine.load_checkpoint(load)
        assert not any("hf_muon" in key for key in client)
    if drop:
        cases.drop_momentum(optimizer, drop)
    loaded = whole_state(engine, optimizer)
    steps = {group["step"] for group in optimizer.param_groups}
    counts = {engine.global_steps, client["last"], *steps, *engine.module.steps.tolist()}
    losses = [step_of(engine, step) for step in range(first, last)]
    saved = whole_state(engine, optimizer)
    if save:
        engine.save_checkpoint(save, client_state={"last": last})
    engine.destroy()
    return {"loaded": loaded, "saved": saved, "losses": losses, "counts": counts}


def straight(rank, last, stage=2, **options):
    """Train without a checkpoint; return the losses, and the whole state before each step and after the last one."""
    engine, optimizer = start(stage, **options)
    states, losses = [whole_state(engine, optimizer)], []
    for step in range(last):
        losses.append(step_of(engine, step))
        states.append(whole_state(engine, optimizer))
    engine.destroy()
    return {"states": states, "losses": losses}


def step_of(engine, step):
    """Take a step and return its loss."""
    loss = loss_of(engine, tokens_of(step, 0, 1, 0, 1))
    engine.backward(loss)
    engine.step()
    engine.module.steps += 1
    return loss.item()
