"""Diagnostics on rank 0 do not change a run on several ranks."""

from __future__ import annotations

import json

import pytest

from tests.distributed.training import train
from tests.plan.plan_cases import watched


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_weights_do_not_differ_by_a_bit_and_rank_0_alone_writes(pools, layout, tmp_path):
    assert pools[2].run(watched, layout=layout, folder=str(tmp_path)) == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["0.jsonl"]
    start, *steps = lines_of(tmp_path / "0.jsonl")
    assert [line["step"] for line in steps] == [2, 4]
    train(0, "single", last=4, diagnostics_every=2, diagnostics_file=str(tmp_path / "single.jsonl"))
    alone, *expected = lines_of(tmp_path / "single.jsonl")
    assert start["parameters"] == alone["parameters"]
    names = [parameter["name"] for parameter in start["parameters"]]
    assert {"blocks.1.qkv.weight[0]", "blocks.1.qkv.weight[2]", "blocks.1.down.weight[1]"} < set(names)
    for line, other in zip(steps, expected, strict=True):
        stored = {name for name, value in zip(names, line["update_rms"], strict=True) if value is not None}
        owned = {name for name, value in zip(names, line["stable_rank"], strict=True) if value is not None}
        matrices = {name for name, value in zip(names, other["update_rms"], strict=True) if value is not None}
        # Rank 0 stores the upper 21 of the 42 rows: queries and half of the keys.
        elsewhere = {name for name in matrices if layout == "fsdp" and name.endswith("qkv.weight[2]")}
        assert stored == matrices - elsewhere
        assert set() < owned < matrices
        whole = ["stable_rank", "orthogonality_error", *(["update_rms"] if layout == "ddp" else [])]
        for measure in whole:
            for mine, theirs in zip(line[measure], other[measure], strict=True):
                assert mine is None or mine == pytest.approx(theirs, rel=1e-2)
