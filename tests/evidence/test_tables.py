"""Tables say what the rows say, and no more."""

from __future__ import annotations

import itertools
import math
import shutil
from statistics import NormalDist

import pytest

from evidence.agenda import wanted
from evidence.budgets import budgets_table, fewer_tokens
from evidence.conclusions import conclusion, verdict
from evidence.forgetting import forgetting_panels
from evidence.results import COLUMNS, read_rows
from evidence.significance import Difference, incomplete_beta, paired, smallest_shown, speed_up, step_of, student_tails
from evidence.study import Study
from evidence.tables import draw, finals_table, pictures, section
from evidence.tuning_tables import rates_table
from tests.evidence.quick_study import CONTENT
from tests.evidence.quick_trial import BEST


def row(cell, side, seed, final, **changes):
    values = {
        "id": f"{cell}/{side}/final/fixed/{seed}",
        "cell": cell,
        "side": side,
        "kind": "final",
        "settings": "{}",
        "seed": str(seed),
        "status": "done",
        "loss": f"{final:.5f}",
        "losses": f"50:{final + 1:.5f} 100:{final:.5f}",
        "steps": "100",
        "cpu_seconds": "10",
    }
    return {**dict.fromkeys(COLUMNS, ""), **values, **changes}


def by_cell(rows):
    groups = {}
    for one in rows.values():
        groups.setdefault((one["cell"], one["side"]), []).append(one)
    return groups


@pytest.fixture
def rows():
    losses = {"adamw": (4.0, 4.1, 4.2), "muon": (3.45, 3.6, 3.75)}
    rows = [row("short", side, seed, loss) for side, own in losses.items() for seed, loss in enumerate(own)]
    rows += [row("long", "adamw", 0, 3.0), row("long", "muon", 0, 3.0, status="diverged", loss="", losses="")]
    return {one["id"]: one for one in rows}


def test_a_table_of_finals(rows):
    table, short = finals_table(Study("quick", CONTENT), by_cell(rows), {}).split("\n\n")
    assert short == "*short.* Lower loss than the reference: muon (-0.500)."
    lines = table.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [line[:2] for line in cells[2:]] == [
        *(["short", "adamw"], ["short", "muon"], ["long", "adamw"], ["long", "muon"])
    ]
    assert all(len(line) == len(cells[0]) for line in cells)
    adamw, muon, _, diverged = cells[2:]
    assert adamw[3] == "4.1000 ± 0.1000 (3)"
    # AdamW's 4.1 is halfway between Muon's 4.6 at step 50 and 3.6 at step 100.
    assert muon[3:7] == ["3.6000 ± 0.1500 (3)", "-0.5000 ± 0.0500", "0.003", "1.33x"]
    assert muon[-1] == "lower loss"
    assert diverged[3] == "diverged (1)"


def test_a_side_with_a_trial_that_diverged_has_no_verdict(rows):
    worst = row("short", "muon", 2, 0.0, status="diverged", loss="", losses="")
    table, *sentences = finals_table(Study("quick", CONTENT), by_cell({**rows, worst["id"]: worst}), {}).split("\n\n")
    assert "| 3.5250 ± 0.1061 (2) |  |  |  |  |  | 1 of 3 did not end |" in table
    assert not sentences


def test_time_is_steps_by_the_time_of_a_step(rows):
    times = {("short", "adamw"): [10.0, 20.0, 30.0], ("short", "muon"): [5.0, 20.0, 20.0]}
    lines = finals_table(Study("quick", CONTENT), by_cell(rows), times).splitlines()
    assert lines[2].endswith("| 20 | the reference |")
    assert "| 1.33x | 2.00x | 20 |" in lines[3]  # 1.5 times quicker in the middle one of three turns
    del times["short", "adamw"]
    assert "| 1.33x |  | 20 |" in finals_table(Study("quick", CONTENT), by_cell(rows), times).splitlines()[3]


def test_sides_without_a_common_seed_are_not_compared(rows):
    rows = {one["id"]: one for one in (row("short", "adamw", 1, 4.0), row("short", "muon", 2, 3.0))}
    lines = finals_table(Study("quick", CONTENT), by_cell(rows), {}).splitlines()
    assert lines[-1].endswith("|  |  |  |  |  | no seed in common with the reference |")


@pytest.mark.parametrize(
    ("mean", "p", "pairs", "text"),
    [
        (-0.5, 0.001, 3, "lower loss"),
        (0.5, 0.001, 3, "higher loss"),
        (-0.5, 0.02, 3, "no difference shown"),
        (-0.5, 0.001, 2, "nothing yet: 2 seeds"),
        (0.0, 1.0, 3, "no difference shown"),
    ],
)
def test_verdicts(mean, p, pairs, text):
    assert verdict(Difference(mean, 0.1, p, pairs)) == text


def test_only_what_does_not_differ_with_any_seed_is_equal():
    assert verdict(Difference(0.0, 0.0, 1.0, 3)) == "equal"


def test_a_conclusion_says_what_is_shown_and_what_is_not():
    tests = {
        "a little": Difference(0.01, 0.1, 0.8, 3),
        "much": Difference(-0.5, 0.001, 1e-6, 3),
        "more": Difference(-0.7, 0.001, 1e-6, 3),
        "worse": Difference(0.2, 0.001, 1e-5, 3),
        "same": Difference(0.0, 0.0, 1.0, 3),
        "two": Difference(-1.0, 0.001, 1e-6, 2),
    }
    assert conclusion("short", tests) == (
        "*short.* Lower loss than the reference: more (-0.700), much (-0.500). Higher loss than the reference: "
        "worse (+0.200). Equal to the last digit: same. No difference shown: a little (+0.010). "
        "Equality is not shown either: with these seeds only a mean difference beyond 0.57 would count."
    )
    assert conclusion("short", {"two": tests["two"]}) == ""
    # t = 9.925 leaves 1 % in the tails with two degrees of freedom.
    assert smallest_shown(tests["a little"]) == pytest.approx(9.92484 * 0.1 / math.sqrt(3), rel=1e-5)


def test_fewer_tokens():
    """Take losses that fall by 1 with each fourfold budget."""
    adamw = {1.0: 5.0, 4.0: 4.0, 16.0: 3.0}
    assert fewer_tokens({1.0: 4.0, 4.0: 3.0, 16.0: 2.0}, adamw) == "4.00x"
    assert fewer_tokens({1.0: 4.5, 4.0: 3.5, 16.0: 2.5}, adamw) == "2.00x"
    assert fewer_tokens({1.0: 2.9, 4.0: 2.8, 16.0: 2.7}, adamw) == "more than 16.00x"
    assert fewer_tokens({1.0: 5.5, 4.0: 4.5, 16.0: 3.5}, adamw) == "0.50x"
    assert fewer_tokens({1.0: 6.0, 4.0: 5.7, 16.0: 5.5}, adamw) == "less than 0.06x"
    assert fewer_tokens(adamw, adamw) == "1.00x"


def untuned(**changes):
    sides = {side: {"optim": side} for side in CONTENT["sides"]}
    return Study("quick", {**CONTENT, "sides": sides, **changes})


def test_budgets_stand_side_by_side(rows):
    rows |= {
        one["id"]: one
        for one in (
            row("long", side, seed, 3.0 - 0.5 * (side == "muon")) for side in ("adamw", "muon") for seed in range(3)
        )
    }
    table = budgets_table(untuned(seeds=[0, 1, 2]), by_cell(rows)).splitlines()
    muon, adamw = "6.4e-05M 3.600, 0.000256M 2.500", "6.4e-05M 4.100, 0.000256M 3.000"
    assert table[-1] == f"| tiny, batch 2 | muon | {muon} | {adamw} | 1.88x |"
    assert round(4 ** (1 - 0.6 / 1.1), 2) == 1.88
    cells = untuned().cells
    other_batch = untuned(seeds=[0, 1, 2], cells=cells | {"long": cells["long"] | {"batch": 4}})
    assert budgets_table(other_batch, by_cell(rows)) == ""
    del rows["long/muon/final/fixed/2"]
    assert budgets_table(untuned(seeds=[0, 1, 2]), by_cell(rows)) == ""


def fine_tuned(cell, side, seed, loss, after):
    return row(cell, side, seed, loss, other_loss=f"{after:.5f}", other_loss_before="3.00000", movement="0.1")


def test_forgetting_is_compared_in_pairs_and_between_starts():
    cells = {name: {"model": "tiny", "tokens": 64, "batch": 2, "start": name} for name in ("adamw", "muon")}
    start = {"model": "tiny", "tokens": 64, "batch": 2, "optim": "muon"}
    study = untuned(cells=cells, seeds=[0, 1, 2], starts={"adamw": start, "muon": start}, other_text="docs")
    rows = {}
    for seed, noise in enumerate((0.0, 0.01, -0.01)):
        for cell, side, loss, after in (
            ("adamw", "adamw", 2.0, 3.2),
            ("adamw", "muon", 2.1, 3.5 + noise),
            ("muon", "adamw", 2.0, 3.2),
            ("muon", "muon", 1.9, 3.1),
        ):
            one = fine_tuned(cell, side, seed, loss + seed, after)
            rows[one["id"]] = one
    text = section(study, rows, {})
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert lines[0][9:14] == ["old text before", "change on old text", "beside the reference", "p", "movement"]
    muon = next(line for line in lines if line[:2] == ["adamw", "muon"])
    assert muon[9:14] == ["3.0000", "+0.5000 ± 0.0100 (3)", "+0.3000 ± 0.0100", "4e-04", "0.100"]
    # -0.1 and 0.1 beside the reference; -0.1 and 0.3 in forgetting.
    assert lines[-1][0] == "muon"
    assert lines[-1][1:5:2] == ["-0.2000 ± 0.0000", "-0.4000 ± 0.0100"]


def test_forgetting_is_drawn_for_all_rates_that_were_tried():
    study = Study("quick", {**CONTENT, "seeds": [], "tune": {"seed": 0, "repeats": 1}})
    rows = {}
    expected = {}
    while (trial := next(wanted(study, rows), None)) is not None:
        rate = trial.values["learning_rate"]
        loss = round(3 + 0.1 * math.log2(rate / 0.01) ** 2, 5)
        old = {"other_loss": str(3 + rate + trial.seed), "other_loss_before": str(3 + trial.seed)}
        rows[trial.id] = row(trial.cell, trial.side, trial.seed, loss, id=trial.id, kind="tune", **old)
        expected.setdefault((trial.cell, trial.side), {})[rate] = loss
    panels = forgetting_panels(study, rows)
    assert {(cell, side) for cell, panel in panels.items() for side in panel} == set(expected)
    for (cell, side), points in expected.items():
        drawn = panels[cell][side]
        assert sorted(drawn) == pytest.approx(sorted(points))
        assert [drawn[x] for x in sorted(drawn)] == pytest.approx([points[rate] for rate in sorted(points)])
    assert "quick-forgetting" in pictures(study, rows)


def test_a_study_without_final_trials_says_how_the_best_rate_moves():
    content = {**CONTENT, "seeds": [], "tune": {"seed": 0}}
    study = Study("quick", content)
    rows = {}
    while (trial := next(wanted(study, rows), None)) is not None:
        goal = {"short": 0.01, "long": 0.005}[trial.cell]
        loss = 3 + 0.1 * math.log2(trial.values["learning_rate"] / goal) ** 2
        rows[trial.id] = row(trial.cell, trial.side, 0, loss, id=trial.id, kind="tune")
    lines = rates_table(study, rows).splitlines()
    assert lines[2] == "| side | short | long |"
    assert lines[4:] == ["| adamw | 0.01 (1.00x) | 0.005 (0.50x) |", "| muon | 0.01 (1.00x) | 0.005 (0.50x) |"]


def test_drawing_again_changes_nothing(whole, tmp_path):
    shutil.copy(whole, tmp_path)
    study = Study("quick", CONTENT)
    draw([study], tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(files) == {"quick.csv", "tables.md", "quick-curves.svg", "quick-rates.svg"}
    draw([study], tmp_path)
    assert files == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    text = files["tables.md"].decode()
    assert f"{len(read_rows(tmp_path / 'quick.csv'))} trials, complete." in text
    assert text.count("best inside") == 4
    # The losses are a parabola in the logarithm of the rate.
    assert text.count(f"| {BEST['muon']:.2g} |") == text.count(f"| {BEST['adamw']:.2g} |") == 2


@pytest.mark.parametrize(("t", "freedom"), list(itertools.product((0.1, 1.0, 4.0), (1.5, 4, 30))))
def test_tails_of_student_are_the_integral_of_its_density(t, freedom):
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    points = [t * i / 20_000 for i in range(20_001)]
    density = [scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2) for x in points]
    integral = sum((a + b) / 2 for a, b in itertools.pairwise(density)) * t / 20_000
    assert student_tails(t, freedom) == pytest.approx(1 - 2 * integral, abs=1e-8)


def test_many_degrees_of_freedom_are_normal():
    assert student_tails(1.96, 1e6) == pytest.approx(2 * NormalDist().cdf(-1.96), abs=1e-6)
    assert incomplete_beta(0.3, 1, 1) == pytest.approx(0.3)


def test_pairs_of_a_worked_example():
    """Take Student's distribution with two degrees of freedom, whose tails are 1 - t / sqrt(t^2 + 2)."""
    a, b = {"1": 4.0, "2": 5.1, "3": 3.2, "4": 9.0}, {"3": 3.0, "2": 5.0, "1": 3.7, "5": 1.0}
    test = paired(a, b)
    assert (test.mean, test.deviation, test.pairs) == (pytest.approx(0.2), pytest.approx(0.1), 3)
    t = 0.2 / (0.1 / math.sqrt(3))
    assert test.p == pytest.approx(1 - t / math.sqrt(t**2 + 2))
    assert test.text() == "+0.2000 ± 0.1000"
    assert math.isnan(paired({"1": 1.0}, b).p)
    assert paired(b, b) == (0.0, 0.0, 1.0, 4)
    with pytest.raises(ValueError, match="no seed in common"):
        paired({"7": 1.0}, b)


def test_steps_to_a_loss():
    curve = {10: 5.0, 20: 4.0, 30: 3.5}
    assert step_of(curve, 4.5) == 15
    assert step_of(curve, 3.0) is None
    assert step_of(curve, 6.0) == 10
    slow = {10: 6.0, 20: 5.0, 30: 4.0}
    assert speed_up([curve], [slow]) == 30 / 20
    assert speed_up([slow], [curve]) == 20 / 30
