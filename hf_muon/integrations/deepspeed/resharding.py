"""Load a checkpoint of DeepSpeed that another number of ranks, or another ZeRO stage, has written.

Each rank reads its elements of every parameter from the files of the ranks that stored them, and makes of them the two
files that it would have written itself: weights, and its partitions of master weights and moments. DeepSpeed loads
these in place of files, so that schedules, counters and the user's state go their usual way.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_muon.diagnostics.log import first_few
from hf_muon.integrations.deepspeed.files import BEFORE, SAVE, WEIGHTS, DamagedError, Files, using
from hf_muon.integrations.deepspeed.index import INDEX, Copy, Index, copies_of, index_of, whole
from hf_muon.integrations.deepspeed.saving import replaced
from hf_muon.integrations.deepspeed.stored import Stored, move
from hf_muon.optimizer.muon import Muon
from hf_muon.routing.parameters import unwrapped
from hf_muon.storage.partitions import Division

FROZEN = "frozen_param_fragments"
OF_THE_RUN = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
"""What ZeRO's optimizers store beside partitions."""


class Resharding:
    """The load of a checkpoint of another layout.

    Args:
        engine: DeepSpeed's.
        optimizer: that the engine steps with.
        folder: of the checkpoint.
        source: where the checkpoint stores parameters.
        here: where this run does.
        files: reads them.

    Attributes:
        content: what this rank's files would hold: the weights and, with ZeRO, the optimizer. Empty until `complaints`
            has read them.
    """

    def __init__(self, engine: Any, optimizer: Muon, folder: Path, source: Index, here: Index, files: Files) -> None:
        self.engine, self.optimizer, self.folder, self.source, self.here = engine, optimizer, folder, source, here
        self.files = files
        self.content: list[dict[str, Any]] = []
        zero = engine.optimizer
        self.rank = dist.get_rank(zero.dp_process_group) if here.stage else 0
        own = engine._get_ckpt_name(str(folder.parent), folder.name)
        self._mp = re.findall(r"mp_rank_(\d+)_", own)[-1]
        self._names = {param: unwrapped(name) for name, param in engine.module.named_parameters()}
        trained = here.parameters
        self._frozen = [name for name in self._names.values() if name not in trained]
        self._copies = copies_of(source, here, self.rank)
        self._wholes: dict[int, list[Copy]] = {}
        if source.stage == 3 and here.stage != 3:  # ZeRO-3 stores no weights but the masters
            self._wholes = copies_of(source, whole(trained), 0)
        ranks = sorted({self.rank % source.ranks, *self._copies, *self._wholes})
        every = range(source.ranks) if self._frozen else [self.rank % source.ranks]
        self._of_weights = [self._weights_file(r) for r in every] if source.stage == 3 else [self._weights_file(0)]
        self._of_optimizer = {r: self._optimizer_file(r) for r in ranks} if source.stage else {0: self._of_weights[0]}

    def complaints(self) -> Iterator[str]:
        """Yield why the files cannot be loaded; read this rank's share of them.

        Raises:
            DamagedError: a file is missing, cut off or overwritten.
        """
        yield from (complaints := list(self._refusals()))
        if complaints:
            return
        weights = [self._read(name) for name in self._of_weights]
        masters = [torch.zeros(part.numel) for part in self.here.partitions]
        wholes = whole(self.here.parameters).partitions if self._wholes else ()
        rounded = [torch.empty(part.numel, dtype=part.dtype) for part in wholes]
        states: list[dict[str, Any]] = []
        first: Stored | None = None
        for rank, name in self._of_optimizer.items():
            content = self._read(name) if self.source.stage else weights[0]
            with using(self.folder / name):
                stored = Stored.of(content, self.source)
                first = first or stored
                states = states or [stored.zeros_like(part) for part in self.here.partitions]
                for one in self._copies.get(rank, ()):
                    masters[one.target][one.at :][: one.numel] = stored.masters[one.source][one.begin :][: one.numel]
                    yield from move(stored.states[one.source], states[one.target], one)
                for one in self._wholes.get(rank, ()):
                    rounded[one.target][one.at :][: one.numel] = stored.masters[one.source][one.begin :][: one.numel]
        assert first is not None
        with using(self.folder / self._of_weights[0]):
            if self.source.stage != 3 and (names := first_few(self._differing(masters, weights[0]["module"]))):
                yield (
                    f"{self.folder}: the fp32 master weights of {names} are not the weights of the model. They belong "
                    f"to another checkpoint. {BEFORE}"
                )
            self.content = [self._content_of_weights(weights, rounded)]
        with using(self.folder / next(iter(self._of_optimizer.values()))):
            for state, small in zip(states, first.small_states(self.source, self.here), strict=True):
                state.update(small)
            whole_state = first.state_dict(self.here, states)
            if self.here.stage:
                self.content.append({"optimizer_state_dict": self._content_of_optimizer(first, masters, whole_state)})
            else:
                self.content[0]["optimizer"] = self._whole_optimizer(masters, whole_state)

    @property
    def optimizer_state(self) -> Any:
        """This rank's state dict of the Muon."""
        saved = self.content[1]["optimizer_state_dict"] if self.here.stage else self.content[0]["optimizer"]
        return saved.get("base_optimizer_state", saved.get("optimizer_state_dict", saved))

    @contextlib.contextmanager
    def in_place_of_files(self) -> Iterator[None]:
        """Have DeepSpeed load `content` where it reads files."""
        weights = str(self.folder / self._of_weights[0])

        def load(_: Any) -> Any:
            return lambda path, *args, **kwargs: dict(self.content[0 if str(path) == weights else 1])

        with (
            replaced(self.engine, "_get_all_ckpt_names", lambda _: lambda *args: [weights]),
            replaced(self.engine.checkpoint_engine, "load", load),
        ):
            yield

    # --- files

    def _weights_file(self, rank: int) -> str:
        own = f"zero_pp_rank_{rank}_" if self.source.stage == 3 else ""
        return f"{own}mp_rank_{self._mp}_model_states.pt"

    def _optimizer_file(self, rank: int) -> str:
        precision = "bf16_" if self.source.precision == "bf16" else ""
        return f"{precision}zero_pp_rank_{rank}_mp_rank_{self._mp}_optim_states.pt"

    def _read(self, name: str) -> dict[str, Any]:
        if not (self.folder / name).is_file():
            raise DamagedError(
                f"{self.folder / name} is missing: on another number of ranks, or in another stage, a rank reads the "
                f"files of others, which must lie where it sees them. {BEFORE}"
            )
        return self.files.read(self.folder / name)

    # --- refusals

    def _refusals(self) -> Iterator[str]:
        """Yield why this run cannot load the layout, whatever the files hold."""
        source, here = self.source, self.here
        if source.precision != here.precision:
            option = f"{here.precision}.enabled to false"
            if source.precision != "fp32":
                option = f"{source.precision}.enabled to true"
            yield (
                f"{self.folder} was written in {source.precision}, and this run is in {here.precision}. Set {option}, "
                f"or start from the weights alone ({WEIGHTS}) without the optimizer"
            )
        if source.is_swapped or here.is_swapped:
            yield (
                f"{self.folder} was written by {source}, and this run is {here}; with the optimizer on NVMe on either "
                "side, the layout must stay. Resume in that layout, or with the optimizer on the CPU from a checkpoint "
                "that was written so"
            )
        if here.precision == "fp16" and 0 in (source.stage, here.stage) and source.stage != here.stage:
            yield (
                f"{self.folder} was written by {source}, and this run is {here}: DeepSpeed stores fp16's loss scale "
                f"differently in ZeRO-0. Set zero_optimization.stage to {source.stage}"
            )
        there = source.parameters
        for name, (_, parameter) in here.parameters.items():
            if name in there and there[name][1].shape != parameter.shape:
                yield (
                    f"{name} has shape {there[name][1].shape} in the checkpoint, and {parameter.shape} in this run. "
                    "Resume with the model that wrote it"
                )

    def _differing(self, masters: Sequence[Tensor], module: Mapping[str, Tensor]) -> Iterator[str]:
        """Name the parameters whose weights this rank's master weights do not round to."""
        weights = {unwrapped(name): weight for name, weight in module.items()}
        for name, (k, parameter) in self.here.parameters.items():
            first, last, at = parameter.division.held(self.rank)
            if name in weights and name in self.source.parameters:
                weight = weights[name].detach().reshape(-1)[first:last]
                if not torch.equal(masters[k][at : at + last - first].to(weight), weight):
                    yield name

    # --- what this rank's files would hold

    def _content_of_weights(self, saved: Sequence[Mapping[str, Any]], rounded: Sequence[Tensor]) -> dict[str, Any]:
        """Return the file of weights, with whole weights but in ZeRO-3, where masters are loaded in their place."""
        module = saved[0]["module"]
        stored = {unwrapped(name): weight for name, weight in module.items()}
        fragments = [{unwrapped(name): part for name, part in (one.get(FROZEN) or {}).items()} for one in saved]
        shapes = {name: getattr(param, "ds_shape", param.shape) for param, name in self._names.items()}
        if self.source.stage == 3:
            trained = zip(self.here.parameters, rounded, strict=False)
            stored = {name: weight.view(shapes[name]) for name, weight in trained}
        weights: dict[str, Tensor] = {}
        for name, tensor in self.engine.module.state_dict(keep_vars=True).items():
            own = self._names.get(tensor)
            if hasattr(tensor, "ds_id"):
                weights[name] = torch.empty(0, dtype=tensor.dtype)
            elif own is None and name in module:
                weights[name] = copy.deepcopy(module[name])  # a buffer
            elif own in stored:
                weights[name] = stored[own]
            elif own in fragments[0]:
                weights[name] = _range(fragments, own, 0, tensor.numel(), tensor.numel()).view(shapes[own])
        frozen = {}
        for param, name in self._names.items():
            if not hasattr(param, "ds_id"):
                continue
            size, numel = param.ds_tensor.numel(), param.ds_numel
            first, last = (min(edge * size, numel) for edge in (self.rank, self.rank + 1))
            if name in self._frozen and (name in stored or name in fragments[0]):
                source = fragments if self.source.stage == 3 else [stored]
                part = frozen[self.engine.param_names[param]] = torch.zeros(size, dtype=source[0][name].dtype)
                part[: last - first] = _range(source, name, first, last, numel)
        left_out = ("module", "optimizer", "param_shapes", FROZEN, SAVE, INDEX)
        about = copy.deepcopy({key: value for key, value in saved[0].items() if key not in left_out})
        about[FROZEN] = frozen if len(frozen) == len(self._frozen) else None  # saved with exclude_frozen_parameters
        return {**about, "module": weights, "dp_world_size": self.engine.seq_dp_world_size}

    def _content_of_optimizer(self, saved: Stored, masters: Sequence[Tensor], state: Any) -> dict[str, Any]:
        zero = self.engine.optimizer
        about = {key: value for key, value in saved.about.items() if key in OF_THE_RUN}
        keys = ("optimizer_state_dict", "fp32_flat_groups")
        keys = keys if self.here.stage == 3 else ("base_optimizer_state", "single_partition_of_fp32_groups")
        template = zero.state_dict()
        about = {key: value for key, value in about.items() if key in template}
        return {**template, **about, keys[0]: state, keys[1]: list(masters)}

    def _whole_optimizer(self, masters: Sequence[Tensor], state: dict[str, Any]) -> Any:
        zero = self.engine.optimizer
        if isinstance(zero, Muon):
            return state
        shaped = iter(m.view(one.shape) for m, (_, one) in zip(masters, self.here.parameters.values(), strict=True))
        return {
            **zero.state_dict(),
            "optimizer_state_dict": state,
            "fp32_groups": [[next(shaped) for _ in group] for group in zero.fp16_groups],
        }


def _range(fragments: Sequence[Mapping[str, Tensor]], name: str, first: int, last: int, numel: int) -> Tensor:
    """Return some elements of a frozen parameter, of which each rank stored an equal part."""
    parts = [one[name].detach().reshape(-1) for one in fragments]
    overlaps = Division(numel, parts[0].numel()).overlaps(first, last)
    return torch.cat([parts[0][:0], *(parts[rank][at : at + end - begin] for rank, begin, end, at in overlaps)])


def resharding(engine: Any, optimizer: Muon, folder: Path, files: Files) -> Resharding | None:
    """Return how to load a checkpoint whose files do not fit this run; None if they do, or do not say where what lies.

    Raises:
        DamagedError: the file that says it cannot be read.
    """
    here, source = index_of(engine, optimizer), _index(engine, folder, files)
    if here is None or source is None or source.fits(here):
        return None
    return Resharding(engine, optimizer, folder, source, here, files)


def _index(engine: Any, folder: Path, files: Files) -> Index | None:
    """Return the index of the save that wrote rank 0's files; of this rank's files where a node has no others."""
    where = str(folder.parent), folder.name
    mp = re.findall(r"mp_rank_(\d+)_", engine._get_ckpt_name(*where))[-1]
    prefixes = ("bf16_", "") if engine.bfloat16_enabled() else ("", "bf16_")
    names = [
        *(f"{one}zero_pp_rank_{rank}_mp_rank_{mp}_optim_states.pt" for rank in _ranks(engine) for one in prefixes),
        f"mp_rank_{mp}_model_states.pt",
    ]
    for name in names:
        if (folder / name).is_file():
            with using(folder / name):
                plain = files.read(folder / name).get(INDEX)
                return Index.read(plain) if plain else None
    return None


def _ranks(engine: Any) -> tuple[int, ...]:
    group = getattr(engine.optimizer, "dp_process_group", None)
    return (0, dist.get_rank(group)) if group is not None else (0,)
