"""transformers' continuous batching: what it draws from are rows of one whole forward on one rank, at every degree."""

from __future__ import annotations

import functools
import random
import time

import hf_models
import pytest
import torch
import transformers
from ranks import pool_of_two, run_ranks
from torch.distributed.device_mesh import DeviceMesh

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.hugging_face import continuous_batching

NEW, LENGTHS = 6, [5, 150, 1, 70, 131, 33, 129]


@pytest.fixture(scope="module", autouse=True)
def two_ranks():
    with pool_of_two():
        yield


build = functools.partial(hf_models.build, max_position_embeddings=256)


def prompts():
    """Of many lengths; three begin alike, so that requests share pages of the cache."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(3, hf_models.VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]
    return [made[1][:40] + prompt if i % 3 == 0 else prompt for i, prompt in enumerate(made)]


def bytes_of(rows):
    return {row.contiguous().numpy().tobytes() for row in rows.float()}


def manage(manager, requests, count):
    """The results of all requests, of which the last half arrives after the first has finished."""
    results, half = {}, len(requests) // 2
    for name, prompt in requests[:half]:
        manager.add_request(prompt, request_id=name)
    until = time.monotonic() + 60
    while len(results) < count and manager.is_running() and time.monotonic() < until:
        result = manager.get_result(timeout=1)
        if result is None or not result.is_finished():
            continue
        if not results:
            for name, prompt in requests[half:]:
                manager.add_request(prompt, request_id=name)
        results[result.request_id] = result
    return results


def serve(tp_group, family, mode, seed, budget, copies=1, spoil=None):
    """Every request's text, or the errors; the bytes of all rows of logits; the number of tokens in all steps."""
    rows, tokens = set(), []
    with tpi.set_tp_invariant_mode(mode):
        over_mesh = family == "gemma3"
        over = DeviceMesh.from_group(tp_group, "cpu", mesh_dim_names=("tp",)) if over_mesh else tp_group
        model = tpi.parallelize(build(family).eval(), over)

        def record(module, args, kwargs, output):
            rows.update(bytes_of(output.logits[0]))
            tokens.append(kwargs["input_ids"].numel())

        model.register_forward_hook(record, with_kwargs=True)
        if spoil == "draws" and tp_group.rank() == 1:
            model.register_forward_hook(lambda *args: torch.rand(1) and None)
        requests = [(str(i), prompt) for i, prompt in enumerate(prompts())]
        random.Random(seed).shuffle(requests)
        manager = model.init_continuous_batching(
            transformers.GenerationConfig(
                max_new_tokens=NEW, do_sample=copies > 1, num_return_sequences=copies, eos_token_id=-1, pad_token_id=0
            ),
            transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=budget, page_size=16, seed=3),
        )
        manager.start()
        try:
            results = manage(manager, requests, len(requests) * copies)
        finally:
            manager.stop(block=True, timeout=20)
            manager.destroy()
        errors = {result.error for result in results.values()} - {None}
        return errors or {name: result.generated_tokens for name, result in results.items()}, rows, sum(tokens)


def rows_of_whole_forwards(tp_group, family, texts):
    """The bytes of the rows from which each text's tokens come; and the tokens of the largest logits."""
    rows, greedy = {}, {}
    with tpi.set_tp_invariant_mode(True), torch.no_grad():
        model = tpi.parallelize(build(family).eval(), tp_group)
        for name, text in texts.items():
            prompt = prompts()[int(name.partition("__")[0])]
            logits = model(torch.tensor([prompt + text]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            rows[name], greedy[name] = bytes_of(logits), logits.argmax(-1).tolist()
    return rows, greedy


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_every_row_has_the_bytes_of_a_whole_forward_on_one_rank(family):
    """Two orders and budgets of tokens a step, which cut prompts; gemma3, over a DeviceMesh, has a cache
    that drops what its window has passed."""
    texts = None
    for ranks, seed, budget in ((1, 0, 48), (2, 1, 200)):
        for text, rows, tokens in run_ranks(serve, ranks, family, True, seed, budget):
            if texts is None:
                texts = text
                expected, greedy = run_ranks(rows_of_whole_forwards, 1, family, texts)[0]
                assert len(texts) == len(LENGTHS) and greedy == texts
            assert text == texts
            assert all(one <= rows for one in expected.values())
            without_sharing = sum(map(len, prompts())) + (NEW - 1) * len(text)
            assert tokens == without_sharing if family == "gemma3" else tokens < without_sharing
    _, off, _ = run_ranks(serve, 1, family, False, 0, 48)[0]
    assert not all(one <= off for one in expected.values()), "the control: transformers' own attention"


def serve_from_position_0(tp_group, *args):
    former = continuous_batching._first_keys
    continuous_batching._first_keys = lambda position_ids, cu_q, cu_k: torch.zeros_like(cu_q[1:])
    try:
        return serve(tp_group, *args)
    finally:
        continuous_batching._first_keys = former


def test_first_keys_are_needed():
    """A control: without their positions, sums over a window's keys are cut at other places."""
    text, rows, _ = run_ranks(serve_from_position_0, 1, "mistral", True, 0, 48)[0]
    expected, _ = run_ranks(rows_of_whole_forwards, 1, "mistral", text)[0]
    assert not all(one <= rows for one in expected.values())
    text, rows, _ = run_ranks(serve, 1, "mistral", True, 0, 48)[0]
    expected, _ = run_ranks(rows_of_whole_forwards, 1, "mistral", text)[0]
    assert all(one <= rows for one in expected.values())


def test_forks():
    """Several completions of a prompt, which share its pages and copy the last one."""
    for text, rows, _ in run_ranks(serve, 2, "qwen3", True, 0, 64, 3):
        assert len(text) == 3 * len(LENGTHS) and len({str(x) for x in text.values()}) > len(LENGTHS)
        expected, _ = run_ranks(rows_of_whole_forwards, 1, "qwen3", text)[0]
        assert all(one <= rows for one in expected.values())


def test_ranks_that_draw_differently_say_so():
    for errors, *_ in run_ranks(serve, 2, "llama", True, 0, 64, 2, "draws"):
        (error,) = errors
        assert "the 2 ranks of tp_group have different tokens or requests in a step" in error


def batch_and_forward(tp_group, family, how):
    """By generate_batch, then by generate and with the mode off, on one model."""
    model = tpi.parallelize(build(family).eval(), tp_group)
    options = dict(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=32, page_size=16)
    texts = []
    for mode in (True, False, True):
        with tpi.set_tp_invariant_mode(mode):
            results = model.generate_batch(
                prompts()[2:4], generation_config=transformers.GenerationConfig(**options),
                continuous_batching_config=config,
            )  # fmt: skip
            texts.append([result.generated_tokens for result in results.values()])
            ids = torch.tensor(prompts()[3:4])
            text = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()
            assert text == texts[-1][1], f"generate, mode {mode}"
    return texts, model.config._attn_implementation


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_generate_batch_beside_generate(family):
    """In both modes, of a model whose attention was sdpa or eager, and which has its name again."""
    for texts, name in run_ranks(batch_and_forward, 2, family, None):
        assert texts[0] == texts[2] and name == f"tp_invariant_{'eager' if family == 'gemma2' else 'sdpa'}"


def refused(tp_group, family, config):
    model = tpi.parallelize(build(family).eval(), tp_group)
    with tpi.set_tp_invariant_mode(True):
        try:
            model.generate_batch(
                prompts()[:1], transformers.GenerationConfig(max_new_tokens=2),
                transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32, page_size=16, **config),
            )  # fmt: skip
        except (ValueError, RuntimeError) as error:
            return str(error)


@pytest.mark.parametrize(
    "family, config, text",
    [
        ("llama", dict(use_cuda_graph=True), "continuous batching over 2 ranks takes no CUDA graphs"),
        ("llama", dict(varlen_compile_config=transformers.CompileConfig()), "varlen_compile_config is given"),
        ("deepseek_v2", {}, "1 of 1 requests failed; req_0: DeepseekV2Attention has 4 heads of size 16"),
    ],
)
def test_what_is_refused(family, config, text):
    errors = run_ranks(refused, 2, family, config)
    assert errors[0] == errors[1] and text in errors[0]


@pytest.mark.parametrize("window", [None, 20])
def test_padding_at_the_end_of_a_step(window):
    """As the engine pads for a CUDA graph: rows of others behind, and sequences without queries and keys."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, n, 16, generator=generator) for n in (12, 90, 90))
    of_q, of_k, firsts = [0, 5, 6], [0, 24, 44], torch.tensor([7, 140], dtype=torch.int32) if window else None
    cu_q, cu_k = (torch.tensor(sizes, dtype=torch.int32) for sizes in (of_q, of_k))
    parts = query[:, :, :6], key[:, :, :44], value[:, :, :44]
    expected = continuous_batching.Paged(*parts[1:], cu_q, cu_k, 5, 24, window, firsts).attend(parts[0])
    cu_q, cu_k = (torch.cat([x, x[-1:].expand(3)]) for x in (cu_q, cu_k))
    firsts = None if firsts is None else torch.cat([firsts, torch.zeros(3, dtype=torch.int32)])
    got = continuous_batching.Paged(key, value, cu_q, cu_k, 12, 1024, window, firsts).attend(query)
    assert got.shape == query.shape and got.isfinite().all()
    assert got[:, :, :6].contiguous().numpy().tobytes() == expected.contiguous().numpy().tobytes()


def test_the_position_of_first_keys():
    position_ids = torch.tensor([[3, 4, 50, 0, 1, 2, 0, 0]])
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3, 6, 6, 6], [0, 5, 15, 18, 18, 18]))
    firsts = continuous_batching._first_keys(position_ids, cu_q, cu_k)
    assert firsts.tolist() == [0, 41, 0, 0, 0] and firsts.dtype == torch.int32


def on_gpus(tp_group, family, mode, options):
    """The texts; how many of their rows of one forward the engine did not draw from; these rows' digest."""
    device, rows, expected = torch.device("cuda", torch.cuda.current_device()), set(), []
    sizes = dict(hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    window = dict(sliding_window=300) if family == "mistral" else {}
    model = hf_models.build(family, torch.bfloat16, max_position_embeddings=2048, **sizes, **window).eval().to(device)
    lengths, generator = [700, 5, 1500, 1, 400], torch.Generator().manual_seed(0)
    given = [torch.randint(3, hf_models.VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    with tpi.set_tp_invariant_mode(mode), torch.no_grad():
        model = tpi.parallelize(model, tp_group)
        if not options:  # a graph that is replayed calls no hook
            hook = model.register_forward_hook(lambda module, args, out: rows.update(bytes_of(out.logits[0].cpu())))
        results = model.generate_batch(
            given,
            transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0),
            transformers.ContinuousBatchingConfig(num_blocks=256, max_batch_tokens=256, page_size=32, **options),
        )
        texts = [result.generated_tokens for result in results.values()]
        if not options:
            hook.remove()
        for prompt, text in zip(given, texts, strict=True):
            ids = torch.tensor([prompt + text], device=device)
            expected.append(model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].cpu())
    missing = sum(row not in rows for one in expected for row in bytes_of(one))
    return texts, missing, testing.digest(expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_on_gpus(family):
    """At every degree, and on one rank by CUDA graphs, whose texts alone are seen."""
    run = functools.partial(testing.run_ranks, device="cuda")
    ((texts, missing, digest),) = run(on_gpus, 1, family, True, {})
    assert missing == 0
    assert run(on_gpus, 1, family, True, dict(use_cuda_graph=True))[0][0] == texts
    for degree in (2, 4):
        if degree <= testing.gpu_ranks():
            assert run(on_gpus, degree, family, True, {}) == [(texts, 0, digest)] * degree
    assert run(on_gpus, 1, family, False, {})[0][1] > 0, "the control"
