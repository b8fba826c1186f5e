"""What a process sees of runs with AdamW and with Muon, for `test_hooks.py`: one line of JSON.

With the word `hooks` the process imports hf_muon, as `import torch` does.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from typing import Any

import torch

if sys.argv[1:] == ["hooks"]:
    import hf_muon  # noqa: F401

HEARD: list[str] = []


class Listen(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        HEARD.append(record.getMessage())


def train(optim: str) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    model = Qwen3ForCausalLM(config)
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
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    state = dcp.get_optimizer_state_dict(model, optimizer)
    dcp.set_optimizer_state_dict(model, optimizer, optim_state_dict=state)
    return float(optimizer.state[model.weight]["exp_avg"].sum())


def shards() -> Any:
    """Call accelerate's loader with AdamW: without a plugin's state dict type it fails inside of accelerate."""
    import accelerate.accelerator

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    plugin = type("Plugin", (), {"state_dict_type": None})()
    return accelerate.accelerator.load_fsdp_optimizer(plugin, None, optimizer, None, "nowhere")


def outcome(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def main() -> None:
    logging.getLogger("hf_muon").addHandler(Listen(logging.INFO))
    seen: dict[str, Any] = {"adamw": outcome(train, "adamw_torch")}
    seen |= {"adamw whole state": outcome(whole_state), "adamw shards": outcome(shards)}
    seen["heard of adamw"] = list(HEARD)
    import accelerate.parallelism_config
    from transformers.training_args import OptimizerNames

    if "muon" in {member.value for member in OptimizerNames}:  # registered
        from hf_muon._autoload import status

        seen["muon"] = outcome(train, "muon")
        seen["states"] = status()
    seen["has sequence parallel"] = hasattr(accelerate.parallelism_config.ParallelismConfig, "sp_size")
    print("\n" + json.dumps(seen))


if __name__ == "__main__":
    main()
