"""What `orthogonalize` refuses, and layouts that a plan cannot have."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_muon import MuonConfig, orthogonalize
from hf_muon.plan.step_plan import plan_step
from tests.refusals import Refusal, table
from tests.refusals.optimizer import alone


def bad(code: str, says: str, matrix: torch.Tensor | None = None, **options: Any) -> Refusal:
    given = torch.ones(3, 3) if matrix is None else matrix
    name = ", ".join(f"{key}={value}" for key, value in options.items()) or str(tuple(given.shape))
    return Refusal(code, "orthogonalize", lambda: orthogonalize(given, **options), says=says, name=name)


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
PLAN = "plan_step"
CASES = [
    bad("not-a-matrix", r"\(m, n\) or \(B, m, n\).*\(3,\)", torch.zeros(3)),
    bad("not-a-matrix", r"\(1, 2, 3, 4\)", torch.zeros(1, 2, 3, 4)),
    bad("not-floating-point", "torch.int64", torch.zeros(3, 3, dtype=torch.int64)),
    bad("invalid-value", "'polar'.*polar_express, original", ns_coefficients="polar"),
    *(
        bad("invalid-value", "ns_coefficients", ns_coefficients=wrong)
        for wrong in ((1.0, 2.0), (STEP, (2.0, 1.0)), (STEP, 2.0, 1.0))
    ),
    bad("ns-steps-misfit", "2 steps.*ns_steps=2", ns_coefficients=(STEP, STEP), ns_steps=3),
    bad("invalid-value", "ns_steps=0.*1", ns_steps=0),
    bad("invalid-value", "ns_steps=2.5", ns_steps=2.5),
    bad("invalid-value", "'fp8'.*auto, bf16, fp16, fp32", ns_dtype="fp8"),
    bad("fp16-on-cpu", "fp16", ns_dtype="fp16"),
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
