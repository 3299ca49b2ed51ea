"""vLLM's texts and log-probabilities are those of a trainer at TP=1, bit for bit; without the plugin nothing starts.

Needs vLLM, in an environment of its own: `.ci/vllm` makes it and runs these tests. A run of vLLM takes half a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tp_invariant as tpi
from tp_invariant.sampling import Draws

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("rollout.py")
SIZES = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
    head_dim=32, vocab_size=515, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=1024,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": dict(tie_word_embeddings=True, rope_parameters=LLAMA3),
    "mistral": dict(sliding_window=48),
    "qwen2": dict(hidden_size=256),  # whose heads are then of 32, the least that vLLM takes
    "gemma2": dict(sliding_window=48, query_pre_attn_scalar=32),
    "gemma3_text": dict(sliding_window=48, query_pre_attn_scalar=32),
    "granite": dict(logits_scaling=8.0, residual_multiplier=0.5, embedding_multiplier=3.0, attention_multiplier=0.1),
}
FEW, ALL = ("qwen3",), tuple(KINDS)


def model_of(kind: str, dtype: torch.dtype, seed: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]}), dtype=dtype)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=g)
            p.copy_((noise * 0.08 if p.dim() > 1 else 1 + 0.1 * noise).to(p.dtype))
    return model


def prompts(lengths: tuple[int, ...] = (37, 3, 64, 50, 11, 200)) -> list[list[int]]:
    g = torch.Generator().manual_seed(5)
    shared = torch.randint(3, 512, (48,), generator=g).tolist()  # of a prefix that is cached
    own = [torch.randint(3, 512, (n,), generator=g).tolist() for n in lengths]
    return [(shared if i % 3 == 0 else []) + ids for i, ids in enumerate(own)]


def rollout(folder: Path, *, mode: bool = True, check: bool = True, **given: Any) -> Any:
    out = folder / "texts.json"
    environment = {**os.environ, "TP_INVARIANT_MODE": str(int(mode))} | given.pop("environment", {})
    command = [sys.executable, str(PROGRAM), json.dumps(dict(given, out=str(out)))]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    finally:  # what vLLM's ranks leave where they are ended
        for left in Path("/dev/shm").glob("vllm_dist_*"):
            left.unlink(missing_ok=True)
    if not check:
        return done
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def trainers(model: Any, texts: Any, sampling: dict[str, Any]) -> tuple[list[list[int]], list[list[float]]]:
    """What a trainer at TP=1 draws at each position of the texts, and its log-probabilities of their tokens."""
    draws = Draws(**sampling)
    drawn, scored = [], []
    with tpi.set_tp_invariant_mode(True), torch.no_grad():
        for i, (prompt, (ids, _)) in enumerate(zip(prompts(), texts, strict=True)):
            logits = model(torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            positions = list(range(len(prompt), len(prompt) + len(ids)))
            drawn.append(draws.draw(logits, [i] * len(ids), positions).tolist())
            hidden = torch.eye(logits.shape[1], dtype=logits.dtype)  # scores logits as they are
            truncated = draws.top_k is not None or draws.top_p is not None
            log_probs = tpi.token_log_probs(
                logits.float(), hidden.float(), torch.tensor(ids), temperature=sampling.get("temperature", 1.0),
                support=draws.support(logits) if truncated else None,
            )  # fmt: skip
            scored.append(log_probs.tolist())
    return drawn, scored


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ALL)
def test_texts_and_log_probabilities_are_the_trainers(kind, dtype, degree, tmp_path):
    """Sampled, chunked prefill, a cached prefix; then after weights were sent twice."""
    if dtype == "bfloat16" and "sliding_window" in KINDS[kind] and kind != "gemma3_text":
        pytest.skip("windows are compared in float32")
    if os.environ.get("TESTS_OF_VLLM") != "all" and (kind not in FEW or dtype != "float32" or degree > 2):
        pytest.skip("TESTS_OF_VLLM=all runs it")
    models = [model_of(kind, getattr(torch, dtype), seed) for seed in (1, 2, 3)]
    folders = [str(tmp_path / str(i)) for i in range(len(models))]
    for model, folder in zip(models, folders, strict=True):
        model.save_pretrained(folder)
    sampling = dict(seed=7, temperature=0.8, top_p=0.95)
    found = rollout(
        tmp_path, model=folders[0], others=folders[1:], degree=degree, dtype=dtype, prompts=prompts(), sampling=sampling
    )
    texts = [[ids for ids, _ in result] for result in found]
    assert len({str(text) for text in texts}) == len(models)
    for model, result in zip(models, found, strict=True):
        drawn, scored = trainers(tpi.parallelize(model, None).eval(), result, sampling)
        assert drawn == [ids for ids, _ in result]
        assert scored == [log_probs for _, log_probs in result]


def test_stock_vllm_differs(tmp_path):
    model = model_of("qwen3", torch.float32, 1)
    model.save_pretrained(tmp_path / "m")
    options = dict(model=str(tmp_path / "m"), degree=2, dtype="float32", prompts=prompts())
    (found,) = rollout(tmp_path, mode=False, stock=True, **options)
    _, scored = trainers(tpi.parallelize(model, None).eval(), found, dict(seed=0, temperature=1.0))
    ours, theirs = torch.tensor(scored), torch.tensor([log_probs for _, log_probs in found])
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)  # values
    assert (ours == theirs).float().mean() < 0.5


@pytest.mark.parametrize(
    ("environment", "engine", "text"),
    [
        ({"VLLM_PLUGINS": "none"}, {}, "Load format `tp_invariant` is not supported"),
        ({"VLLM_BATCH_INVARIANT": "1"}, {}, "VLLM_BATCH_INVARIANT=1 replaces kernels"),
    ],
    ids=["no plugin", "vLLM's own batch invariance"],
)
def test_an_engine_that_would_break_the_contract_does_not_start(environment, engine, text, tmp_path):
    model_of("qwen3", torch.float32, 1).save_pretrained(tmp_path / "m")
    options = dict(model=str(tmp_path / "m"), degree=1, dtype="float32", prompts=prompts()[:1], sampling=dict(seed=1))
    done = rollout(tmp_path, check=False, environment=environment, engine=engine, **options)
    assert done.returncode != 0 and text in done.stderr + done.stdout, done.stderr[-2000:]


def test_a_layer_that_is_not_ours_is_named(tmp_path):
    """Experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes)).save_pretrained(tmp_path / "m")
    options = dict(model=str(tmp_path / "m"), degree=1, dtype="float32", prompts=prompts()[:1], sampling=dict(seed=1))
    done = rollout(tmp_path, check=False, **options)
    assert done.returncode != 0 and "cannot keep its contract in vLLM" in done.stderr + done.stdout
    assert "experts" in done.stderr + done.stdout


def test_arguments_and_parameters():
    import tp_invariant.integrations.vllm as tpi_vllm

    with tpi.set_tp_invariant_mode(False), pytest.raises(RuntimeError, match="TP_INVARIANT_MODE=1"):
        tpi_vllm.engine_arguments()
    with tpi.set_tp_invariant_mode(True):
        with pytest.raises(ValueError, match="enforce_eager"):
            tpi_vllm.engine_arguments(enforce_eager=False)
        assert tpi_vllm.engine_arguments(seed=3)["seed"] == 3
    for options, text in (
        (dict(presence_penalty=1.0), "a penalty"),
        (dict(prompt_logprobs=1), "prompt_logprobs"),
        (dict(top_p=2.0), "top_p=2.0"),
    ):
        with pytest.raises(ValueError, match=text):
            tpi_vllm.sampling_params(seed=1, request="a", **options)
