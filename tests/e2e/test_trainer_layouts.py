"""Trainer with `optim: muon` in the layouts it knows, against the same Trainer in one process with the same batches.

Real processes on gloo; FSDP2 on a CPU is opened by `cpu_fsdp`. What only GPUs can show, NCCL, streams that overlap and
fp16 through Trainer, is at the end and marked `gpu`.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from tests.bounds import beyond_rounding
from tests.e2e import layouts_worker as worker
from tests.e2e.harness import BIN, ROOT, python, run

pytestmark = pytest.mark.slow

Result = dict[str, Any]
Case = dict[str, Any]

ACCELERATE = tuple(int(part) for part in importlib.metadata.version("accelerate").split(".")[:2])
TRANSFORMERS = tuple(int(part) for part in importlib.metadata.version("transformers").split(".")[:2])
PARALLELISM = ACCELERATE >= (1, 12)  # Trainer takes a ParallelismConfig
LOADS_SHARDS = ACCELERATE >= (1, 13)  # before, it forgets the moments of any optimizer
DDP_RESUMES = TRANSFORMERS >= (5, 20)  # before, it maps the optimizer to the device cpu:0, which torch does not know
NATIVE = TRANSFORMERS >= (5, 20)  # from_pretrained(distributed_config=...)

SAVE = {"save_strategy": "steps", "save_steps": worker.SAVE_STEP}
SHARDED = {"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
HSDP = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}
COMPILE = {"torch_compile": True, "torch_compile_backend": "aot_eager"}

OPTIONS: dict[str, Case] = {
    "accumulation": {"arguments": {"gradient_accumulation_steps": 2}},
    "frozen": {"model": {"frozen": True}},
    "tied": {"model": {"tied": True}},
    "fused": {"model": {"fused": True}},
    "lora": {"model": {"lora": True}, "arguments": {"optim_args": "ns_dtype=fp32,lora=muon", "max_grad_norm": 0.05}},
    "compile": {"arguments": COMPILE},
    "checkpointing": {"arguments": {"gradient_checkpointing": True}},
    "bf16": {"arguments": {"bf16": True}},
    "bf16_weights": {"model": {"bf16": "stored"}, "arguments": {"bf16": True}},
}


SETTINGS = {"cpu_ram_efficient_loading": True, "reshard_after_forward": False, "activation_checkpointing": True}
WITH_DDP = ("accumulation", "tied", "fused", "lora", "bf16", "bf16_weights")


def case(name: str, layout: str = "plain", **parts: Any) -> Case:
    """A case of the worker; `arguments` of several parts are joined."""
    return {"name": name, "layout": layout, **parts}


def resumed(original: Case, *, name: str | None = None, source: str | None = None, **changes: Any) -> Case:
    """The same case from its checkpoint, with a model that starts from other random weights."""
    checkpoint = f"{source or original['name']}/checkpoint-{worker.SAVE_STEP}"
    model = original.get("model", {})
    model = model | ({"lora_seed": 3} if model.get("lora") else {"seed": 3})  # an adapter's checkpoint is the adapter
    return original | {"name": name or f"{original['name']}_resumed", "resume": checkpoint, "model": model} | changes


def one() -> list[Case]:
    """References, in one process."""
    base = case("one", arguments=SAVE)
    even = case("one_even", model={"even": True})
    options = [
        case(f"one_{name}", **parts) for name, parts in OPTIONS.items() if name not in ("compile", "checkpointing")
    ]
    exact = [base, even, *(item for item in options if "bf16" not in item["name"])]
    rounded = case("one_bf16_rounded", model={"bf16": "rounded"}, arguments={"bf16": True})
    return [base, resumed(base), even, *options, rounded, *(moved(item, seed) for item in exact for seed in (0, 1))]


def moved(original: Case, seed: int) -> Case:
    """The same case from weights that are moved by one unit in the last place: what rounding makes of a run."""
    name, model = f"{original['name']}_moved_{seed}", original.get("model", {}) | {"moved": seed}
    arguments = original.get("arguments", {}) | {"save_strategy": "no"}
    return original | {"name": name, "model": model, "arguments": arguments}


def two() -> list[Case]:
    ddp, fsdp = case("ddp", arguments=SAVE), case("fsdp", "fsdp2", arguments=SAVE)
    sharded = case("fsdp_sharded", "fsdp2", arguments=SAVE | SHARDED)
    lora = case("fsdp_lora", "fsdp2", **OPTIONS["lora"])
    lora["arguments"] = lora["arguments"] | SAVE | SHARDED
    cases = [ddp, fsdp, sharded, lora]
    cases += [resumed(straight) for straight in (ddp, fsdp, sharded, lora)]
    cases += [resumed(x, name=f"{x['name']}_dropped", fault="drop_moments") for x in (ddp, fsdp)]
    cases += [case(f"ddp_{name}", **parts) for name, parts in OPTIONS.items() if name in WITH_DDP]
    cases += [case(f"fsdp_{name}", "fsdp2", **parts) for name, parts in OPTIONS.items() if name != "lora"]
    cases += [case("fsdp_settings", "fsdp2", arguments={"fsdp_config": SETTINGS})]
    cases += [
        case("fp16", "fp16"),
        case("offload", "fsdp2", arguments={"fsdp": "full_shard offload", "fsdp_config": {"cpu_offload": True}}),
    ]
    poisoned: Case = {"fault": "poison_one_rank", "arguments": {"max_grad_norm": 0.0}}
    cases += [case("ddp_poisoned", **poisoned), case("fsdp_poisoned", "fsdp2", **poisoned)]
    if PARALLELISM:
        tensor_parallel = {"arguments": {"parallelism": {"tp_size": 2}}, "load": {"tp_plan": "auto"}}
        cases += [case("tp", model={"even": True}, **tensor_parallel)]
    if NATIVE:
        cases += [
            case("native_fsdp", load={"fsdp_size": 2}),
            case("native_tp", model={"even": True}, load={"tp_size": 2}),
            case("native_saving", load={"fsdp_size": 2}, arguments=SAVE),
        ]
    return cases


def four() -> list[Case]:
    hsdp = case("hsdp", "fsdp2", arguments=SAVE, environment=HSDP)
    hsdp_sharded = case("hsdp_sharded", "fsdp2", arguments=SAVE | SHARDED, environment=HSDP)
    fsdp = case("four_fsdp", "fsdp2", arguments=SAVE)
    sharded = case("four_fsdp_sharded", "fsdp2", arguments=SAVE | SHARDED)
    cases = [case("four_ddp"), fsdp, sharded]
    cases += [
        resumed(fsdp, name="two_to_four", source="fsdp"),
        resumed(sharded, name="two_to_four_sharded", source="fsdp_sharded"),
    ]
    if PARALLELISM:
        sizes = {"dp_replicate_size": 2, "dp_shard_size": 2}
        cases += [hsdp, hsdp_sharded, resumed(hsdp), case("hsdp_arguments", "fsdp2", arguments={"parallelism": sizes})]
        cases += [resumed(hsdp_sharded, name="two_to_hsdp_sharded", source="fsdp_sharded")]
    if NATIVE:
        cases += [
            case("native_hsdp", load={"fsdp_size": 2, "dp_replicate_size": 2}),
            case("native_fsdp_tp", model={"even": True}, load={"fsdp_size": 2, "tp_size": 2}),
        ]
    return cases


def launched() -> list[Case]:
    """Under `accelerate launch`: the config file says FSDP2, the training arguments do not."""
    sharded = {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    base = case("launched", arguments=SAVE)
    return [
        base,
        resumed(base),
        resumed(base, name="four_to_two", source="four_fsdp"),
        resumed(base, name="four_to_two_sharded", source="four_fsdp_sharded", environment=sharded),
        *(
            [resumed(base, name="hsdp_to_two_sharded", source="hsdp_sharded", environment=sharded)]
            if PARALLELISM
            else []
        ),
    ]


def damaged() -> list[Case]:
    """Checkpoints with damaged files; `Stages` makes them. The last case is met by one rank alone, and ends all."""
    checkpoint = f"checkpoint-{worker.SAVE_STEP + 1}"
    return [
        case("damaged_ddp", resume=f"damaged_ddp/{checkpoint}"),
        case("damaged_sharded", "fsdp2", arguments=SHARDED, resume=f"damaged_sharded/{checkpoint}"),
        resumed(case("fsdp", "fsdp2"), name="undamaged", source="damaged_fsdp"),
        case("damaged_fsdp", "fsdp2", resume=f"damaged_fsdp/{checkpoint}", alone=True),
    ]


def alone() -> list[Case]:
    """What FSDP2 has left behind, in one process."""
    return [resumed(case("one"), name="two_to_one", source="fsdp_for_one")]


TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
ACCELERATE_CONFIG = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 2,
    "machine_rank": 0,
    "main_training_function": "main",
    "rdzv_backend": "static",
    "use_cpu": False,  # with true, `accelerate launch` starts one process; the training arguments say use_cpu
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": False,
    },
}


# The cases that tests of the first tier need; the processes of a stage run no others there.
FIRST = {
    *("one", "one_resumed", "one_moved_0", "one_moved_1", "one_even", "one_even_moved_0", "one_even_moved_1"),
    *("ddp", "ddp_resumed", "fsdp", "fsdp_resumed", "fsdp_sharded", "fsdp_sharded_resumed", "fsdp_poisoned"),
    *("fp16", "offload", "tp", "native_tp", "hsdp", "hsdp_resumed", "two_to_four_sharded"),
    *("launched", "launched_resumed"),
}


class Stages:
    """Starts of processes, each once in a test session, however many workers pytest has.

    Args:
        folder: where the processes write, the same for all workers.
        first: run the cases of `FIRST` alone.
    """

    def __init__(self, folder: Path, *, first: bool = False) -> None:
        self.folder = folder
        self.first = first
        folder.mkdir(exist_ok=True)

    def result(self, stage: str, name: str) -> Result:
        self.run(stage)
        result: Result = torch.load(self.folder / f"{name}.pt", weights_only=False)
        return result

    def run(self, stage: str) -> None:
        with (self.folder / f"{stage}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = self.folder / f"{stage}.done"
            if not done.exists():
                done.write_text("failed")  # a stage that fails is not run again for each of its tests
                done.write_text(getattr(self, f"_{stage}")())
            assert done.read_text() != "failed", f"the processes of stage {stage} have failed"

    def _one(self) -> str:
        return self.start(one())

    def _two(self) -> str:
        return self.start(two(), *TORCHRUN, "--nproc-per-node", "2")

    def _four(self) -> str:
        self.run("two")
        return self.start(four(), *TORCHRUN, "--nproc-per-node", "4")

    def _launched(self) -> str:
        if not self.first:
            self.run("four")
        config = self.folder / "accelerate.yaml"
        config.write_text(yaml.safe_dump(ACCELERATE_CONFIG), encoding="utf-8")
        command = [BIN / "accelerate", "launch", "--config_file", config, "--main_process_port", "0", worker.__file__]
        return self.launch([*command, self.folder, self.write(launched())])

    def _alone(self) -> str:
        self.run("two")
        source = self.folder / "fsdp" / f"checkpoint-{worker.SAVE_STEP}"
        copy = self.folder / "fsdp_for_one" / source.name
        shutil.copytree(source, copy)
        # What Trainer takes for its own: model.safetensors, which is there, and optimizer.pt.
        (copy / "pytorch_model_fsdp.bin").unlink()
        (copy / "optimizer.bin").rename(copy / "optimizer.pt")
        return self.start(alone())

    def _damaged(self) -> str:
        self.run("two")
        for name, source, file in (
            ("damaged_ddp", "ddp", "optimizer.pt"),
            ("damaged_sharded", "fsdp_sharded", "optimizer_0/__1_0.distcp"),
            ("damaged_fsdp", "fsdp", "optimizer.bin"),
        ):
            intact = self.folder / source / f"checkpoint-{worker.SAVE_STEP}"
            copy = self.folder / name / f"checkpoint-{worker.SAVE_STEP + 1}"
            shutil.copytree(intact, self.folder / name / intact.name)
            shutil.copytree(intact, copy)
            content = (copy / file).read_bytes()
            (copy / file).write_bytes(content[: len(content) // 2])
        return self.start(damaged(), *TORCHRUN, "--nproc-per-node", "2", fails=True)

    def start(self, cases: list[Case], *launcher: str, fails: bool = False) -> str:
        return self.launch([sys.executable, *launcher, worker.__file__, self.folder, self.write(cases)], fails=fails)

    def launch(self, command: list[object], *, fails: bool = False) -> str:
        """Run a start of processes; once more, with a warning, where they were lost without an error of their own.

        Errors of a case are its result and end no process. What ends one is a signal, or a connection that broke on a
        busy machine.
        """
        try:
            return run(command, cwd=self.folder, fails=fails, PYTHONPATH=str(ROOT))
        except AssertionError as error:
            if fails:
                raise
            warnings.warn(f"these processes were lost, and are started again:\n{error}", stacklevel=1)
            return run(command, cwd=self.folder, PYTHONPATH=str(ROOT))

    def write(self, cases: list[Case]) -> Path:
        if self.first:
            cases = [case for case in cases if case["name"] in FIRST]
        path = self.folder / f"{cases[0]['name']}.json"
        path.write_text(json.dumps(cases), encoding="utf-8")
        return path


@pytest.fixture(scope="session")
def stages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stages:
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # each worker has a folder of its own in it
    return Stages(base / "layouts", first=request.config.getoption("--tier") == "first")


Get = Callable[[str], Result]
STAGE_OF = {
    case["name"]: stage
    for stage, cases in {
        "one": one,
        "two": two,
        "four": four,
        "launched": launched,
        "alone": alone,
        "damaged": damaged,
    }.items()
    for case in cases()
}


@pytest.fixture
def get(stages: Stages) -> Get:
    """The result of a case by name; its processes have run, and without an error."""

    def result(name: str) -> Result:
        found = stages.result(STAGE_OF[name], name)
        assert "error" not in found, found["traceback"]
        return found

    return result


def start_of(**options: Any) -> dict[str, Tensor]:
    return {worker.clean(name): p.detach().clone() for name, p in worker.network(**options).named_parameters()}


def distance(found: Result, expected: Result, start: Mapping[str, Tensor]) -> float:
    """How far the weights ended from each other, relative to how far they went; the largest of all trained ones."""
    a, b = found["weights"], expected["weights"]
    trained = {name.partition(":")[0] for name in expected["state"]}
    assert all(not torch.equal(b[name], start[name]) for name in trained), "a parameter did not move"
    assert all(torch.equal(a[name], start[name]) for name in start.keys() - trained), "a frozen parameter moved"
    return max(float((a[name] - b[name]).norm() / (b[name] - start[name]).norm()) for name in trained)


def controls_of(name: str, get: Get) -> list[Result]:
    return [get(f"{name}_moved_{seed}") for seed in (0, 1)]


def groups(result: Result) -> list[dict[str, Any]]:
    """Param groups; a full state dict brings tuples back as lists."""
    return [{k: list(v) if isinstance(v, tuple) else v for k, v in group.items()} for group in result["groups"]]


def numbers(result: Result) -> dict[str, Tensor]:
    """Losses, gradient norms, weights and moments by name."""
    logs = {f"{key} {list(result[key])}": torch.tensor(list(result[key].values())) for key in ("losses", "grad_norms")}
    return {**logs, **result["weights"], **result["state"]}


def assert_same_run(found: Result, expected: Result, start: Mapping[str, Tensor], controls: list[Result]) -> None:
    """Weights, moments, losses, gradient norms and groups; but for rounding, since gradients are summed otherwise."""
    assert found["agree"], "ranks hold different weights or moments"
    assert min(expected["grad_norms"].values()) > expected["max_grad_norm"], "clipping was not active"
    assert distance(found, expected, start) < torch.inf, "it compares what is frozen with the start"
    assert not beyond_rounding(numbers(found), numbers(expected), [numbers(control) for control in controls])
    assert groups(found) == groups(expected)


def assert_identical(found: Result, expected: Result) -> None:
    """Bit for bit: weights, every moment, and the losses of the steps that both have taken."""
    assert found["agree"]
    assert found["weights"].keys() == expected["weights"].keys()
    assert [n for n, x in expected["weights"].items() if not torch.equal(found["weights"][n], x)] == []
    assert found["state"].keys() == expected["state"].keys()
    assert [n for n, x in expected["state"].items() if not torch.equal(found["state"][n], x)] == []
    assert found["losses"] == expected["losses"]  # those before the checkpoint are in its log
    assert groups(found) == groups(expected)


FSDP2 = "DTensor (Shard(dim=0),) torch.float32"
HSDP2 = "DTensor (Replicate(), Shard(dim=0)) torch.float32"
PLAIN = "Tensor  torch.float32"


def stored(result: Result) -> set[str]:
    return set(result["stored"].values())


# --- one step is the same step, wherever it is taken

needs_parallelism = pytest.mark.skipif(not PARALLELISM, reason="Trainer wants accelerate 1.12 for ParallelismConfig")
loads_shards = pytest.mark.skipif(not LOADS_SHARDS, reason="accelerate 1.13 is the first to load sharded moments")
ddp_resumes = pytest.mark.skipif(not DDP_RESUMES, reason="this Trainer cannot resume DDP on a CPU")
needs_native = pytest.mark.skipif(not NATIVE, reason="transformers has no DistributedConfig for training")


def test_one_process_learns(get: Get) -> None:
    losses = get("one")["losses"]
    assert losses[worker.STEPS] < 0.95 * losses[1]


@pytest.mark.extended(but="^(ddp|fsdp|fsdp_sharded|launched|hsdp|tp|native_tp)-one")
@pytest.mark.parametrize(
    ("name", "reference", "kind", "storage"),
    [
        ("ddp", "one", "MULTI_CPU", {PLAIN}),
        ("fsdp", "one", "FSDP", {FSDP2}),
        ("fsdp_sharded", "one", "FSDP", {FSDP2}),
        ("launched", "one", "FSDP", {FSDP2}),
        ("four_ddp", "one", "MULTI_CPU", {PLAIN}),
        ("four_fsdp", "one", "FSDP", {FSDP2}),
        pytest.param("hsdp", "one", "FSDP", {HSDP2}, marks=needs_parallelism),
        pytest.param("hsdp_arguments", "one", "FSDP", {HSDP2}, marks=needs_parallelism),
        pytest.param(
            "tp", "one_even", "MULTI_CPU", {PLAIN, FSDP2, FSDP2.replace("0", "1", 1)}, marks=needs_parallelism
        ),
        pytest.param("native_fsdp", "one", "MULTI_CPU", {FSDP2}, marks=needs_native),
        pytest.param(
            "native_tp", "one_even", "MULTI_CPU", {PLAIN, FSDP2, FSDP2.replace("0", "1", 1)}, marks=needs_native
        ),
        pytest.param("native_hsdp", "one", "MULTI_CPU", {HSDP2}, marks=needs_native),
        pytest.param("native_fsdp_tp", "one_even", "MULTI_CPU", None, marks=needs_native),
    ],
)
def test_layout_equals_one_process(name: str, reference: str, kind: str, storage: set[str] | None, get: Get) -> None:
    found = get(name)
    assert found["type"] == kind
    if storage:
        assert stored(found) == storage, "the test did not run the layout that it is about"
    assert_same_run(found, get(reference), start_of(even=reference == "one_even"), controls_of(reference, get))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("layout", "option"),
    [
        (layout, option)
        for layout, options in (("ddp", WITH_DDP), ("fsdp", OPTIONS))
        for option in options
        if not option.startswith("bf16")
    ],
)
def test_option_equals_one_process(layout: str, option: str, get: Get) -> None:
    reference = "one" if option in ("compile", "checkpointing") else f"one_{option}"
    start = start_of(**OPTIONS[option].get("model", {}))
    assert_same_run(get(f"{layout}_{option}"), get(reference), start, controls_of(reference, get))


@pytest.mark.extended
def test_ddp_shares_the_work_and_the_others_do_not_by_a_group(get: Get) -> None:
    assert get("ddp")["group"]
    assert get("four_ddp")["group"]
    assert not get("one")["group"]
    assert not get("fsdp")["group"]


@pytest.mark.extended
@needs_native
def test_parameters_cut_by_transformers_are_no_replicas(get: Get) -> None:
    assert not any(get(name)["group"] for name in ("native_fsdp", "native_tp", "tp", "native_hsdp", "native_fsdp_tp"))


@pytest.mark.extended
def test_further_fsdp_settings_change_nothing(get: Get) -> None:
    assert_identical(get("fsdp_settings"), get("fsdp"))


# --- mixed precision


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("ddp_bf16", "one_bf16"),
        ("fsdp_bf16", "one_bf16"),
        ("ddp_bf16_weights", "one_bf16_weights"),
        # accelerate gives FSDP2 fp32 weights under mixed precision, and they start from rounded values.
        ("fsdp_bf16_weights", "one_bf16_rounded"),
    ],
)
def test_bf16_agrees_within_its_rounding(name: str, reference: str, get: Get) -> None:
    """Gradients are rounded at other places, and Newton-Schulz amplifies that: of the order of bf16 against fp32."""
    found, expected = get(name), get(reference)
    assert found["agree"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=5e-3)
    start = start_of(bf16="stored" if reference == "one_bf16_weights" else "rounded" if "weights" in name else "")
    assert distance(found, expected, start) < 4 * distance(get("one_bf16"), get("one"), start_of())


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("one_bf16", torch.float32), ("ddp_bf16", torch.float32), ("fsdp_bf16", torch.float32)),
        *(("ddp_bf16_weights", torch.bfloat16), ("fsdp_bf16_weights", torch.float32)),
    ],
)
def test_bf16_keeps_the_momentum_in_fp32(name: str, dtype: torch.dtype, get: Get) -> None:
    result = get(name)
    assert {x.dtype for x in result["weights"].values()} == {dtype}
    moments = {key: x for key, x in result["state"].items() if key.endswith(":momentum_buffer")}
    assert len(moments) == 14
    assert {x.dtype for x in moments.values()} == {torch.float32}


def test_fp16_skips_a_step_on_all_ranks(get: Get) -> None:
    steps = get("fp16")["steps"]
    assert all(step["agree"] for step in steps)
    assert [step["moved"] for step in steps] == [steps[0]["of"], steps[0]["of"], 0, steps[0]["of"]]
    assert [step["scale"] for step in steps] == [2.0**12, 2.0**12, 2.0**11, 2.0**11]


# --- resuming


@pytest.mark.extended(but="^(one|ddp|fsdp|fsdp_sharded|launched|hsdp)$")
@pytest.mark.parametrize(
    "name",
    [
        *("one", "fsdp", "launched"),
        pytest.param("ddp", marks=ddp_resumes),
        pytest.param("hsdp", marks=needs_parallelism),
        *(pytest.param(name, marks=loads_shards) for name in ("fsdp_sharded", "fsdp_lora")),
    ],
)
def test_resumed_run_is_the_uninterrupted_one(name: str, get: Get) -> None:
    assert_identical(get(f"{name}_resumed"), get(name))


@pytest.mark.extended
@pytest.mark.parametrize("name", [pytest.param("ddp", marks=ddp_resumes), "fsdp"])
def test_that_comparison_fails_without_the_moments(name: str, get: Get) -> None:
    dropped, straight = get(f"{name}_dropped"), get(name)
    with pytest.raises(AssertionError):
        assert_identical(dropped, straight)
    assert distance(dropped, straight, start_of()) > 0.1


@pytest.mark.extended(but="two_to_four_sharded")
@pytest.mark.parametrize(
    "name",
    [
        *("two_to_four", "four_to_two", "two_to_one"),
        *(pytest.param(name, marks=loads_shards) for name in ("two_to_four_sharded", "four_to_two_sharded")),
        *(pytest.param(x, marks=needs_parallelism) for x in ("two_to_hsdp_sharded", "hsdp_to_two_sharded")),
    ],
)
def test_resumed_run_on_another_number_of_processes(name: str, get: Get) -> None:
    assert_same_run(get(name), get("one"), start_of(), controls_of("one", get))


@pytest.mark.extended
@pytest.mark.skipif(LOADS_SHARDS, reason="accelerate loads sharded moments")
def test_moments_that_accelerate_forgets_are_missed(stages: Stages) -> None:
    error = stages.result("two", "fsdp_sharded_resumed")["error"]
    assert "This optimizer state cannot be loaded, and nothing was changed" in error
    assert "moments are missing" in error
    assert "cannot load them again" in (stages.folder / "two.done").read_text(encoding="utf-8")


# --- what goes wrong


@pytest.mark.extended(but="fsdp")
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_all_ranks_refuse_a_gradient_that_is_not_finite_on_one(layout: str, stages: Stages) -> None:
    name = f"{layout}_poisoned"
    error = stages.result("two", name)["error"]  # of rank 0; the last rank has the gradient
    assert "Muon refuses this step" in error
    assert "model.layers.1.mlp.up_proj.weight (37, 30) has a gradient that is not finite" in error


def test_offload_is_refused_by_name(stages: Stages) -> None:
    error = stages.result("two", "offload")["error"]
    assert "does not run under FSDP2 with its parameters on the CPU (offload)" in error


@pytest.mark.extended
@needs_native
def test_trainer_itself_does_not_save_what_transformers_has_cut(stages: Stages) -> None:
    """Else rank 0's piece of the moments would be taken for the whole."""
    assert "Resuming is not supported for models sharded at load time" in stages.result("two", "native_saving")["error"]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "file"), [("damaged_ddp", "optimizer.pt"), ("damaged_sharded", "optimizer_0/__1_0.distcp")]
)
def test_damaged_checkpoint_is_named_with_the_one_before_it(name: str, file: str, stages: Stages) -> None:
    error = stages.result("damaged", name)["error"]
    folder = stages.folder / name
    assert f"This checkpoint is damaged: {folder}/checkpoint-{worker.SAVE_STEP + 1}/{file} is cut off" in error
    assert f"the one before it, {folder}/checkpoint-{worker.SAVE_STEP}, and remove this one" in error


@pytest.mark.extended
def test_damaged_checkpoint_that_one_rank_reads(stages: Stages) -> None:
    """A full state dict is read by rank 0 alone."""
    stages.run("damaged")
    printed = (stages.folder / "damaged.done").read_text(encoding="utf-8")
    damaged = stages.folder / "damaged_fsdp" / f"checkpoint-{worker.SAVE_STEP + 1}" / "optimizer.bin"
    assert f"RuntimeError: This checkpoint is damaged: {damaged} is cut off" in printed


@pytest.mark.extended
def test_checkpoint_before_a_damaged_one_resumes(get: Get) -> None:
    assert_identical(get("undamaged"), get("fsdp"))


# --- GPUs


def gpus(cases: list[Case], folder: Path, processes: int) -> None:
    stages = Stages(folder)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    for item in cases:
        item["arguments"] = item.get("arguments", {}) | {"use_cpu": False}
    command = (*TORCHRUN, "--nproc-per-node", processes, worker.__file__, folder, stages.write(cases))
    python(*command, cwd=folder, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES=visible)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_equal_one(tmp_path: Path) -> None:
    """NCCL in place of gloo, and streams of their own for what FSDP2 and the exchange of matrices send."""
    gpus([case("one"), moved(case("one"), 0), moved(case("one"), 1)], tmp_path, 1)
    sharded = case("fsdp_sharded", "fsdp2", arguments=SAVE | SHARDED)
    fp16 = case("fp16_trainer", "fsdp2", arguments={"fp16": True})  # through accelerate's scaler
    gpus([case("ddp"), case("fsdp", "fsdp2"), sharded, resumed(sharded), fp16], tmp_path, 2)
    results = {path.stem: torch.load(path, weights_only=False, map_location="cpu") for path in tmp_path.glob("*.pt")}
    start = start_of()
    for name in ("ddp", "fsdp", "fsdp_sharded"):
        assert results[name]["type"] == ("MULTI_GPU" if name == "ddp" else "FSDP")
        assert_same_run(results[name], results["one"], start, controls_of("one", results.__getitem__))
    assert_identical(results["fsdp_sharded_resumed"], results["fsdp_sharded"])
    assert distance(results["fp16_trainer"], results["one"], start) < 0.1  # fp16 has three more bits than bf16
