"""Two pipeline stages: Megatron's 1F1B schedule at TP=1 and TP=2."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from megatron_runs import batch, config_of, differing, full, model_of, on_degree, on_new_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'tp-invariant[megatron]'")


def scheduled(rank: int, world: int, stages: int, tied: bool, mode: bool = True) -> dict[str, Any]:
    """The losses and gradients of this stage after two micro-batches, and the norm over all stages."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    tp = world // stages
    with on_degree(tp, mode, pipeline_model_parallel_size=stages):
        config = config_of(
            tp, pipeline_model_parallel_size=stages, pipeline_dtype=torch.float32, sequence_parallel=True,
            qk_layernorm=True, deallocate_pipeline_outputs=False, batch_p2p_comm=False,
        )  # fmt: skip
        stage = parallel_state.get_pipeline_model_parallel_rank()
        model = model_of(config, tied, pre_process=stage == 0, post_process=stage == stages - 1)
        ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0), [ddp])
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = lambda loss: loss * 4
        ddp.zero_grad_buffer()

        def loss_of(output: torch.Tensor) -> Any:
            return output.mean(), {"loss": output.detach().mean()}

        def forward(batches: Any, module: Any) -> Any:
            ids, labels, positions = next(batches)
            return module(ids, positions, None, labels=labels), loss_of

        losses = get_forward_backward_func()(
            forward_step_func=functools.partial(forward), data_iterator=iter([batch(0), batch(1)]), model=[ddp],
            num_microbatches=2, seq_length=8, micro_batch_size=2, forward_only=False,
        )  # fmt: skip
        out = {f"loss {n}": loss["loss"].clone() for n, loss in enumerate(losses)}
        for name, p in model.named_parameters():
            out[f"gradient {name}"] = full(p.main_grad, p).clone()
        return out | {"norm": float(optimizer.step()[1])}


@pytest.mark.parametrize("tied", [False, True])
def test_stages_have_the_bytes_of_one_rank_each(tied: bool) -> None:
    one, two = on_new_ranks(scheduled, 2, 2, tied), on_new_ranks(scheduled, 4, 2, tied)
    for stage in (0, 1):
        for rank in (0, 1):
            assert not differing(one[stage], two[2 * stage + rank])
    # the norm: of the gradients of both stages, where a tied table, which both have, counts once
    squares = sum(
        float(value.double().square().sum())
        for stage in (0, 1)
        for name, value in one[stage].items()
        if name.startswith("gradient") and not (tied and stage == 1 and "output_layer" in name)
    )
    assert one[0]["norm"] == one[1]["norm"] == pytest.approx(squares**0.5, rel=1e-6)


def test_with_the_mode_off_stages_differ() -> None:
    one, two = on_new_ranks(scheduled, 2, 2, False, False), on_new_ranks(scheduled, 4, 2, False, False)
    for stage in (0, 1):
        assert len(differing(one[stage], two[2 * stage])) > len(one[stage]) // 2
