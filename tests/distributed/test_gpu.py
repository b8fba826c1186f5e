"""Tests that need a GPU: NCCL, streams, and kernels whose choice depends on the batch size."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.cases import assert_equal, given_gradients
from tests.distributed.pool import Pool

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpus():
    count = min(torch.cuda.device_count(), 4)
    pool = Pool(count, backend="cpu:gloo,cuda:nccl")
    yield pool
    pool.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "last", "hsdp", "fsdp-tp"])
@pytest.mark.parametrize("max_batch_bytes", [1, 2**26])
def test_given_equal_gradients_every_layout_gives_the_bits_of_one_process(gpus, layout, dtype, max_batch_bytes):
    if layout in ("hsdp", "fsdp-tp") and gpus.world_size < 4:
        pytest.skip("needs four GPUs")
    expected = given_gradients(0, "single", dtype=dtype, device="cuda")
    results = gpus.run(given_gradients, layout=layout, dtype=dtype, device="cuda", max_batch_bytes=max_batch_bytes)
    assert_equal(results, expected)


# Batches of several matrices, which fp32 products split.
BATCHES = [*[((1024, 3072), "")] * 6, *[((2048, 1024), "")] * 6, ((3, 768, 2048), "")]


@pytest.mark.parametrize("ns_dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("options", [{}, {"normalize": "rows"}], ids=str)
def test_large_batches_give_the_bits_of_one_process(gpus, ns_dtype, options):
    options = {
        "steps": 2,
        "viewed": BATCHES,
        "ns_dtype": ns_dtype,
        "max_batch_bytes": 2**27,
        "device": "cuda",
        **options,
    }
    expected = given_gradients(0, "single", **options)
    for layout in ("ddp", "fsdp"):
        assert_equal(gpus.run(given_gradients, layout=layout, **options), expected)


def test_a_step_that_is_watched_gives_the_bits_of_one_that_is_not(tmp_path):
    options = {"steps": 2, "viewed": BATCHES, "ns_dtype": "fp16", "device": "cuda"}
    expected = given_gradients(0, "single", **options)
    watched = given_gradients(
        0, "single", **options, diagnostics_every=1, diagnostics_file=str(tmp_path / "metrics.jsonl")
    )
    assert_equal([watched], expected)
