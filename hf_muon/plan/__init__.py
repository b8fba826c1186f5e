"""The cost of a step on some ranks, planned by the code that the step itself uses.

The room imports `build`, `optimizer`, `distributed` and `routing`, and runs them on stand-ins for the weights. Rooms
above use `plan_step` and the `Plan` that it returns.
"""

from hf_muon.plan.step_plan import Plan, plan_step

__all__ = ["Plan", "plan_step"]
