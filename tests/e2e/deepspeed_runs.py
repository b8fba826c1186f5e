"""Runs under DeepSpeed as users start them, on a CPU: two processes against one without DeepSpeed."""

from __future__ import annotations

import json

from tests.e2e.harness import ROOT, YAML, assert_close, read_yaml, weights

JSON = ROOT / "examples" / "deepspeed"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
CHANGES = {
    "max_steps": 3,
    "warmup_steps": 1,
    "learning_rate": 0.001,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,  # smaller than the norms: clipping is active
    "adam_epsilon": 1e-5,  # with a smaller one AdamW turns rounding errors of gradients into steps
    "optim_args": "ns_dtype=fp32",
}


def example_run(name, folder, config):
    """Return the file of an example's run with a DeepSpeed config, or without DeepSpeed, and its settings."""
    folder.mkdir(exist_ok=True)
    everything = read_yaml(YAML / name)
    del everything["deepspeed"]
    size = 2 if config is None else 1
    settings = CHANGES | {"output_dir": folder / "out", "per_device_train_batch_size": size}
    settings |= {"use_cpu": True} if config is None else {"deepspeed": config}
    path = folder / name
    path.write_text(json.dumps(everything), encoding="utf-8")  # JSON is YAML
    return path, settings


def assert_same(output, alone, start, rounding):
    """Check that two ranks under ZeRO have ended at the weights of one process.

    ZeRO-3 multiplies with its own functions (`memory_efficient_linear`), which sum in another order than torch's.
    """
    assert len(list((output / "checkpoint-3").glob("global_step3/*optim_states.pt"))) == 2, "it did not run under ZeRO"
    assert_close(weights(output), weights(alone), weights(start), rounding)
