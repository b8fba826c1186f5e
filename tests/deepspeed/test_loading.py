"""DeepSpeed checkpoints that cannot be loaded or were never finished: one error on all ranks, and no change."""

from __future__ import annotations

import re
import shutil

import pytest
import torch

from tests.deepspeed.cases import train
from tests.deepspeed.loading_cases import (
    damage,
    load_at_once,
    load_error,
    load_own_files,
    load_tags,
    load_weights_alone,
    mix,
    save_again,
    save_with_fault,
    save_without_state,
    without,
)
from tests.deepspeed.pools import pool_of
from tests.deepspeed.test_training import assert_equal, assert_same_state

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def fresh():
    """Yield a function that starts a pool, which the test may break."""
    pools = []

    def start(ranks):
        pools.append(pool_of(ranks))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close(kill=True)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Return checkpoints of two ranks, by stage."""
    folders = {stage: str(tmp_path_factory.mktemp(f"zero{stage}")) for stage in (0, 2, 3)}
    for stage, folder in folders.items():
        ranks.run(train, stage=stage, last=2, save=folder)
    return folders


@pytest.mark.extended(but="2$")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("cut", r"rank_1_mp_rank_00_optim_states.pt is cut off, .*Resume from the checkpoint before it \[rank 1\]$"),
        ("gone", r"rank_1_mp_rank_00_optim_states.pt is missing. .*Resume from the checkpoint before it \[rank 1\]$"),
        ("a list", r"rank_1_mp_rank_00_optim_states.pt is .* no file of this rank's \(.*\[rank 1\]$"),
        ("other keys", r"rank_1_mp_rank_00_optim_states.pt is .*KeyError: 'ds_version'.*\[rank 1\]$"),
        ("no state", r"rank_1_mp_rank_00_optim_states.pt is .* no file of this rank's \(.*\[rank 1\]$"),
        ("moments", r"moments are missing: .*momentum_buffer.* \[rank 1\]"),
        ("routing", r"param groups hold .*`use_muon` is not among them.* \[rank 1\]"),
    ],
)
def test_an_error_of_one_rank_is_an_error_of_all(ranks, saved, stage, how, words, tmp_path):
    folder = damage(saved[stage], tmp_path, how)
    one, other = ranks.run(load_error, stage=stage, load=folder)
    assert one == other
    assert re.search(words, one)


def test_one_advice_in_one_error(ranks, saved, tmp_path):
    """Give one of two pieces of advice: to resume from the checkpoint before, and not to set other options."""
    text = ranks.run(load_error, stage=2, load=damage(saved[2], tmp_path, "cut"))[0]
    assert text.count("Resume ") == 1


@pytest.mark.extended(but="3-both|2-optim")
@pytest.mark.parametrize("of", ["optim", "model", "both"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_files_of_another_save_are_refused(ranks, stage, of, tmp_path):
    """Mix two saves of one tag after as many steps, as a save does that is killed while it overwrites the other."""
    if of != "optim" and stage != 3:
        pytest.skip("all ranks read one file of weights")
    for name, lr in (("one", 0.02), ("other", 0.01)):
        ranks.run(train, stage=stage, last=2, lr=lr, save=str(tmp_path / name))
    of = "" if of == "both" else of
    folder = mix(tmp_path / "one", tmp_path / "other", f"*/*zero_pp_rank_1_*{of}_states.pt")
    for arguments in ({}, {"load_optimizer_states": False}) if stage == 3 else ({},):
        one, other = ranks.run(load_error, stage=stage, load=folder, arguments=arguments)
        assert one == other
        assert re.search(r"several saves: .*zero_pp_rank_1_.*Resume from the checkpoint before it$", one)


def test_moments_of_another_optimizer_are_refused(ranks, saved, tmp_path):
    """Remove what hf_muon writes into files: without it they are as after a run with AdamW."""
    folder = without(shutil.copytree(saved[3], tmp_path / "copy"), "hf_muon_index")
    for text in ranks.run(load_error, stage=3, load=str(folder)):
        assert "does not say where moments of Muon lie: it was written by another optimizer. Start from the" in text


@pytest.mark.extended
@pytest.mark.parametrize(("there", "here"), [(2, 3), (3, 2)])
def test_weights_alone_of_another_stage_are_refused(ranks, saved, there, here):
    for text in ranks.run(load_error, stage=here, load=saved[there], arguments={"load_optimizer_states": False}):
        assert "weights without the optimizer load in the stage that wrote them" in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_precision_is_refused_as_that(ranks, saved, dtype, tmp_path):
    path, other = str(tmp_path), "bfloat16" if dtype == "float32" else "float32"
    ranks.run(train, stage=2, last=1, dtype=dtype, save=path)
    for text in ranks.run(load_error, stage=2, dtype=other, load=path):
        there, here = ("fp32", "bf16") if dtype == "float32" else ("bf16", "fp32")
        assert f"was written in {there}, and this run is in {here}. Set bf16 and fp16 as there, or start" in text


@pytest.mark.extended(but="3")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_checkpoint_can_be_loaded_as_soon_as_it_is_saved(ranks, stage, tmp_path):
    assert ranks.run(load_at_once, stage=stage, save=str(tmp_path)) == [True, True]


@pytest.mark.extended(but="2$|^2")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("how", "victim", "words"),
    [
        ("disk full", 0, r"RuntimeError: .* \[rank 0\]"),
        ("disk full", 1, r"RuntimeError: .* \[rank 1\]"),
        ("latest", 0, r"IsADirectoryError: .*latest.partial.* \[rank 0\]"),
        ("folder", 0, r"NotADirectoryError: .*in the way.* \[rank 0\]"),
    ],
)
def test_an_error_of_one_rank_while_saving_is_one_of_all(ranks, stage, how, victim, words, tmp_path):
    path = str(tmp_path)
    (one, latest), other = ranks.run(save_with_fault, stage=stage, save=path, victim=victim, how=how)
    assert (one, latest) == other
    before = "there is none that `latest` names" if how == "folder" else "`latest` names the one before it"
    assert f"was not written whole, and {before}:" in one
    assert re.search(words, one)
    assert latest == "global_step1"
    straight = ranks.run(train, stage=stage, last=4)
    for first in ("global_step1", "global_step3"):  # the run went on, and both complete checkpoints resume exactly
        (tmp_path / "latest").write_text(first)
        resumed = ranks.run(train, stage=stage, first=int(first[-1]), last=4, load=path)
        for mine, theirs in zip(resumed, straight, strict=True):
            assert_equal(mine, {**theirs, "losses": theirs["losses"][int(first[-1]) :]})
            assert_same_state(mine, theirs)


def test_where_there_is_no_checkpoint_deepspeed_says_so(ranks, tmp_path):
    assert ranks.run(load_error, stage=2, load=str(tmp_path)) == [None, None]


ALONE = {"load_optimizer_states": False, "load_module_only": True}


@pytest.mark.extended(but="^2")
@pytest.mark.parametrize(
    ("stage", "names"), [(0, [0]), (0, [1]), (0, [0, 1]), (2, [0]), (2, [1]), (3, [0]), (3, [0, 1])], ids=str
)
def test_weights_can_be_loaded_without_the_optimizer(ranks, stage, names, tmp_path):
    """Load in bf16, where in ZeRO-0 DeepSpeed's first step alone would restore the weights from before the load."""
    path, arguments = str(tmp_path), dict(list(ALONE.items())[i] for i in names)
    expected = ranks.run(train, stage=stage, last=2, save=path, dtype="bfloat16")[0]["weights"]
    for weights in ranks.run(load_weights_alone, stage=stage, load=path, **arguments):
        assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


def test_weights_alone_are_those_of_the_tag(ranks, tmp_path):
    """Load by tag; DeepSpeed alone takes the weights from the master weights of `latest`, whatever the tag."""
    for same, states in ranks.run(load_tags, save=str(tmp_path)):
        assert same == {"one": True, "two": True}
        for tag, state in states.items():
            assert state["mine"] == tag
            assert not any("hf_muon" in key for key in state)


def test_a_rank_needs_its_own_files_alone(ranks, saved, tmp_path):
    folders = [shutil.copytree(saved[3], tmp_path / str(rank)) for rank in (0, 1)]
    for rank, folder in enumerate(folders):
        for file in folder.glob(f"*/*zero_pp_rank_{1 - rank}_*"):
            file.unlink()
    assert ranks.run(load_own_files, load=[str(folder) for folder in folders]) == [True, True]


@pytest.mark.extended(but="all")
@pytest.mark.parametrize("arguments", [{}, {"load_optimizer_states": False}], ids=["all", "alone"])
def test_weights_of_a_rank_that_are_missing(ranks, saved, arguments, tmp_path):
    folder = shutil.copytree(saved[3], tmp_path / "copy")
    (file,) = folder.glob("*/zero_pp_rank_1_mp_rank_00_model_states.pt")
    file.unlink()
    one, other = ranks.run(load_error, stage=3, load=str(folder), arguments=arguments)
    assert one == other
    assert f"{file.name} is missing" in one


@pytest.mark.extended(but="2")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_state_that_one_rank_cannot_make_is_an_error_of_all(ranks, stage, tmp_path):
    (one, _), (other, seconds) = ranks.run(save_without_state, stage=stage, save=str(tmp_path))
    assert one == other
    assert re.search(
        r"was not written whole, and there is none that `latest` names:\n  - MemoryError.* \[rank 1\]", one
    )
    assert seconds < 60


def test_a_load_of_nothing_is_refused(ranks, saved):
    for text in ranks.run(load_error, stage=3, load=saved[3], arguments={"load_module_only": True}):
        assert "DeepSpeed loads no weights in ZeRO-3. Give load_optimizer_states=False" in text


@pytest.mark.extended(but="3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_that_is_overwritten_in_part_is_not_loaded(ranks, stage, tmp_path):
    for text, latest in ranks.run(save_with_fault, stage=stage, save=str(tmp_path), victim=1, how="same tag"):
        assert "global_step1 was not written whole, and there is none that `latest` names:" in text
        assert latest is None
    for text in ranks.run(load_error, stage=stage, load=str(tmp_path), arguments={"tag": "global_step1"}):
        assert "global_step1 holds files of several saves" in text


@pytest.mark.extended(but="2")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_tag_can_be_used_again(ranks, stage, tmp_path):
    """Save over a checkpoint without naming it in `latest`, which names it already."""
    assert ranks.run(save_again, stage=stage, save=str(tmp_path)) == [("again", 2), ("again", 2)]


@pytest.mark.extended
@pytest.mark.parametrize("stage", [2, 3])
def test_torchs_older_format_resumes_exactly(ranks, stage, tmp_path):
    """Save in the format that torch cannot map into memory."""
    options = {"stage": stage, "config": {"checkpoint": {"checkpoint_serialization": False}}}
    path = str(tmp_path / "saved")
    ranks.run(train, last=2, save=path, **options)
    straight = ranks.run(train, stage=stage, last=3)
    for mine, theirs in zip(ranks.run(train, first=2, last=3, load=path, **options), straight, strict=True):
        assert_equal(mine, {**theirs, "losses": theirs["losses"][2:]})
        assert_same_state(mine, theirs)
    one, other = ranks.run(load_error, stage=stage, load=damage(path, tmp_path / "cut", "cut"))
    assert one == other
    assert "rank_1_mp_rank_00_optim_states.pt is cut off" in one
