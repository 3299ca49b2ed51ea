"""A training step's micro-batches over data parallel ranks, as the trainers of this wing take them.

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
import hashlib
import random
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor, nn

from ..checkpoint.full_state import reshard
from ..comm.collectives import gather_uneven
from ..data_parallel import MicroBatchTree, fix_reduction_order
from .ranks import Ranks

T = TypeVar("T")


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
def seeded(place: tuple[int, ...], device: torch.device) -> Iterator[None]:
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
