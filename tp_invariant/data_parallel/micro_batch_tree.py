"""Gradients of a step's micro-batches, summed over one binary tree at every data-parallel (DP) degree.

binary_tree.py has the tree, which depends on the number of micro-batches alone. A rank that holds all micro-batches of
a node computes it. A rank with consecutive micro-batches obtains a few complete nodes, one if the counts are powers of
two; the remaining additions are done after an all-to-all of these nodes. expert_sums.py does the same for experts that
are divided over data-parallel ranks.

Where gradients are one sum for each of C chunks of the sequence (layers/sequence_chunks.py), the leaves are C times as
many: those of chunk 0 for all micro-batches, then those of chunk 1. A rank has the leaves of its chunks and of its
micro-batches. Nodes are exchanged over the data-parallel ranks, and then over those of context parallelism.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import Group, exchange_rows, gather_major, gather_uneven, on_mesh, ranks_of, resolve_group
from ..consistency.agreement import compare_environments
from ..consistency.compare import compare
from ..core.dtensors import grad_like, is_dtensor, local_of
from ..core.fsdp import sharded_parameters
from ..core.layout import split_sizes
from ..core.parameter_names import label_of
from ..functional.main_grad import refuse_fused
from ..kernels.dtypes import DTYPES
from ..layers.sequence_chunks import Chunks, chunks_of, say_summed, take_chunk_gradients
from .binary_tree import BinaryTree, nodes_of
from .expert_sums import ExpertSums, describe, expert_group, indices_by_group
from .tied_stages import TiedGradients

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_SAME_ARGUMENTS = "Give MicroBatchTree the same parameters, in the same order, and the same micro_batches on every rank"
_CHUNK = 1 << 24  # elements that are summed over ranks at a time, so that reduce() needs little additional memory


def resolve_dp_group(dp_group: dist.ProcessGroup | DeviceMesh | Group | None, name: str = "dp_group") -> Group:
    """The Group for an argument called `name`: a ProcessGroup or a 1-D DeviceMesh. None, no reduction, is refused.

    Raises:
        TypeError, ValueError: as collectives.resolve_group; None.
    """
    if dp_group is None:
        raise TypeError(f"{name}=None: pass the ProcessGroup or 1-D DeviceMesh whose ranks' gradients are to be summed")
    return resolve_group(dp_group, name, "dp")


def is_cut_by(parameter: Tensor, group: Group) -> bool:
    """Whether other ranks of the group have parts of the parameter: fully_shard's doing, over data parallel ranks."""
    if expert_group(parameter) is not None:
        return False
    return is_dtensor(parameter) and len(on_mesh(parameter.device_mesh).ranks.intersection(ranks_of(group))) > 1


def is_cut_over(parameter: DTensor, group: Group) -> bool:
    """Whether fully_shard, whose mesh dims come first, has one dim, of the ranks of the group. HSDP has two."""
    ranks = dist.get_process_group_ranks(parameter.device_mesh.get_group(0))
    return not parameter.placements[0].is_replicate() and ranks == ranks_of(group)


def _part_of(parameter: Tensor, group: Group) -> str:
    """Which part of a DTensor this rank has, of those that all ranks of `group` should have alike."""
    if expert_group(parameter) is not None:
        return describe(parameter)
    if not is_dtensor(parameter):
        return ""
    first = 0
    if is_cut_by(parameter, group):
        if not is_cut_over(parameter, group):
            return ""  # refused later, on every rank
        first = 1
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    return f", placed as {parameter.placements}, here {tuple(coordinate[first:])}"


class MicroBatchTree:
    """Sums gradients over a step's micro-batches and DP ranks: the same bits at every DP degree.

    The micro-batches are a fixed global list; each rank processes those in `share`. Do not wrap the model in DDP:
    reduce() replaces its reduction.

        tree = tpi.data_parallel.MicroBatchTree(model.parameters(), dp_group, micro_batches=8)
        for step in range(steps):
            for i in tree.share:                                  # DP=1: 0..7; DP=2: four of them; DP=8: one of them
                tokens, labels = micro_batch(step, i)
                loss_sum(model(tokens), labels).backward()        # a sum over tokens, never a mean over a share
                tree.add(count=int((labels != -100).sum()))
            tree.reduce()                                         # .grad is the gradient of the mean over all tokens
            tpi.clip_grad_norm_(model.parameters(), 1.0, tp_group=tp_group)
            optimizer.step()
            optimizer.zero_grad()

    With tensor parallelism dp_group is the group of ranks that hold the same shards, and every rank of a TP group runs
    the same micro-batches. The parameters may be DTensors over the ranks of tensor parallelism.

    A model that fully_shard has sharded over dp_group keeps its own reduction, made one of fixed order:

        fix_reduction_order(model)                                # after fully_shard, before this, and without tokens
        tree = MicroBatchTree(model.parameters(), dp_group, micro_batches=8)

    Each backward then gives the sum over ranks of one micro-batch of each, a node of the same tree, as ranks take turns
    there: DP=2 has 0, 2, 4, 6 and 1, 3, 5, 7. So the degree must be a power of two that divides micro_batches, the
    parameters float32, and every backward reduces: no set_requires_gradient_sync(False).

    Without fully_shard any number of micro-batches goes with any degree: shares are consecutive, and
    differ by at most one (torch.tensor_split's rule). Where
    every rank has 2^k of them, all-to-all and all-gather move one fp32 gradient each; otherwise the all-to-all moves up
    to 2 log2(n) of them, for n micro-batches a rank.

    Experts that are divided over data-parallel ranks (expert_parallel_group of tpi.Experts) are summed over the ranks
    that hold the same ones, from the partial sums that their layer gives for each micro-batch: the same bits. Make the
    tree before the first forward. The degree must divide micro_batches, and dp_group have one rank of each replica.
    Beside a model that fully_shard has sharded they are among its ignored_params, and one tree has the parameters of
    both.

    With context parallelism (`parallelize(.., mesh=.., sequence_chunks=..)`, `context_parallel_`) the parameters say
    how many chunks there are, and over which ranks they are divided. Give the mesh, whose dims are "dp" and "cp":

        tree = MicroBatchTree(model.parameters(), mesh=mesh, micro_batches=8)

    Every rank of cp_group runs the same micro-batches, and reduce() gives all of them the same gradients.

    Memory besides .grad: fp32 copies of this rank's gradients, log2(n) + 1 at most for n = 2^k micro-batches a rank,
    2 log2(n) + 1 at most for other n; as many for each chunk of this rank.

    Args:
        parameters: whose .grad is taken; those with requires_grad=False are left out. bfloat16, float16 or float32, on
            one device.
        dp_group: a ProcessGroup or 1-D DeviceMesh; of one rank for DP=1.
        micro_batches: how many a step has on all ranks together.
        mesh: in place of dp_group, a DeviceMesh whose dims have names: "dp" is dp_group, one rank if it is missing.

    Raises:
        TypeError: parameters of another dtype; None for dp_group; micro_batches that is no int.
        ValueError: no parameters, parameters on several devices, micro_batches below 1; after fully_shard, what is said
            above, parameters that it has gathered for now, or HSDP; of experts over data-parallel ranks, a dp_group
            that does not fit.
        RuntimeError: on every rank, where ranks differ in micro_batches, in the parameters' number, shapes or dtypes,
            or in software and settings.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        dp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
        micro_batches: int | None = None,
        *,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.group = resolve_dp_group(dp_group) if mesh is None else _dp_of(mesh, dp_group)
        listed = list(parameters)
        given = [*dict.fromkeys(listed)]
        self._parameters = [p for p in given if p.requires_grad]
        places = {p: number for number, p in reversed([*enumerate(listed)])}
        self._labels = [label_of(p, places[p]) for p in self._parameters]
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        compare_environments(self.group, device, "dp_group")
        marks = [chunks_of(p) for p in self._parameters]
        facts: dict[str, Any] = {
            "micro_batches": micro_batches,
            "number of parameters": len(self._parameters),
            "sequence_chunks": [None if mark is None else (mark.of, mark.group.size, mark.whole) for mark in marks],
        }
        for label, p in zip(self._labels, self._parameters, strict=True):
            facts[label] = f"{p.dtype} {tuple(p.shape)}{_part_of(p, self.group)}"
        # of a model that fully_shard has sharded ranks take turns, also in steps that train its experts alone
        experts_alone = all(expert_group(p) is not None for p in self._parameters)
        parts = sharded_parameters(given)
        cut = [is_cut_by(parts.get(id(p), p), self.group) for p in (given if experts_alone else self._parameters)]
        self._take_turns = any(cut)
        facts["whether ranks take turns"] = self._take_turns
        gathered = next((index for index, p in enumerate(self._parameters) if id(p) in parts), None)
        facts["the first parameter that fully_shard has gathered for now"] = (
            None if gathered is None else self._labels[gathered]
        )
        experts = indices_by_group(self._parameters)
        facts["which of them are experts over data-parallel ranks"] = [
            [self._labels[i] for i in one] for one in experts
        ]
        self._chunks = next((mark for mark in marks if mark is not None), Chunks(Group(None, 0, 1), 1))
        self.cp_group = self._chunks.group
        # before anything that one rank alone could raise
        for group, name in ((self.group, "dp_group"), (self.cp_group, "cp_group")):
            if group.size > 1:
                compare(facts, group, device, name=name, rule=_SAME_ARGUMENTS)
        if gathered is not None:
            shape = tuple(self._parameters[gathered].shape)
            raise ValueError(
                f"{self._labels[gathered]} with shape {shape} on rank {self.group.rank} of dp_group is one that "
                "fully_shard has gathered, as after a forward alone: gradients would be of another. Call "
                "module.reshard() of every FSDPModule before"
            )
        if not isinstance(micro_batches, int) or isinstance(micro_batches, bool):
            raise TypeError(f"micro_batches={micro_batches!r} is a {type(micro_batches).__name__}: pass an int")
        if micro_batches < 1:
            raise ValueError(f"micro_batches={micro_batches} must be at least 1")
        self.micro_batches = micro_batches
        self._check_parameters()
        self._check_chunks(mesh)
        self._fully_sharded = any(is_cut_by(p, self.group) for p in self._parameters)
        if self._fully_sharded:
            self._check_fully_sharded()
        self.tied = TiedGradients(self._parameters)
        summed = [index for index in range(len(self._parameters)) if index not in self.tied.copies]
        self._dense = [index for index in summed if expert_group(self._parameters[index]) is None]
        self._sizes = [local_of(self._parameters[index]).numel() for index in self._dense]
        # every rank's share, and the nodes that it obtains
        ranks = self.group.size
        bounds = [0, *itertools.accumulate(split_sizes(micro_batches, ranks))]
        shares = [range(*pair) for pair in itertools.pairwise(bounds)]
        self._shares = [range(rank, micro_batches, ranks) for rank in range(ranks)] if self._take_turns else shares
        # after the exchange over dp_group, and after that over cp_group: the nodes of each rank of the group
        own, of_all = self._chunks.on(self.cp_group.rank), map(self._chunks.on, range(self.cp_group.size))
        self._levels = [
            (self.group, [self._nodes_of(own, share) for share in shares]),
            (self.cp_group, [self._nodes_of(chunks, range(micro_batches)) for chunks in of_all]),
        ]
        if 1 in (sizes := [group.size for group, _ in self._levels]):
            self._levels = [self._levels[sizes.index(max(sizes))]]
        sums = functools.partial(
            ExpertSums, labels=self._labels, dp_group=self.group, shares=self._shares, chunks=self._chunks, reader=self
        )
        self._experts = [sums([self._parameters[i] for i in indices], indices) for indices in experts]
        self._start()

    def _nodes_of(self, chunks: Iterable[int], share: range) -> list[tuple[int, int]]:
        """The nodes that a rank has of these chunks of these micro-batches."""
        return nodes_of((chunk * self.micro_batches + m for chunk in chunks for m in share), self._leaves)

    @property
    def chunks_held(self) -> int:
        """How many chunks of each sequence this rank has."""
        return self._chunks.held

    @property
    def _leaves(self) -> int:
        return self._chunks.of * self.micro_batches

    def _check_chunks(self, mesh: DeviceMesh | None) -> None:
        begin = f"on rank {self.group.rank} of dp_group and {self.cp_group.rank} of cp_group"
        for label, p in zip(self._labels, self._parameters, strict=True):
            mark = chunks_of(p) or Chunks(Group(None, 0, 1), 1)
            if (mark.of, mark.group) != (self._chunks.of, self.cp_group):
                raise ValueError(
                    f"{label} with shape {tuple(p.shape)} {begin} has a gradient for {mark.of} chunks of the sequence, "
                    f"and others for {self._chunks.of}: call context_parallel_ of the module that holds them all"
                )
            if self._chunks.of > 1 and is_cut_by(p, self.group):
                raise ValueError(
                    f"{label} with shape {tuple(p.shape)} {begin} is sharded by fully_shard, which is not supported "
                    f"with sequence_chunks={self._chunks.of}"
                )
        cp = 1 if mesh is None or "cp" not in (mesh.mesh_dim_names or ()) else mesh["cp"].size()
        if mesh is not None and cp != self.cp_group.size:
            raise ValueError(
                f'the dim "cp" of mesh has {cp} ranks, and the parameters {begin} were given to context_parallel_, or '
                f"parallelize, over {self.cp_group.size}: give both one mesh"
            )

    def _check_parameters(self) -> None:
        if not self._parameters:
            raise ValueError("parameters holds no parameter with requires_grad=True: there is nothing to reduce")
        devices = {p.device for p in self._parameters}
        if len(devices) > 1:
            raise ValueError(f"parameters are on {sorted(map(str, devices))}: build one MicroBatchTree for each device")
        for index, p in enumerate(self._parameters):
            if p.dtype not in DTYPES:
                raise TypeError(
                    f"{self._labels[index]} with shape {tuple(p.shape)} is a {type(p).__name__} of {p.dtype}: only "
                    "bfloat16, float16 and float32 are supported"
                )

    def _check_fully_sharded(self) -> None:
        ranks, n = self.group.size, self.micro_batches
        p: Any
        for index, p in enumerate(self._parameters):
            if expert_group(p) is not None:
                continue  # one of fully_shard's ignored_params
            begin = f"{self._labels[index]} with shape {tuple(p.shape)} on rank {self.group.rank} of dp_group"
            if not is_cut_by(p, self.group):
                raise ValueError(
                    f"{begin} is not sharded over dp_group, and others are, by fully_shard: build one MicroBatchTree "
                    "for each kind"
                )
            if not is_cut_over(p, self.group):
                raise ValueError(
                    f"{begin} is placed as {p.placements} on {p.device_mesh}: of what fully_shard has sharded "
                    "dp_group must be the ranks of its mesh, which has one dim (no HSDP)"
                )
            reduction = getattr(p, "reduction", None)
            if reduction is None or reduction.tokens is not None:
                raise ValueError(
                    f"{begin} is sharded by fully_shard, whose own reduction has another order, or divides by itself: "
                    "call fix_reduction_order(model), without tokens, before MicroBatchTree"
                )
            if p.dtype != torch.float32:
                raise ValueError(
                    f"{begin} is sharded by fully_shard and {p.dtype}: each micro-batch's gradient would be rounded, "
                    "and how often depends on the degree. Take float32 parameters, and "
                    "MixedPrecisionPolicy(param_dtype=.., reduce_dtype=torch.float32)"
                )
        if ranks & (ranks - 1) or n % ranks:
            raise ValueError(
                f"micro_batches={n} over {ranks} ranks of dp_group, with parameters that fully_shard has sharded: the "
                "degree must be a power of two, and divide micro_batches"
            )

    def _start(self) -> None:
        self._trees = [BinaryTree(self._leaves) for _ in range(self._chunks.held)]  # of this rank's chunks
        self.added = self._counted = 0
        self._count: int | Tensor = 0
        self._has_grad = [False] * len(self._parameters)

    @property
    def share(self) -> range:
        """The global indices of this rank's micro-batches: call add() after the backward of each, in this order.

        Consecutive ones; of a model that fully_shard has sharded every dp_group.size()-th one.
        """
        return self._shares[self.group.rank]

    @torch.no_grad()
    def add(self, *, count: int | Tensor | None = None) -> None:
        """Takes this rank's next micro-batch: adds every .grad to the tree and sets it to None.

        A parameter without .grad got none from this micro-batch. If add() is called too often, reduce() raises an error
        on every rank.

        Args:
            count: what reduce() divides by is the sum of these over all micro-batches: the number of valid tokens in
                this one, or 1 for a mean over micro-batches. An int, or a 0-dim integer tensor, which is not waited
                for. None everywhere: nothing is divided. Of whole sequences: the same on every rank of cp_group.

        Raises:
            TypeError: a count that is no integer, a gradient that is not dense, or is placed as its parameter is not.
            ValueError: fully_shard's reduction rounds to 16 bits.
            RuntimeError: a layer with fuse_wgrad_accumulation=True has added a gradient into main_grad; a parameter of
                experts over data-parallel ranks has a .grad, which their layer does not give; so has one whose gradient
                is a sum for each of several chunks.
        """
        refuse_fused(zip(self._labels, self._parameters, strict=True), f"MicroBatchTree on rank {self.group.rank}")
        if isinstance(count, float) or (isinstance(count, Tensor) and (count.is_floating_point() or count.dim())):
            raise TypeError(f"count={count!r} on rank {self.group.rank} must be an int or a 0-dim integer tensor")
        expected = self.added < len(self.share)
        for index in self.tied.copies if expected else ():
            self.tied.send(index, self._local_gradients(index))
        # -0.0 and not 0.0 where there is no gradient: x + -0.0 is x for every x, -0.0 too
        has_gradient = False
        size, device = (sum(self._sizes),), self._parameters[0].device
        flats = [torch.full(size, -0.0, dtype=torch.float32, device=device) for _ in self._trees]
        columns = zip(*(flat.split(self._sizes) for flat in flats), strict=True)
        for index, parts in zip(self._dense, columns, strict=True):
            gradients = self._local_gradients(index)
            if expected:
                gradients = self.tied.add(index, gradients)
            for part, local in zip(parts, gradients, strict=True):
                if local is not None:
                    part.view(local.shape).copy_(local)
                    self._has_grad[index] = has_gradient = True
        level = 0
        if self._fully_sharded:
            self._check_reduced()
            level = self.group.size.bit_length() - 1  # what the ranks' micro-batches have in sum is a node
        if self._fully_sharded and not has_gradient:
            return  # reduce() says how many were added
        for experts in self._experts:
            for index in experts.add(self.added if expected else None):
                self._has_grad[index] = True
        if expected:
            for chunk, tree, flat in zip(self._chunks.on(self.cp_group.rank), self._trees, flats, strict=True):
                tree.push(level, chunk * self.micro_batches + self.share[self.added] >> level, flat)
        self.added += 1
        if count is not None:
            self._counted += 1
            self._count = self._count + count

    def _local_gradients(self, index: int) -> list[Tensor | None]:
        """Takes a parameter's gradient for each chunk of this rank."""
        p, mark = self._parameters[index], self._chunks
        begin = f"{self._labels[index]} with shape {tuple(p.shape)} on rank {self.group.rank}"
        whole = mark.of > 1 and chunks_of(p).whole  # type: ignore[union-attr]
        if mark.held > 1 and not whole:
            sums = take_chunk_gradients(p)
            if p.grad is not None:
                raise RuntimeError(
                    f"{begin} of dp_group has a .grad, besides those of its {mark.held} chunks of the sequence: it is "
                    "left of the step before (call optimizer.zero_grad(), with set_to_none=True), something has "
                    "changed the NaN that stands there until add(), or another use of the parameter than its module's "
                    "forward made it (a regulariser)"
                )
            return [None] * mark.held if sums is None else sums
        grad, p.grad = p.grad, None
        placed = getattr(grad, "placements", None)
        if grad is not None and (grad.layout != torch.strided or placed != getattr(p, "placements", None)):
            raise TypeError(
                f"the gradient of {begin} is a {type(grad).__name__} of layout {grad.layout}, placed as "
                f"{placed}: only dense tensors are supported, placed as their parameter"
            )
        if whole and self.cp_group.rank > 0:
            grad = None  # it is rank 0's, with chunk 0
        return [local_of(grad), *[None] * (mark.held - 1)]

    def _check_reduced(self) -> None:
        for reduction in {self._parameters[index].reduction for index in self._dense}:  # type: ignore[attr-defined]
            if rounded := reduction.dtypes - {torch.float32}:
                raise ValueError(
                    f"fully_shard reduces gradients in {', '.join(map(str, rounded))}: each micro-batch's sum is "
                    "rounded, and how often depends on the degree. Give fully_shard "
                    "mp_policy=MixedPrecisionPolicy(.., reduce_dtype=torch.float32)"
                )

    @torch.no_grad()
    def reduce(self, *, main_grad: bool = False) -> None:
        """Finishes the sum over all ranks, divides it by the sum of the counts, and starts the next step. A collective.

        The next step starts after an error too: what was added to this one is dropped.

        Every parameter that got a gradient from any micro-batch of any rank gets the result as .grad, rounded once to
        its dtype, the same on every rank of dp_group; others keep None.

        Args:
            main_grad: set Megatron's `main_grad` instead, in fp32 and not rounded, and leave .grad None.

        Raises:
            RuntimeError: on every rank: a rank called add() too often or too rarely, or some calls had a count and some
                had none; with experts over data-parallel ranks, also a rank that is still in a forward of theirs.
            ValueError: on every rank: the counts sum to 0 or less; main_grad with DTensors.
        """
        try:
            self._reduce(main_grad)
        finally:
            self._start()
            for experts in self._experts:
                experts.start()

    def _reduce(self, main_grad: bool) -> None:
        for experts in self._experts:  # first: other ranks may wait there, in a forward
            experts.meet(self.added)
        divide_by, has_grad = self.tied.agree(lambda: self._agree(main_grad))
        if main_grad and any(map(is_dtensor, self._parameters)):
            raise ValueError("main_grad=True with parameters that are DTensors: Megatron's main_grad is a plain tensor")
        tree = BinaryTree(self._leaves)
        for node in (node for of_chunk in self._trees for node in of_chunk.nodes):
            tree.push(*node)
        pieces = [value for _, _, value in tree.nodes]
        dtypes = {p.dtype for p in self._parameters}
        out_dtype = dtypes.pop() if len(dtypes) == 1 and not main_grad else torch.float32
        tree.nodes.clear()
        self._trees.clear()
        if self._fully_sharded:
            (total,) = pieces
            total = total if divide_by is None else total / divide_by
        else:
            total = torch.empty(sum(self._sizes), dtype=out_dtype, device=self._parameters[0].device)
            for start in range(0, total.numel(), _CHUNK):
                chunk = total[start : start + _CHUNK]
                chunk.copy_(self._sum_over_ranks([p[start : start + _CHUNK] for p in pieces], chunk, divide_by))
        totals = dict(zip(self._dense, total.split(self._sizes), strict=True))
        for experts in self._experts:
            totals.update(zip(experts.indices, experts.totals(divide_by, _CHUNK), strict=True))
        for index, (p, present) in enumerate(zip(self._parameters, has_grad, strict=True)):
            if index in self.tied.copies:
                continue
            local = local_of(p)
            grad = None
            if present:
                grad = totals[index].view(local.shape).to(p.dtype if not main_grad else torch.float32)
            if main_grad:
                p.main_grad = grad  # type: ignore[attr-defined]
            else:
                p.grad = None if grad is None else grad_like(grad, p)
        self.tied.give_back("main_grad" if main_grad else "grad")
        for p in self._parameters:
            if p.grad is not None:
                say_summed(p.grad)

    def _agree(self, main_grad: bool) -> tuple[int | None, list[bool]]:
        """(the divisor, whether each parameter has a gradient on any rank), from the reports of all ranks."""
        own_report = [int(main_grad), self.added, self._counted, int(self._count), *map(int, self._has_grad)]
        header = torch.tensor(own_report, dtype=torch.int64, device=self._parameters[0].device)
        everyone = gather_major(gather_major(header, self.group), self.cp_group)  # [cp, dp, ..]
        reports = everyone.flatten(0, 1).tolist()
        modes, added, counted, counts = (list(column) for column in list(zip(*reports, strict=True))[:4])
        cp = self.cp_group.size
        ranks = f"the {self.group.size} ranks of dp_group" + (f", times {cp} of cp_group," if cp > 1 else "")
        expected = [len(share) for share in self._shares] * cp
        if added != expected:
            raise RuntimeError(
                f"{ranks} added {added} micro-batches, but micro_batches={self.micro_batches} gives them {expected}: "
                "call add() once after the backward of each index in `share`"
                + (", which must reduce: no set_requires_gradient_sync(False)" if self._fully_sharded else "")
            )
        if len(set(modes)) > 1:
            raise RuntimeError(f"{ranks} disagree: main_grad is {list(map(bool, modes))}; pass the same on every rank")
        if any(counted) and counted != added:
            raise RuntimeError(
                f"{ranks} gave count= to {counted} of {added} calls of add(): give it to all of them or to none"
            )
        if counts != counts[: self.group.size] * cp:
            raise RuntimeError(
                f"{ranks} gave the counts {counts}: give every rank of cp_group the count of whole sequences"
            )
        counts = counts[: self.group.size]
        if any(counted) and sum(counts) <= 0:
            raise ValueError(
                f"the counts that {ranks} gave are {counts} in sum: gradients cannot be divided by {sum(counts)}; skip "
                "a step without tokens on every rank"
            )
        has_grad = [any(column) for column in list(zip(*reports, strict=True))[4:]]
        return (sum(counts) if any(counted) else None), has_grad

    def _sum_over_ranks(self, pieces: list[Tensor], chunk: Tensor, divide_by: int | None) -> Tensor:
        """The sum over all ranks' nodes for this chunk's elements, in chunk's shape and dtype."""
        none = chunk.new_empty((chunk.numel(), 0), dtype=torch.float32)  # of a rank without micro-batches
        values, sizes = torch.stack(pieces, dim=1) if pieces else none, [chunk.numel()]  # [elements, nodes]
        tree = BinaryTree(self._leaves)
        for group, held in self._levels:
            # padded to the most nodes that a rank has: an all-to-all wants one shape everywhere
            padding = values.new_zeros(len(values), max(map(len, held)) - values.shape[1])
            columns = torch.cat([values, padding], dim=1)
            received = exchange_rows(columns, split_sizes(len(values), group.size), group)
            tree.nodes.clear()
            nodes = [
                (level, index, theirs[:, column])
                for theirs, of_rank in zip(received, held, strict=True)
                for column, (level, index) in enumerate(of_rank)
            ]
            for node in sorted(nodes, key=lambda node: node[1] << node[0]):
                tree.push(*node)
            values = torch.stack([value for _, _, value in tree.nodes], dim=1) if tree.nodes else none
            sizes.append(len(values))
        mine = (tree.root() if divide_by is None else tree.root() / divide_by).to(chunk.dtype).contiguous()
        for (group, _), size in zip(reversed(self._levels), reversed(sizes[:-1]), strict=True):
            mine = gather_uneven(mine, 0, size, group)
        return mine


def _dp_of(mesh: DeviceMesh, dp_group: Any) -> Group:
    names = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else None
    if names is None:
        raise TypeError(f"mesh={mesh!r} is a {type(mesh).__name__}: pass a DeviceMesh with mesh_dim_names")
    if dp_group is not None:
        raise ValueError('mesh and dp_group were both given: mesh["dp"] is dp_group, give one of them')
    return resolve_dp_group(mesh["dp"]) if "dp" in names else Group(None, 0, 1)
