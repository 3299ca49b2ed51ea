"""Ranks that draw different texts say so at the step at which they part; ranks that draw the same one are let be."""

from __future__ import annotations

import functools

import hf_models
import pytest
import torch
import transformers
from ranks import run_ranks

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.testing import assert_bitwise_equal

TWO_LIKELY = dict(do_sample=True, top_k=2, max_new_tokens=12)


def prompt():
    return hf_models.batch()["input_ids"][:1, :6]


def text_of(tp_group, seeds, stock, options):
    """What is written after the prompt, or the error; seeds: of each rank; stock: by transformers' own function."""
    model = tpi.parallelize(hf_models.build("llama").eval(), tp_group)
    model.generation_config.eos_token_id = None
    ids = prompt()
    torch.manual_seed(seeds[tp_group.rank()])
    generate = transformers.GenerationMixin.generate.__get__(model) if stock else model.generate
    try:
        return generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()
    except RuntimeError as error:
        return str(error)


def texts_alone(seeds):
    """What each seed draws on one rank."""
    return [run_ranks(text_of, 1, [seed], False, TWO_LIKELY)[0] for seed in seeds]


def test_texts_that_agree_by_chance_at_first_part_with_an_error():
    with tpi.set_tp_invariant_mode(True):
        first, *others = texts_alone(range(6))
        later = [(seed, text) for seed, text in enumerate(others, 1) if text[:2] == first[:2] and text != first]
        seed, text = later[0]
        step = next(i for i in range(12) if text[i] != first[i])
        errors = run_ranks(text_of, 2, [0, seed], False, TWO_LIKELY)
        assert errors[0] == errors[1]
        assert errors[0].startswith(
            f"the 2 ranks of tp_group have different texts after step {step + 1} of generate, whose last tokens are "
            f"({first[step]},) on rank 0; ({text[step]},) on rank 1. "
        )
        assert "seed all of them alike" in errors[0]
        # a control: without the comparison each rank has a text of its own
        one, other = run_ranks(text_of, 2, [0, seed], True, TWO_LIKELY)
        assert one[:step] == other[:step] and one[step] != other[step]


@pytest.mark.parametrize("mode", [True, False])
def test_beams_that_are_drawn(mode):
    """Two beams may end in the same tokens and have different beginnings: the whole texts are compared."""
    with tpi.set_tp_invariant_mode(mode):
        errors = run_ranks(text_of, 2, [0, 1], False, dict(TWO_LIKELY, num_beams=2))
    assert errors[0] == errors[1] and "different texts after step" in errors[0]


def whole_batch(tp_group, how):
    model = tpi.parallelize(hf_models.build("llama").eval(), tp_group)
    ids = hf_models.batch()["input_ids"][:, :6].clone()
    mask = torch.ones_like(ids)
    ids[0, :4], mask[0, :4] = 0, 0  # padding
    torch.manual_seed(0)
    options = dict(attention_mask=mask, max_new_tokens=8, pad_token_id=0)
    if how == "criteria by place":
        at_most = transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(10)])
        return model.generate(ids, None, None, at_most, **options).tolist()
    more = {
        "drawn": dict(do_sample=True),
        "greedy": {},
        "beams": dict(num_beams=3),
        "a static cache": dict(cache_implementation="static", do_sample=True),
        "one token": dict(do_sample=True, max_new_tokens=1),
        "criteria": dict(stopping_criteria=[transformers.MaxLengthCriteria(10)]),
    }[how]
    return model.generate(ids, **(options | more)).tolist()


@pytest.mark.parametrize(
    "how", ["drawn", "greedy", "beams", "a static cache", "one token", "criteria", "criteria by place"]
)
def test_ranks_seeded_alike_write_the_text_of_one_rank(how):
    with tpi.set_tp_invariant_mode(True):
        (alone,) = run_ranks(whole_batch, 1, how)
        assert run_ranks(whole_batch, 2, how) == [alone, alone]
    assert len(alone[0]) <= (10 if "criteria" in how else 14)


@pytest.mark.parametrize("mode", [True, False])
def test_a_static_cache_compiles_nothing_by_itself(mode):
    """On GPUs transformers would compile the model, whose rows then have other bits than a whole forward's."""
    model = tpi.parallelize(hf_models.build("llama").eval(), None)
    asked = []
    model._valid_auto_compile_criteria = lambda kwargs, config: asked.append(bool(config.disable_compile))
    options = dict(max_new_tokens=2, cache_implementation="static", pad_token_id=0)
    config = transformers.GenerationConfig(**options)
    with tpi.set_tp_invariant_mode(mode):
        model.generate(prompt(), **options)
        model.generate(prompt(), config)
        model.generate(prompt(), generation_config=config, compile_config=transformers.CompileConfig())
        config.compile_config = transformers.CompileConfig()
        model.generate(prompt(), config)
    assert asked == [mode, mode, False, False]


MANNERS = {
    "dynamic": {},
    "static": dict(cache_implementation="static"),
    "hybrid": dict(cache_implementation="hybrid"),
    "a prompt in chunks": dict(prefill_chunk_size=16),
    "a prompt in chunks to a static cache": dict(prefill_chunk_size=16, cache_implementation="static"),
    "assisted by the prompt": dict(prompt_lookup_num_tokens=3),
    "assisted by a model": dict(assistant_model=True, do_sample=True),
    "assisted by its first layer": dict(assistant_early_exit=1),
}


SMALL = dict(max_position_embeddings=256)
ON_GPUS = dict(
    max_position_embeddings=2048, hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64,
)  # fmt: skip


def rows_of_every_manner(tp_group, family, mode, device="cpu"):
    """By manner: the rows of logits that generate draws from, those of one forward of the text, and the text."""
    results = {}
    with tpi.set_tp_invariant_mode(mode), torch.no_grad():
        dtype, options = (torch.float32, SMALL) if device == "cpu" else (torch.bfloat16, ON_GPUS)
        if family == "mistral" and device == "cuda":
            options = options | dict(sliding_window=300)
        model = tpi.parallelize(hf_models.build(family, dtype, **options).eval().to(device), tp_group)
        tokens = 131 if device == "cpu" else 1100
        ids = torch.randint(3, hf_models.VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)
        ids[0, 60:100] = ids[0, 10:50]
        for manner, options in MANNERS.items():
            torch.manual_seed(0)
            got = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, eos_token_id=None, pad_token_id=0,
                **{"do_sample": False} | options | ({"assistant_model": model} if "by a model" in manner else {}),
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            whole = model(got.sequences, use_cache=False).logits[0, ids.shape[1] - 1 : -1]
            results[manner] = tuple(x.cpu() for x in (torch.cat(list(got.logits)), whole.float(), got.sequences))
    return results


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_caches_chunks_and_assistants_give_the_rows_of_one_forward(family):
    """At two ranks and one; mistral's window has passed keys that sums over a whole sequence begin with."""
    compare_manners(family, "cpu", (2,))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_the_same_on_gpus(family):
    compare_manners(family, "cuda", [degree for degree in (2, 4) if degree <= testing.gpu_ranks()])


def compare_manners(family, device, degrees):
    run_ranks = functools.partial(testing.run_ranks, device=device)
    (alone,) = run_ranks(rows_of_every_manner, 1, family, True, device)
    others = [
        results for degree in degrees for results in run_ranks(rows_of_every_manner, degree, family, True, device)
    ]
    for results in (alone, *others):
        for manner, (rows, whole, text) in results.items():
            assert_bitwise_equal(rows, whole, manner)
            assert_bitwise_equal((rows, text), (alone[manner][0], alone[manner][2]), manner)
    off, *_ = run_ranks(rows_of_every_manner, 1, family, False, device)
    differ = [not torch.equal(rows, whole) for rows, whole, _ in off.values()]
    assert all(differ) if device == "cpu" else any(differ), "the control"
