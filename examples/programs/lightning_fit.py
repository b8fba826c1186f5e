r"""Train a causal language model with Lightning's Trainer and Muon; FSDP2 with `--strategy fsdp2`.

    python examples/programs/lightning_fit.py Qwen/Qwen3-0.6B my_text.txt
    python examples/programs/lightning_fit.py Qwen/Qwen3-0.6B my_text.txt --devices 8 --strategy fsdp2

`configure_optimizers` calls `build_optimizer` when the parameters are already sharded. Under DDP hf_muon
shares the work among the ranks.
"""

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_muon import build_optimizer


class LanguageModel(lightning.LightningModule):
    """A model of transformers, with Muon as its optimizer."""

    def __init__(self, name: str, lr: float, options: dict[str, str]) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).train()
        self.options = {"lr": lr, "weight_decay": 0.01, **options}

    def configure_model(self) -> None:
        """Shard the layers, where the strategy has a mesh."""
        mesh = self.device_mesh
        if mesh is None or isinstance(next(self.model.parameters()), DTensor):
            return
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh["data_parallel"])
        fully_shard(self.model, mesh=mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        """Return the loss of a batch of blocks."""
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Muon for the hidden matrices and AdamW for the rest, in one optimizer."""
        return build_optimizer(self.model, self.options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a name on the hub")
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--output", default="saves/lightning")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--block", type=int, default=512, help="tokens in a block")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--option", action="append", default=[], help="of Muon: momentum=0.9; may be repeated")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", choices=["auto", "ddp", "fsdp2"], default="auto")
    parser.add_argument("--resume", help="a .ckpt file that this script has saved")
    args = parser.parse_args()

    lightning.seed_everything(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokens = torch.tensor(tokenizer(args.text.read_text(encoding="utf-8"))["input_ids"])
    blocks = list(tokens[: len(tokens) // args.block * args.block].view(-1, args.block))
    trainer = lightning.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=ModelParallelStrategy() if args.strategy == "fsdp2" else args.strategy,
        max_steps=args.steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=False,
        default_root_dir=args.output,
        enable_checkpointing=False,
    )
    model = LanguageModel(args.model, args.lr, dict(option.split("=", 1) for option in args.option))
    trainer.fit(model, DataLoader(blocks, batch_size=args.batch), ckpt_path=args.resume)
    trainer.save_checkpoint(f"{args.output}/last.ckpt")


if __name__ == "__main__":
    main()
