"""What a process sees of runs where names of other packages are other ones, for `tests/test_autoload.py`, as JSON.

Usage: renaming.py RENAMES, which are {module: {old: new}} as JSON, in a process that has imported transformers.trainer
and not hf_muon. After a run without hf_muon, what the hooks touch is imported anew: words are renamed in its source.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import logging
import re
import sys
import tempfile
from typing import Any

import torch
from torch import nn

AGAIN = re.compile(r"accelerate\b|transformers\.train|torch\.distributed\.checkpoint\.state_dict$")
"""Modules that are imported anew: those that the hooks touch, and those that have imported names of them."""
RENAMES: dict[str, dict[str, str]] = json.loads(sys.argv[1])
HEARD: list[str] = []


class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        text = self.get_data(self.path).decode()
        for old, new in RENAMES[fullname].items():
            text = re.sub(rf"\b{old}\b", new, text)
        return compile(text, self.path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in RENAMES else None
        if spec and spec.origin:
            spec.loader = Loader(name, spec.origin)
        return spec


class Listen(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        HEARD.append(record.getMessage())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, input_ids: Any, labels: Any) -> Any:
        logits = self.head(self.inner(self.embed(input_ids)).relu())
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def train(optim: str) -> Any:
    from transformers.trainer import Trainer
    from transformers.training_args import TrainingArguments

    torch.manual_seed(0)
    model = Net()
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    options: dict[str, Any] = {"max_steps": 3, "save_strategy": "no", "report_to": "none", "use_cpu": True}
    options |= {"optim_args": "ns_dtype=fp32"} if optim == "muon" else {}
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, optim=optim, per_device_train_batch_size=2, disable_tqdm=True, **options)
        Trainer(model, args, train_dataset=data).train()
    return [float(param.detach().double().sum()) for param in model.parameters()]


def whole_state() -> Any:
    import torch.distributed.checkpoint.state_dict as dcp

    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    state = dcp.get_optimizer_state_dict(model, optimizer)
    dcp.set_optimizer_state_dict(model, optimizer, optim_state_dict=state)
    return float(optimizer.state[model.weight]["exp_avg"].sum())


def shards() -> Any:
    """Call accelerate's loader with AdamW: without a plugin's state dict type it fails inside of accelerate."""
    import accelerate.accelerator

    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    plugin = type("Plugin", (), {"state_dict_type": None})()
    return accelerate.accelerator.load_fsdp_optimizer(plugin, None, optimizer, None, "nowhere")


def outcome(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def adamw() -> Any:
    return [outcome(train, "adamw_torch"), outcome(whole_state), outcome(shards)]


def main() -> None:
    seen: dict[str, Any] = {"without hooks": adamw()}
    for name in filter(AGAIN.match, list(sys.modules)):
        del sys.modules[name]
    sys.meta_path.insert(0, Finder())
    from hf_muon._autoload import status

    logging.getLogger("hf_muon").addHandler(Listen(logging.INFO))
    seen |= {"adamw": adamw(), "heard of adamw": list(HEARD), "muon": outcome(train, "muon"), "states": status()}
    import accelerate.parallelism_config

    seen["has sequence parallel"] = hasattr(accelerate.parallelism_config.ParallelismConfig, "sp_size")
    print("\n" + json.dumps(seen))


if __name__ == "__main__":
    main()
