"""Memory that the ranks of a group can read and write on each other's GPUs, and whether a group has any.

It is torch's symmetric memory, without NVLink's multicast. Kernels (peer_kernels.py) and copy engines (peer_copies.py)
move bytes through it, where `TP_INVARIANT_TRANSPORT` does not say otherwise.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.mode import value_of
from ..core.torch_graphs import in_torch_graph
from ..core.torch_private import symmetric_memory
from ..core.variables import TRANSPORT_VARIABLE, VARIABLES
from .exchange_store import meeting_of
from .group import Group
from .wire import gather_objects

logger = logging.getLogger(__name__)

TRANSPORTS = VARIABLES[TRANSPORT_VARIABLE]
MOST_LOOKS = 1_800_000_000  # of a kernel for what a peer is to write, of about a microsecond each
MEMORY_SHARE = 16  # buffers of copy engines take at most the device's memory divided by this


def transport() -> str:
    """What `TP_INVARIANT_TRANSPORT` asks for, read at each call; the same on all ranks. Unset is "auto".

        auto          kernels that reach peers' memory, and copy engines for large blocks, where a group's ranks have
                      them; else NCCL, as in CUDA graphs that torch.compile makes, whatever the variable says
        nccl          NCCL (or gloo) for everything
        copy_engine   copy engines for blocks of any size; an error where a group has none

    Raises:
        ValueError: the variable holds anything else.
    """
    if in_torch_graph():
        return "nccl"
    choice = value_of(TRANSPORT_VARIABLE)
    if choice is None:
        return "auto"
    if choice not in TRANSPORTS:
        raise ValueError(
            f"{TRANSPORT_VARIABLE}={choice!r} is not understood: set it to one of {', '.join(TRANSPORTS)}, the same on "
            "all ranks, or unset it (auto)"
        )
    return choice


# --- a group's memory -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Shared:
    """A tensor of bytes and its like on all ranks: `addresses` of theirs, as this process sees them. Collective."""

    def __init__(self, own: Tensor, group_name: Any) -> None:
        with _without_multicast():
            self._handle = symmetric_memory().rendezvous(own, group_name)
        self.own = own
        self.addresses: list[int] = list(self._handle.buffer_ptrs)

    def bytes_of(self, rank: int) -> Tensor:
        """The memory of `rank`."""
        of_rank: Tensor = self._handle.get_buffer(rank, (self.own.numel(),), torch.uint8)
        return of_rank


class PeerMemory:
    """What a group has on a device. `limit`: bytes that the buffers of copy engines may take.

    It holds the process group weakly, which it is found by.
    """

    def __init__(self, group: Group, device: torch.device, limit: int) -> None:
        assert group.process_group is not None
        self.rank, self.size, self.device, self.limit = group.rank, group.size, device, limit
        self._process_group, self._name = weakref.ref(group.process_group), meeting_of(group.process_group)

    @property
    def group(self) -> Group:
        return Group(self._process_group(), self.rank, self.size)

    @torch.inference_mode(False)  # others than the first to use it may need gradients
    def share(self, nbytes: int) -> Shared | None:
        """Collective: so many bytes on each rank, zeros, or None where one has not got them."""
        own: Tensor | None = None
        for _ in range(2):
            with contextlib.suppress(RuntimeError):
                # not from the memory pool of symmetric_memory.empty: each buffer begins where its allocation does
                own = symmetric_memory().empty_strided_p2p((nbytes,), (1,), torch.uint8, self.device)
                break
            torch.cuda.empty_cache()  # what torch's allocator holds on to may be what is missing
        if not all(gather_objects(own is not None, self.group)):
            return None
        assert own is not None
        own.zero_()
        torch.cuda.current_stream(self.device).synchronize()
        shared = Shared(own, self._name)
        gather_objects(None, self.group)  # nobody writes before all are zero
        return shared

    def check(self) -> str | None:
        """Collective: whether what this rank's peers write arrives; else what does not."""
        shared = self.share(8 * self.size)
        if shared is None:
            return "a rank has no memory left"
        number = torch.full((1,), self.rank + 1, dtype=torch.int32, device=self.device)
        for peer in range(self.size):
            copied, written = shared.bytes_of(peer).view(torch.int32).view(2, self.size)[:, self.rank]
            copied.copy_(number[0])
            written.fill_(self.rank + 1)
        torch.cuda.synchronize(self.device)
        gather_objects(None, self.group)
        arrived = shared.own.view(torch.int32).view(2, self.size).tolist()
        return None if arrived == [[*range(1, self.size + 1)]] * 2 else "writes of peers did not arrive"


# --- whether a group has it -----------------------------------------------------------------------------------------


def why_not(device: torch.device) -> str | None:
    """Why this process has no peer memory on `device`, by what it can tell alone; None: it may have it."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the tensors are on {device.type}" if device.type != "cuda" else "torch is not built for CUDA"
    try:
        symmetric_memory()
    except ImportError as error:
        return f"torch has no symmetric memory here ({error})"
    return None


@cache
def _host() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _unreachable(uuids: list[str], device: torch.device) -> str | None:
    own = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for uuid in uuids:
        peer = own.get(uuid)  # one that this process does not see shows in the check
        if peer is not None and peer != device.index and not torch.cuda.can_device_access_peer(device.index, peer):
            return f"{device} cannot reach the memory of cuda:{peer}"
    return None


def first_reason(reasons: list[str | None]) -> str | None:
    return next((f"{reason} (rank {rank})" for rank, reason in enumerate(reasons) if reason is not None), None)


def _connect(group: Group, device: torch.device) -> PeerMemory | str:
    """Collective: the group's memory, or why it has none."""
    reason, uuid, total = why_not(device), "", 0
    if reason is None:
        properties = torch.cuda.get_device_properties(device)
        uuid, total = str(properties.uuid), properties.total_memory
    everyone: list[Any] = gather_objects((reason, _host(), uuid, total), group)
    reasons, hosts, uuids, totals = map(list, zip(*everyone, strict=True))
    found = first_reason(reasons)
    if found is None and len(set(hosts)) > 1:
        found = "its ranks are on several hosts"
    overlapping = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"  # torch's own, for its tests
    if found is None and len(set(uuids)) < group.size and not overlapping:
        found = "several of its ranks share a device"
    if found is not None:
        return found
    found = first_reason(gather_objects(_unreachable(uuids, device), group))
    if found is not None:
        return found
    memory = PeerMemory(group, device, min(totals) // MEMORY_SHARE)
    try:
        reason = memory.check()
    except RuntimeError as error:
        reason = f"symmetric memory failed: {str(error).splitlines()[0]}"
    return first_reason(gather_objects(reason, group)) or memory


_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, PeerMemory | str]]
_connected = weakref.WeakKeyDictionary()


def memory_of(group: Group, device: torch.device) -> PeerMemory | str:
    """The group's PeerMemory, or why it has none: the same on every rank. Collective the first time."""
    assert group.process_group is not None
    of_group = _connected.setdefault(group.process_group, {})
    if device not in of_group:
        memory = of_group[device] = _connect(group, device)
        name = f"the group of {group.size} ranks of rank {dist.get_rank()}"
        if isinstance(memory, str):
            logger.info("NCCL moves all between %s: no peer copies, as %s", name, memory)
        else:
            logger.info("kernels and copy engines move large blocks between %s", name)
    return of_group[device]
