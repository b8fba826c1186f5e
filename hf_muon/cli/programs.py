"""Ask the program of a training file what it would train: its own code makes the model and the arguments.

Nothing is trained, and no weights are read: its calls of `from_pretrained` return models on the meta device.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import io
import logging
import os
import pkgutil
import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from hf_muon.integrations.transformers.training_file import (
    ELSEWHERE,
    Settings,
    is_llamafactory,
    is_llamafactory_v1,
    own_environment,
    training_arguments,
)

if TYPE_CHECKING:
    from torch import nn

Answer = tuple["nn.Module", Sequence[Any], list[str]]
"""A model as it would be trained, the program's dataclasses of arguments, and notes on what is not known."""
LLAMAFACTORY, V1, TRL, SCRIPT = "LLaMA-Factory", "LLaMA-Factory v1", "TRL", "a script of transformers"
# What TRL's trainers read, but for a label.
_COLUMNS = ("prompt", "completion", "chosen", "rejected")
_TEMPLATE = "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"


class _ReadyError(BaseException):
    """A Trainer would start now, with the model and the arguments of this error."""


def program_of(settings: Settings) -> str:
    """Return the program of a file: among those that are installed, the one that knows most of its keys."""
    if is_llamafactory_v1(settings) or is_llamafactory(settings):
        return V1 if is_llamafactory_v1(settings) else LLAMAFACTORY
    programs: dict[str, Callable[[], set[str]]] = {
        SCRIPT: _names_of_transformers,
        TRL: lambda: _names_of_trl(settings),
        LLAMAFACTORY: lambda: _names_of(*importlib.import_module("llamafactory.hparams.parser")._TRAIN_ARGS),
    }
    unknown = {}
    for program, names in programs.items():
        # A program that is not installed, or whose imports fail here in any way, is not the file's.
        with contextlib.suppress(Exception), _traceless():
            unknown[program] = len(settings.keys() - ELSEWHERE - names())
        if 0 in unknown.values():  # the others need not be imported
            break
    return min(unknown, key=lambda program: unknown[program])


def ask(program: str, settings: Settings, model: str, *, trust_remote_code: bool) -> Answer:
    """Return what a program says of the settings of a file, whose model is in a folder or on the hub.

    Raises:
        ValueError: the program does not accept the file, or a package is not installed.
    """
    requested = {key: value for key, value in settings.items() if key not in ELSEWHERE}
    requested["model" if program == V1 else "model_name_or_path"] = model
    requested["output_dir"] = os.path.join(os.devnull, "unused")
    requested |= {"trust_remote_code": True} if trust_remote_code else {}
    output = io.StringIO()
    try:
        with _traceless(output), _without_weights():
            return {LLAMAFACTORY: _ask_llamafactory, V1: _ask_llamafactory_v1, TRL: _ask_trl}[program](requested)
    except ImportError as error:
        raise _not_installed(program, first_line(error)) from error
    except (Exception, SystemExit) as error:
        if re.search(r"\[[a-z-]+\]$", str(error)):  # an error of hf_muon, with its code
            raise
        reason = output.getvalue().strip().splitlines()[-1] if isinstance(error, SystemExit) else first_line(error)
        raise ValueError(f"{program} does not accept it: {type(error).__name__}: {reason} [program-refuses]") from error


def ask_nobody(program: str, settings: Settings, model: nn.Module) -> Answer:
    """Return the answer for a script, or for a program that is not installed and trains the whole model.

    Raises:
        ValueError: the program would train something else.
    """
    kind = settings.get("finetuning_type", "lora" if program == LLAMAFACTORY else "full")
    if settings.get("peft_config") or settings.get("use_peft") or kind != "full":
        program = TRL if program == SCRIPT else program
        raise _not_installed(program)
    notes = [f"{program} is not installed here: what it freezes and its defaults are not known"]
    if program == SCRIPT:
        unknown = ", ".join(sorted(settings.keys() - _names_of_transformers() - ELSEWHERE))
        notes = [f"what the script makes of {unknown} is not known: the whole model is shown"] if unknown else []
    defaults = [] if program == V1 else [training_arguments(settings)]
    return model, [*defaults, SimpleNamespace(**settings)], notes


def _not_installed(program: str, why: str = "it is not installed here") -> ValueError:
    return ValueError(
        f"{program} cannot be asked what it trains: {why}. Run this command where the training will run "
        "[program-missing]"
    )


# --- programs


def _ask_llamafactory(settings: dict[str, Any]) -> Answer:
    from llamafactory.hparams import get_train_args, parser  # type: ignore[import-not-found]
    from llamafactory.model import load_model, load_tokenizer  # type: ignore[import-not-found]
    from torch import device

    settings = _as_read_by_llamafactory(settings)
    notes = [] if settings.get("do_train") else ["LLaMA-Factory trains only with do_train: true, which is missing"]
    # The run has a GPU, and this machine may have none: LLaMA-Factory would refuse bf16.
    with mock.patch.object(parser, "is_torch_bf16_gpu_available", return_value=True):
        data = {} if settings.get("do_train") else {"dataset": "unused"}
        arguments = get_train_args({**data, **settings, "do_train": True, "use_cpu": True})
    model_args, _, _, finetuning_args, _ = arguments
    try:
        tokenizer = load_tokenizer(model_args)["tokenizer"]
    except OSError:
        tokenizer = _tokenizer(settings)
    has_value_head = finetuning_args.stage in ("rm", "ppo")
    with device("meta"):
        model = load_model(tokenizer, model_args, finetuning_args, True, add_valuehead=has_value_head)
    return model, arguments, notes


def _ask_llamafactory_v1(settings: dict[str, Any]) -> Answer:
    from llamafactory.v1.config import get_args  # type: ignore[import-not-found]
    from llamafactory.v1.core.model_engine import ModelEngine  # type: ignore[import-not-found]
    from torch import device

    arguments = get_args(_as_read_by_llamafactory(settings))
    with mock.patch.object(ModelEngine, "_init_processor", return_value=_tokenizer(settings)), device("meta"):
        return ModelEngine(arguments[0], is_train=True).model, arguments, []


def _as_read_by_llamafactory(settings: Settings) -> dict[str, Any]:
    """Return settings in which 1e-5 is a number, which PyYAML reads as text."""
    import yaml
    from omegaconf import OmegaConf  # type: ignore[import-not-found]

    return dict(OmegaConf.to_container(OmegaConf.create(yaml.safe_dump(dict(settings)))))


def _ask_trl(settings: dict[str, Any]) -> Answer:
    """Run a command of TRL with a row of data until its Trainer has the model."""
    import datasets  # type: ignore[import-untyped]
    import transformers
    from torch import device

    command, names = next(iter(_commands(settings).items()))
    asked = settings
    script = importlib.import_module(f"trl.scripts.{command}")
    settings = {**settings, "dataset_name": "unused", "use_cpu": True, "reward_funcs": ["think_format_reward"]}
    parser = script.make_parser()
    of_run = names - {"datasets", "reward_model_name_or_path"}  # these would be fetched
    parser.set_defaults_with_config(**{key: value for key, value in settings.items() if key in of_run})
    arguments = parser.parse_args_into_dataclasses(args=[])
    turns = {name: {"role": "user" if name == "prompt" else "assistant", "content": name} for name in _COLUMNS}
    data = datasets.Dataset.from_list([{**{name: [turn] for name, turn in turns.items()}, "label": True}])
    tokenizer = _tokenizer(settings)

    def ready(self: Any, model: Any = None, args: Any = None, *_: Any, **__: Any) -> None:
        raise _ReadyError(model, args)

    replaced: list[tuple[Any, str, Any]] = [
        (module, "load_dataset", lambda *_, **__: collections.defaultdict(lambda: data))
        for module in (datasets, script)
    ]
    for tokenizers in (transformers.AutoProcessor, transformers.AutoTokenizer):
        replaced.append((tokenizers, "from_pretrained", lambda *_, **__: tokenizer))
    try:
        with contextlib.ExitStack() as stack, device("meta"):
            for owner, name, value in (*replaced, (transformers.Trainer, "__init__", ready)):
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
            script.main(*arguments)
    except _ReadyError as answer:
        model, args = answer.args
        notes = [f"read as a file of trl {command}"]
        if unknown := ", ".join(sorted(asked.keys() - names - ELSEWHERE)):
            notes.append(f"trl {command} does not know {unknown}: unless accelerate launch does, it ends with an error")
        return model, (args, *arguments), notes
    raise ValueError(f"trl {command} starts no Trainer [program-refuses]")


def _commands(settings: Settings) -> dict[str, set[str]]:
    """Return the arguments of TRL's commands; first the one that knows most keys, of several `sft` or `dpo`."""
    entries = pkgutil.iter_modules(importlib.import_module("trl.scripts").__path__)
    commands: dict[str, set[str]] = {}
    for name in sorted((entry.name for entry in entries), key=lambda name: (name != "sft", name != "dpo", name)):
        # Modules that train nothing have no `make_parser`; others need packages that are not installed.
        with contextlib.suppress(ImportError, RuntimeError, AttributeError):
            names = _names_of(*importlib.import_module(f"trl.scripts.{name}").make_parser().dataclass_types)
            commands |= {name: names} if "model_name_or_path" in names else {}
    return dict(sorted(commands.items(), key=lambda command: len(settings.keys() - command[1])))


def _names_of_trl(settings: Settings) -> set[str]:
    """Return the arguments of the command of TRL that a file is for; empty if its keys may be those of any script."""
    trl, names = importlib.import_module("trl"), next(iter(_commands(settings).values()))
    common = _names_of_transformers() | _names_of(trl.ModelConfig, trl.ScriptArguments) - {"use_peft"}
    return names if settings.keys() & names - common - ELSEWHERE else set()


def _names_of(*classes: Any) -> set[str]:
    return {field.name for cls in classes for field in dataclasses.fields(cls)}


def _names_of_transformers() -> set[str]:
    from transformers import TrainingArguments

    return _names_of(TrainingArguments) | {"model_name_or_path"}


def _tokenizer(settings: Settings) -> Any:
    """Return a tokenizer in place of the model's; it knows the tokens that a file names."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = dict.fromkeys(["<unk>", *(value for value in settings.values() if isinstance(value, str))])
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, "<unk>"))
    tokens = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<unk>")
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=tokenizer, chat_template=_TEMPLATE, **tokens)


# --- models without weights, and a process without traces


@contextlib.contextmanager
def _without_weights() -> Iterator[None]:
    """Let `from_pretrained` make models on the meta device, and read no weights."""
    from transformers import PreTrainedModel

    # Private: transformers has no public list of its auto classes.
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    resize, made = PreTrainedModel.resize_token_embeddings, classmethod(_from_pretrained)

    def resized(self: Any, *args: Any, **options: Any) -> Any:
        return resize(self, *args, **{**options, "mean_resizing": False})  # the mean would read weights

    with contextlib.ExitStack() as stack:
        for cls in (PreTrainedModel, *_BaseAutoModelClass.__subclasses__()):
            stack.enter_context(mock.patch.object(cls, "from_pretrained", made))
        stack.enter_context(mock.patch.object(PreTrainedModel, "resize_token_embeddings", resized))
        yield


def _from_pretrained(
    cls: Any, /, pretrained_model_name_or_path: Any, *_: Any, config: Any = None, **options: Any
) -> nn.Module:
    from transformers import AutoConfig

    name = pretrained_model_name_or_path
    dtype, trust = options.pop("dtype", options.pop("torch_dtype", None)), options.get("trust_remote_code")
    options.pop("attn_implementation", None)  # this machine may not have it, and shapes do not depend on it
    if config is None:
        of_class = getattr(cls, "config_class", None) or AutoConfig
        config, _ = of_class.from_pretrained(name, return_unused_kwargs=True, **options)
    of_auto = {"trust_remote_code": trust} if hasattr(cls, "from_config") else {}
    stated = {} if dtype in (None, "auto") else {"dtype": dtype}
    # `_from_config` is private: the public constructor of a class takes no dtype.
    return without_weights(name, getattr(cls, "from_config", None) or cls._from_config, config, **of_auto, **stated)


def without_weights(name: Any, make: Callable[..., nn.Module], config: Any, **options: Any) -> nn.Module:
    """Return a model on the meta device, in its configuration's dtype unless `options` have another.

    Raises:
        ValueError: its constructor reads weights.
    """
    import torch

    from hf_muon.routing.model_facts import text_config_of

    try:
        with torch.device("meta"):
            return make(config, **{"dtype": config.dtype or text_config_of(config).dtype, **options})
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"{name}: its constructor computes with weights, which are not allocated here ({first_line(error)}). "
            "Build the model in Python and pass it to hf_muon.route_parameters [constructor-computes]"
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


@contextlib.contextmanager
def _traceless(output: io.StringIO | None = None) -> Iterator[None]:
    """Undo what a program changes in this process, and keep what it prints and logs off the screen."""
    from transformers.utils import logging as of_transformers

    output, verbosity, level = output or io.StringIO(), of_transformers.get_verbosity(), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with own_environment(), contextlib.redirect_stdout(output):
            # LLaMA-Factory refuses versions of packages here with which the run's machine has nothing to do.
            os.environ["DISABLE_VERSION_CHECK"] = "1"
            with contextlib.redirect_stderr(output):
                yield
    finally:
        logging.disable(level)
        of_transformers.set_verbosity(verbosity)
