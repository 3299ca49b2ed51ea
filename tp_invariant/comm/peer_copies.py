"""Gathers and exchanges of row blocks by copy engines, which run beside GEMMs that hold every SM, for a group.

copy_protocol.py says how the blocks move. NCCL's kernels take SMs, and a GEMM of one program per SM that runs beside
one ends late by the whole collective. A CUDA graph holds copies if it was prepared for (`prepare_for_graphs`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from . import copy_machine
from .copy_machine import CudaMachine, GraphMachine
from .copy_protocol import PER_SIZE, CapturedCopies, Lease, PeerCopies
from .group import Group, Pending, is_capturing, is_first, stored, whole_shape
from .peer_memory import TRANSPORT_VARIABLE, PeerMemory, first_reason, memory_of, transport
from .wire import gather_objects

MIN_BYTES = 2**23  # of what a rank sends: for less, a dozen driver calls keep the host longer than they save the GPU
MIN_BYTES_IN_GRAPHS = 2**20  # there is no host in these


_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, PeerCopies | str]]
_connected = weakref.WeakKeyDictionary()


def _connect(group: Group, memory: PeerMemory) -> PeerCopies | str:
    """Collective."""
    found = first_reason(gather_objects(copy_machine.why_not(), group))
    if found is not None:
        return found
    machine, reason = None, None
    try:
        machine = CudaMachine(memory)
        reason = machine.check()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    found = first_reason(gather_objects(reason, group))
    if found is not None:
        return found
    assert machine is not None
    return PeerCopies(machine, memory.limit)


def copies_of(group: Group, device: torch.device) -> PeerCopies | str:
    """The group's copies, or why it has none: the same on every rank. Collective the first time."""
    assert group.process_group is not None
    of_group = _connected.get(group.process_group)
    if of_group is None:
        of_group = _connected[group.process_group] = {}
    copies = of_group.get(device)
    if copies is None:
        memory = memory_of(group, device)
        copies = of_group[device] = memory if isinstance(memory, str) else _connect(group, memory)
    return copies


def _captured(group: Group, device: torch.device) -> CapturedCopies | None:
    """The group's copies for CUDA graphs if it has any yet: not collective."""
    assert group.process_group is not None
    copies = _connected.get(group.process_group, {}).get(device)
    return copies.captured if isinstance(copies, PeerCopies) else None


def prepare_for_graphs(group: Group, device: torch.device) -> None:
    """Before a capture, in the steps that warm up, two at least: buffers for the CUDA graph. Collective."""
    if group.size == 1 or device.type != "cuda" or is_capturing() or transport() == "nccl":
        return
    copies = copies_of(group, device)
    if not isinstance(copies, str):
        copies.prepare_for_graphs(lambda: GraphMachine(memory_of(group, device)))  # type: ignore[arg-type]


def _copies_for(x: Tensor, group: Group, sent: Sequence[tuple[int, int]], choice: str) -> PeerCopies | None:
    if choice == "nccl" or group.size == 1 or x.numel() == 0 or (choice == "auto" and not x.is_cuda):
        return None
    if choice == "auto" and x.nbytes < MIN_BYTES_IN_GRAPHS:
        return None
    if x.is_cuda and is_capturing():
        return _captured(group, x.device)
    if choice == "auto" and x.nbytes < MIN_BYTES:
        captured = _captured(group, x.device)
        if captured is not None:  # a graph will copy it
            # none of them is a weight that is gathered ahead
            captured.provide(group.size * max(count for _, count in sent), PER_SIZE - 1)
        return None
    copies = copies_of(group, x.device)
    if not isinstance(copies, str):
        return copies
    if choice == "copy_engine":
        raise RuntimeError(
            f"{TRANSPORT_VARIABLE}=copy_engine, but the {group.size} ranks of tp_group have no peer copies: {copies}. "
            "Set it to auto or nccl on all ranks: the bits are the same"
        )
    return None


class PeerPending(Pending):
    """A result in a lent buffer: to be released."""

    leased = True

    def __init__(self, lease: Lease, received: Tensor, operand: Tensor) -> None:
        super().__init__(received, None, operand)
        self._lease = lease

    def wait(self) -> Tensor:
        self._lease.wait()
        self._operand, self.waited = None, True
        return self._result

    def release(self) -> None:
        self._lease.release()
        self._operand = None


def _start(
    x: Tensor, sent: Sequence[tuple[int, int]], shape: Sequence[int], group: Group, early: bool, choice: str | None
) -> Pending | None:
    copies = _copies_for(x, group, sent, choice or transport())
    if copies is None:
        return None
    x = stored(x)
    lease = copies.start(x, sent, early)
    if lease is None:
        return None
    assert isinstance(copies.machine, CudaMachine)
    return PeerPending(lease, copies.machine.view(lease.index, x.dtype, shape), x)


def start_gather_major(
    local: Tensor, group: Group, *, early: bool = False, choice: str | None = None
) -> Pending | None:
    """Starts gathering every rank's `local` into a rank-major [P, ...local]; None where NCCL is to do it.

    early: on the side, so that what is needed sooner goes past it. choice: what `transport` says, if it was read
    already. The result must be released.

    Raises:
        ValueError, RuntimeError: TP_INVARIANT_TRANSPORT holds something else, or what the group does not have.
    """
    shape = group.size, *local.shape
    return _start(local, [(0, local.nbytes)] * group.size, shape, group, early, choice)


def start_gather_dim(local: Tensor, dim: int, group: Group, *, choice: str | None = None) -> Pending | None:
    """As start_gather_major, concatenated along `dim`; None too where dims before it are larger than one."""
    if not is_first(local, dim):
        return None
    return _start(local, [(0, local.nbytes)] * group.size, whole_shape(local, dim, group), group, False, choice)


def start_exchange_rows(
    x: Tensor, send_sizes: Sequence[int], group: Group, *, early: bool = False, choice: str | None = None
) -> Pending | None:
    """The same: rank q gets rows block q of every rank's x. [sum(send_sizes), C] -> [P, send_sizes[rank], C]."""
    shape = group.size, send_sizes[group.rank], *x.shape[1:]
    row = x.nbytes // max(x.shape[0], 1)
    begins = accumulate(send_sizes, initial=0)
    sent = [(begin * row, size * row) for begin, size in zip(begins, send_sizes, strict=False)]
    return _start(x, sent, shape, group, early, choice)
