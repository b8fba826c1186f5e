"""What `orthogonalize` refuses, codes of 8 bits without their scales, and layouts that a plan cannot have."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_muon import Muon, MuonConfig, orthogonalize
from hf_muon.plan.step_plan import plan_step
from tests.refusals import Refusal, table
from tests.refusals.optimizer import alone


def bad(code: str, says: str, matrix: torch.Tensor | None = None, **options: Any) -> Refusal:
    given = torch.ones(3, 3) if matrix is None else matrix
    name = ", ".join(f"{key}={value}" for key, value in options.items()) or str(tuple(given.shape))
    return Refusal(code, "orthogonalize", lambda: orthogonalize(given, **options), says=says, name=name)


def stepped(momentum_dtype: str = "int8") -> Muon:
    """Return a Muon with the momentum of a matrix of three blocks, and of one of a part of a block."""
    params = [nn.Parameter(torch.ones(4, 150)), nn.Parameter(torch.ones(5, 20))]
    optimizer = Muon(params, momentum_dtype=momentum_dtype)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def loads(damage: Callable[[dict[int, dict[str, torch.Tensor]]], None]) -> Callable[[Muon], None]:
    def load(given: Muon) -> None:
        saved = copy.deepcopy(stepped().state_dict())
        damage(saved["state"])
        given.load_state_dict(saved)

    return load


def lose_a_scale(state: dict[int, dict[str, torch.Tensor]]) -> None:
    del state[1]["momentum_scale"]


def read_as_fp32(state: dict[int, dict[str, torch.Tensor]]) -> None:
    """Leave what a template of fp32 would read: codes as numbers."""
    for own in state.values():
        own.pop("momentum_scale")
        own["momentum_buffer"] = own["momentum_buffer"].float()


def cut_a_scale(state: dict[int, dict[str, torch.Tensor]]) -> None:
    state[0]["momentum_scale"] = state[0]["momentum_scale"][:, :2]


def without_a_scale() -> Muon:
    optimizer = stepped()
    del optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_scale"]
    return optimizer


def plan(layout: str, ranks: int, **options: Any) -> Callable[[], Any]:
    replicas = options.pop("replicas", 1)
    return lambda: plan_step(nn.Linear(100, 70), MuonConfig(**options), layout, ranks, replicas=replicas)


def plan_without_fake_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.testing._internal.distributed.fake_pg", None)
    plan("ddp", 2)()


def without_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    plan("ddp", 2)()


STEP = (3.0, -3.0, 1.0)
STATE, PLAN = "Muon.load_state_dict", "plan_step"
CASES = [
    bad("not-a-matrix", r"\(m, n\) or \(B, m, n\).*\(3,\)", torch.zeros(3)),
    bad("not-a-matrix", r"\(1, 2, 3, 4\)", torch.zeros(1, 2, 3, 4)),
    bad("not-floating-point", "torch.int64", torch.zeros(3, 3, dtype=torch.int64)),
    bad("invalid-value", "'polar'.*polar_express.*deepseek_v4", ns_coefficients="polar"),
    *(
        bad("invalid-value", "ns_coefficients", ns_coefficients=wrong)
        for wrong in ((1.0, 2.0), (STEP, (2.0, 1.0)), (STEP, 2.0, 1.0))
    ),
    bad("ns-steps-misfit", "2 steps.*ns_steps=2", ns_coefficients=(STEP, STEP), ns_steps=3),
    bad("ns-steps-misfit", "10 steps", ns_coefficients="deepseek_v4", ns_steps=5),
    bad("ns-steps-misfit", "5 steps", ns_coefficients="you_jiacheng", ns_steps=4),
    bad("invalid-value", "ns_steps=0.*1", ns_steps=0),
    bad("invalid-value", "ns_steps=2.5", ns_steps=2.5),
    bad("invalid-value", "'fp8'.*auto, bf16, fp16, fp32", ns_dtype="fp8"),
    bad("fp16-on-cpu", "fp16", ns_dtype="fp16"),
    *table(
        [
            ("moments-missing", STATE, loads(lose_a_scale), "parameter 1.*momentum_scale"),
            ("moments-missing", STATE, loads(read_as_fp32)),
            ("moment-shape", STATE, loads(cut_a_scale), r"momentum_scale.*\(4, 2\)"),
        ],
        given=stepped,
    ),
    Refusal("moments-missing", STATE, loads(read_as_fp32), given=lambda: stepped("fp32"), name="into fp32"),
    *table(
        [
            ("moments-gone", "Muon.step", lambda given: given.step(), "lacks momentum_scale"),
            ("moments-gone", "Muon.state_dict", lambda given: given.state_dict()),
        ],
        given=without_a_scale,
        error=RuntimeError,
    ),
    *table(
        [
            ("invalid-value", PLAN, plan("fdsp", 2), "fdsp.*: single, ddp, fsdp"),
            ("invalid-value", PLAN, plan("fsdp", 0), "0 ranks"),
            ("ranks-of-single", PLAN, plan("single", 2), "2 ranks"),
            ("replicas-misfit", PLAN, plan("hsdp", 4, replicas=3), "3 replicas.*4 ranks"),
        ]
    ),
    *table(
        [
            ("int8-partition", PLAN, plan("zero2", 2, momentum_dtype="int8"), "int8.*bf16"),
            ("momentum-offload", PLAN, plan("zero2", 2, momentum_offload="cpu")),
            ("in-process-group", PLAN, alone(lambda _: plan("ddp", 2)())),
            ("no-distributed", PLAN, without_distributed),
            ("torch-changed", PLAN, plan_without_fake_groups, "fake process group"),
        ],
        error=RuntimeError,
    ),
]
