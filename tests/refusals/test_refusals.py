"""Every case of the table, and that it has every code of the package."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hf_muon import Muon
from scripts import messages
from tests.refusals import Refusal, areas, check, codes_of_tests, differences, snapshot


def cases() -> Iterator[object]:
    """Yield the cases of all areas but that of DeepSpeed, which tests/deepspeed runs."""
    for name in areas():
        if name != "deepspeed":
            area = importlib.import_module(f"tests.refusals.{name}")
            for case in area.CASES:
                yield pytest.param(case, id=f"{name}-{case}", marks=case.marks)


@pytest.mark.promise("refused-layouts", "no-silent-fallback", "old-versions")
@pytest.mark.parametrize("case", list(cases()))
def test_refused(case: Refusal, request: pytest.FixtureRequest):
    check(case, request)


def test_the_table_has_every_code():
    assert sorted(set(messages.messages()) - codes_of_tests()) == [], "no case of tests/refusals has these codes"


# --- the table itself


def optimizer() -> Muon:
    made = Muon([nn.Parameter(torch.ones(4, 3))], lr=0.1)
    made.param_groups[0]["params"][0].grad = torch.ones(4, 3)
    made.step()
    return made


@pytest.mark.parametrize(
    "change",
    [
        lambda made, _: made.param_groups[0]["params"][0].data.mul_(2),
        lambda made, _: made.param_groups[0]["params"][0].grad.mul_(2),
        lambda made, _: made.zero_grad(),
        lambda made, _: next(iter(made.state.values()))["momentum_buffer"].mul_(2),
        lambda made, _: made.state.clear(),
        lambda made, _: made.param_groups[0].update(lr=0.2),
        lambda made, _: made.param_groups.append({}),
        lambda _, folder: (folder / "file").write_text("no-params"),
        lambda _, folder: (folder / "new").mkdir(),
    ],
)
def test_a_change_is_noticed(change, tmp_path):
    made = optimizer()
    (tmp_path / "file").write_text("mine")
    given = {"optimizer": made, "folder": tmp_path}
    before = snapshot(given)
    assert not differences(before, snapshot(given))
    change(made, tmp_path)
    assert differences(before, snapshot(given))


def raising(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: None, "not refused"),
        (list, "there is no text"),
        (lambda: raising(ValueError("it is wrong [no-params]")), "wrong"),
        (lambda: raising(ValueError("it is wrong")), "wrong"),
        (lambda: raising(ValueError("it is wrong [no-steps]\nand [no-params]")), "no-params"),
        (lambda: raising(RuntimeError("it is wrong [no-steps]")), "wrong"),
        (lambda: raising(ValueError("3 is wrong [no-steps]")), "3 is"),
        (lambda: ["it is wrong [no-steps]", "nothing"], "nothing"),
    ],
)
def test_a_case_fails_where_it_must(attempt, message, request):
    with pytest.raises((AssertionError, RuntimeError), match=message):
        check(Refusal("no-steps", "f", attempt, says="it"), request)
    check(Refusal("no-steps", "f", lambda: raising(ValueError("it is wrong [no-steps]")), says="it"), request)
