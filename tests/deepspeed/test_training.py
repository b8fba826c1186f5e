"""Training under ZeRO: every stage against one process, and every resumed run against the uninterrupted one."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
import torch

from hf_muon import MuonConfig
from hf_muon.plan import step_plan as plan
from hf_muon.plan.memory import Training
from tests.bounds import TIMES, beyond_rounding
from tests.deepspeed.cases import bytes_sent, consolidated, cost, single, train
from tests.deepspeed.models import build_model, view_of
from tests.deepspeed.pools import pool_of

pytestmark = pytest.mark.usefixtures("quiet")

CPU = {"offload_optimizer": {"device": "cpu"}}
STAGES = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "1-cpu": {"stage": 1, "zero": CPU},
    "2": {"stage": 2},
    "2-cpu": {"stage": 2, "zero": CPU},
    "3": {"stage": 3},
    "3-cpu": {"stage": 3, "zero": {**CPU, "sub_group_size": 1500}},
}
HPZ = {"zero_hpz_partition_size": 2}  # each node keeps a second copy of the parameters until the step
# Leaves one matrix for Muon, so that one partition has it and the others have none.
ALL_BUT_ONE = r"blocks|experts"
BF16_OPTIMIZER = {"stage": 1, "config": {"data_types": {"grad_accum_dtype": "fp32"}}}


reference = functools.lru_cache(maxsize=64)(single)


def distance(one, other, wide=False):
    """Return the distance of two runs' weights relative to the distance from the start, the largest of all weights."""
    start = dict(build_model(wide=wide).named_parameters())
    return max(
        float((one["weights"][name] - weight).norm() / (weight - start[name].to(weight.dtype)).norm())
        for name, weight in other["weights"].items()
        if not torch.equal(one["weights"][name], weight)
    )


def tensors(result):
    """Return losses and weights by name."""
    return {"losses": torch.tensor(result["losses"]), **result["weights"]}


def assert_close(one, reference=reference, times=TIMES, **options):
    """Compare with one process, up to the rounding of another order of sums of gradients."""
    controls = [tensors(reference(**options, moved=seed)) for seed in (0, 1)]
    assert not beyond_rounding(tensors(one), tensors(reference(**options)), controls, times)


def assert_equal(one, other):
    assert one["losses"] == other["losses"]
    assert one["weights"].keys() == other["weights"].keys()
    for name, weight in other["weights"].items():
        assert torch.equal(one["weights"][name], weight), name


def assert_same_state(one, other):
    assert one["steps"] == other["steps"]
    for mine, theirs in zip(one["state"], other["state"], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert mine[key].dtype == value.dtype
            assert torch.equal(mine[key], value), key


@pytest.mark.extended(but="^[0-3](-cpu)?-float32|bf16-optimizer-bf")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(options, id=name) for name, options in STAGES.items()),
        pytest.param(BF16_OPTIMIZER, id="1-bf16-optimizer"),
        pytest.param({"stage": 2, "zero": {"round_robin_gradients": True}}, id="2-round-robin"),
        pytest.param({"stage": 3, "zero": {"sub_group_size": 1500}}, id="3-sub-groups"),
        pytest.param({"stage": 3, "zero_init": True}, id="3-init"),
        pytest.param({"stage": 3, "zero_init": True, "zero": HPZ}, id="3-hpz"),
        pytest.param({"stage": 2, "max_batch_bytes": 1125}, id="2-buckets"),
        pytest.param({"stage": 2, "frozen": True}, id="2-frozen"),
        pytest.param({"stage": 3, "frozen": True, "zero": CPU}, id="3-frozen"),
        pytest.param({"stage": 2, "adamw_patterns": ALL_BUT_ONE}, id="2-one-matrix"),
        pytest.param({"stage": 3, "adamw_patterns": ALL_BUT_ONE}, id="3-one-matrix"),
    ],
)
def test_given_equal_gradients_every_stage_gives_the_bits_of_one_process(ranks, options, dtype):
    shared = {name: options[name] for name in ("frozen", "adamw_patterns") if name in options}
    expected = reference(dtype=dtype, **shared)
    for result in ranks.run(train, same_data=True, dtype=dtype, **options):
        assert_equal(result, expected)
        assert result["dtypes"] == ["torch.float32"]


@pytest.mark.extended(but="2-cpu")
@pytest.mark.parametrize("name", ["0", "1", "2-cpu", "3", "3-cpu"])
def test_weights_that_are_several_matrices_and_transposed_ones(ranks, name):
    expected = reference(dtype="float32", viewed=True, adjust_lr_fn="original")
    assert any(not torch.equal(w, expected["weights"][n]) for n, w in reference(dtype="float32")["weights"].items())
    for result in ranks.run(train, same_data=True, viewed=True, adjust_lr_fn="original", **STAGES[name]):
        assert_equal(result, expected)


@pytest.mark.extended(but="1")
@pytest.mark.parametrize("name", ["0", "1", "2-cpu", "3", "3-cpu"])
def test_bf16_moments_are_rounded_as_in_one_process_and_resumed(ranks, name, tmp_path):
    dtypes = {"momentum_dtype": "bf16", "adamw_state_dtype": "bf16"}
    options = {"same_data": True, **dtypes, **STAGES[name]}
    expected = reference(dtype="float32", **dtypes)
    assert any(not torch.equal(w, expected["weights"][n]) for n, w in reference(dtype="float32")["weights"].items())
    straight = ranks.run(train, save=str(tmp_path), **options)
    for result in straight:
        assert_equal(result, expected)
        assert result["dtypes"] == ["torch.bfloat16", "torch.float32"]
    longer = ranks.run(train, last=12, **options)
    for one, other in zip(ranks.run(train, first=10, last=12, load=str(tmp_path), **options), longer, strict=True):
        assert_equal(one, {**other, "losses": other["losses"][10:]})
        assert_same_state(one, other)


@pytest.mark.extended(but="4-clipped")
@pytest.mark.parametrize("clipping", [None, 0.3], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_trains_as_one_process(ranks, stage, accumulate, clipping):
    options = {"accumulate": accumulate, "clipping": clipping}
    one, other = ranks.run(train, **options, **STAGES[stage])
    assert_equal(one, other)
    assert_close(one, **options)


@pytest.mark.extended(but="2-1-clipped")
@pytest.mark.parametrize("clipping", [None, 0.3], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_bf16_is_within_the_noise_of_one_process(ranks, stage, accumulate, clipping):
    options = {"dtype": "bfloat16", "accumulate": accumulate, "clipping": clipping}
    one, other = ranks.run(train, **options, **STAGES[stage])
    assert_equal(one, other)
    # A sum in another order is rounded to the eight bits of bf16, and orthogonalization amplifies the difference.
    assert_close(one, times=2, **options)


@pytest.mark.extended(but="^3$")
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "1"])
def test_bf16_stages_give_the_same_bits(ranks, stage):
    """Train on two ranks: the order does not change a sum of two gradients."""
    options = {"dtype": "bfloat16", "last": 5}
    result, expected = (ranks.run(train, **options, **STAGES[name])[0] for name in (stage, "1"))
    assert_equal(result, expected)


def test_a_clipped_direction_would_be_seen():
    clipped, wrong = reference(clipping=0.3), single(clipping=0.3, clip_directions=True)
    assert distance(wrong, clipped) > 0.5


@pytest.mark.extended
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 2, "zero": {"contiguous_gradients": False}},
        {"stage": 2, "zero": {"overlap_comm": True, "reduce_bucket_size": 500, "allgather_bucket_size": 500}},
        {"stage": 2, "zero": {"reduce_scatter": False}},
        {"stage": 1, "zero": {"round_robin_gradients": True, **CPU}},
        {"stage": 3, "zero": {"overlap_comm": True, "stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0}},
        {"stage": 3, "zero": {"reduce_scatter": False, "sub_group_size": 1}},
        {"stage": 3, "zero_init": True, "zero": {**CPU, "offload_param": {"device": "cpu"}}},
    ],
    ids=str,
)
def test_options_of_zero(ranks, options):
    assert_close(ranks.run(train, clipping=0.3, **options)[0], clipping=0.3)


def assert_resumes(ranks, path, saved, last, **options):
    """Check that a resumed run is bit-identical to the uninterrupted one; return the latter, by rank."""
    straight = ranks.run(train, last=last, **options)
    ranks.run(train, last=saved, save=path, **options)
    for one, other in zip(ranks.run(train, first=saved, last=last, load=path, **options), straight, strict=True):
        assert one["swapped"] == other["swapped"]
        assert_equal(one, {**other, "losses": other["losses"][saved:]})
        assert_same_state(one, other)
    return straight


@pytest.mark.extended(but="^0-float32|2-cpu-float32|3-bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [*(pytest.param(options, id=name) for name, options in STAGES.items()), pytest.param(BF16_OPTIMIZER, id="bf16")],
)
def test_resume_is_exact(ranks, options, dtype, tmp_path):
    options = {"dtype": dtype, **options}
    path = str(tmp_path / "checkpoint")
    straight = assert_resumes(ranks, path, 4, 8, **options)
    assert all(one["steps"] == [8, 8, 8] for one in straight)
    for how in ("zero", "cast"):  # this test sees momentum that a checkpoint loses or rounds
        other = ranks.run(train, first=4, last=8, load=path, drop=how, **options)[0]
        with pytest.raises(AssertionError):
            assert_same_state(other, straight[0])


@pytest.mark.extended(but="^2$")
@pytest.mark.parametrize("stage", ["1", "2", "2-cpu", "3", "3-cpu"])
def test_a_step_that_overflows_leaves_everything_as_it_was(ranks, stage):
    """Skip a step as fp16's loss scaling does. On a CPU DeepSpeed has no fp16, and does the same for bf16."""
    options = {"dtype": "bfloat16", **STAGES[stage]}
    for one, other in zip(
        ranks.run(train, last=4, overflow=3, **options), ranks.run(train, last=3, **options), strict=True
    ):
        assert all(torch.equal(one["weights"][name], weight) for name, weight in other["weights"].items())
        assert_same_state(one, other)


@pytest.mark.extended(but="2")
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_to_fp32_finds_the_weights(ranks, stage, tmp_path):
    equal = ranks.run(consolidated, path=str(tmp_path), stage=stage)[0]
    assert len(equal) == 27
    assert all(equal.values())


def parameters_of(file):
    """Return Muon's matrices in a file of metrics, by name with layer, kind and shape, and its steps."""
    start, *steps = [json.loads(line) for line in file.read_text().splitlines()]
    watched = {p["name"]: (p["layer"], p["kind"], p["shape"]) for p in start["parameters"] if p["shape"]}
    return watched, [line["step"] for line in steps]


@pytest.mark.extended(but="2")
@pytest.mark.parametrize("kind", ["1", "2", "3-cpu"])
def test_metrics_change_nothing_and_have_the_names_of_one_process(ranks, kind, tmp_path):
    file = tmp_path / "lines.jsonl"
    watched = ranks.run(
        train, last=4, viewed=True, diagnostics_every=2, diagnostics_file=str(file), **STAGES[kind]
    )[0]  # fmt: skip
    assert_equal(watched, ranks.run(train, last=4, viewed=True, **STAGES[kind])[0])
    single(last=4, viewed=True, diagnostics_every=2, diagnostics_file=str(tmp_path / "single.jsonl"))
    matrices, steps = parameters_of(file)
    expected = parameters_of(tmp_path / "single.jsonl")
    assert (matrices, steps) == expected
    assert {"blocks.0.qkv.weight[2]", "experts.up_proj[1]"} < matrices.keys()
    assert steps == [2, 4]  # also the last, although ZeRO steps partition by partition


@pytest.mark.extended(but="3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_plan_foretells_bytes_memory_and_flops(ranks, stage, monkeypatch):
    measured = ranks.run(cost, stage=stage)
    routes = plan.route_parameters
    monkeypatch.setattr(
        plan, "route_parameters", lambda *args: [replace(r, view=view_of(r.name)) for r in routes(*args)]
    )
    training = Training(compute_dtype=torch.float32)
    step_plan = plan.plan_step(build_model(), MuonConfig(ns_dtype="fp32"), f"zero{stage}", 2, training=training)
    for quantity in ("sent_bytes", "flops", "state_bytes"):
        assert getattr(step_plan, quantity) == [rank[quantity] for rank in measured], quantity
    assert step_plan.memory.weights == [rank["weight_bytes"] for rank in measured]


def test_matrices_that_lie_whole_on_a_rank_do_not_travel(ranks):
    """Count bytes: ZeRO-2 cuts a flat group in two and most matrices stay whole, ZeRO-3 cuts every matrix."""
    for mine, updates in ranks.run(bytes_sent, stage=2):
        assert mine < 0.2 * updates
    for mine, updates in ranks.run(bytes_sent, stage=3):
        assert mine < 0.6 * updates


@pytest.mark.extended
@pytest.mark.parametrize(
    "options", [{"zero_init": True, "zero": HPZ}, {"zero": {**HPZ, **CPU, "sub_group_size": 1500}}]
)
def test_parameters_that_two_nodes_store_again(options, tmp_path):
    """Run ZeRO++'s hpZ on four ranks: second copies are sharded over two of them, moments over all."""
    pool = pool_of(4)
    try:
        run = functools.partial(pool.run, train, stage=3, **options)
        assert_equal(run(same_data=True)[0], reference())
        straight = run()
        assert_close(straight[0])
        run(last=5, save=str(tmp_path))
        for one, other in zip(run(first=5, load=str(tmp_path)), straight, strict=True):
            assert_equal(one, {**other, "losses": other["losses"][5:]})
            assert_same_state(one, other)
    finally:
        pool.close()
