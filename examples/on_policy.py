"""Reinforcement learning whose sampler and trainer agree to the bit, at different tensor-parallel degrees.

    TP_INVARIANT_MODE=1 torchrun --nproc-per-node 2 examples/on_policy.py --sampler-tp 2 --trainer-tp 1

GRPO on a task that a program verifies: write letters. The policy is a small Qwen3 with random weights
over bytes. Each step the trainer's weights are handed to the sampler in memory (`tpi.hand_over`). The sampler writes
texts by keyed draws (`tpi.sampling.KeyedDraws`), and the trainer scores them again (`tpi.token_log_probs`). With the
mode on both compute the same bits, so every importance ratio is exactly 1; with TP_INVARIANT_MODE=0 they differ.

The ranks that are left over share the micro-batches of a step (data parallelism), here 2 ranks at TP=1. Weights and
texts have one digest at every --sampler-tp, --trainer-tp and number of ranks. `--sampler vllm` draws by vLLM instead,
in processes of its own (one rank of the trainer, a folder of weights for each step): its texts are the same, too.

    python examples/on_policy.py --draw on_policy.png on.jsonl off.jsonl    # after two runs with --record
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

import tp_invariant as tpi

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
END = 0  # the byte that ends a text, and that pads


class Text(NamedTuple):
    """What the sampler has written: token ids, and the log-probability of each that is not the prompt's."""

    prompt: list[int]
    written: list[int]
    log_probs: list[float]

    @property
    def reward(self) -> float:
        """The share of bytes that are letters."""
        return sum(chr(byte).isascii() and chr(byte).isalpha() for byte in self.written) / len(self.written)


def build_model(options: argparse.Namespace, tp_group: Any, device: torch.device) -> nn.Module:
    """This rank's part of the model, whose random weights come from the seed."""
    torch.manual_seed(options.seed)
    config = Qwen3Config(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=128, tie_word_embeddings=True, eos_token_id=None,
        pad_token_id=END, bos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[options.dtype])
    return tpi.parallelize(model.to(device), tp_group)


def prompts_of(step: int, options: argparse.Namespace) -> list[tuple[str, list[int]]]:
    """The step's prompts, each as often as it has texts; and the name of each text, which its draws depend on."""
    numbers = random.Random(f"{options.seed} {step}")
    prompts = [[numbers.randrange(1, 64) for _ in range(numbers.randint(1, 6))] for _ in range(options.prompts)]
    return [
        (f"step {step}, prompt {i}, text {j}", ids) for i, ids in enumerate(prompts) for j in range(options.generations)
    ]


# --- the sampler ------------------------------------------------------------------------------------------------------


class Generate:
    """transformers' generate on a copy of the model, at a degree of its own; copies of it share the prompts."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        sizes = dist.get_world_size() // options.sampler_tp, options.sampler_tp
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("copies", "tp"))
        self.options, self.device = options, device
        self.copies, self.copy = sizes[0], mesh["copies"].get_local_rank()
        self.first = mesh["tp"].get_local_rank() == 0
        self.model: Any = build_model(options, mesh["tp"], device).eval()

    def take_weights(self, trained: nn.Module) -> None:
        tpi.hand_over(trained, self.model)

    def write(self, wanted: list[tuple[str, list[int]]]) -> list[Text]:
        own = wanted[self.copy :: self.copies]
        texts = dict(zip(range(self.copy, len(wanted), self.copies), self._write(own) if own else [], strict=True))
        merged = {number: text for of_rank in gathered(texts if self.first else {}) for number, text in of_rank.items()}
        return [merged[number] for number in range(len(wanted))]

    def _write(self, wanted: list[tuple[str, list[int]]]) -> list[Text]:
        options, names, prompts = self.options, *zip(*wanted, strict=True)
        ids, mask = left_padded(prompts, self.device)
        draws = tpi.sampling.KeyedDraws(
            options.seed, names, attention_mask=mask, temperature=options.temperature, keep_log_probs=True
        )
        config = GenerationConfig(max_new_tokens=options.tokens, pad_token_id=END, eos_token_id=END)
        with torch.no_grad():
            out = self.model.generate(ids, attention_mask=mask, generation_config=config, logits_processor=[draws])
        rows, log_probs = out[:, ids.shape[1] :].tolist(), torch.stack(draws.log_probs, dim=1).tolist()
        lengths = [row.index(END) + 1 if END in row else len(row) for row in rows]
        return [
            Text([*prompt], row[:length], probs[:length])
            for prompt, row, probs, length in zip(prompts, rows, log_probs, lengths, strict=True)
        ]


class VLLM:
    """vLLM in processes of its own, which reads the trainer's weights from a folder."""

    def __init__(self, options: argparse.Namespace, trained: nn.Module) -> None:
        from vllm import LLM

        import tp_invariant.integrations.vllm as tpi_vllm

        self.options, self.integration, self.folder = options, tpi_vllm, tempfile.mkdtemp()
        self.take_weights(trained)
        self.engine = LLM(
            self.folder,
            **tpi_vllm.engine_arguments(
                tensor_parallel_size=options.sampler_tp, dtype=options.dtype, skip_tokenizer_init=True,
                max_model_len=128, distributed_executor_backend="mp" if options.sampler_tp > 1 else "uni",
            ),
        )  # fmt: skip
        tpi_vllm.assert_active(self.engine)

    def take_weights(self, trained: Any) -> None:
        trained.save_pretrained(self.folder)
        if hasattr(self, "engine"):
            self.engine.collective_rpc("reload_weights", kwargs={"weights_path": self.folder})
            self.engine.reset_prefix_cache()

    def write(self, wanted: list[tuple[str, list[int]]]) -> list[Text]:
        options = self.options
        params = [
            self.integration.sampling_params(
                seed=options.seed, request=name, temperature=options.temperature, max_tokens=options.tokens,
                detokenize=False, stop_token_ids=[END],
            )
            for name, _ in wanted
        ]  # fmt: skip
        answers = self.engine.generate([{"prompt_token_ids": ids} for _, ids in wanted], params, use_tqdm=False)
        texts = []
        for (_, prompt), answer in zip(wanted, answers, strict=True):
            ids = [*answer.outputs[0].token_ids]
            log_probs = [at[i].logprob for i, at in zip(ids, answer.outputs[0].logprobs, strict=True)]
            texts.append(Text(prompt, ids, log_probs))
        return texts


# --- the trainer ------------------------------------------------------------------------------------------------------


def advantages_of(texts: list[Text], generations: int) -> list[float]:
    """(reward - mean) / (deviation + 1e-4) among the texts of one prompt."""
    result = []
    for start in range(0, len(texts), generations):
        rewards = [text.reward for text in texts[start : start + generations]]
        mean = sum(rewards) / generations
        deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / generations)
        result += [(r - mean) / (deviation + 1e-4) for r in rewards]
    return result


def score(model: Any, texts: list[Text], options: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    """The trainer's and the sampler's log-probability of each written token -> fp32 [tokens], twice."""
    ids, mask = left_padded([[*text.prompt, *text.written] for text in texts], device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    hidden = model.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
    written, _ = left_padded([[1] * len(text.written) for text in texts], device, width=ids.shape[1])
    at = written[:, 1:] == 1
    log_probs = tpi.token_log_probs(hidden[:, :-1][at], model.lm_head, ids[:, 1:][at], temperature=options.temperature)
    assert isinstance(log_probs, Tensor)
    sampled = torch.tensor([p for text in texts for p in text.log_probs], dtype=torch.float32, device=device)
    return log_probs, sampled


def train(options: argparse.Namespace, device: torch.device) -> tuple[float, str]:
    """Takes options.steps steps; returns the largest difference, and the digest of texts and weights."""
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = world // options.trainer_tp, options.trainer_tp
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "tp"))
    model = build_model(options, mesh["tp"], device)
    sampler = VLLM(options, model) if options.sampler == "vllm" else Generate(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=device.type == "cuda")
    texts_in_all, largest_of_all, log = [], 0.0, []
    for step in range(options.steps):
        sampler.take_weights(model)
        texts = sampler.write(prompts_of(step, options))
        texts_in_all.append([(text.prompt, text.written) for text in texts])
        advantages, tokens = advantages_of(texts, options.generations), sum(len(text.written) for text in texts)
        size = len(texts) // options.micro_batches
        tree = tpi.data_parallel.MicroBatchTree(model.parameters(), mesh["dp"], options.micro_batches)
        found = []
        optimizer.zero_grad()
        for number in tree.share:
            part = slice(number * size, (number + 1) * size)
            ours, sampled = score(model, texts[part], options, device)
            ratio = torch.exp(ours - sampled)
            weights = torch.tensor(
                [a for a, text in zip(advantages[part], texts[part], strict=True) for _ in text.written], device=device
            )
            clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
            (-torch.minimum(ratio * weights, clipped * weights).sum() / tokens).backward()
            tree.add()
            found.append(((ours - sampled).abs().max().item(), ratio.min().item(), ratio.max().item()))
        tree.reduce()
        tpi.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        differences, least, most = zip(*(each for of_rank in gathered(found) for each in of_rank), strict=True)
        reward = sum(text.reward for text in texts) / len(texts)
        log.append(dict(step=step, difference=max(differences), least=min(least), most=max(most), reward=reward))
        largest_of_all = max(largest_of_all, log[-1]["difference"])
        if rank == 0:
            print(
                f"step {step:4}  reward {reward:.4f}  ratios {min(least):.9f} to {max(most):.9f}  largest difference "
                f"{log[-1]['difference']:.3g}",
                flush=True,
            )
    if rank == 0 and options.record is not None:
        Path(options.record).write_text("".join(json.dumps(line) + "\n" for line in log))
    return largest_of_all, tpi.testing.digest([repr(texts_in_all), tpi.full_state_dict(model)])


# --- the rest ---------------------------------------------------------------------------------------------------------


def left_padded(rows: Sequence[Sequence[int]], device: torch.device, width: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and their mask, int64 [rows, width of the longest]."""
    width = width or max(map(len, rows))
    ids = torch.tensor([[END] * (width - len(row)) + [*row] for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def gathered(own: Any) -> list[Any]:
    """Every rank's object."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def draw(picture: str, logs: Sequence[str]) -> None:
    """Reward and largest difference by step, a line for each log."""
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 5), layout="constrained")
    for name in logs:
        lines = [json.loads(line) for line in Path(name).read_text().splitlines()]
        above.plot([line["reward"] for line in lines], label=Path(name).stem)
        below.plot([line["difference"] for line in lines], label=Path(name).stem)
    above.set_ylabel("reward")
    below.set(xlabel="step", ylabel="largest difference of\nlog-probabilities")
    below.set_yscale("symlog", linthresh=1e-7)
    above.legend()
    figure.savefig(picture, dpi=110)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="on_policy.py",
        description="GRPO; with TP_INVARIANT_MODE=1 the sampler's probabilities are the trainer's, to the bit.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--trainer-tp", type=int, default=1, metavar="N", help="the trainer's degree; the ranks over it share a step")
    add("--sampler-tp", type=int, default=1, metavar="N", help="the sampler's degree; its copies share the prompts")
    add("--sampler", choices=("generate", "vllm"), default="generate", help="what writes the texts")
    add("--steps", type=int, default=10, metavar="N")
    add("--prompts", type=int, default=8, metavar="N", help="in a step")
    add("--generations", type=int, default=8, metavar="N", help="texts for each prompt")
    add("--tokens", type=int, default=12, metavar="N", help="bytes in a text, at most")
    add("--micro-batches", type=int, default=4, metavar="N", help="in a step, of all data parallel ranks")
    add("--temperature", type=float, default=1.0, metavar="X")
    add("--clip", type=float, default=0.2, metavar="X", help="by which a ratio may differ from 1")
    add("--lr", type=float, default=2e-3, metavar="X", help="AdamW's learning rate")
    add("--seed", type=int, default=0, metavar="N", help="of the weights, the prompts and the draws")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="of weights and activations")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes cuda where there is a GPU")
    add("--record", metavar="FILE", help="write a line of JSON for each step")
    add("--draw", nargs="+", metavar="FILE", help="draw a picture, the first file, of the logs that follow, and end")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as one rank of torchrun's, or alone."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.draw:
        draw(options.draw[0], options.draw[1:])
        return 0
    for name in ("trainer_tp", "sampler_tp", "prompts", "generations", "tokens", "micro_batches"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: give at least 1")
    world, texts = int(os.environ.get("WORLD_SIZE", "1")), options.prompts * options.generations
    for name, degree in (("--trainer-tp", options.trainer_tp), ("--sampler-tp", options.sampler_tp)):
        if world % degree and not (options.sampler == "vllm" and name == "--sampler-tp"):
            parser.error(f"{name} {degree} does not divide the number of ranks, {world}: start torchrun with more")
    if options.sampler == "vllm" and world > 1:
        parser.error("--sampler vllm starts processes of its own: run it with python, without torchrun")
    if texts % options.micro_batches or options.micro_batches < world // options.trainer_tp:
        parser.error(f"--micro-batches must divide the step's {texts} texts, and be as many as data parallel ranks")
    cuda = torch.cuda.is_available() if options.device == "auto" else options.device == "cuda"
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    alone: dict[str, Any] = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group("nccl" if cuda else "gloo", **alone)
    try:
        largest, digest = train(options, device)
        if dist.get_rank() == 0:
            print(f"digest of texts and weights: {digest}")
            print(f"largest difference of log-probabilities: {largest:.3g}", flush=True)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
