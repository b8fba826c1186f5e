"""What a run with Muon costs each rank next to one with AdamW: facts about the run, and the numbers that follow.

The functions that divide the work of a step among ranks are asked with shapes. No process group is needed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_muon.config import COMM_DTYPES, GROUP_OPTIONS, MuonConfig
from hf_muon.distributed.schedule import Schedule, schedule_of
from hf_muon.distributed.units import Matrix, make_units
from hf_muon.math import cost
from hf_muon.math.coefficients import resolve
from hf_muon.math.elementwise import chunk_size
from hf_muon.math.momentum import update_dtype
from hf_muon.math.precision import NS_DTYPES
from hf_muon.optimizer.state import dtype_of, entries_of, row_shape
from hf_muon.routing.model_facts import expert_counts, text_config_of
from hf_muon.routing.route import Route
from hf_muon.rules import registry
from hf_muon.storage.boxes import shards_of
from hf_muon.storage.partitions import Division, Slice
from hf_muon.storage.regions import Region, chunk, whole
from hf_muon.storage.views import parse

LAYOUTS = {
    "single": "one process",
    "ddp": "copies of the model on all ranks (DDP, ZeRO-0)",
    "fsdp": "FSDP2: each parameter cut along its first dim",
    "hsdp": "FSDP2 within a replica, several replicas",
    "zero1": "DeepSpeed ZeRO-1: flat partitions",
    "zero2": "DeepSpeed ZeRO-2: flat partitions",
    "zero3": "DeepSpeed ZeRO-3: each parameter cut into flat slices",
}
_ACCELERATOR = torch.device("cuda")  # whose batches are counted; none need be there
# DeepSpeed pads a group of ZeRO-1 and 2 so that each rank has a multiple of so many elements, its
# nccl_start_alignment_factor.
_ALIGNMENT = 2
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")


class Weight(NamedTuple):
    """A parameter of a model.

    Attributes:
        shape: the whole shape.
        use_muon: True for Muon, False for AdamW, None if it is frozen.
        decays: whether it has weight decay; others are in another param group.
        view: how Muon reads it as matrices, as by :mod:`hf_muon.storage.views`.
    """

    shape: tuple[int, ...]
    use_muon: bool | None
    decays: bool = True
    view: str = ""


@dataclass(frozen=True)
class Facts:
    """What the costs of a run depend on.

    Attributes:
        weights: all parameters of the model.
        config: the options of Muon.
        layout: one of `LAYOUTS`.
        ranks: number of ranks.
        replicas: copies of the model under `hsdp`.
        dtype: of trained weights. Under ZeRO the model has weights in `compute_dtype`, and fp32 copies.
        frozen_dtype: of weights that are not trained.
        compute_dtype: of the forward and backward pass.
        ns_dtype: the meaning of `ns_dtype: auto` on the hardware of the ranks.
        tokens: of a micro-batch on a rank.
        flops_per_token: of the model's products with weights, forward and backward, without attention scores.
        decoder: number of layers, hidden size, width of the MLP and size of the vocabulary; None for other models.
        others: bytes on each rank of other models, such as a reference.
    """

    weights: Sequence[Weight]
    config: MuonConfig
    layout: str = "single"
    ranks: int = 1
    replicas: int = 2
    dtype: torch.dtype = torch.float32
    frozen_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.bfloat16
    ns_dtype: torch.dtype = torch.float16
    tokens: int = 2048
    flops_per_token: int = 0
    decoder: tuple[int, int, int, int] | None = None
    others: int = 0

    @property
    def is_zero(self) -> bool:
        """Whether flat fp32 partitions replace the parameters."""
        return self.layout.startswith("zero")

    @property
    def shards(self) -> int:
        """Ranks among which FSDP2 cuts each parameter; 1 where each rank has all."""
        return {"fsdp": self.ranks, "hsdp": self.ranks // self.replicas}.get(self.layout, 1)


@dataclass(frozen=True)
class Numbers:
    """What a run costs. Lists have a number for each rank.

    Attributes:
        weights: bytes, frozen ones and the fp32 weights of ZeRO included.
        gradients: bytes, from the backward pass to the step.
        state, adamw_state: bytes of the optimizer's state, and if torch's AdamW stepped all weights.
        sent: bytes of updates, directions and state by row to other ranks in a step. AdamW sends nothing.
        flops: multiplications and additions of Newton-Schulz in a step.
        temporary: bound on the bytes of a step's temporary tensors on a rank. AdamW's fused kernel has none.
        activations: bytes on a rank, an estimate for a decoder with checkpointed layers; None for other models.
    """

    weights: list[int]
    gradients: list[int]
    state: list[int]
    adamw_state: list[int]
    sent: list[int]
    flops: list[int]
    temporary: int
    activations: int | None

    def peak(self, *, adamw: bool = False) -> int:
        """Return the most of these bytes that a rank has at once. In the step there are no activations."""
        state, temporary = (self.adamw_state, 0) if adamw else (self.state, self.temporary)
        resident = map(sum, zip(self.weights, self.gradients, state, strict=True))
        return max(resident) + max(self.activations or 0, temporary)

    def share(self, facts: Facts, tokens: int) -> float:
        """Return the fraction of a training step's FLOPs that Newton-Schulz takes on the busiest rank.

        Args:
            facts: those of these numbers.
            tokens: per step, of all ranks and all accumulated batches together.
        """
        busiest = max(self.flops)
        return busiest / (busiest + facts.flops_per_token * tokens / facts.ranks) if busiest else 0.0


def numbers_of(facts: Facts) -> Numbers:
    """Return what a run costs.

    Raises:
        ValueError: the layout is unknown, or `ranks` or `replicas` do not fit it.
        RuntimeError: the layout cannot have these options.
    """
    _check(facts)
    zeros = _vector([0] * facts.ranks)
    trained = sum((_stored(facts, weight) for weight in facts.weights if weight.use_muon is not None), zeros)
    frozen = sum((_stored(facts, weight) for weight in facts.weights if weight.use_muon is None), zeros)
    itemsize = (facts.compute_dtype if facts.is_zero else facts.dtype).itemsize
    weights, gradients = trained * itemsize + frozen * facts.frozen_dtype.itemsize, trained * itemsize
    state, adamw_state, sent, flops = (zeros.clone() for _ in range(4))
    partitions = temporary = 0
    for group, matrices in _groups(facts):
        _add_state(facts, group, matrices, state, adamw_state)
        partitions += sum(param.numel() for param in group["params"]) if facts.is_zero else 0
        if matrices:
            temporary = max(temporary, _add_step(facts, group, matrices, sent, flops))
    weights += 4 * partitions + facts.others
    if facts.layout in ("zero2", "zero3"):
        gradients = zeros + partitions * itemsize
    return Numbers(
        weights=weights.tolist(),
        gradients=gradients.tolist(),
        state=state.tolist(),
        adamw_state=adamw_state.tolist(),
        sent=sent.tolist(),
        flops=flops.tolist(),
        temporary=temporary,
        activations=_activations(facts),
    )


def _check(facts: Facts) -> None:
    layout, ranks, replicas = facts.layout, facts.ranks, facts.replicas
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout} is not valid. Valid: {', '.join(LAYOUTS)} [invalid-value]")
    if ranks < 1:
        raise ValueError(f"{ranks} ranks are not valid: expected at least 1 [invalid-value]")
    if layout == "single" and ranks > 1:
        raise ValueError(
            f"layout single is one process, not {ranks} ranks. Valid layouts: {', '.join(LAYOUTS)} [ranks-of-single]"
        )
    if layout == "hsdp" and (replicas < 1 or ranks % replicas):
        raise ValueError(
            f"{replicas} replicas do not divide {ranks} ranks: each replica has as many ranks as the others "
            "[replicas-misfit]"
        )
    if facts.is_zero and "int8" in (facts.config.momentum_dtype, facts.config.adamw_state_dtype):
        raise RuntimeError(f"{layout} cuts rows anywhere and cannot have moments in int8. Use bf16 [int8-partition]")


def _vector(of_ranks: Sequence[int]) -> Tensor:
    return torch.tensor(of_ranks, dtype=torch.int64, device="cpu")


# --- what ranks store


def _stored(facts: Facts, weight: Weight) -> Tensor:
    """Return the elements of a weight of the model on each rank."""
    if facts.layout == "zero3":
        return _vector([-(-math.prod(weight.shape) // facts.ranks)] * facts.ranks)
    return _numels(weight.shape, facts.ranks, facts.shards)


@functools.lru_cache(maxsize=4096)
def _numels(shape: tuple[int, ...], ranks: int, shards: int) -> Tensor:
    return _vector([region.numel for region in _regions(shape, ranks, shards)])


@functools.lru_cache(maxsize=4096)
def _regions(shape: tuple[int, ...], ranks: int, shards: int) -> tuple[Region, ...]:
    """Return what each rank stores of a tensor that is cut along its first dim, once in each replica."""
    if shards == 1 or not shape:
        return (whole(shape),) * ranks
    rows, *others = whole(shape).dims
    return tuple(Region((chunk(rows, shards, shard), *others)) for shard in range(shards)) * (ranks // shards)


@functools.lru_cache(maxsize=4096)
def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _groups(facts: Facts) -> Iterator[tuple[dict[str, Any], list[Matrix]]]:
    """Yield the param groups of a run, with tensors in place of parameters, and their matrices.

    Under ZeRO the tensor is a flat partition. Of ZeRO-3 there may be several in a run, and here is one.
    """
    members: dict[tuple[bool, bool], list[Weight]] = {}
    for weight in facts.weights:
        if weight.use_muon is not None:
            members.setdefault((weight.use_muon, weight.decays), []).append(weight)
    for (use_muon, _), weights in members.items():
        group = {**{name: facts.config.value_of(name) for name in GROUP_OPTIONS}, "use_muon": use_muon}
        if facts.is_zero:
            size, slices = _partition(facts, weights)
            group["params"] = [_meta((size,), torch.float32)]
            shards = (slice_.shards() for slice_ in slices)
        else:
            group["params"] = [_meta(weight.shape, facts.dtype) for weight in weights]
            group["views"] = [weight.view for weight in weights]
            regions = (_regions(weight.shape, facts.ranks, facts.shards) for weight in weights)
            shards = (shards_of(parse(w.view), w.shape, own) for w, own in zip(weights, regions, strict=True))
        dtype = update_dtype(group["params"][0], dtype_of(group))
        yield (
            group,
            [
                Matrix(0, shape, part, device=_ACCELERATOR, dtype=dtype, transposed=parse(weight.view).transposed)
                for weight, parts in zip(weights if use_muon else (), shards, strict=False)
                for shape, part in zip(parse(weight.view).shapes(weight.shape), parts, strict=True)
            ],
        )


def _partition(facts: Facts, weights: Sequence[Weight]) -> tuple[int, list[Slice]]:
    """Return the flat partition of a param group: elements on a rank, and the slices of weights."""
    numels = [math.prod(weight.shape) for weight in weights]
    if facts.layout == "zero3":  # which cuts each parameter
        divisions = [Division(numel, -(-numel // facts.ranks)) for numel in numels]
        size = sum(division.size for division in divisions)
    else:  # ZeRO-1 and 2 cut the flat group
        size = -(-sum(numels) // (_ALIGNMENT * facts.ranks)) * _ALIGNMENT
        offsets = itertools.accumulate(numels, initial=0)
        divisions = [Division(numel, size, offset) for numel, offset in zip(numels, offsets, strict=False)]
    return size, [
        Slice(weight.shape, division, facts.ranks, parse(weight.view))
        for weight, division in zip(weights, divisions, strict=True)
    ]


def _add_state(
    facts: Facts, group: Mapping[str, Any], matrices: Sequence[Matrix], state: Tensor, adamw_state: Tensor
) -> None:
    """Add the bytes of a param group's state on each rank, and those of torch's AdamW for its parameters."""
    rows = sum(math.prod(row_shape(matrix.shape, transposed=matrix.transposed)) for matrix in matrices)
    # A large model has many parameters of few kinds, which share their entries.
    entries = list(entries_of(group))
    kinds = {id(own): (own, param) for own, param in zip(entries, group["params"], strict=True)}
    for kind, count in Counter(map(id, entries)).items():
        own, param = kinds[kind]
        for entry in own.values():
            shape = (rows,) if entry.shape is None else entry.shape
            numels = _numels(shape, facts.ranks, facts.shards if entry.sharded else 1)
            state += count * entry.dtype.itemsize * numels
        # Moments in the parameter's dtype, and the number of steps in fp32.
        numels = _numels(tuple(param.shape), facts.ranks, facts.shards)
        adamw_state += count * (2 * param.dtype.itemsize * numels + 4)


# --- the step


def _add_step(facts: Facts, group: Mapping[str, Any], matrices: Sequence[Matrix], sent: Tensor, flops: Tensor) -> int:
    """Add what each rank sends and computes in a step of a Muon group; return a bound on its temporary bytes."""
    config, ranks = facts.config, facts.ranks
    ns_dtype = NS_DTYPES[config.ns_dtype] or facts.ns_dtype
    comm_dtype = (COMM_DTYPES[config.comm_dtype] if ranks > 1 else None) or matrices[0].dtype
    units = make_units(matrices, config.max_batch_bytes)
    schedule = schedule_of(units, 0, ranks, comm_dtype, _ACCELERATOR, config.max_batch_bytes)
    # Directions travel back in the narrower of the two dtypes.
    there, back = comm_dtype.itemsize, min(comm_dtype.itemsize, ns_dtype.itemsize)
    steps = len(resolve(config.ns_coefficients, config.ns_steps))
    row_keys = [*registry.state_of(group).values()].count("row")
    of_rules = 8 if registry.on_directions(group) else 0  # for each element, fp32 copies of update and direction
    working = 0
    for unit in schedule.units:
        form = cost.form(unit.shape, steps, ns_dtype)
        flops[unit.owner] += unit.count * cost.flops(unit.shape, form)
        # The owner sends directions to the ranks that store parts, and keeps its own part.
        kept = unit.stored[unit.owner]
        sent += there * _vector(unit.sent())
        sent[unit.owner] += back * (sum(unit.stored) - kept) - there * kept
        # It copies its state by row to all others.
        rows = unit.shape[-1 if matrices[unit.ranges[0].matrix].transposed else -2]
        sent[unit.owner] += 4 * row_keys * (ranks - 1) * unit.count * rows
        batch = cost.batch_size(unit.shape, form, ns_dtype, _ACCELERATOR.type, config.max_batch_bytes)
        of_batch = min(batch, unit.count) * cost.working_bytes(unit.shape, form, ns_dtype)
        working = max(working, of_batch + of_rules * unit.numel)
    # Four fp32 copies of a chunk for elementwise functions: weights, updates and two moments.
    return under_way(schedule, back) + working + 16 * chunk_size(_ACCELERATOR)


def under_way(schedule: Schedule, direction_bytes: int) -> int:
    """Return a bound on the bytes of updates and directions that a rank has at once.

    Args:
        schedule: of one param group.
        direction_bytes: size of an element of the directions that travel back.
    """
    active = {each.matrix for unit in schedule.units for each in unit.ranges}
    rounds = schedule.planned(active, direction_bytes)
    if schedule.ranks == 1:  # updates and directions in fp32, of one round after the other
        return 8 * max(sum(unit.numel for unit in each.units) for each in rounds)
    # A round has its own updates, two parts of directions that travel back, and the updates of the round after it.
    following = [*(each.gather for each in rounds[1:]), 0]
    travels = max(
        each.gather + 2 * each.back + after * is_ahead
        for each, after, is_ahead in zip(rounds, following, schedule.overlaps(rounds), strict=True)
    )
    # In addition, the largest unit on its owner, and in fp32 the updates that are computed to be sent, twice.
    largest = max(schedule.comm_dtype.itemsize * unit.numel for unit in schedule.units)
    return travels + largest + 8 * max(each.sent for each in rounds)


def _activations(facts: Facts) -> int | None:
    """Return an estimate for a decoder whose layers are recomputed in the backward pass.

    For each token, with hidden size h, MLP width f, V words and c bytes per element of the dtype of computation: each
    layer saves its input, h. In addition there is the larger of two: a layer while it is recomputed, with its largest
    gradients, about ``(8 + 10 c) h + 5 c f`` with flash attention (norms compute in fp32); and for the loss, fp32
    log-probabilities and two gradients, ``12 V``.

    Source: Korthikanti et al., https://arxiv.org/abs/2205.05198, section 4, applied to the layers of transformers.
    """
    if facts.decoder is None:
        return None
    layers, hidden, width, vocabulary = facts.decoder
    itemsize = facts.compute_dtype.itemsize
    # Under autocast the residual stream is fp32.
    residual = facts.dtype.itemsize if facts.layout in ("single", "ddp") else itemsize
    layer = (8 + 10 * itemsize) * hidden + 5 * itemsize * width
    return facts.tokens * (layers * residual * hidden + max(layer, 12 * vocabulary))


# --- the model


def facts_of(model: nn.Module, routes: Iterable[Route], config: MuonConfig, **run: Any) -> Facts:
    """Return the facts of a model on any device, the meta device included.

    Args:
        model: the model.
        routes: the routes of its parameters.
        config: the options of Muon.
        **run: the other attributes of `Facts`.
    """
    weights = [Weight(route.shape, route.use_muon, route.decay, route.view) for route in routes]
    weights += [Weight(tuple(param.shape), None) for param in model.parameters() if not param.requires_grad]
    return Facts(weights, config, flops_per_token=model_flops(model), decoder=_decoder(model), **run)


def main_dtype(model: nn.Module, *, is_trained: bool) -> torch.dtype:
    """Return the dtype of most trained weights, or of most frozen ones; fp32 if there are none."""
    numels = Counter({torch.float32: 0})
    for parameter in model.parameters():
        numels[parameter.dtype] += parameter.numel() * (parameter.requires_grad is is_trained)
    return numels.most_common(1)[0][0]


def _decoder(model: nn.Module) -> tuple[int, int, int, int] | None:
    config = text_config_of(getattr(model, "config", None))
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
    layers, hidden, width, vocabulary, heads = (getattr(config, name, None) for name in names)
    if "CausalLM" not in type(model).__name__ or not (layers and hidden and width and vocabulary and heads):
        return None
    return layers, hidden, _routed(config) * getattr(config, "moe_intermediate_size", 0) or width, vocabulary


def model_flops(model: nn.Module) -> int:
    """Return the FLOPs of a model's products with weights, for one token, forward and backward.

    Per weight: 2 forward, 2 for the input's gradient, and, if it is trained, 2 for its own gradient. Only the experts
    to which a token is routed count. An input embedding is looked up, not multiplied.
    """
    config = text_config_of(getattr(model, "config", None))
    experts = next(iter(expert_counts(config)), 0)
    routed = _routed(config) or experts
    tied = bool(getattr(config, "tie_word_embeddings", False))
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) and not tied}
    total = 0
    for name, param in model.named_parameters():
        if param.ndim >= 2 and id(param) not in looked_up:
            is_expert = experts and "experts." in name and "shared" not in name
            numel = param.numel() * routed // experts if is_expert else param.numel()
            total += numel * (6 if param.requires_grad else 4)
    return total


def _routed(config: Any) -> int:
    """Return the number of experts per token; 0 if it is not in the configuration."""
    return next((n for name in _EXPERTS_PER_TOKEN if isinstance(n := getattr(config, name, None), int)), 0)
