"""Sequence parallelism: refused models, padded and packed batches, and what DeepSpeed divides gradients by."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, MistralConfig, Qwen3Config

from hf_muon.integrations.ulysses import batches, gradients, refusals

pytestmark = pytest.mark.newest


@pytest.mark.parametrize(
    ("config", "implementation"),
    [(Qwen3Config(), "sdpa"), (GPT2Config(), "sdpa"), (MistralConfig(sliding_window=8), "flash_attention_2")],
)
def test_models_that_are_not_refused(config, implementation):
    assert list(refusals.model_complaints(config, implementation)) == []


# --- batches


def test_positions_are_added_and_kept():
    ids = torch.zeros(2, 4, dtype=torch.long)
    assert torch.equal(batches.complete({"input_ids": ids}, "sdpa")["position_ids"], torch.arange(4).expand(2, -1))
    batch = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 0, 1]] * 2)}
    assert batches.complete(batch, "flash_attention_2") is batch


def test_several_texts_in_a_row_need_flash_attention():
    ids = torch.zeros(2, 4, dtype=torch.long)
    batch = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])}
    assert batches.complete(batch, "flash_attention_2") is batch
    padded = {**batch, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}
    assert batches.complete(padded, "sdpa") is padded


def test_rows_are_lengthened():
    batch = {
        "input_ids": torch.tensor([[7, 8, 9]]),
        "labels": torch.tensor([[7, 8, 9]]),
        "position_ids": torch.tensor([[0, 0, 1]]),
        "attention_mask": torch.tensor([[1, 1, 1]]),
        "names": ["one"],
    }
    rows = batches.lengthened(batch, 5)
    assert rows["input_ids"].tolist() == [[7, 8, 9, 0, 0]]
    assert rows["labels"].tolist() == [[7, 8, 9, -100, -100]]
    assert rows["position_ids"].tolist() == [[0, 0, 1, 2, 3]]
    assert rows["attention_mask"].tolist() == [[1, 1, 1, 0, 0]]
    assert rows["names"] == ["one"]


class Adapter:
    """Yields every batch twice, once for each of two ranks, as DeepSpeed's adapter does; all read the same data."""

    def __init__(self, loader, skip):
        self.loader = loader[skip:]

    def __iter__(self):
        for batch in self.loader:
            yield from ((batch, 0), (batch, 1))


@pytest.mark.parametrize("count", range(5))
def test_skipped_batches(count):
    loader = batches.ShardedLoader([1, 2, 3], Adapter, 2)
    assert len(loader) == 6
    assert list(loader.skipping(count)) == list(loader)[count:]


def test_an_epoch_starts_anew():
    loader = batches.ShardedLoader([1, 2], Adapter, 2)
    epoch = iter(loader)
    assert [next(epoch) for _ in range(len(loader))] == list(loader)  # Trainer does not exhaust it either


# --- gradients


def engine_of(**attributes):
    mpu = SimpleNamespace(initialize_sequence_parallel=None)
    zero = SimpleNamespace(sequence_parallel_size=2)
    values = {"mpu": mpu, "optimizer": zero, "sequence_parallel_size": 2, "zero_optimization": lambda: True}
    return SimpleNamespace(**{**values, **attributes})


@pytest.fixture
def optimizer():
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=1.0)


def test_a_loss_that_no_trainer_gathers_is_refused_before_weights_move(optimizer):
    engine = engine_of()
    gradients.average_over_all_ranks(engine, optimizer)
    assert engine.sequence_parallel_size == engine.optimizer.sequence_parallel_size == 1
    with pytest.raises(RuntimeError, match="it was not called"):
        optimizer.step()
    weight = optimizer.param_groups[0]["params"][0]
    assert weight.tolist() == [1, 1]
    setattr(engine, gradients.GATHERED, True)
    optimizer.step()
    assert weight.tolist() == [0, 0]


@pytest.mark.parametrize("holder", ["engine", "optimizer"])
def test_a_deepspeed_that_divides_by_something_else_is_refused(optimizer, holder):
    engine = engine_of()
    delattr(engine if holder == "engine" else engine.optimizer, "sequence_parallel_size")
    with pytest.raises(RuntimeError, match="has no sequence_parallel_size"):
        gradients.average_over_all_ranks(engine, optimizer)


def test_engines_without_sequence_parallel_stay_as_they_are(optimizer):
    engine = engine_of(mpu=None)
    gradients.average_over_all_ranks(engine, optimizer)
    assert engine.sequence_parallel_size == 2
    optimizer.step()
