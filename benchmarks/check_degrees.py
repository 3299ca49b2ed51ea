"""Steps of a model with layers of Qwen3-8B's sizes at several degrees: one digest of norms and parameters.

    python benchmarks/check_degrees.py --layers 8 --tokens 8192   # on eight GPUs
    TP_INVARIANT_RANKS_SHARE_GPUS=1 python benchmarks/check_degrees.py --vocabulary 16384   # 8 ranks, one GPU, gloo
    python benchmarks/check_degrees.py --preset qwen3-tiny --tokens 64 --layouts 1x1 1x2 1x4 2x2   # on CPUs

A layout DPxTP has DP data-parallel replicas of TP ranks each, with sequence parallelism; every layout takes the same
micro-batches of random tokens. Each layout also takes one step with the mode off. That is the control, in which each TP
degree must have a digest of its own, and the norm of the first step's gradients must be that of the mode on within 1%.
The last line is `one digest in N layouts: HEX`; else the exit status is 1. Needs transformers: pip install
'tp_invariant[hf]'.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from typing import Any

import torch
from bench_model import SIZES
from torch.distributed.device_mesh import init_device_mesh

import tp_invariant as tpi
from tp_invariant.testing import digest, gpu_ranks, run_ranks

MICRO_BATCHES = 4


def train(world: Any, dp: int, tp: int, options: argparse.Namespace, mode: bool) -> tuple[str, float, float]:
    """The digest of norms and whole parameters, the first step's norm, the seconds of all steps."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {**SIZES[options.preset], "num_hidden_layers": options.layers, "use_cache": False}
    sizes["vocab_size"] = options.vocabulary or sizes["vocab_size"]
    config = Qwen3Config(**sizes)
    torch.manual_seed(0)
    with tpi.set_tp_invariant_mode(mode), torch.device(options.device):
        mesh = init_device_mesh(options.device, (dp, tp), mesh_dim_names=("dp", "tp"))
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
        model = tpi.parallelize(model, mesh=mesh, sequence_parallel=tp > 1)
        tree = tpi.data_parallel.MicroBatchTree(model.parameters(), mesh=mesh, micro_batches=MICRO_BATCHES)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        count, seen, began = options.tokens // MICRO_BATCHES, list[Any](), time.perf_counter()
        for step in range(options.steps if mode else 1):
            for number in tree.share:
                generator = torch.Generator("cpu").manual_seed(step * MICRO_BATCHES + number)
                ids = torch.randint(config.vocab_size, (1, count), generator=generator, device="cpu").to(options.device)
                logits = model(ids).logits
                loss = tpi.vocab_parallel_cross_entropy(logits, ids, tp_group=mesh["tp"], reduction="none").sum()
                loss.backward()
                tree.add(count=count)
            tree.reduce()
            seen.append(tpi.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
        first = seen[0].item()
        seconds = time.perf_counter() - began
        return digest([seen, tpi.full_state_dict(model)]), first, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=tuple(SIZES), default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, help="other than the preset's")
    parser.add_argument("--tokens", type=int, default=2048, help="of a step; 4 micro-batches share them")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layouts", nargs="+", default=["1x1", "1x2", "1x4", "1x8", "2x4", "4x2"], metavar="DPxTP")
    options = parser.parse_args()
    options.device = "cuda" if gpu_ranks() else "cpu"
    layouts = [tuple(map(int, text.split("x"))) for text in options.layouts]
    digests: dict[bool, set[str]] = {True: set(), False: set()}
    norms = []
    for dp, tp in sorted(layouts, key=math.prod):  # a pool of ranks grows, and a mesh is of all of them
        for mode, found in digests.items():
            ranks = run_ranks(train, dp * tp, dp, tp, options, mode, device=options.device, timeout=1800)
            found |= {rank[0] for rank in ranks}  # more than one where ranks differ
            norms.append(ranks[0][1])
            print(
                f"mode {'on ' if mode else 'off'} dp{dp} tp{tp}  digest {ranks[0][0][:16]}  norm {ranks[0][1]:.6f}  "
                f"{ranks[0][2]:.0f} s",
                flush=True,
            )
    on, off, degrees = digests[True], digests[False], len({tp for _, tp in layouts})
    if len(on) > 1 or len(off) < degrees or max(norms) > 1.01 * min(norms):
        print(f"{len(on)} digests with the mode on; with it off {len(off)} at {degrees} TP degrees; norms {norms}")
        return 1
    print(f"one digest in {len(layouts)} layouts: {on.pop()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
