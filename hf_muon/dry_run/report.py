"""What a dry run says: the routes of its optimizer, why it would be refused, and what it costs each rank."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn

    from hf_muon.plan import Facts
    from hf_muon.routing.route import Route

VARIABLE = "HF_MUON_DRY_RUN"
"""Variable: on, or what comes after `PREFIX` in the name of the folder, for temporary files, of a parent."""
WEIGHTS = "HF_MUON_DRY_RUN_WEIGHTS"
"""Variable: load the weights, for code that reads them before its optimizer is made."""
PREFIX, REPORT, BEGUN = "hf_muon_dry_run_", "report.json", "begun-"
LENGTH = 2048
"""Tokens in a sequence where nothing says how many."""


class Made(NamedTuple):
    """An optimizer of a run, and the model, routes and options that it was made of; None if it is not a Muon."""

    model: Any
    routes: Sequence[Route] | None
    config: Any
    optimizer: Any


def of_model(model: nn.Module, routes: Sequence[Route], notes: Sequence[str], title: str = "") -> dict[str, Any]:
    """Return the report on a model and its routes, for JSON, with its lines as `text` and, of each parameter, `all`."""
    from hf_muon.routing.route import frozen, table

    tied, numels = _tied(model), [p.numel() for p in model.parameters() if not p.requires_grad]
    head = ", ".join(filter(None, [type(model).__name__, title]))
    below = [f"tied: {' and '.join(others)}, the same as {first}" for first, others in tied.items()]
    below += [*frozen(model), *notes]
    return {
        "source": title,
        "model": type(model).__name__,
        "notes": [*notes],
        "refused": [],
        "muon": _count([route for route in routes if route.use_muon]),
        "adamw": _count([route for route in routes if not route.use_muon]),
        "frozen": {"parameters": len(numels), "weights": sum(numels)},
        "tied": tied,
        "parameters": [
            {
                "name": route.name,
                "shape": list(route.shape),
                "route": "muon" if route.use_muon else "adamw",
                "reason": route.reason,
                "view": route.view,
                "weight_decay": route.decay,
            }
            for route in routes
        ],
        "text": "\n".join([head, table(routes), *below]),
        "all": "\n".join([head, table(routes, every=True), *below]),
    }


def _count(routes: Sequence[Route]) -> dict[str, int]:
    return {"parameters": len(routes), "weights": sum(math.prod(route.shape) for route in routes)}


def _tied(model: nn.Module) -> dict[str, list[str]]:
    """Return the other names of each parameter that has several."""
    from hf_muon.routing.parameters import names_of

    return {first: others for first, *others in names_of(model) if others}


# --- runs


def of_run(made: Made, trainer: Any, models: Sequence[nn.Module], refused: Callable[[str], object]) -> dict[str, Any]:
    """Return the report on a run, with its facts for `hf-muon plan`.

    Args:
        made: its optimizer.
        trainer: its Trainer; None without one.
        models: those that it has loaded.
        refused: called with each reason why the run would be refused.
    """
    from hf_muon.build import require_muon
    from hf_muon.config import MuonConfig
    from hf_muon.integrations.names import innermost, muons_in
    from hf_muon.plan import numbers_of
    from hf_muon.routing.route import Route, route_parameters

    model, routes, config, optimizer = made
    notes, is_muon = [], bool(muons_in([optimizer]))
    if routes is None and is_muon:
        muon = innermost(optimizer)
        routes = [
            Route(name, param, group["use_muon"], group["weight_decay"] != 0, "its param group says so")
            for group in muon.param_groups
            for name, param in zip(
                group.get("param_names") or map(str, itertools.count()), group["params"], strict=False
            )
        ]
    if routes is None:
        notes.append(f"{type(innermost(optimizer)).__name__} would step: this is what hf_muon would do")
        routes = route_parameters(model)
        try:
            require_muon(routes, type(model).__name__)
        except (ValueError, RuntimeError) as error:
            refused(f"with optim: muon: {error}")
    run = {"optimizer": "Muon" if is_muon else type(innermost(optimizer)).__name__, **_run_of(model, trainer, models)}
    facts = _facts(model, routes, config or MuonConfig(), run)
    notes += [f"also in memory: {name}, {size_of(size)}" for name, size in run["other_models"]]
    try:
        numbers = numbers_of(facts)
    except RuntimeError as error:  # the layout cannot have these options, which is refused elsewhere, too
        refused(str(error))
    else:
        notes.append(
            f"memory of each rank ({run['layout']}, {run['ranks']}): {size_of(max(numbers.weights))} of weights, "
            f"{size_of(max(numbers.gradients))} of gradients, {size_of(max(numbers.state))} of optimizer state, "
            f"{size_of(max(numbers.adamw_state))} with AdamW"
        )
        sides = {"muon": numbers.state, "adamw": numbers.adamw_state}
        run["memory"] = {"weights": max(numbers.weights), "gradients": max(numbers.gradients)}
        run["memory"] |= {f"state of {side}": max(state) for side, state in sides.items()}
    return {**of_model(model, routes, notes), "run": run, "facts": dataclasses.asdict(facts)}


def _run_of(model: nn.Module, trainer: Any, models: Sequence[nn.Module]) -> dict[str, Any]:
    """Return what a run says of itself; None for what it does not say."""
    from hf_muon.diagnostics.log import has_process_group
    from hf_muon.integrations.transformers.run_refusals import accelerator_state

    ranks, args = 1, getattr(trainer, "args", None)
    if has_process_group():
        from torch import distributed

        ranks = distributed.get_world_size()
    layout, replicas = _layout_of(model, ranks)
    rows, length = _batch_of(trainer)
    precision = getattr(accelerator_state(), "mixed_precision", None)
    own = {id(param) for param in model.parameters()}
    others = [other for other in models if not any(id(param) in own for param in other.parameters())]
    return {
        "layout": layout,
        "ranks": ranks,
        "replicas": replicas,
        "mixed_precision": precision if precision in ("bf16", "fp16") else None,
        "rows": rows or getattr(args, "per_device_train_batch_size", None),
        "sequence_length": length,
        "accumulation": getattr(args, "gradient_accumulation_steps", None),
        "checkpointing": any(
            getattr(owner, name, False)
            for owner, name in ((args, "gradient_checkpointing"), (model, "is_gradient_checkpointing"))
        ),
        "other_models": [[type(other).__name__, sum(map(_bytes, other.parameters()))] for other in others],
    }


def _bytes(param: Any) -> int:
    return int(param.numel() * param.dtype.itemsize)


def _layout_of(model: nn.Module, ranks: int) -> tuple[str, int]:
    """Return the layout of a run, as `hf_muon.plan.LAYOUTS` names it, and the number of copies of the model."""
    from hf_muon.integrations.transformers.run_refusals import accelerator_state

    state = accelerator_state()
    kind = state.distributed_type.value if state else ""
    meshes = [mesh for param in model.parameters() if (mesh := getattr(param, "device_mesh", None)) is not None]
    if kind == "DEEPSPEED":
        stage = state.deepspeed_plugin.zero_stage
        return (f"zero{stage}" if stage else "ddp"), 1
    if kind == "FSDP" or meshes:
        axes = getattr(state, "parallelism_config", None)
        copies = getattr(axes, "dp_replicate_size", 1) or 1
        if meshes and meshes[0].ndim == 2:
            copies = meshes[0].size(0)
        return ("hsdp" if copies > 1 else "fsdp"), copies
    return ("ddp" if ranks > 1 else "single"), 1


def _batch_of(trainer: Any) -> tuple[int | None, int | None]:
    """Return the sequences and the tokens in each of a Trainer's first batch; None if it has no such batch."""
    from torch.utils.data import IterableDataset

    from hf_muon.diagnostics.log import has_process_group

    data = getattr(trainer, "train_dataset", None)
    if trainer is None or (has_process_group() and isinstance(data, IterableDataset)):
        return None, None  # of an iterable, rank 0 reads for all: if it fails, the others wait
    try:
        batch = next(iter(trainer.get_train_dataloader()))
    except Exception:  # noqa: BLE001  a data set's own code; the run will show its error
        return None, None
    pairs = batch.items() if isinstance(batch, Mapping) else ()
    shapes = [value.shape for key, value in pairs if str(key).endswith("input_ids") and getattr(value, "ndim", 0) == 2]
    # Prompts and answers may be separate tensors.
    return (max(s[0] for s in shapes), sum(s[1] for s in shapes)) if shapes else (None, None)


def _facts(model: nn.Module, routes: Sequence[Route], config: Any, run: Mapping[str, Any]) -> Facts:
    import torch

    from hf_muon.plan import facts_of, main_dtype

    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(run["mixed_precision"])
    trained = main_dtype(model, is_trained=True)
    if half and run["layout"] in ("fsdp", "hsdp"):
        trained = torch.float32  # accelerate's FSDP2 stores fp32 weights under mixed precision
    return facts_of(
        model,
        routes,
        config,
        layout=run["layout"],
        ranks=run["ranks"],
        replicas=run["replicas"],
        dtype=trained,
        frozen_dtype=main_dtype(model, is_trained=False),
        compute_dtype=half or trained,
        tokens=(run["rows"] or 1) * (run["sequence_length"] or LENGTH),
        others=sum(size for _, size in run["other_models"]),
    )


def read_facts(content: Mapping[str, Any]) -> Facts:
    """Return the facts that a report holds as JSON."""
    import torch

    from hf_muon.config import MuonConfig
    from hf_muon.plan import Facts, Weight

    dtypes = {key: getattr(torch, content[key].removeprefix("torch.")) for key in content if key.endswith("dtype")}
    weights = [Weight(tuple(shape), *others) for shape, *others in content["weights"]]
    decoder = content["decoder"] and tuple(content["decoder"])
    config = MuonConfig(**content["config"])
    return Facts(**{**content, **dtypes, "weights": weights, "decoder": decoder, "config": config})


def size_of(value: float, unit: str = "B") -> str:
    """Return a number of bytes or FLOPs with three digits and a prefix."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}"


# --- where it is written


def _folder() -> Path | None:
    """Return the folder in which a parent looks for the report; None without a parent."""
    text = os.environ.get(VARIABLE, "")
    folder = Path(tempfile.gettempdir(), f"{PREFIX}{text}")
    return folder if re.fullmatch(r"\w+", text) and folder.is_dir() else None


def shake_hands() -> None:
    """Tell the parent that hf_muon is loaded in this process."""
    if (folder := _folder()) is not None:
        (folder / f"{BEGUN}{os.getpid()}").touch()


def write(report: Mapping[str, Any]) -> None:
    """Hand a report to the parent, or print it. Routes win over failures, and of those the first."""
    folder = _folder()
    if folder is None:
        reasons = [f"  - {reason}" for reason in report.get("refused", ())]
        print(*lines(report), *(["This run would be refused:", *reasons] if reasons else []), sep="\n", flush=True)
        return
    draft = folder / f"draft-{os.getpid()}"
    draft.write_text(json.dumps(report, default=str), encoding="utf-8")
    path = folder / REPORT
    is_refused = path.exists() and json.loads(path.read_text(encoding="utf-8"))["refused"]
    if "parameters" in report and (report["refused"] or not is_refused):
        draft.replace(path)
    else:  # a launcher's error comes after that of its process
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)


def lines(report: Mapping[str, Any], *, every: bool = False) -> Iterator[str]:
    """Yield the lines of a report for the screen, without why the run would be refused."""
    if "text" in report:
        yield report["all" if every else "text"]
    if report.get("run", {}).get("optimizer") == "Muon" and not report["refused"]:
        yield "hf_muon would not refuse this run."
    if "failed" in report:
        yield f"The command fails: {report['failed']}"
