"""How many times too large gradients are under sequence parallelism: measured, not derived from version numbers.

transformers computes one loss for a sequence parallel group on each of its ranks, and DeepSpeed averages gradients.
Whether the two together give the gradient of that loss depends on their versions and on the ZeRO stage. So a model of
two vectors, whose gradient is known, goes through the same `compute_loss` and an engine with the same config.
"""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

from hf_muon.diagnostics.log import is_rank_zero, logger
from hf_muon.integrations.ulysses.layout import size_of


def factor_of(trainer: Any, compute_loss: Callable[..., Any]) -> float:
    """Measure how many times too large gradients reach the optimizer. All ranks must call this together.

    Args:
        trainer: with a prepared model.
        compute_loss: as of its class.

    Returns:
        1, the size of a sequence parallel group, or its reciprocal.

    Raises:
        RuntimeError: the factor is none of these, differs between parameters, or cannot be measured.
    """
    size = size_of(trainer.accelerator.parallelism_config)
    versions = " and ".join(f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "deepspeed"))
    try:
        ratios = _measure(trainer, compute_loss)
    except Exception as error:
        raise RuntimeError(
            f"How {versions} scale gradients under sequence parallel could not be measured: "
            f"{type(error).__name__}: {error}"
        ) from error
    for factor in (1.0, float(size), 1 / size):
        if all(abs(ratio / factor - 1) < 0.02 for ratio in ratios):
            if factor != 1 and is_rank_zero():
                logger().info(
                    "%s give gradients %g times as large as they are under sequence parallel; corrected",
                    versions,
                    factor,
                )
            return factor
    raise RuntimeError(
        f"{versions} give gradients {', '.join(f'{ratio:.4g}' for ratio in ratios)} times as large as they are under "
        f"sequence parallel over {size} ranks, which nothing known explains. Train without it, or with other versions"
    )


def _measure(trainer: Any, compute_loss: Callable[..., Any]) -> list[float]:
    """Return how far a step of SGD at rate 1 moves two vectors, over how far it should: least and most of each.

    Rank r of a group has r + 1 labels and a loss with the gradient r + 1, so that the group's loss has the gradient
    sum (r+1)^2 / sum (r+1). One vector is larger than DeepSpeed's bucket and partitioned by ZeRO-3, the other neither.
    """
    import deepspeed
    import torch

    engine = trainer.accelerator.deepspeed_engine_wrapped.engine
    mpu, device = engine.mpu, trainer.accelerator.device
    rank, size = mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_world_size()

    class Probe(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = torch.nn.Parameter(torch.zeros(8))
            self.large = torch.nn.Parameter(torch.zeros(4096))

        def forward(self, **inputs: Any) -> Any:
            loss = (self.small.sum() + self.large.sum()) * (rank + 1)
            return _Output(loss=loss)

    model = Probe().to(device)
    level = deepspeed.utils.logger.level
    deepspeed.utils.logger.setLevel("WARNING")  # it would log the whole config a second time
    try:
        probe, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            config=_probe_config(engine.config),
            mpu=mpu,
        )
        labels = torch.full((1, size + 1), -100, device=device)
        labels[0, : rank + 1] = 0
        ids = torch.zeros_like(labels)
        loss = compute_loss(trainer, probe, {"input_ids": ids, "position_ids": ids, "shift_labels": labels})
        probe.backward(loss)
        probe.step()
        truth = sum((r + 1) ** 2 for r in range(size)) / sum(r + 1 for r in range(size))
        ratios = []
        for param in (probe.module.small, probe.module.large):
            with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
                moved = -param.detach().float()
                ratios += [float(moved.min()) / truth, float(moved.max()) / truth]
        probe.destroy()
    finally:
        deepspeed.utils.logger.setLevel(level)
    return ratios


class _Output(dict[str, Any]):
    """A model's output: `loss` by key and by name."""

    @property
    def loss(self) -> Any:
        return self["loss"]


SIDE_EFFECTS = (
    *("optimizer", "scheduler", "train_batch_size", "checkpoint", "elasticity", "autotuning", "compression_training"),
    *("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger", "wall_clock_breakdown"),
    *("data_efficiency", "curriculum_learning", "activation_checkpointing", "nebula", "compile", "dump_state"),
)
"""Sections of a DeepSpeed config that write files, count tokens or bring a schedule, and do not touch a gradient."""


def _probe_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's config, changed for one step of a small model."""
    result = {name: copy.deepcopy(value) for name, value in config.items() if name not in SIDE_EFFECTS}
    zero = result.setdefault("zero_optimization", {})
    zero |= {"reduce_bucket_size": 1024, "stage3_prefetch_bucket_size": 1024, "stage3_param_persistence_threshold": 100}
    for section in ("offload_optimizer", "offload_param"):
        if (zero.get(section) or {}).get("device") == "nvme":
            zero[section] = {"device": "cpu"}
    if result.get("fp16", {}).get("enabled") is True:
        result["fp16"]["initial_scale_power"] = 0  # the step must not be skipped
    return result | {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
