"""What a step will cost on some ranks, planned by the code that the step itself uses.

The room imports `optimizer`, `distributed` and `routing`, and runs them on stand-ins for weights. The command line
uses `plan_step`.
"""

from hf_muon.plan.step_plan import Plan, plan_step

__all__ = ["Plan", "plan_step"]
