r"""Train a causal language model in a plain loop with accelerate: `build_optimizer` in place of a Trainer.

    python examples/plain_loop.py Qwen/Qwen3-0.6B my_text.txt
    accelerate launch --num_processes 4 examples/plain_loop.py Qwen/Qwen3-0.6B my_text.txt
    accelerate launch --config_file examples/yaml/accelerate_qwen3_fsdp2.yaml examples/plain_loop.py ...
    accelerate launch --use_deepspeed --deepspeed_config_file examples/deepspeed/zero2.json \
        examples/plain_loop.py ...

The loop is the same for one process, DDP, FSDP2 and DeepSpeed. The optimizer is built before `prepare`, which
swaps its parameters under FSDP2 and attaches it to DeepSpeed's engine. After an interruption, add
`--resume saves/plain_loop` to the same command.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_muon import build_optimizer


def save_checkpoint(accelerator: Accelerator, output: Path, step: int) -> None:
    """Save a checkpoint, and only then remove the one before it."""
    new, last, former = (output / name for name in ("checkpoint.new", "checkpoint", "checkpoint.old"))
    if accelerator.is_main_process:
        shutil.rmtree(new, ignore_errors=True)  # of a save that was interrupted
    accelerator.wait_for_everyone()
    accelerator.save_state(str(new))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (new / "steps.txt").write_text(str(step))
        if last.exists():
            shutil.rmtree(former, ignore_errors=True)
            last.rename(former)
        new.rename(last)
        shutil.rmtree(former, ignore_errors=True)
    accelerator.wait_for_everyone()


def find_checkpoint(folder: Path) -> Path:
    """Return the complete checkpoint in an --output folder, or the folder itself if it is one."""
    for candidate in (folder, folder / "checkpoint", folder / "checkpoint.old"):
        if (candidate / "steps.txt").is_file():
            return candidate
    sys.exit(f"plain_loop.py: {folder} has no complete checkpoint. Give --resume the --output folder of a run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a name on the hub")
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--output", type=Path, default="saves/plain_loop")
    parser.add_argument("--steps", type=int, default=100, help="in all, those before a resume included")
    parser.add_argument("--save-every", type=int, default=50, metavar="N", help="steps; the last one is always saved")
    parser.add_argument("--batch", type=int, default=8, help="blocks in a step, of all processes together")
    parser.add_argument("--block", type=int, default=512, help="tokens in a block")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--option", action="append", default=[], help="of Muon: momentum=0.9; may be repeated")
    parser.add_argument("--resume", type=Path, help="the --output folder of a run, or the checkpoint in it")
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
    # With a generator of its own the loader draws no number from the one for dropout, which a resume restores.
    loader = DataLoader(list(blocks), args.batch // accelerator.num_processes, generator=torch.Generator())

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first = 0
    if args.resume:
        checkpoint = find_checkpoint(args.resume)
        accelerator.load_state(str(checkpoint))
        first = int((checkpoint / "steps.txt").read_text())
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
        if step % args.save_every == 0 or step == args.steps:
            save_checkpoint(accelerator, args.output, step)

    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output, state_dict=state)
    accelerator.end_training()


if __name__ == "__main__":
    main()
