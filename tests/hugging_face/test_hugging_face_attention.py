"""attn_implementation="tp_invariant": what a model sees, decoding and padding to the bit, and what is refused."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
from unittest import mock

import hf_models
import pytest
import torch
import torch.nn.functional as F
import transformers
from ranks import run_ranks
from torch import nn
from transformers import DynamicCache, StaticCache, masking_utils

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.conversion.convert import parallelize
from tp_invariant.hugging_face import models as hugging_face
from tp_invariant.hugging_face.masks import visible_keys
from tp_invariant.kernels.attention import reference, spec
from tp_invariant.testing import assert_bitwise_equal

IDS = torch.randint(3, hf_models.VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def registered():
    tpi.hugging_face.register_attention()


@pytest.fixture
def seen(monkeypatch):
    """The VisibleKeys of each call; none where a mask stayed a matrix."""
    calls = []
    attend = hugging_face.attend

    def spy(q, k, v, visible, **options):
        calls.append(visible)
        return attend(q, k, v, visible, **options)

    monkeypatch.setattr(hugging_face, "attend", spy)
    return calls


def padding(side: str) -> torch.Tensor:
    mask = torch.ones_like(IDS)
    mask[1, {"right": slice(-5, None), "left": slice(5)}[side]] = 0
    return mask


def padded_batch(side: str) -> dict[str, torch.Tensor]:
    mask = padding(side)
    return dict(input_ids=IDS, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))


# --- decoding -------------------------------------------------------------------------------------------------------


def decoded(tp_group, mode, prompt):
    """Logits of a full forward; and those of a prompt, then token by token against a cache; what was decoded."""
    model = parallelize(hf_models.build("qwen3"), tp_group).eval()
    with tpi.set_tp_invariant_mode(mode), torch.no_grad():
        ids, cache, steps = IDS[:, :prompt], DynamicCache(), []
        next_ids = ids
        while True:
            steps.append(model(input_ids=next_ids, past_key_values=cache).logits)
            if ids.shape[1] == IDS.shape[1]:
                break
            next_ids = steps[-1][:, -1:].argmax(-1)
            ids = torch.cat([ids, next_ids], dim=1)
        return model(input_ids=ids, use_cache=False).logits, torch.cat(steps, dim=1), ids


def test_decoding_with_a_cache_gives_the_logits_of_the_full_forward():
    (expected,) = run_ranks(decoded, 1, True, 5)
    assert_bitwise_equal(expected[1], expected[0])
    for got in run_ranks(decoded, 2, True, 1):
        assert_bitwise_equal(got[1], got[0])
    for got in run_ranks(decoded, 2, True, 5):
        assert_bitwise_equal(got, expected)
    full, steps, _ = decoded(None, False, 5)  # the control
    torch.testing.assert_close(steps, full, rtol=1e-4, atol=1e-4)
    assert not torch.equal(steps, full)


def trained_on_gpus(tp_group, mode, sp):
    """Losses and the full weights' digest after three steps in bfloat16; 640 tokens are more than a chunk of keys."""
    import transformers

    hugging_face.register_attention()
    device = torch.device("cuda", torch.cuda.current_device())
    config = transformers.Qwen3Config(
        vocab_size=512, hidden_size=512, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).to(device, torch.bfloat16)
    model.set_attn_implementation("tp_invariant")
    losses = []
    with tpi.set_tp_invariant_mode(mode):
        model = parallelize(model, tp_group, sequence_parallel=sp)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            ids = torch.randint(0, 512, (2, 640), generator=torch.Generator().manual_seed(step)).to(device)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
    state = {name: tensor.cpu() for name, tensor in tpi.full_state_dict(model).items()}
    return losses, testing.digest(state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_training_at_every_degree_on_gpus():
    ((losses, digest),) = testing.run_ranks(trained_on_gpus, 1, True, False, device="cuda")
    assert all(6 < loss < 7 for loss in losses), losses  # nothing to learn yet: log(512) is 6.2
    for degree, sp in ((2, False), (2, True), (4, True)):
        if degree <= testing.gpu_ranks():
            for got in testing.run_ranks(trained_on_gpus, degree, True, sp, device="cuda"):
                assert_bitwise_equal(got[0], losses)
                assert got[1] == digest, f"TP={degree}, SP={sp}"
    if testing.gpu_ranks() >= 2:  # the control
        off = testing.run_ranks(trained_on_gpus, 2, False, False, device="cuda")[0][1]
        assert off not in (digest, testing.run_ranks(trained_on_gpus, 1, False, False, device="cuda")[0][1])


def decoded_on_gpus(tp_group, mode, prompt, steps):
    """Whether a long prompt and greedy steps against a cache give the full forward's logits, bytes and all; these."""
    import transformers

    device = torch.device("cuda", torch.cuda.current_device())
    config = transformers.Qwen3Config(
        vocab_size=4096, hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).to(device, torch.bfloat16).eval()
    model = parallelize(model, tp_group)
    ids = torch.randint(0, 4096, (2, prompt), generator=torch.Generator().manual_seed(1)).to(device)
    cache, logits, next_ids = DynamicCache(), [], ids
    with tpi.set_tp_invariant_mode(mode), torch.no_grad():
        for step in range(1 + steps):
            logits.append(model(input_ids=next_ids, past_key_values=cache).logits)
            if step < steps:
                next_ids = logits[-1][:, -1:].argmax(-1)
                ids = torch.cat([ids, next_ids], dim=1)
        full, stepwise = model(input_ids=ids, use_cache=False).logits, torch.cat(logits, dim=1)
    same = torch.equal(stepwise.view(torch.int16), full.view(torch.int16))
    return same, testing.digest(full.cpu()), float((stepwise - full).norm() / full.norm())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_decoding_at_every_degree_on_gpus():
    """1000 tokens at once, then 60 one by one: chunks of keys folded by another kernel than a prefill's."""
    digests = []
    for degree in (4, 2, 1):
        if degree <= testing.gpu_ranks():
            for same, digest, error in testing.run_ranks(decoded_on_gpus, degree, True, 1000, 60, device="cuda"):
                assert same, f"TP={degree}: off by {error} of the norm"
                digests.append(digest)
    assert len(set(digests)) == 1
    for same, digest, error in testing.run_ranks(decoded_on_gpus, 1, False, 1000, 60, device="cuda"):  # the control
        assert not same and digest != digests[0] and error < 0.05, error


def decoded_with_a_window(tp_group, family, prompts, chunk=spec.CHUNK, hole=slice(0)):
    """Logits of a full forward of padded sequences, and of steps against caches that drop what a window has passed.

    With short blocks of keys, because sums within one do not depend on where in it the keys are.
    """
    model = parallelize(hf_models.build(family), tp_group).eval()
    caches = (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=40))
    mask = padding("left")
    mask[:, hole] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with (
        mock.patch.object(reference, "KEY_BLOCK", 4),
        mock.patch.object(spec, "CHUNK", chunk),
        mock.patch.object(importlib.import_module("tp_invariant.functional.attention"), "CHUNK", chunk),
        tpi.set_tp_invariant_mode(True),
        torch.no_grad(),
    ):
        results = [model(input_ids=IDS, attention_mask=mask, position_ids=positions, use_cache=False).logits]
        for cache in caches:
            steps = []
            for a, b in itertools.pairwise([0, *prompts, *range(prompts[-1] + 1, 25)]):
                given = dict(input_ids=IDS[:, a:b], attention_mask=mask[:, :b], position_ids=positions[:, a:b])
                steps.append(model(**given, past_key_values=cache).logits)
            results.append(torch.cat(steps, dim=1))
            assert any(0 < layer.keys.shape[2] < 24 for layer in cache.layers), "none dropped a key"
        return [x[mask.bool()] for x in results]


@pytest.mark.parametrize("family, hole", [("mistral", slice(0)), ("mistral", slice(4, 5)), ("gemma2", slice(0))])
def test_a_window_in_a_cache_at_every_degree(family, hole):
    """Of two sequences, one padded on the left: so their keys begin at other positions. With padding inside of them,
    too, the mask is a matrix."""
    ((expected, *steps),) = run_ranks(decoded_with_a_window, 1, family, (6, 15), spec.CHUNK, hole)
    for got in steps:
        assert_bitwise_equal(got, expected)
    for results in run_ranks(decoded_with_a_window, 2, family, (3,) if hole == slice(0) else (7,), spec.CHUNK, hole):
        for got in results:
            assert_bitwise_equal(got, expected)
    full, *steps = decoded_with_a_window(None, family, (6, 15), 1, hole)  # the control: keys counted from the cache's
    assert_bitwise_equal(full, expected)
    for got in steps:
        torch.testing.assert_close(got, full, rtol=1e-4, atol=1e-4)
        assert not torch.equal(got, full)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral"])
def test_caches_and_chunks(family, seen):
    """A growing cache, one that drops what a window has passed, and a static one, whose end is empty."""
    model = parallelize(hf_models.build(family), None).eval()
    caches = {
        "dynamic": DynamicCache(),
        "sliding": DynamicCache(config=model.config),
        "static": StaticCache(config=model.config, max_cache_len=40),
    }
    with tpi.set_tp_invariant_mode(True), torch.no_grad():
        full = model(input_ids=IDS, use_cache=False).logits
        for kind, cache in caches.items():
            cuts = [0, 10, 17, 18, 24]
            pieces = itertools.pairwise(cuts)
            got = torch.cat([model(input_ids=IDS[:, a:b], past_key_values=cache).logits for a, b in pieces], dim=1)
            assert_bitwise_equal(got, full, kind)
            torch.testing.assert_close(got, full, rtol=1e-4, atol=1e-4)
    assert len(seen) == model.config.num_hidden_layers * 13, "nothing went by a matrix"


@pytest.mark.parametrize(
    "family, how, side",
    [("qwen3", "by name", "none"), ("llama", "by name", "left")] + [(f, "", "left") for f in hf_models.FAMILIES],
)
def test_generate_with_either_cache(family, how, side, seen):
    """The masks of a static cache are made by generate, and handed to the model as its attention_mask."""
    model = hf_models.build(family).eval()
    if how == "by name":
        model.set_attn_implementation("tp_invariant")
    else:
        model = parallelize(model, None)
    model.generation_config.eos_token_id = None
    mask = torch.ones_like(IDS) if side == "none" else padding(side)
    outputs = []
    for cache in ("dynamic", "static"):
        with tpi.set_tp_invariant_mode(how != "by name"):
            got = model.generate(
                IDS, attention_mask=mask, max_new_tokens=3, do_sample=False, cache_implementation=cache,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        outputs.append((got.sequences, torch.stack(got.logits)))
    assert outputs[0][0].shape == (2, 27)
    assert_bitwise_equal(outputs[1], outputs[0])
    assert len(seen) == 2 * 3 * model.config.num_hidden_layers


# --- padding and packing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", hf_models.FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_near_transformers_own_attention(family, side, seen):
    """On its own, without the mode and without parallelize."""
    model = hf_models.build(family).eval()
    outputs = {}
    for name in ("eager", "tp_invariant"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            outputs[name] = model(**padded_batch(side), use_cache=False).logits[padding(side).bool()]
    torch.testing.assert_close(outputs["tp_invariant"], outputs["eager"], rtol=1e-4, atol=1e-4)
    assert len(seen) == model.config.num_hidden_layers
    assert all(visible.packing is not None for visible in seen)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_sequence_has_the_bits_that_it_has_alone(family, side):
    model = parallelize(hf_models.build(family), None).eval()
    tokens = padding(side)[1].bool()
    with tpi.set_tp_invariant_mode(True), torch.no_grad():
        padded = model(**padded_batch(side), use_cache=False).logits
        alone = model(input_ids=IDS[1:, tokens], use_cache=False).logits
        assert_bitwise_equal(padded[1][tokens], alone[0])
        assert_bitwise_equal(padded[:1], model(input_ids=IDS[:1], use_cache=False).logits)


def at_padding(tp_group):
    """By side: logits, and the loss with labels at tokens alone."""
    results = {}
    for side in ("left", "right"):
        model = parallelize(hf_models.build("llama").eval(), tp_group)
        labels = IDS.masked_fill(padding(side) == 0, -100)
        with tpi.set_tp_invariant_mode(True), torch.no_grad():
            output = model(**padded_batch(side), labels=labels, use_cache=False)
        results[side] = output.logits, output.loss
    return results


def test_what_is_read_at_tokens_has_transformers_values_and_padding_has_others():
    one, two = (run_ranks(at_padding, degree)[0] for degree in (1, 2))
    assert_bitwise_equal(one, two)
    for side, (logits, loss) in one.items():
        tokens, labels = padding(side).bool(), IDS.masked_fill(padding(side) == 0, -100)
        assert logits.isfinite().all()
        for implementation in ("sdpa", "eager"):
            model = hf_models.build("llama", attn_implementation=implementation).eval()
            with torch.no_grad():
                stock = model(**padded_batch(side), labels=labels, use_cache=False)
            torch.testing.assert_close(logits[tokens], stock.logits[tokens], rtol=1e-4, atol=1e-4)
            alike = torch.allclose(logits[~tokens], stock.logits[~tokens], rtol=1e-4, atol=1e-4)
            assert alike == (side == "left" and implementation == "sdpa")
            if side == "right" or alike:  # else the first token is predicted at padding
                torch.testing.assert_close(loss, stock.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_packed_sequences_have_the_bits_that_they_have_alone(family, seen):
    model = parallelize(hf_models.build(family), None).eval()
    lengths = [9, 1, 14]
    cu = torch.tensor([0, 9, 10, 24])
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    with tpi.set_tp_invariant_mode(True), torch.no_grad():
        by_positions = model(input_ids=IDS[:1], position_ids=positions, use_cache=False).logits
        names = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=14, max_length_k=14)
        by_lengths = model(input_ids=IDS[:1], position_ids=positions, use_cache=False, **names).logits
        alone = [model(input_ids=x, use_cache=False).logits for x in IDS[:1].split(lengths, dim=1)]
    assert_bitwise_equal(by_positions, torch.cat(alone, dim=1))
    assert_bitwise_equal(by_lengths, by_positions)
    assert [v.packing is not None for v in seen] == [True] * 4 + [False] * 6


def test_gradients_of_padded_sequences():
    """Against transformers' own attention, in float32."""
    grads = {}
    for name in ("eager", "tp_invariant"):
        model = hf_models.build("qwen3")
        model.set_attn_implementation(name)
        labels = IDS.masked_fill(padding("left") == 0, -100)
        labels[1, 5] = -100  # which the last padding token would have to predict
        model(**padded_batch("left"), labels=labels, use_cache=False).loss.backward()
        grads[name] = {n: p.grad for n, p in model.named_parameters()}
    for name, grad in grads["eager"].items():
        error = (grads["tp_invariant"][name] - grad).norm() / grad.norm()
        assert error < 1e-5, (name, float(error))


def test_sinks_near_transformers_own():
    """gpt-oss, with a sliding window in every other layer: logits, and the gradients of the sinks."""
    config = transformers.GptOssConfig(
        vocab_size=hf_models.VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1, sliding_window=7,
        initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager")
    results = {}
    for name in ("eager", "tp_invariant"):
        model.set_attn_implementation(name)
        model.zero_grad()
        logits = model(**padded_batch("left"), use_cache=False).logits[padding("left").bool()]
        logits.square().sum().backward()
        results[name] = [logits.detach(), *(layer.self_attn.sinks.grad for layer in model.model.layers)]
    for got, expected in zip(results["tp_invariant"], results["eager"], strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


# --- masks that are no causal, full, sliding or packed one ----------------------------------------------------------

SIZES = dict(batch_size=2, q_length=6, kv_length=6, q_offset=0, kv_offset=0, device="cpu")
HOLES = torch.tensor([[1, 1, 0, 1, 1, 1], [1] * 6]).bool()


@pytest.mark.parametrize(
    "given",
    [
        dict(mask_function=masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64))),
        dict(mask_function=masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k < 2)),
        dict(mask_function=masking_utils.sliding_window_bidirectional_mask_function(3)),
        dict(mask_function=masking_utils.sliding_window_causal_mask_function(3), attention_mask=HOLES),
        dict(mask_function=masking_utils.causal_mask_function, q_offset=3),  # more keys than there are
    ],
    ids=["chunked", "or", "both ways", "holes and a window", "offset"],
)
def test_others_stay_a_matrix(given):
    assert visible_keys(**{**SIZES, **given}) is None


@pytest.mark.parametrize("ids, known", [([0, 0, 1, 1, 0, 0], False), ([1, 1, 0, 2, 2, 2], True)])
def test_packed_ids_that_come_again_stay_a_matrix(ids, known):
    packed = masking_utils.packed_sequence_mask_function(torch.tensor([ids, [0] * 6]))
    both = masking_utils.and_masks(masking_utils.causal_mask_function, packed)
    assert (visible_keys(**SIZES, mask_function=both) is not None) == known


def test_a_matrix_of_ones_own(seen):
    """4-D masks are taken as they are."""
    model = hf_models.build("llama").eval()
    mask = torch.ones(24, 24, dtype=torch.bool).tril().expand(2, 1, 24, 24)
    outputs = {}
    for name in ("sdpa", "tp_invariant"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            outputs[name] = model(input_ids=IDS, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(outputs["tp_invariant"], outputs["sdpa"], rtol=1e-4, atol=1e-4)
    assert not seen


# --- what is refused ------------------------------------------------------------------------------------------------


def test_what_is_refused():
    model = hf_models.build("llama")
    model.set_attn_implementation("tp_invariant")
    attention = model.model.layers[0].self_attn
    q, k = torch.zeros(1, 8, 6, 8), torch.zeros(1, 4, 6, 8)
    call = functools.partial(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["tp_invariant"], **{**SIZES, "batch_size": 1})
    causal = call(mask_function=masking_utils.causal_mask_function)
    run = functools.partial(hugging_face._HuggingFace(None), attention, q, k, k)
    for name in ("position_bias", "cache", "sinks", "block_indices", "indices", "head_mask", "attention_bias"):
        with pytest.raises(ValueError, match=f"LlamaAttention passes {name}, which tpi.attention does not take"):
            run(causal, **{name: q})
    with pytest.raises(ValueError, match="passes block_size, which"):
        run(causal, block_size=4)
    run(causal, position_ids=q, use_cache=True, block_size=None, sliding_window=4, num_items_in_batch=q)
    with pytest.raises(ValueError, match=r"attention dropout of LlamaAttention=0\.1"):
        run(causal, dropout=0.1, cu_seq_lens_q=q)
    cu = torch.tensor([0, 6])
    with pytest.raises(ValueError, match=r"passes cu_seq_lens_\.\. with a mask that is not causal"):
        run(torch.ones(1, 1, 6, 6, dtype=torch.bool), cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    with pytest.raises(ValueError, match="need both cu_seq_lens_q and cu_seq_lens_k"):
        run(causal, cu_seq_lens_q=cu)
    padded = call(mask_function=masking_utils.causal_mask_function, attention_mask=F.pad(torch.ones(1, 5), (1, 0)))
    with pytest.raises(ValueError, match="and no padding mask beside them"):
        run(padded, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    with pytest.raises(ValueError, match=r"sliding_window=5 and no mask, with causal=False, 6 queries and 6 keys"):
        run(None, sliding_window=5, is_causal=False)
    with pytest.raises(ValueError, match=r"with causal=True, 3 queries and 6 keys"):
        hugging_face._HuggingFace(None)(attention, q[:, :, :3], k, k, None, sliding_window=5)
    with tpi.set_tp_invariant_mode(False), pytest.raises(RuntimeError, match="turned off inside a forward"):
        hugging_face._HuggingFace("sdpa")(attention, q, k, k, causal)


def test_a_window_without_a_mask_is_a_window():
    """Of all queries, and of a decode step; one that is as long as the keys hides nothing, also without causal."""
    q, k, v = torch.randn(3, 1, 4, 20, 8, generator=torch.Generator().manual_seed(0))
    run = functools.partial(hugging_face._HuggingFace(None), nn.Identity())
    expected = tpi.attention(q, k, v, causal=True, window=5).transpose(1, 2).contiguous()
    assert_bitwise_equal(run(q, k, v, None, sliding_window=5)[0], expected)
    assert_bitwise_equal(run(q[:, :, -1:], k, v, None, sliding_window=5)[0], expected[:, -1:].contiguous())
    for causal in (True, False):
        longer = run(q, k, v, None, sliding_window=20, is_causal=causal)[0]
        assert_bitwise_equal(longer, run(q, k, v, None, is_causal=causal)[0])
        assert not torch.equal(longer, expected)


COMPUTED_WITH = {
    "add": lambda mask, x: x + mask,
    "torch.where": lambda mask, x: torch.where(mask, x, 0),
    "masked_fill": lambda mask, x: x.masked_fill(mask, 0),
    "__getitem__": lambda mask, x: mask[:, :, :, :6],
    "__mul__": lambda mask, x: mask * 2,
    "__rsub__": lambda mask, x: 1.0 - mask,
    "__invert__": lambda mask, x: ~mask,
    "__eq__": lambda mask, x: mask == 0,
    r"\.to\b": lambda mask, x: mask.to(x.device),
    r"\.size\b": lambda mask, x: mask.size(),
}


@pytest.mark.parametrize("what", COMPUTED_WITH)
def test_computing_with_the_mask_is_an_error_that_says_so(what):
    visible = visible_keys(**SIZES, mask_function=masking_utils.causal_mask_function)
    with pytest.raises((NotImplementedError, AttributeError), match=rf"computes with its attention mask \(.*{what}"):
        COMPUTED_WITH[what](visible, torch.zeros(2, 1, 6, 6))
    assert copy.deepcopy(visible).keys == 6 and not hasattr(visible, "device") and visible in [visible]


OWN = {
    "Bloom": dict(n_layer=2, n_head=8),  # adds position biases
    "Deberta": dict(intermediate_size=128, num_hidden_layers=2, num_attention_heads=8),  # asks for no mask either
}


OF_HEADS = {"Bloom": "h.*.self_attention.query_key_value", "Deberta": "encoder.layer.*.attention.self.in_proj"}


@pytest.mark.parametrize("family", OWN)
def test_a_model_with_an_attention_of_its_own(family):
    """Refused where its heads would be sharded; test_dropout.py has a DeBERTa with all of them on every rank."""
    config = getattr(transformers, f"{family}Config")(vocab_size=96, hidden_size=64, **OWN[family])
    model = getattr(transformers, f"{family}Model")(config)
    with pytest.raises(ValueError, match=f"{family}Attention.* in {MODELS}.{family.lower()}.* of its own"):
        parallelize(model, None, {OF_HEADS[family]: "colwise"})
    if family == "Bloom":
        model = getattr(transformers, f"{family}Model")._from_config(config, attn_implementation="tp_invariant")
        with pytest.raises(NotImplementedError, match='choose attn_implementation="eager"'):
            model(IDS)


def test_a_packing_goes_where_q_is():
    """Under device_map="auto" layers lie on several devices; meta stands for the other."""
    visible = visible_keys(**SIZES, mask_function=masking_utils.causal_mask_function, attention_mask=HOLES)
    there = visible.packing.to(torch.device("meta"))
    assert there.cu_q.is_meta and there.cu_k.is_meta and there.q_rows.is_meta and there.k_rows.is_meta
    assert there.longest_q == 6 and visible.packing.to(torch.device("cpu")) is visible.packing


def test_compiled_with_graph_breaks_it_has_the_same_bits():
    """fullgraph=True is an error, as the docstring says: masks are made in Python."""
    torch._dynamo.reset()
    model = hf_models.build("llama", num_hidden_layers=1).eval()
    model.set_attn_implementation("tp_invariant")
    with torch.no_grad():
        expected = model(**padded_batch("left"), use_cache=False).logits
        got = torch.compile(model, backend="eager")(**padded_batch("left"), use_cache=False).logits
        assert_bitwise_equal(got, expected)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(model, backend="eager", fullgraph=True)(**padded_batch("left"), use_cache=False)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["eager", "tp_invariant"])
def test_output_attentions(name):
    """Transformers' own eager attention gives them, where a rank has all heads."""
    model = hf_models.build("llama").eval()
    model.set_attn_implementation(name)
    want = model(input_ids=IDS, output_attentions=True).attentions if name == "eager" else None
    model = parallelize(model, None)
    for mode in (True, False):
        with tpi.set_tp_invariant_mode(mode):
            if want is not None:
                torch.testing.assert_close(model(input_ids=IDS, output_attentions=True).attentions, want)
            else:
                with pytest.raises(ValueError, match="attn_implementation='tp_invariant' has no weights to give"):
                    model(input_ids=IDS, output_attentions=True)


class ComparesTheName(nn.Module):
    """As MiniMax-M3's, Falcon's and others do."""

    def forward(self, x):
        return 2 * x if self.config._attn_implementation == "eager" else x


def test_a_model_that_hangs_more_on_the_name_is_refused():
    model = hf_models.build("llama")
    model.model.layers[0].extra = ComparesTheName()
    model.set_attn_implementation("eager")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"attn_implementation='eager': .* does other things for this name"):
            parallelize(model, None)
    model.set_attn_implementation("sdpa")
    parallelize(model, None)
    compared = {
        name: hugging_face._compared_names(importlib.import_module(f"{MODELS}.{name}").__name__) for name in FILES
    }
    assert compared == FILES


MODELS = "transformers.models"
FILES = {
    "llama.modeling_llama": frozenset(),
    "gpt2.modeling_gpt2": frozenset({"eager"}),
    "falcon.modeling_falcon": frozenset({"sdpa"}),
}
