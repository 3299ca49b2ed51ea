"""Draws by request and position: truncation and its ties, and one text at every degree, batch and restart."""

from __future__ import annotations

import math

import hf_models
import pytest
import torch
import transformers
from gpus import gpu
from ranks import run_ranks

import tp_invariant as tpi
from tp_invariant.sampling import Draws, KeyedDraws, request_key
from tp_invariant.testing import assert_bitwise_equal

# --- keys and draws -------------------------------------------------------------------------------------------------


def test_keys_are_of_the_seed_the_request_and_the_copy():
    assert request_key(0, "a") == request_key(0, "a", 0) == 3072009701831602183
    others = [(0, "a"), (1, "a"), (0, "b"), (0, "a", 1), (0, 1), (0, "1"), (0, 1, 1), (1, 1), (0, "\ud800")]
    keys = [request_key(*other) for other in others]
    assert len(set(keys)) == len(keys) and all(-(2**63) <= key < 2**63 for key in keys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("0", "a"), "seed='0' is a str: it must be an int"),
        ((0, 1.0), "request=1.0 is a float: it must be an int or a str"),
        ((0, "a", True), "copy=True is a bool: it must be an int"),
    ],
)
def test_what_is_no_key(arguments, message):
    with pytest.raises(TypeError) as error:
        request_key(*arguments)
    assert str(error.value) == message


def test_a_row_is_drawn_by_its_request_and_position_alone():
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    draws, requests, positions = (
        Draws(3, temperature=0.7, top_k=40),
        ["a", "b", "c", 7, "a", "a"],
        [5, 5, 5, 5, 6, 2**40],
    )
    want = draws.draw(logits, requests, positions)
    for order in ([0], [5, 2, 3], [4, 3, 2, 1, 0]):
        some = draws.draw(logits[order], [requests[i] for i in order], torch.tensor([positions[i] for i in order]))
        assert_bitwise_equal(some, want[order])
    keys = torch.tensor([request_key(3, request) for request in requests])
    assert_bitwise_equal(draws.draw(logits, keys, positions), want)
    # a control: torch's draws depend on what else is in the batch
    probabilities = (logits.float() / 0.7).softmax(1)
    torch.manual_seed(0)
    whole = torch.multinomial(probabilities, 1)
    torch.manual_seed(0)
    assert not torch.equal(torch.multinomial(probabilities[[4, 3, 2, 1, 0]], 1), whole[[4, 3, 2, 1, 0]])


def test_draws_are_among_the_support_and_distributed_as_it():
    many = 40000
    logits = torch.tensor([[0.0, 1.5, -math.inf, 1.0, 2.0, -1.0]])
    draws = Draws(0, temperature=2.0, top_k=4, top_p=0.95)
    assert draws.support(logits).tolist() == [[4, 1, 3, 0]]
    counts = torch.bincount(draws.draw(logits.expand(many, -1), [0] * many, range(many)), minlength=6).double()
    expected = (logits[0].double() / 2).masked_fill(torch.tensor([0, 0, 1, 0, 0, 1]).bool(), -math.inf).softmax(
        0
    ) * many
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert ((counts - expected).square() / expected)[kept].sum() < 16.3  # 99.9% with 3 degrees of freedom


def test_temperature_zero_takes_the_first_of_the_highest():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [-0.0, 0.0, -1.0, -2.0]])
    draws = Draws(0, temperature=0, top_k=3)
    assert draws.draw(logits, ["a", "b"], [0, 0]).tolist() == [1, 0]
    assert draws.support(logits).tolist() == [[1], [0]]


def test_the_inverse_of_the_temperature_is_not_multiplied_by():
    """The fp32 quotients, as torch computes on CUDA only where the divisor is a tensor."""
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    x = Draws(0, temperature=0.7)._scores(logits)
    assert_bitwise_equal(x, (logits.double() / torch.tensor(0.7).double()).float())
    assert (x != logits * (1 / torch.tensor(0.7))).any()


# --- truncation -----------------------------------------------------------------------------------------------------

TIED = [[2.0, 1.0, 3.0, 1.0, 2.0, -math.inf, 2.0]]
EVEN = [[0.0] * 8]


@pytest.mark.parametrize(
    ("logits", "options", "support"),
    [
        (TIED, {}, [2, 0, 4, 6, 1, 3]),
        (TIED, dict(top_k=1), [2]),
        (TIED, dict(top_k=2), [2, 0]),
        (TIED, dict(top_k=3), [2, 0, 4]),
        (TIED, dict(top_k=5), [2, 0, 4, 6, 1]),
        (TIED, dict(top_k=100), [2, 0, 4, 6, 1, 3]),
        (EVEN, dict(top_p=0.25), [0, 1]),  # those before id 2 have 0.25 already
        (EVEN, dict(top_p=0.2501), [0, 1, 2]),
        (EVEN, dict(top_p=1e-9), [0]),
        (EVEN, dict(top_p=1.0), list(range(8))),
        (EVEN, dict(top_k=4, top_p=0.5), [0, 1]),  # of the probability of four
        (TIED, dict(min_p=1.0), [2]),
        (TIED, dict(min_p=0.3), [2, 0, 4, 6]),  # exp(-1) = 0.37
        (TIED, dict(min_p=0.0), [2, 0, 4, 6, 1, 3]),
        (TIED, dict(min_p=0.3, top_k=3), [2, 0, 4]),
        ([[-0.0, 0.0, -0.0]], dict(top_k=2), [0, 1]),
        ([[-200.0, 0.0, -200.0]], {}, [1, 0, 2]),  # whose probability is not zero
    ],
)
def test_ties_by_hand(logits, options, support):
    assert Draws(0, **options).support(torch.tensor(logits)).tolist() == [support]


def test_rows_are_filled_up():
    logits = torch.tensor([[0.0, 0.0, 0.0], [9.0, 0.0, -9.0]])
    assert Draws(0, top_p=0.9).support(logits).tolist() == [[0, 1, 2], [0, -1, -1]]
    assert Draws(0, top_p=0.5).support(logits).tolist() == [[0, 1], [0, -1]]


@pytest.mark.parametrize(
    ("options", "warpers"),
    [
        (dict(top_k=20), [transformers.TopKLogitsWarper(20)]),
        (dict(top_p=0.8), [transformers.TopPLogitsWarper(0.8)]),
        (dict(min_p=0.05), [transformers.MinPLogitsWarper(0.05)]),
        (
            dict(temperature=0.6, top_k=50, top_p=0.9, min_p=0.02),
            [
                transformers.TemperatureLogitsWarper(0.6), transformers.TopKLogitsWarper(50),
                transformers.TopPLogitsWarper(0.9), transformers.MinPLogitsWarper(0.02),
            ],
        ),
    ],
)  # fmt: skip
def test_transformers_keeps_the_same_ids(options, warpers):
    logits = torch.randn(50, 200, generator=torch.Generator().manual_seed(0)) * 2
    support = Draws(0, **options).support(logits)
    scores = transformers.LogitsProcessorList(warpers)(None, logits.clone())
    assert [set(row) - {-1} for row in support.tolist()] == [
        set(row.isfinite().nonzero()[:, 0].tolist()) for row in scores
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperature=-1.0), "temperature=-1.0 is out of range: it must be at least 0 and below 1e38"),
        (dict(temperature=math.nan), "temperature=nan is out of range"),
        (dict(top_k=True), "top_k=True is out of range"),
        (dict(top_k=0), "top_k=0 is out of range: it must be a whole number from 1, or None"),
        (dict(top_p=0.0), "top_p=0.0 is out of range: it must be above 0 and at most 1, or None"),
        (dict(top_p=1.1), "top_p=1.1 is out of range"),
        (dict(min_p=-0.1), "min_p=-0.1 is out of range: it must be from 0 to 1, or None"),
    ],
)
def test_options_out_of_range(options, message):
    for make in (Draws, lambda seed, **options: KeyedDraws(seed, ["a"], **options)):
        with pytest.raises(ValueError) as error:
            make(0, **options)
        assert str(error.value).startswith(message)


@pytest.mark.parametrize("options", [{}, dict(temperature=0), dict(top_k=2, top_p=0.5)], ids=str)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_rows_from_which_nothing_can_be_drawn(options, wrong):
    logits = torch.zeros(3, 4)
    logits[1, slice(None) if wrong == -math.inf else 2] = wrong
    draws = Draws(0, **options)
    for call in (lambda: draws.draw(logits, [0, 1, 2], [0, 0, 0]), lambda: draws.support(logits)):
        with pytest.raises(ValueError, match=f"row 1 of the logits has the highest score {wrong} at temperature"):
            call()


def test_shapes_that_do_not_fit():
    logits = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"requests are torch.int64 of shape \(2,\) for logits \(3, 4\)"):
        Draws(0).draw(logits, [1, 2], [0, 0, 0])
    with pytest.raises(ValueError, match=r"positions are torch.float32 of shape \(3,\)"):
        Draws(0).draw(logits, [1, 2, 3], torch.zeros(3))
    with pytest.raises(ValueError, match=r"logits have shape \(4,\): it must be \[R, V\]"):
        Draws(0).support(logits[0])
    with pytest.raises(TypeError, match=r"logits are torch.float64: they must be one of torch.bfloat16"):
        Draws(0).support(logits.double())


@gpu
def test_a_gpu_and_a_cpu_keep_and_draw_the_same_ids():
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(32, 151936, generator=generator) * 3).bfloat16()  # with ties
    for options in (
        {}, dict(temperature=0.7), dict(top_k=50), dict(temperature=1.3, top_p=0.9), dict(min_p=0.01),
        dict(temperature=0.6, top_k=1000, top_p=0.95, min_p=0.001), dict(temperature=0),
    ):  # fmt: skip
        draws = Draws(5, **options)
        for on in (lambda x, d=draws: d.draw(x, range(32), range(32)), draws.support):
            assert_bitwise_equal(on(logits.cuda()).cpu(), on(logits))


# --- generate -------------------------------------------------------------------------------------------------------

NEW = 6
PROMPTS = {"a": [5, 9, 30, 7, 8, 2, 44], "b": [11, 4], "c": [60, 61, 62, 63, 3]}
OPTIONS = dict(temperature=0.9, top_k=60, top_p=0.98)
BATCHES = [["a", "b", "c"], ["c", "a"], ["b"], ["c", "b", "a"]]


def write(model, texts, count=NEW, seed=1, keyed=True, **options):
    """{request: what is written after its text}, or lists of several; padded at the left."""
    width = max(map(len, texts.values()))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts.values()])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts.values()])
    if keyed:
        processor = KeyedDraws(seed, list(texts), attention_mask=mask, **OPTIONS)
        options = dict(logits_processor=[processor], do_sample=False) | options
    else:
        torch.manual_seed(seed)
        options = dict(do_sample=True, **OPTIONS) | options
    out = model.generate(ids, attention_mask=mask, max_new_tokens=count, pad_token_id=0, **options)[:, width:]
    copies = out.shape[0] // len(texts)
    rows = out.tolist()
    if copies == 1:
        return dict(zip(texts, rows, strict=True))
    return {name: rows[i * copies : (i + 1) * copies] for i, name in enumerate(texts)}


def built(tp_group=None):
    model = tpi.parallelize(hf_models.build("llama").eval(), tp_group)
    model.generation_config.eos_token_id = None
    return model


def texts_of(names):
    return {name: PROMPTS[name] for name in names}


def written(tp_group):
    """Texts of batches, of restarts, and of torch's draws, which are the control."""
    model = built(tp_group)
    batches = [write(model, texts_of(names)) for names in BATCHES]
    beginning = write(model, texts_of("abc"), 4)
    rest = write(model, {name: PROMPTS[name] + beginning[name] for name in "abc"}, NEW - 4)
    stock = [write(model, texts_of(names), keyed=False) for names in BATCHES]
    return batches, {name: beginning[name] + rest[name] for name in "abc"}, stock


def test_one_text_at_every_degree_in_every_batch_and_after_a_restart():
    with tpi.set_tp_invariant_mode(True):
        ((batches, restarted, stock),) = run_ranks(written, 1)
        text = batches[0]
        assert len({tuple(t) for t in text.values()}) == 3
        assert all(batch == {name: text[name] for name in batch} for batch in batches)
        assert restarted == text
        assert any(batch[name] != stock[0][name] for batch in stock for name in batch)
        for degree in (2, 4):
            assert run_ranks(written, degree) == [(batches, restarted, stock)] * degree


def test_sampling_of_transformers_gives_the_drawn_token_too():
    with tpi.set_tp_invariant_mode(True):
        model = built()
        want = write(model, PROMPTS)
        assert write(model, PROMPTS, do_sample=True, top_k=0) == want
        assert write(model, PROMPTS, seed=2) != want


def test_copies_of_a_prompt_differ():
    with tpi.set_tp_invariant_mode(True):
        model = built()
        copies = write(model, PROMPTS, num_return_sequences=3, do_sample=True, top_k=0)
        alone = write(model, PROMPTS)
        for name, texts in copies.items():
            assert texts[0] == alone[name] and len({tuple(text) for text in texts}) == 3


def test_assisted_decoding_writes_the_same_text():
    with tpi.set_tp_invariant_mode(True):
        model = built()
        for name in PROMPTS:
            want = write(model, {name: PROMPTS[name]})
            assert write(model, {name: PROMPTS[name]}, prompt_lookup_num_tokens=3) == want


def other_seed_on_a_rank(tp_group, seeds):
    try:
        return write(built(tp_group), PROMPTS, seed=seeds[tp_group.rank()])
    except RuntimeError as error:
        return str(error)


def test_ranks_with_other_seeds_get_an_error():
    with tpi.set_tp_invariant_mode(True):
        errors = run_ranks(other_seed_on_a_rank, 2, [1, 2])
        assert errors[0] == errors[1]
        assert "different texts after step" in errors[0] and "give KeyedDraws one seed" in errors[0]
        texts = run_ranks(other_seed_on_a_rank, 2, [1, 1])
        assert texts[0] == texts[1] and isinstance(texts[0], dict)


@pytest.mark.parametrize(
    ("requests", "mask", "message"),
    [
        ([], None, "requests=[] must name at least one request, and each once"),
        (["a", "a"], [[1], [1]], "requests=['a', 'a'] must name"),
        (["a", "b"], [[1, 1]], "attention_mask has shape (1, 2) for 2 requests: it must be [2, length]"),
        (["a"], [[1, 0]], "attention_mask has shape (1, 2) for 1 requests"),
        (["a"], [[1, 0, 1]], "attention_mask has shape (1, 3) for 1 requests"),
    ],
)
def test_requests_and_masks_that_do_not_fit(requests, mask, message):
    with pytest.raises(ValueError) as error:
        KeyedDraws(0, requests, attention_mask=None if mask is None else torch.tensor(mask))
    assert str(error.value).startswith(message)


def test_calls_that_do_not_fit():
    with pytest.raises(ValueError, match="attention_mask=None with 2 requests: pass the mask that generate gets"):
        KeyedDraws(0, ["a", "b"])(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 50))
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    ids, scores = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.zeros(2, 50)
    draws = KeyedDraws(0, ["a", "b"], attention_mask=mask)
    first = draws(ids, scores)
    assert_bitwise_equal(draws(ids, scores), first)  # nothing is left of the call before
    longer = torch.cat([ids, ids[:, :1]], dim=1)
    assert not torch.equal(draws(longer, scores), first)
    for texts, of_texts in ((ids[:1], scores[:1]), (ids[:, :2], scores), (ids, scores[:1])):
        with pytest.raises(ValueError, match="KeyedDraws has 2 requests with prompts of 3 tokens, and is called with"):
            draws(texts, of_texts)
    with pytest.raises(ValueError, match="called with other prompts than before"):
        draws(ids + 1, scores)


def test_beam_search_is_refused():
    with pytest.raises(ValueError, match="so num_beams must be 1"):
        write(built(), PROMPTS, num_beams=2)


def test_continuous_batching_which_ignores_processors_is_refused():
    model, one = built(), [KeyedDraws(0, ["a"])]
    several, ids = [transformers.TopKLogitsWarper(5), *one], torch.tensor([PROMPTS["a"]])
    for call in (
        lambda: model.generate_batch([PROMPTS["a"]], logits_processor=several),
        lambda: model.generate(ids, cache_implementation="paged", logits_processor=one),
    ):
        with pytest.raises(ValueError, match="which transformers' continuous batching ignores"):
            call()
