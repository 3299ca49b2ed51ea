"""Trains a Qwen3 or Llama model of Hugging Face's on real text, at any tensor-parallel degree, with the same bits.

    TP_INVARIANT_MODE=1 torchrun --nproc-per-node 2 examples/train_hf.py --steps 20 --save ckpt --digest-log a.log
    TP_INVARIANT_MODE=1 torchrun --nproc-per-node 4 examples/train_hf.py --steps 20 --resume ckpt --digest-log a.log
    TP_INVARIANT_MODE=1 python examples/train_hf.py --steps 40 --digest-log b.log
    tp-invariant diff a.log b.log

The last line says "identical for 40 steps". With TP_INVARIANT_MODE=0 it names the first step and tensor that differ.
Weights come from the seed, batches from the seed and the step's number, so a resumed run goes on where the other
stopped. With data parallel ranks too, which fully_shard spreads the weights over, it prints one digest of the weights,
at 1 x 4, 2 x 2 and 4 x 1 ranks (data x tensor parallel):

    for dp in 1 2 4; do TP_INVARIANT_MODE=1 torchrun --nproc-per-node 4 examples/train_hf.py --dp $dp --steps 5; done

Needs transformers and safetensors: pip install 'tp_invariant[hf]'.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import statistics
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import tp_invariant as tpi
from tp_invariant.plans import own_plan

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

TINY = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    vocab_size=256,
)
# preset: (model type, what of its configuration differs from transformers' defaults)
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-tiny": ("qwen3", dict(TINY, tie_word_embeddings=True)),
    "llama-tiny": ("llama", TINY),
    "qwen3-0.6b": (
        "qwen3",
        dict(
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            tie_word_embeddings=True,
        ),
    ),
    "llama-3.2-1b": (
        "llama",
        dict(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            vocab_size=128256,
            tie_word_embeddings=True,
        ),
    ),
}


def build_model(options: argparse.Namespace, tp_group: Any, device: torch.device) -> nn.Module:
    """The full model from the seed, the same on every rank, then this rank's part of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = PRESETS[options.preset]
    config = AutoConfig.for_model(kind, **sizes, use_cache=False)
    torch.manual_seed(options.seed)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[options.dtype])
    # its own plan gathers the logits; left sharded, no rank ever holds them for the whole vocabulary
    plan = {**own_plan(model), "lm_head": "colwise"}
    return tpi.parallelize(model, tp_group, plan, sequence_parallel=options.sequence_parallel).train()


def build_optimizer(model: nn.Module, options: argparse.Namespace, device: torch.device) -> torch.optim.Optimizer:
    """AdamW, in the fastest form whose bits do not depend on how a parameter is cut. On a CPU the fused one's do."""
    return torch.optim.AdamW(model.parameters(), lr=options.lr, fused=device.type == "cuda")


def read_text(limit: int = 1_000_000) -> bytes:
    """The sources of Python's own standard library, the first `limit` bytes of them."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if len(text) < 100_000:
        raise FileNotFoundError(f"the text is the sources of Python's library, but {folder} holds no .py sources")
    return bytes(text[:limit])


class Batches:
    """Random windows of the sources of Python's library, as bytes; a step's depend on the seed and its number alone."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.text = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8).long()
        self.options, self.device = options, device

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """(tokens, targets), both [B, S]; the targets are the bytes that follow."""
        batch, length = self.options.batch, self.options.sequence_length
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + step)
        starts = torch.randint(len(self.text) - length, (batch, 1), generator=generator)
        windows = self.text[starts + torch.arange(length + 1)].to(self.device)
        return windows[:, :-1], windows[:, 1:].contiguous()


def train(tp_group: Any, options: argparse.Namespace, device: torch.device) -> tuple[int, list[float]]:
    """Takes options.steps steps; returns the number of the step after the last, and each step's seconds."""
    model = build_model(options, tp_group, device)
    optimizer = build_optimizer(model, options, device)
    first = 0
    if options.resume is not None:
        extra = tpi.checkpoint.load(options.resume, model, optimizer)
        first = extra["step"]
        torch.set_rng_state(extra["rng"])
    log = None if options.digest_log is None else tpi.DigestLog(options.digest_log, model, tp_group=tp_group)
    batches = Batches(options, device)
    graphed = contextlib.ExitStack()  # graphs must go before the process group does
    if options.graph_layers:
        graphed.callback(tpi.graphs.graph_layers(model.model.layers, lambda: model(batches.at(first)[0])).remove)
    with graphed:
        return _train(first, model, optimizer, batches, log, tp_group, options)


def _train(
    first: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    log: tpi.DigestLog | None,
    tp_group: Any,
    options: argparse.Namespace,
) -> tuple[int, list[float]]:
    rank = 0 if tp_group is None else dist.get_rank(tp_group)
    seconds = []
    for step in range(first, first + options.steps):
        start = time.perf_counter()
        tokens, targets = batches.at(step)
        loss = tpi.vocab_parallel_cross_entropy(model(tokens).logits, targets, tp_group=tp_group)
        optimizer.zero_grad()
        loss.backward()
        norm = tpi.clip_grad_norm_(model.parameters(), options.clip, tp_group=tp_group)
        optimizer.step()
        shown = f"step {step:5}  loss {loss.item():.6f}  gradient norm {norm.item():.6f}"  # waits for the device
        seconds.append(time.perf_counter() - start)
        if rank == 0:
            print(f"{shown}  {1000 * seconds[-1]:.1f} ms", flush=True)
        if log is not None:
            log.write(step, loss=loss, gradient_norm=norm)
        done = step + 1
        if options.save is not None and (done == first + options.steps or (done - first) % options.save_every == 0):
            extra = {"step": done, "rng": torch.get_rng_state()}
            tpi.checkpoint.save(options.save, model, optimizer, extra=extra)
    if log is not None:
        log.close()
    return first + options.steps, seconds


def train_fully_sharded(mesh: DeviceMesh, options: argparse.Namespace, device: torch.device) -> str:
    """The same over a mesh with dims dp and tp, in micro-batches; returns the digest of the weights in the end."""
    model = build_model(options, mesh["tp"], device)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh["dp"], shard_placement_fn=tpi.fsdp_placement)
    tpi.data_parallel.fix_reduction_order(model)
    optimizer = build_optimizer(model, options, device)
    tree = tpi.data_parallel.MicroBatchTree(model.parameters(), mesh["dp"], options.micro_batches)
    batches = Batches(options, device)
    for step in range(options.steps):
        losses = []
        optimizer.zero_grad()
        for i in tree.share:
            tokens, targets = batches.at(step * options.micro_batches + i)
            logits = model(tokens).logits
            loss = tpi.vocab_parallel_cross_entropy(logits, targets, tp_group=mesh["tp"], reduction="sum")
            loss.backward()
            tree.add(count=targets.numel())
            losses.append(loss.detach())
        tree.reduce()
        norm = tpi.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        everyones = [torch.stack(losses) for _ in range(mesh["dp"].size())]
        dist.all_gather(everyones, torch.stack(losses), group=mesh["dp"].get_group())
        mean = torch.stack(everyones, dim=1).sum() / (options.micro_batches * targets.numel())  # in their order
        if mesh.get_rank() == 0:
            print(f"step {step:5}  loss {mean.item():.6f}  gradient norm {norm.item():.6f}", flush=True)
    return tpi.testing.digest(tpi.testing.full_parameters(model))


# --- the command line -----------------------------------------------------------------------------------------------


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_hf.py",
        description="Train a Hugging Face model; the same bits at every degree with TP_INVARIANT_MODE=1.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--preset", choices=tuple(PRESETS), default="qwen3-tiny", help="model and sizes, with random weights")
    add("--steps", type=_positive, default=10, metavar="N", help="steps of this run")
    add("--batch", type=_positive, default=2, metavar="N", help="windows of text in a step")
    add("--sequence-length", type=_positive, default=64, metavar="N", help="bytes in a window")
    add("--lr", type=float, default=1e-3, metavar="X", help="AdamW's learning rate")
    add("--clip", type=float, default=1.0, metavar="X", help="the largest gradient norm")
    add("--seed", type=int, default=0, metavar="N", help="of the weights and the batches")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="of weights and activations")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes cuda where there is a GPU")
    add("--sequence-parallel", action="store_true", help="shard activations along the sequence between the layers")
    add("--graph-layers", action="store_true", help="on a GPU: each layer's forward and backward as a CUDA graph")
    add("--save", metavar="DIR", help="write checkpoints here: the last one stays")
    add("--save-every", type=_positive, default=1000, metavar="N", help="steps between checkpoints, besides the end")
    add("--resume", metavar="DIR", help="go on from this checkpoint, of any degree")
    add("--dp", type=_positive, metavar="N", help="data parallel degree: fully_shard, and the digest of the weights")
    add("--micro-batches", type=_positive, default=4, metavar="N", help="with --dp: batches in a step, of all ranks")
    add("--digest-log", metavar="FILE", help="append a line of digests a step, for tp-invariant diff")
    return parser


def _peak_memory(device: torch.device) -> float:
    """MiB: of the GPU what torch had allocated at most, of a CPU the process's largest size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def run(tp_group: Any, options: argparse.Namespace, device: torch.device) -> None:
    """Trains, and prints what it took on rank 0."""
    rank, world = (0, 1) if tp_group is None else (dist.get_rank(tp_group), dist.get_world_size(tp_group))
    mode = "on" if tpi.is_tp_invariant_mode_enabled() else "off"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    if rank == 0:
        print(f"{options.preset}, {options.dtype}, TP={world} on {name}, TP-invariant mode {mode}", flush=True)
    _, seconds = train(tp_group, options, device)
    peaks: list[Any] = [_peak_memory(device)]
    if world > 1:
        peaks = [None] * world
        dist.all_gather_object(peaks, _peak_memory(device), group=tp_group)
    if rank == 0:
        import transformers

        versions = f"tp_invariant {tpi.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
        print(f"{versions}, Python {sys.version.split()[0]}")
        print(f"peak memory of each rank, MiB: {', '.join(f'{peak:,.0f}' for peak in peaks)}")
        steady = seconds[1:] or seconds  # the first step compiles and warms up
        print(f"median step {1000 * statistics.median(steady):.1f} ms, without checkpoints and digests")


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as one rank of torchrun's, or alone."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.dp and (options.save or options.resume or options.graph_layers or options.digest_log):
        parser.error("--dp takes none of --save, --resume, --graph-layers and --digest-log")
    cuda = torch.cuda.is_available() if options.device == "auto" else options.device == "cuda"
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        if options.dp:
            parser.error("--dp needs ranks: torchrun --nproc-per-node 4 examples/train_hf.py --dp 2 ..")
        run(None, options, device)
        return 0
    world = int(os.environ["WORLD_SIZE"])
    if options.dp and world % options.dp:
        parser.error(f"--dp {options.dp} does not divide the number of ranks, {world}")
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        if options.dp:
            sizes = options.dp, world // options.dp
            digest = train_fully_sharded(
                init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "tp")), options, device
            )
            if dist.get_rank() == 0:
                print(f"DP={sizes[0]} x TP={sizes[1]}: weights {digest}")
        else:
            run(dist.group.WORLD, options, device)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
