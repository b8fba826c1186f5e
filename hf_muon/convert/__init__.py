"""Conversion of the optimizer states of other Muons to states of this one.

The room imports `optimizer` and the rooms below it. Others use `convert_state_dict`, the `Conversion` that it returns,
and `formats.FORMATS`, the table of the formats that it reads.
"""

from hf_muon.convert.conversion import Conversion, convert_state_dict

__all__ = ["Conversion", "convert_state_dict"]
