import time

import pytest
import torch
from torch.distributed.tensor import Shard

from hf_muon.distributed.exchange import Exchange
from hf_muon.distributed.holdings import Holdings
from hf_muon.storage.regions import regions
from tests.distributed.test_units import llama_70b, loads, qwen3_235b_a22b, units_of


@pytest.mark.parametrize(("model", "ranks", "slack"), [(llama_70b, 64, 1.05), (qwen3_235b_a22b, 1024, 1.3)])
def test_owners_work_at_the_same_time_whatever_the_bound(monkeypatch, model, ranks, slack):
    monkeypatch.setattr("torch.distributed.get_rank", lambda group=None: 5)
    shapes = model()
    where = {shape: regions(shape, (ranks,), [Shard(0)]) for shape in set(shapes)}
    holdings = Holdings({i: where[shape] for i, shape in enumerate(shapes)}, ranks)
    units = units_of(shapes)
    begin = time.process_time()
    cpu = torch.device("cpu")
    exchange = Exchange(None, units, holdings, torch.float32, cpu, cpu, 2**28)
    rounds = exchange.rounds(frozenset(range(len(shapes))))
    assert time.process_time() - begin < 10
    span = 0
    for each in rounds:
        owned = [pair for bucket in each.buckets for pair in bucket.units]
        span += max(loads(*zip(*owned, strict=True), ranks))
    assert span <= slack * max(loads(*zip(*exchange.schedule.owned, strict=True), ranks))
