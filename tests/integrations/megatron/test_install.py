"""install() and uninstall(), and what is refused."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
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
    with pytest.raises(ValueError, match="tensor_model_parallel_size=3"):
        megatron.padded_vocab_size(50257, 128, 3)


def _tokenizers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module in which the tokenizer's vocabulary is padded: of 0.16 a stand-in, for its package has none."""
    from tp_invariant.integrations import megatron

    if megatron.versions.HAS_HYBRID:
        return importlib.import_module("megatron.core.tokenizers.utils.build_tokenizer")
    stand_in = ModuleType("megatron.training.tokenizer.tokenizer")
    stand_in._vocab_size_with_padding = lambda size, args: (
        -(-size // (128 * args.tensor_model_parallel_size)) * (128 * args.tensor_model_parallel_size)
    )
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    return stand_in


def test_the_vocabulary_of_a_tokenizer_is_padded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    from tp_invariant.integrations import megatron

    module = _tokenizers(monkeypatch)
    name = "vocab_size_with_padding" if megatron.versions.HAS_HYBRID else "_vocab_size_with_padding"
    args = SimpleNamespace(make_vocab_size_divisible_by=128, tensor_model_parallel_size=4, rank=1)
    megatron.install()
    try:
        assert getattr(module, name)(50257, args) == 50304
    finally:
        megatron.uninstall()
    assert getattr(module, name)(50257, args) == 50688  # Megatron's own at TP=4


@pytest.mark.parametrize("kind", ["gpt", "hybrid"])
def test_model_builders_pad_the_vocabulary_alike(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTModelConfig(should_pad_vocab=True): the size and the stack that the builder gives its model."""
    builders = pytest.importorskip(f"megatron.training.models.{kind}", reason="0.19 has it")

    from tp_invariant.integrations import megatron

    built: list[dict[str, Any]] = []
    names = {"gpt": ("GPTModel", "GPTModelConfig", "GPTModelBuilder")}
    model, config, builder = names.get(kind, ("HybridModel", "HybridModelConfig", "HybridModelBuilder"))
    monkeypatch.setattr(builders, model, lambda **options: built.append(options))
    options: dict[str, Any] = dict(vocab_size=50257, should_pad_vocab=True)
    options |= {"transformer_layer_spec": megatron.gpt_layer_spec()} if kind == "gpt" else {}
    groups = SimpleNamespace(pp=None)
    for tp in (1, 4):
        description = getattr(builders, config)(transformer=config_of(tp), **options)
        megatron.install()
        try:
            getattr(builders, builder)(description).build_model(groups, pre_process=True, post_process=True)
        finally:
            megatron.uninstall()
        assert built[-1]["vocab_size"] == 50304
    if kind == "hybrid":
        assert "tp_invariant" in str(built[-1]["hybrid_stack_spec"])
    getattr(builders, builder)(description).build_model(groups, pre_process=True, post_process=True)
    assert built[-1]["vocab_size"] == 50688
    assert "hybrid_stack_spec" not in built[-1] or "tp_invariant" not in str(built[-1]["hybrid_stack_spec"])


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
