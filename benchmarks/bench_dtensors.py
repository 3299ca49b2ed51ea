"""What DTensor parameters cost: whole training steps of one model over a DeviceMesh and over its process group.

    torchrun --nproc-per-node 2 benchmarks/bench_dtensors.py --tokens 2048 8192

The model is Hugging Face's Qwen3 with the sizes of 8B and few layers. A step is forward, loss, backward,
`clip_grad_norm_` and AdamW; both models take the same steps in turn. A time is the slowest rank's median in
milliseconds. The parameters of both must have the same bits in the end. On a CPU (`--layers 1 --hidden 64`) it shows
that the program runs.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tp_invariant as tpi


def build(options: argparse.Namespace, tp_group, device: torch.device):
    """The same model for each kind of group, as ranks of it hold it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = options.hidden // 128 or 4
    config = Qwen3Config(
        hidden_size=options.hidden, intermediate_size=3 * options.hidden, num_hidden_layers=options.layers,
        num_attention_heads=heads, num_key_value_heads=max(heads // 4, 2), head_dim=options.hidden // heads,
        vocab_size=options.vocabulary, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    plan = {**tpi.plans.own_plan(model), "lm_head": "colwise"}
    return tpi.parallelize(model, tp_group, plan, sequence_parallel=options.sequence_parallel).train()


class Trainer:
    """One of the two models with its optimizer; `times` holds the parts of each step in ms."""

    def __init__(self, options, tp_group, device, optimizer):
        self.model, self.tp_group, self.device = build(options, tp_group, device), tp_group, device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **optimizer)
        self.times: list[tuple[float, ...]] = []

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def step(self, ids, timed: bool) -> None:
        if timed:
            dist.barrier()
        start = self.now()
        loss = tpi.vocab_parallel_cross_entropy(self.model(ids).logits, ids, tp_group=self.tp_group)
        loss.backward()
        middle = self.now()
        tpi.clip_grad_norm_(self.model.parameters(), 1.0)
        clipped = self.now()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = self.now()
        if timed:
            self.times.append(tuple(1000 * t for t in (end - start, middle - start, clipped - middle, end - clipped)))

    def medians(self) -> torch.Tensor:
        mine = torch.tensor([statistics.median(part) for part in zip(*self.times, strict=True)], device=self.device)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return mine.cpu()


def compare(options, group, mesh, device, tokens: int, optimizer: dict[str, bool]) -> None:
    """One line for this number of tokens and this form of AdamW."""
    trainers = [Trainer(options, tp, device, optimizer) for tp in (group, mesh)]
    torch.manual_seed(tokens)
    ids = torch.randint(options.vocabulary, (1, tokens), device=device)
    for turn in range(options.turns + 1):  # the first one compiles, plans and warms up
        for trainer in trainers if turn % 2 else trainers[::-1]:
            for _ in range(options.steps):
                trainer.step(ids, timed=turn > 0)
    plain, dtensors = (trainer.medians() for trainer in trainers)
    digests = {tpi.testing.digest(tpi.testing.full_parameters(trainer.model)) for trainer in trainers}
    assert len(digests) == 1, "the two models have other bits"
    if dist.get_rank() == 0:
        name = next((key for key, on in optimizer.items() if on), "plain")
        parts = "  ".join(
            f"{part} {b:.2f}/{a:.2f} {b / a:.3f}"
            for part, a, b in zip(("step", "layers", "clip", "AdamW"), plain.tolist(), dtensors.tolist(), strict=True)
        )
        print(f"{tokens:6} tokens  {name:8}  {parts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=6, help="steps of each model in a turn")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--sequence-parallel", action="store_true")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if cuda else "CPU"
        print(f"{dist.get_world_size()} x {name}, torch {torch.__version__}, ms with DTensors / with plain shards")
    with tpi.set_tp_invariant_mode(True):
        for tokens in options.tokens:
            for optimizer in ({"fused": True}, {"foreach": True}):
                compare(options, mesh.get_group(), mesh, device, tokens, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
