"""install() and the specs that --transformer-impl local takes, which are Megatron's own."""

from __future__ import annotations

import pytest
import torch
from megatron_runs import config_of, differing, full, loss_of, model_of, on_degree, on_new_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'tp-invariant[megatron]'")


def gated(rank: int, world: int, mode: bool) -> dict[str, torch.Tensor]:
    """The loss and all gradients of a gated model of Megatron's local spec, and the loss of this package's."""
    from tp_invariant.integrations import megatron

    with on_degree(world, mode):
        config = config_of(world)
        model = model_of(config, local=True)
        assert all(isinstance(layer.mlp.activation_func, megatron.GatedActivation) for layer in model.decoder.layers)
        loss = loss_of(model)
        loss.mean().backward()
        found = {name: full(p.grad, p).clone() for name, p in model.named_parameters()}
        torch.manual_seed(7)
        return found | {"loss": loss.detach(), "loss of this package's spec": loss_of(model_of(config)).detach()}


def with_and_without(rank: int, world: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return gated(rank, world, True), gated(rank, world, False)


def test_gated_models_of_megatrons_local_spec() -> None:
    """Its MLPs name no activation module, and get one: their loss is that of gpt_block_spec, at both degrees."""
    one, off = on_new_ranks(with_and_without, 1)[0]
    torch.testing.assert_close(one["loss"], one["loss of this package's spec"], rtol=1e-5, atol=1e-5)
    for two, two_off in on_new_ranks(with_and_without, 2):
        assert not differing(one, two)
        assert differing(off, two_off)
