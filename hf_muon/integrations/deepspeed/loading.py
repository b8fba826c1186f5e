"""Load DeepSpeed checkpoints of any ZeRO stage and number of ranks, after all ranks have checked them.

In DeepSpeed, each rank loads files of the current layout. An error on one rank leaves the others waiting in a
collective, with their weights overwritten. Here each rank reads its elements of every parameter from the files of the
ranks that stored them, and builds the content of the two files that it would have written: weights, and its partitions
of master weights and moments. When all ranks agree, DeepSpeed loads this content in place of the files, so schedules,
counters and the user's state are loaded as usual.

With the optimizer on NVMe the layout must not change. DeepSpeed restores only master weights there; the rest is loaded
afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_muon.diagnostics.log import first_few
from hf_muon.distributed.ranks import merged_texts
from hf_muon.integrations.deepspeed.saving import (
    INDEX,
    SAVE,
    Index,
    StoredPartition,
    all_ranks,
    index_of,
    replaced,
    swap_folder,
)
from hf_muon.integrations.deepspeed.zero_layout import is_swapped
from hf_muon.optimizer.load import compare, steps_of
from hf_muon.optimizer.muon import Muon
from hf_muon.optimizer.state import is_by_row, row_numel
from hf_muon.routing.parameters import unwrapped

BEFORE = "Resume from the checkpoint before it"
WEIGHTS = "zero_to_fp32.py, which lies beside the checkpoint"
FROZEN = "frozen_param_fragments"
RUN_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
"""Keys of a ZeRO optimizer's state that belong to the run and not to its layout."""


def check_before_loading(engine: Any, optimizer: Muon) -> None:
    """Wrap `engine.load_checkpoint` to check files on all ranks, and to load any layout."""
    load = engine.load_checkpoint
    signature = inspect.signature(load)

    @functools.wraps(load)
    def checked(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        loading = Loading(engine, optimizer, call.arguments)
        complaints = loading.check()
        ranks = all_ranks(engine)
        texts = ranks.texts(_mixture(loading.folder, ranks.texts(loading.saves).values()) or complaints)
        # Where no rank finds a tag, DeepSpeed loads nothing and returns None. Ranks that differ would hang.
        if any(texts.values()) and not (loading.tag is None and all(texts.values())):
            raise ValueError(
                "This checkpoint cannot be loaded, and nothing was changed:\n  - " + "\n  - ".join(merged_texts(texts))
            )
        with loading.in_place_of_files():
            result = load(*args, **kwargs)
        for key in (SAVE, INDEX) if isinstance(result[1], dict) else ():
            result[1].pop(key, None)
        if loading.swapped:
            restore_swapped(engine.optimizer, optimizer, loading.swapped)
        elif loading.tag and not loading.moments and optimizer.partitioned.partitions is None:
            # DeepSpeed copies the loaded weights to ZeRO-0's masters only with load_module_only: the next step would
            # restore the old weights.
            getattr(engine.optimizer, "refresh_fp32_params", lambda: None)()
        return result

    engine.load_checkpoint = checked


def _mixture(folder: Path, of_ranks: Iterable[Sequence[str]]) -> list[str]:
    """Return a complaint if the files that ranks have read are of several saves."""
    files: dict[str, dict[str, None]] = {}
    for line in chain(*of_ranks):
        save, _, name = line.partition(" ")
        files.setdefault(save, {})[name] = None
    sides = [first_few(names) for names in sorted(files.values(), key=len)]
    return (
        [f"{folder} holds files of several saves: {'; '.join(sides)}. {BEFORE} [mixed-saves]"] if len(sides) > 1 else []
    )


class Loading:
    """The load of a checkpoint on this rank.

    Args:
        engine: DeepSpeed's.
        optimizer: the optimizer that the engine steps with.
        values: the arguments of `engine.load_checkpoint`.

    Attributes:
        moments: whether the optimizer is loaded.
        tag: the tag of the checkpoint; None where no tag was given, and there is no `latest`.
        folder: the folder of the checkpoint.
        saves: the id of the save that wrote each file that was read ("" for none), a space, and the file's name.
        content: what DeepSpeed loads in place of each file, by path.
        swapped: with NVMe, this rank's file of the optimizer.
        reading: the file whose content is in use.
        own_file: the file of weights that this run would write.
    """

    def __init__(self, engine: Any, optimizer: Muon, values: Mapping[str, Any]) -> None:
        self.engine, self.optimizer, self.values = engine, optimizer, values
        self.moments = bool(values["load_optimizer_states"] and not values["load_module_only"])
        self.tag: str | None = None
        self.folder = self.reading = Path(values["load_dir"])
        self.saves: list[str] = []
        self.content: dict[str, dict[str, Any]] = {}
        self.swapped: dict[str, Any] = {}
        self._read_files: dict[str, dict[str, Any]] = {}
        self._stored_by: dict[int, Stored] = {}

    def check(self) -> list[str]:
        """Read what this rank needs of the checkpoint, and return why it cannot be loaded."""
        try:
            return self._complaints_of_call() or (self._check_moments() if self.moments else self._check_weights())
        except FileNotFoundError as error:
            return [
                f"{error.filename} is missing. On another number of ranks, or in another stage, a rank reads the files "
                f"of others, which must lie where it sees them. {BEFORE} [missing-file]"
            ]
        except Exception as error:  # noqa: BLE001  what unpickling and unexpected content raise depends on the bytes
            text = f"{type(error).__name__}: {str(error)[:1000]}"  # so far torch's text names a class that it refuses
            return [
                f"{self.reading} is cut off, overwritten, or no file of this rank's ({text}). {BEFORE} [damaged-file]"
            ]

    @contextlib.contextmanager
    def in_place_of_files(self) -> Iterator[None]:
        """Make DeepSpeed load `content` in place of files."""

        def load(upstream: Any) -> Any:
            def load_content(path: Any, *args: Any, **kwargs: Any) -> Any:
                # A copy: DeepSpeed reads the file of weights twice, and sets entries of what it reads.
                name = str(path)
                return dict(self.content[name]) if name in self.content else upstream(path, *args, **kwargs)

            return load_content

        def of_tag(upstream: Any) -> Any:
            # DeepSpeed, 0.19.8 too, converts the masters of `latest` to weights, whatever the tag.
            return functools.partial(upstream, tag=self.tag)

        module = sys.modules[type(self.engine).__module__]
        with contextlib.ExitStack() as context:
            context.enter_context(replaced(module, "get_fp32_state_dict_from_zero_checkpoint", of_tag))
            if self.content:
                # DeepSpeed would look for this run's file of weights, which another layout has not written.
                # `_read_content` begins with the file that takes its place.
                names = [next(iter(self.content))]
                context.enter_context(replaced(self.engine, "_get_all_ckpt_names", lambda _: lambda *args: names))
                context.enter_context(replaced(self.engine.checkpoint_engine, "load", load))
            yield

    # --- what cannot be loaded

    @property
    def _stage(self) -> int:
        return int(self.engine.zero_optimization_stage())

    def _complaints_of_call(self) -> list[str]:
        """Find the checkpoint, and return why it cannot be loaded with these arguments."""
        swaps = getattr(self.engine.optimizer, "swap_optimizer", False)
        latest = self.folder / "latest"
        self.tag = None if self.values["tag"] is None else str(self.values["tag"])
        if self.tag is None and latest.is_file():
            self.tag = latest.read_text().strip()
        if swaps and not self.moments:
            return [
                "DeepSpeed cannot load weights without the optimizer where the optimizer is on NVMe: it reads the swap "
                "files in any case. Load the weights into the model before DeepSpeed is started [weights-alone-on-nvme]"
            ]
        if self._stage == 3 and self.values["load_module_only"] and self.values["load_optimizer_states"]:
            return [
                "with load_module_only DeepSpeed loads no weights in ZeRO-3. Give load_optimizer_states=False "
                "as well [module-only-in-zero3]"
            ]
        if not self.tag:
            return [
                f"{self.folder} names no checkpoint in a file `latest`, which is written last. Give the tag of "
                "one [no-latest]"
            ]
        self.folder /= self.tag
        self.own_file = self.engine._get_ckpt_name(self.values["load_dir"], self.tag)
        self._mp = re.findall(r"mp_rank_(\d+)_", self.own_file)[-1]
        return []

    def _check_weights(self) -> list[str]:
        """Return why DeepSpeed cannot load weights without the optimizer. It can in the stage that wrote them."""
        if not Path(self.own_file).is_file():
            return [
                f"{self.own_file} is missing: weights without the optimizer load in the stage that wrote them, and in "
                f"ZeRO-3 on no more ranks. Set zero_optimization.stage, or make them with {WEIGHTS} [missing-file]"
            ]
        self._read(self.own_file)
        # In ZeRO-3 DeepSpeed converts the masters in all files to weights, on every rank. Ranks share the check.
        files = sorted(self.folder.glob("*_optim_states.pt")) if self._stage == 3 else []
        for file in files[dist.get_rank() :: dist.get_world_size()]:
            self._read(file)
        return []

    def _check_moments(self) -> list[str]:
        """Set `content`, or `swapped`, and return why the optimizer cannot be loaded."""
        names = (f"*zero_pp_rank_*_mp_rank_{self._mp}_optim_states.pt", f"mp_rank_{self._mp}_model_states.pt")
        files = [file for name in names for file in sorted(self.folder.glob(name))]
        if not files:
            return [
                f"{self.folder} holds no checkpoint of DeepSpeed. Give the folder in which `latest` is, and the "
                "tag [no-checkpoint]"
            ]
        first = self._read(files[0])
        if INDEX not in first:
            return [
                f"{files[0]} does not say where moments of Muon lie: it was written by another optimizer. Start "
                f"from the weights alone ({WEIGHTS}) without the optimizer [foreign-state]"
            ]
        try:
            self.source = Index.read(first[INDEX])
        except ValueError as error:
            return [f"{files[0]} has {error}"]
        self.target = index_of(self.engine, self.optimizer)
        complaints = list(self._refusals())
        if not complaints and self.target.is_swapped:
            self.swapped, complaints = self._read_swapped()
        elif not complaints:
            self.content, complaints = self._read_content()
        return complaints

    def _refusals(self) -> Iterator[str]:
        """Yield why this run cannot load the layout, whatever the files hold."""
        source, target = self.source, self.target
        if source.precision != target.precision:
            yield (
                f"{self.folder} was written in {source.precision}, and this run is in {target.precision}. Set bf16 and "
                f"fp16 as there, or start from the weights alone ({WEIGHTS}) without the optimizer [other-precision]"
            )
        moves = (source.stage, source.ranks, source.is_swapped) != (target.stage, target.ranks, target.is_swapped)
        if moves and (source.is_swapped or target.is_swapped):
            yield (
                f"{self.folder} was written by {source}, and this run is {target}; with the optimizer on NVMe on "
                "either side, the layout must stay. Resume in that layout, or with the optimizer on the CPU from a "
                "checkpoint that was written so [other-layout-on-nvme]"
            )
        if target.precision == "fp16" and 0 in (source.stage, target.stage) and source.stage != target.stage:
            yield (
                f"{self.folder} was written by {source}, and this run is {target}: DeepSpeed stores fp16's loss scale "
                f"differently in ZeRO-0. Set zero_optimization.stage to {source.stage} [loss-scale-of-zero0]"
            )
        stored = source.parameters
        for name, (_, parameter) in target.parameters.items():
            if name in stored and stored[name][1].shape != parameter.shape:
                yield (
                    f"{name} has shape {stored[name][1].shape} in the checkpoint, and {parameter.shape} in this run. "
                    "Resume with the model that wrote it [other-shape]"
                )

    def _complaints_of_state(self, state: Any) -> list[str]:
        """Return why a state dict is not this optimizer's."""
        with all_partitions_in_groups(self.engine.optimizer):
            complaints = compare(self.optimizer.param_groups, state).complaints
        advice = (
            ". Resume with the model and the options that wrote it, or start from its weights without the optimizer"
        )
        return [*complaints[:-1], *(last + advice for last in complaints[-1:])]

    def _read_swapped(self) -> tuple[dict[str, Any], list[str]]:
        """Return this rank's file of the optimizer, and why it cannot be loaded."""
        file = self.engine._get_zero_ckpt_name(self.values["load_dir"], self.tag)
        self._read(self.own_file)
        swapped = self._read(file)["optimizer_state_dict"]
        complaints = self._complaints_of_state(swapped["optimizer_state_dict"])
        return swapped, [*complaints, *unfit_swap_files(self.engine, swap_folder(self.engine, self.folder))]

    # --- files

    def _read(self, file: Path | str) -> dict[str, Any]:
        """Read a file of torch.save once. Tensors are memory-mapped.

        DeepSpeed unpickles objects of any class from this rank's file of weights, where users may store theirs.
        From other files only classes of torch and DeepSpeed are read.
        """
        path = self.reading = Path(file)
        if str(path) in self._read_files:
            return self._read_files[str(path)]
        with path.open("rb") as stream:
            # torch's older format, which DeepSpeed writes without "checkpoint_serialization", cannot be mapped.
            is_zip = stream.read(2) == b"PK"
        with torch.serialization.safe_globals(_classes_of_deepspeed()):
            weights_only = path != Path(self.own_file)
            content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=is_zip, weights_only=weights_only)
        if "ds_version" not in content:
            raise ValueError("ds_version, which every file of DeepSpeed has")
        self.saves.append(f"{content.get(SAVE, '')} {path.name}")
        self._read_files[str(path)] = content
        return content

    def _weights_file(self, rank: int) -> Path:
        prefix = f"zero_pp_rank_{rank}_" if self.source.stage == 3 else ""
        return self.folder / f"{prefix}mp_rank_{self._mp}_model_states.pt"

    def _stored(self, rank: int) -> Stored:
        """Return the optimizer that a rank has stored."""
        name = f"mp_rank_{self._mp}_model_states.pt"
        if self.source.stage:
            precision = "bf16_" if self.source.precision == "bf16" else ""
            name = f"{precision}zero_pp_rank_{rank}_mp_rank_{self._mp}_optim_states.pt"
        content = self._read(self.folder / name)
        if rank not in self._stored_by:
            self._stored_by[rank] = Stored(content, self.source)
        return self._stored_by[rank]

    # --- the content of this rank's files

    def _read_content(self) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Return what DeepSpeed loads in place of each file, by path, and why it cannot be loaded."""
        zero, target, source = self.engine.optimizer, self.target, self.source
        self._rank = dist.get_rank(zero.dp_process_group) if target.stage else 0
        self._template = self._stored(self._rank % source.ranks)
        masters, states = [], []
        complaints: list[str] = []
        states_by_row = self._template.states_by_row(source, target)
        for partition, by_row in zip(target.partitions, states_by_row, strict=True):
            flat, state = _zeros(partition.numel), self._template.zeros_like(partition)
            for name, parameter in partition.parameters.items():
                complaints += self._fill_(flat, state, name, parameter.division.held(self._rank))
            masters.append(flat)
            states.append({**state, **by_row})
        # Of a rank that has written one, because DeepSpeed asserts that the file exists.
        file = self._weights_file(self._rank % source.ranks)
        weights = self._read(file)
        # Files of ZeRO-3 hold no other weights to compare with.
        if source.stage != 3 and (names := first_few(self._differing(masters, weights["module"]))):
            complaints.append(
                f"{self.folder}: the fp32 master weights of {names} are not the weights of the model. They belong to "
                f"another checkpoint. {BEFORE} [foreign-masters]"
            )
        state_dict = self._template.state_dict(target, states)
        complaints += self._complaints_of_state(state_dict)
        content = {str(file): self._content_of_weights(weights)}
        if target.stage:
            optimizer_file = self.engine._get_zero_ckpt_name(self.values["load_dir"], self.tag)
            content[optimizer_file] = {"optimizer_state_dict": self._content_of_optimizer(masters, state_dict)}
        else:
            content[str(file)]["optimizer"] = self._whole_optimizer(masters, state_dict)
        return content, complaints

    def _fill_(self, flat: Tensor, state: dict[str, Any], name: str, held: tuple[int, int, int]) -> list[str]:
        """Copy the elements of a parameter and its moments that `Division.held` names, and return why they do not fit.

        A moment that is not stored is removed, and the check of the state misses it.
        """
        if name not in self.source.parameters:
            return []  # the check of the state reports it
        complaints: dict[str, None] = {}
        number, parameter = self.source.parameters[name]
        first, last, position = held
        for rank, begin, end, offset in parameter.division.overlaps(first, last):
            stored, shift = self._stored(rank), position - first
            destination, elements = slice(begin + shift, end + shift), slice(offset, offset + end - begin)
            flat[destination] = stored.masters[number][elements]
            for key, value in list(state.items()):
                if key not in stored.states[number]:
                    del state[key]
                elif key != "step":
                    value[destination] = stored.states[number][key][elements]
                elif steps_of(stored.states[number][key]) != steps_of(value):
                    complaints[
                        "parameters that share a partition here have taken different numbers of steps of AdamW "
                        "[steps-differ]"
                    ] = None
        return list(complaints)

    def _differing(self, masters: Sequence[Tensor], module: Mapping[str, Tensor]) -> Iterator[str]:
        """Name the parameters whose weights this rank's master weights do not round to."""
        weights = {unwrapped(name): weight for name, weight in module.items()}
        for name, (k, parameter) in self.target.parameters.items():
            first, last, position = parameter.division.held(self._rank)
            if name in weights and name in self.source.parameters:
                weight = weights[name].detach().reshape(-1)[first:last]
                if not torch.equal(masters[k][position : position + last - first].to(weight), weight):
                    yield name

    def _content_of_weights(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the file of weights: whole ones, except in ZeRO-3, which loads master weights in their place."""
        left_out = ("module", "optimizer", "param_shapes", FROZEN, SAVE, INDEX)
        # A copy, because schedulers and the user keep these objects: tensors of `saved` are mapped from a file that a
        # later save may overwrite.
        content = copy.deepcopy({key: value for key, value in saved.items() if key not in left_out})
        # DeepSpeed refuses the optimizer of another number of ranks, and reads as many names of files.
        content["dp_world_size"] = self.engine.seq_dp_world_size
        stages, ranks = {self.source.stage, self.target.stage}, {self.source.ranks, self.target.ranks}
        if 3 not in stages or (stages == {3} and len(ranks) == 1):
            return {**content, **{key: saved[key] for key in ("module", FROZEN) if key in saved}}
        module = saved["module"]
        names = {param: unwrapped(name) for name, param in self.engine.module.named_parameters()}
        weights: dict[str, Tensor] = {}
        for name, tensor in self.engine.module.state_dict(keep_vars=True).items():
            if hasattr(tensor, "ds_id"):
                # load_state_dict asks for every name, and for the shape between gathers, which is (0,).
                weights[name] = _zeros(0, tensor.dtype)
            elif tensor not in names and name in module:
                weights[name] = module[name]  # a buffer
            elif tensor in names and (weight := self._whole(names[tensor], tensor)) is not None:
                weights[name] = weight.view(tensor.shape)
        frozen = {p: name for p, name in names.items() if hasattr(p, "ds_id") and name not in self.target.parameters}
        fragments = {}
        for param, name in frozen.items():
            if (weight := self._whole(name, param)) is not None:
                size = param.ds_tensor.numel()
                # ZeRO-3 pads parameters to a multiple of the ranks.
                fragment = fragments[self.engine.param_names[param]] = _zeros(size, weight.dtype)
                elements = weight.reshape(-1)[self._rank * size :][:size]
                fragment[: elements.numel()] = elements
        # Saved with exclude_frozen_parameters there are none, and DeepSpeed would look for every frozen parameter.
        content[FROZEN] = fragments if fragments else None
        return {**content, "module": weights}

    def _whole(self, name: str, param: Tensor) -> Tensor | None:
        """Return a parameter's weight in the shape in which the checkpoint has it; None if it is not there."""
        if self.source.stage != 3:
            return self._module.get(name)
        if name in self.source.parameters:
            flat = _zeros(self.source.parameters[name][1].division.numel)
            self._fill_(flat, {}, name, (0, flat.numel(), 0))
            return flat.to(param.dtype)
        files = [self._read(self._weights_file(rank)).get(FROZEN) or {} for rank in range(self.source.ranks)]
        fragments = [_flat(fragment) for file in files for key, fragment in file.items() if unwrapped(key) == name]
        size = getattr(param, "ds_numel", param.numel())  # without the last rank's padding
        return torch.cat(fragments)[:size] if fragments else None

    @functools.cached_property
    def _module(self) -> dict[str, Tensor]:
        return {unwrapped(name): weight for name, weight in self._read(self._weights_file(0))["module"].items()}

    def _content_of_optimizer(self, masters: Sequence[Tensor], state: Any) -> dict[str, Any]:
        template, saved = self.engine.optimizer.state_dict(), self._template.zero_state
        keys = ("optimizer_state_dict", "fp32_flat_groups")
        keys = keys if self.target.stage == 3 else ("base_optimizer_state", "single_partition_of_fp32_groups")
        of_run = {key: saved[key] for key in RUN_KEYS if key in saved.keys() & template}
        return {**template, **of_run, keys[0]: state, keys[1]: list(masters)}

    def _whole_optimizer(self, masters: Sequence[Tensor], state: dict[str, Any]) -> Any:
        zero = self.engine.optimizer
        if isinstance(zero, Muon):
            return state
        # `index_of` lists the parameters of ZeRO-0 in the order of these groups.
        flats = iter(masters)
        groups = [[next(flats).view(param.shape) for param in group] for group in zero.fp16_groups]
        return {**zero.state_dict(), "optimizer_state_dict": state, "fp32_groups": groups}


def _classes_of_deepspeed() -> list[Any]:
    """Return the classes of objects that DeepSpeed stores in addition to tensors."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


class Stored:
    """The optimizer in a file, whatever the stage that wrote it.

    Attributes:
        zero_state: the state of the engine's optimizer: ZeRO's, or in ZeRO-0 perhaps Muon's.
        groups: the param groups.
        masters: the fp32 weights, flat, by the number of the partition; shorter where DeepSpeed leaves padding out.
        states: moments, and AdamW's count of steps.
        numbers: the number of the param group of each partition.
    """

    def __init__(self, content: Mapping[str, Any], index: Index) -> None:
        zero_state = content["optimizer_state_dict"] if index.stage else content["optimizer"]
        muon_state = zero_state.get("base_optimizer_state", zero_state.get("optimizer_state_dict", zero_state))
        masters = zero_state.get("fp32_flat_groups", zero_state.get("single_partition_of_fp32_groups"))
        if masters is None and "fp32_groups" in zero_state:
            masters = [master for group in zero_state["fp32_groups"] for master in group]
        elif masters is None:
            weights = {unwrapped(name): weight for name, weight in content["module"].items()}
            masters = [weights[name] for name in index.parameters]
        keys = {number: iter(group["params"]) for number, group in enumerate(muon_state["param_groups"])}
        self.zero_state: Mapping[str, Any] = zero_state
        self.groups: Sequence[Mapping[str, Any]] = muon_state["param_groups"]
        self.masters: list[Tensor] = [_flat(master) for master in masters]
        self.numbers = [partition.group for partition in index.partitions]
        states = [muon_state["state"].get(next(keys[number]), {}) for number in self.numbers]
        self.states: list[dict[str, Any]] = [{key: _flat(v) for key, v in state.items()} for state in states]

    def zeros_like(self, partition: StoredPartition) -> dict[str, Any]:
        """Return moments of zeros for a partition of the same param group, with the counts of its steps."""
        states = zip(self.numbers, self.states, strict=True)
        state: dict[str, Any] = next((state for number, state in states if number == partition.group), {})
        return {
            key: value.clone() if key == "step" else _zeros(partition.numel, value.dtype)
            for key, value in state.items()
            if not is_by_row(key)
        }

    def states_by_row(self, source: Index, target: Index) -> list[dict[str, Tensor]]:
        """Return the state of rules for each partition of another layout; each file has that of whole parameters."""
        by_name: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for partition, state in zip(source.partitions, self.states, strict=True):
            for key in filter(is_by_row, state):
                numels = self._row_numels(partition, key)
                # State of another length is left out, and the check of the state reports that it is missing.
                if sum(numels) == len(state[key]):
                    for name, rows in zip(partition.parameters, torch.split(state[key], numels), strict=True):
                        by_name[key][name] = rows
        return [
            {
                key: torch.cat([states[name] for name in partition.parameters])
                for key, states in by_name.items()
                if all(name in states for name in partition.parameters)
            }
            for partition in target.partitions
        ]

    def _row_numels(self, partition: StoredPartition, key: str) -> list[int]:
        """Return how many elements of a rule's state each parameter of a partition has."""
        group = self.groups[partition.group]
        names = [unwrapped(name) for name in group["param_names"]]
        views = dict(zip(names, group.get("views") or [""] * len(names), strict=True))
        return [row_numel(parameter.shape, views[name]) for name, parameter in partition.parameters.items()]

    def state_dict(self, index: Index, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a Muon's state dict with moments of other partitions."""
        groups = [{**group, "params": []} for group in self.groups]
        state = {}
        for k, (partition, moments) in enumerate(zip(index.partitions, states, strict=True)):
            groups[partition.group]["params"].append(k)
            shape = next(iter(partition.parameters.values())).shape if index.stage == 0 else (partition.numel,)
            state[k] = {name: v if name == "step" or is_by_row(name) else v.view(shape) for name, v in moments.items()}
        return {"state": state, "param_groups": groups}


def _zeros(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device="cpu")


def _flat(value: Any) -> Any:
    return value.detach().reshape(-1) if isinstance(value, Tensor) and value.ndim else value


# --- partitions of ZeRO-3 that are not in its param groups, or are on NVMe


@contextlib.contextmanager
def all_partitions_in_groups(zero: Any) -> Iterator[None]:
    """Put all partitions into the param groups, as ZeRO-3 does while it saves and loads."""
    if not hasattr(zero, "_set_fp32_optimizer_param_groups"):
        yield
        return
    zero._set_fp32_optimizer_param_groups()
    try:
        yield
    finally:
        zero._clear_fp32_optimizer_param_groups()


def partitions_on_nvme(zero: Any) -> list[Tensor]:
    """Return the partitions on NVMe."""
    flats = enumerate(getattr(zero, "fp32_partitioned_groups_flat", ()))
    return [flat for i, flat in flats if is_swapped(zero, i)]


def unfit_swap_files(engine: Any, saved: Path) -> Iterator[str]:
    """Yield the swap files that a folder lacks. DeepSpeed numbers them in the order of parameters' creation."""
    for flat in partitions_on_nvme(engine.optimizer):
        for path in engine.optimizer.optimizer_swapper.swap_params_info[flat.ds_id].get_swap_paths():  # type: ignore[attr-defined]
            live, copied = Path(path), saved / Path(path).name
            if not copied.is_file() or copied.stat().st_size != live.stat().st_size:
                yield (
                    f"{copied} is missing, or has another size than {live}. DeepSpeed names swap files after the order "
                    "in which a process makes parameters: make the same models as the run that wrote it, in the same "
                    "order, with the same sub_group_size, and with the optimizer on NVMe [swap-files-misfit]"
                )
                return


def restore_swapped(zero: Any, optimizer: Muon, zero_state: dict[str, Any]) -> None:
    """Load what DeepSpeed skips with NVMe: steps, options, and the partitions that stay in memory.

    DeepSpeed has read the moments of swapped partitions together with their master weights.
    """
    swapped = {flat: dict(optimizer.state[flat]) for flat in partitions_on_nvme(zero)}
    masters = zero_state["fp32_flat_groups"]
    zero.checkpoint_event_prologue()
    with all_partitions_in_groups(zero):
        optimizer.load_state_dict(zero_state["optimizer_state_dict"])
    for flat, state in swapped.items():
        for name, moment in state.items():
            # DeepSpeed swaps this very tensor, which the load has replaced by the stale one of the file.
            if hasattr(moment, "ds_id"):
                optimizer.state[flat][name] = moment
    for i, (flat, master) in enumerate(zip(zero.fp32_partitioned_groups_flat, masters, strict=True)):
        if flat not in swapped:
            flat.data.copy_(master.data)
            zero._reassign_or_swap_out_partitioned_parameters(i)  # ends a sub-group's step: weights from its masters
    for key in zero_state.keys() & RUN_KEYS:
        setattr(zero, key, zero_state[key])
    zero.checkpoint_event_epilogue()
