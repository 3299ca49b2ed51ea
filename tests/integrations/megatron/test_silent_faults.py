"""What a port without care gets silently wrong, each with the control that shows the fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_runs import config_of, differing, full, loss_of, model_of, on_degree, on_new_ranks

from tp_invariant import testing

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'tp-invariant[megatron]'")


def finalized(rank: int, world: int, mended: bool) -> dict[str, torch.Tensor]:
    """The gradients of norms of queries and keys before and after finalize_model_grads."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from tp_invariant.integrations import megatron

    with on_degree(world):
        config = config_of(world, qk_layernorm=True, sequence_parallel=True)
        model = model_of(config)
        if not mended:
            megatron.uninstall()
        ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
        loss_of(ddp).mean().backward()
        norms = {name: p for name, p in model.named_parameters() if "q_layernorm" in name or "k_layernorm" in name}
        assert len(norms) == 4
        assert not any(getattr(p, "sequence_parallel", False) for p in model.parameters())
        before = {f"before {name}": p.main_grad.clone() for name, p in norms.items()}
        finalize_model_grads([ddp])
        return before | {f"after {name}": p.main_grad.clone() for name, p in norms.items()}


def test_finalize_leaves_complete_gradients_of_norms_of_queries_and_keys() -> None:
    for mended, factor in ((True, 1), (False, 2)):
        for gradients in on_new_ranks(finalized, 2, mended):
            for name in [name.removeprefix("after ") for name in gradients if name.startswith("after ")]:
                testing.assert_bitwise_equal(gradients[f"after {name}"], gradients[f"before {name}"] * factor)


def described(rank: int, world: int, local: bool) -> dict[str, Any]:
    """{key: (whole shape, this rank's shape, where it begins)} of a model's sharded state dict."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories

    with on_degree(world, install=not local):
        model = model_of(config_of(world, normalization="LayerNorm", add_bias_linear=True), local=local)
        sharded = model.sharded_state_dict()
        assert local or any(isinstance(part, ShardedTensorFactory) for part in sharded.values())
        apply_factories(sharded)
        found: dict[str, Any] = {}

        def add(part: Any) -> None:
            if isinstance(part, ShardedTensor):
                found[f"{part.key} {part.global_offset}"] = (part.global_shape, part.local_shape, part.replica_id)
            elif isinstance(part, (dict, list)):
                for each in part.values() if isinstance(part, dict) else part:
                    add(each)

        add(sharded)
        return found


def test_sharded_state_dicts_say_what_those_of_megatrons_layers_say() -> None:
    for ours, theirs in zip(on_new_ranks(described, 2, False), on_new_ranks(described, 2, True), strict=True):
        assert ours == theirs
        assert any(whole != part for whole, part, _ in ours.values())


def saved(rank: int, world: int, folder: str, local: bool) -> dict[str, torch.Tensor]:
    from megatron.core import dist_checkpointing

    with on_degree(world, install=not local):
        model = model_of(config_of(world), local=local)
        dist_checkpointing.save(model.sharded_state_dict(), folder)
        return {} if local else {name: full(p.detach(), p).clone() for name, p in model.named_parameters()}


def loaded(rank: int, world: int, folder: str, local: bool) -> dict[str, torch.Tensor]:
    from megatron.core import dist_checkpointing

    with on_degree(world, install=not local):
        model = model_of(config_of(world), local=local)
        for p in model.parameters():
            p.data.fill_(float("nan"))
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), folder))
        return {name: p.detach().clone() if local else full(p.detach(), p).clone()
                for name, p in model.named_parameters()}  # fmt: skip


def test_a_checkpoint_of_two_ranks_is_loaded_on_four_and_by_megatrons_layers(tmp_path: Path) -> None:
    before = on_new_ranks(saved, 2, str(tmp_path), False)[0]
    assert not any(differing(before, after) for after in on_new_ranks(loaded, 4, str(tmp_path), False))
    theirs = on_new_ranks(loaded, 1, str(tmp_path), True)[0]
    assert not any(p.isnan().any() for p in theirs.values())
    testing.assert_bitwise_equal(
        theirs["decoder.layers.0.mlp.linear_fc1.weight"], before["decoder.layers.0.mlp.linear_fc1.weight"]
    )
