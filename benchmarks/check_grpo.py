"""Five steps of TRL's GRPO at the sizes of Qwen3: one digest of texts, losses and weights at every degree.

    python benchmarks/check_grpo.py --size 0.6b
    torchrun --nproc-per-node 2 benchmarks/check_grpo.py --size 0.6b --rollouts engine --tp 2
    torchrun --nproc-per-node 2 benchmarks/check_grpo.py --device cpu                             # a small model

Random weights, bfloat16; each token is a word, and the reward is the share of words that are even numbers. The ranks
over --tp are data-parallel. --off is the control: the mode is off, so the digest differs and log-probabilities, too.
The last lines are `largest difference of log-probabilities: X` and `digest: HEX`.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen3Config
from trl import GRPOConfig

import tp_invariant as tpi
from tp_invariant.integrations.trl import GRPOTrainer

SIZES: dict[str, dict[str, Any]] = {
    "tiny": dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4),
    "0.6b": dict(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16
    ),
}
ENGINE = dict(
    use_transformers_continuous_batching=True,
    transformers_continuous_batching_config=dict(num_blocks=64, max_batch_tokens=256),
)
DIFFERENCE = "sampling/sampling_logp_difference/max"


def words(count: int) -> Any:
    """A tokenizer whose tokens are the numbers below count."""
    made = Tokenizer(models.WordLevel({str(number): number for number in range(count)}, unk_token="0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="1", pad_token="2")


def prompts(vocabulary: int) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, vocabulary, (3 + 5 * (i % 4),), generator=generator).tolist() for i in range(16)]
    return Dataset.from_dict({"prompt": [" ".join(map(str, row)) for row in rows]})


def even_words(completions: list[str], **others: Any) -> list[float]:
    return [sum(int(word) % 2 == 0 for word in text.split()) / max(1, len(text.split())) for text in completions]


class Record(transformers.TrainerCallback):
    """Everything that is logged but times."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        self.logs.append({k: v for k, v in logs.items() if "time" not in k and "per_second" not in k})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--rollouts", choices=("generate", "engine"), default="generate")
    parser.add_argument("--tp", type=int, default=1, metavar="N")
    parser.add_argument("--tokens", type=int, default=32, help="of a completion")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", default="build/check_grpo", help="the Trainer's, which it makes")
    parser.add_argument("--off", action="store_true")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    group, others = None, {}
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")
        world = dist.get_world_size()
        mesh = init_device_mesh(options.device, (world // options.tp, options.tp), mesh_dim_names=("dp", "tp"))
        group = mesh["tp"].get_group()
        if world > options.tp:
            others["dp_group"] = mesh["dp"].get_group()
    sizes = SIZES[options.size]
    config = Qwen3Config(
        num_key_value_heads=sizes["num_attention_heads"] // 2, head_dim=sizes["hidden_size"] // 8, eos_token_id=1,
        tie_word_embeddings=True, pad_token_id=2, bos_token_id=None, max_position_embeddings=4096, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    record = Record()
    with tpi.set_tp_invariant_mode(not options.off):
        arguments = GRPOConfig(
            output_dir=options.folder, max_steps=5, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            num_generations=4, max_completion_length=options.tokens, learning_rate=1e-3, logging_steps=1,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=not cuda, bf16=False, optim="adamw_torch",
            dataloader_pin_memory=False, **(ENGINE if options.rollouts == "engine" else {}),
        )  # fmt: skip
        trainer = GRPOTrainer(
            tpi.parallelize(model, group), reward_funcs=even_words, args=arguments, callbacks=[record],
            train_dataset=prompts(config.vocab_size), processing_class=words(config.vocab_size), **others,
        )  # fmt: skip
        trainer.train()
        parameters = tpi.full_state_dict(trainer.model)
    steps = [log for log in record.logs if "loss" in log]
    if local == 0:
        texts = [*trainer._logs["completion"]]  # TRL's last texts, which it keeps for its own log
        print("rewards", [step["reward"] for step in steps], "norms of gradients", [s["grad_norm"] for s in steps])
        print(f"largest difference of log-probabilities: {max(step[DIFFERENCE] for step in steps):.3g}")
        print(f"digest: {tpi.testing.digest([repr(record.logs), repr(texts), parameters])}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
