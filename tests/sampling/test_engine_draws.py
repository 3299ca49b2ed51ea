"""Keyed draws inside of transformers' continuous batching: the texts of generate, and their log-probabilities."""

from __future__ import annotations

import hf_models
import pytest
import torch
import transformers
from ranks import pool_of_two, run_ranks

import tp_invariant as tpi
from tp_invariant.sampling import KeyedDraws
from tp_invariant.testing import RankError, assert_bitwise_equal

NEW = 6
PROMPTS = {"a": [5, 9, 30, 7, 8, 2, 44], "b": [11, 4], "c": [60, 61, 62, 63, 3]}
OPTIONS = dict(temperature=0.9, top_k=60, top_p=0.98)


@pytest.fixture(scope="module", autouse=True)
def two_ranks():
    with pool_of_two():
        yield


def serve(model, names, copies=1, budget=64, **options):
    """[(text, log-probabilities)] of each request's copies."""
    sampling = dict(do_sample=True, top_k=0) if copies > 1 else {}
    results = model.generate_batch(
        [PROMPTS[name] for name in names],
        transformers.GenerationConfig(
            max_new_tokens=NEW, num_return_sequences=copies, eos_token_id=-1, pad_token_id=0, **sampling, **options
        ),
        transformers.ContinuousBatchingConfig(num_blocks=64, page_size=16, max_batch_tokens=budget),
        logits_processor=[KeyedDraws(1, list(names), **OPTIONS)],
    )
    return [(result.generated_tokens, result.logprobs) for result in results.values()]


def served(tp_group):
    model = built(tp_group)
    return [serve(model, "abc"), serve(model, "ca", budget=16), serve(model, "b", copies=3)]


def built(tp_group=None):
    return tpi.parallelize(hf_models.build("llama").eval(), tp_group)


def written(model, name, **options):
    """The same by generate, one request at a time, and by one forward of each whole text."""
    ids, draws = torch.tensor([PROMPTS[name]]), KeyedDraws(1, [name], **OPTIONS)
    config = transformers.GenerationConfig(max_new_tokens=NEW, eos_token_id=None, pad_token_id=0, **options)
    with torch.no_grad():
        whole = model.generate(ids, generation_config=config, logits_processor=[draws])
        hidden = model.model(whole).last_hidden_state[:, ids.shape[1] - 1 : -1]
        texts = whole[:, ids.shape[1] :]
        found = tpi.token_log_probs(hidden, model.lm_head, texts, temperature=OPTIONS["temperature"])
    return [*zip(texts.tolist(), found.tolist(), strict=True)]


def test_texts_and_log_probabilities_are_those_of_generate():
    with tpi.set_tp_invariant_mode(True):
        model = built()
        a, b, c = (written(model, name)[0] for name in "abc")
        copies = written(model, "b", num_return_sequences=3, do_sample=True, top_k=0)
        for all_three, two, forks in [*run_ranks(served, 1), *run_ranks(served, 2)]:
            assert_bitwise_equal(all_three, [a, b, c])
            assert_bitwise_equal(two, [c, a])
            assert_bitwise_equal(forks, copies)
    assert len({tuple(text) for text, _ in copies}) == 3
    with tpi.set_tp_invariant_mode(False):  # the control: other log-probabilities
        assert run_ranks(served, 2)[0][0] != [a, b, c]


def refused(tp_group):
    serve(built(tp_group), "ab", copies=2, temperature=0.5)


def test_other_processors_are_refused():
    with pytest.raises(RankError, match=r"generation_config asks for .*Temperature.* beside KeyedDraws"):
        run_ranks(refused, 1)
