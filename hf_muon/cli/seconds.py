"""The part of `hf-muon plan` on time: what `--device` names, and the tables of seconds."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import torch

    from hf_muon.plan.devices import Device
    from hf_muon.plan.seconds import StepSeconds
    from hf_muon.plan.this_machine import ThisMachine

CPU = "cpu"
GPU = "gpu"
DEVICE_HELP = (
    "Hardware to plan for: gpu (an NVIDIA GPU; no seconds), cpu (this machine, measured for some seconds), or a device "
    "whose rates are known, such as h100: adds the seconds of an optimizer step, modelled."
)


def named_device(name: str) -> Device | None:
    """Return the device of `--device`; None for `gpu` and `cpu`.

    Raises:
        ValueError: there is no such device.
    """
    from hf_muon.plan.devices import device_named, known_devices

    if name.lower() in (CPU, GPU):
        return None
    try:
        return device_named(name)
    except ValueError:
        valid = ", ".join((GPU, CPU, *known_devices()))
        raise ValueError(f"--device={name} is not known. Valid: {valid}") from None


def products_of(name: str, device: Device | None) -> torch.dtype:
    """Return what `ns_dtype: auto` is on the device of `--device`."""
    import torch

    from hf_muon.plan.seconds import auto_dtype

    return torch.float16 if name.lower() == GPU else auto_dtype(device)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of an optimizer step, and of the forward and backward passes by tokens per step."""

    device: Device | ThisMachine
    step: StepSeconds
    training: dict[int, float]

    def as_json(self) -> dict[str, Any]:
        """Return the figures; `modelled` says that none was measured."""
        return {
            "device": self.device.name,
            "modelled": True,
            **dataclasses.asdict(self.step),
            "utilization": self.device.utilization,
            "forward_and_backward": {str(tokens): seconds for tokens, seconds in self.training.items()},
            "share": {str(tokens): self.step.share(seconds) for tokens, seconds in self.training.items()},
        }

    def show(self, screen: Console) -> None:
        """Print the tables, and what they leave out."""
        step = self.step
        table = Table(title=f"optimizer step on {self.device.name}, modelled, not measured", title_justify="left")
        table.add_column("")
        table.add_column("time", justify="right")
        table.add_row("Newton-Schulz products", _time(step.products))
        table.add_row(f"other kernels, {step.traffic / 1e9:.3g} GB read and written", _time(step.elementwise))
        overlaps = ", at the same time" if step.overlaps else ""
        table.add_row(f"host, {step.launches:,} launches{overlaps}", _time(step.launching))
        if step.wire:
            table.add_row("updates and directions between ranks, mostly at the same time", _time(step.wire))
        if step.bus:
            table.add_row("moments over the bus, mostly at the same time", _time(step.bus))
        table.add_section()
        table.add_row("step", _time(step.total))
        table.add_row("step of fused AdamW for everything", _time(step.adamw))
        screen.print(table)
        share = Table(title="Muon's share of the time of a training step", title_justify="left")
        for heading in ("tokens per step", "forward and backward", "share", "AdamW's share"):
            share.add_column(heading, justify="right")
        for tokens, seconds in self.training.items():
            of_adamw = step.adamw / (step.adamw + seconds)
            share.add_row(f"{tokens:,}", _time(seconds), f"{step.share(seconds):.2%}", f"{of_adamw:.2%}")
        screen.print(share)
        screen.print(self._words(), style="dim", highlight=False)

    def _words(self) -> str:
        """Return how the seconds come about, and what they leave out."""
        uncounted = f"{self.step.uncounted}; " if self.step.uncounted else ""
        return (
            "Launches and bytes are those of the step's own code, on the rank with the most products. "
            f"{self.device.basis} Forward and backward: products with weights and causal attention scores, at "
            f"{self.device.utilization:.0%} of {self.device.peak / 1e12:.3g} TFLOP/s (--utilization). Not counted: "
            f"{uncounted}compilation in the first step, waits for other ranks, clipping of gradients, loading of data."
        )


def _time(seconds: float) -> str:
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
