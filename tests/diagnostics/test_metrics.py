"""Metrics are right, measuring changes neither weights nor state, and each variable has one meaning."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from hf_muon import Muon, build_optimizer, orthogonalize
from hf_muon.diagnostics import log
from hf_muon.diagnostics.measures import adamw_sum_of_squares, orthogonality_error
from hf_muon.optimizer import diagnostics
from tests.distributed.training import Model, batches


@pytest.fixture
def no_variables(monkeypatch):
    for name in (log.REPORT, log.EVERY, log.OF_LLAMAFACTORY):
        monkeypatch.delenv(name, raising=False)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained(steps=7, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = Model().to(dtype)
    optimizer = build_optimizer(model, ns_dtype="fp32", lr=5e-3, weight_decay=0.1, **options)
    for step in range(steps):
        optimizer.zero_grad()
        tokens = batches(step)
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("options", [{}, {"nesterov": "false"}, {"dtype": torch.bfloat16}])
def test_weights_and_random_numbers_do_not_differ_by_a_bit(tmp_path, options):
    without, _ = trained(**options)
    after = torch.rand(3)
    watched, _ = trained(diagnostics_every=2, diagnostics_file=str(tmp_path / "d.jsonl"), **options)
    assert torch.equal(after, torch.rand(3))
    assert all(torch.equal(a, b) for a, b in zip(without.parameters(), watched.parameters(), strict=True))
    assert [line["step"] for line in lines_of(tmp_path / "d.jsonl") if line["event"] == "step"] == [2, 4, 6]


@pytest.mark.promise("diagnostics")
def test_values_are_those_of_the_matrices_themselves(tmp_path):
    """Compare one step from zero momentum with formulas in float64 on whole matrices."""
    weights = [torch.randn(12, 20), 30 * torch.randn(20, 12), torch.randn(3, 6, 8)]
    params = [nn.Parameter(w.clone()) for w in weights]
    vector = nn.Parameter(torch.randn(7))
    named = [(f"layers.{i}.w", p) for i, p in enumerate(params)]
    groups = [
        {"params": named[:2]},
        {"params": named[2:], "lr": 0.125},
        {"params": [("norm.weight", vector)], "use_muon": False, "lr": 0.25},
    ]
    file = tmp_path / "deep" / "d.jsonl"
    optimizer = Muon(groups, lr=0.5, ns_dtype="fp32", diagnostics_every=1, diagnostics_file=str(file))
    grads = [torch.randn_like(w) * 10.0**-i for i, w in enumerate(weights)]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    vector.grad = torch.randn(7)
    optimizer.step()
    _, line = lines_of(file)
    assert line["parameters"] == {
        **{name: list(w.shape) for (name, _), w in zip(named, weights, strict=True)},
        "norm.weight": [],
    }
    assert (line["step"], line["muon_lr"], line["adamw_lr"]) == (1, 0.125, 0.25)
    rates = [0.5, 0.5, 0.125]
    for i, (weight, param, grad) in enumerate(zip(weights, params, grads, strict=True)):
        moved, before = (weight - param.detach()).double(), weight.double().square().mean().sqrt().item()
        assert line["update_rms"][i] == pytest.approx(moved.square().mean().sqrt().item() / rates[i], rel=1e-4)
        assert line["weight_rms"][i] == pytest.approx(before, rel=1e-5)
        assert line["relative_update"][i] == pytest.approx(moved.square().mean().sqrt().item() / before, rel=1e-4)
        assert line["momentum_rms"][i] == pytest.approx(0.05 * grad.square().mean().sqrt().item(), rel=1e-5)
        update = (0.05 * 1.95 * grad).reshape(-1, *grad.shape[-2:])
        direction = torch.linalg.svdvals(orthogonalize(update, ns_dtype="fp32").double())
        error = (direction.square() - 1).square().mean(-1).sqrt().mean().item()
        assert line["orthogonality_error"][i] == pytest.approx(error, rel=1e-3)
    of_matrices = ("update_rms", "weight_rms", "relative_update", "momentum_rms", "orthogonality_error")
    assert [line[measure][3] for measure in of_matrices] == [None] * 5
    assert line["adamw_update_rms"] == [None, None, None, pytest.approx(1, abs=1e-5)]
    after = vector.detach().double().square().mean().sqrt().item()
    assert line["adamw_weight_rms"][3] == pytest.approx(after, rel=1e-5)
    assert line["adamw_relative_update"][3] == pytest.approx(0.25 / after, rel=1e-4)


def test_a_few_parts_of_a_weight_have_numbers_of_their_own_and_of_many_the_mean_stands(tmp_path):
    weights, grads = [torch.randn(18, 6) for _ in range(2)], [torch.randn(18, 6) for _ in range(2)]
    views = ["rows 2*(4+5)", "rows 9x2"]
    file = tmp_path / "d.jsonl"
    options = {"diagnostics_every": 1, "ns_dtype": "fp32", "adjust_lr_fn": "original", "nesterov": False}
    params = [nn.Parameter(w) for w in weights]
    named = [(f"layers.0.{name}.weight", p) for name, p in zip(("qk", "heads"), params, strict=True)]
    optimizer = Muon([{"params": named, "views": views}], diagnostics_file=str(file), **options)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.step()
    _, line = lines_of(file)
    assert list(line["parameters"].items()) == [
        ("layers.0.qk.weight[0]", [8, 6]),
        ("layers.0.qk.weight[1]", [10, 6]),
        ("layers.0.heads.weight", [2, 6]),
    ]
    directions = [
        *(orthogonalize(grads[0].view(2, 9, 6)[:, s].reshape(-1, 6), ns_dtype="fp32") for s in (slice(4), slice(4, 9))),
        orthogonalize(grads[1].view(9, 2, 6), ns_dtype="fp32"),
    ]
    for i, direction in enumerate(directions):
        scale = max(1, direction.size(-2) / 6) ** 0.5
        assert line["update_rms"][i] == pytest.approx(scale * direction.square().mean().sqrt().item(), rel=1e-4)
        assert line["orthogonality_error"][i] == pytest.approx(
            orthogonality_error(direction.reshape(-1, *direction.shape[-2:])).mean().item(), rel=1e-3
        )


def test_a_refused_step_leaves_no_line(tmp_path):
    file = tmp_path / "d.jsonl"
    param = nn.Parameter(torch.ones(4, 6))
    optimizer = Muon([param], diagnostics_every=1, diagnostics_file=str(file))
    param.grad = torch.full((4, 6), math.nan)
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.step()
    assert not file.exists()
    param.grad = torch.ones(4, 6)
    optimizer.step()
    assert [line["event"] for line in lines_of(file)] == ["start", "step"]


def test_a_run_that_goes_on_appends_after_half_a_line(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text('{"event":"step","st')
    trained(2, diagnostics_every=1, diagnostics_file=str(file))
    first, *rest = file.read_text().splitlines()
    assert first == '{"event":"step","st'
    assert [json.loads(line)["event"] for line in rest] == ["start", "step", "step"]


def test_a_file_that_cannot_be_written_ends_diagnostics_and_no_run(tmp_path):
    (tmp_path / "file").write_text("")
    without, _ = trained(2)
    watched, _ = trained(2, diagnostics_every=1, diagnostics_file=str(tmp_path / "file" / "d.jsonl"))
    assert all(torch.equal(a, b) for a, b in zip(without.parameters(), watched.parameters(), strict=True))


@pytest.mark.parametrize("measure", ["orthogonality_error", "sum_of_squares", "adamw_sum_of_squares", "decoded"])
def test_a_measure_that_fails_ends_metrics_and_no_step(measure, tmp_path, monkeypatch, caplog):
    """Rank 0 alone measures, so that the other ranks would wait for it."""

    def fails(*_):
        raise torch.OutOfMemoryError("2 GiB")

    without, _ = trained()
    monkeypatch.setattr(diagnostics, measure, fails)
    watched, optimizer = trained(diagnostics_every=2, diagnostics_file=str(tmp_path / "d.jsonl"))
    assert all(torch.equal(a, b) for a, b in zip(without.parameters(), watched.parameters(), strict=True))
    assert [group["step"] for group in optimizer.param_groups] == [7] * len(optimizer.param_groups)
    assert caplog.text.count("no more metrics: they cannot be measured (OutOfMemoryError: 2 GiB) [metrics-failed]") == 1
    assert not (tmp_path / "d.jsonl").exists()


def test_a_report_that_fails_ends_no_step(no_variables, monkeypatch, caplog):
    without, _ = trained(2)
    monkeypatch.setenv(log.REPORT, "1")
    monkeypatch.setattr(diagnostics.reports, "first_step", lambda *_: 1 / 0)
    reported, _ = trained(2)
    assert all(torch.equal(a, b) for a, b in zip(without.parameters(), reported.parameters(), strict=True))
    assert caplog.text.count("(ZeroDivisionError: division by zero) [metrics-failed]") == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_metrics_do_not_depend_on_torchs_default_dtype(dtype, tmp_path, monkeypatch):
    directions = torch.randn(2, 6, 9)
    errors = orthogonality_error(directions)
    moments = torch.randn(9), torch.rand(9), torch.tensor(3.0), (0.9, 0.99), 1e-8
    squares = adamw_sum_of_squares(*moments)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(orthogonality_error(directions), errors)
        assert torch.equal(adamw_sum_of_squares(*moments), squares)
    finally:
        torch.set_default_dtype(default)


# --- environment variables, and the older one that two of them shared


@pytest.mark.parametrize(
    ("variables", "report", "every"),
    [
        ({}, False, 0),
        ({"HF_MUON_STEP_REPORT": "1"}, True, 0),
        ({"HF_MUON_STEP_REPORT": "off"}, False, 0),
        ({"HF_MUON_DIAGNOSTICS_EVERY": "50"}, False, 50),
        ({"HF_MUON_DIAGNOSTICS_EVERY": "False"}, False, 0),
        ({"HF_MUON_DIAGNOSTICS_EVERY": " no "}, False, 0),
        ({"HF_MUON_STEP_REPORT": "1", "HF_MUON_DIAGNOSTICS_EVERY": "7"}, True, 7),
        ({"LLAMAFACTORY_MUON_DIAG": "1"}, True, 0),
        ({"LLAMAFACTORY_MUON_DIAG": "0"}, False, 0),
        ({"LLAMAFACTORY_MUON_DIAG": "1", "HF_MUON_STEP_REPORT": "0"}, False, 0),
    ],
)
def test_each_variable_has_one_meaning(variables, report, every, no_variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (log.report_wanted(), log.every_from_environment()) == (report, every)


@pytest.mark.parametrize("text", ["often", "on", "-1", "1.5", "9" * 5000, "\u0663"])
def test_what_is_no_number_of_steps_is_refused(text, no_variables, monkeypatch):
    if text in ("-1", "often"):
        with pytest.raises(ValueError, match=r"diagnostics_every=.*\[invalid-value\]"):
            build_optimizer(Model(), {"diagnostics_every": text})
    monkeypatch.setenv(log.EVERY, text)
    with pytest.raises(ValueError, match=r"HF_MUON_DIAGNOSTICS_EVERY=.*\[invalid-value\]"):
        Muon([nn.Parameter(torch.ones(3, 4))])


def test_the_variable_reaches_the_optimizer_the_option_wins_and_without_them_nothing_is_written(
    tmp_path, no_variables, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for variable in ("", "0", "off"):
        monkeypatch.setenv(log.EVERY, variable)
        assert trained(2)[1].diagnostics.every == 0
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(log.EVERY, "2")
    assert trained(2)[1].diagnostics.every == 2
    assert [path.name for path in tmp_path.iterdir()] == [log.FILE]
    assert Muon([nn.Parameter(torch.ones(3, 4))], diagnostics_every=5).diagnostics.every == 5


def test_first_few():
    names = ["a", "b", "c"]
    assert log.first_few(names) == log.first_few(names, 3) == "a, b, c"
    assert log.first_few(dict.fromkeys(names), 1) == "a, and 2 more"
    assert log.first_few(names, 2, "\n  - ") == "a\n  - b\n  - and 1 more"
    assert log.first_few([]) == ""
