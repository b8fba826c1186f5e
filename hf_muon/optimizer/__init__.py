"""`Muon`, and what a step, a load and a copy of it need.

The room imports every room below it and names no framework. Others use `Muon`; integrations also use
`partitioned.attach_partitions` and what `state`, `load` and `check` say of checkpoints, the planner
`layout.StepLayout`.
"""

from hf_muon.optimizer.muon import Muon

__all__ = ["Muon"]
