"""What acts in the processes of a dry run: models stay empty, and the run ends where its training would begin.

A dry run never trains: what it needs is in place or ends the process, no gradient is computed, no optimizer can step,
and no Python is started that would not be a dry run.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import re
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from hf_muon import _autoload
from hf_muon._autoload import Change, Hook
from hf_muon.diagnostics.log import has_process_group, is_on, is_rank_zero
from hf_muon.dry_run import parent, report
from hf_muon.dry_run.report import WEIGHTS, Made

_made: list[Made] = []
_models: list[weakref.ref[Any]] = []  # of from_pretrained
_folders: list[tempfile.TemporaryDirectory[str]] = []  # each is removed when the process ends
_reasons: dict[str, str] = {}  # why the run would be refused, by code
_is_in_trainer = False  # a Trainer ends the run, then, and not the function that makes a Muon
_has_begun = False
_is_asking = False  # another Python whether it loads hf_muon

_PATCHES = {
    "transformers.modeling_utils": "patch_models",
    "peft.tuners.tuners_utils": "patch_adapters",
    "llamafactory.v1.plugins.trainer_plugins.distributed.fsdp2": "patch_fsdp2",
    "deepspeed": "patch_deepspeed",
    "transformers.trainer": "patch_trainer",
    "accelerate.accelerator": "patch_prepare",
    "hf_muon.build": "patch_build",
    "hf_muon.ready_groups": "patch_groups",
}
"""A function of this file for each module that it changes."""
_REFUSING = {
    "hf_muon.integrations.transformers.handler": (
        *("refuse_failed_hooks", "refuse_unsupported", "refuse_parts_of_sequences", "refuse_plain_shards"),
        "refuse_older",
    ),
    "hf_muon.optimizer.head_rules": ("HeadRules.attach",),
    "hf_muon.integrations.transformers.hooks": ("refuse_deepspeed",),
    "hf_muon.integrations.llamafactory.v0": ("refuse_rivals", "refuse_factors"),
    "hf_muon.integrations.llamafactory.v1": ("refuse_unsupported",),
}
"""Functions that only refuse a run, by module. Their reasons are collected, so that all of them come at once."""
_SWITCHES = ("HF_MUON_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTHONPATH", "PYTHONHOME")
"""Variables that decide whether a Python loads hf_muon."""


def begin() -> None:
    """Make this process a dry run: place the hooks, report what ends it, and let no optimizer step in it."""
    global _has_begun
    if _has_begun:
        return
    _has_begun = True
    try:
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(lambda optimizer, *_: _refuse(f"{type(optimizer).__name__} would step"))
        if not is_on(WEIGHTS):  # with which some adapters are made of gradients
            torch.autograd.backward = lambda *_, **__: _refuse("a loop without a known optimizer would train")
        patches = {**_PATCHES, **dict.fromkeys(_REFUSING, "collect_reasons")}
        hooks = {f"{name}, dry": Hook(name, f"{__name__}:{patch}", "", stop) for name, patch in patches.items()}
        _autoload.add(hooks)
        sys.excepthook = functools.partial(_report_error, sys.excepthook)
        sys.addaudithook(_watch_children)
        atexit.register(_report_reasons)
        report.shake_hands()
    except Exception as error:  # noqa: BLE001  whatever it is, the command would train
        stop(f"{type(error).__name__}: {error}")


def stop(reason: str) -> NoReturn:
    """End this process, because a hook is not in place."""
    _refuse(f"a hook of the dry run is not in place, and the run would train: {reason}")


def _refuse(reason: str) -> NoReturn:
    report.write({"failed": reason, "refused": [*_reasons.values()]})
    _exit(1)


def _fail() -> NoReturn:
    """Report the exception that is being handled, and end this process."""
    _report_error(sys.__excepthook__, *sys.exc_info())
    _exit(1)


def _exit(code: int) -> NoReturn:
    # Not by an exception: `finally` and handlers of the program would save a model without weights over a trained one.
    for folder in _folders:
        folder.cleanup()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _watch_children(event: str, arguments: Sequence[Any]) -> None:
    """End the process if it starts a Python in which hf_muon is not loaded, as a `torchrun` of another environment."""
    global _is_asking
    if _is_asking or event not in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
        return
    given = None if event == "os.system" else arguments[-1]
    words = ["sh", "-c", arguments[0]] if event == "os.system" else arguments[1]
    inherited = {
        os.fsdecode(key): os.fsdecode(value) for key, value in (os.environ if given is None else given).items()
    }
    for interpreter, environment in parent.interpreters_of([*map(os.fsdecode, words)], inherited):
        if report.VARIABLE not in environment:
            _refuse(f"{interpreter[0]} is started without {report.VARIABLE}, and would train")
        is_alike = all(environment.get(name) == os.environ.get(name) for name in _SWITCHES)
        if is_alike and os.path.dirname(interpreter[0]) == os.path.dirname(sys.executable):
            continue
        _is_asking = True
        try:
            reason = parent.missing_in(interpreter, environment)
        finally:
            _is_asking = False
        if reason and "No module named 'torch'" not in reason:  # which cannot train
            _refuse(f"hf_muon is not loaded in {interpreter[0]}, which the command starts and may train: {reason}")


# --- models without weights


def patch_models(module: ModuleType) -> Iterator[Change]:
    """Let transformers make models on the meta device, and keep modules there that are empty."""
    import torch

    base, ddp = module.PreTrainedModel, torch.nn.parallel.DistributedDataParallel
    load, make, resize = base.from_pretrained.__func__, base._from_config.__func__, base.resize_token_embeddings
    to, save, wrap, parse = torch.nn.Module.to, base.save_pretrained, ddp.__init__, torch._C._nn._parse_to
    # The real from_pretrained runs (quantizer, attention, adapters, dtype), but it reads no weights. Private names: one
    # that is missing is an error here, and ends the process.
    files, dtype_of = module._get_resolved_checkpoint_files, module._get_dtype
    _ = module.is_deepspeed_zero3_enabled, base._load_pretrained_model, base._finalize_model_loading

    def local_files(*args: Any, **options: Any) -> Any:
        options["download_kwargs"] = {**(options.get("download_kwargs") or {}), "local_files_only": True}
        try:
            return files(*args, **options)
        except OSError:  # the configuration is enough
            return [], None

    def known_dtype(dtype: Any, checkpoint_files: Any, config: Any, *args: Any, **options: Any) -> Any:
        if dtype == "auto" and not checkpoint_files and config.dtype is None:
            dtype = torch.float32  # it is in files that are not here
        return dtype_of(dtype, checkpoint_files, config, *args, **options)

    def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
        made = load(cls, *args, **options)
        _models.append(weakref.ref(made[0] if isinstance(made, tuple) else made))
        return made

    def from_config(cls: Any, *args: Any, **options: Any) -> Any:
        with torch.device("meta"):
            return make(cls, *args, **options)

    def finished(model: Any, _: Any, info: Any) -> Any:
        model.tie_weights()
        return info

    @functools.wraps(resize)
    def resized(self: Any, *args: Any, **options: Any) -> Any:
        return resize(self, *args, **{**options, "mean_resizing": False})  # the mean would read weights

    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_empty(self):
            return to(self, *args, **kwargs)
        dtype = parse(*args, **kwargs)[1]
        return self if dtype is None else to(self, dtype)

    def staying(move: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(move)(lambda self, *args: self if _is_empty(self) else move(self, *args))

    @functools.wraps(save)
    def save_unless_empty(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if _is_empty(self) else save(self, *args, **kwargs)  # it would delete the files of an older save

    def wrapped(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if not _is_empty(module):
            wrap(self, module, *args, **kwargs)
            return
        torch.nn.Module.__init__(self)
        self.module = module
        self.require_forward_param_sync = self.require_backward_grad_sync = True  # which distributed/ddp.py reads

    if is_on(WEIGHTS):
        return
    yield module, "_get_resolved_checkpoint_files", local_files
    yield module, "_get_dtype", known_dtype
    yield module, "is_deepspeed_zero3_enabled", lambda: False  # zero.Init would allocate partitions
    yield base, "_load_pretrained_model", staticmethod(lambda *_, **__: (SimpleNamespace(to_dict=dict), None))
    yield base, "_finalize_model_loading", staticmethod(finished)
    yield base, "from_pretrained", classmethod(from_pretrained)
    yield base, "_from_config", classmethod(from_config)
    yield base, "resize_token_embeddings", resized
    yield torch.nn.Module, "to", stay
    yield torch.nn.Module, "cuda", staying(torch.nn.Module.cuda)
    yield torch.nn.Module, "cpu", staying(torch.nn.Module.cpu)
    yield base, "save_pretrained", save_unless_empty
    yield ddp, "__init__", wrapped


def patch_adapters(module: ModuleType) -> Iterator[Change]:
    """Let PEFT make adapters of an empty model on the meta device: PiSSA assigns to their data."""
    inject = module.BaseTuner.inject_adapter

    @functools.wraps(inject)
    def inject_empty(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        with torch.device("meta") if _is_empty(model) else contextlib.nullcontext():
            return inject(self, model, *args, **kwargs)

    yield module.BaseTuner, "inject_adapter", inject_empty


def patch_fsdp2(module: ModuleType) -> Iterator[Change]:
    """Let LLaMA-Factory v1 shard an empty model, and load nothing into it."""
    shard, prepare = module.FSDP2Engine.shard_model, module.FSDP2Engine.prepare_model

    @functools.wraps(shard)
    def shard_empty(self: Any, model: Any) -> Any:
        if not _is_empty(model):
            return shard(self, model)
        if getattr(model.config, "tie_word_embeddings", False):
            model.tie_weights()
        return prepare(self, model)

    yield module.FSDP2Engine, "shard_model", shard_empty


def _is_empty(module: Any) -> bool:
    return any(param.is_meta for param in module.parameters())


# --- where a run ends


def patch_trainer(module: ModuleType) -> Iterator[Change]:
    """End a run of Trainer where its training would begin, and keep it out of `output_dir` and the hub."""
    trainer = module.Trainer
    init, signature = trainer.__init__, inspect.signature(trainer.__init__)
    _ = trainer.create_optimizer, trainer.train  # an error if they are not there

    @functools.wraps(init)
    def init_elsewhere(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        if call.arguments.get("args") is None:
            call.arguments["args"] = module.TrainingArguments()
        _folders.append(tempfile.TemporaryDirectory(prefix=report.PREFIX))
        call.arguments["args"].output_dir, call.arguments["args"].push_to_hub = _folders[-1].name, False
        call.arguments["args"].report_to = []
        init(*call.args, **call.kwargs)

    def train(self: Any, *_: Any, **__: Any) -> NoReturn:
        global _is_in_trainer
        _is_in_trainer = True
        try:
            self.create_optimizer()
            _refuse_as_trainer(self)
        except BaseException:  # noqa: BLE001  the program would catch it, and save
            _fail()
        end(self.model, self.optimizer, self)

    yield trainer, "__init__", init_elsewhere
    yield trainer, "train", train


def _refuse_as_trainer(trainer: Any) -> None:
    """Collect what would be refused between the optimizer and the first step."""
    from hf_muon.integrations.deepspeed.refusals import refuse_momentum
    from hf_muon.integrations.names import innermost, muons_in
    from hf_muon.integrations.transformers.callback import MuonCallback

    _refuse_weights_of(getattr(trainer, "accelerator", None), [trainer.optimizer])
    if not _reasons:  # a rival that was refused is the other optimizer
        begin_training = _collected(MuonCallback().on_train_begin)
        begin_training(trainer.args, trainer.state, trainer.control, optimizer=trainer.optimizer)
    plugin = getattr(trainer.args, "deepspeed_plugin", None)
    if plugin is not None and muons_in([trainer.optimizer]):
        _collected(refuse_momentum)(innermost(trainer.optimizer), plugin.deepspeed_config)


def _refuse_weights_of(accelerator: Any, values: Sequence[Any]) -> None:
    """Collect why the weights that an Accelerator will make would be refused, if a Muon is among the values."""
    from hf_muon.integrations.names import muons_in
    from hf_muon.integrations.transformers.run_refusals import refuse_fp8_weights

    if muons_in(values):
        _collected(refuse_fp8_weights)(accelerator)


def patch_prepare(module: ModuleType) -> Iterator[Change]:
    """End a loop of accelerate where it prepares an optimizer that was not made by a Trainer or `build_optimizer`."""
    prepare = module.Accelerator.prepare

    @functools.wraps(prepare)
    def prepare_or_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_weights_of(self, args)
        _end_if_optimizer(args)
        return prepare(self, *args, **kwargs)

    yield module.Accelerator, "prepare", prepare_or_end


def patch_deepspeed(module: ModuleType) -> Iterator[Change]:
    """End a script of DeepSpeed where it starts an engine, and start none for an empty model, as a reference is."""
    initialize = module.initialize

    @functools.wraps(initialize)
    def initialize_or_end(*args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(initialize).bind(*args, **kwargs).arguments
        model = arguments.get("model")
        _end_if_optimizer([arguments.get("optimizer"), model])
        return (model, None, None, None) if _is_empty(model) else initialize(*args, **kwargs)

    yield module, "initialize", initialize_or_end


def _end_if_optimizer(values: Sequence[Any]) -> None:
    import torch

    from hf_muon.routing.live_models import holder_of

    for optimizer in (value for value in values if isinstance(value, torch.optim.Optimizer)):
        models = [value for value in values if isinstance(value, torch.nn.Module)]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        end(models[0] if models else holder_of(params), optimizer)


def patch_build(module: ModuleType) -> Iterator[Change]:
    """Note each Muon that is made of a model, collect why it is refused, and end the run in place of the table."""
    muon_of = module.muon_of

    @functools.wraps(muon_of)
    def muon_and_note(model: Any, routes: Sequence[Any], config: Any, **arguments: Any) -> Any:
        optimizer = muon_of(model, routes, config, **arguments)
        _made.append(Made(model, routes, config, optimizer))
        return optimizer

    yield module, "muon_of", muon_and_note
    yield from _autoload.everywhere(module, "require_muon", _collected(module.require_muon))
    yield from _autoload.everywhere(module, "log_routes", _end_outside_trainer)


def patch_groups(module: ModuleType) -> Iterator[Change]:
    """Note each Muon that is made of param groups."""
    from hf_muon.routing.live_models import holder_of

    muon, end_of_making = module.MuonOfGroups, module.MuonOfGroups._end

    def note_and_end(self: Any, routes: Sequence[Any]) -> None:
        config, model = self._config, self._model
        model = holder_of({param for group in self.param_groups for param in group["params"]}, model)
        _made.append(Made(model, routes, config, self))
        end_of_making(self, routes)

    yield muon, "_end", note_and_end


def _end_outside_trainer(*_: Any) -> None:
    if not _is_in_trainer:
        end(_made[-1].model, _made[-1].optimizer)


def end(model: Any, optimizer: Any, trainer: Any = None) -> NoReturn:
    """Report what the run would train, and end the process, together with all ranks."""
    from hf_muon.integrations.names import innermost

    try:
        made = next((made for made in reversed(_made) if made.optimizer is innermost(optimizer)), None)
        if made is None:
            made = Made(model, None, None, optimizer)
        models = [model for reference in _models if (model := reference()) is not None]
        content = report.of_run(made, trainer, models, _note)  # all ranks: the batch is read together
        content["refused"] = [*_reasons.values()]
        is_first = is_rank_zero()
        if has_process_group():
            from torch import distributed

            distributed.barrier()
            distributed.destroy_process_group()
        if is_first:
            report.write(content)
    except BaseException:  # noqa: BLE001  as above
        _fail()
    _exit(int(bool(_reasons)))


# --- why a run is refused, or fails


def collect_reasons(module: ModuleType) -> Iterator[Change]:
    """Let functions that refuse a run note why, and return."""
    for name in _REFUSING[module.__name__]:
        cls, _, method = name.rpartition(".")
        owner = getattr(module, cls) if cls else module
        yield owner, method, _collected(getattr(owner, method))


def _collected(refuse: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(refuse)
    def collect(*args: Any, **kwargs: Any) -> None:
        try:
            refuse(*args, **kwargs)
        except (ValueError, RuntimeError) as error:
            _note(str(error))

    return collect


def _note(reason: str) -> bool:
    """Collect a reason if it is one of hf_muon's, which end in a code, and return whether it is."""
    code = re.search(r"\[[a-z0-9-]+\]$", reason)
    if code:
        _reasons.setdefault(code[0], reason)  # a second reason with the same code follows from the first
    return code is not None


def _report_error(show: Callable[..., None], kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Report the exception that ends this process; the program's own is shown as without us."""
    reason = str(error).strip()
    content: dict[str, Any] = {} if _note(reason) else {"failed": f"{kind.__name__}: {reason}".rstrip(": ")}
    report.write({**content, "refused": [*_reasons.values()]})
    _reasons.clear()
    if content:
        show(kind, error, trace)


def _report_reasons() -> None:
    """Report why the run is refused where the process has ended without an optimizer or an exception."""
    if _reasons:
        report.write({"refused": [*_reasons.values()]})
