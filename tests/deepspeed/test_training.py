"""Training under ZeRO: given equal gradients the bits of one process, whatever the layouts that a run goes through.

Gradients are the sum of the micro-batches of one step, also of a branch that some of them do not reach. LLaMA-Factory's
stack has an older DeepSpeed, which loses gradients that later versions do not: it repeats cases with the mark
`every_stack`, and does without those that are for `LATER` versions.

With a shard of the batch on each rank, sums of gradients round in another order: a run is close to one process, and it
resumes exactly.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import pickle
from collections import Counter
from importlib.metadata import version
from unittest import mock

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from hf_muon import Muon, MuonConfig, route_parameters
from hf_muon.integrations.deepspeed.gradients import OrthogonalizedMomentum, hide_name
from hf_muon.plan import facts_of, numbers_of
from hf_muon.versions import is_older
from tests.deepspeed.runs import CPU, HPZ, STAGES, assert_same, build_model, engine_of, loss_of, run, single, tokens_of
from tests.equality.counted import Counted
from tests.rules.settings import PLAIN, TOGETHER
from tests.support.accelerated import accelerated
from tests.support.bounds import TIMES, beyond_rounding

pytestmark = pytest.mark.usefixtures("quiet")
EVERY = pytest.mark.every_stack
LATER = pytest.mark.skipif(is_older(version("deepspeed"), "0.19"), reason="holds for later versions of DeepSpeed")

SCALES = r"embed:0.5|norm:2|blocks\.1:0.25"
BF16 = {"dtype": "bfloat16"}
SUMS = {"fp32_sums": True, **BF16}
BF16_MOMENTS = {"momentum_dtype": "bf16", "adamw_state_dtype": "bf16"}
RULES = {"scheduled": True, "viewed": True, "lr_scales": SCALES, **PLAIN, **TOGETHER}
LAYOUTS = {
    **STAGES,
    "1-bf16-optimizer": {"stage": 1, "config": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "1-cpu-fp32": {"stage": 1, "zero": CPU, "config": {"communication_data_type": "fp32"}},
    "2-aligned": {"stage": 2, "zero": {"parameter_alignment": True}},
    "2-buckets": {"stage": 2, "max_batch_bytes": 1125},
    "2-cpu-overlap": {"stage": 2, "zero": {**CPU, "overlap_comm": True, "reduce_bucket_size": 300}},
    "2-cpu-round-robin": {"stage": 2, "zero": {**CPU, "round_robin_gradients": True}},
    "2-round-robin": {"stage": 2, "zero": {"round_robin_gradients": True}},
    # In a format whose files torch cannot map into memory.
    "2-older": {"stage": 2, "config": {"checkpoint": {"checkpoint_serialization": False}}},
    "3-sub-groups": {"stage": 3, "zero": {"sub_group_size": 1500}},
    "3-cpu-sub-groups": {"stage": 3, "zero": {**CPU, "sub_group_size": 300}},
    "3-init": {"stage": 3, "zero_init": True},
    "3-all-on-cpu": {"stage": 3, "zero_init": True, "zero": {**CPU, "offload_param": {"device": "cpu"}}},
    "3-hpz": {"stage": 3, "zero_init": True, "zero": HPZ},
    "3-hpz-cpu": {"stage": 3, "zero": {**HPZ, **CPU, "sub_group_size": 1500}},
}

# Options of a run, and the ranks and layouts that it goes through, two steps in each.
CHAINS = {
    "bfloat16": (BF16, "2:2-round-robin 2:3-cpu 2:3-cpu 2:1-cpu 2:0 2:3 1:1 2:3-cpu 2:1-bf16-optimizer"),
    "rules": ({**BF16, **RULES}, "2:1 2:3-cpu 2:2-cpu 2:2-cpu 2:0 2:2"),
    "ranks": ({}, "4:2-round-robin 2:3 4:3-hpz 2:1 4:0 1:2-cpu 4:3 2:0 4:3-hpz-cpu 4:3-hpz-cpu 1:3"),
    "ranks-bfloat16": (BF16, "2:1-bf16-optimizer 4:3 1:1-bf16-optimizer 2:2 4:1-bf16-optimizer 4:1-bf16-optimizer"),
    "ways": ({}, "2:3-init 2:3-init 2:3-sub-groups 2:2-buckets 2:2-older 2:2-older 2:2-aligned 2:3-hpz 2:3-hpz"),
    "ways-bfloat16": (BF16, "2:2-buckets 2:3-hpz 2:2-aligned 2:3-sub-groups 2:3-init 2:2 2:1-cpu"),
    "frozen": ({"frozen": True}, "2:2 4:3-cpu 1:3 2:0 4:3 2:3-cpu 2:2-cpu"),
    "tied": ({"tied": True}, "2:3 1:1 4:3 2:3 4:0"),
    "one-matrix": ({"adamw_patterns": r"blocks|experts"}, "2:2 2:2 2:3 2:3 2:1"),  # partitions without a matrix
    # Of four micro-batches, version 0.18.4 loses the middle ones in ZeRO-2 with CPU offload.
    "lost": ({"flagged": True, "turns": True, "accumulate": 4}, "2:2-cpu 2:1 2:3-cpu 2:2-cpu"),
    # The embedding and the head stay with AdamW, whatever DeepSpeed's flag says.
    "flagged": ({"flagged": True, "turns": True, "accumulate": 4}, "2:2-cpu 2:1 2:0 2:2 2:1-cpu 2:3 2:3-cpu 2:2-cpu"),
    "branched": ({"turns": True}, "2:0 2:1-cpu 2:2 2:2-cpu-overlap 2:3 2:2-cpu-round-robin 2:3-cpu-sub-groups"),
    "sums": ({**SUMS, "turns": True, "accumulate": 4}, "2:2 2:2-cpu 2:2-cpu 2:1-cpu-fp32"),
    "bf16-moments": ({**BF16, **BF16_MOMENTS}, "2:3 4:2 4:2-aligned 1:0 2:2-aligned 2:3-cpu 2:0 2:2-cpu"),
}
MARKED = {"lost": EVERY, "sums": LATER}


def chain(pools, name, folder):
    """Go through a chain; return the folder of the last checkpoint, the number of steps, and the run in one process."""
    options, words = CHAINS[name]
    cells = [word.split(":") for word in words.split()]
    expected, path = single(2 * len(cells) + 2, **options), None
    for k, (ranks, layout) in enumerate(cells):
        first, last, target = 2 * k, 2 * k + 2, str(folder / str(k))
        everything = {"first": first, "last": last, "load": path, "saves": {last: target}}
        for result in pools[int(ranks)].run(run, **everything, **options, **LAYOUTS[layout]):
            where = f"{layout} on {ranks} ranks, steps {first} to {last}"
            if path:
                assert_same(result["loaded"], expected["states"][first], f"load in {where}")
            assert result["counts"] == {first}, where
            assert_same(result["ended"], expected["states"][last], where)
            assert result["losses"] == expected["losses"][first:last], where
        path = target
    return path, last, expected


@pytest.mark.promise("zero", "offload", "deepspeed-gradients")
@pytest.mark.first_tier("^(bfloat16|lost|sums)$")
@pytest.mark.second_tier("^(?!(ranks|ways)-)")
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKED.get(name, ())) for name in CHAINS])
def test_every_layout_gives_the_bits_of_one_process_and_goes_on_from_any_other(pools, name, tmp_path):
    path, last, expected = chain(pools, name, tmp_path)
    if name in ("rules", "ranks"):
        found = get_fp32_state_dict_from_zero_checkpoint(path)  # by zero_to_fp32.py
        for weight, state in expected["states"][last].items():
            assert torch.equal(found[weight].flatten(), state["master"])
    if name == "lost":  # this test sees momentum that a checkpoint loses or rounds
        for how in ("zero", "cast"):
            options = {"first": last, "last": last + 1, "load": path, "lost": how}
            result = pools[2].run(run, **options, **LAYOUTS["2"])[0]
            for when, step in (("loaded", last), ("ended", last + 1)):
                with pytest.raises(AssertionError):
                    assert_same(result[when], expected["states"][step])


@pytest.mark.extended
@pytest.mark.parametrize("chain", ["rules", "bf16-moments"])
def test_each_option_of_a_chain_matters(chain):
    options = {"last": 6, **CHAINS[chain][0]}
    expected = single(**options)["states"][-1]
    for name in options.keys() - {"last", "dtype"}:
        other = single(**{key: value for key, value in options.items() if key != name})["states"][-1]
        assert any(not torch.equal(state["weight"], other[key]["weight"]) for key, state in expected.items()), name


# --- a shard of the batch on each rank

# Chains go through these layouts bit by bit, with equal gradients.
MORE = [(name, 4, 0.3, dtype) for name in LAYOUTS if name not in STAGES for dtype in ("float32", "bfloat16")]
SHARDS = [*((name, 4, 0.3, "float32") for name in STAGES), ("2", 1, 0.3, "bfloat16"), ("3-cpu", 1, None, "bfloat16")]


def tensors(result, last):
    """Return losses and whole weights by name."""
    state = result["ended"] if "ended" in result else result["states"][last]
    return {"losses": torch.tensor(result["losses"]), **{name: tensors["weight"] for name, tensors in state.items()}}


def assert_close(result, last, times=TIMES, **options):
    """Compare with one process, up to the rounding of another order of sums of gradients."""
    expected, *controls = (tensors(single(last, **options, moved=seed), last) for seed in (None, 0, 1))
    assert not beyond_rounding(tensors(result, last), expected, controls, times)


def assert_resumes(pool, folder, last=6, at=3, **options):
    """Check that all ranks agree, and that a resumed run is the uninterrupted one bit for bit; return the latter."""
    straight = pool.run(run, last=last, saves={at: str(folder)}, shared=False, **options)
    resumed = pool.run(run, first=at, last=last, load=str(folder), shared=False, **options)
    for result in (*straight, *resumed):
        assert result["losses"][-(last - at) :] == straight[0]["losses"][at:]
        assert_same(result["ended"], straight[0]["ended"])
        assert result["steps"] == [last] * 3
        assert result["swapped"] == straight[0]["swapped"]
    return straight[0]


@pytest.mark.promise("zero")
@pytest.mark.first_tier("^(2|3)-4-")
@pytest.mark.parametrize(
    ("name", "accumulate", "clipping", "dtype"),
    [
        *(pytest.param(*case, marks=EVERY if case[0] in ("2", "3") and case[1] == 4 else ()) for case in SHARDS),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in MORE),
    ],
)
def test_shards_train_as_one_process_and_resume_exactly(pools, name, accumulate, clipping, dtype, tmp_path):
    ranks = 4 if "hpz" in name else 2
    options = {"accumulate": min(accumulate, 8 // ranks), "clipping": clipping, "dtype": dtype, "turns": True}
    result = assert_resumes(pools[ranks], tmp_path, **options, **LAYOUTS[name])
    # A sum in another order is rounded to the eight bits of bf16, and orthogonalization amplifies the difference.
    assert_close(result, 6, TIMES if dtype == "float32" else 2, **options)


@EVERY
def test_sums_in_fp32_with_offload_are_averaged_or_refused(ranks):
    """Version 0.18.4 averages a copy of them, so that ranks step with different gradients."""
    options = {**SUMS, **LAYOUTS["1-cpu-fp32"], "last": 2, "shared": False}
    if is_older(version("deepspeed"), "0.19"):
        with pytest.raises(Exception, match="gradients-not-averaged"):
            ranks.run(run, **options)
    else:
        assert_close(ranks.run(run, **options)[0], 2, **SUMS)


def test_a_clipped_direction_would_be_seen():
    wrong = single(6, clipping=0.3, clip_directions=True)
    with pytest.raises(AssertionError):
        assert_close({**wrong, "ended": wrong["states"][6]}, 6, clipping=0.3)


# --- skipped steps, observers, and what a step costs

# The step reaches the branch, and the next one does not. With the optimizer offloaded and sums in fp32, DeepSpeed
# without hf_muon skips all later steps. On a CPU it has no fp16, and does for bf16 what it does there.
SKIPPED = [
    *(pytest.param(cell, "overflow", BF16, marks=LATER) for cell in STAGES if cell != "0"),
    *(pytest.param(cell, "overflow", SUMS, marks=LATER, id=f"{cell}-overflow-fp32") for cell in ("1-cpu", "2-cpu")),
    *(pytest.param(cell, "drop", {}, marks=EVERY) for cell in ("2", "2-cpu", "3", "3-cpu")),
]


@pytest.mark.first_tier("^2-over|drop|fp32")
@pytest.mark.parametrize(("cell", "how", "options"), SKIPPED)
def test_a_step_that_overflowed_or_whose_gradients_were_dropped_leaves_nothing(ranks, cell, how, options):
    """Also skip a batch as a loop that leaves out a non-finite loss: backward, zero_grad, and the next batch."""
    options = {"last": 7, "turns": True, **options}
    expected = single(skipped=4, **options)["states"][7]
    for result in ranks.run(run, skips=(how, 4), **options, **STAGES[cell]):
        assert_same(result["ended"], expected)
        assert result["steps"] == [6, 6, 6]


def parameters_of(file):
    """Return Muon's matrices in a file of metrics, by name with their shapes, and its steps."""
    _, *steps = [json.loads(line) for line in file.read_text().splitlines()]
    watched = {name: shape for name, shape in steps[0]["parameters"].items() if shape}
    return watched, [line["step"] for line in steps]


@pytest.mark.first_tier("2")
@pytest.mark.parametrize("kind", ["1", "2", "3-cpu"])
def test_metrics_change_nothing_and_have_the_names_of_one_process(ranks, kind, tmp_path):
    files = [tmp_path / "ranks.jsonl", tmp_path / "single.jsonl"]
    options = {"last": 4, "viewed": True}
    result = ranks.run(run, diagnostics_every=2, diagnostics_file=str(files[0]), **options, **STAGES[kind])[0]
    assert_same(result["ended"], single(**options)["states"][4])
    single(diagnostics_every=2, diagnostics_file=str(files[1]), **options)
    (matrices, steps), expected = map(parameters_of, files)
    assert (matrices, steps) == expected
    assert {"blocks.0.qkv.weight[2]", "experts.up_proj[1]"} < matrices.keys()
    assert steps == [2, 4]  # also the last, although ZeRO steps partition by partition


def cost(rank, stage, units=contextlib.nullcontext, **options):
    """Return what a step takes, as `hf-muon plan` computes it with the units of accelerators, and bytes of updates."""
    engine, optimizer = engine_of(stage, **options)
    counts, step = Counter(), optimizer.step

    def counting(*args, **kwargs):  # DeepSpeed's own part of a step is not counted
        with Counted() as counted:
            step(*args, **kwargs)
        counts.update(sent=counted.bytes, flops=counted.flops)

    optimizer.step = counting
    for batch in range(2):  # in the first step, ranks connect
        counts.clear()
        engine.backward(loss_of(engine, tokens_of(batch)))
        with units():
            engine.step()
    zero, partitions = engine.optimizer, optimizer.partitioned.partitions
    masters = zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
    weights = [getattr(param, "ds_tensor", param) for param in engine.module.parameters()] + list(masters)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    matrices = [
        part for flat, own in partitions.items() if "momentum_buffer" in optimizer.state[flat] for part in own.slices
    ]
    engine.destroy()
    return {
        **counts,
        "state": sum(tensor.nbytes for tensor in moments),
        "weights": sum(tensor.nbytes for tensor in weights),
        "updates": sum(4 * math.prod(part.shape) for part in matrices),
    }


@pytest.mark.first_tier("2|3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_plan_foretells_bytes_and_flops(ranks, stage):
    options = {"ns_dtype": "fp32", "normalize": "rows"}
    measured = ranks.run(cost, stage=stage, units=accelerated, **options)
    model, config = build_model(), MuonConfig(**options)
    run = {"layout": f"zero{stage}", "ranks": 2, "compute_dtype": torch.float32}
    numbers = numbers_of(facts_of(model, route_parameters(model), config, **run))
    for quantity in ("sent", "flops", "state", "weights"):
        assert getattr(numbers, quantity) == [rank[quantity] for rank in measured], quantity


def test_matrices_that_lie_whole_on_a_rank_do_not_travel(ranks):
    """Count bytes: ZeRO-2 cuts a flat group in two and most matrices stay whole, ZeRO-3 cuts every matrix."""
    for stage, share in ((2, 0.2), (3, 0.6)):
        assert all(own["sent"] < share * own["updates"] for own in ranks.run(cost, stage=stage))


@pytest.mark.parametrize("kind", [Muon, type("MyMuon", (Muon,), {})])
def test_the_name_that_deepspeed_sees(kind):
    """Hide the class name everywhere, because a later DeepSpeed may look at it in more places; it is still a Muon."""
    optimizer = kind([torch.nn.Parameter(torch.ones(3, 4))])
    hide_name(optimizer)
    assert isinstance(optimizer, kind)
    assert "muon" not in type(optimizer).__name__.lower()
    hide_name(optimizer)
    assert "muon" not in type(copy.deepcopy(optimizer)).__name__.lower()
    if kind is Muon:
        assert type(pickle.loads(pickle.dumps(optimizer))) is OrthogonalizedMomentum


def reports(rank, **options):
    """Return this rank's reports of a first step that does not reach all parameters."""
    logger, lines = logging.getLogger("hf_muon"), []
    logger.setLevel(logging.INFO)
    keep = mock.patch.object(logger, "handle", lambda record: lines.append(record.getMessage()))
    with keep, mock.patch.dict("os.environ", HF_MUON_STEP_REPORT="1"):
        run(rank, last=2, viewed=True, **options)
    logger.setLevel(logging.WARNING)
    return [line for line in lines if line.startswith("the first step")]


@pytest.mark.first_tier("2-cpu|^3$")
@pytest.mark.parametrize("cell", [cell for cell in STAGES if cell != "0"])
def test_the_report_has_an_entry_for_each_kind_of_both_halves(ranks, cell, golden):
    (report,), others = ranks.run(reports, **STAGES[cell])
    assert others == []  # rank 1
    golden("deepspeed/first-step", report)
