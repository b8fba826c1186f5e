r"""Train a causal language model with transformers' Trainer on the workers of Ray Train, with Muon.

    python examples/programs/ray_train.py examples/yaml/trainer_qwen3_pretrain.yaml --workers 4 --data_path /texts

Each worker runs `examples/train.py`, which gets the arguments that this script does not know. hf_muon must be installed
on every node: its entry point is active in Ray's workers, too.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

TRAIN = Path(__file__).resolve().parents[1] / "train.py"


def train_on_worker(settings: dict[str, Any]) -> None:
    """Run examples/train.py in this worker's process group."""
    spec = importlib.util.spec_from_file_location("train", settings["script"])
    module = importlib.util.module_from_spec(spec)
    sys.modules["train"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    os.chdir(settings["folder"])  # Ray starts a worker in its own folder
    module.main(settings["arguments"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a YAML file of examples/train.py")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--storage", default=str(Path.home() / "ray_results"), help="a folder that all nodes see")
    args, more = parser.parse_known_args()
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={
            "script": str(TRAIN),
            "folder": os.getcwd(),
            "arguments": [str(Path(args.config).resolve()), *more],
        },
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=not args.cpu),
        run_config=RunConfig(storage_path=args.storage),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
