"""class Muon, and what one step, one load and one copy of it need.

The room imports every room below it, and names no framework: integrations call it. Others use `Muon`, and of a group's
state what `state` says.
"""

from hf_muon.optimizer.muon import Muon

__all__ = ["Muon"]
