"""Ulysses sequence parallel over two ranks against one process without it: losses, gradients, weights."""

from __future__ import annotations

import pytest
import torch

from tests.bounds import TIMES, beyond_rounding
from tests.deepspeed.trainer_cases import config_of
from tests.deepspeed.ulysses_cases import by_hand, complaint, train

STAGES = ["zero0", "zero1", "zero2", "zero3"]
EXACT = {"optim_args": "ns_dtype=fp32", "max_grad_norm": 1e3}


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    """DeepSpeed's use of what torch has deprecated is not ours to judge."""


def tensors(result, parts):
    """Some of losses, norms of all gradients, gradients of the first step, and weights, by name."""
    lists = {part: torch.tensor(result[part]) for part in ("losses", "norms") if part in parts}
    grads = {f"{name} gradient": grad for name, grad in result["grads"][0].items()} if "grads" in parts else {}
    return {**lists, **grads, **(result["weights"] if "weights" in parts else {})}


def assert_close(found, *parts, times=TIMES, **options):
    """One process, but for rounding: losses and gradients are summed in another order."""
    expected, *controls = (tensors(by_hand(**options, moved=seed), parts) for seed in (None, 0, 1))
    assert not beyond_rounding(tensors(found, parts), expected, controls, times)


def assert_same_gradients(found, times=1):
    """Those of one process, times a number."""
    expected, *controls = (
        {name: times * grad for name, grad in by_hand(steps=1, moved=seed)["grads"][0].items()} for seed in (None, 0, 1)
    )
    assert not beyond_rounding(found["grads"][0], expected, controls)


def assert_same_on_all_ranks(ranks):
    one, *others = ranks
    for other in others:
        assert one["losses"] == other["losses"]
        assert all(torch.equal(one["weights"][name], there) for name, there in other["weights"].items())
        for here, there in zip(one["grads"], other["grads"], strict=True):
            assert all(torch.equal(here[name], there[name]) for name in there)


CASES = [
    *((name, "plain") for name in [*STAGES, "zero2_offload", "zero3_offload"]),
    *((name, kind) for name in ("zero2", "zero3") for kind in ("padded", "packed")),
]


@pytest.mark.extended(but="plain")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_equals_one_process(ranks, name, kind, tmp_path):
    found = ranks.run(train, folder=str(tmp_path), config=config_of(name), kind=kind, **EXACT)
    assert_same_on_all_ranks(found)
    assert len(found[0]["grads"]) == 3
    norms = ("norms",) if name != "zero0" else ()  # which logs none in fp32
    assert_close(found[0], "losses", "grads", "weights", *norms, kind=kind)


@pytest.mark.extended(but="zero1")
@pytest.mark.parametrize("name", ["zero0", "zero1", "zero3"])
def test_bf16(ranks, name, tmp_path):
    found = ranks.run(train, folder=str(tmp_path), config=config_of(name), bf16=True, **EXACT)
    assert_same_on_all_ranks(found)
    # Weights that are moved change all of a gradient, and not only the order of its sum.
    assert_close(found[0], "grads", "norms", dtype=torch.bfloat16, times=2)


@pytest.mark.extended
def test_newton_schulz_in_bf16(ranks, tmp_path):
    options = {"optim_args": "ns_dtype=bf16", "max_grad_norm": 1e3}
    found = ranks.run(train, folder=str(tmp_path), config=config_of("zero2"), **options)
    assert_same_on_all_ranks(found)
    assert_close(found[0], "weights", ns_dtype="bf16")


@pytest.mark.extended(but="zero2")
@pytest.mark.parametrize("name", STAGES)
def test_clipping(ranks, name, tmp_path):
    options = {"optim_args": "ns_dtype=fp32", "max_grad_norm": 0.05}
    found = ranks.run(train, folder=str(tmp_path), config=config_of(name), **options)
    assert_close(found[0], "weights", max_grad_norm=0.05)


@pytest.mark.extended(but="zero1")
@pytest.mark.parametrize("name", STAGES)
def test_what_upstream_gives(ranks, name, tmp_path):
    """Below ZeRO-3 twice the gradient. Where this fails, a version has mended it, and nothing is corrected any more."""
    options = {"upstream": "not corrected", "steps": 1, **EXACT}
    found = ranks.run(train, folder=str(tmp_path), config=config_of(name), **options)
    times = 1 if name == "zero3" else 2
    assert_same_gradients(found[0], times)


def test_what_is_mended_is_not_divided_again(ranks, tmp_path):
    options = {"upstream": "fixed", "steps": 1, **EXACT}
    found = ranks.run(train, folder=str(tmp_path), config=config_of("zero2"), **options)
    assert_same_gradients(found[0])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is ignored"),
        ({"compute_loss_func": max}, "compute_loss_func is ignored"),
        ({"trainer": "NoCall"}, "NoCall.compute_loss does not call Trainer.compute_loss"),
        ({"size": 1}, None),
    ],
)
def test_refused(ranks, options, told, tmp_path):
    for found in ranks.run(complaint, folder=str(tmp_path), config=config_of("zero2"), steps=1, **options):
        assert (found is None) if told is None else (told in found)
