from __future__ import annotations

import pytest
import torch

from hf_muon.math import precision
from hf_muon.math.precision import compute_dtype


def test_auto_is_fp32_where_the_cpu_has_no_bf16(monkeypatch):
    for has_bf16, expected in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(precision, "cpu_has_bf16", lambda has=has_bf16: has)
        compute_dtype.cache_clear()
        assert compute_dtype("auto", "cpu") is expected
    compute_dtype.cache_clear()


def test_cpu_flags_decide_on_bf16(monkeypatch):
    for flags, expected in (({"avx512_f": True}, False), ({"avx512_bf16": True}, True), ({"amx_bf16": True}, True)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda flags=flags: flags, raising=False)
        precision.cpu_has_bf16.cache_clear()
        assert precision.cpu_has_bf16() is expected
    precision.cpu_has_bf16.cache_clear()


@pytest.mark.parametrize(
    ("hip", "capability", "expected"),
    [
        (None, (9, 0), torch.float16),
        (None, (7, 0), torch.float16),
        (None, (6, 1), torch.float32),
        ("6.2", (9, 4), torch.bfloat16),
    ],
)
def test_auto_on_cuda(monkeypatch, hip, capability, expected):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    compute_dtype.cache_clear()
    assert compute_dtype("auto", "cuda", 0) is expected
    compute_dtype.cache_clear()


@pytest.mark.parametrize(
    ("ns_dtype", "message"),
    [("fp8", "Valid: auto, bf16, fp16, fp32"), ("fp16", "does not run on a CPU")],
)
def test_what_is_not_valid_lists_what_is(ns_dtype, message):
    with pytest.raises(ValueError, match=message):
        compute_dtype(ns_dtype, "cpu")
