"""The dtype of the Newton-Schulz products: what `ns_dtype` means on a device."""

from __future__ import annotations

import functools

import torch

from hf_muon.math.torch_private import cpu_multiplies_bf16

NS_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


@functools.lru_cache(maxsize=64)
def compute_dtype(ns_dtype: str, device_type: str, device_index: int | None = None) -> torch.dtype:
    """Return the dtype in which Newton-Schulz runs on a device.

    ``auto`` is fp16 on NVIDIA GPUs with tensor cores: as fast as bf16, with three more bits of precision, enough for
    the Gram form, whose steps amplify rounding errors (see `cost.py`; `benchmarks/findings.md` compares both on real
    updates). It does not overflow, because the input is divided by its norm.
    Elsewhere it is bf16 if the hardware multiplies bf16 natively, and fp32 if it does not.

    Raises:
        ValueError: an unknown ``ns_dtype``, or fp16 on a CPU.
    """
    if ns_dtype not in NS_DTYPES:
        raise ValueError(f"ns_dtype={ns_dtype!r} is not valid. Valid: {', '.join(NS_DTYPES)} [invalid-value]")
    if ns_dtype == "fp16" and device_type == "cpu":
        raise ValueError(
            "ns_dtype=fp16 does not run on a CPU, where fp16 has no fast product. Use auto, bf16 or fp32 [fp16-on-cpu]"
        )
    return NS_DTYPES[ns_dtype] or _fast_dtype(device_type, device_index)


def _fast_dtype(device_type: str, device_index: int | None) -> torch.dtype:
    """Return what ``auto`` means on a device.

    A CPU that only emulates bf16 is 100 times slower with it than with fp32.
    """
    if device_type == "cuda":
        # AMD's GPUs are called "cuda", too. Some of them flush subnormal fp16 numbers, whose effect is not measured.
        if torch.version.hip is not None:
            return torch.bfloat16
        # One machine may hold cards of different generations, hence the index.
        has_tensor_cores = torch.cuda.get_device_capability(device_index)[0] >= 7
        return torch.float16 if has_tensor_cores else torch.float32
    has_bf16 = cpu_multiplies_bf16() if device_type == "cpu" else device_type == "xpu" and torch.xpu.is_bf16_supported()
    return torch.bfloat16 if has_bf16 else torch.float32
