"""Lightning on a tensor-parallel Qwen3 or Llama model over real text: the same losses and digest at every degree.

    TP_INVARIANT_MODE=1 python examples/train_with_lightning.py
    TP_INVARIANT_MODE=1 torchrun --nproc-per-node 2 examples/train_with_lightning.py
    for dp in 1 2 4; do
        TP_INVARIANT_MODE=1 torchrun --nproc-per-node 4 examples/train_with_lightning.py --dp $dp
    done

Needs transformers and Lightning: pip install 'tp_invariant[hf,lightning]'.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

import tp_invariant as tpi
from tp_invariant.examples.train_hf import PRESETS, read_text
from tp_invariant.integrations.lightning import TensorParallelStrategy


class Language(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.print(f"micro-batch {index:3}  loss {loss.item():.6f}")  # those of rank 0
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(tp_group: Any, options: argparse.Namespace, device: torch.device, dp_group: Any = None) -> str:
    """Takes options.steps steps as one of the ranks of these groups; returns the digest of the weights."""
    kind, sizes = PRESETS[options.preset]
    lightning.seed_everything(0, workers=True, verbose=False)
    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, use_cache=False))
    tpi.parallelize(model, tp_group)
    text = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8).long()
    loader = DataLoader(text[: 200 * 64].view(200, 64), batch_size=2, shuffle=True)
    trainer = lightning.Trainer(
        strategy=TensorParallelStrategy(tp_group, device, dp_group=dp_group),
        accelerator=device.type,
        devices=1,  # of this rank
        precision=options.precision,
        max_steps=options.steps,
        accumulate_grad_batches=4,  # of all data parallel ranks together
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Language(model), loader)
    return tpi.testing.digest(tpi.testing.full_parameters(model))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="train_with_lightning.py", description="Train by Lightning.")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="qwen3-tiny", help="model and sizes")
    parser.add_argument("--dp", type=int, metavar="N", help="data parallel degree; the other ranks are tensor parallel")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="optimizer steps")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed", "bf16-true"), default="32-true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as one rank of torchrun's, or alone."""
    parser = make_parser()
    options = parser.parse_args(argv)
    world = int(os.environ.get("WORLD_SIZE", "0"))
    if options.dp and (not world or world % options.dp):
        parser.error(f"--dp {options.dp} needs a number of ranks that it divides: torchrun --nproc-per-node 4 ..")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    tp_group: Any = None
    dp_group = None
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        tp_group = dist.group.WORLD
        if options.dp:
            sizes = options.dp, dist.get_world_size() // options.dp
            mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "tp"))
            tp_group, dp_group = mesh["tp"], mesh["dp"]
    try:
        digest = train(tp_group, options, device, dp_group)
        if tp_group is None or dist.get_rank() == 0:
            print(f"weights {digest}")
    finally:
        if tp_group is not None:
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
