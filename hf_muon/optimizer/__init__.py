"""The optimizer `Muon`: its step, its state, and its copies.

This package imports every package below it, and depends on no framework. Others use `Muon`; integrations also use
`partitioned.attach_partitions` and the checks of checkpoints in `state`, `load` and `check`, and the planner uses
`layout.StepLayout`.
"""

from hf_muon.optimizer.muon import Muon

__all__ = ["Muon"]
