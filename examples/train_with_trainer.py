"""transformers' Trainer on a Qwen3 or Llama model over real text: the same bits at every dp x tp, also when resumed.

    export TP_INVARIANT_MODE=1
    torchrun --nproc-per-node 4 examples/train_with_trainer.py --dp 2 --max-steps 10 --output-dir run
    torchrun --nproc-per-node 2 examples/train_with_trainer.py --resume run/checkpoint-10 --output-dir run
    python examples/train_with_trainer.py --output-dir other
    tp-invariant diff run/digests.log other/digests.log

The last line says "identical for 20 steps". Needs transformers and accelerate: pip install 'tp_invariant[trainer]'.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

import tp_invariant as tpi
from tp_invariant.examples.train_hf import PRESETS, read_text
from tp_invariant.integrations.trainer import DigestLogCallback, Trainer


class Windows(Dataset):
    """Windows of the sources of Python's library, as bytes."""

    def __init__(self, length: int, first: int, count: int) -> None:
        text = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8).long()
        self.windows = text[first * length : (first + count) * length].view(count, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def build_trainer(options: argparse.Namespace, mesh: DeviceMesh | None, device: torch.device) -> Trainer:
    """The Trainer of this rank; without a mesh it has the whole model."""
    kind, sizes = PRESETS[options.preset]
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, use_cache=False))
    tpi.parallelize(model, None if mesh is None else mesh["tp"])
    given: dict[str, Any] = dict(
        output_dir=options.output_dir,
        max_steps=options.max_steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,  # of all data parallel ranks together
        learning_rate=1e-3,
        lr_scheduler_type="constant_with_warmup",  # a schedule that a longer run does not change
        warmup_steps=3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        bf16=options.bf16,
        report_to="none",
        use_cpu=device.type == "cpu",
        dataloader_pin_memory=device.type == "cuda",
    )
    return Trainer(
        model,
        TrainingArguments(**given),
        train_dataset=Windows(64, 0, 200),
        eval_dataset=Windows(64, 200, 8),
        callbacks=[DigestLogCallback(str(Path(options.output_dir, "digests.log")))],
        dp_group=None if mesh is None else mesh["dp"],
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="train_with_trainer.py", description="Train by transformers' Trainer.")
    add = parser.add_argument
    add("--preset", choices=tuple(PRESETS), default="qwen3-tiny", help="model and sizes, with random weights")
    add("--dp", type=int, default=1, metavar="N", help="data parallel degree; the other ranks are tensor parallel")
    add("--max-steps", type=int, default=20, metavar="N", help="the last step")
    add("--output-dir", required=True, metavar="DIR", help="for checkpoints and the log of digests")
    add("--resume", metavar="DIR", help="go on from this checkpoint, of any degree")
    add("--bf16", action="store_true", help="autocast to bfloat16")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as one rank of torchrun's, or alone."""
    options = make_parser().parse_args(argv)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    mesh = None
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        sizes = options.dp, dist.get_world_size() // options.dp
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "tp"))
    try:
        Path(options.output_dir).mkdir(parents=True, exist_ok=True)
        build_trainer(options, mesh, device).train(resume_from_checkpoint=options.resume)
    finally:
        if mesh is not None:
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
