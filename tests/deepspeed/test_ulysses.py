"""Ulysses sequence parallel over two ranks against one process without it: losses, gradients, weights."""

from __future__ import annotations

import pytest
import torch

from tests.bounds import TIMES, beyond_rounding
from tests.deepspeed.trainer_cases import config_of
from tests.deepspeed.ulysses_cases import by_hand, complaint, train

pytestmark = pytest.mark.usefixtures("quiet")

STAGES = ["zero0", "zero1", "zero2", "zero3"]
EXACT = {"optim_args": "ns_dtype=fp32", "max_grad_norm": 1e3}


def tensors(result, parts):
    """Return the parts of a result by name: of losses, gradient norms, gradients of the first step, and weights."""
    lists = {part: torch.tensor(result[part]) for part in ("losses", "norms") if part in parts}
    grads = {f"{name} gradient": grad for name, grad in result["grads"][0].items()} if "grads" in parts else {}
    return {**lists, **grads, **(result["weights"] if "weights" in parts else {})}


def assert_close(result, *parts, times=TIMES, **options):
    """Compare with one process, up to the rounding of another order of sums of losses and gradients."""
    expected, *controls = (tensors(by_hand(**options, moved=seed), parts) for seed in (None, 0, 1))
    assert not beyond_rounding(tensors(result, parts), expected, controls, times)


def assert_same_on_all_ranks(ranks):
    one, *others = ranks
    for other in others:
        assert one["losses"] == other["losses"]
        assert all(torch.equal(one["weights"][name], there) for name, there in other["weights"].items())
        for here, there in zip(one["grads"], other["grads"], strict=True):
            assert all(torch.equal(here[name], there[name]) for name in there)


CASES = [
    *((name, "plain") for name in [*STAGES, "zero2_offload", "zero3_offload"]),
    *((name, "padded") for name in ("zero2", "zero3")),
]


@pytest.mark.extended(but="plain")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_equals_one_process(ranks, name, kind, tmp_path):
    results = ranks.run(train, folder=str(tmp_path), config=config_of(name), kind=kind, **EXACT)
    assert_same_on_all_ranks(results)
    assert len(results[0]["grads"]) == 3
    norms = ("norms",) if name != "zero0" else ()  # ZeRO-0 logs none in fp32
    assert_close(results[0], "losses", "grads", "weights", *norms, kind=kind)


@pytest.mark.extended(but="zero1")
@pytest.mark.parametrize("name", ["zero0", "zero1", "zero3"])
def test_bf16(ranks, name, tmp_path):
    results = ranks.run(train, folder=str(tmp_path), config=config_of(name), bf16=True, **EXACT)
    assert_same_on_all_ranks(results)
    # The controls move weights, which changes all of a gradient, and not only the order of its sum.
    assert_close(results[0], "grads", "norms", dtype=torch.bfloat16, times=2)


@pytest.mark.extended
def test_newton_schulz_in_bf16(ranks, tmp_path):
    options = {"optim_args": "ns_dtype=bf16", "max_grad_norm": 1e3}
    results = ranks.run(train, folder=str(tmp_path), config=config_of("zero2"), **options)
    assert_same_on_all_ranks(results)
    assert_close(results[0], "weights", ns_dtype="bf16")


@pytest.mark.extended(but="zero2")
@pytest.mark.parametrize("name", STAGES)
def test_clipping(ranks, name, tmp_path):
    options = {"optim_args": "ns_dtype=fp32", "max_grad_norm": 0.05}
    results = ranks.run(train, folder=str(tmp_path), config=config_of(name), **options)
    assert_close(results[0], "weights", max_grad_norm=0.05)


@pytest.mark.extended(but="zero3")
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_without_reduce_scatter(ranks, name, tmp_path):
    config = config_of(name, reduce_scatter=False)
    results = ranks.run(train, folder=str(tmp_path), config=config, steps=1, **EXACT)
    assert_close(results[0], "losses", "grads", "weights", "norms", steps=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is ignored"),
        ({"compute_loss_func": max}, "compute_loss_func is ignored"),
        ({"trainer": "NoCall"}, "only where transformers' Trainer.compute_loss computes the loss"),
        ({"kind": "packed"}, "position_ids start again within a row"),
        ({"size": 1}, None),
    ],
)
def test_refused(ranks, options, words, tmp_path):
    for error in ranks.run(complaint, folder=str(tmp_path), config=config_of("zero2"), steps=1, **options):
        assert (error is None) if words is None else (words in error)
