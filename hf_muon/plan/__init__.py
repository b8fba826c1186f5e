"""Plan the cost of a step on a number of ranks, with the code of the step itself.

This package runs `build`, `optimizer`, `distributed` and `routing` on parameters without memory. Others use `plan_step`
and the `Plan` that it returns.
"""

from hf_muon.plan.step_plan import Plan, plan_step

__all__ = ["Plan", "plan_step"]
