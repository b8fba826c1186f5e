"""Optimizer state of other Muons and other layouts, made into the state of this one.

The room imports `optimizer` and `routing`. Others use `convert_state_dict`.
"""

from hf_muon.convert.conversion import Conversion, convert_state_dict

__all__ = ["Conversion", "convert_state_dict"]
