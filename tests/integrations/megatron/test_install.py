"""install() and uninstall(), and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_runs import config_of

from tp_invariant.testing import assert_bitwise_equal

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'tp-invariant[megatron]'")


def test_uninstall_puts_back_what_install_replaced() -> None:
    from megatron.core import tensor_parallel
    from megatron.core.models.backends import LocalSpecProvider

    from tp_invariant.integrations import megatron

    before = tensor_parallel.ColumnParallelLinear, LocalSpecProvider.core_attention
    names = megatron.install()
    assert tensor_parallel.ColumnParallelLinear is megatron.ColumnParallelLinear
    assert "megatron.core.tensor_parallel.ColumnParallelLinear" in names
    assert megatron.install() == names
    megatron.uninstall()
    assert set(megatron.install(models=False)) < set(names) == set(megatron.install())
    megatron.uninstall()
    assert (tensor_parallel.ColumnParallelLinear, LocalSpecProvider.core_attention) == before
    assert megatron.replaced() == []


def test_one_error_names_every_fault_of_a_configuration() -> None:
    from tp_invariant.integrations import megatron

    config = config_of(4, hidden_dropout=0.1, num_query_groups=2)
    with pytest.raises(ValueError, match=r"(?s)1\. hidden_dropout=0\.1.*2\. num_query_groups=2"):
        megatron.check_config(config)
    megatron.check_config(config_of(4))


def test_the_padded_vocabulary_does_not_depend_on_the_degree() -> None:
    from tp_invariant.integrations import megatron

    assert {megatron.padded_vocab_size(50257, 128, tp) for tp in (1, 2, 4, 8)} == {50304}
    if megatron.versions.HAS_HYBRID:
        from megatron.core.tokenizers.utils import build_tokenizer

        for tp in (1, 4):
            args = SimpleNamespace(make_vocab_size_divisible_by=128, tensor_model_parallel_size=tp, rank=1)
            megatron.install()
            try:
                assert build_tokenizer.vocab_size_with_padding(50257, args) == 50304
            finally:
                megatron.uninstall()
        assert build_tokenizer.vocab_size_with_padding(50257, args) == 50688  # Megatron's own at TP=4
    with pytest.raises(ValueError, match="tensor_model_parallel_size=3"):
        megatron.padded_vocab_size(50257, 128, 3)


def test_an_unknown_version_is_refused_by_name(monkeypatch: Any) -> None:
    import megatron.core

    from tp_invariant.integrations.megatron import versions

    monkeypatch.setattr(megatron.core, "__version__", "0.99.0")
    with pytest.raises(ImportError, match=r"megatron-core 0\.99\.0 is not supported"):
        versions.check_version()


def test_mixtures_of_experts_are_refused_by_name() -> None:
    from tp_invariant.integrations import megatron

    with pytest.raises(NotImplementedError, match="num_moe_experts=8"):
        megatron.gpt_layer_spec(SimpleNamespace(num_moe_experts=8))


def test_packed_sequences_have_the_bytes_of_each_alone() -> None:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from tp_invariant.integrations import megatron

    layer = megatron.CoreAttention(config_of(1), 1, AttnMaskType.causal, "self")
    q, k, v = (torch.randn(12, heads, 4, generator=torch.Generator().manual_seed(heads)) for heads in (8, 4, 2))
    v = torch.cat([v, v], 1)
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = PackedSeqParams("thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=7, max_seqlen_kv=7)
    together = layer(q, k, v, None, packed_seq_params=packed)
    for start, end in ((0, 5), (5, 12)):
        alone = layer(*(x[start:end].unsqueeze(1) for x in (q, k, v)))
        assert_bitwise_equal(together[start:end], alone.squeeze(1))


def test_a_mask_that_hides_more_than_a_causal_layer_does_is_refused() -> None:
    from megatron.core.transformer.enums import AttnMaskType

    from tp_invariant.integrations import megatron

    layer = megatron.CoreAttention(config_of(1), 1, AttnMaskType.causal, "self")
    q, k, v = torch.randn(3, 4, 1, 8, 4)
    layer(q, k, v, torch.ones(4, 4, dtype=torch.bool).triu(1)[None, None])
    layer = megatron.CoreAttention(config_of(1), 1, AttnMaskType.causal, "self")
    documents = torch.ones(4, 4, dtype=torch.bool).triu(1)[None, None]
    documents[..., 2:, :2] = True
    with pytest.raises(ValueError, match="reset-attention-mask"):
        layer(q, k, v, documents)
