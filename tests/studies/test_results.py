"""Tables, pictures and figures in the documentation are those of the studies' CSV files.

Where a test fails after new trials: run the study to its end, then correct the page.
"""

from __future__ import annotations

import math
import re
import shutil
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import fmean

import pytest

from evidence.__main__ import ORDER
from evidence.agenda import final_rows, is_tuned, searches
from evidence.conclusions import verdict
from evidence.forgetting import forgotten
from evidence.results import RESULTS, loss_of, losses_of, read_rows
from evidence.significance import LEVEL, paired, smallest_shown, speed_up
from evidence.study import STUDIES, read_study
from evidence.tables import draw
from evidence.times import quicker, read_times

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "learning-rate.md").read_text(encoding="utf-8")
README = (ROOT / "evidence" / "README.md").read_text(encoding="utf-8")
CELLS = {
    ("10 million", "122", "16"): ("pretrain", "10M short"),
    ("1 million", "122", "16"): ("batch", "16 sequences and half the tokens"),
    ("1 million", "122", "32"): ("batch", "32 sequences"),
    ("3 million", "195", "16"): ("pretrain", "3M short"),
    ("1 million", "244", "16"): ("pretrain", "1M short"),
    ("1 million", "488", "8"): ("batch", "8 sequences"),
    ("1 million", "977", "4"): ("batch", "4 sequences"),
    ("1 million", "977", "16"): ("pretrain", "1M long"),
}
SIDES = {
    "AdamW": "adamw",
    "AdamW, hidden matrices at a fifth of the rate": "adamw two rates",
    "AdamW, hidden matrices at twice the rate": "adamw hidden at twice the rate",
    "AdamW at half its best rate": "adamw at half the rate",
    "Muon": "muon",
    "Muon at half its best rate": "muon at half the rate",
    "LoRA of rank 8, AdamW": "lora and adamw",
    "LoRA of rank 8, `lora=muon`": "lora and muon",
}

SETTINGS = {
    "`adamw_lr` at four times `learning_rate`": "AdamW half at four times the rate",
    "`momentum: 0.9`": "momentum 0.9",
    "`normalize: rows`": "normalize rows",
    "`ns_coefficients: original`": "preset original",
    "`ns_steps: 3`": "3 steps",
    "`nesterov: false`": "no Nesterov",
    "`momentum: 0.98`": "momentum 0.98",
}
OTHER_MODELS = {
    "`muon_patterns: lm_head`": ("untied", "head on Muon"),
    "`adamw_patterns: experts`": ("experts", "experts on AdamW"),
    "`per_head: true`": ("fused", "per_head"),
    "fused weights as one matrix each": ("fused", "split_fused false"),
}

VARIANTS = {
    ("`normalize: rows`", "none"): ("NorMuon", "plain"),
    ("`balance: updates`", "none"): ("MuonEq", "plain"),
    ("[Aurora](https://arxiv.org/abs/2606.27715)", "none"): ("Aurora", "plain"),
    ("`momentum: 0.9`", "0.95"): ("momentum 0.9", "plain"),
    ("`balance: updates`, `momentum: 0.9`", "`momentum: 0.9`"): ("MuonEq and momentum 0.9", "momentum 0.9"),
    ("`bimaxwell: 1`", "`momentum: 0.9`"): ("bi-Maxwell", "momentum 0.9"),
    ("`sinkhorn: true` for embedding and head", "AdamW with a rate of its own"): ("Sinkhorn tables", "AdamW tables"),
}
CLIPPED = {
    "all together": ("plain", "together"),
    "nothing": ("no clipping", "none"),
    "AdamW's parameters": ("AdamW clipped apart", "AdamW's alone"),
    "Muon's parameters": (None, "Muon's alone"),
    "each of both by its own norm": (None, "each apart"),
}


@cache
def finals(name):
    """Return rows of final trials by cell and side."""
    return final_rows(read_study(STUDIES / f"{name}.yaml"), read_rows(RESULTS / f"{name}.csv"))


def table(first):
    """Return the rows of the page's table whose heading begins so, as lists of texts."""
    lines = PAGE.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(first))
    rows = next(list(group) for is_row, group in groupby(lines[begin + 2 :], lambda line: line[:1] == "|") if is_row)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def mean(own, of=loss_of):
    return fmean(map(of, own)) if own else math.nan


def lead(study, cell):
    """Return how many times fewer steps, and how much less time, Muon takes than AdamW with two rates."""
    muon, adamw = (finals(study)[cell, side] for side in ("muon", "adamw two rates"))
    fewer = speed_up([losses_of(row) for row in muon], [losses_of(row) for row in adamw])
    times = read_times(read_study(STUDIES / f"{study}.yaml"), RESULTS)
    return fewer, fewer * quicker(times[cell, "muon"], times[cell, "adamw two rates"])


def difference(study, cell, side, reference):
    rows = (finals(study)[cell, one] for one in (side, reference))
    return paired(*({row["seed"]: loss_of(row) for row in own} for own in rows))


def test_tables_and_pictures_are_what_the_results_say(tmp_path):
    for path in RESULTS.glob("*.csv"):
        shutil.copy(path, tmp_path)
    draw([read_study(STUDIES / f"{name}.yaml") for name in ORDER], tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        path.name: path.read_text() for path in RESULTS.iterdir()
    }, "make evidence draws them"


def test_fine_tuning_begins_with_what_pretrain_has_tuned():
    """The starts of `finetune` are typed by hand from the finished cell of `pretrain`."""
    pretrain, finetune = (read_study(STUDIES / f"{name}.yaml") for name in ("pretrain", "finetune"))
    by_side = searches(pretrain, "1M long", read_rows(RESULTS / "pretrain.csv"))
    assert is_tuned(by_side)
    for start, side in (("adamw", "adamw two rates"), ("muon", "muon")):
        settings = finetune.start(start, 0).spec["settings"]
        assert {name: settings[name] for name in by_side[side].best.values} == by_side[side].best.values


def test_pretraining():
    rows = table("| parameters | steps |")
    assert [tuple(row[:3]) for row in rows] == list(CELLS)
    for row in rows:
        study, cell = CELLS[tuple(row[:3])]
        own = [finals(study).get((cell, side), []) for side in ("adamw", "adamw two rates", "muon one rate", "muon")]
        assert own[3][0]["steps"] == row[1]
        assert row[3:7] == ["" if math.isnan(mean(side)) else f"{mean(side):.2f}" for side in own]
        assert row[7:] == [f"{ratio:.2f}" for ratio in lead(study, cell)]
        assert difference(study, cell, "muon", "adamw two rates").p < 0.004
    fewer, less_time = lead("batch", "16 sequences")
    assert f"gave {fewer:.2f} and {less_time:.2f}." in PAGE


@pytest.mark.parametrize(("cell", "column"), [("from AdamW", 1), ("from Muon", 3)])
def test_fine_tuning(cell, column):
    rows = table("| | from AdamW's weights")
    assert [row[0] for row in rows] == list(SIDES)
    for row in rows:
        own = finals("finetune").get((cell, SIDES[row[0]]))
        texts = [f"{mean(own):.3f}", f"{mean(own, forgotten):+.2f}"] if own else ["", ""]
        assert row[column : column + 2] == texts


@pytest.mark.parametrize(
    ("first", "sides"),
    [
        ("| setting | difference |", {name: ("1M", side) for name, side in SETTINGS.items()}),
        ("| setting | model |", OTHER_MODELS),
    ],
)
def test_settings(first, sides):
    rows = table(first)
    assert [row[0] for row in rows] == list(sides)
    for row in rows:
        cell, side = sides[row[0]]
        test = difference("settings", cell, side, "default")
        assert row[-2] == f"{test.mean:+.3f} ± {test.deviation:.3f}".replace("0.", ".")
        assert row[-1].split(" (")[0] == verdict(test).replace("no difference shown", "no")


def test_rules():
    rows = table("| rule | compared with |")
    assert [tuple(row[:2]) for row in rows] == list(VARIANTS)
    for row in rows:
        cell = "untied tables" if "sinkhorn" in row[0] else "1M"
        test = difference("variants", cell, *VARIANTS[tuple(row[:2])])
        assert test.pairs == 8
        assert row[2] == f"{test.mean:+.3f} ± {test.deviation:.3f}".replace("0.", ".")
        assert row[3].split(" (")[0] == verdict(test).replace("no difference shown", "no")


def test_clipping():
    rows = table("| clipped |")
    assert [row[0] for row in rows] == list(CLIPPED)
    for name, usual, spiked in rows:
        side, with_spike = CLIPPED[name]
        test = difference("variants", "1M", side, "plain") if side not in (None, "plain") else None
        assert usual == ("" if test is None else f"{test.mean:+.3f} ± {test.deviation:.3f}".replace("0.", "."))
        assert spiked == f"{mean(finals('clipping')['1M', with_spike]):.2f}"


def test_answers():
    """Expect the answer, the difference and what would have been seen in each row of evidence/README.md."""
    row = r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \| `(\w+)`, (.+?): (.+?) - (.+?) \|$"
    rows = re.findall(row, README, re.MULTILINE)
    assert len(rows) > 15
    for _, answer, stated, least, *sides in rows:
        test = difference(*sides)
        assert (answer == "yes") == (test.p < LEVEL)
        assert stated == f"{test.mean:+.3f} ± {test.deviation:.3f} ({test.pairs})"
        assert least == f"{smallest_shown(test):.3f}"


def test_momentum_in_the_long_run():
    test = difference("pretrain", "1M long", "muon and momentum 0.9", "muon")
    assert f"{test.mean:+.3f} ± {test.deviation:.3f}, p {test.p:.3f}".replace("0.", ".") in PAGE


def test_sentences():
    """Expect the figures of the sentences below the answers, and of the table of studies."""
    text = " ".join(README.split())
    leads = [lead(*cell) for cell in CELLS.values()]
    fewer, less_time = zip(*leads, strict=True)
    shares = f"{100 / max(fewer):.0f} to {100 / min(fewer):.0f} %"
    pages = ("README.md", "docs/learning-rate.md", "evidence/README.md")
    assert all(shares in (ROOT / page).read_text(encoding="utf-8") for page in pages)
    assert f"between {max(less_time):.1f} times faster and {1 / min(less_time):.1f} times slower" in text
    muon, half, adamw = (finals("finetune")["from AdamW", side] for side in ("muon", "muon at half the rate", "adamw"))
    assert f"Muon's loss is {mean(adamw) - mean(muon):.3f} lower than AdamW's on the new text" in text
    assert f"and {mean(muon, forgotten) - mean(adamw, forgotten):.2f} higher on the old one" in text
    assert abs(mean(half) - mean(adamw)) < 0.001
    assert f"that on the old one {mean(adamw, forgotten) - mean(half, forgotten):.2f} lower" in text
    rows = {name: list(read_rows(RESULTS / f"{name}.csv").values()) for name in ORDER}
    every = [row for own in rows.values() for row in own if row["parameters"]]
    millions = [int(row["parameters"]) / 1e6 for row in every]
    tokens = [int(row["steps"]) * int(row["tokens_per_step"]) / 1e6 for row in every]
    assert f"have {min(millions):.1f} to {max(millions):.0f} million parameters" in text
    assert f"see {min(tokens):.2f} to {max(tokens):.0f} million tokens" in text
    for name, own in rows.items():
        hours = sum(float(row["cpu_seconds"] or 0) for row in own) / 3600
        assert re.search(rf"^\| `{name}` \| [^|]+ \| {len(own)} \| {hours:.1f} \|$", README, re.MULTILINE), name
