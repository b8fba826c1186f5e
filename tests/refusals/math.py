"""What `orthogonalize` refuses, and layouts that a plan cannot have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_muon import MuonConfig, orthogonalize
from hf_muon.plan import Facts, Weight, numbers_of
from tests.refusals import Refusal, table


def bad(code: str, says: str, matrix: torch.Tensor | None = None, **options: Any) -> Refusal:
    given = torch.ones(3, 3) if matrix is None else matrix
    name = ", ".join(f"{key}={value}" for key, value in options.items()) or str(tuple(given.shape))
    return Refusal(code, "orthogonalize", lambda: orthogonalize(given, **options), says=says, name=name)


def plan(layout: str, ranks: int, **options: Any) -> Callable[[], Any]:
    weights = [Weight((70, 100), use_muon=True)]
    replicas = options.pop("replicas", 1)
    return lambda: numbers_of(Facts(weights, MuonConfig(**options), layout, ranks, replicas))


STEP = (3.0, -3.0, 1.0)
PLAN = "numbers_of"
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
        ],
        error=RuntimeError,
    ),
]
