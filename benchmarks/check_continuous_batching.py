"""Compares what transformers' continuous batching draws from with whole forwards on one rank, to the bit.

    python benchmarks/check_continuous_batching.py [--requests 64] [--longest 2000] [--degrees 1,2,4] [FAMILY ..]

Small models with random weights; requests of random lengths, a third of which begin alike, arrive in two random orders
and at random times, with two budgets of tokens a step; every eighth prompt has three completions, drawn. A line for
each: how many rows of logits have the bytes of the row that one whole forward of the text gives, on one rank without a
cache, with the mode on. Lines with the mode off are the control.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import tp_invariant as tpi
from tp_invariant.testing import run_ranks

VOCABULARY = 256
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "mistral": dict(sliding_window=24),
    "gemma2": dict(sliding_window=24, attn_implementation="eager"),
    "gemma3_text": dict(sliding_window=24),
    "qwen3_moe": dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=24),
}


def build(family: str, dtype: torch.dtype, longest: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    own = dict(FAMILIES[family])
    implementation = own.pop("attn_implementation", "sdpa" if family != "gpt_oss" else "eager")
    config = AutoConfig.for_model(family, **{**SIZES, **own, "max_position_embeddings": 2 * longest})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.08 if parameter.dim() > 1 else 1 + 0.1 * noise)
    return model.eval()


def prompts(count: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    made = [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    beginning = torch.randint(2, VOCABULARY, (longest // 4,), generator=generator).tolist()
    return [(beginning + prompt)[:longest] if i % 3 == 0 else prompt for i, prompt in enumerate(made)]


def bytes_of(rows: Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for row in rows.float().cpu()]


def serve(tp_group: Any, family: str, options: Any, mode: bool, seed: int, budget: int) -> tuple[dict, set, float]:
    """Every completion's tokens, the bytes of all rows of logits, and the seconds that it took."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    rows: set[bytes] = set()
    with tpi.set_tp_invariant_mode(mode):
        mesh = DeviceMesh.from_group(tp_group, options.device, mesh_dim_names=("tp",))
        model = tpi.parallelize(build(family, options.dtype, options.longest).to(options.device), mesh)
        model.register_forward_hook(lambda module, args, output: rows.update(bytes_of(output.logits[0])))
        texts, began = {}, time.perf_counter()
        requests = list(enumerate(prompts(options.requests, options.longest)))
        random.Random(seed).shuffle(requests)
        for copies in (1, 3):  # the number of completions is the engine's, not a request's
            chosen = [(str(i), prompt) for i, prompt in requests if (i % 8 == 0) == (copies == 3)]
            manager = model.init_continuous_batching(
                GenerationConfig(
                    max_new_tokens=options.new, do_sample=copies > 1, num_return_sequences=copies, eos_token_id=-1,
                    pad_token_id=0,
                ),
                ContinuousBatchingConfig(
                    num_blocks=options.requests * options.longest // 16, max_batch_tokens=budget, page_size=16, seed=3
                ),
            )  # fmt: skip
            manager.start()
            try:
                waits = random.Random(seed)
                for name, prompt in chosen:
                    manager.add_request(prompt, request_id=name)
                    if manager.is_tp_driver and waits.random() < 0.3:
                        time.sleep(waits.random())
                count = 0
                while count < len(chosen) * copies:
                    running = manager.is_running()  # before: rank 0 may end the engine while results lie here
                    result = manager.get_result(timeout=1)
                    if result is None and not running:
                        raise RuntimeError(f"the engine ended after {count} of {len(chosen) * copies} completions")
                    if result is not None and result.is_finished():
                        if result.error is not None:
                            raise RuntimeError(result.error)
                        texts[result.request_id] = result.generated_tokens
                        count += 1
            finally:
                manager.stop(block=True, timeout=60)
                manager.destroy()
        return texts, rows, time.perf_counter() - began


def whole_forwards(tp_group: Any, family: str, options: Any, texts: dict) -> dict[str, list[bytes]]:
    expected, given = {}, prompts(options.requests, options.longest)
    with tpi.set_tp_invariant_mode(True), torch.no_grad():
        model = tpi.parallelize(build(family, options.dtype, options.longest).to(options.device), tp_group)
        for name, text in texts.items():
            prompt = given[int(name.partition("__")[0])]
            ids = torch.tensor([prompt + text], device=options.device)
            expected[name] = bytes_of(model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1])
    return expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--longest", type=int, default=2000, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=10, help="tokens of a completion")
    parser.add_argument("--degrees", default="1,2,4")
    parser.add_argument("--dtype", default="float32", help="bfloat16 may hide differences of windows on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of all ranks")
    options = parser.parse_args()
    options.dtype = getattr(torch, options.dtype)
    budgets = max(64, options.longest // 8), max(64, 2 * options.longest)

    def count(family: str, degree: int, mode: bool, seed: int) -> None:
        ran = run_ranks(serve, degree, family, options, mode, seed, budgets[seed], device=options.device, timeout=3600)
        texts = ran[0][0]
        if differ := sorted(name for name in texts for text, _, _ in ran if text[name] != texts[name]):
            raise RuntimeError(f"{family} at TP={degree}: the ranks have different texts of {', '.join(differ)}")
        (expected,) = run_ranks(whole_forwards, 1, family, options, texts, device=options.device, timeout=3600)
        rows = [row for one in expected.values() for row in one]
        equal = min(sum(row in drawn for row in rows) for _, drawn, _ in ran)
        print(
            f"{family:12} mode {'on ' if mode else 'off'} TP={degree} order {seed} {budgets[seed]:5} tokens a step: "
            f"{equal} of {len(rows)} rows, {len(texts)} completions, {max(s for *_, s in ran):.0f} s",
            flush=True,
        )

    # by degree, so that the ranks are all that there are: torch names a group of some after its ranks alone
    for degree in sorted(map(int, options.degrees.split(","))):
        for family in options.families:
            for seed in (0, 1):
                count(family, degree, True, seed)
            if degree == 1:
                count(family, degree, False, 0)


if __name__ == "__main__":
    main()
