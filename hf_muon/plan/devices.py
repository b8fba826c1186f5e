"""Devices by name: their rates and bandwidths, from datasheets, in `devices.yaml`."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_muon.plan.calls import Call, Product

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class Device:
    """A device, and what a GPU of its kind is connected to. Rates are peaks; shares say what is reached of them.

    Attributes:
        name: for people.
        memory: GB.
        rates: of products of dense matrices, TFLOP/s by dtype.
        gemm: share of the rate that products reach in fp16 and bf16.
        fp32_share: the same in fp32 and fp64.
        bandwidth: of memory, GB/s.
        bandwidth_share: share of it that elementwise kernels reach.
        processors: that compute a tile of a product each at one time.
        tile: rows and columns of such a tile.
        inside: GB/s that a GPU sends to others of its node.
        inside_share: share of it that collectives reach.
        between: GB/s that a GPU sends to other nodes.
        between_share: share of it that collectives reach.
        node: GPUs of a node.
        collective: seconds until a collective moves data.
        bus: GB/s to the host, and as much back.
        bus_share: share of it that copies reach.
        launch: seconds of host time for each call.
        kernel: seconds that the smallest kernel takes.
        utilization: share of the bf16 rate that a forward and backward pass reach.
        auto: dtype that `ns_dtype: auto` is on it.
        sources: where the figures come from, by their names.
    """

    name: str
    memory: float
    rates: Mapping[str, float]
    gemm: float
    fp32_share: float
    bandwidth: float
    bandwidth_share: float
    processors: int
    tile: int
    inside: float
    inside_share: float
    between: float
    between_share: float
    node: int
    collective: float
    bus: float
    bus_share: float
    launch: float
    kernel: float
    utilization: float
    auto: str
    sources: Mapping[str, str]

    @property
    def basis(self) -> str:
        """Where the rates come from, for people."""
        return (
            f"Rates are those of datasheets ({self.rates['bf16']:g} TFLOP/s in bf16, {self.bandwidth:g} GB/s), times "
            f"the shares that are reported or assumed to be reached ({self.gemm:.0%}, {self.bandwidth_share:.0%}); "
            f"{self.launch * 1e6:g} us of the host a launch are assumed."
        )

    @property
    def peak(self) -> float:
        """FLOP/s of products in bf16."""
        return self.rates["bf16"] * 1e12

    def product_seconds(self, product: Product) -> float:
        """Return the seconds of a product: by tiles, of which each processor computes one at a time, or by bytes.

        What does not fill the device leaves processors idle, and so does the last round of tiles.
        """
        batch, m, n, k = product.sizes
        dtype = _NAMES[product.dtype]
        tiles = batch * math.ceil(m / self.tile) * math.ceil(n / self.tile)
        rounds = math.ceil(tiles / self.processors)
        rate = self.rates[dtype] * 1e12 * (self.fp32_share if product.dtype.itemsize >= 4 else self.gemm)
        computing = rounds * self.processors * 2 * self.tile**2 * k / rate
        return max(self.kernel, computing, self.traffic_seconds(product.nbytes))

    def traffic_seconds(self, nbytes: float) -> float:
        """Return the seconds in which elementwise kernels read and write some bytes."""
        return nbytes / (self.bandwidth * 1e9 * self.bandwidth_share)

    def call_seconds(self, call: Call) -> float:
        """Return the seconds of a call on the device, without its launch."""
        if call.product is not None:
            return self.product_seconds(call.product)
        return max(call.launches * self.kernel, self.traffic_seconds(call.traffic))

    def wire_seconds(self, sent_bytes: float, ranks: int) -> float:
        """Return the seconds in which a rank sends its bytes to all others alike, those of its node at the same time.

        Args:
            sent_bytes: of the rank, in all.
            ranks: number of ranks, which fill nodes.
        """
        if ranks == 1:
            return 0.0
        away = max(0, ranks - self.node) / (ranks - 1)
        inside = (1 - away) * sent_bytes / (self.inside * 1e9 * self.inside_share)
        return max(inside, away * sent_bytes / (self.between * 1e9 * self.between_share))

    def bus_seconds(self, nbytes: float) -> float:
        """Return the seconds in which some bytes are copied to the host or back."""
        return nbytes / (self.bus * 1e9 * self.bus_share)


@functools.cache
def known_devices() -> dict[str, Device]:
    """Return all devices of `devices.yaml`, by name.

    Raises:
        ValueError: the file has an entry that is not one of `Device`, lacks one, or gives a figure without a source.
    """
    return {name: _device(name, entry, _file()["assumed"]) for name, entry in _file()["devices"].items()}


def device_named(name: str) -> Device:
    """Return a device, whatever the case of its name, and its spaces and hyphens.

    Raises:
        ValueError: there is no such device.
    """
    plain = {_plain(known): known for known in known_devices()}
    plain |= {_plain(alias): known for alias, known in _file()["aliases"].items()}
    if _plain(name) not in plain:
        raise ValueError(f"device={name} is not known. Known devices: {', '.join(known_devices())}")
    return known_devices()[plain[_plain(name)]]


def _plain(name: str) -> str:
    return name.lower().translate({ord(letter): None for letter in " -_"})


@functools.cache
def _file() -> dict[str, Any]:
    import yaml

    text = importlib.resources.files("hf_muon.plan").joinpath("devices.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def _device(name: str, entry: Mapping[str, Any], assumed: Mapping[str, Any]) -> Device:
    sources = {field: source for fields, source in entry["sources"].items() for field in fields.split(", ")}
    sources = {**dict.fromkeys(assumed, "assumed"), **sources}
    content = {**assumed, **entry, "sources": sources}
    fields = {field.name for field in dataclasses.fields(Device)}
    if content.keys() != fields:
        raise ValueError(f"devices.yaml, {name}: missing or unknown are {sorted(content.keys() ^ fields)}")
    if unsourced := fields - sources.keys() - {"name", "auto", "sources"}:
        raise ValueError(f"devices.yaml, {name}: no source for {sorted(unsourced)}")
    numbers = {**entry["rates"], **{field: content[field] for field in sources if field != "rates"}}
    if wrong := [field for field, value in numbers.items() if not isinstance(value, (int, float)) or value <= 0]:
        raise ValueError(f"devices.yaml, {name}: expected more than 0 for {wrong}")
    shares = [field for field in content if field.endswith("_share") or field in ("gemm", "utilization")]
    if wrong := [field for field in shares if content[field] > 1]:
        raise ValueError(f"devices.yaml, {name}: shares are at most 1, and {wrong} are not")
    if {*_NAMES.values()} - entry["rates"].keys() or entry["auto"] not in _NAMES.values():
        raise ValueError(f"devices.yaml, {name}: rates of fp16, bf16, fp32 and fp64, and auto is one of them")
    return Device(**content)
