"""Gradients of experts that are divided over data-parallel ranks, summed over a step's micro-batches.

The rank that owns an expert computes its gradients of the micro-batches of all ranks of its expert-parallel group, in
each backward one of each rank: here called the sources. Where dp_group has several such groups, ranks of different
groups hold the same experts, and each has the sources of its own group alone. So reduce() exchanges nodes among the
ranks that hold the same experts, and no others, then adds all nodes in the order of the micro-batches: the order in
which the nodes of a dense parameter are added.

A tree takes micro-batches in ascending order. Where shares are consecutive, that is one tree for each source. Where
data-parallel ranks take turns, beside a model that fully_shard has sharded, it is one tree for all sources: what one
backward gives is then mostly a node already, and all that is kept of it.

With chunks of the sequence there are as many trees for each chunk of this rank, and chunk c's leaf of micro-batch m is
c * micro_batches + m, as of a dense parameter. Ranks of cp_group hold the same experts, and other chunks: nodes are
exchanged over them last.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.collectives import Group, exchange_flat, ranks_of
from ..comm.wire import gather_objects
from ..consistency.agreement import compare_call
from ..consistency.compare import compare
from ..core.dtensors import is_dtensor, local_of
from ..core.layout import split_sizes
from ..functional.partial_gradients import PartialGradients, partial_gradients_of
from ..layers.parameters import carried_group, is_over_data
from ..layers.sequence_chunks import Chunks
from .binary_tree import BinaryTree, nodes_of

_Node = tuple[int, int, Tensor]  # level, index and value of a BinaryTree


def expert_group(parameter: Tensor) -> Group | None:
    """The expert-parallel group of an expert's parameter, if it has ranks of several replicas; None for any other."""
    return carried_group(parameter) if is_over_data(parameter) else None


class _Place(NamedTuple):
    """What a rank of dp_group says of an expert-parallel group of its own."""

    ranks: tuple[int, ...]  # of the group, global
    rank: int  # this rank's place among them
    each: int  # ranks per micro-batch

    def sources(self, dp_ranks: Sequence[int]) -> list[int]:
        """The ranks of dp_group whose micro-batches this rank computes gradients of, in order; -1 for one outside."""
        mine = self.ranks[self.rank % self.each :: self.each]
        return sorted(dp_ranks.index(rank) if rank in dp_ranks else -1 for rank in mine)


class _Level(NamedTuple):
    """Ranks of a group that hold the same experts, and the nodes, (level, index) each, that each has to exchange."""

    group: Group
    members: Sequence[int]
    held: list[list[tuple[int, int]]]


class ExpertSums:
    """The sums of the parameters of one expert-parallel group, for MicroBatchTree."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        indices: Sequence[int],
        labels: Sequence[str],
        dp_group: Group,
        shares: Sequence[range],
        chunks: Chunks,
        reader: object,
    ) -> None:
        """A collective.

        indices: of the parameters among all of the MicroBatchTree's. labels: what errors call all of these.
        reader: the MicroBatchTree.

        Raises:
            ValueError: on every rank: dp_group does not have, for each expert, every data-parallel rank exactly once
                as a source; or it does not divide the micro-batches.
            RuntimeError: on every rank of cp_group: they hold different experts, or have different sources.
        """
        self._labels = labels
        self.parameters, self.indices = list(parameters), list(indices)
        group = expert_group(parameters[0])
        assert group is not None
        self.group, self._dp, self._shares = group, dp_group, shares
        self.micro_batches = shares[-1].stop
        self._chunks, self._leaves = chunks.on(chunks.group.rank), chunks.of * self.micro_batches
        self._take_turns = any(share.step > 1 for share in shares)
        self._sizes = [local_of(p).numel() for p in parameters]
        each: int = parameters[0].ranks_per_micro_batch  # type: ignore[attr-defined]
        dp_ranks = ranks_of(dp_group)
        own = _Place(tuple(ranks_of(group)), group.rank, each)
        if chunks.group.size > 1:
            facts = {
                "the experts": f"part {group.rank} of {group.size}",
                "the ranks of dp_group in expert_parallel_group": own.sources(dp_ranks),
            }
            device = self.parameters[0].device
            compare(facts, chunks.group, device, name="cp_group", rule='Give expert_parallel_group=mesh["dp", "tp"]')
        places = gather_objects(own, dp_group)
        owners: dict[tuple[int, int, int], list[int]] = {}  # the ranks of dp_group that hold the same experts
        for rank, place in enumerate(places):
            owners.setdefault((len(place.ranks), place.rank, place.each), []).append(rank)
        for members in owners.values():
            sources = [source for rank in members for source in places[rank].sources(dp_ranks)]
            if sorted(sources) != list(range(dp_group.size)):
                raise ValueError(
                    f"dp_group has the global ranks {dp_ranks}, and the experts of global rank {dp_ranks[members[0]]} "
                    f"are divided over the ranks {list(places[members[0]].ranks)}: dp_group must have a rank of each "
                    "micro-batch of an expert_parallel_group, and be made of whole such groups of one size"
                )
        if self.micro_batches % dp_group.size:
            raise ValueError(
                f"micro_batches={self.micro_batches} over {dp_group.size} ranks of dp_group, with experts over "
                "data-parallel ranks, which call their layers together: the number of ranks must divide micro_batches"
            )
        members = owners[len(own.ranks), own.rank, each]
        of_members = [self._nodes_of(self._chunks, places[rank].sources(dp_ranks)) for rank in members]
        every_source = range(dp_group.size)
        of_cp = [self._nodes_of(chunks.on(rank), every_source) for rank in range(chunks.group.size)]
        levels = _Level(dp_group, members, of_members), _Level(chunks.group, range(chunks.group.size), of_cp)
        self._levels = [level for level in levels if len(level.members) > 1]
        # in the group's order, in which backward gives gradients, and which may not be dp_group's
        sources = [dp_ranks.index(rank) for rank in own.ranks[own.rank % each :: each]]
        self._own = [*itertools.product(self._chunks, sources)]  # (chunk, source), as backward gives gradients
        for p in self.parameters:
            waiting: Any = partial_gradients_of(p) or PartialGradients()
            waiting.read_by(reader, dp_ranks)
            p.partial_gradients = waiting  # type: ignore[attr-defined]
        self.start()

    def start(self) -> None:
        """Starts a step; what was added before is dropped."""
        of_chunks = {chunk: BinaryTree(self._leaves) for chunk in self._chunks}
        self._trees = {
            (chunk, source): of_chunks[chunk] if self._take_turns else BinaryTree(self._leaves)
            for chunk, source in self._own
        }

    def add(self, number: int | None) -> list[int]:
        """Takes the gradients of this rank's micro-batch `number` of the step, and of the other sources' same number.

        number: None for one too many, whose gradients are dropped. Returns the indices of parameters that got some.

        Raises:
            RuntimeError: a parameter has a .grad; another MicroBatchTree reads its gradients.
        """
        device = self.parameters[0].device
        size = (sum(self._sizes),)
        # -0.0 where there is no gradient: see MicroBatchTree.add
        flats = {own: torch.full(size, -0.0, dtype=torch.float32, device=device) for own in self._own}
        parts = [flat.split(self._sizes) for flat in flats.values()]
        with_grad = []
        for place, (p, index) in enumerate(zip(self.parameters, self.indices, strict=True)):
            waiting: Any = partial_gradients_of(p)
            if waiting is None:
                raise RuntimeError(
                    f"{self._labels[index]} with shape {tuple(p.shape)} on rank {self._dp.rank} of dp_group has lost "
                    "its attribute partial_gradients, which this MicroBatchTree has set"
                )
            sums = waiting.take(p)
            if p.grad is not None:
                raise RuntimeError(
                    f"{self._labels[index]} with shape {tuple(p.shape)} on rank {self._dp.rank} of dp_group, experts "
                    "over data-parallel ranks, has a .grad. Its layer gives partial sums instead: it is left of the "
                    "step before (call optimizer.zero_grad(), with set_to_none=True), something has changed the NaN "
                    "that stands there until add() (a clip, an unscale), or another use of the parameter made it (a "
                    "regulariser), which would count on this rank only, and not in every micro-batch"
                )
            if sums is None:
                continue
            with_grad.append(index)
            for part, one in zip(parts, sums, strict=True):
                if one is not None:
                    part[place].view(one.shape).copy_(one)
        if number is not None:
            for chunk, source in sorted(flats):
                leaf = chunk * self.micro_batches + self._shares[source][number]
                self._trees[chunk, source].push(0, leaf, flats[chunk, source])
        return with_grad

    def meet(self, added: int) -> None:
        """Lets a rank that is in reduce() meet those of its expert-parallel group that are still in a forward.

        Raises:
            RuntimeError: on every rank: some are in another call, or have added another number of micro-batches.
        """
        numbers = torch.zeros(self.group.size, dtype=torch.int64, device=self.parameters[0].device)
        facts = {"the call": "MicroBatchTree.reduce", "the number of micro-batches added": added}
        compare_call(numbers, facts, self.group, "expert_parallel_group")

    def totals(self, divide_by: int | None, chunk: int) -> list[Tensor]:
        """The sum of all micro-batches, divided, for each parameter; fp32. A collective of dp_group and cp_group.

        chunk: how many elements are summed at a time.
        """
        nodes = self._merged([node for tree in dict.fromkeys(self._trees.values()) for node in tree.nodes])
        total = torch.empty(sum(self._sizes), dtype=torch.float32, device=self.parameters[0].device)
        for start in range(0, total.numel(), chunk):
            part = total[start : start + chunk]
            ours = [(level, index, value[start : start + chunk]) for level, index, value in nodes]
            summed = self._over(self._levels, ours, part.numel())
            part.copy_(summed if divide_by is None else summed / divide_by)
        return [part.view(local_of(p).shape) for p, part in zip(self.parameters, total.split(self._sizes), strict=True)]

    def _merged(self, nodes: list[_Node]) -> list[_Node]:
        """The nodes that these add up to."""
        tree = BinaryTree(self._leaves)
        for node in sorted(nodes, key=lambda node: node[1] << node[0]):
            tree.push(*node)
        return tree.nodes

    def _nodes_of(self, chunks: Iterable[int], sources: Iterable[int]) -> list[tuple[int, int]]:
        """(level, index) of the nodes that a rank has of these chunks of these sources."""
        every = sorted(itertools.chain.from_iterable(self._shares[source] for source in sources))
        return nodes_of((chunk * self.micro_batches + m for chunk in chunks for m in every), self._leaves)

    def _over(self, levels: Sequence[_Level], nodes: list[_Node], elements: int) -> Tensor:
        """The sum over the nodes of all ranks that hold the same experts: each adds a part of the elements."""
        if not levels:
            ((_, _, value),) = nodes
            return value
        level, *others = levels
        sizes = split_sizes(elements, len(level.members))
        own = sizes[level.members.index(level.group.rank)]
        most = max(map(len, level.held))  # each rank's columns, padded to the most
        columns = [value for _, _, value in nodes]
        columns += [torch.zeros_like(columns[0])] * (most - len(columns))
        mine = [own] * len(level.members)
        received = self._exchange(torch.stack(columns, dim=1), level, sizes, mine, (elements, most))
        every = [
            (height, index, theirs[:, column])
            for theirs, held in zip(received.view(len(mine), own, most), level.held, strict=True)
            for column, (height, index) in enumerate(held)
        ]
        summed = self._over(others, self._merged(every), own)
        return self._exchange(summed.repeat(len(mine)), level, mine, sizes, (elements,))

    def _exchange(
        self, x: Tensor, level: _Level, sent: list[int], received: list[int], alike: tuple[int, ...]
    ) -> Tensor:
        """x [sum(sent), ..], so many rows to each member -> [sum(received), ..], so many of each."""
        to, of = (dict(zip(level.members, rows, strict=True)) for rows in (sent, received))
        ranks = range(level.group.size)
        rows = [to.get(rank, 0) for rank in ranks], [of.get(rank, 0) for rank in ranks]
        return exchange_flat(x.contiguous(), rows[0], rows[1], level.group, alike)


def indices_by_group(parameters: Sequence[Tensor]) -> list[list[int]]:
    """The indices of the parameters of each expert-parallel group, in the order of the parameters."""
    members: dict[tuple, list[int]] = {}
    for index, p in enumerate(parameters):
        if (group := expert_group(p)) is not None:
            members.setdefault((*ranks_of(group), p.ranks_per_micro_batch), []).append(index)  # type: ignore[attr-defined]
    return list(members.values())


def describe(parameter: Tensor) -> str:
    """What all ranks of dp_group should say alike of an expert's parameter."""
    group = expert_group(parameter)
    assert group is not None
    placed = f", placed as {parameter.placements}" if is_dtensor(parameter) else ""
    return f", of experts over {group.size} ranks{placed}"
