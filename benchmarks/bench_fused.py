"""Launches and host time of a decoder layer's MLP and attention, with the forwards that parallelize gives them.

    python benchmarks/bench_fused.py                   # sizes of Qwen3-0.6B, few tokens, so that the host is behind
    python benchmarks/bench_fused.py --tokens 4096     # and what the GPU needs

Three forms of each block of a random model of transformers, forward and backward, at TP=1:

    transformers    the model as it is
    operators       parallelized, with torch's operators for activations and rotations, as before
    fused           parallelized: gated_activation and rotary_embedding

kernels are counted by torch.profiler, on a GPU alone; nodes are those of the autograd graph. Host times are the least
of many runs in turn. Without a GPU sizes are small, and operators compute on the host: times say little there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from gpu_timing import gpu_microseconds
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import tp_invariant as tpi
from tp_invariant.conversion import convert

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def build() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    if not CUDA:
        sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    torch.manual_seed(0)
    config = Qwen3Config(**sizes, vocab_size=96, num_hidden_layers=1, attn_implementation="sdpa")
    return Qwen3ForCausalLM(config).to(DEVICE, torch.bfloat16).train()


def forms() -> dict[str, Any]:
    without = mock.patch.multiple(
        convert, install_gated_blocks=lambda model: None, install_rotary_forwards=lambda model: None
    )
    with without:
        operators = tpi.parallelize(build(), None)
    return {"transformers": build(), "operators": operators, "fused": tpi.parallelize(build(), None)}


def blocks(model: Any, tokens: int) -> dict[str, tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]]:
    """By name: the module, a call of it, and its input."""
    layer, x = model.model.layers[0], torch.randn(1, tokens, model.config.hidden_size, device=DEVICE)
    x = x.to(torch.bfloat16).requires_grad_()
    positions = model.model.rotary_emb(x, torch.arange(tokens, device=DEVICE)[None])
    return {
        "MLP": (layer.mlp, layer.mlp, x),
        "attention": (
            layer.self_attn,
            lambda h: layer.self_attn(h, position_embeddings=positions, attention_mask=None)[0],
            x,
        ),
    }


def nodes(y: Tensor) -> int:
    seen, waiting = set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return len(seen)


def passes(module: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    grad = torch.ones_like(x)

    def run() -> Tensor:
        y = call(x)
        y.backward(grad)
        x.grad = None
        for parameter in module.parameters():
            parameter.grad = None
        return y

    return run


def kernels(run: Callable[[], Tensor]) -> int:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    events = found.events() or []
    return sum(e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith("Mem") for e in events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=30)
    args = parser.parse_args()
    with tpi.set_tp_invariant_mode(True):
        found = {form: blocks(model, args.tokens) for form, model in forms().items()}
        runs = {(block, form): passes(*found[form][block]) for form in found for block in found[form]}
        host = dict.fromkeys(runs, float("inf"))
        for run in runs.values():
            run()
        for _ in range(args.runs):
            for key, run in runs.items():
                start = time.perf_counter()
                for _ in range(5):
                    run()
                host[key] = min(host[key], (time.perf_counter() - start) / 5)
                if CUDA:
                    torch.cuda.synchronize()
        print(f"{args.tokens} tokens, forward and backward, {torch.cuda.get_device_name() if CUDA else 'CPU'}")
        print(f"{'':24}{'nodes':>8}{'kernels':>9}{'host us':>9}{'GPU us':>8}")
        for (block, form), run in sorted(runs.items(), key=lambda item: item[0][0]):
            launched = kernels(run) if CUDA else "-"
            gpu = f"{sorted(gpu_microseconds(run, 9))[4]:.0f}" if CUDA else "-"
            print(f"{block:11}{form:13}{nodes(run()):8}{launched:>9}{1e6 * host[block, form]:9.0f}{gpu:>8}")


if __name__ == "__main__":
    main()
