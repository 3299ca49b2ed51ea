"""The ranks of a run, tensor parallel times data parallel, as the trainers of this wing need them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ..checkpoint.full_state import layers_group, model_group, run_on_all_ranks
from ..comm.collectives import Group, gather_major, on_mesh, ranks_of, resolve_group
from ..comm.wire import gather_objects
from ..consistency.differences import differences, format_values, mark
from ..core.bits import leaves, tensor_hash
from ..core.dtensors import is_dtensor, local_of
from ..data_parallel.micro_batch_tree import is_cut_by, is_cut_over, resolve_dp_group
from ..layers.parameters import is_over_data, named_shard_specs

T = TypeVar("T")


class Ranks:
    """tp: the ranks that the layers are sharded over; dp: those that hold the same shards, or, of a model of
    fully_shard, parts of them (`fully_sharded`). With `experts_over_data` experts are divided over both.

    The ranks are numbered with tp's first: 0 is the one that writes files and logs. `holders` are the ranks that
    together hold the model once, of which there are several groups with neither of these two; `saves` says whether this
    rank is in the first of them, which writes checkpoints.

    Raises:
        ValueError: groups that have other ranks than this one in common; a first rank that is not rank 0 of the job,
            which alone writes files; of what fully_shard has sharded: over other ranks than dp_group's, or as HSDP;
            layers without a DeviceMesh; a part of what is trained; experts that are divided over data parallel ranks,
            but not over all ranks of both groups.
        TypeError: dp_group is no group.
    """

    def __init__(self, model: nn.Module, dp_group: dist.ProcessGroup | DeviceMesh | Group | None) -> None:
        self.holders = model_group(model)
        self.tp = layers_group(model, of_replica=True)
        self.dp = resolve_group(None) if dp_group is None else resolve_dp_group(dp_group)
        self.size, self.index = self.tp.size * self.dp.size, self.dp.rank * self.tp.size + self.tp.rank
        self.experts_over_data = self._check_experts(model)
        self.fully_sharded = self._check_fully_sharded(model)
        self.saves = self.fully_sharded or self.experts_over_data or self.dp.rank == 0
        if self.size == 1:
            return
        me, tp = dist.get_rank(), {*ranks_of(self.tp)}
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

    def _check_experts(self, model: nn.Module) -> bool:
        """Whether there are experts that are divided over all ranks. Raises: ValueError: see the class."""
        found = False
        for name, p, spec in named_shard_specs(model):
            if not is_over_data(p):
                continue
            found, ranks = True, ranks_of(spec.group)
            if len(ranks) != self.size or not {*ranks_of(self.tp), *ranks_of(self.dp)} <= {*ranks}:
                raise ValueError(
                    f"{name} belongs to experts that are divided over the ranks {ranks}, and the model is sharded over "
                    f"{ranks_of(self.tp)}, dp_group has {ranks_of(self.dp)}: give expert_parallel_group all ranks of "
                    "both, or those of tp_group alone; or write the loop with tp_invariant.data_parallel.MicroBatchTree"
                )
        return found

    def _check_fully_sharded(self, model: nn.Module) -> bool:
        """Whether fully_shard has cut what is trained over dp. Raises: ValueError: see the class."""
        tp, cut, whole = {*ranks_of(self.tp)}, "", ""
        for name, p, spec in named_shard_specs(model):
            if is_over_data(p):
                continue  # its gradients are summed in the order of the others
            if not is_dtensor(p) or on_mesh(p.device_mesh).ranks <= tp:
                whole = whole or (name if p.requires_grad else "")
                continue
            cut = cut or name
            ranks = sorted(on_mesh(p.device_mesh).ranks)
            by = f"{name} is placed as {p.placements} over the ranks {ranks} by fully_shard"
            if not is_cut_over(p, self.dp):
                raise ValueError(
                    f"{by}, whose mesh must have one dim (no HSDP), that of dp_group, which has the ranks "
                    f"{ranks_of(self.dp)}: give fully_shard mesh=mesh['dp'], and dp_group=mesh['dp']"
                )
            if spec.dim is not None and spec.group.mesh is None and p.device_mesh.ndim == 1:
                raise ValueError(
                    f"{by}, and its layer has no DeviceMesh: make it with tp_group=mesh['tp'], also of one rank"
                )
        if cut and whole:
            raise ValueError(
                f"{whole} is trained and not sharded by fully_shard, and {cut} is: call fully_shard on the whole model "
                "too, without ignored_params, or freeze what it leaves out"
            )
        return bool(cut)

    def check_shared(self, micro_batches: int, what: str) -> None:
        """Raises: ValueError: data parallel ranks cannot share so many micro-batches."""
        if (self.fully_sharded or self.experts_over_data) and micro_batches % self.dp.size:
            raise ValueError(
                f"{what} {micro_batches} micro-batches on rank {self.index}, and dp_group has {self.dp.size} ranks: of "
                "a model of fully_shard, or with experts over data parallel ranks, each computes as many in every "
                "step, an epoch's last one too. Give a multiple, and as many examples"
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
        self._refuse_differences(self.gather(facts), advice, self.tp.size if replicas_differ else self.size)

    def _refuse_differences(self, found: Sequence[Mapping[str, Hashable]], advice: str, size: int) -> None:
        for first in range(0, self.size, size):
            for name, values in differences(found[first : first + size]).items():
                numbered = {value: [first + index for index in ranks] for value, ranks in values.items()}
                raise ValueError(f"the {size} ranks differ in {name}: {format_values(numbered)}. {advice}")

    def check_replicas(self, tensors: Iterable[tuple[str, Tensor]], what: str) -> None:
        """Raises: ValueError: on every rank: data parallel ranks hold different values, by a hash, in the first tensor
        of which they do. A collective over all ranks; nothing without data parallel ranks."""
        if self.dp.size == 1:
            return
        replicas = {name: x for name, x in tensors if not (is_cut_by(x, self.dp) or is_over_data(x))}
        found = gather_objects({name: int(tensor_hash(local_of(x).detach())) for name, x in replicas.items()}, self.dp)
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
        self.check_alike(_marked(batches), _READ_ALIKE, replicas_differ=replicas_differ)

    def check_step(self, batches: Any, optimizers: Iterable[Any]) -> None:
        """`check_batches`, and in the same collective the optimizers' hyperparameters.

        Raises: ValueError: on every rank: ranks differ in either.
        """
        read, schedules = zip(*self.gather((_marked(batches), _hyperparameters(optimizers))), strict=True)
        self._refuse_differences(read, _READ_ALIKE, self.size)
        self._refuse_differences(schedules, _SCHEDULE_ALIKE, self.size)

    def check_hyperparameters(self, optimizers: Iterable[Any], device: torch.device) -> None:
        """Raises: ValueError: on every rank: optimizers' hyperparameters differ. A collective of eight bytes a rank."""
        if self.size == 1:
            return
        own = _hyperparameters(optimizers)
        marks = gather_major(torch.tensor(mark(own), device=device), self.tp)
        if len(set(gather_major(marks, self.dp).flatten().tolist())) > 1:
            self.check_alike(own, _SCHEDULE_ALIKE)


_READ_ALIKE = "Every rank must read the same examples in the same order: seed what shuffles or augments them alike"
_SCHEDULE_ALIKE = (
    "Set it alike on every rank: a schedule that follows the loss must get the whole step's, `step_loss`, and not that "
    "of this rank's micro-batches"
)


def _marked(batches: Any) -> dict[str, Hashable]:
    everything = leaves([dict(batch) if isinstance(batch, Mapping) else batch for batch in batches])
    return {"the batches of a step, by their hash": mark([(name, _value(x)) for name, x in everything])}


def _hyperparameters(optimizers: Iterable[Optimizer]) -> dict[str, Hashable]:
    """The numbers that the groups of optimizers have: rates, betas, and what a schedule keeps there."""
    found: dict[str, Hashable] = {}
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name not in ("params", "param_names"):
                    found[f"{name} of group {index} of optimizer {number}"] = repr(_plain(value))
    return found


def _plain(value: Any) -> Any:
    """A number or numbers as Python's own, whatever holds them; of an object of unknown kind its type."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    value = value.tolist() if isinstance(value, (Tensor, numpy.ndarray, numpy.generic)) else value
    return (
        value if value is None or isinstance(value, (str, int, float, complex, bytes, list)) else type(value).__name__
    )


def _value(x: Any) -> Any:
    """What of a batch's part is compared; of an object of unknown kind, whose repr may hold an address, its type."""
    if isinstance(x, Tensor):
        return int(tensor_hash(x))
    if isinstance(x, numpy.ndarray):
        return x.shape, x.tobytes()
    return x if x is None or isinstance(x, (str, int, float, complex, bytes)) else type(x).__qualname__
