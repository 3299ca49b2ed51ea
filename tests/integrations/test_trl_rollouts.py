"""TRL's GRPOTrainer and RLOOTrainer here: texts, losses and weights of one process at every degree."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import hf_models
import pytest
import torch
import transformers
from accelerate import state as accelerate_state
from cases import more
from meshes import init_device_mesh, mesh_or_group, shard_fully
from ranks import run_ranks

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.testing import RankError, assert_bitwise_equal

pytest.importorskip("trl", reason="the extra tp-invariant[trl] is not installed")
ENGINE = dict(
    use_transformers_continuous_batching=True,
    transformers_continuous_batching_config=dict(num_blocks=32, max_batch_tokens=64),
)
DIFFERENCE = "sampling/sampling_logp_difference/max"


def prompts(count: int = 8) -> Any:
    """Of lengths that differ."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, hf_models.VOCABULARY, (3 + i % 4,), generator=generator).tolist() for i in range(count)]
    return Dataset(InMemoryTable.from_pydict({"prompt": [" ".join(map(str, row)) for row in rows]}), fingerprint="p")


calls: list[int] = []


def even_words(completions: list[str], **others: Any) -> list[float]:
    """The reward of a text: how many of its words are even numbers. It is another on each rank but rank 0."""
    calls.append(len(completions))
    return [sum(int(word) % 2 == 0 for word in text.split()) / 8 for text in completions]


def drawn(completions: list[str], log_metric: Any, **others: Any) -> list[float]:
    """Random rewards, whose number is logged."""
    log_metric("drawn", torch.rand(()).item())
    return [reward + torch.rand(()).item() for reward in even_words(completions)]


def trained(tp_group: Any, kind: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Everything that is logged but times, the texts, and the parameters in the end."""
    import trl

    from tp_invariant.integrations import trl as ours

    options = dict(options)
    family = options.pop("family", "qwen3")
    dp, shards, fully_sharded, sampler_degree, mode, resume, beta, dtype, replayed, reward = (
        options.pop(name, default)
        for name, default in (
            ("dp", 1), ("shards", "group"), ("fully_sharded", False), ("sampler_degree", None), ("mode", True),
            ("resume", None), ("beta", 0.0), ("dtype", torch.float32), ("replayed", None),
            ("reward", even_words),
        )
    )  # fmt: skip
    seen: list[dict[str, float]] = []
    calls.clear()

    class Record(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
            seen.append({k: v for k, v in logs.items() if "time" not in k and "per_second" not in k})

    theirs, texts = replayed is not None, list(replayed or [])
    world = tp_group.size()
    tp, others = mesh_or_group(tp_group, shards), {}
    if dp > 1:
        mesh = init_device_mesh("cpu", (dp, world // dp), mesh_dim_names=("dp", "tp"))
        tp, others = mesh["tp"], {"dp_group": mesh["dp"]}

    def build(over: Any) -> Any:
        model = hf_models.build(family, dtype, num_hidden_layers=1)
        return model if theirs else tpi.parallelize(model, over)

    model = build(tp)
    if fully_sharded:
        shard_fully(model, mesh["dp"])
    if sampler_degree is not None:
        over = init_device_mesh("cpu", (world // sampler_degree, sampler_degree), mesh_dim_names=("copies", "tp"))
        others["sampler"] = build(over["tp"])
        with torch.no_grad():
            [p.zero_() for p in others["sampler"].parameters()]
    if beta and not options.pop("no_reference", False):
        others["ref_model"] = build(tp)
    base, config = (trl.GRPOTrainer, trl.GRPOConfig) if kind == "grpo" else (trl.RLOOTrainer, trl.RLOOConfig)
    base = base if theirs else getattr(ours, base.__name__)

    class Recorder(base):  # type: ignore[misc, valid-type]
        """Ours writes down the texts, and TRL's own trainer, which draws others, is given them."""

        def _generate_single_turn(self, *args: Any, **options: Any) -> Any:
            if theirs:
                written = texts.pop(0)
                return (written, None) if kind == "grpo" else written
            written = super()._generate_single_turn(*args, **options)
            texts.append(written[0] if kind == "grpo" else written)
            return written

    given: dict[str, Any] = dict(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        num_generations=4, max_completion_length=8, learning_rate=1e-2, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, bf16=False,
        optim="adamw_torch", log_completions=False, beta=beta,
    )  # fmt: skip
    try:
        with mock.patch.dict(os.environ, CI="1"), tpi.set_tp_invariant_mode(mode):  # CI: TRL reports no use of it
            trainer = Recorder(
                model, reward_funcs=reward, args=config(**{**given, **options}), train_dataset=prompts(),
                eval_dataset=prompts(2), callbacks=[Record()], processing_class=hf_models.tokenizer(), **others,
            )  # fmt: skip
            trainer.train(resume_from_checkpoint=resume)
            parameters = {} if theirs else testing.full_parameters(trainer.model)
        logged = [*trainer._logs["prompt"]], [*trainer._logs["completion"]], [*trainer._logs["advantages"]]
        return {"logs": seen, "logged": logged, "texts": texts, "parameters": parameters, "calls": len(calls)}
    finally:
        accelerate_state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate_state.GradientState._reset_state()


def run_on(degree: int, kind: str, folder: Path, **options: Any) -> list[Any]:
    return run_ranks(trained, degree, kind, folder, options)


def compare(runs: list[Any], one: dict[str, Any]) -> None:
    for got in runs:
        assert_bitwise_equal({**got, "calls": 0}, {**one, "calls": 0})
    assert [got["calls"] > 0 for got in runs] == [True] + [False] * (len(runs) - 1)


@pytest.mark.parametrize("kind", ["grpo", more("rloo")])
def test_steps_have_the_bits_of_one_process(kind, tmp_path, pytestconfig):
    """At dp x tp = 2 x 2, by fully_shard, by transformers' engine, by a sampler of another degree; and the mode off."""
    (one,) = run_on(1, kind, tmp_path)
    steps = [log for log in one["logs"] if "loss" in log]
    assert len(steps) == 3 and {log[DIFFERENCE] for log in steps} == {0.0}
    assert len({log["reward"] for log in steps}) > 1 and any(log["grad_norm"] > 0 for log in steps)
    ways: dict[str, tuple[int, dict[str, Any]]] = {
        "both": (4, dict(dp=2)),
        "fully": (2, dict(dp=2, fully_sharded=True)),
        "sampler": (4, dict(dp=2, sampler_degree=4)),
        "engines": (2, dict(dp=2, **ENGINE)),
        "several samplers": (4, dict(shards="mesh", sampler_degree=1)),
    }
    every = [*ways] if pytestconfig.getoption("--all-cases") else ["both", "sampler", "engines"]
    for name in every if kind == "grpo" else every[:1]:
        degree, options = ways[name]
        compare(run_on(degree, kind, tmp_path, **options), one)
    (stock,) = run_on(1, kind, tmp_path, replayed=one["texts"])
    for got, expected in zip(steps, (log for log in stock["logs"] if "loss" in log), strict=True):
        for name in ("grad_norm", "loss", "reward", "reward_std", "completions/mean_length", "num_tokens"):
            assert got[name] == pytest.approx(expected[name], rel=2e-3, abs=1e-5), name
    off = [run_on(n, kind, tmp_path, mode=False, max_steps=2)[0] for n in (1, 2)]
    assert testing.digest(off[0]["parameters"]) != testing.digest(off[1]["parameters"])
    assert max(log[DIFFERENCE] for run in off for log in run["logs"] if DIFFERENCE in log) > 0


MORE = dict(
    num_iterations=2, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4, temperature=0.7, top_p=0.9,
    top_k=20, min_p=0.01, steps_per_generation=4, max_steps=6, entropy_coef=0.01,
)  # fmt: skip


def test_more_options_and_a_run_that_goes_on(tmp_path):
    """A generation for two steps that is used twice, a reference model, evaluation; saved at TP=2, gone on at 2 x 2."""
    options = {**MORE, "beta": 0.1, "loss_type": "grpo", "save_strategy": "steps", "save_steps": 4}
    (one,) = run_on(1, "grpo", tmp_path / "one", **options)
    assert any(log.get("eval_reward") is not None for log in one["logs"])
    assert any(log.get("kl", 0.0) > 0 for log in one["logs"])
    compare(run_on(2, "grpo", tmp_path / "two", **options), one)
    resumed = run_on(4, "grpo", tmp_path / "two", dp=2, resume=str(tmp_path / "two" / "checkpoint-4"), **options)
    for got in resumed:
        assert_bitwise_equal(got["parameters"], one["parameters"])
    (without,) = run_on(1, "grpo", tmp_path / "without", **{**options, "beta": 0.0})  # the reference model counts
    assert testing.digest(without["parameters"]) != testing.digest(one["parameters"])


@pytest.mark.more
def test_random_rewards_that_are_logged_and_a_reference_model(tmp_path):
    """What rank 0's rewards draw moves no other rank's micro-batches; the reference is not compared with the sampler's.
    The best checkpoint is chosen by what the rewards log, on every rank."""
    options: dict[str, Any] = dict(
        reward=drawn, beta=0.1, max_steps=3, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_drawn",
    )  # fmt: skip
    (one,) = run_on(1, "grpo", tmp_path / "one", **options)
    assert {log[DIFFERENCE] for log in one["logs"] if "loss" in log} == {0.0}
    assert len({log["drawn"] for log in one["logs"] if "loss" in log}) == 3
    compare(run_on(2, "grpo", tmp_path / "two", dp=2, **options), one)


@pytest.mark.parametrize(
    ("family", "dtype"), [pytest.param("gemma2", torch.float32, marks=pytest.mark.more), ("mistral", torch.bfloat16)]
)
def test_other_families(family, dtype, tmp_path):
    """A cap on the logits and a window; bfloat16."""
    (one,) = run_on(1, "grpo", tmp_path, family=family, dtype=dtype, max_steps=2)
    assert {log[DIFFERENCE] for log in one["logs"] if "loss" in log} == {0.0}
    compare(run_on(2, "grpo", tmp_path, family=family, dtype=dtype, max_steps=2), one)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(beta=0.1, replayed=None, no_reference=True), "beta=0.1 needs ref_model"),
        (dict(use_vllm=True), "use_vllm=True on rank 0 is not supported, only False: pass sampler="),
        (dict(repetition_penalty=1.2), "repetition_penalty=1.2 on rank 0 is not supported"),
    ],
)
def test_what_is_refused(options, said, tmp_path):
    with pytest.raises(RankError, match=said):
        run_on(2, "grpo", tmp_path, **options)


def test_a_prompt_without_tokens_is_refused():
    from tp_invariant.integrations import trl as ours

    with pytest.raises(ValueError, match="prompt 1 of a generation has no tokens"):
        ours.GRPOTrainer.sample(mock.Mock(), [[5], []], None, {})
