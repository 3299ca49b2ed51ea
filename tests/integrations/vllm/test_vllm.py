"""vLLM's texts and log-probabilities are those of a trainer at TP=1, bit for bit; without the plugin nothing starts.

Needs vLLM, in an environment of its own: `.ci/vllm` makes it and runs these tests. TESTS_OF_VLLM=all runs
all models, dtypes and degrees.
"""

from __future__ import annotations

import functools
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
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # on two cores, six runs of a model take minutes
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
    "qwen3_moe": dict(num_experts=12, num_experts_per_tok=8, moe_intermediate_size=64, norm_topk_prob=True),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": dict(num_local_experts=6, num_experts_per_tok=4, intermediate_size=64, sliding_window=48),
    "granite": dict(logits_scaling=0.5, residual_multiplier=0.7, embedding_multiplier=3.0, attention_multiplier=0.1),
}
FEW, ALL = ("qwen3",), tuple(KINDS)
THOROUGH = os.environ.get("TESTS_OF_VLLM") == "all"
CASES = [
    (kind, dtype, degree)
    for kind in (ALL if THOROUGH else FEW)
    for dtype in (("float32", "bfloat16") if THOROUGH else ("float32",))
    for degree in ((1, 2, 4) if THOROUGH else (1, 2))
    if dtype == "float32" or kind in ("gemma3_text", "gpt_oss") or "sliding_window" not in KINDS[kind]  # windows
]
SAMPLING: dict[str, Any] = dict(seed=7, temperature=0.8, top_p=0.95)


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


def run_of(model: Path | str, dtype: str = "float32", degree: int = 1, **others: Any) -> dict[str, Any]:
    return dict(model=str(model), dtype=dtype, degree=degree, prompts=prompts(), sampling=dict(seed=1)) | others


def results_of(folder: Path, runs: list[dict[str, Any]], **environment: str) -> list[Any]:
    """What rollout.py prints for these runs, in a process of its own."""
    given = folder / "runs.json"
    given.write_text(json.dumps(runs))
    try:
        done = subprocess.run(
            [sys.executable, str(PROGRAM), str(given)], capture_output=True, text=True,
            env={**os.environ, "TP_INVARIANT_MODE": "1"} | environment,
        )  # fmt: skip
    finally:  # what vLLM's ranks leave where they are ended
        for left in Path("/dev/shm").glob("vllm_dist_*"):
            left.unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


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


@pytest.fixture(scope="module")
def of_kind(tmp_path_factory):
    """kind -> {(dtype, degree): (models, what vLLM gave for each)}, by one process for all runs of a kind."""

    @functools.cache
    def of(kind: str) -> dict[tuple[str, int], tuple[list[Any], Any]]:
        folder, cases = tmp_path_factory.mktemp(kind), [case[1:] for case in CASES if case[0] == kind]
        models, runs = {}, []
        for dtype, degree in cases:
            folders = [str(folder / dtype / str(seed)) for seed in (1, 2, 3)]
            if dtype not in models:
                models[dtype] = [model_of(kind, getattr(torch, dtype), seed) for seed in (1, 2, 3)]
                for model, path in zip(models[dtype], folders, strict=True):
                    model.save_pretrained(path)
                    tpi.parallelize(model, None).eval()
            runs.append(run_of(folders[0], dtype, degree, others=folders[1:], sampling=SAMPLING))
        results = results_of(folder, runs)
        return {case: (models[case[0]], result) for case, result in zip(cases, results, strict=True)}

    return of


@pytest.mark.parametrize(("kind", "dtype", "degree"), CASES)
def test_texts_and_log_probabilities_are_the_trainers(kind, dtype, degree, of_kind):
    """Sampled, chunked prefill, a cached prefix; then after weights were sent twice."""
    models, found = of_kind(kind)[dtype, degree]
    assert isinstance(found, list), found
    assert len({str([ids for ids, _ in result]) for result in found}) == len(models)
    for model, result in zip(models, found, strict=True):
        drawn, scored = trainers(model, result, SAMPLING)
        assert drawn == [ids for ids, _ in result]
        assert scored == [log_probs for _, log_probs in result]


@pytest.mark.parametrize("kind", ALL if THOROUGH else FEW)
def test_stock_vllm_differs_and_an_engine_without_the_plugin_does_not_start(kind, tmp_path):
    model = model_of(kind, torch.float32, 1)
    model.save_pretrained(tmp_path / "m")
    runs = [run_of(tmp_path / "m", degree=2 if THOROUGH else 1, stock=True), run_of(tmp_path / "m")]
    (found,), error = results_of(tmp_path, runs, VLLM_PLUGINS="none")
    assert "Load format `tp_invariant` is not supported" in error
    _, scored = trainers(tpi.parallelize(model, None).eval(), found, dict(seed=0, temperature=1.0))
    ours, theirs = torch.tensor(scored), torch.tensor([log_probs for _, log_probs in found])
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)  # values
    assert (ours == theirs).float().mean() < 0.5


def test_what_would_break_the_contract_is_named(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64)
    for kind, own in {"qwen2_moe": sizes, "gpt_oss": {**KINDS["gpt_oss"], "swiglu_limit": 5.0}}.items():
        config = AutoConfig.for_model(kind, **{**SIZES, **own})
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / kind)
    config = json.loads((tmp_path / "gpt_oss" / "config.json").read_text())
    (tmp_path / "mxfp4").mkdir()
    (tmp_path / "mxfp4" / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    both = dict(environment={"VLLM_BATCH_INVARIANT": "1"}, engine=dict(enable_expert_parallel=True))
    runs = [run_of(tmp_path / kind) for kind in ("qwen2_moe", "gpt_oss")]
    runs += [run_of(tmp_path / "mxfp4", "bfloat16"), run_of(tmp_path / "qwen2_moe", **both)]
    experts = "model.layers.0.mlp.experts"
    texts = [
        [f"{experts} routes as qwen2_moe, and not as one of gpt_oss, mixtral, qwen3_moe", "has shared experts"],
        [f"{experts} computes swigluoai with the numbers [1.702, 5.0]"],
        ["mxfp4' is not supported"],
        ["VLLM_BATCH_INVARIANT=1 replaces kernels", "expert parallelism is not supported"],
    ]
    for error, wanted in zip(results_of(tmp_path, runs), texts, strict=True):
        assert all(text in error for text in ["cannot keep its contract in vLLM", *wanted]), error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gpt_oss", "mixtral", "qwen3_moe"])
def test_experts_of_equal_logits_are_chosen_as_in_the_trainer(kind, dtype):
    from tp_invariant.integrations.vllm.experts import ROUTERS

    model = model_of(kind, dtype, 1)
    block = model.model.layers[0].mlp
    router = block.router if kind == "gpt_oss" else block.gate
    router.weight.data[1::2] = router.weight.data[::2]  # twins
    if kind == "gpt_oss":
        router.bias.data[1::2] = router.bias.data[::2]
    given: list[Any] = []
    router.register_forward_hook(lambda module, args, output: given.extend(output))
    tpi.parallelize(model, None).eval()
    with tpi.set_tp_invariant_mode(True), torch.no_grad():
        block(torch.randn(1, 50, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0)).to(dtype))
        logits, weights, index = given
        for rows in (slice(None), slice(7, 8)):
            own_weights, own_index = ROUTERS[kind](logits[rows], index.shape[1], True)
            tpi.testing.assert_bitwise_equal(own_weights, weights[rows])
            assert torch.equal(own_index, index[rows])
    assert torch.equal(index[:, 0] + 1, index[:, 1]) and (index[:, 0] % 2 == 0).all()


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
