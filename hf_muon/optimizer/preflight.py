"""Before a step: why this rank cannot take it. Ranks put their complaints together in `consensus`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_muon.diagnostics.log import first_few
from hf_muon.optimizer import gradients
from hf_muon.optimizer.groups import hyperparameter_complaint
from hf_muon.optimizer.layout import StepLayout
from hf_muon.optimizer.state import describe

Group = Mapping[str, Any]
State = Mapping[Tensor, Mapping[str, Any]]

REFUSED = "Muon refuses this step; weights and moments are as they were"


def step_complaints(groups: Sequence[Group], layout: StepLayout) -> Iterator[str]:
    """Say what is wrong with options and gradients, on this rank.

    Args:
        groups: param groups.
        layout: of these groups.
    """
    for group, work in zip(groups, layout.works, strict=False):  # fewer works where the layout has complaints itself
        if complaint := hyperparameter_complaint(group, work.devices):
            yield complaint
        for i, param in enumerate(group["params"]):
            if complaint := gradients.complaint(group, param):
                yield f"{describe(group, i)} {complaint}"


def may_be_idle(groups: Sequence[Group], state: State) -> bool:
    """Return whether this may be a step that only creates state.

    torch.distributed.checkpoint takes one with learning rates and gradients of zero, to have moments to load into. It
    must not count as a step.
    """
    return not state and all(float(group["lr"]) == 0 for group in groups)


def refuse(complaints: Sequence[str], advice: str = "", head: str = REFUSED) -> None:
    """Raise if there are complaints.

    Raises:
        RuntimeError: the first complaints, and the number of the others.
    """
    if complaints:
        raise RuntimeError(head + ":\n  - " + first_few(complaints, 10, "\n  - ") + advice)
