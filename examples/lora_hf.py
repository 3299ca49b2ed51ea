"""Fine-tunes a Hugging Face model on real text by LoRA (PEFT), at any tensor-parallel degree, with the same bits.

    for p in 1 2 4; do TP_INVARIANT_MODE=1 torchrun --nproc-per-node $p examples/lora_hf.py --steps 20; done

prints the same losses and the same digest of the adapters three times; with TP_INVARIANT_MODE=0 they differ. So it does
with data parallel ranks besides, which share the micro-batches of a step:

    for dp in 1 2 4; do TP_INVARIANT_MODE=1 torchrun --nproc-per-node 4 examples/lora_hf.py --dp $dp; done

With `--save DIR` rank 0 writes the adapters in PEFT's own format, which any degree loads, and plain PEFT on one GPU:

    TP_INVARIANT_MODE=1 torchrun --nproc-per-node 2 examples/lora_hf.py --save adapter
    TP_INVARIANT_MODE=1 torchrun --nproc-per-node 4 examples/lora_hf.py --load adapter

The model has random weights from the seed, so that the example needs no download; yours comes from from_pretrained.
Needs PEFT: pip install 'tp_invariant[peft]'.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tp_invariant as tpi
from tp_invariant.examples import train_hf
from tp_invariant.integrations.peft import register


def build_model(options: argparse.Namespace, tp_group: Any, device: torch.device) -> nn.Module:
    """This rank's part of the model, with adapters: new ones from the seed, or those of a folder."""
    model = train_hf.build_model(options, tp_group, device)
    if options.load is not None:
        config = register(LoraConfig.from_pretrained(options.load))
        return PeftModel.from_pretrained(model, options.load, is_trainable=True, config=config)
    torch.manual_seed(options.seed)  # the adapters' values come from it: the same on every rank
    return get_peft_model(
        model, register(LoraConfig(r=options.r, lora_alpha=2 * options.r, target_modules="all-linear"))
    )


def train(
    tp_group: Any, options: argparse.Namespace, device: torch.device, dp_group: DeviceMesh | None = None
) -> tuple[list[float], str]:
    """Takes options.steps steps; returns their losses, and the digest of the adapters in the end.

    With dp_group a step has options.micro_batches batches, of all its ranks together; without it has one.
    """
    model = build_model(options, tp_group, device)
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(adapters.values(), lr=options.lr, fused=device.type == "cuda")
    batches = train_hf.Batches(options, device)
    tree = None
    if dp_group is not None:
        tree = tpi.data_parallel.MicroBatchTree(adapters.values(), dp_group, options.micro_batches)
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses = []
    for step in range(options.steps):
        found = []
        optimizer.zero_grad()
        for i in range(1) if tree is None else tree.share:
            tokens, targets = batches.at(step if tree is None else step * options.micro_batches + i)
            loss = tpi.vocab_parallel_cross_entropy(model(tokens).logits, targets, tp_group=tp_group)
            loss.backward()
            if tree is not None:
                tree.add(count=1)
            found.append(loss.item())
        if dp_group is not None and tree is not None:
            tree.reduce()
            parts: list[Any] = [None] * dp_group.size()
            dist.all_gather_object(parts, found, group=dp_group.get_group())
            found = [loss for part in parts for loss in part]
        norm = tpi.clip_grad_norm_(adapters.values(), options.clip, tp_group=tp_group)
        optimizer.step()
        losses.append(sum(found) / len(found))
        if rank == 0:
            print(f"step {step:5}  loss {losses[-1]:.6f}  gradient norm {norm.item():.6f}", flush=True)
    if options.save is not None and (dp_group is None or dp_group.get_local_rank() == 0):
        model.save_pretrained(options.save)  # on every rank of tp_group: rank 0 writes
    full = tpi.testing.full_parameters(model)
    return losses, tpi.testing.digest({name: full[name] for name in adapters})


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lora_hf.py",
        description="Fine-tune a Hugging Face model by LoRA; the same bits at every degree with TP_INVARIANT_MODE=1.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--preset", choices=tuple(train_hf.PRESETS), default="qwen3-tiny", help="model and sizes, with random weights")
    add("--steps", type=int, default=10, metavar="N", help="steps of this run")
    add("--batch", type=int, default=2, metavar="N", help="windows of text in a step")
    add("--sequence-length", type=int, default=64, metavar="N", help="bytes in a window")
    add("--r", type=int, default=8, metavar="N", help="the adapters' rank")
    add("--lr", type=float, default=1e-2, metavar="X", help="AdamW's learning rate")
    add("--clip", type=float, default=1.0, metavar="X", help="the largest gradient norm")
    add("--seed", type=int, default=0, metavar="N", help="of the weights, the adapters and the batches")
    add("--dtype", choices=tuple(train_hf.DTYPES), default="float32", help="of the model; adapters are float32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes cuda where there is a GPU")
    add("--sequence-parallel", action="store_true", help="shard activations along the sequence between the layers")
    add("--dp", type=int, metavar="N", help="data parallel degree; the other ranks are tensor parallel")
    add("--micro-batches", type=int, default=4, metavar="N", help="with --dp: batches in a step, of all ranks")
    add("--save", metavar="DIR", help="write the adapters here in the end")
    add("--load", metavar="DIR", help="start from the adapters in this folder, of any degree")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as one rank of torchrun's, or alone."""
    parser = make_parser()
    options = parser.parse_args(argv)
    world = int(os.environ.get("WORLD_SIZE", "0"))
    if options.dp and (not world or world % options.dp):
        parser.error(f"--dp {options.dp} needs a number of ranks that it divides: torchrun --nproc-per-node 4 ..")
    cuda = torch.cuda.is_available() if options.device == "auto" else options.device == "cuda"
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    tp_group: Any = None
    dp_group, degree = None, "TP=1"
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")
        tp_group, degree = dist.group.WORLD, f"TP={dist.get_world_size()}"
        if options.dp:
            sizes = options.dp, dist.get_world_size() // options.dp
            mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "tp"))
            tp_group, dp_group, degree = mesh["tp"], mesh["dp"], f"DP={sizes[0]} x TP={sizes[1]}"
    try:
        _, digest = train(tp_group, options, device, dp_group)
        if tp_group is None or dist.get_rank() == 0:
            print(f"{degree}: adapters {digest}")
    finally:
        if tp_group is not None:
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
