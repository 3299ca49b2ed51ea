"""install() and uninstall(), and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron_runs import config_of

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
