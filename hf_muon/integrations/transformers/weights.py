"""Load the weights of a checkpoint whose names on disk are not those of the model.

`from_pretrained` converts the weights of many models (experts of a mixture, the language model in a larger one).
Trainer's own loading does not, on resume and for `load_best_model_at_end`: such weights stay what they were
(huggingface/transformers#48805, #43701).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import Any

from hf_muon._autoload import Change
from hf_muon.diagnostics.log import first_few, is_rank_zero, logger
from hf_muon.integrations.names import is_muon


def patch_loading(module: ModuleType) -> Iterator[Change]:
    """Let Trainer load every weight that a checkpoint of a run with Muon has, or refuse the run."""
    trainer = module.Trainer
    resume, load_best = trainer._load_from_checkpoint, trainer._load_best_model
    warn_after_load = trainer._issue_warnings_after_load  # which gets what a load has missed, but not the folder
    folders: list[Any] = []

    @contextlib.contextmanager
    def loading(folder: Any) -> Iterator[None]:
        folders.append(folder)
        try:
            yield
        finally:
            folders.pop()

    @functools.wraps(resume)
    def resume_from(self: Any, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        with loading(resume_from_checkpoint):
            resume(self, resume_from_checkpoint, *args, **kwargs)

    @functools.wraps(load_best)
    def load_best_from(self: Any) -> None:
        with loading(self.state.best_model_checkpoint):
            load_best(self)

    @functools.wraps(warn_after_load)
    def warn_or_convert(self: Any, load_result: Any) -> None:
        missing = _missing(self.model, load_result.missing_keys) if is_muon(self.args.optim) and folders else ()
        if missing:
            _load_converted(self.model, missing, folders[-1])
        else:
            warn_after_load(self, load_result)

    yield trainer, "_load_from_checkpoint", resume_from
    yield trainer, "_load_best_model", load_best_from
    yield trainer, "_issue_warnings_after_load", warn_or_convert


def _missing(model: Any, keys: Collection[str]) -> list[str]:
    """Return the parameters that a load has missed under each of their names: of tied ones a file has one."""
    from hf_muon.routing.parameters import names_of  # processes without Muon do not load it

    return [names[0] for names in names_of(model) if {*names} <= {*keys}]


def _load_converted(model: Any, names: Collection[str], folder: str) -> None:
    """Copy parameters from the model that `from_pretrained` makes of a folder.

    Raises:
        RuntimeError: a trained parameter is not in the folder, or no model can be made of it.
    """
    import torch

    params = dict(model.named_parameters())
    try:
        # fp32 holds the values of all dtypes of weights.
        stored, found = type(model).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        absent = {name for name in found["missing_keys"] if name in params and params[name].requires_grad}
        if absent:
            raise ValueError(f"it has no {first_few(sorted(absent))}")
        values = dict(stored.named_parameters())
        with torch.no_grad():
            for name in names:
                params[name].copy_(values[name])
    except Exception as error:
        raise RuntimeError(
            f"{len(names)} weights, such as {first_few(names, 2)}, are not under these names in {folder}, and "
            f"from_pretrained does not load them either ({type(error).__name__}: {error}). The run would continue "
            "with weights of another step. Resume with the model that wrote the checkpoint, or start a new run from "
            "its weights: from_pretrained of that folder, another output_dir and no resume_from_checkpoint "
            "[weights-not-loaded]"
        ) from error
    if is_rank_zero():
        logger().info(
            "%d weights of %s have other names on disk, and are loaded by from_pretrained", len(names), folder
        )
