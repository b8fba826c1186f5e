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
from hf_muon.integrations.deepspeed.partitions import is_swapped
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
from hf_muon.optimizer.load import compare, steps_of
from hf_muon.optimizer.muon import Muon
from hf_muon.optimizer.state import is_by_row, row_numel
from hf_muon.routing.parameters import unwrapped

BEFORE = "Resume from the checkpoint before it"
WEIGHTS = "zero_to_fp32.py, which lies beside the checkpoint"
FROZEN = "frozen_param_fragments"
OF_THE_RUN = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
"""Keys that ZeRO's optimizers store in addition to partitions."""


def check_before_loading(engine: Any, optimizer: Muon) -> None:
    """Wrap `engine.load_checkpoint` to check files on all ranks, and to load any layout."""
    load = engine.load_checkpoint
    signature = inspect.signature(load)

    @functools.wraps(load)
    def checked(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        own = Loading(engine, optimizer, call.arguments)
        complaints = own.check()
        ranks = all_ranks(engine)
        texts = ranks.texts(_mixture(own.folder, ranks.texts(own.saves).values()) or complaints)
        said = texts.values()
        if any(said) and not (own.tag is None and all(said)):  # without a tag, DeepSpeed loads nothing, returns None
            raise ValueError(
                "This checkpoint cannot be loaded, and nothing was changed:\n  - " + "\n  - ".join(merged_texts(texts))
            )
        with own.in_place_of_files():
            result = load(*args, **kwargs)
        for key in (SAVE, INDEX) if isinstance(result[1], dict) else ():
            result[1].pop(key, None)
        if own.swapped:
            restore_swapped(engine.optimizer, optimizer, own.swapped)
        elif own.tag and not own.moments and optimizer.partitioned.partitions is None:
            getattr(engine.optimizer, "refresh_fp32_params", lambda: None)()  # ZeRO-0 does not load the masters
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
        optimizer: that the engine steps with.
        values: the arguments of `engine.load_checkpoint`.

    Attributes:
        moments: whether the optimizer is loaded.
        tag: of the checkpoint; None where no tag was given, and there is no `latest`.
        folder: of the checkpoint.
        saves: the id of the save that wrote each file that was read ("" for none), a space, and the file's name.
        content: what DeepSpeed loads in place of each file, by path.
        swapped: with NVMe, this rank's file of the optimizer.
        reading: the file whose content is in use.
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
            what = f"{type(error).__name__}: {str(error)[:1000]}"
            return [
                f"{self.reading} is cut off, overwritten, or no file of this rank's ({what}). {BEFORE} [damaged-file]"
            ]

    @contextlib.contextmanager
    def in_place_of_files(self) -> Iterator[None]:
        """Make DeepSpeed load `content` in place of files."""

        def load(plain: Any) -> Any:
            def given(path: Any, *args: Any, **kwargs: Any) -> Any:
                name = str(path)  # DeepSpeed reads some files twice
                return dict(self.content[name]) if name in self.content else plain(path, *args, **kwargs)

            return given

        # DeepSpeed, 0.19.8 too, converts the masters of `latest` to weights, whatever the tag.
        tagged = functools.partial(functools.partial, tag=self.tag)
        module = sys.modules[type(self.engine).__module__]
        with contextlib.ExitStack() as context:
            context.enter_context(replaced(module, "get_fp32_state_dict_from_zero_checkpoint", tagged))
            if self.content:
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
        self.own = self.engine._get_ckpt_name(self.values["load_dir"], self.tag)
        self._mp = re.findall(r"mp_rank_(\d+)_", self.own)[-1]
        return []

    def _check_weights(self) -> list[str]:
        """Return why DeepSpeed cannot load weights without the optimizer. It can in the stage that wrote them."""
        if not Path(self.own).is_file():
            return [
                f"{self.own} is missing: weights without the optimizer load in the stage that wrote them, and in "
                f"ZeRO-3 on no more ranks. Set zero_optimization.stage, or make them with {WEIGHTS} [missing-file]"
            ]
        self._read(self.own)
        files = sorted(self.folder.glob("*_optim_states.pt")) if self._stage == 3 else []  # converted to weights
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
        self.here = index_of(self.engine, self.optimizer)
        complaints = list(self._refusals())
        if not complaints and self.here.is_swapped:
            self.swapped, complaints = self._read_swapped()
        elif not complaints:
            self.content, complaints = self._read_content()
        return complaints

    def _refusals(self) -> Iterator[str]:
        """Yield why this run cannot load the layout, whatever the files hold."""
        source, here = self.source, self.here
        if source.precision != here.precision:
            yield (
                f"{self.folder} was written in {source.precision}, and this run is in {here.precision}. Set bf16 and "
                f"fp16 as there, or start from the weights alone ({WEIGHTS}) without the optimizer [other-precision]"
            )
        moves = (source.stage, source.ranks, source.is_swapped) != (here.stage, here.ranks, here.is_swapped)
        if moves and (source.is_swapped or here.is_swapped):
            yield (
                f"{self.folder} was written by {source}, and this run is {here}; with the optimizer on NVMe on either "
                "side, the layout must stay. Resume in that layout, or with the optimizer on the CPU from a checkpoint "
                "that was written so [other-layout-on-nvme]"
            )
        if here.precision == "fp16" and 0 in (source.stage, here.stage) and source.stage != here.stage:
            yield (
                f"{self.folder} was written by {source}, and this run is {here}: DeepSpeed stores fp16's loss scale "
                f"differently in ZeRO-0. Set zero_optimization.stage to {source.stage} [loss-scale-of-zero0]"
            )
        there = source.parameters
        for name, (_, parameter) in here.parameters.items():
            if name in there and there[name][1].shape != parameter.shape:
                yield (
                    f"{name} has shape {there[name][1].shape} in the checkpoint, and {parameter.shape} in this run. "
                    "Resume with the model that wrote it [other-shape]"
                )

    def _complaints_of_state(self, state: Any) -> list[str]:
        """Return why a state dict is not this optimizer's."""
        with all_standing(self.engine.optimizer):
            complaints = compare(self.optimizer.param_groups, state).complaints
        advice = (
            ". Resume with the model and the options that wrote it, or start from its weights without the optimizer"
        )
        return [*complaints[:-1], *(last + advice for last in complaints[-1:])]

    def _read_swapped(self) -> tuple[dict[str, Any], list[str]]:
        """Return this rank's file of the optimizer, and why it cannot be loaded."""
        file = self.engine._get_zero_ckpt_name(self.values["load_dir"], self.tag)
        self._read(self.own)
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
            is_zip = stream.read(2) == b"PK"  # torch's older format cannot be mapped
        with torch.serialization.safe_globals(_classes_of_deepspeed()):
            weights_only = path != Path(self.own)
            content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=is_zip, weights_only=weights_only)
        content["ds_version"]  # which is in every file of DeepSpeed
        self.saves.append(f"{content.get(SAVE, '')} {path.name}")
        self._read_files[str(path)] = content
        return content

    def _weights_file(self, rank: int) -> Path:
        own = f"zero_pp_rank_{rank}_" if self.source.stage == 3 else ""
        return self.folder / f"{own}mp_rank_{self._mp}_model_states.pt"

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
        zero, here, source = self.engine.optimizer, self.here, self.source
        self._rank = dist.get_rank(zero.dp_process_group) if here.stage else 0
        self._template = self._stored(self._rank % source.ranks)
        masters, states = [], []
        complaints: list[str] = []
        for part, small in zip(here.partitions, self._template.small_states(source, here), strict=True):
            flat, state = _zeros(part.numel), self._template.zeros_like(part)
            for name, parameter in part.parameters.items():
                first, last, at = parameter.division.held(self._rank)
                complaints += self._fill_(flat, state, name, first, last, at)
            masters.append(flat)
            states.append({**state, **small})
        file = self._weights_file(self._rank % source.ranks)  # DeepSpeed checks that the file exists
        weights = self._read(file)
        if source.stage != 3 and (names := first_few(self._differing(masters, weights["module"]))):
            complaints.append(
                f"{self.folder}: the fp32 master weights of {names} are not the weights of the model. They belong to "
                f"another checkpoint. {BEFORE} [foreign-masters]"
            )
        state_dict = self._template.state_dict(here, states)
        complaints += self._complaints_of_state(state_dict)
        content = {str(file): self._content_of_weights(weights)}
        if here.stage:
            about = {"optimizer_state_dict": self._content_of_optimizer(masters, state_dict)}
            content[self.engine._get_zero_ckpt_name(self.values["load_dir"], self.tag)] = about
        else:
            content[str(file)]["optimizer"] = self._whole_optimizer(masters, state_dict)
        return content, complaints

    def _fill_(self, flat: Tensor, state: dict[str, Any], name: str, first: int, last: int, at: int) -> list[str]:
        """Copy elements of a parameter and of its moments to `at`, and return why they do not belong there.

        A moment that is not stored is removed, and the check of the state misses it.
        """
        if name not in self.source.parameters:
            return []  # the check of the state reports it
        complaints: dict[str, None] = {}
        number, there = self.source.parameters[name]
        for rank, begin, end, where in there.division.overlaps(first, last):
            stored = self._stored(rank)
            target, elements = slice(at + begin - first, at + end - first), slice(where, where + end - begin)
            flat[target] = stored.masters[number][elements]
            for key, value in list(state.items()):
                if key not in stored.states[number]:
                    del state[key]
                elif key != "step":
                    value[target] = stored.states[number][key][elements]
                elif steps_of(stored.states[number][key]) != steps_of(value):
                    complaints[
                        "parameters that share a partition here have taken different numbers of steps of AdamW "
                        "[steps-differ]"
                    ] = None
        return list(complaints)

    def _differing(self, masters: Sequence[Tensor], module: Mapping[str, Tensor]) -> Iterator[str]:
        """Name the parameters whose weights this rank's master weights do not round to."""
        weights = {unwrapped(name): weight for name, weight in module.items()}
        for name, (k, parameter) in self.here.parameters.items():
            first, last, at = parameter.division.held(self._rank)
            if name in weights and name in self.source.parameters:
                weight = weights[name].detach().reshape(-1)[first:last]
                if not torch.equal(masters[k][at : at + last - first].to(weight), weight):
                    yield name

    def _content_of_weights(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the file of weights: whole ones, except in ZeRO-3, which loads master weights in their place."""
        left_out = ("module", "optimizer", "param_shapes", FROZEN, SAVE, INDEX)
        about = copy.deepcopy({key: value for key, value in saved.items() if key not in left_out})
        about["dp_world_size"] = self.engine.seq_dp_world_size
        stages, ranks = {self.source.stage, self.here.stage}, {self.source.ranks, self.here.ranks}
        if 3 not in stages or (stages == {3} and len(ranks) == 1):
            return {**about, **{key: saved[key] for key in ("module", FROZEN) if key in saved}}
        module = saved["module"]
        names = {param: unwrapped(name) for name, param in self.engine.module.named_parameters()}
        weights: dict[str, Tensor] = {}
        for name, tensor in self.engine.module.state_dict(keep_vars=True).items():
            if hasattr(tensor, "ds_id"):
                weights[name] = _zeros(0, tensor.dtype)
            elif tensor not in names and name in module:
                weights[name] = module[name].clone()  # a buffer
            elif tensor in names and (whole := self._whole(names[tensor], tensor)) is not None:
                weights[name] = whole.view(tensor.shape)
        frozen = {p: name for p, name in names.items() if hasattr(p, "ds_id") and name not in self.here.parameters}
        fragments = {}
        for param, name in frozen.items():
            if (whole := self._whole(name, param)) is not None:
                size = param.ds_tensor.numel()
                part = fragments[self.engine.param_names[param]] = _zeros(size, whole.dtype)
                own = whole.reshape(-1)[self._rank * size :][:size]
                part[: own.numel()] = own
        about[FROZEN] = fragments if fragments else None  # none with exclude_frozen_parameters
        return {**about, "module": weights}

    def _whole(self, name: str, param: Tensor) -> Tensor | None:
        """Return a parameter's weight in the shape in which the checkpoint has it; None if it is not there."""
        if self.source.stage != 3:
            return self._module.get(name)
        if name in self.source.parameters:
            flat = _zeros(self.source.parameters[name][1].division.numel)
            self._fill_(flat, {}, name, 0, flat.numel(), 0)
            return flat.to(param.dtype)
        parts = [self._read(self._weights_file(rank)).get(FROZEN) or {} for rank in range(self.source.ranks)]
        own = [part for fragments in parts for key, part in fragments.items() if unwrapped(key) == name]
        size = getattr(param, "ds_numel", param.numel())
        return torch.cat([part.detach().reshape(-1) for part in own])[:size] if own else None

    @functools.cached_property
    def _module(self) -> dict[str, Tensor]:
        return {unwrapped(name): weight for name, weight in self._read(self._weights_file(0))["module"].items()}

    def _content_of_optimizer(self, masters: Sequence[Tensor], state: Any) -> dict[str, Any]:
        template = self.engine.optimizer.state_dict()
        keys = ("optimizer_state_dict", "fp32_flat_groups")
        keys = keys if self.here.stage == 3 else ("base_optimizer_state", "single_partition_of_fp32_groups")
        about = {key: self._template.about[key] for key in OF_THE_RUN if key in self._template.about.keys() & template}
        return {**template, **about, keys[0]: state, keys[1]: list(masters)}

    def _whole_optimizer(self, masters: Sequence[Tensor], state: dict[str, Any]) -> Any:
        zero = self.engine.optimizer
        if isinstance(zero, Muon):
            return state
        shaped = iter(m.view(one.shape) for m, (_, one) in zip(masters, self.here.parameters.values(), strict=True))
        groups = [[next(shaped) for _ in group] for group in zero.fp16_groups]
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
        about: what else DeepSpeed stores.
        groups: the param groups.
        masters: the fp32 weights, flat, by the number of the partition; shorter where DeepSpeed leaves padding out.
        states: moments, and AdamW's count of steps.
        numbers: of the param groups.
    """

    def __init__(self, content: Mapping[str, Any], index: Index) -> None:
        about = content["optimizer_state_dict"] if index.stage else content["optimizer"]
        muon = about.get("base_optimizer_state", about.get("optimizer_state_dict", about))
        masters = about.get("fp32_flat_groups", about.get("single_partition_of_fp32_groups"))
        if masters is None and "fp32_groups" in about:
            masters = [one for group in about["fp32_groups"] for one in group]
        elif masters is None:
            weights = {unwrapped(name): weight for name, weight in content["module"].items()}
            masters = [weights[name] for name in index.parameters]
        keys = {number: iter(group["params"]) for number, group in enumerate(muon["param_groups"])}
        self.about: Mapping[str, Any] = about
        self.groups: Sequence[Mapping[str, Any]] = muon["param_groups"]
        self.masters: list[Tensor] = [_flat(one) for one in masters]
        self.numbers = [part.group for part in index.partitions]
        states = [muon["state"].get(next(keys[number]), {}) for number in self.numbers]
        self.states: list[dict[str, Any]] = [{key: _flat(v) for key, v in state.items()} for state in states]

    def zeros_like(self, part: StoredPartition) -> dict[str, Any]:
        """Return moments of zeros for a partition of the same param group, with the counts of its steps."""
        state = next((one for one, number in zip(self.states, self.numbers, strict=True) if number == part.group), {})
        return {
            key: value.clone() if key == "step" else _zeros(part.numel, value.dtype)
            for key, value in state.items()
            if not is_by_row(key)
        }

    def small_states(self, source: Index, target: Index) -> list[dict[str, Tensor]]:
        """Return the state of rules for each partition of another layout; each file has that of whole parameters."""
        by_name: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for part, state in zip(source.partitions, self.states, strict=True):
            for key in filter(is_by_row, state):
                numels = self._small_numels(part, key)
                if sum(numels) == len(state[key]):  # the check of the state misses it otherwise
                    for name, own in zip(part.parameters, torch.split(state[key], numels), strict=True):
                        by_name[key][name] = own
        return [
            {
                key: torch.cat([of[name] for name in part.parameters])
                for key, of in by_name.items()
                if all(name in of for name in part.parameters)
            }
            for part in target.partitions
        ]

    def _small_numels(self, part: StoredPartition, key: str) -> list[int]:
        """Return how many elements of a rule's state each parameter of a partition has."""
        group = self.groups[part.group]
        names = [unwrapped(name) for name in group["param_names"]]
        views = dict(zip(names, group.get("views") or [""] * len(names), strict=True))
        return [row_numel(one.shape, views[name]) for name, one in part.parameters.items()]

    def state_dict(self, index: Index, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a Muon's state dict with moments of other partitions."""
        groups = [{**group, "params": []} for group in self.groups]
        order = sorted(range(len(states)), key=lambda k: index.partitions[k].group)
        state = {}
        for key, k in enumerate(order):
            part = index.partitions[k]
            groups[part.group]["params"].append(key)
            shape = next(iter(part.parameters.values())).shape if index.stage == 0 else (part.numel,)
            state[key] = {
                name: v if name == "step" or is_by_row(name) else v.view(shape) for name, v in states[k].items()
            }
        return {"state": state, "param_groups": groups}


def _zeros(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device="cpu")


def _flat(value: Any) -> Any:
    return value.detach().reshape(-1) if isinstance(value, Tensor) and value.ndim else value


# --- partitions of ZeRO-3 that are not in its param groups, or are on NVMe


@contextlib.contextmanager
def all_standing(zero: Any) -> Iterator[None]:
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
            own, other = Path(path), saved / Path(path).name
            if not other.is_file() or other.stat().st_size != own.stat().st_size:
                yield (
                    f"{other} is missing, or has another size than {own}. DeepSpeed names swap files after the order "
                    "in which a process makes parameters: make the same models as the run that wrote it, in the same "
                    "order, with the same sub_group_size, and with the optimizer on NVMe [swap-files-misfit]"
                )
                return


def restore_swapped(zero: Any, optimizer: Muon, saved: dict[str, Any]) -> None:
    """Load what DeepSpeed skips with NVMe: steps, options, and the partitions that stay in memory.

    DeepSpeed has read the moments of swapped partitions together with their master weights.
    """
    swapped = {flat: dict(optimizer.state[flat]) for flat in partitions_on_nvme(zero)}
    zero.checkpoint_event_prologue()
    with all_standing(zero):
        optimizer.load_state_dict(saved["optimizer_state_dict"])
    for flat, state in swapped.items():
        for name, moment in state.items():
            if hasattr(moment, "ds_id"):  # DeepSpeed swaps this tensor
                optimizer.state[flat][name] = moment
    for i, (flat, master) in enumerate(zip(zero.fp32_partitioned_groups_flat, saved["fp32_flat_groups"], strict=True)):
        if flat not in swapped:
            flat.data.copy_(master.data)
            zero._reassign_or_swap_out_partitioned_parameters(i)
    zero.loss_scaler, zero.dynamic_loss_scale = saved["loss_scaler"], saved["dynamic_loss_scale"]
    zero.overflow = saved["overflow"]
    zero.checkpoint_event_epilogue()
