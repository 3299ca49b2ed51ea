"""Gathers and exchanges of row blocks, by peer copies where that is faster: which way what goes, and a group's buffers.

copy_protocol.py says how a copy engine moves them, beside GEMMs that hold every SM. NCCL's kernels take SMs, and a GEMM
of one program per SM that runs beside one ends late by the whole collective. Which way is taken is a matter of speed
alone; both move bytes. A CUDA graph holds copies if it was prepared for (`prepare_for_graphs`), else collectives.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.torch_graphs import in_torch_graph
from .collectives import Group, Pending, is_capturing, is_first, stored, whole_shape
from .copy_protocol import PER_CLASS, CapturedCopies, Lease, PeerCopies
from .peer_memory import CudaMachine, GraphMachine, connect, on_this_host

logger = logging.getLogger(__name__)

TRANSPORT_VARIABLE = "TP_INVARIANT_TRANSPORT"
TRANSPORTS = ("auto", "nccl", "copy_engine")
_KEY = os.environ.encodekey(TRANSPORT_VARIABLE)
_CHOICES = {os.fsencode(choice): choice for choice in TRANSPORTS}
MIN_BYTES = 2**23  # of what a rank sends: for less, a dozen driver calls keep the host longer than they save the GPU
MIN_BYTES_IN_GRAPHS = 2**20  # there is no host in these


def transport() -> str:
    """What `TP_INVARIANT_TRANSPORT` asks for, read now; the same on all ranks. Unset is "auto".

        auto          kernels that reach peers' memory (peer_kernels.py), and peer copies for large blocks, where a
                      group's ranks have them; else NCCL, as in CUDA graphs that torch.compile makes, whatever the
                      variable says
        nccl          NCCL (or gloo) for everything
        copy_engine   peer copies for blocks of any size; an error where a group has none

    Raises:
        ValueError: the variable holds anything else.
    """
    if in_torch_graph():
        return "nccl"
    text = os.environ._data.get(_KEY)  # type: ignore[attr-defined]  # a third of what os.environ.get takes
    if text is None:
        return "auto"
    choice = _CHOICES.get(text)
    if choice is None:
        choice = os.fsdecode(text)
        raise ValueError(
            f"{TRANSPORT_VARIABLE}={choice!r} is not understood: set it to one of {', '.join(TRANSPORTS)}, the same on "
            "all ranks, or unset it (auto)"
        )
    return choice


def explain_transport() -> str:
    """What moves large blocks between this host's GPUs and why, as far as one process can tell."""
    try:
        choice = transport()
    except ValueError as error:
        return str(error)
    if choice == "nccl":
        return f"NCCL, as {TRANSPORT_VARIABLE} says"
    return on_this_host()


# --- for a group ----------------------------------------------------------------------------------------------------

_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, PeerCopies | str]]
_connected = weakref.WeakKeyDictionary()


def copies_of(group: Group, device: torch.device) -> PeerCopies | str:
    """The group's PeerCopies, or why it has none: the same on every rank. Collective the first time."""
    assert group.process_group is not None
    of_group = _connected.get(group.process_group)
    if of_group is None:
        of_group = _connected[group.process_group] = {}
    if device not in of_group:
        found = connect(group, device)
        name = f"the group of {group.size} ranks of rank {dist.get_rank()}"
        if isinstance(found, str):
            logger.info("NCCL moves all between %s: no peer copies, as %s", name, found)
            of_group[device] = found
        else:
            logger.info("copy engines move large blocks between %s", name)
            of_group[device] = PeerCopies(*found)
    return of_group[device]


def prepare_for_graphs(group: Group, device: torch.device) -> None:
    """Before a capture, in the steps that warm up, two at least: buffers for the CUDA graph. Collective."""
    known = _connected.get(group.process_group, {}).get(device) if group.process_group is not None else None
    if isinstance(known, PeerCopies) and known.is_prepared:
        return
    choice = transport()
    if choice == "nccl" or group.size == 1 or device.type != "cuda" or is_capturing():
        return
    copies = copies_of(group, device)
    if not isinstance(copies, str):
        copies.prepare_for_graphs(lambda: GraphMachine(group, device))


def _copies_for(x: Tensor, group: Group, sent: Sequence[tuple[int, int]]) -> PeerCopies | None:
    choice = transport()
    if choice == "nccl" or group.size == 1 or x.numel() == 0:
        return None
    least = 0 if choice == "copy_engine" else MIN_BYTES_IN_GRAPHS if x.is_cuda else x.nbytes + 1
    if x.nbytes < least:
        return None
    if x.is_cuda and is_capturing():
        return _captured(group, x.device)
    if choice == "auto" and x.nbytes < MIN_BYTES:
        captured = _captured(group, x.device)
        if captured is not None:  # a graph would
            needed = group.size * max(count for _, count in sent)
            captured.provide(needed, PER_CLASS - 1)  # none of them is a weight that is gathered ahead
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


def _captured(group: Group, device: torch.device) -> CapturedCopies | None:
    assert group.process_group is not None
    known = _connected.get(group.process_group, {}).get(device)
    return known.captured if isinstance(known, PeerCopies) else None


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
    x: Tensor, sent: Sequence[tuple[int, int]], shape: Sequence[int], group: Group, early: bool
) -> Pending | None:
    copies = _copies_for(x, group, sent)
    if copies is None:
        return None
    lease = copies.start(x, sent, early)
    if lease is None:
        return None
    assert isinstance(copies.machine, CudaMachine)
    return PeerPending(lease, copies.machine.view(lease.index, x.dtype, tuple(shape)), x)


def start_gather(local: Tensor, group: Group, *, early: bool = False) -> Pending | None:
    """Starts gathering every rank's `local` into a rank-major [P, ...local]; None where NCCL is to do it.

    `early`: on the side, so that what is needed sooner goes past it. The result must be released.

    Raises:
        ValueError, RuntimeError: TP_INVARIANT_TRANSPORT holds something else, or what the group does not have.
    """
    local, shape = stored(local), (group.size, *local.shape)
    return _start(local, [(0, local.nbytes)] * group.size, shape, group, early)


def start_gather_dim(local: Tensor, dim: int, group: Group) -> Pending | None:
    """As start_gather, concatenated along `dim`; None too where dims before it are larger than one."""
    if not is_first(local, dim):
        return None
    local = stored(local)
    return _start(local, [(0, local.nbytes)] * group.size, whole_shape(local, dim, group), group, False)


def start_exchange_rows(x: Tensor, send_sizes: Sequence[int], group: Group, *, early: bool = False) -> Pending | None:
    """As start_gather: rank q gets rows block q of every rank's x. [sum(send_sizes), C] -> [P, send_sizes[rank], C]."""
    x, shape = stored(x), (group.size, send_sizes[group.rank], *x.shape[1:])
    row = x.nbytes // max(x.shape[0], 1)
    begins = accumulate(send_sizes, initial=0)
    sent = [(begin * row, size * row) for begin, size in zip(begins, send_sizes, strict=False)]
    return _start(x, sent, shape, group, early)
