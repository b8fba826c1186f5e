"""Checkpoints that are damaged, do not fit or were never finished: one error on all ranks, and nothing changes.

Whatever ends a save, on whichever rank, `latest` names a whole checkpoint, which resumes bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import resource
import shutil
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.deepspeed.conftest import PRELOADED
from tests.deepspeed.runs import STAGES, assert_same, assert_weights, engine_of, loss_of, run, single, tokens_of
from tests.deepspeed.runs import weights_of as whole_weights
from tests.distributed.kills import Mortal, dying

pytestmark = pytest.mark.usefixtures("quiet")

OLDER_FORMAT = {"config": {"checkpoint": {"checkpoint_serialization": False}}}  # that torch cannot map into memory
BF16 = {"dtype": "bfloat16"}
OPTIM, MODEL = "*/*zero_pp_rank_1_*optim_states.pt", "*/*zero_pp_rank_1_*model_states.pt"


def step(engine, index=None):
    """Take a step with the batch of its index, which by default follows the steps before."""
    engine.backward(loss_of(engine, tokens_of(engine.global_steps if index is None else index)))
    engine.step()


def latest(folder):
    """Return the steps of the checkpoint that `latest` names, or None."""
    file = Path(folder, "latest")
    return int(file.read_text().removeprefix("global_step")) if file.is_file() else None


def assert_goes_on(ranks, folder, first, last, stage=2, **options):
    """Check that a checkpoint resumes to the bits of one process."""
    expected = single(last, **{key: value for key, value in options.items() if key == "dtype"})
    for result in ranks.run(run, first=first, last=last, load=str(folder), stage=stage, **options):
        assert_same(result["loaded"], expected["states"][first])
        assert_same(result["ended"], expected["states"][last])
        assert result["losses"] == expected["losses"][first:last]


# --- loads that are refused


def load_error(rank, load, arguments=None, may_load=False, **options):
    """Return the error of loading a checkpoint, or None where DeepSpeed finds none; check that nothing has changed.

    A checkpoint that `may_load` loads nevertheless: then return "loaded".
    """
    engine, optimizer = engine_of(**options)
    step(engine)

    def tensors():
        params = [getattr(param, "ds_tensor", param) for param in engine.module.parameters()]
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return [*params, *(optimizer.partitioned.partitions or ()), *moments]

    before = [tensor.detach().clone() for tensor in tensors()]
    text = None
    try:
        loaded = engine.load_checkpoint(load, **(arguments or {}))
        assert loaded == (None, None) or may_load
        text = "loaded" if may_load and loaded[0] else None
    except ValueError as raised:
        text = str(raised)
    assert text == "loaded" or all(map(torch.equal, tensors(), before))
    engine.destroy()
    return text


class Planted:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def state_in(content):
    """Return Muon's state dict in a file of the optimizer."""
    zero = content["optimizer_state_dict"]
    return zero.get("base_optimizer_state", zero.get("optimizer_state_dict"))


def roll_masters(content):
    """Change the masters of the last group, AdamW's."""
    flat = content["optimizer_state_dict"]["single_partition_of_fp32_groups"][-1]
    flat.data = flat.data.roll(1)


def change_index(content):
    content["hf_muon_index"] = json.dumps(
        {**json.loads(content["hf_muon_index"]), "is_swapped": True, "partitions": []}
    )


OF_FILE = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1000]),
    "gone": Path.unlink,
    "a list": lambda file: torch.save([torch.zeros(2)], file),
    "other keys": lambda file: torch.save({"weights": torch.zeros(2)}, file),
}


def count_on(content):
    for state in state_in(content)["state"].values():
        state |= {"step": state["step"] + 1} if "step" in state else {}


OF_CONTENT = {
    "other steps": count_on,
    "no state": lambda content: content["optimizer_state_dict"].clear(),
    "no moments": lambda content: state_in(content)["state"].clear(),
    "no routing": lambda content: [group.pop("use_muon") for group in state_in(content)["param_groups"]],
    "other masters": roll_masters,
    "no index": lambda content: content.pop("hf_muon_index"),
    "of nvme": change_index,
}


def harm(folder, how, other):
    """Damage files of the second rank in a checkpoint. `other` is another save of the same tag, after as many steps."""
    how, _, which = how.partition(" in ")
    files = [
        file for of in {"weights": [MODEL], "both": [OPTIM, MODEL]}.get(which, [OPTIM]) for file in folder.glob(of)
    ]
    for file in folder.glob("*/*_states.pt") if how in ("no index", "of nvme") else files:
        if how in OF_FILE:
            OF_FILE[how](file)
        elif how == "of another save":
            shutil.copy(other / file.relative_to(folder), file)
        else:
            content = torch.load(file, weights_only=False)
            if how == "code":
                content["mine" if which else "ds_version"] = Planted(f"{folder} code ran")
            else:
                OF_CONTENT[how](content)
            torch.save(content, file)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Return a function that returns the checkpoint of a layout in bf16 after two steps."""
    layouts = {**STAGES, "older": {"stage": 2, **OLDER_FORMAT}, "fp32": {"stage": 2, "dtype": "float32"}}

    @functools.cache
    def save(layout, **options):
        folder = tmp_path_factory.mktemp(layout)
        ranks.run(run, last=2, saves={2: str(folder)}, **{**BF16, **layouts[layout], **options})
        return folder

    return save


ALONE = {"load_optimizer_states": False}
HERE = {"fp32": {"dtype": "float32"}, "frozen": {"stage": 3, "frozen": True}, "wide": {"wide": True}}
OTHER = ("22", "33", "23")  # the stage that has written a checkpoint, and that loads it
OPTIM_1, MODEL_1 = "rank_1_mp_rank_00_optim_states.*", "rank_1_mp_rank_00_model_states.*"
# What is done to the checkpoint, layouts that have written it and that load it, what is loaded, and the error.
LOADS = [
    *((how, OTHER, {}, f"{OPTIM_1}[damaged-file]") for how in ("cut", "a list", "other keys", "no state", "code")),
    ("gone", OTHER, {}, f"{OPTIM_1}[missing-file]"),
    ("no moments", OTHER, {}, "momentum_buffer.*[moments-missing]"),
    ("no routing", OTHER, {}, "use_muon.*[foreign-state]"),
    ("cut", ["older 2"], {}, f"{OPTIM_1}[damaged-file]"),
    ("of another save", ("11", *OTHER), {}, "zero_pp_rank_1_.*[mixed-saves]"),
    *(
        (f"of another save{of}", ["33"], load, "[mixed-saves]")
        for of in (" in weights", " in both")
        for load in ({}, ALONE)
    ),
    ("of another save", ["33"], ALONE, "[mixed-saves]"),
    *(("gone in weights", ["33"], load, f"{MODEL_1}[missing-file]") for load in ({}, ALONE)),
    ("code in weights", ["32"], {}, f"{MODEL_1}[damaged-file]"),
    ("other masters", ["23"], {}, "norm.weight.*[foreign-masters]"),
    ("other steps", ["23"], {}, "[steps-differ]"),
    ("no index", ["33"], {}, "[foreign-state]"),
    ("of nvme", ["23"], {}, "ZeRO-2 on 2 ranks.*ZeRO-3.*[other-layout-on-nvme]"),
    ("", ("23", "32"), ALONE, "[missing-file]"),
    ("", ["33"], {"load_module_only": True}, "[module-only-in-zero3]"),
    ("", ["22"], {"tag": "nowhere"}, "[no-checkpoint]"),
    ("", ["2 wide"], {}, "embed.weight has shape.*[other-shape]"),
    ("", ["fp32 2"], {}, "fp32.*bf16.*[other-precision]"),
    ("", ["2 fp32"], {}, "bf16.*fp32.*[other-precision]"),
    ("", ["2 frozen"], {}, "blocks.1.*[other-parameters]"),
]
FIRST = r"cut-22|other keys-23|code-22|no (moments|routing)-22|save-33-all|both-33-all|masters|steps|index|nvme|^-[23f]"


@pytest.mark.first_tier(FIRST)
@pytest.mark.second_tier(FIRST + "|-23-|^(cut|code|of another save)|weights|^-")
@pytest.mark.parametrize(
    ("how", "stages", "arguments", "says"),
    [
        pytest.param(how, stages, *rest, id=f"{how}-{stages}-{'some' if rest[0] else 'all'}")
        for how, of, *rest in LOADS
        for stages in of
    ],
)
def test_a_load_that_is_refused_is_refused_by_all_ranks(ranks, saved, how, stages, arguments, says, tmp_path):
    there, here = stages.split() if " " in stages else stages
    folder = shutil.copytree(saved(there), tmp_path / "copy")
    if how:
        harm(folder, how, saved(there, lr=0.01) if "another save" in how else None)
    options = {**BF16, **({"stage": 2, **HERE[here]} if here in HERE else {"stage": int(here)})}
    one, other = ranks.run(load_error, load=str(folder), arguments=arguments, **options)
    assert one == other
    words, code = says.rsplit("[", 1)
    assert re.search(f"{words}.*\\[{code}", one, re.DOTALL)
    assert one.count("Resume ") <= 1 or how == "other masters" or here == "wide"  # one advice in one error
    assert not (tmp_path / "copy code ran").exists()


def test_where_there_is_no_checkpoint_deepspeed_says_so(ranks, tmp_path):
    assert ranks.run(load_error, stage=2, load=str(tmp_path)) == [None, None]


@pytest.mark.extended
@pytest.mark.parametrize(("first", "then"), [(3, 2), (2, 3)])
def test_files_that_another_layout_has_left_in_the_folder(ranks, first, then, tmp_path):
    """Overwrite a tag in another stage, and load it in the stage whose files it also holds."""
    ranks.run(run, stage=first, last=2, saves={2: str(tmp_path)}, lr=1e-3)
    ranks.run(run, stage=then, last=2, saves={2: str(tmp_path)})
    assert_goes_on(ranks, tmp_path, 2, 3, first)


# --- what loads


def load_own_files(rank, load):
    """Load from a folder that holds this rank's files alone, as on a node with storage of its own."""
    engine, _ = engine_of(stage=3, **BF16)
    texts = []
    for folder in load[rank]:
        try:
            texts.append(engine.load_checkpoint(folder)[0] is not None)
        except ValueError as error:
            texts.append(str(error))
    engine.destroy()
    return texts


def test_a_rank_needs_its_own_files_alone(ranks, saved, tmp_path):
    """Take then `latest` from the folder of one rank."""
    folders = [[shutil.copytree(saved("3"), tmp_path / f"{rank}{time}") for time in "01"] for rank in (0, 1)]
    for rank, (folder, _) in enumerate(folders):
        for file in folder.glob(f"*/*zero_pp_rank_{1 - rank}_*"):
            file.unlink()
    (folders[1][1] / "latest").unlink()
    loads = [list(map(str, own)) for own in folders]
    (one, text), others = ranks.run(load_own_files, load=loads)
    assert others == [one, text]
    assert one is True
    assert "[no-latest]" in text


def set_rate(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr


def load_alone(rank, stage, save, **arguments):
    """Save two tags, step far away, and load the weights of each tag alone; check them, also after a small step."""
    engine, optimizer = engine_of(stage=stage, **BF16)
    weights = {}
    for tag in ("one", "two"):
        step(engine)
        engine.save_checkpoint(save, tag=tag, client_state={"mine": tag})
        weights[tag] = whole_weights(engine.module)
    for tag, saved in weights.items():
        set_rate(optimizer, 50.0)
        step(engine, 0)
        _, client = engine.load_checkpoint(save, tag=tag, **arguments)
        assert_weights(whole_weights(engine.module), saved)
        assert client["mine"] == tag
        assert not any("hf_muon" in key for key in client)
        set_rate(optimizer, 1e-4)
        step(engine, 0)
        for name, weight in whole_weights(engine.module).items():
            assert (weight - saved[name]).abs().max() < 0.1, name  # not back to masters from before the load
    engine.destroy()


MODULE = {"load_module_only": True}


@pytest.mark.first_tier("0-module|3-both")
@pytest.mark.second_tier("module|both|3-")
@pytest.mark.parametrize(
    ("stage", "arguments"),
    [(0, MODULE), (0, ALONE), (0, {**MODULE, **ALONE}), (2, MODULE), (2, ALONE), (3, ALONE), (3, {**MODULE, **ALONE})],
    ids=["0-module", "0-states", "0-both", "2-module", "2-states", "3-states", "3-both"],
)
def test_weights_can_be_loaded_without_the_optimizer_and_are_those_of_the_tag(ranks, stage, arguments, tmp_path):
    """Load by tag; DeepSpeed alone takes ZeRO-3's weights from the master weights of `latest`, whatever the tag.

    Load in bf16, where in ZeRO-0 DeepSpeed's first step alone would restore the weights from before the load.
    """
    ranks.run(load_alone, stage=stage, save=str(tmp_path), **arguments)


def load_at_once(rank, stage, save):
    """Save twice under a tag and load with the same engine; rank 0 writes `latest` late, if it is not waited for."""
    engine, _ = engine_of(stage=stage)
    step(engine)
    store, early, replace = dist.FileStore(f"{save}/store", 2), [], Path.replace

    def late(self, target):
        with contextlib.suppress(RuntimeError):  # it did not return
            store.wait(["rank 1 has returned"], timedelta(seconds=0.5))
            early.append(True)
        return replace(self, target)

    with mock.patch.object(Path, "replace", late if rank == 0 else replace):
        engine.save_checkpoint(save, tag="again")
    if rank == 1:
        store.set("rank 1 has returned", "")
    step(engine)
    engine.save_checkpoint(save, tag="again", save_latest=False, client_state={"last": engine.global_steps})
    step(engine)
    loaded = engine.load_checkpoint(save)[0]
    step(engine)
    weights = whole_weights(engine.module)
    dist.barrier()
    engine.destroy()
    return weights if loaded and not early else "saved too early"


@pytest.mark.first_tier("3")
@pytest.mark.second_tier("2|3")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_tag_can_be_used_again_and_loaded_at_once_by_the_engine_that_wrote_it(ranks, stage, tmp_path):
    expected = {name: state["weight"] for name, state in single(3)["states"][3].items()}
    for weights in ranks.run(load_at_once, stage=stage, save=str(tmp_path)):
        assert_weights(weights, expected)
    assert (tmp_path / "latest").read_text() == "again"
    assert_goes_on(ranks, tmp_path, 2, 3, stage)


# --- saves that fail, or are interrupted


def refuse(*args, **kwargs):
    """Raise as a disk does that is read only."""
    raise OSError("read only")


def too_much(*args):
    """Take more memory than there is."""
    return bytes(1 << 60)


def save_with_fault(rank, stage, folder, victim, how, load=None):
    """Load, take a step and save, with a fault of one rank; return its error, and what `latest` names after it."""
    engine, _ = engine_of(stage=stage)
    if load:
        engine.load_checkpoint(load)
    step(engine)
    limit, tag, text = resource.getrlimit(resource.RLIMIT_FSIZE), None, None
    if how == "same tag":
        tag = f"global_step{engine.global_steps - 1}"
    if how == "folder":
        folder = str(Path(folder, "in the way"))
    with contextlib.ExitStack() as stack:
        if rank != victim:
            pass
        elif how == "disk full":
            stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limit)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
        elif how == "latest":
            in_the_way = Path(folder, f".latest.{os.getpid()}")
            in_the_way.mkdir()
            stack.callback(in_the_way.rmdir)
        elif how == "same tag":
            stack.enter_context(mock.patch.object(engine.checkpoint_engine, "save", refuse))
        elif how == "memory":
            stack.enter_context(mock.patch.object(engine.optimizer, "state_dict", too_much))
        else:
            Path(folder).write_text("a file")
        try:
            engine.save_checkpoint(folder, tag=tag, client_state={"last": engine.global_steps})
        except RuntimeError as error:
            text = str(error)
        dist.barrier()
    engine.destroy()
    return text


FAULTS = {
    "disk full": r"RuntimeError: .* \[rank {victim}\]",
    "latest": r"IsADirectoryError: .*\.latest\.\d+.* \[rank {victim}\]",
    "folder": r"NotADirectoryError: .*in the way.* \[rank {victim}\]",
    "memory": r"MemoryError.* \[rank {victim}\]",
    "same tag": r"OSError: read only \[rank {victim}\]",
}


@pytest.mark.first_tier("^2-(disk full-1|latest|same)")
@pytest.mark.second_tier("^2-|same tag")
@pytest.mark.parametrize(
    ("how", "victim"),
    [("disk full", 0), ("disk full", 1), ("latest", 0), ("folder", 0), ("memory", 1), ("same tag", 1)],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_an_error_of_one_rank_while_saving_is_one_of_all(ranks, stage, how, victim, tmp_path):
    ranks.run(run, stage=stage, last=1, saves={1: str(tmp_path)})
    options = {"stage": stage, "folder": str(tmp_path), "victim": victim, "load": str(tmp_path)}
    one, other = ranks.run(save_with_fault, how=how, **options)
    assert one == other
    assert "[checkpoint-not-whole]" in one
    assert ("`latest` names the one before it" in one) == (how not in ("folder", "same tag"))
    assert re.search(FAULTS[how].format(victim=victim), one)
    if how != "same tag":
        assert latest(tmp_path) == 1
        assert_goes_on(ranks, tmp_path, 1, 3, stage)
    else:  # what is overwritten in part is not loaded
        assert latest(tmp_path) is None
        one, other = ranks.run(load_error, stage=stage, load=str(tmp_path), arguments={"tag": "global_step1"})
        assert "[mixed-saves]" in one


def dies(rank, stage, folder, victim, part, phase="save", how="killed", tag=None):
    """Resume, take a step, and save or load; the victim is killed or stopped on the way.

    It is so after a `part` of the function calls that an uninterrupted save or load takes.
    """
    engine, _ = engine_of(stage=stage)
    engine.load_checkpoint(folder)
    step(engine)
    client = {"client_state": {"last": engine.global_steps}} if phase == "save" else {}
    act = functools.partial({"save": engine.save_checkpoint, "load": engine.load_checkpoint}[phase], tag=tag, **client)
    scratch = f"{folder} scratch"
    engine.save_checkpoint(scratch, **client)
    with dying() as counter:
        act(scratch)
    with dying(int(counter.calls * part) if rank == victim else None, how):
        act(folder)


@pytest.fixture(scope="module")
def begun(ranks, tmp_path_factory):
    """Return checkpoints after two steps, by stage."""
    folders = {stage: tmp_path_factory.mktemp(f"begun{stage}") for stage in (2, 3)}
    for stage, folder in folders.items():
        ranks.run(run, stage=stage, last=2, saves={2: str(folder)})
    return folders


def survive(folder, victim, timeout=60, **options):
    """Have a rank die; return the error of the other one, or None."""
    return Mortal(2, timeout, PRELOADED).survivors(dies, victim, folder=str(folder), **options)[0]


@pytest.mark.slow
@pytest.mark.first_tier("save.*killed")
@pytest.mark.parametrize(
    ("stage", "phase", "part", "how"),
    [
        (2, "save", 0.05, "killed"),
        (3, "load", 0.2, "killed"),
        (2, "save", 0.5, "stopped"),
    ],
)
def test_a_rank_that_is_killed_or_stopped(ranks, begun, stage, phase, part, how, tmp_path):
    """Wait for a rank that is stopped until the group's timeout, which is half of the pool's, and no longer."""
    folder = shutil.copytree(begun[stage], tmp_path / "run")
    timeout = 60 if how == "killed" else 20
    error = survive(folder, 1, timeout, stage=stage, phase=phase, part=part, how=how)
    assert error is not None
    assert how == "killed" or "imed out" in error
    assert latest(folder) == 2
    assert_goes_on(ranks, folder, 2, 4, stage)


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.second_tier("2-0.3|3-0.9")
@pytest.mark.parametrize(("stage", "part"), [(2, 0.3), (3, 0.5), (2, 0.7), (3, 0.9)])
def test_a_rank_that_is_killed_while_it_overwrites_a_tag(ranks, begun, stage, part, tmp_path):
    """Save over the checkpoint that `latest` names: it names a whole one afterwards, or there is none.

    By its tag it loads if the rank died before the first file was overwritten, or after the last one, else on no rank.
    """
    folder = shutil.copytree(begun[stage], tmp_path / "run")
    survive(folder, 1, stage=stage, part=part, tag="global_step2")
    arguments = {} if latest(folder) else {"tag": "global_step2"}
    texts = ranks.run(load_error, stage=stage, load=str(folder), arguments=arguments, may_load=True)
    assert len(set(texts)) == 1
    assert texts[0] == "loaded" or not latest(folder)


class Interrupted(RuleBasedStateMachine):
    """A run whose ranks die, whose disk is full, and which goes on in other layouts, against one process."""

    ranks = checkpoints = folder = None
    victims, stages = st.integers(0, 1), st.sampled_from([1, 2, 3])

    @initialize(stage=st.sampled_from([2, 3]))
    def begin(self, stage):
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.checkpoints[stage], self.folder)
        self.step = 2

    @rule(stage=stages, victim=victims, part=st.floats(0, 1), phase=st.sampled_from(["save", "save", "load"]))
    def a_rank_dies(self, stage, victim, part, phase):
        error = survive(self.folder, victim, stage=stage, part=part, phase=phase)
        # If a rank dies after all have agreed, the others finish, and the checkpoint is complete.
        assert latest(self.folder) == self.step or (phase == "save" and latest(self.folder) == self.step + 1)
        assert error is not None or phase == "load" or latest(self.folder) == self.step + 1
        self.step = latest(self.folder)

    @rule(stage=stages, victim=victims, how=st.sampled_from(["disk full", "memory"]))
    def a_rank_cannot_save(self, stage, victim, how):
        folder = str(self.folder)
        errors = self.ranks.run(save_with_fault, stage=stage, victim=victim, how=how, folder=folder, load=folder)
        assert None not in errors
        assert latest(self.folder) == self.step

    @rule(layout=st.sampled_from([*STAGES.values(), {"stage": 2, **OLDER_FORMAT}, {"stage": 3, **OLDER_FORMAT}]))
    def the_run_goes_on(self, layout):
        after = self.step + 1
        assert_goes_on(self.ranks, self.folder, self.step, after, saves={after: str(self.folder)}, **layout)
        self.step = after

    def teardown(self):
        if self.step:
            self.the_run_goes_on(STAGES["2"])

    step = 0


@pytest.mark.slow
@pytest.mark.nightly
def test_whatever_interrupts_a_run_it_goes_on_as_in_one_process(ranks, begun, tmp_path):
    Interrupted.ranks, Interrupted.checkpoints, Interrupted.folder = ranks, begun, tmp_path / "run"
    run_state_machine_as_test(Interrupted, settings=settings(max_examples=5, stateful_step_count=8, deadline=None))
