"""DistributedDataParallel over ranks of tp_group is refused where it is made, before it copies rank 0's shards.

Over data parallel ranks it is right; but a communication hook that compresses gradients by statistics of whole matrices
or buckets has others of shards, and is refused in the next forward with the mode on.

Trainers wrap every model by themselves, over all ranks of the job. torch's hook for registered modules is called
while DistributedDataParallel is made, once it has its process group and before it sends anything.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ..comm.collectives import on_mesh, ranks_of
from ..core.dtensors import is_dtensor
from ..core.graph_breaks import never_a_frame_of_its_own
from ..core.mode import is_tp_invariant_mode_enabled
from .parameters import carried_group, is_sharded


def _ranks_of_shards(p: nn.Parameter) -> Iterable[int]:
    """The ranks that hold other parts of the parameter; none if it is whole."""
    if is_dtensor(p):
        return [] if all(placed.is_replicate() for placed in p.placements) else on_mesh(p.device_mesh).ranks
    group = carried_group(p) if is_sharded(p) else None
    return [] if group is None or group.size == 1 else ranks_of(group)


@never_a_frame_of_its_own
def _refuse_tp_ranks(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    if not isinstance(wrapper, DistributedDataParallel) or name != "module" or module is None:
        return
    ranks = dist.get_process_group_ranks(wrapper.process_group)
    for parameter, p in module.named_parameters():
        shared = sorted({*ranks} & {*_ranks_of_shards(p)})
        if len(shared) > 1:
            raise ValueError(
                f"DistributedDataParallel over the ranks {ranks}, and {parameter} is sharded over {shared} of them: it "
                "would copy the part of one rank to the others, and give each another batch. Give it the data parallel "
                "ranks alone. Where a trainer wraps the model by itself: for transformers' Trainer take "
                "tp_invariant.integrations.trainer.Trainer, for accelerate "
                "tp_invariant.integrations.accelerate.Accelerator, for Lightning "
                "tp_invariant.integrations.lightning.TensorParallelStrategy"
            )

    if any(is_sharded(p) for p in module.parameters()):
        wrapper.register_forward_pre_hook(_refuse_compression)


def _refuse_compression(wrapper: DistributedDataParallel, args: tuple) -> None:
    if torch.compiler.is_compiling() or not is_tp_invariant_mode_enabled():
        return
    for hook, state in getattr(wrapper, "_comm_hooks", ()):
        places = {getattr(hook, "__module__", ""), type(state).__module__}
        if any(place.endswith((".powerSGD_hook", ".quantization_hooks")) for place in places):
            raise ValueError(
                f"the communication hook {getattr(hook, '__qualname__', hook)} of a DistributedDataParallel over the "
                f"ranks {dist.get_process_group_ranks(wrapper.process_group)}: it compresses gradients by what it "
                "computes of whole matrices or buckets, and a shard's are others, so that what is trained would depend "
                "on the degree. Register tp_invariant.data_parallel.fixed_order_hook, or one that rounds each element "
                "by itself (fp16_compress_hook), or none"
            )


register_module_module_registration_hook(_refuse_tp_ranks)
