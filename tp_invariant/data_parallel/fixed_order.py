"""Gradient sums over data-parallel (DP) ranks that do not depend on bucket layout, ring order or topology.

All sums here are computed in the same way: an all-to-all gives each rank its share of the elements from all ranks, the
rank adds them by a fixed binary tree (16-bit gradients in fp32, with one rounding at the end), and an all-gather
distributes the result. Collectives move bytes only, and an element's bits depend on its summands, not on its position.

    fixed_order_hook           for DistributedDataParallel
    fix_reduction_order        for FSDP2's fully_shard; it installs a FixedOrderReduceScatter
    MicroBatchTree             for a training loop without DDP or FSDP: the same bits at every DP degree, too
                               (micro_batch_tree.py)

The first two fix the bits for one DP degree: at another degree, ranks add other micro-batches in backward. Only the
tree of micro-batches has one order for all degrees; with fix_reduction_order it takes a model of fully_shard too.

The result is the *sum* over ranks of each rank's gradients, also where stock DDP and FSDP return the mean: DDP does not
divide once a hook is installed, and fix_reduction_order sets FSDP's divide factor to 1. So define the loss as a sum
over tokens, and let a TokenCount divide by the number of all ranks' tokens, once, after the sum in fp32
(`TokenCount(dp_group).set(1)`, called once, gives the mean over ranks). A loss that is already a mean over all tokens
needs no TokenCount; a mean over a rank's own tokens is a different loss at every degree.

Gradient accumulation under DDP's no_sync() or FSDP's set_requires_gradient_sync(False) adds gradients on the rank, and
the last backward reduces their sum; set the TokenCount to the tokens of all those micro-batches.

All of this works with the mode on or off; the stock path is not to install it.
"""

# no `from __future__ import annotations`: DDP compares the hook's annotations with the classes themselves

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import Group, exchange_rows, gather_major, gather_uneven, ranks_of
from ..consistency.agreement import agreed_in, check_agreement, compare_environments
from ..core.layout import split_sizes
from ..core.parameter_names import label_of
from ..functional.main_grad import refuse_fused
from .binary_tree import BinaryTree
from .micro_batch_tree import resolve_dp_group


class TokenCount:
    """How many tokens, or whatever the loss is a sum over, all DP ranks have in a step: what gradients are divided by.

    The same on every rank by construction, and exact: it is a sum of integers.

        tokens = tpi.data_parallel.TokenCount(dp_group)
        ddp.register_comm_hook(tokens, tpi.data_parallel.fixed_order_hook)
        for batch in batches:
            tokens.set(int((batch.labels != -100).sum()))   # before the backward that reduces
            loss_sum(ddp(batch.inputs), batch.labels).backward()
    """

    def __init__(self, dp_group: dist.ProcessGroup | DeviceMesh | Group) -> None:
        """dp_group: a ProcessGroup or 1-D DeviceMesh, the one whose gradients are summed."""
        self.group = resolve_dp_group(dp_group)
        self._total: int | None = None

    def set(self, local_count: int) -> int:
        """Adds up all ranks' counts; they hold until the next call. A collective of eight bytes: call it on every rank.

        Raises:
            TypeError: local_count is no int.
            ValueError: on every rank, where a count is negative or all are 0.
            RuntimeError: on every rank, the first time, where ranks differ in software or settings.
        """
        if not isinstance(local_count, int) or isinstance(local_count, bool):
            raise TypeError(
                f"local_count is {local_count!r} on rank {self.group.rank} of dp_group: pass an int of at most 63 bits "
                "on every rank"
            )
        device = torch.device("cpu")
        if self.group.process_group is not None and dist.get_backend(self.group.process_group) == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        compare_environments(self.group, device, "dp_group")
        counts = gather_major(torch.tensor([local_count], device=device), self.group).view(-1).tolist()
        if min(counts) < 0 or sum(counts) == 0:
            raise ValueError(
                f"the counts of the {self.group.size} ranks of dp_group are {counts}: they must not be negative, and "
                "their sum, by which gradients are divided, must not be 0; skip a step without tokens on every rank"
            )
        self._total = sum(counts)
        return self._total

    @property
    def total(self) -> int:
        """The sum over all ranks.

        Raises:
            RuntimeError: set() was not called yet.
        """
        if self._total is None:
            raise RuntimeError(
                f"rank {self.group.rank} of dp_group is about to divide gradients by a TokenCount that is not set: "
                "call set(local_count) on every rank before the backward that reduces"
            )
        return self._total


def sum_of_shares(x: Tensor, sizes: Sequence[int], group: Group, divide_by: int | None) -> Tensor:
    """This rank's share, [sizes[rank]], of the sum over ranks of x [sum(sizes)]: divided, then rounded to x's dtype."""
    parts = exchange_rows(x, sizes, group)
    tree = BinaryTree(group.size)
    for rank, part in enumerate(parts.to(torch.promote_types(x.dtype, torch.float32))):
        tree.push(0, rank, part)
    total = tree.root()
    return (total if divide_by is None else total / divide_by).to(x.dtype)


def sum_over_ranks(x: Tensor, group: Group, divide_by: int | None = None) -> Tensor:
    """The same of all elements of x, one-dimensional, on every rank."""
    mine = sum_of_shares(x, split_sizes(x.numel(), group.size), group, divide_by)
    return gather_uneven(mine, 0, x.numel(), group)


def _divisor(tokens: TokenCount | None) -> str:
    """Describes by what gradients are divided, without the total, which changes at every step."""
    return "nothing" if tokens is None else "a TokenCount that is not set" if tokens._total is None else "a TokenCount"


# --- DistributedDataParallel ----------------------------------------------------------------------------------------


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def fixed_order_hook(
    state: dist.ProcessGroup | DeviceMesh | TokenCount, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """A DDP communication hook: the sum of the ranks' gradients, the same bits for every bucket size and order.

        ddp = DistributedDataParallel(model, process_group=dp_group)
        ddp.register_comm_hook(dp_group, tpi.data_parallel.fixed_order_hook)                          # the sum
        ddp.register_comm_hook(TokenCount(dp_group), tpi.data_parallel.fixed_order_hook)              # sum / tokens

    Accumulate micro-batches under DDP's no_sync(): a backward outside of it hands over what .grad holds besides the new
    gradient, which a mean keeps in scale and a sum counts once for each rank.

    On CUDA it runs on its own stream while backward continues; on a CPU it has finished when the hook returns. While it
    runs it needs additional memory of the bucket's size, in fp32 for 16-bit gradients.

    Args:
        state: DDP's process group (a 1-D DeviceMesh will do), or a TokenCount over it.
        bucket: a bucket of floating-point gradients.

    Raises:
        TypeError, ValueError: a state that is none of these; None, which could mean any group, too.
        RuntimeError: a TokenCount that was never set; on every rank, where ranks differ in the kind of state or in the
            bucket, the first time that one comes (consistency/agreement.py); this hook on some ranks only, after the
            time-out; a layer with fuse_wgrad_accumulation=True, whose gradients are not in the bucket.
    """
    if isinstance(state, TokenCount):
        tokens, group = state, state.group
    else:
        tokens, group = None, resolve_dp_group(state, name="state")
    if group.size > 1:
        facts = {
            "the call": "fixed_order_hook",
            "what the gradients' sum is divided by": _divisor(tokens),
            "the index of the bucket": bucket.index(),
            "its number of elements": bucket.buffer().numel(),
            "its dtype": str(bucket.buffer().dtype),
        }
        check_agreement(facts, group, bucket.buffer().device, agreed_in(group), name="dp_group")
    divide_by = None if tokens is None else tokens.total
    labelled = ((label_of(p, number), p) for number, p in enumerate(bucket.parameters()))
    refuse_fused(labelled, f"fixed_order_hook on rank {group.rank}, for bucket {bucket.index()} of DDP,")
    buffer = bucket.buffer()
    if not buffer.is_cuda:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(sum_over_ranks(buffer, group, divide_by))
        return future
    stream = _side_stream(buffer.device)
    stream.wait_stream(torch.cuda.current_stream(buffer.device))
    future = torch.futures.Future(devices=[buffer.device])
    with torch.cuda.stream(stream):
        # records an event on `stream`, for which DDP's stream waits
        future.set_result(sum_over_ranks(buffer, group, divide_by))
    return future


# --- FSDP2 ----------------------------------------------------------------------------------------------------------


class FixedOrderReduceScatter:
    """FSDP2's reduce-scatter in a fixed order: `module.set_custom_reduce_scatter(FixedOrderReduceScatter())`.

    That reaches the parameters of one fully_shard call only; `fix_reduction_order(model)` reaches all of them. FSDP
    keeps its scale: the mean over ranks unless told otherwise, divided here in fp32 before the one rounding. torch's
    protocol (torch.distributed.fsdp's ReduceScatter) by its shape and not by inheritance: it has no public name.

    Args:
        tokens: divide by its total. FSDP must then divide by nothing, as fix_reduction_order arranges.
    """

    def __init__(self, tokens: TokenCount | None = None) -> None:
        self.tokens = tokens
        self.dtypes: set[torch.dtype] = set()  # of the gradients that it was given
        self._agreed: set[Hashable] = set()  # see consistency/agreement.py

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for FSDP's input and output buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """output_tensor [n] = this rank's n of the sum, or mean, over ranks of input_tensor [P * n].

        Raises:
            ValueError: another op than sum and mean; a mean where there is a TokenCount; a TokenCount over other ranks.
            NotImplementedError: async_op, which FSDP does not ask for: it has a stream for this.
            RuntimeError: on every rank, where ranks differ in op, sizes or dtype, the first time that a call is seen
                (consistency/agreement.py).
        """
        dp_group, device = resolve_dp_group(group, name="group"), input_tensor.device
        kind = self._check(dp_group, op, async_op)
        if dp_group.size > 1:
            facts = {
                "the call": "FixedOrderReduceScatter",
                "what the gradients' sum is divided by": "the ranks" if kind == "AVG" else _divisor(self.tokens),
                "the number of elements a rank": output_tensor.numel(),
                "their dtype": str(input_tensor.dtype),
            }
            check_agreement(facts, dp_group, device, self._agreed, name="dp_group")
        self.dtypes.add(input_tensor.dtype)
        divide_by = dp_group.size if kind == "AVG" else None if self.tokens is None else self.tokens.total
        sizes = [output_tensor.numel()] * dp_group.size
        output_tensor.copy_(sum_of_shares(input_tensor, sizes, dp_group, divide_by))

    def _check(self, dp_group: Group, op: Any, async_op: bool) -> str:
        """The kind of op, for what is supported."""
        if async_op:
            raise NotImplementedError("FixedOrderReduceScatter has no async_op=True: call it on a stream of your own")
        kind = getattr(getattr(op, "op", op), "name", str(op))
        if kind not in ("SUM", "AVG"):
            raise ValueError(
                f"op={kind} is not supported, only SUM and AVG: FSDP asks for it after set_gradient_divide_factor; "
                "call set_force_sum_reduction_for_comms(True) as well, and FSDP divides by itself after the sum"
            )
        if self.tokens is not None and kind == "AVG":
            raise ValueError(
                f"op=AVG would divide gradients by the {dp_group.size} ranks besides the TokenCount: call "
                "fix_reduction_order(model, tokens), which turns that off"
            )
        if self.tokens is not None and (counted := ranks_of(self.tokens.group)) != (summed := ranks_of(dp_group)):
            raise ValueError(
                f"the TokenCount counts over ranks {counted}, but FSDP sums over ranks {summed}: build it with the "
                "group of fully_shard's mesh"
            )
        return kind


def fix_reduction_order(model: nn.Module, tokens: TokenCount | None = None) -> None:
    """Makes all of an FSDP2 model's gradients fixed-order sums over ranks. Call it after the last fully_shard.

    Every module that fully_shard was called on gets a FixedOrderReduceScatter, a divide factor of 1, and sums alone:
    gradients are sums over ranks, not FSDP's means, divided by `tokens` where given. A later fully_shard of the model
    or a module in it brings FSDP's own reduction back for that one: call this again after it.

    Of a model whose parameters are DTensors over tensor parallel ranks, fully_shard's own mesh dim alone counts.

    Raises:
        ValueError: a model without such modules; HSDP (its all-reduce over replicas adds on the wire); tokens on a mesh
            of one rank, where FSDP calls no reduction.
    """
    from torch.distributed.fsdp import FSDPModule  # slow to import
    from torch.distributed.tensor import DTensor

    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError(f"no module of {type(model).__name__} is an FSDPModule: call fully_shard on it first")
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue  # one of fully_shard's ignored_params: not reduced at all
        mesh = parameter.device_mesh
        if parameter.placements[0].is_replicate():  # fully_shard's dims come before those of tensor parallelism
            raise ValueError(
                f"parameter {name} is placed as {parameter.placements} on a mesh of shape {tuple(mesh.shape)}: HSDP, "
                "fully_shard on a mesh of replicas and shards, all-reduces gradients over replicas, which adds on the "
                "wire. Give fully_shard all data parallel ranks as one mesh dim"
            )
        if tokens is not None and mesh.size(0) == 1:
            raise ValueError(
                f"parameter {name} is on a mesh of one rank, where FSDP reduces nothing and so divides by no "
                "TokenCount: divide the loss instead, or leave fully_shard out"
            )
    for module in modules:
        reduction = FixedOrderReduceScatter(tokens)
        for parameter in module.parameters():  # an inner module comes later, and reduces its own
            parameter.reduction = reduction  # type: ignore[attr-defined]  # for MicroBatchTree
        module.set_custom_reduce_scatter(reduction)  # type: ignore[arg-type]
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
