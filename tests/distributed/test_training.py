"""Metrics of real training, from gradients that ranks compute of their own batches."""

from __future__ import annotations

import json

import pytest

from tests.distributed.training import train


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    """Record warnings: torch itself warns about single processes and gloo."""


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_rank_0_alone_writes_metrics(pools, layout, tmp_path):
    """Compare with those of one process; that they change no bit is seen in `tests.equality`."""
    pools[2].run(train, layout=layout, last=4, folder=str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["0.jsonl"]
    train(0, "single", last=4, diagnostics_every=2, diagnostics_file=str(tmp_path / "single.jsonl"))
    (_, *steps), (_, *expected) = (
        list(map(json.loads, (tmp_path / name).read_text().splitlines())) for name in ("0.jsonl", "single.jsonl")
    )
    assert [line["step"] for line in steps] == [2, 4]
    names = list(steps[0]["parameters"])
    assert steps[0]["parameters"] == expected[0]["parameters"]
    assert {"blocks.1.qkv.weight[0]", "blocks.1.qkv.weight[2]", "blocks.1.down.weight[1]"} < set(names)
    for line, other in zip(steps, expected, strict=True):
        stored, owned, matrices = (
            {name for name, value in zip(names, values, strict=True) if value is not None}
            for values in (line["update_rms"], line["orthogonality_error"], other["update_rms"])
        )
        # Rank 0 stores the upper 21 of the 42 rows: queries and half of the keys.
        elsewhere = {name for name in matrices if layout == "fsdp" and name.endswith("qkv.weight[2]")}
        assert stored == matrices - elsewhere
        assert set() < owned < matrices
        for measure in ["orthogonality_error", *(["update_rms"] if layout == "ddp" else [])]:
            for mine, theirs in zip(line[measure], other[measure], strict=True):
                assert mine is None or mine == pytest.approx(theirs, rel=1e-2)
