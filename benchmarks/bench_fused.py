"""Launches and host time of a decoder layer's MLP and attention, with the forwards that parallelize gives them.

    python benchmarks/bench_fused.py                   # sizes of Qwen3-0.6B, few tokens, so that the host is behind
    python benchmarks/bench_fused.py --tokens 4096     # and what the GPU needs
    python benchmarks/bench_fused.py --operators       # on a GPU: each operator beside those in its place

Three forms of each block of a random model of transformers, forward and backward, at TP=1:

    transformers    the model as it is
    operators       parallelized, with torch's operators for activations and rotations, as before
    fused           parallelized: gated_activation and rotary_embedding

kernels are counted by torch.profiler, on a GPU alone; nodes are those of the autograd graph. Host times are the least
of many runs in turn. Without a GPU sizes are small, and operators compute on the host: times say little there.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from gpu_timing import gpu_microseconds
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import tp_invariant as tpi
from tp_invariant.hugging_face import fused

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
    return {
        "transformers": build(),
        "operators": tpi.parallelize(build(), None),
        "fused": tpi.parallelize(build(), None),
    }


def former_code() -> Any:
    """A context in which transformers' own forwards and functions run, with all else as before."""
    return mock.patch.object(fused, "is_tp_invariant_mode_enabled", lambda: False)


def without_fused(run: Callable[[], Tensor]) -> Tensor:
    with former_code():
        return run()


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


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """As models of transformers rotate."""

    def rotate_half(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return [(x * cos) + (rotate_half(x) * sin) for x in (q, k)]


def operators() -> None:
    """Several operators and the one in their place, forward, and forward with backward: the GPU's time and the host's.

    Of an addition and a norm the norm is this library's in both.
    """

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE).to(torch.bfloat16)

    norm = tpi.ParallelNorm(4096, device=DEVICE, dtype=torch.bfloat16)

    def rotations(tokens: int) -> list[Tensor]:
        return [made(1, tokens, heads, 128).transpose(1, 2) for heads in (32, 8)]

    cases: dict[str, tuple[Any, Any, Callable[[int], tuple[list[Tensor], list[Tensor]]]]] = {
        "silu(gate) * up, 12288": (
            lambda g, u: [F.silu(g) * u],
            lambda g, u: [tpi.gated_activation(g, u)],
            lambda t: ([made(t, 12288), made(t, 12288)], []),
        ),
        "gelu(gate) * up, 12288": (
            lambda g, u: [F.gelu(g, approximate="tanh") * u],
            lambda g, u: [tpi.gated_activation(g, u, "gelu_tanh")],
            lambda t: ([made(t, 12288), made(t, 12288)], []),
        ),
        "rotation, 32 + 8 heads of 128": (
            rotated,
            lambda *args: [*tpi.rotary_embedding(*args)],
            lambda t: (rotations(t), [made(1, t, 128), made(1, t, 128)]),
        ),
        "addition and RMSNorm, 4096": (
            lambda x, r: [norm(s := x + r), s],
            lambda x, r: [*norm(x, r)],
            lambda t: ([made(t, 4096), made(t, 4096)], []),
        ),
    }
    print(f"bf16, {torch.cuda.get_device_name()}; GPU us at 4096 tokens and host us at 4, torch's -> one operator")
    print(f"{'':32}{'GPU, forward':>16}{'and backward':>16}{'host, forward':>16}{'and backward':>16}")
    for name, (torchs, ours, data) in cases.items():
        times = []
        for tokens, measure in ((4096, gpu_median), (4, host_least)):
            given, constants = data(tokens)
            leaves, grads = [x.requires_grad_() for x in given], [torch.ones_like(x) for x in given]
            for run in (forward, forward_and_backward):
                pair = [functools.partial(run, call, leaves, constants, grads) for call in (torchs, ours)]
                times.append(" -> ".join(f"{measure(one):.0f}" for one in pair))
        print(f"{name:32}" + "".join(f"{text:>16}" for text in times))


def forward(call: Any, leaves: list[Tensor], constants: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    outputs: list[Tensor] = call(*leaves, *constants)
    return outputs


def forward_and_backward(call: Any, leaves: list[Tensor], constants: list[Tensor], grads: list[Tensor]) -> None:
    outputs = call(*leaves, *constants)
    torch.autograd.backward(outputs, grads[: len(outputs)])
    for leaf in leaves:
        leaf.grad = None


def gpu_median(run: Callable[[], object]) -> float:
    return sorted(gpu_microseconds(run, 11))[5]


def host_least(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(10):
            run()
        best = min(best, (time.perf_counter() - start) / 10)
        torch.cuda.synchronize()
    return 1e6 * best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--operators", action="store_true")
    args = parser.parse_args()
    with tpi.set_tp_invariant_mode(True):
        if args.operators:
            return operators()
        found = {form: blocks(model, args.tokens) for form, model in forms().items()}
        runs = {(block, form): passes(*found[form][block]) for form in found for block in found[form]}
        for block, form in runs:
            if form != "fused":
                runs[block, form] = functools.partial(without_fused, runs[block, form])
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
