r"""Train a causal language model in a loop of Lightning Fabric with Muon.

    python examples/programs/fabric_loop.py Qwen/Qwen3-0.6B my_text.txt --devices 4 --strategy ddp

`build_optimizer` takes the model itself, after `setup_module`, which may shard it. Under DDP hf_muon shares
the work among the ranks.
"""

import argparse
from pathlib import Path

import torch
from lightning.fabric import Fabric, seed_everything
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_muon import build_optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a name on the hub")
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--output", default="saves/fabric")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--block", type=int, default=512, help="tokens in a block")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--option", action="append", default=[], help="of Muon: momentum=0.9; may be repeated")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--resume", help="a file that this script has saved")
    args = parser.parse_args()

    fabric = Fabric(accelerator=args.accelerator, devices=args.devices, strategy=args.strategy)
    fabric.launch()
    seed_everything(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    module = fabric.setup_module(model)
    options = {"lr": args.lr, "weight_decay": 0.01, **dict(option.split("=", 1) for option in args.option)}
    optimizer = fabric.setup_optimizers(build_optimizer(model, options))

    tokens = torch.tensor(tokenizer(args.text.read_text(encoding="utf-8"))["input_ids"])
    blocks = list(tokens[: len(tokens) // args.block * args.block].view(-1, args.block))
    loader = fabric.setup_dataloaders(DataLoader(blocks, batch_size=args.batch))

    state = {"model": module, "optimizer": optimizer, "step": 0}
    if args.resume:
        fabric.load(args.resume, state)
    batches = (batch for _ in range(args.steps) for batch in loader)
    module.train()
    for step, batch in enumerate(batches, 1):
        if step <= state["step"]:
            continue  # of an earlier process
        loss = module(input_ids=batch, labels=batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(module, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(f"step {step} loss {loss.item():.4f}")
        if step == args.steps:
            break
    fabric.save(f"{args.output}/checkpoint.ckpt", {**state, "step": args.steps})


if __name__ == "__main__":
    main()
