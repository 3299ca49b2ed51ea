"""Megatron's distributed optimizer, whose flat buffers cut parameters anywhere, and more than two replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron_runs import (
    config_of,
    differing,
    full,
    loss_of,
    model_of,
    on_degree,
    on_new_ranks,
    one_step,
    steps,
    trained,
)

from tp_invariant import testing

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'tp-invariant[megatron]'")

CASES: dict[str, tuple[dict[str, Any], bool]] = {  # {name: (changes of the configuration, whether outputs are tied)}
    "float32": ({"sequence_parallel": True, "qk_layernorm": True}, True),
    "bfloat16": ({"sequence_parallel": True, "params_dtype": torch.bfloat16}, False),
}


def run(tp: int, distributed: bool, mode: bool = True, number: int = 5, cases: Any = tuple(CASES)) -> dict[str, Any]:
    """Without gradients, of which a replica has a part."""
    results: dict[str, Any] = {}
    for case in cases:
        changes, tied = CASES[case]
        result = steps(tp, mode, changes, tied, distributed=distributed, number=number)
        results |= {f"{case} {name}": value for name, value in result.items() if not name.startswith("gradient")}
    return results


def runs(rank: int, world: int) -> dict[str, Any]:
    """{name: run} for one replica, and for two."""
    if world == 1:
        return {"plain": run(1, False), "1": run(1, True)}
    if world == 2:
        return {"plain of two": run(1, False), "2": run(1, True), "2 off": run(1, True, False)}
    return {"1": run(4, True), "2": run(2, True), "2 off": run(2, True, False)}


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return on_new_ranks(runs, 1)[0]


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return on_new_ranks(runs, 2)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return on_new_ranks(runs, 4)


def test_it_has_the_bytes_of_the_plain_optimizer_at_every_degree(one: Any, two: Any, four: Any) -> None:
    assert not differing(one["plain"], one["1"])
    for rank, result in enumerate(four):
        assert not (names := differing(one["plain"], result["1"])), (rank, names)
        replica = two[rank // 2]
        assert not (names := differing(replica["plain of two"], replica["2"])), (rank, names)
        assert not (names := differing(replica["2"], result["2"])), (rank, names)
    assert len(differing(one["plain"], two[0]["2"])) > len(one["plain"]) // 2  # two replicas have other batches


def test_with_the_mode_off_it_differs_and_the_values_are_megatrons(two: Any, four: Any) -> None:
    on, off = two[0]["2"], two[0]["2 off"]
    assert len(differing(off, four[0]["2 off"])) > len(off) // 2
    for name in ("float32 loss 0", "float32 norm 0", "float32 loss 1", "float32 norm 1"):
        assert torch.allclose(torch.as_tensor(on[name]), torch.as_tensor(off[name]), rtol=1e-4), name


def three_replicas(rank: int, world: int) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    if world == 3:
        with on_degree(1):
            config = config_of(1)
            options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
            ddp = DistributedDataParallel(config, options, model_of(config))
            with pytest.raises(NotImplementedError, match="overlap_grad_reduce=True: set it to False"):
                loss_of(ddp).mean().backward()
                finalize_model_grads([ddp])
    return [run(world // 3, distributed, True, 2, ["float32"]) for distributed in (False, True)]


def test_three_replicas_of_two_ranks_have_the_bytes_of_three_of_one() -> None:
    """Their gradients are added in a fixed order; overlapped sums are refused."""
    single = on_new_ranks(three_replicas, 3)
    for rank, results in enumerate(on_new_ranks(three_replicas, 6)):
        for result in results:
            assert not (names := differing(single[rank // 2][0], result)), (rank, names)


FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}


def with_step(original: Any) -> Any:
    """Without Apex, Megatron takes torch's Adam, and does not load the number of steps, which that has in tensors."""
    return lambda self, p, tensors: original(self, p, tensors | {"step": torch.tensor(2.0)})


def checkpointed(rank: int, world: int, folder: str, load: bool) -> dict[str, Any]:
    """Whole parameters and Adam's whole state after two steps, which this run has written, or has read."""
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    name = "_set_main_param_and_optimizer_states"
    mended = mock.patch.object(DistributedOptimizer, name, with_step(getattr(DistributedOptimizer, name)))
    with on_degree(world), mended:
        config = config_of(world)
        model = model_of(config)
        ddp, optimizer = trained(config, model, True)
        for step in range(1 if load else 2):  # without Apex torch's Adam must have a state before it is loaded
            one_step(model, ddp, optimizer, step, gradients=False)
        of_model = model.sharded_state_dict()
        state = {"model": of_model, "optimizer": optimizer.sharded_state_dict(of_model, load, metadata=FORMAT)}
        if load:
            state = dist_checkpointing.load(state, folder)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        else:
            dist_checkpointing.save(state, folder)
        (inner,) = optimizer.chained_optimizers
        whole: dict[str, Any] = {}
        for name, p in model.named_parameters():
            of_adam = inner._get_main_param_and_optimizer_states(p)
            for key in ("param", "exp_avg", "exp_avg_sq"):
                whole[f"{key} {name}"] = full(of_adam[key].detach().view(p.shape), p).clone()
        return whole


def test_state_of_two_ranks_is_loaded_on_four(tmp_path: Path) -> None:
    two = on_new_ranks(checkpointed, 2, str(tmp_path), False)[0]
    assert all(value.any() for value in two.values())
    for result in on_new_ranks(checkpointed, 4, str(tmp_path), True):
        assert not (names := differing(two, result)), names


def test_adam_gives_equal_bytes_wherever_a_parameter_is_cut() -> None:
    def updated(sizes: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        weight, *gradients = torch.randn(4, 1000, generator=generator)
        parts = [torch.nn.Parameter(part.clone()) for part in weight.split(sizes)]
        adam = torch.optim.AdamW(parts, lr=1e-2)
        for gradient in gradients:
            for part, of_part in zip(parts, gradient.split(sizes), strict=True):
                part.grad = of_part.clone()
            adam.step()
        return torch.cat([part.detach() for part in parts])

    for sizes in ([1, 999], [333, 667], [7, 64, 129, 800]):
        testing.assert_bitwise_equal(updated(sizes), updated([1000]))
