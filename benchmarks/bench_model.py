"""Whole training steps of a Hugging Face model, stock and TP-invariant: eager, compiled layer by layer, in graphs.

    python benchmarks/bench_model.py --preset qwen3-0.6b --tokens 4096
    torchrun --nproc-per-node 4 benchmarks/bench_model.py --preset qwen3-8b --layers 8 --tokens 8192 2048

A step is forward, loss, backward, clipping and fused AdamW, in bf16, with random weights and tokens. At TP=1 stock is
the model as transformers made it, with its SDPA, torch's clipping and the loss that transformers computes; at other
degrees, and in graphs, it is the same sharded model with the mode off. Both models take steps in turn; those compiled
as a whole (reduce-overhead) one after the other. A time is the slowest rank's median, from one synchronisation to the
next. "host" is the time until the step's last launch, which is what limits where it is nearly the whole step;
"launches" counts the kernels, copies and fills of one step. --digest adds that of the TP-invariant model's weights
after all steps, which is the same at every degree. On a CPU (`--preset qwen3-tiny`) it shows that the program runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import tp_invariant as tpi

SIZES: dict[str, dict[str, Any]] = {
    "qwen3-tiny": dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        head_dim=16, vocab_size=256, tie_word_embeddings=True,
    ),
    "qwen3-0.6b": dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=True,
    ),
    "qwen3-8b": dict(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=False,
    ),
}  # fmt: skip
FORMS = ("eager", "compiled", "graphs", "reduce-overhead")  # the last: the whole model by torch.compile


class Trainer:
    """One side's model and optimizer. `stock` is a model without this library's layers; else `mode` sets the mode."""

    def __init__(self, options: argparse.Namespace, group: Any, device: torch.device, stock: bool, mode: bool) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        sizes = dict(SIZES[options.preset], use_cache=False)
        if options.layers:
            sizes["num_hidden_layers"] = options.layers
        torch.manual_seed(0)
        with device:
            model: nn.Module = Qwen3ForCausalLM(Qwen3Config(**sizes)).to(torch.bfloat16)
        self.stock, self.mode, self.group, self.device = stock, mode, group, device
        self.vocabulary = sizes["vocab_size"]
        with self.set_mode():
            if not stock:
                plan = {**tpi.plans.own_plan(model), "lm_head": "colwise"}
                model = tpi.parallelize(model, group, plan, sequence_parallel=options.sequence_parallel)
        self.model = model.train()
        self.layers = self.model.model.layers
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.times: list[tuple[float, float]] = []

    def set_mode(self) -> Any:
        return contextlib.nullcontext() if self.stock else tpi.set_tp_invariant_mode(self.mode)

    def loss(self, ids: Tensor) -> Tensor:
        logits = self.model(ids).logits
        if self.stock:
            return F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
        return tpi.vocab_parallel_cross_entropy(logits, ids, tp_group=self.group)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step(self, ids: Tensor) -> None:
        """One step; its times in ms, the host's and the whole, are appended to `times`."""
        self.synchronize()
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        with self.set_mode():
            self.loss(ids).backward()
            if self.stock:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            else:
                tpi.clip_grad_norm_(self.model.parameters(), 1.0, tp_group=self.group)
            self.optimizer.step()
            self.optimizer.zero_grad()
        launched = time.perf_counter()
        self.synchronize()
        self.times.append((1000 * (launched - start), 1000 * (time.perf_counter() - start)))

    def launches(self, ids: Tensor) -> int:
        if self.device.type != "cuda":
            return 0
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self.step(ids)
        return sum(event.count for event in found.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)

    def medians(self) -> list[float]:
        mine = torch.tensor([statistics.median(part) for part in zip(*self.times, strict=True)], device=self.device)
        if dist.is_initialized():
            dist.all_reduce(mine, dist.ReduceOp.MAX)
        return mine.tolist()

    @contextlib.contextmanager
    def form(self, form: str, ids: Tensor) -> Any:
        """The layers compiled or in graphs inside, as they were afterwards."""
        if form == "compiled":
            for layer in self.layers:
                layer.compile(fullgraph=True)
            try:
                yield
            finally:
                for layer in self.layers:
                    layer._compiled_call_impl = None
                torch.compiler.reset()
        elif form == "reduce-overhead":
            self.model.compile(mode="reduce-overhead")
            try:
                yield
            finally:
                self.model._compiled_call_impl = None
                torch.compiler.reset()
        elif form == "graphs":
            with self.set_mode():
                graphs = tpi.graphs.graph_layers(self.layers, lambda: self.model(ids))
            try:
                yield
            finally:
                graphs.remove()
        else:
            yield


def compare(options: argparse.Namespace, group: Any, device: torch.device, form: str, tokens: int) -> None:
    """One line for this form and number of tokens."""
    degree = 1 if group is None else dist.get_world_size(group)
    trainers = {
        "stock": Trainer(options, group, device, stock=degree == 1 and form != "graphs", mode=False),
        "ours": Trainer(options, group, device, stock=False, mode=True),
    }
    torch.manual_seed(tokens)
    ids = torch.randint(trainers["ours"].vocabulary, (options.batch, tokens // options.batch), device=device)
    launches = {}
    # where a graph breaks in ours, torch.compile leaves the same code of transformers' uncompiled in stock, too
    for names in (["stock"], ["ours"]) if form == "reduce-overhead" else (["stock", "ours"],):
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(trainers[name].form(form, ids))
                for _ in range(options.warmup):  # compiles, plans, warms up
                    trainers[name].step(ids)
                launches[name] = trainers[name].launches(ids)
                trainers[name].times.clear()
            for turn in range(options.turns):
                for name in names[:: -1 if turn % 2 else 1]:
                    for _ in range(options.steps):
                        trainers[name].step(ids)
    (stock_host, stock), (host, ours) = trainers["stock"].medians(), trainers["ours"].medians()
    digest = tpi.testing.digest(tpi.testing.full_parameters(trainers["ours"].model)) if options.digest else ""
    if group is None or dist.get_rank(group) == 0:
        print(
            f"{tokens:6} tokens  {form:8}  stock {stock:7.2f} (host {stock_host:7.2f}, {launches['stock']:5} launches)"
            f"  ours {ours:7.2f} (host {host:7.2f}, {launches['ours']:5} launches)  ours / stock {ours / stock:.3f}"
            f"  {digest[:16]}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=tuple(SIZES), default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="other than the preset's")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--batch", type=int, default=2, help="sequences that the tokens are in")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["eager"])
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--digest", action="store_true", help="of the weights in the end; takes seconds for billions")
    parser.add_argument("--steps", type=int, default=4, help="steps of each side in a turn")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=3)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, group = torch.device("cpu"), None
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")
        group = dist.group.WORLD
    import transformers

    if group is None or dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if cuda else "CPU"
        degree = 1 if group is None else dist.get_world_size()
        print(
            f"{options.preset}, TP={degree} on {name}, torch {torch.__version__}, transformers "
            f"{transformers.__version__}; ms a step, {Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}",
            flush=True,
        )
    for form in options.forms:
        for tokens in options.tokens:
            compare(options, group, device, form, tokens)
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
