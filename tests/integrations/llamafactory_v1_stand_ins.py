"""Our imitation of LLaMA-Factory v1 in both of its layouts, as source: what hf_muon assumes of it, and how it calls us.

`tests/e2e/test_llamafactory_v1.py` runs the real one that is installed, which has the layout of 0.9.5.
"""

from __future__ import annotations

from torch import nn

OLD = "llamafactory.v1.plugins.trainer_plugins.optimizer"
NEW = "llamafactory.v1.plugins.trainer_plugins.optimizers.optimizer"
ARGUMENTS = "llamafactory.v1.config.training_args"
SHARDS = "llamafactory.v1.plugins.trainer_plugins.distributed.fsdp2"
CHECKPOINTS = "llamafactory.v1.core.utils.checkpoint"

# The modules of each layout. 0.9.5 registers methods by name, for all families of plugins together, has no muon, and
# does not pass the learning rate on. Newer sources register a function by name and family, have a muon, and pass it the
# learning rate.
OLD_REGISTRY = """
from collections import defaultdict

class BasePlugin:
    _registry = defaultdict(dict)
    def __init__(self, name=None):
        self.name = name
    def register(self, method_name="__call__"):
        if method_name in self._registry[self.name]:
            print("already registered")
        def decorator(function):
            self._registry[self.name][method_name] = function
            return function
        return decorator
    def __call__(self, *args, **kwargs):
        if "__call__" not in self._registry[self.name]:
            raise ValueError(f"Method __call__ of plugin {self.name} is not registered.")
        return self._registry[self.name]["__call__"](*args, **kwargs)

class OptimizerPlugin(BasePlugin):
    pass
"""
NEW_REGISTRY = """
class BasePlugin:
    _registry = {}
    def __init_subclass__(cls):
        cls._registry = {}
    def __init__(self, name=None):
        self.name = name
    def register(self):
        if self.name in type(self)._registry:
            print("already registered")
        def decorator(function):
            type(self)._registry[self.name] = function
            return function
        return decorator
    def __call__(self, *args, **kwargs):
        return type(self)._registry[self.name](*args, **kwargs)

class OptimizerPlugin(BasePlugin):
    pass

@OptimizerPlugin("muon").register()
def create_muon_optimizer(model, optim_config):
    return "theirs"
"""
OLD_ARGUMENTS = """
from dataclasses import dataclass

class PluginConfig(dict):
    @property
    def name(self):
        return self["name"]

@dataclass
class TrainingArguments:
    output_dir: str = "out"
    learning_rate: float = 1e-4
    dist_config: dict = None
    optim_config: dict = None

    def __post_init__(self):
        self.dist_config = self.dist_config and PluginConfig(self.dist_config)
        self.optim_config = self.optim_config and PluginConfig(self.optim_config)
"""
NEW_ARGUMENTS = OLD_ARGUMENTS.replace(
    "    optim_config: dict = None\n", "    cp_size: int = 1\n    optim_config: dict = None\n"
)
NEW_ARGUMENTS += """
        if self.optim_config is not None:
            self.optim_config["lr"] = self.learning_rate
"""
LAYOUTS = {"0.9.5": (OLD, OLD_REGISTRY, OLD_ARGUMENTS), "newer": (NEW, NEW_REGISTRY, NEW_ARGUMENTS)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.inner = nn.Linear(6, 4)
        self.lm_head = nn.Linear(4, 8)


Program = dict[str, str | None]
"""The source of each module, in the order of imports; None for a module that there is not."""


def _llamafactory_v1(layout: str) -> Program:
    """Return a program whose last module has `others()`, what a run with AdamW comes to, and `muon()`."""
    path, registry, arguments = LAYOUTS[layout]
    return {
        {OLD: NEW, NEW: OLD}[path]: None,
        ARGUMENTS: arguments,
        "llamafactory.v1.config.arg_parser": f"""
from {ARGUMENTS} import TrainingArguments

def get_args(options):
    return None, TrainingArguments(learning_rate=1e-3, optim_config=options)
""",
        SHARDS: """
def load_checkpoint(model, optimizer, ckpt_dir):
    return "loaded"
""",
        CHECKPOINTS: """
class TrainingCheckpointCoordinator:
    def __init__(self, trainer):
        self._t = trainer

    def resume(self, ckpt_path):
        self._t.global_step = 2
""",
        path: f"""{registry}
@OptimizerPlugin("adamw").register()
def create_adamw_optimizer(model, optim_config):
    return "adamw"
""",
        "llamafactory.v1.core.base_trainer": f"""
from types import SimpleNamespace
from llamafactory.v1.config.arg_parser import get_args
from {CHECKPOINTS} import TrainingCheckpointCoordinator
from {SHARDS} import load_checkpoint
from tests.integrations.llamafactory_v1_stand_ins import Net
from {path} import OptimizerPlugin

def train(name):
    _, args = get_args({{"name": name}})
    optimizer = OptimizerPlugin(args.optim_config["name"])(Net(), args.optim_config)
    TrainingCheckpointCoordinator(SimpleNamespace(optimizer=optimizer)).resume("folder")
    return type(optimizer).__name__, load_checkpoint("model", optimizer, "folder")

def others():
    return train("adamw")

def muon():
    return train("hf_muon")

def another():
    return train("muon")
""",
    }


V1 = {layout: _llamafactory_v1(layout) for layout in LAYOUTS}
