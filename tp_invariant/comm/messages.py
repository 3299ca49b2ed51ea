"""Tensors from one rank to another, beside a group in which others send theirs (the schedule of a pipeline).

The messages of a process group arrive in the order in which they were sent, so that two programs cannot share one. Here
it is that of the whole job, in which nothing else sends tensors to one rank, or one like it.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from .group import Group, ranks_of

_TAG = 7135  # heeded by gloo alone


@functools.cache
def _of_all(default: dist.ProcessGroup) -> dist.ProcessGroup:
    return dist.new_group(list(range(dist.get_world_size())))


class Messages:
    """Sends to one rank of `group` without waiting, and receives from it."""

    def __init__(self, group: Group, other: int) -> None:
        self._group, self._with = group, ranks_of(group)[other]
        self._running: list[tuple[dist.Work, Tensor]] = []

    def __reduce__(self) -> tuple:  # process groups cannot be copied or pickled, a Group can
        return Messages, (self._group, ranks_of(self._group).index(self._with))

    def connect(self) -> dist.ProcessGroup:
        """The process group, which is made at the first call: a collective of `group`."""
        world = dist.group.WORLD
        assert world is not None
        return _of_all(world) if self._group.size == dist.get_world_size() else world

    def send(self, x: Tensor) -> None:
        self._running = [(work, kept) for work, kept in self._running if not work.is_completed()]
        x = x.contiguous()
        work = dist.isend(x, self._with, self.connect(), _TAG)
        assert work is not None
        self._running.append((work, x))

    def wait(self) -> None:
        """Until all that was sent has arrived."""
        for work, _ in self._running:
            work.wait()
        self._running.clear()

    def receive(self, like: Tensor) -> Tensor:
        """The next tensor that was sent, of the shape and dtype of `like`."""
        received = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(received, self._with, self.connect(), _TAG)
        return received
