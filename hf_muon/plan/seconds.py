"""The time of an optimizer step on a device: a model of it, from the step's recorded calls and the device's rates.

A product takes its FLOPs at the share of the peak rate that large products reach, in tiles that fill the device or do
not, and at least its bytes over the bandwidth. Other kernels take the bytes that they read and write over the
bandwidth. The host launches one call after the other, ahead of the device: a kernel starts when it is launched and the
one before it has ended. So a step of many small kernels takes the host's time, and one of few large ones the device's.

Bytes on the wire (updates to their owners and directions back) and on the bus (moments in the host's memory) travel
while the device computes with those of another turn. Of n turns the first bytes to come and the last ones to go have
nothing to overlap with: a step takes the longest of computing and ``(n - 1) / n`` of either, and ``1 / n`` of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from hf_muon.config import MuonConfig
from hf_muon.math.precision import NS_DTYPES
from hf_muon.plan import pairs
from hf_muon.plan.calls import Call
from hf_muon.plan.costs import attention_flops
from hf_muon.plan.devices import Device
from hf_muon.plan.memory import Training
from hf_muon.plan.parallelism import sizes_of
from hf_muon.plan.recorded_step import RecordedStep, record_step
from hf_muon.plan.stand_ins import cuts_on
from hf_muon.plan.step_plan import Plan
from hf_muon.plan.this_machine import ThisMachine, measure_this_machine
from hf_muon.routing.route import route_parameters

# torch's fused AdamW reads weights, gradients and two moments, and writes all but the gradients: seven tensors, where
# the moments are two.
_ADAMW_PASSES = 3.5

_UNCOUNTED_EIGH = "eigendecompositions of small matrices, which lora=product has for each factor"


class Rates(Protocol):
    """What the model asks of a device."""

    @property
    def launch(self) -> float: ...

    @property
    def peak(self) -> float: ...

    @property
    def utilization(self) -> float: ...

    def call_seconds(self, call: Call) -> float: ...

    def traffic_seconds(self, nbytes: float) -> float: ...


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of an optimizer step on the rank with the most products; a model, not a measurement.

    Attributes:
        products: of the device, in products.
        elementwise: of the device, in other kernels; AdamW's half among them.
        launching: of the host, in calls from Python.
        computing: until host and device are done, without waiting for the wire or the bus.
        wire: in which the rank sends its updates and directions.
        bus: in which moments travel to the device and back.
        total: of the step.
        launches: of kernels.
        traffic: bytes that kernels other than products read and write.
        adamw: of a step of torch's fused AdamW, if it had all weights.
        overlaps: whether the host launches while the device computes.
        uncounted: what the total lacks, in words.
    """

    products: float
    elementwise: float
    launching: float
    computing: float
    wire: float
    bus: float
    total: float
    launches: int
    traffic: int
    adamw: float
    overlaps: bool
    uncounted: str = ""

    def share(self, training: float) -> float:
        """Return the fraction of a training step that the optimizer step takes.

        Args:
            training: seconds of the forward and backward pass.
        """
        return self.total / (self.total + training)


def plan_seconds(
    model: nn.Module,
    config: MuonConfig,
    plan: Plan,
    device: Device | None,
    *,
    replicas: int = 2,
    dtype: torch.dtype = torch.float32,
    offload: str = "none",
) -> tuple[StepSeconds, Device | ThisMachine]:
    """Model the seconds of a step, and return them with the device.

    Args:
        model: as of `plan_step`.
        config: the options of the run.
        plan: of the run.
        device: of `devices`; None for the CPU at hand, which is measured for some seconds.
        replicas: as of `plan_step`.
        dtype: of the stored weights.
        offload: what the framework keeps on the host.

    Raises:
        ValueError: the framework keeps the optimizer's state on the host, whose speed is unknown.
    """
    if offload != "none" or config.offload_compute == "cpu":
        option = f"offload={offload}" if offload != "none" else "offload_compute=cpu"
        raise ValueError(
            f"device={device.name if device else 'cpu'} with {option}: half of the step is computed by the host, whose "
            "speed is not in the data. Leave one of them out"
        )
    products = NS_DTYPES[config.ns_dtype] or auto_dtype(device)
    rank = max(range(plan.ranks), key=plan.flops.__getitem__)
    sizes = sizes_of(plan.layout, plan.ranks, replicas, plan.tp_size, plan.ep_size)
    recorded = record_step(
        route_parameters(model, config),
        config,
        plan.layout,
        plan.ranks,
        rank,
        replicas=replicas,
        dtype=dtype,
        ns_dtype=products,
        device="meta" if device else "cpu",
        cuts=cuts_on(model, sizes),
    )
    if device is None:
        machine = measure_this_machine(recorded.calls)
        return host_seconds(recorded, machine, plan), machine
    return device_seconds(recorded, device, plan), device


def auto_dtype(device: Device | None) -> torch.dtype:
    """Return what `ns_dtype: auto` is on a device; None is the CPU at hand."""
    from hf_muon.math.precision import compute_dtype

    dtype = NS_DTYPES[device.auto] if device else compute_dtype("auto", "cpu")
    assert dtype is not None
    return dtype


def device_seconds(recorded: RecordedStep, device: Device, plan: Plan) -> StepSeconds:
    """Return the seconds of a step on a device that computes while the host launches."""
    calls = [call for call in recorded.calls if not call.is_collective]
    products, elementwise = _by_kind(calls, device)
    computing = queued(calls, device)
    wire = device.wire_seconds(max(plan.sent_bytes), plan.ranks) + recorded.collectives * device.collective
    moved = max(a + b for a, b in zip(plan.memory.to_device, plan.memory.to_host, strict=True))
    bus = device.bus_seconds(moved)
    return StepSeconds(
        products=products,
        elementwise=elementwise,
        launching=recorded.launches * device.launch,
        computing=computing,
        wire=wire,
        bus=bus,
        total=overlapped(computing, (wire, bus), recorded.turns),
        launches=recorded.launches,
        traffic=recorded.traffic,
        adamw=_adamw(plan, device),
        overlaps=True,
        uncounted=_UNCOUNTED_EIGH if pairs.decomposes(calls) else "",
    )


def host_seconds(recorded: RecordedStep, machine: ThisMachine, plan: Plan) -> StepSeconds:
    """Return the seconds of a step on a CPU, where one call follows the other."""
    calls = [call for call in recorded.calls if not call.is_collective]
    products, elementwise = _by_kind(calls, machine)
    launching = len(calls) * machine.launch
    words = [_UNCOUNTED_EIGH] if pairs.decomposes(calls) else []
    if plan.ranks > 1:
        words.append("what ranks send to one another, of which the speed is not known")
    total = products + elementwise + launching
    return StepSeconds(
        products=products,
        elementwise=elementwise,
        launching=launching,
        computing=total,
        wire=0.0,
        bus=0.0,
        total=total,
        launches=recorded.launches,
        traffic=recorded.traffic,
        adamw=_adamw(plan, machine),
        overlaps=False,
        uncounted="; ".join(words),
    )


def _by_kind(calls: Sequence[Call], rates: Rates) -> tuple[float, float]:
    """Return the device's seconds in products, and in other kernels."""
    products = sum(rates.call_seconds(call) for call in calls if call.product is not None)
    return products, sum(rates.call_seconds(call) for call in calls if call.product is None)


def queued(calls: Sequence[Call], rates: Rates) -> float:
    """Return the seconds until host and device have done some calls, of which the host launches one after the other."""
    host = device = 0.0
    for call in calls:
        host += call.launches * rates.launch
        device = max(device, host) + rates.call_seconds(call)
    return max(host, device)


def overlapped(computing: float, moving: Sequence[float], turns: int) -> float:
    """Return the seconds of a step that moves data in turns while it computes.

    Args:
        computing: seconds without the moves.
        moving: seconds of moves, each kind on a wire of its own.
        turns: number of turns; one does not overlap with anything.
    """
    alone = 1 / max(1, turns)
    return max(computing, *(own * (1 - alone) for own in moving)) + sum(own * alone for own in moving)


def _adamw(plan: Plan, rates: Rates) -> float:
    return rates.traffic_seconds(_ADAMW_PASSES * max(plan.adamw_state_bytes)) + rates.launch


def training_seconds(model: nn.Module, plan: Plan, rates: Rates, tokens: int, training: Training) -> float:
    """Return the seconds of the forward and backward passes of a training step, at a share of the peak rate.

    With gradient checkpointing the forward pass is computed twice.

    Args:
        model: as of `plan_step`.
        plan: of the run.
        rates: of the device.
        tokens: per step, of all ranks and all accumulated batches together.
        training: how the run computes.
    """
    flops = plan.model_flops_per_token + attention_flops(model, training.sequence_length)
    again = 4 / 3 if training.gradient_checkpointing else 1.0
    return flops * again * tokens / plan.ranks / (rates.peak * rates.utilization)
