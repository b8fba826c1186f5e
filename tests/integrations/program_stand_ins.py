"""Stand-ins for programs with hooks of their own, as source: what hf_muon assumes of each, and how each calls it.

The last module of a program has `others()`, what a run of another optimizer comes to, and `muon()`, one of Muon.
"""

from __future__ import annotations

from tests.integrations.llamafactory_v1_stand_ins import ARGUMENTS, LAYOUTS, NEW, OLD

Program = dict[str, str | None]
"""The source of each module, in the order of imports; None for a module that there is not."""

TIMM: Program = {
    "timm.optim._optim_factory": """
class OptimInfo:
    def __init__(self, name, opt_class, description="", has_momentum=False, has_betas=False):
        self.name, self.opt_class = name, opt_class

class OptimizerRegistry:
    def __init__(self):
        self.infos = {}
    def register(self, info):
        self.infos[info.name] = info
    def create_optimizer(self, model_or_params, opt, **kwargs):
        kind = self.infos[opt.split("_")[-1]].opt_class
        return kind.rpartition(".")[-1]

default_registry = OptimizerRegistry()
default_registry.register(OptimInfo("muon", "timm.optim.muon.Muon"))
default_registry.register(OptimInfo("adamw", "torch.optim.AdamW"))

def create_optimizer_v2(model_or_params, opt="sgd", **kwargs):
    return default_registry.create_optimizer(model_or_params, opt=opt, **kwargs)
""",
    "timm.optim": """
from timm.optim._optim_factory import create_optimizer_v2
""",
    "train": """
from timm.optim import create_optimizer_v2

def others():
    return create_optimizer_v2("model", opt="adamw"), create_optimizer_v2("model", "lookahead_adamw")

def muon():
    return create_optimizer_v2("model", opt="hf_muon")
""",
}


def _llamafactory(layout: str) -> Program:
    path, registry, arguments = LAYOUTS[layout]
    return {
        {OLD: NEW, NEW: OLD}[path]: None,
        ARGUMENTS: arguments,
        "llamafactory.v1.config.arg_parser": f"""
from {ARGUMENTS} import TrainingArguments

def get_args(options):
    return None, TrainingArguments(learning_rate=1e-3, optim_config=options)
""",
        "llamafactory.v1.plugins.trainer_plugins.distributed.fsdp2": """
def load_checkpoint(model, optimizer, ckpt_dir):
    return "loaded"
""",
        path: registry
        + """
@OptimizerPlugin("adamw").register()
def create_adamw_optimizer(model, optim_config):
    return "adamw"
""",
        "llamafactory.v1.core.base_trainer": f"""
from llamafactory.v1.config.arg_parser import get_args
from llamafactory.v1.plugins.trainer_plugins.distributed.fsdp2 import load_checkpoint
from tests.integrations.llamafactory_v1_stand_ins import Net
from {path} import OptimizerPlugin

def train(name):
    _, args = get_args({{"name": name}})
    optimizer = OptimizerPlugin(args.optim_config["name"])(Net(), args.optim_config)
    return type(optimizer).__name__, load_checkpoint("model", optimizer, "folder")

def others():
    return train("adamw")

def muon():
    return train("muon")
""",
    }


PROGRAMS = {
    "timm": TIMM,
    "LLaMA-Factory v1": _llamafactory("0.9.5"),
    "newer v1": _llamafactory("newer"),
}
