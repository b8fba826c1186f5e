"""Muon as the optimizer that DeepSpeed ZeRO wraps."""

from hf_muon.integrations.deepspeed.engine import initialize

__all__ = ["initialize"]
