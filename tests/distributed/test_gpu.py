"""Tests that need a GPU: NCCL, streams, and kernels whose choice depends on the batch size."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.cases import assert_equal, given_gradients
from tests.distributed.pool import Pool

pytestmark = pytest.mark.gpu
# Batches of several matrices, which fp32 products split.
LARGE = {"steps": 2, "viewed": [*[((1024, 3072), "")] * 6, *[((2048, 1024), "")] * 6, ((3, 768, 2048), "")]}


@pytest.fixture(scope="module")
def gpus():
    """Yield ranks that have a GPU each, or two that share the only one, through gloo: NCCL refuses that."""
    count = min(torch.cuda.device_count(), 4)
    pool = Pool(max(2, count), backend=f"cpu:gloo,cuda:{'nccl' if count > 1 else 'gloo'}")
    yield pool
    pool.close()


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "last", "hsdp", "fsdp-tp"])
@pytest.mark.parametrize(
    "options",
    [
        *({"dtype": dtype, "max_batch_bytes": size} for dtype in ("float32", "bfloat16") for size in (1, 2**26)),
        *(
            {**LARGE, "ns_dtype": ns_dtype, "max_batch_bytes": 2**27, **rule}
            for ns_dtype in ("fp16", "bf16", "fp32")
            for rule in ({}, {"normalize": "rows"})
        ),
    ],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items() if key != "viewed"),
)
def test_given_equal_gradients_every_layout_gives_the_bits_of_one_process(gpus, layout, options):
    if layout in ("hsdp", "fsdp-tp") and gpus.world_size < 4:
        pytest.skip("needs four GPUs")
    expected = given_gradients(0, "single", device="cuda", **options)
    assert_equal(gpus.run(given_gradients, layout=layout, device="cuda", **options), expected)


def test_a_step_that_is_watched_gives_the_bits_of_one_that_is_not(tmp_path):
    options = {**LARGE, "ns_dtype": "fp16", "device": "cuda"}
    watched = {"diagnostics_every": 1, "diagnostics_file": str(tmp_path / "metrics.jsonl")}
    assert_equal([given_gradients(0, "single", **options, **watched)], given_gradients(0, "single", **options))
