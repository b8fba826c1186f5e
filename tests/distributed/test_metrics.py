"""Watched by rank 0, a run on several ranks is the run that nobody watches."""

from __future__ import annotations

import json

import pytest

from tests.distributed.plan_cases import watched


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_weights_do_not_differ_by_a_bit_and_rank_0_alone_writes(pools, layout, tmp_path):
    assert pools[2].run(watched, layout=layout, folder=str(tmp_path)) == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["0.jsonl"]
    start, *steps = [json.loads(line) for line in (tmp_path / "0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [2, 4]
    names = [parameter["name"] for parameter in start["parameters"]]
    for line in steps:
        stored = {name for name, value in zip(names, line["update_rms"], strict=True) if value is not None}
        owned = {name for name, value in zip(names, line["stable_rank"], strict=True) if value is not None}
        assert stored == {
            name for name in names if "blocks" in name and name.endswith(("qkv.weight", "out.weight"))
        } | {name for name in names if name.endswith(("up.weight", "down.weight"))}
        assert set() < owned < stored
