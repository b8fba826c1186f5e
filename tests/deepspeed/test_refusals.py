"""What is refused under DeepSpeed: the table is tests/refusals/deepspeed.py."""

from __future__ import annotations

import pytest

from tests.refusals import Refusal, check, deepspeed


@pytest.mark.promise("refused-layouts", "no-silent-fallback")
@pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=case.marks) for case in deepspeed.CASES])
def test_refused(case: Refusal, request: pytest.FixtureRequest):
    check(case, request)
