"""Stand-ins for programs with hooks of their own, as source: what hf_muon assumes of each, and how each calls it.

The last module of a program has `others()`, what a run of another optimizer comes to, and `muon()`, one of Muon.
"""

from __future__ import annotations

from tests.integrations.llamafactory_v1_stand_ins import ARGUMENTS, LAYOUTS, NEW, OLD

Program = dict[str, str | None]
"""The source of each module, in the order of imports; None for a module that there is not."""

TIMM: Program = {
    "timm.optim": """
def create_optimizer_v2(model_or_params, opt="sgd", **kwargs):
    pass
""",
}
"""What `test_hooks.py` counts; `test_timm.py` has timm's registry."""


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
