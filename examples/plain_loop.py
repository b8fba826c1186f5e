r"""Train a causal language model in a plain loop with accelerate: `build_optimizer` in place of a Trainer.

    python examples/plain_loop.py Qwen/Qwen3-0.6B my_text.txt
    accelerate launch --num_processes 4 examples/plain_loop.py Qwen/Qwen3-0.6B my_text.txt
    accelerate launch --config_file examples/yaml/accelerate_qwen3_fsdp2.yaml examples/plain_loop.py ...
    accelerate launch --use_deepspeed --deepspeed_config_file examples/deepspeed/zero2.json \
        examples/plain_loop.py ...

The loop is the same for one process, DDP, FSDP2 and DeepSpeed. The optimizer is built before `prepare`, which
swaps its parameters under FSDP2 and attaches it to DeepSpeed's engine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_muon import build_optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a name on the hub")
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--output", default="saves/plain_loop")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="blocks in a step, of all processes together")
    parser.add_argument("--block", type=int, default=512, help="tokens in a block")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--option", action="append", default=[], help="of Muon: momentum=0.9; may be repeated")
    parser.add_argument("--resume", help="a folder that this script has saved: its checkpoint")
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    options = dict(option.split("=", 1) for option in args.option)
    optimizer = build_optimizer(model, {"lr": args.lr, "weight_decay": 0.01, **options})

    tokens = torch.tensor(tokenizer(args.text.read_text(encoding="utf-8"))["input_ids"])
    blocks = tokens[: len(tokens) // args.block * args.block].view(-1, args.block)
    needed = args.steps * args.batch
    blocks = blocks.repeat(-(-needed // len(blocks)), 1)[:needed]
    loader = DataLoader(list(blocks), batch_size=args.batch // accelerator.num_processes)

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first = 0
    if args.resume:
        accelerator.load_state(args.resume)
        first = int(Path(args.resume, "steps.txt").read_text())
        loader = accelerator.skip_first_batches(loader, first)
    model.train()
    for step, batch in enumerate(loader, first + 1):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"step {step} loss {mean.item():.4f}")

    accelerator.save_state(f"{args.output}/checkpoint")
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        Path(args.output, "checkpoint", "steps.txt").write_text(str(args.steps))
        accelerator.unwrap_model(model).save_pretrained(args.output, state_dict=state)
    accelerator.end_training()


if __name__ == "__main__":
    main()
