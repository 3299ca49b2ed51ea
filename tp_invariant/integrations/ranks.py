"""The ranks of a run, tensor parallel times data parallel, as the trainers of this wing need them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import numpy
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..checkpoint.full_state import model_group, run_on_all_ranks
from ..comm.collectives import Group, ranks_of, resolve_group
from ..comm.wire import gather_objects
from ..consistency.differences import differences, format_values, mark
from ..core.bits import leaves, tensor_hash
from ..core.dtensors import is_dtensor, local_of
from ..data_parallel.micro_batch_tree import resolve_dp_group
from ..layers.parameters import named_shard_specs

T = TypeVar("T")


class Ranks:
    """tp: the ranks that the model is sharded over; dp: those that hold the same shards.

    The ranks are numbered with tp's first: 0 is the one that writes files and logs.

    Raises:
        ValueError: a model that fully_shard has sharded; groups that have other ranks than this one in common; a first
            rank that is not rank 0 of the job, which alone writes files.
        TypeError: dp_group is no group.
    """

    def __init__(self, model: nn.Module, dp_group: dist.ProcessGroup | DeviceMesh | Group | None) -> None:
        self.tp = model_group(model)
        self.dp = resolve_group(None) if dp_group is None else resolve_dp_group(dp_group)
        self.size, self.index = self.tp.size * self.dp.size, self.dp.rank * self.tp.size + self.tp.rank
        tp = {0} if self.tp.size == 1 else {*ranks_of(self.tp)}
        for name, p, spec in named_shard_specs(model):
            on_mesh = {*p.device_mesh.mesh.flatten().tolist()} if is_dtensor(p) else set()
            if spec.is_cut_further(p) or (len(on_mesh) > 1 and not on_mesh <= tp):
                raise ValueError(
                    f"{name} is placed on the ranks {sorted(on_mesh)}, which are not those of its tp_group alone: "
                    "a model of fully_shard is not supported here. Give the model without fully_shard, and the data "
                    "parallel ranks as dp_group"
                )
        if self.size == 1:
            return
        me = dist.get_rank()
        if self.tp.size > 1 and self.dp.size > 1 and len(tp & {*ranks_of(self.dp)}) > 1:
            raise ValueError(
                f"dp_group has the ranks {ranks_of(self.dp)}, and the model is sharded over {sorted(tp)}: they must "
                f"have rank {me} alone in common"
            )
        if (self.index == 0) != (me == 0):
            raise ValueError(
                f"rank {me} of the job is rank {self.tp.rank} of tp_group and {self.dp.rank} of dp_group: rank 0 of "
                "the job, which alone writes files, must be the first of both"
            )

    def gather(self, own: T) -> list[T]:
        """Every rank's `own`, by number. A collective."""
        return [value for row in gather_objects(gather_objects(own, self.tp), self.dp) for value in row]

    def run(self, what: str, step: Callable[[], T]) -> T:
        """step() on every rank; if it fails on one rank, every rank raises an error (`run_on_all_ranks`)."""
        return run_on_all_ranks(self.dp, what, lambda: run_on_all_ranks(self.tp, what, step))

    def check_alike(self, facts: Mapping[str, Hashable], advice: str, *, replicas_differ: bool = False) -> None:
        """Raises: ValueError: on every rank: the first of `facts` that ranks have different values of.

        replicas_differ: data parallel ranks may; the tensor parallel ranks of each may not.
        """
        found = self.gather(facts)
        size = self.tp.size if replicas_differ else self.size
        for first in range(0, self.size, size):
            for name, values in differences(found[first : first + size]).items():
                numbered = {value: [first + index for index in ranks] for value, ranks in values.items()}
                raise ValueError(f"the {size} ranks differ in {name}: {format_values(numbered)}. {advice}")

    def check_replicas(self, tensors: Iterable[tuple[str, Tensor]], what: str) -> None:
        """Raises: ValueError: on every rank: data parallel ranks hold different values, by a hash, in the first tensor
        of which they do. A collective over all ranks; nothing without data parallel ranks."""
        if self.dp.size == 1:
            return
        found = gather_objects({name: int(tensor_hash(local_of(x).detach())) for name, x in tensors}, self.dp)
        name = next((name for name in found[0] if any(each.get(name) != found[0][name] for each in found)), None)
        names = [each for each in gather_objects(name, self.tp) if each is not None]
        if names:
            raise ValueError(
                f"the {self.dp.size} data parallel ranks hold different values of {names[0]} {what}: each would train "
                "a model of its own. Seed every rank alike before the model is made, or load one checkpoint; running "
                "statistics (BatchNorm) are not averaged over data parallel ranks: freeze them, or take another norm"
            )

    def check_batches(self, batches: Any, *, replicas_differ: bool = False) -> None:
        """Raises: ValueError: on every rank: ranks have read different batches, by a hash of everything in them."""
        everything = leaves([dict(batch) if isinstance(batch, Mapping) else batch for batch in batches])
        own = mark([(name, _value(x)) for name, x in everything])
        advice = "Every rank must read the same examples in the same order: seed what shuffles or augments them alike"
        self.check_alike({"the batches of a step, by their hash": own}, advice, replicas_differ=replicas_differ)


def _value(x: Any) -> Any:
    """What of a batch's part is compared; of an object of unknown kind, whose repr may hold an address, its type."""
    if isinstance(x, Tensor):
        return int(tensor_hash(x))
    if isinstance(x, numpy.ndarray):
        return x.shape, x.tobytes()
    return x if x is None or isinstance(x, (str, int, float, complex, bytes)) else type(x).__qualname__
