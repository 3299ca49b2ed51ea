"""What transformers' Trainer, accelerate and Lightning share: a run's ranks, its steps and its random numbers.

A training step over data parallel ranks:

    step.start(4)                          # the step's micro-batches on all ranks together
    for index in step.share:
        with seeded((seed, number, index), device):
            loss = ..
        loss.backward()
        step.add(loss)
    loss = step.finish()                   # the gradients of all ranks' micro-batches are in .grad

The number of micro-batches and their order are a step's own, so the bits are the same at every data parallel degree.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..checkpoint import load, save
from ..checkpoint.full_state import layers_group, model_group, reshard, run_on_all_ranks
from ..comm.collectives import Group, gather_uneven, on_mesh, ranks_of, resolve_group
from ..comm.wire import gather_objects
from ..consistency.differences import differences, format_values, mark
from ..core.bits import leaves, tensor_hash
from ..core.dtensors import is_dtensor, local_of
from ..data_parallel import MicroBatchTree, fix_reduction_order
from ..data_parallel.micro_batch_tree import is_cut_by, is_cut_over, resolve_dp_group
from ..layers.parameters import is_over_data, named_shard_specs

T = TypeVar("T")
GroupOrMesh = dist.ProcessGroup | DeviceMesh | Group | None


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

    def __init__(self, model: nn.Module, dp_group: GroupOrMesh) -> None:
        self.holders = model_group(model)
        self.tp = layers_group(model, of_replica=True)
        self.dp = dp_ranks(dp_group)
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
        divided = [(name, ranks_of(spec.group)) for name, p, spec in named_shard_specs(model) if is_over_data(p)]
        for name, ranks in divided:
            if len(ranks) != self.size or not {*ranks_of(self.tp), *ranks_of(self.dp)} <= {*ranks}:
                raise ValueError(
                    f"{name} belongs to experts that are divided over the ranks {ranks}, and the model is sharded over "
                    f"{ranks_of(self.tp)}, dp_group has {ranks_of(self.dp)}: give expert_parallel_group all ranks of "
                    "both, or those of tp_group alone; or write the loop with tp_invariant.data_parallel.MicroBatchTree"
                )
        return bool(divided)

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

    # --- what is compared -------------------------------------------------------------------------------------------

    def check_job(self, processes: int) -> None:
        """Raises: ValueError: a launcher has started `processes` ranks, and these are others."""
        if processes not in (1, self.size):
            raise ValueError(
                f"the job has {processes} ranks, the model is sharded over {self.tp.size}, and dp_group has "
                f"{self.dp.size}: give dp_group, the ranks that hold the same shards as this one"
            )

    def check_shared(self, micro_batches: int, what: str) -> None:
        """Raises: ValueError: data parallel ranks cannot share so many micro-batches."""
        if (self.fully_sharded or self.experts_over_data) and micro_batches % self.dp.size:
            raise ValueError(
                f"{what} {micro_batches} micro-batches on rank {self.index}, and dp_group has {self.dp.size} ranks: of "
                "a model of fully_shard, or with experts over data parallel ranks, each computes as many in every "
                "step, an epoch's last one too. Give a multiple, and as many examples"
            )

    def check_accumulation(self, name: str, steps: int) -> None:
        """Raises: ValueError: the option `name` says that a step has fewer micro-batches than data parallel ranks."""
        if steps < self.dp.size:
            raise ValueError(
                f"{name}={steps} on rank {self.index}, and dp_group has {self.dp.size} ranks: it is the number of "
                "micro-batches in a step of all data parallel ranks together, and must be at least as many"
            )

    def gather(self, own: T) -> list[T]:
        """Every rank's `own`, by number. A collective."""
        return [value for row in gather_objects(gather_objects(own, self.tp), self.dp) for value in row]

    def check_alike(self, facts: Mapping[str, Hashable], advice: str, *, replicas_differ: bool = False) -> None:
        """Raises: ValueError: on every rank: the first of `facts` that ranks have different values of.

        replicas_differ: data parallel ranks may; the tensor parallel ranks of each may not.
        """
        everyone, size = self.gather(facts), self.tp.size if replicas_differ else self.size
        for first in range(0, self.size, size):
            for name, values in differences(everyone[first : first + size]).items():
                numbered = {value: [first + index for index in ranks] for value, ranks in values.items()}
                raise ValueError(f"the {size} ranks differ in {name}: {format_values(numbered)}. {advice}")

    def check_batches(self, batches: Any, *, replicas_differ: bool = False) -> None:
        """Raises: ValueError: on every rank: ranks have read different batches, by a hash of everything in them."""
        everything = leaves([dict(batch) if isinstance(batch, Mapping) else batch for batch in batches])
        self.check_alike(
            {"the batches of a step, by their hash": mark([(name, _hashable(x)) for name, x in everything])},
            "Every rank must read the same examples in the same order: seed what shuffles or augments them alike",
            replicas_differ=replicas_differ,
        )

    def check_hyperparameters(self, optimizers: Iterable[Any]) -> None:
        """Raises: ValueError: on every rank: rates, betas and the like of optimizers' groups differ."""
        facts = {
            f"{name} of group {index} of optimizer {number}": repr(_plain(value))
            for number, optimizer in enumerate(optimizers)
            for index, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        self.check_alike(
            facts,
            "Set it alike on every rank: a schedule that follows the loss must get the whole step's, `step_loss`, and "
            "not that of this rank's micro-batches",
        )

    def check_replicas(self, tensors: Iterable[tuple[str, Tensor]], what: str) -> None:
        """Raises: ValueError: on every rank: data parallel ranks hold different values, by a hash, of a tensor. A
        collective over all ranks; nothing without data parallel ranks."""
        if self.dp.size == 1:
            return
        replicas = {name: x for name, x in tensors if not (is_cut_by(x, self.dp) or is_over_data(x))}
        hashes = {name: int(tensor_hash(local_of(x).detach())) for name, x in replicas.items()}
        names = [*differences(gather_objects(hashes, self.dp))]
        if differing := [name for of_rank in gather_objects(names, self.tp) for name in of_rank]:
            raise ValueError(
                f"the {self.dp.size} data parallel ranks hold different values of {differing[0]} {what}: each would "
                "train a model of its own. Seed every rank alike before the model is made, or load one checkpoint; "
                "running statistics (BatchNorm) are not averaged over data parallel ranks: freeze them, or take "
                "another norm"
            )

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def run(self, what: str, step: Callable[[], T]) -> T:
        """step() on every rank; if it fails on one rank, every rank raises an error (`run_on_all_ranks`)."""
        return run_on_all_ranks(self.dp, what, lambda: run_on_all_ranks(self.tp, what, step))

    def save(self, path: Any, model: nn.Module, optimizer: Any, extra: dict[str, Any]) -> None:
        """Writes a checkpoint of this library's, by the ranks that hold the model once. A collective of all ranks."""

        def write() -> None:
            if self.saves:
                save(path, model, optimizer, extra=extra, group=self.holders)

        self.run(f"saving {path}", write)

    def load(self, path: Any, model: nn.Module, optimizer: Any = None) -> dict[str, Any]:
        """Reads it, and returns `extra`. A collective of all ranks."""
        return self.run(f"loading {path}", lambda: load(path, model, optimizer, group=self.holders))


def dp_ranks(dp_group: GroupOrMesh) -> Group:
    return resolve_group(None) if dp_group is None else resolve_dp_group(dp_group)


def _plain(value: Any) -> Any:
    """A number or numbers as Python's own, whatever holds them; of an object of unknown kind its type."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    value = value.tolist() if isinstance(value, (Tensor, numpy.ndarray, numpy.generic)) else value
    return (
        value if value is None or isinstance(value, (str, int, float, complex, bytes, list)) else type(value).__name__
    )


def _hashable(x: Any) -> Any:
    """What of a batch's part is compared; of an object of unknown kind, whose repr may hold an address, its type."""
    if isinstance(x, Tensor):
        return int(tensor_hash(x))
    if isinstance(x, numpy.ndarray):
        return x.shape, x.tobytes()
    return _plain(x)


# --- a step -----------------------------------------------------------------------------------------------------------


class Step:
    """Sums gradients by a MicroBatchTree, and losses in the same order.

    A model of fully_shard is given `fix_reduction_order`. It has its sharded parameters, which alone have gradients,
    before and after a step, also where a forward of an evaluation, or fully_shard's settings, have left gathered ones.

    Raises:
        ValueError: on every rank: data parallel ranks begin with different parameters or buffers; or, at the end of the
            first step, a forward has changed a buffer differently.
    """

    def __init__(self, ranks: Ranks, modules: Sequence[nn.Module]) -> None:
        self.ranks, self.modules = ranks, modules
        self.micro_batches = 0
        self.losses: Tensor | None = None  # those of the last step's micro-batches
        self._tree: MicroBatchTree | None = None
        self._trees: dict[Hashable, MicroBatchTree] = {}
        self._losses: list[Tensor] = []
        self._counts: list[Tensor] = []
        self._waiting: deque[tuple[int, Any]] = deque()
        self._compared = False  # the buffers of data parallel ranks, after a step
        self._reshard()
        if ranks.fully_sharded:
            for module in modules:
                fix_reduction_order(module)
        everything = [named for module in modules for named in (*module.named_parameters(), *module.named_buffers())]
        ranks.check_replicas(everything, "when training begins")

    def start(self, micro_batches: int) -> None:
        """Starts a step of so many micro-batches on all ranks together.

        Raises:
            ValueError: of a model of fully_shard, they are no multiple of the data parallel ranks.
        """
        self.ranks.check_shared(micro_batches, "a step has")
        self._reshard()
        self.micro_batches = micro_batches
        self._waiting.clear()
        self._losses.clear()
        self._counts.clear()
        # one micro-batch of one rank is no sum
        self._tree = self._make_tree() if micro_batches > 1 or self.ranks.dp.size > 1 else None

    def _reshard(self) -> None:
        for module in self.modules if self.ranks.fully_sharded else ():
            reshard(module)

    def _make_tree(self) -> MicroBatchTree:
        parameters = [p for module in self.modules for p in module.parameters()]
        key = self.micro_batches, tuple(id(p) for p in parameters if p.requires_grad)  # a callback may unfreeze some
        if key not in self._trees:
            self._trees.clear()
            self._trees[key] = MicroBatchTree(parameters, self.ranks.dp, self.micro_batches)
        return self._trees[key]

    @property
    def share(self) -> range:
        """Which of the step's micro-batches this rank computes, in this order."""
        return range(self.micro_batches) if self._tree is None else self._tree.share

    def due(self, index: int, micro_batch: T) -> tuple[int, T] | None:
        """What this rank computes now that every rank has read micro-batch `index`: a number and its micro-batch.

        The one of `index`, if it is in the share. Of a model of fully_shard, and with experts over data parallel ranks,
        whose forwards are collectives of all data parallel ranks, each computes its own when the last of them has read
        its own: so these come in one order with collectives of other code between micro-batches, an evaluation's or a
        callback's. Until then a micro-batch is kept.
        """
        if index in self.share:
            self._waiting.append((index, micro_batch))
        of_last = self.ranks.dp.size - 1
        if self.ranks.fully_sharded and index % self.ranks.dp.size != of_last:
            return None
        if self.ranks.experts_over_data and not self.ranks.fully_sharded and index < of_last * len(self.share):
            return None
        if not self._waiting:
            return None
        self._reshard()
        return self._waiting.popleft()

    @property
    def added(self) -> int:
        """How many of its share this rank has added."""
        return len(self._losses)

    def add(self, loss: Tensor, count: int | Tensor | None = None) -> None:
        """Takes .grad and the loss, after the backward of this rank's next micro-batch.

        count: what finish() divides both by is the sum of these over all micro-batches; give it for all or for none.
        """
        self._losses.append(loss.detach().float())
        if count is not None:
            self._counts.append(torch.as_tensor(count, device=loss.device))
            self._tree = self._tree or self._make_tree()
        if self._tree is not None:
            self._tree.add(count=count)

    def finish(self) -> Tensor:
        """Sets .grad to the sum over all ranks; returns that of the losses. A collective."""
        if self._tree is not None:
            self._tree.reduce()
        self._reshard()
        self.losses = self._of_all(self._losses, torch.float32)
        loss = self.losses.sum()
        if self._counts:
            loss = loss / self._of_all(self._counts, torch.int64).sum()
        self._losses.clear()
        self._counts.clear()
        if not self._compared:  # a buffer that forwards change differs after the first step already
            buffers = [named for module in self.modules for named in module.named_buffers()]
            self.ranks.check_replicas(buffers, "after a step's forwards")
            self._compared = True
        return loss

    def _of_all(self, own: list[Tensor], dtype: torch.dtype) -> Tensor:
        """All micro-batches' numbers, in their order."""
        device = next(self.modules[0].parameters()).device
        numbers = torch.stack(own).to(dtype) if own else torch.zeros(0, dtype=dtype, device=device)
        numbers = gather_uneven(numbers, 0, self.micro_batches, self.ranks.dp)
        if self.ranks.fully_sharded:  # where ranks take turns
            numbers = numbers.view(self.ranks.dp.size, -1).t().flatten()
        return numbers


# --- random numbers ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def seeded(place: tuple[int | str, ...], device: torch.device) -> Iterator[None]:
    """Random numbers that depend on the seed, the step and the micro-batch alone, not on which rank draws them, nor on
    what it has drawn before; the generators' states are restored afterwards. On a CPU, those of GPUs are left alone."""
    before = generator_states(device)
    seed = int.from_bytes(hashlib.sha256(repr(place).encode()).digest()[:4], "little")
    random.seed(seed)
    numpy.random.seed(seed)
    (torch.default_generator if device.type == "cpu" else torch).manual_seed(seed)
    try:
        yield
    finally:
        set_generator_states(before, device)


def generator_states(device: torch.device) -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, as a checkpoint stores them."""
    state: Any = numpy.random.get_state()
    kind, keys, *rest = state
    states = {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(keys.astype("int64")), *rest],
        "torch": torch.get_rng_state(),
    }
    return {**states, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else states


def set_generator_states(states: dict[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def seed_workers_alike(loader: Any) -> None:
    """Has a loader's workers draw as on one process: transformers' and Lightning's own seeds are by the rank."""
    seed = getattr(loader, "worker_init_fn", None)
    if isinstance(seed, functools.partial) and "rank" in seed.keywords:
        loader.worker_init_fn = functools.partial(seed, rank=0)
