"""Tokens a second of transformers' continuous batching: with the mode on, with it off, and by transformers alone.

    python benchmarks/bench_generate.py --size 0.6b --out benchmarks/results/generate
    python benchmarks/bench_generate.py --device cpu --size tiny --requests 8 --longest 32 --new 8 --rounds 1

Qwen3 with random weights, bfloat16, one GPU. Prompts of random lengths are served greedily until each has its new
tokens. transformers' own attentions that run here are each a contender; one that does not is named. Every round serves
all contenders in turn, after one that compiles; rates are medians. --cuda-graphs lets the engine capture its steps.
Writes OUT.md.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, Qwen3Config

import tp_invariant as tpi

SIZES: dict[str, dict[str, Any]] = {
    "tiny": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=16),
    "0.6b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, head_dim=128),
    "8b": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, head_dim=128),
}
STOCK = ("sdpa", "flash_attention_2", "flash_attention_3")  # its "eager" is slower than these
TEXT = dict(pad_token_id=0, bos_token_id=None, eos_token_id=None)


def build(options: argparse.Namespace, implementation: str) -> Any:
    torch.manual_seed(0)
    sizes, vocabulary = SIZES[options.size], 512 if options.size == "tiny" else 151936
    config = Qwen3Config(
        vocab_size=vocabulary, num_key_value_heads=sizes["num_attention_heads"] // 2, max_position_embeddings=8192,
        tie_word_embeddings=options.size != "8b", **sizes, **TEXT,
    )  # fmt: skip
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=implementation)
    return model.eval()


def prompts(options: argparse.Namespace) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, options.longest + 1, (options.requests,), generator=generator).tolist()
    return [torch.randint(2, 512, (length,), generator=generator).tolist() for length in lengths]


def serve(model: Any, options: argparse.Namespace) -> float:
    """Serves all prompts; new tokens a second."""
    wanted = prompts(options)
    start = time.perf_counter()
    results = model.generate_batch(
        wanted,
        generation_config=GenerationConfig(max_new_tokens=options.new, do_sample=False, **{**TEXT, "eos_token_id": -1}),
        continuous_batching_config=ContinuousBatchingConfig(
            max_batch_tokens=options.budget,
            num_blocks=options.requests * (options.longest + options.new + 256) // 256 + options.requests,
            use_cuda_graph=options.cuda_graphs,
        ),
        progress_bar=False,
    )
    took = time.perf_counter() - start
    written = [len(result.generated_tokens) for result in results.values()]
    if written != [options.new] * options.requests:
        raise RuntimeError(f"the engine wrote {sorted(set(written))} tokens for requests, not {options.new}")
    return sum(written) / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=tuple(SIZES), default="0.6b")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--longest", type=int, default=512, help="tokens of a prompt, at most")
    parser.add_argument("--new", type=int, default=128, help="tokens that each request gets")
    parser.add_argument("--budget", type=int, default=4096, help="tokens in a step of the engine, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cuda-graphs", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    ours = tpi.parallelize(build(options, "sdpa"), None)
    contenders: dict[str, tuple[Any, bool]] = {"mode on": (ours, True), "mode off": (ours, False)}
    for name in STOCK:
        try:
            contenders[f"transformers, {name}"] = build(options, name), False
        except (ImportError, ValueError) as error:
            print(f"transformers' {name} does not run here: {str(error).splitlines()[0]}")
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(options.rounds + 1):
        for name, (model, mode) in [*contenders.items()]:
            with tpi.set_tp_invariant_mode(mode):
                try:
                    rate = serve(model, options)
                except RuntimeError as error:
                    print(f"{name} does not run here: {str(error).splitlines()[0]}")
                    del contenders[name], rates[name]
                    continue
            print(f"round {turn}, {name}: {rate:,.0f} tokens a second", flush=True)
            if turn:  # the first compiles
                rates[name].append(rate)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    where = torch.cuda.get_device_name() if options.device == "cuda" else "a CPU"
    lines = [
        f"`python benchmarks/bench_generate.py --size {options.size} --requests {options.requests} --longest "
        f"{options.longest} --new {options.new} --budget {options.budget}{' --cuda-graphs' * options.cuda_graphs}`, "
        f"bfloat16, {where}, torch {torch.__version__}, Triton {triton.__version__}, transformers "
        f"{transformers.__version__}.",
        "",
        "| | tokens a second | mode on over it |",
        "| --- | --- | --- |",
        *(f"| {name} | {rate:,.0f} | {medians['mode on'] / rate:.2f} |" for name, rate in medians.items()),
    ]
    print("\n".join(lines))
    if options.out:
        options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
