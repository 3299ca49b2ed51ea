"""install() and Megatron's own specs, which --transformer-impl local and transformer_engine take."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from megatron_runs import config_of, differing, full, loss_of, model_of, on_degree, on_new_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'tp-invariant[megatron]'")


def model_of_engine(config: Any) -> Any:
    """Of the spec of Transformer Engine, which Megatron makes without it as soon as it knows of its provider."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    with mock.patch.object(gpt_layer_specs, "TESpecProvider", TESpecProvider, create=True):
        layers = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    return GPTModel(config, layers, 96, 8, position_embedding_type="rope")


def gated(rank: int, world: int, mode: bool, engine: bool) -> dict[str, torch.Tensor]:
    """The loss and all gradients of a gated model of Megatron's spec, and the loss of this package's."""
    from tp_invariant.integrations import megatron

    with on_degree(world, mode):
        config = config_of(world, qk_layernorm=engine, sequence_parallel=engine)
        model = model_of_engine(config) if engine else model_of(config, local=True)
        assert all(isinstance(layer.mlp.activation_func, megatron.GatedActivation) for layer in model.decoder.layers)
        loss = loss_of(model)
        loss.mean().backward()
        found = {name: full(p.grad, p).clone() for name, p in model.named_parameters()}
        torch.manual_seed(7)
        return found | {"loss": loss.detach(), "loss of this package's spec": loss_of(model_of(config)).detach()}


def with_and_without(rank: int, world: int, engine: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return gated(rank, world, True, engine), gated(rank, world, False, engine)


@pytest.mark.parametrize("engine", [False, True], ids=["local", "transformer_engine"])
def test_gated_models_of_megatrons_spec(engine: bool) -> None:
    """Its MLPs name no activation module, and get one: their loss is that of gpt_block_spec, at both degrees."""
    one, off = on_new_ranks(with_and_without, 1, engine)[0]
    torch.testing.assert_close(one["loss"], one["loss of this package's spec"], rtol=1e-5, atol=1e-5)
    for two, two_off in on_new_ranks(with_and_without, 2, engine):
        assert not differing(one, two)
        assert differing(off, two_off)
