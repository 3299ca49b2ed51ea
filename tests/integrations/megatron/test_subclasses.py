"""GPTModel and HybridModel of the package are what install() makes of Megatron's."""

from __future__ import annotations

import pytest
import torch
from megatron_runs import batch, config_of, model_of, on_degree, on_new_ranks

from tp_invariant.testing import assert_bitwise_equal

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'tp-invariant[megatron]'")


def losses(rank: int, world: int, subclass: bool) -> list[torch.Tensor]:
    from megatron.core import tensor_parallel

    from tp_invariant.integrations import megatron

    found = []
    for hybrid in (False, True) if megatron.versions.HAS_HYBRID else (False,):
        with on_degree(world, install=not subclass):
            config = config_of(world, num_layers=4 if hybrid else 2, sequence_parallel=True)
            if not subclass:
                model = model_of(config, hybrid=hybrid)
            elif hybrid:
                model = megatron.HybridModel(
                    config, megatron.hybrid_stack_spec(), 96, 8, hybrid_layer_pattern="*-*-",
                    position_embedding_type="rope",
                )  # fmt: skip
            else:
                model = megatron.GPTModel(
                    config, megatron.gpt_block_spec(config), 96, 8, position_embedding_type="rope"
                )
            ids, labels, positions = batch(0)
            found.append(model(ids, positions, None, labels=labels).detach())
            replaced = tensor_parallel.ColumnParallelLinear is megatron.ColumnParallelLinear
            assert replaced is not subclass
    return found


def test_subclasses_have_the_bytes_of_installed_models() -> None:
    installed = on_new_ranks(losses, 1, False)[0]
    for ours in on_new_ranks(losses, 2, True):
        assert_bitwise_equal(ours, installed)
