"""Models of transformers whose attention has a cp_group: a rank's part of the logits, and of the gradient of the input,
has the bytes that it has on one rank. Sums over tokens are not compared here."""

from __future__ import annotations

import hf_models
import pytest
import torch
from cases import more
from fuzz_runtime import group_of
from moved_bytes import check_ranks
from torch import nn

import tp_invariant as tpi
from tp_invariant.functional.attention_choice import SafeSdpa
from tp_invariant.hugging_face.models import is_attention
from tp_invariant.testing import assert_bitwise_equal

TOKENS = hf_models.SEQUENCE
CU = torch.tensor([0, 5, 17, TOKENS], dtype=torch.int32)
OWN = torch.cat([torch.arange(n) for n in CU.diff().tolist()])[None]  # the positions of packed sequences


def build(family, group, **options):
    """With a group of one rank for everything but attention."""
    model = tpi.parallelize(hf_models.build(family, **options), None)
    for module in model.modules():
        if is_attention(module):
            module.context_parallel_group = group
    return model


def run(model, group, rows=2, positions=None, dtype=torch.float32, **given):
    """logits and the gradient of the embedded tokens, of this rank's part."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, TOKENS, hf_models.SIZES["hidden_size"], generator=generator).to(dtype)
    positions = torch.arange(TOKENS)[None] if positions is None else positions
    size, rank = (1, 0) if group is None else (group.size, group.rank)
    x, positions = (t.chunk(size, 1)[rank] for t in (x, positions))
    x.requires_grad_()
    logits = model(inputs_embeds=x, position_ids=positions, use_cache=False, **given).logits
    weights = torch.randn(rows, TOKENS, logits.shape[-1], generator=generator).to(dtype).chunk(size, 1)[rank]
    (dx,) = torch.autograd.grad((logits * weights).sum(), x)
    return logits.detach(), dx


def part_of(results, group):
    return [x.chunk(group.size, 1)[group.rank].contiguous() for x in results]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in ("qwen3", "mistral", "gemma2", "gpt_oss")),
        *((family, torch.bfloat16) for family in ("qwen3", "gemma2")),
        *(more(family, torch.bfloat16) for family in ("mistral", "gpt_oss")),
    ],
    ids=str,
)
def test_bits_are_those_of_one_rank(family, dtype):
    """Causal, windows, softcaps, sinks."""

    def case(group):
        with tpi.set_tp_invariant_mode(True):
            whole = run(build(family, None, dtype=dtype), None, dtype=dtype)
            got = run(build(family, group, dtype=dtype), group, dtype=dtype)
        assert_bitwise_equal([x.contiguous() for x in got], part_of(whole, group), family)
        return 1

    for degree in (2, 4):
        check_ranks(degree, case)


@pytest.mark.parametrize("family", ("qwen3", "gpt_oss"))
def test_packed_sequences(family):
    """cu_seq_lens_.. of the whole row, and position_ids of the part: one sequence ends and begins within a part."""

    def case(group):
        given = dict(rows=1, positions=OWN, cu_seq_lens_q=CU, cu_seq_lens_k=CU, max_length_q=12, max_length_k=12)
        with tpi.set_tp_invariant_mode(True):
            whole = run(build(family, None), None, **given)
            got = run(build(family, group), group, **given)
        assert_bitwise_equal([x.contiguous() for x in got], part_of(whole, group), family)
        return 1

    check_ranks(4, case)


def test_the_mode_off():
    """torch's SDPA between the same exchanges: the values of one process, in other bits than with the mode on."""

    def case(group):
        model = build("qwen3", group)
        with tpi.set_tp_invariant_mode(False):
            stock = run(hf_models.build("qwen3"), None)
            got = run(model, group)
        for x, y in zip(got, part_of(stock, group), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
        with tpi.set_tp_invariant_mode(True):
            assert not torch.equal(run(model, group)[1], got[1])
        return 1

    check_ranks(2, case)


def padding():
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, -7:] = 0
    return mask


WRONG = {  # mode, arguments, what the error says
    "padding": (True, dict(attention_mask=padding()), "a mask with padding"),
    "positions": (True, dict(rows=1, positions=OWN), "packed sequences by position_ids alone"),
    "rows": (True, dict(cu_seq_lens_q=CU, cu_seq_lens_k=CU), "packed sequences in 2 rows"),
    "matrix": (True, dict(attention_mask=torch.zeros(2, 1, TOKENS, TOKENS)), "a mask that is not causal"),
    "latent": (True, dict(family="deepseek_v3"), "latent attention"),
    "off": (False, dict(attention_mask=padding()), "the TP-invariant mode is off"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_errors_are_on_every_rank(kind):
    """Also where the mask of one rank alone is wrong: ranks exchange what they find at the first call of a group."""

    def case(group):
        mode, given, text = WRONG[kind]
        given, family = {k: v for k, v in given.items() if k != "family"}, given.get("family", "qwen3")
        new = group_of(list(range(group.size)), f"for the mask: {kind}")
        model = build(family, type(group)(new, group.rank, group.size))
        if (mask := given.get("attention_mask")) is not None:
            given = dict(attention_mask=mask.chunk(group.size, -1)[group.rank])
            if mask.dim() == 4:
                given = dict(attention_mask=given["attention_mask"].chunk(group.size, 2)[group.rank])
        with tpi.set_tp_invariant_mode(mode), pytest.raises((ValueError, RuntimeError), match=text):
            run(model, group, **given)
        return 1

    check_ranks(2, case)


class Attention(nn.Module):
    def forward(self, q, k, v, **options):
        return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


def test_sdpa_in_a_module_of_ones_own():
    """SafeSdpa with a cp_group, the mode on and off; masks are whole; dropout is refused."""

    def case(group):
        generator, one, ours = torch.Generator().manual_seed(0), Attention(), Attention()
        SafeSdpa(one)
        SafeSdpa(ours, cp_group=group)
        q, k, v = (torch.randn(2, h, TOKENS, d, generator=generator) for h, d in ((8, 16), (2, 16), (2, 12)))
        mine = [x.chunk(group.size, 2)[group.rank] for x in (q, k, v)]
        cases = (
            {}, dict(is_causal=True), dict(scale=0.3), dict(attn_mask=torch.ones(TOKENS, TOKENS).tril() > 0),
            dict(attn_mask=torch.randn(8, TOKENS, TOKENS, generator=generator)),
        )  # fmt: skip
        for options in cases:
            with tpi.set_tp_invariant_mode(True):
                want = one(q, k, v, **options).chunk(group.size, 2)[group.rank]
                assert_bitwise_equal(ours(*mine, **options).contiguous(), want.contiguous(), str(options.keys()))
            with tpi.set_tp_invariant_mode(False):
                want = one(q, k, v, **options).chunk(group.size, 2)[group.rank]
                torch.testing.assert_close(ours(*mine, **options), want)
        with tpi.set_tp_invariant_mode(True):
            wrong = (
                (dict(dropout_p=0.5), "dropout_p=0.5"),
                (dict(attn_mask=torch.ones(6, 6) > 0), r"attn_mask is \(6, 6\)"),
            )
            for options, text in wrong:
                with pytest.raises(ValueError, match=text):
                    ours(*mine, **options)
            with pytest.raises(ValueError, match="q has 1 tokens and k"):
                ours(mine[0][:, :, :1], *mine[1:], is_causal=True)
        return len(cases)

    check_ranks(4, case)
