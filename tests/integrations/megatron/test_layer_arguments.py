"""Arguments of the linear layers that Megatron's own models seldom give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_runs import config_of, differing, on_degree, on_new_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'tp-invariant[megatron]'")


def outputs(rank: int, world: int, mode: bool) -> dict[str, Any]:
    """Whole outputs and whole-output gradients of columns: gathered at a call, and with another layer's weight."""
    from tp_invariant.integrations import megatron

    with on_degree(world, mode):
        options: dict[str, Any] = dict(config=config_of(world), init_method=torch.nn.init.normal_)
        x = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
        plain = megatron.ColumnParallelLinear(16, 24, bias=True, **options)
        without = megatron.ColumnParallelLinear(16, 24, bias=True, skip_weight_param_allocation=True, **options)
        part, _ = plain(x)
        assert part.shape[-1] == 24 // world and not plain.gather_output
        found = {"gathered": plain(x, runtime_gather_output=True)[0]}
        assert without.weight is None and without.bias.shape == (24 // world,)
        with pytest.raises(RuntimeError, match="call it with weight"):
            without(x)
        with torch.no_grad():
            without.bias.add_(torch.arange(24.0)[24 // world * rank :][: 24 // world])
        found["other weight"] = without(x, weight=plain.weight, runtime_gather_output=True)[0]
        sum(found.values()).square().sum().backward()
        torch.testing.assert_close(found["other weight"], found["gathered"] + torch.arange(24.0))
        return {name: y.detach().clone() for name, y in found.items()} | {"gradient of x": x.grad.clone()}


def with_and_without(rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return outputs(rank, world, True), outputs(rank, world, False)


def test_gathering_at_a_call_and_a_weight_of_another_layer() -> None:
    one, off = on_new_ranks(with_and_without, 1)[0]
    for two, two_off in on_new_ranks(with_and_without, 2):
        assert not differing(one, two)
        assert differing(off, two_off) == ["gradient of x"]


def refusals(rank: int, world: int) -> list[str]:
    """One text for each argument that a layer refuses."""
    from tp_invariant.integrations import megatron

    of_all = {"is_expert": True}
    of_plain = of_all | {"keep_master_weight_for_test": True}
    refused = {
        megatron.ColumnParallelLinear: of_plain
        | {"embedding_activation_buffer": [], "grad_output_buffer": [], "disable_grad_reduce": True},
        megatron.RowParallelLinear: of_plain,
        megatron.LayerNormColumnParallelLinear: of_all | {"gather_output": True, "skip_weight_param_allocation": True},
    }
    texts = []
    with on_degree(world):
        for layer, arguments in refused.items():
            options: dict[str, Any] = dict(config=config_of(world), init_method=None, bias=True, skip_bias_add=False)
            if layer is megatron.RowParallelLinear:
                options["input_is_parallel"] = True
            elif layer is megatron.LayerNormColumnParallelLinear:
                options |= dict(gather_output=False, is_expert=False)
            for name, value in arguments.items():
                with pytest.raises(ValueError) as error:
                    layer(16, 24, **(options | {name: value}))
                assert str(error.value).startswith(f"{layer.__name__}: {name}={value!r} is not supported")
                texts.append(name)
    return texts


def test_each_refused_argument_is_named() -> None:
    assert len(on_new_ranks(refusals, 1)[0]) == 10


def zero_centered(rank: int, world: int, mode: bool) -> dict[str, Any]:
    """A norm of weights about zero, alone and before a column-parallel layer, and the gradients of its weight."""
    from tp_invariant.integrations import megatron

    with on_degree(world, mode):
        config = config_of(world, layernorm_zero_centered_gamma=True)
        norm = megatron.Norm(config, 32)
        assert not norm.weight.any()
        options: dict[str, Any] = dict(config=config, init_method=torch.nn.init.normal_, gather_output=False)
        fused = megatron.LayerNormColumnParallelLinear(32, 24, bias=False, skip_bias_add=False, **options)
        draws = torch.Generator().manual_seed(1)
        x, scale = (torch.randn(*shape, generator=draws) for shape in ((4, 2, 32), (32,)))
        with torch.no_grad():
            for weight in (norm.weight, fused.layer_norm_weight):
                weight.add_(scale)
        y = norm(x)
        wanted = torch.nn.functional.rms_norm(x.double(), (32,), 1 + scale.double(), config.layernorm_epsilon)
        torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-6)
        z = fused(x)[0]
        z.square().sum().backward()
        whole = [torch.empty_like(z) for _ in range(world)]
        torch.distributed.all_gather(whole, z.detach())
        torch.testing.assert_close(z, y @ fused.weight.t(), rtol=1e-4, atol=1e-4)
        gradient = fused.layer_norm_weight.grad
        return {"norm": y.detach(), "columns": torch.cat(whole, -1), "gradient of the norm": gradient.clone()}


def test_norms_of_weights_about_zero() -> None:
    one = on_new_ranks(zero_centered, 1, True)[0]
    for two in on_new_ranks(zero_centered, 2, True):
        assert not differing(one, two)
    assert differing(on_new_ranks(zero_centered, 1, False)[0], on_new_ranks(zero_centered, 2, False)[0])
